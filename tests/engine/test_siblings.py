"""n > 1: every sibling gets the tokens that it would get alone, though all of them share one computed prompt."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_hybrid import make_hybrid_checkpoint
from helpers.checkpoints_latent import make_latent_checkpoint
from helpers.checkpoints_window import make_window_checkpoint
from helpers.effort import by_days
from helpers.once import made_once
from pagerunner import LLM, SamplingParams
from pagerunner.memory.grant import Grant
from pagerunner.memory.holdings import Holdings

pytest.importorskip("transformers")

MAKERS: dict[str, Callable[[Path], Path]] = {
    "qwen3": lambda path: make_checkpoint(path, "qwen3"),
    "gemma-3": lambda path: make_window_checkpoint(path, "gemma3_text"),
    "gpt-oss": lambda path: make_window_checkpoint(path, "gpt_oss"),
    "qwen3-next": lambda path: make_hybrid_checkpoint(path, "qwen3_next_dense")[0],
    "deepseek-v2-lite": lambda path: make_latent_checkpoint(path, "deepseek_v2", first_k_dense_replace=3)[0],
}
CONDITIONS: dict[str, dict[str, Any]] = {
    "two-in-flight-poisoned": {"max_in_flight": 2, "poison_fresh_pages": True},
    "no-caching-page-48": {"enable_prefix_caching": False, "block_size": 48, "max_in_flight": 2},
    "page-1-budget-7": {"block_size": 1, "max_num_batched_tokens": 7, "num_gpu_blocks_override": 400},
    "tight": {"num_gpu_blocks_override": 14, "poison_fresh_pages": True, "max_in_flight": 2},
}
LENGTHS = (5, 16, 41, 64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    return made_once(tmp_path_factory, MAKERS)


def prompts() -> list[dict[str, Any]]:
    ids = random.Random(5)
    return [{"prompt_token_ids": [ids.randrange(4, 500) for _ in range(length)]} for length in LENGTHS]


def sampling(seed: int, n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, n=n, max_tokens=24, ignore_eos=True, detokenize=False)


def together(path: str, **options: Any) -> list[list[list[int]]]:
    llm = LLM(path, max_model_len=128, skip_tokenizer_init=True, **options)
    outputs = llm.generate(prompts(), sampling(7, n=3), use_tqdm=False)
    return [[list(one.token_ids) for one in output.outputs] for output in outputs]


@functools.cache
def alone(path: str, **options: Any) -> list[list[list[int]]]:
    llm = LLM(path, max_model_len=128, skip_tokenizer_init=True, enable_prefix_caching=False, **options)
    runs = [llm.generate(prompts(), sampling(seed), use_tqdm=False) for seed in (7, 8, 9)]
    return [[list(run[number].outputs[0].token_ids) for run in runs] for number in range(len(LENGTHS))]


@pytest.mark.parametrize(("family", "condition"), by_days(MAKERS, CONDITIONS))
def test_siblings_get_the_tokens_of_lone_requests(
    checkpoint: Callable[[str], str], family: str, condition: str
) -> None:
    path = checkpoint(family)
    assert together(path, **CONDITIONS[condition]) == alone(path)


@pytest.mark.parametrize(
    ("family", "condition"), by_days(["qwen3", "gemma-3"], ["two-in-flight-poisoned", "no-caching-page-48"])
)
def test_fp8_pages_are_copied_with_their_scales(checkpoint: Callable[[str], str], family: str, condition: str) -> None:
    path = checkpoint(family)
    assert together(path, kv_cache_dtype="fp8", **CONDITIONS[condition]) == alone(path, kv_cache_dtype="fp8")


def test_all_tokens_of_the_prompt_but_the_last_are_shared(checkpoint: Callable[[str], str]) -> None:
    llm = LLM(checkpoint("gemma-3"), max_model_len=128, skip_tokenizer_init=True)
    llm.generate(prompts()[2], sampling(1, n=4), use_tqdm=False)
    stats = llm.stats()
    assert (stats.prefix_queries_total, stats.prefix_hits_total) == (4 * 41, 3 * 40)


@pytest.mark.parametrize(("n", "most"), [(1, 1), (2, 3)])
def test_without_caching_only_siblings_hold_a_snapshot(checkpoint: Callable[[str], str], n: int, most: int) -> None:
    """A request without siblings has nobody who could go on from its prompt. Its state is the only page of that group."""
    llm = LLM(checkpoint("qwen3-next"), max_model_len=128, skip_tokenizer_init=True, enable_prefix_caching=False)
    states = [number for number, group in enumerate(llm.memory_plan.groups) if group.kind == "recurrent"]
    held = [llm.stats().groups[states[0]].pages_in_use for _ in llm.stream(prompts()[2], sampling(1, n=n))]
    assert (max(held), llm.stats().prefix_queries_total > 0) == (most, n > 1)


def test_writing_into_the_shared_page_would_be_noticed(
    checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(self: Holdings, grant: Grant, group: int) -> list[int]:
        return []

    path = checkpoint("qwen3")
    expected = alone(path)
    monkeypatch.setattr(Holdings, "borrowed_to_copy", nothing)
    assert together(path) != expected


def test_a_stream_can_be_asked_for_its_pages_midway(checkpoint: Callable[[str], str]) -> None:
    llm = LLM(checkpoint("gemma-3"), max_model_len=128, skip_tokenizer_init=True)
    assert llm.memory_state()["requests"] == []
    stream = llm.stream(prompts()[2], sampling(1, n=2))
    for _ in range(6):
        next(stream)
    state = llm.memory_state()
    assert len(state["requests"]) == 2 and state["groups"][0]["shared"] > 0
    assert [group["name"] for group in state["groups"]] == [group.name for group in llm.memory_plan.groups]
    stream.close()
