"""DeepSeek-V3.2 and V4 on the device: transformers' greedy tokens in float32, whatever happens to the memory; with smaller pages, always the same ones.

Attention is the kernels in Triton, as those in Gluon are for half precision, and decode steps run in graphs.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.test_families import Run, compare, run
from helpers.checkpoints_compressed import make_compressed_checkpoint
from helpers.checkpoints_drafters import make_module
from helpers.checkpoints_latent import make_latent_checkpoint
from helpers.device import collect, counted_graphs, device_llm
from helpers.engine_oracle import prompt
from pagerunner import LLM

pytest.importorskip("transformers")

LIMITS: dict[str, Any] = {
    "max_num_seqs": 12,
    "max_num_batched_tokens": 400,
    "max_model_len": 256,
    "dtype": "float32",
    "poison_fresh_pages": True,
    "skip_tokenizer_init": True,
    "cudagraph_capture_sizes": [1, 4, 12],
}
EDGES = {  # slots of 4 and of 32, pages, and what is chosen or in a window: prompts end around each, and tokens pass it
    "deepseek_v32": (4, 17, 64, 128),
    "deepseek_v4": (4, 20, 28, 32, 64, 128),
}
CONDITIONS: dict[str, dict[str, Any]] = {
    "at once": {},
    "in pieces": {"max_num_batched_tokens": 24, "max_in_flight": 2},
    "without graphs, other pages": {"enforce_eager": True, "block_size": 48},
    "too few pages": {"max_num_batched_tokens": 48, "max_model_len": 164, "max_in_flight": 2},
}
FEW_PAGES = {"deepseek_v32": {"auto": 22}, "deepseek_v4": {"auto": 7, "bfloat16": 6, "fp8": 6}}
MOST_TIES = 1
PAGES = ("bfloat16", "fp8")
LOSS = 2e-2  # of rounded pages: sums in another order may round a latent to its neighbour, so nearer log-probabilities have no order


@functools.cache
def reference_of(path: Path) -> Any:
    """transformers' model of a checkpoint, on the CPU."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def prompts(family: str) -> list[list[int]]:
    """Some share their first 140 tokens."""
    lengths = sorted({edge + more for edge in EDGES[family] for more in (-4, -1, 0, 1) if edge + more > 0})
    return [prompt(length, length) for length in lengths] + [
        prompt(2, 140) + prompt(length, length) for length in (1, 9)
    ]


@functools.lru_cache(maxsize=512)
@torch.inference_mode()
def _after(path: Path, tokens: tuple[int, ...], first: int) -> tuple[list[int], list[float], list[float]]:
    """Of each place from `first` on: the best token, its log-probability, and how much worse the second best is."""
    found = reference_of(path)(torch.tensor([tokens]), use_cache=False).logits[0, first:].float().log_softmax(-1)
    best = found.topk(2, -1)
    return best.indices[:, 0].tolist(), best.values[:, 0].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist()


def of_transformers(path: Path, texts: list[list[int]], found: Run) -> Run:
    """What is the best token behind each text, and behind what `found` has of its tokens."""
    made = [_after(path, (*text, *own[:-1]), len(text) - 1) for text, own in zip(texts, found.tokens, strict=True)]
    return Run(*([one[part] for one in made] for part in range(3)))


def settle(name: str, ties: list[str], most: int = MOST_TIES) -> None:
    for tie in ties:
        warnings.warn(f"{name}: {tie}, and the device took the other", stacklevel=2)
    assert len(ties) <= most, ties


@pytest.fixture(scope="module")
def lively(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a family to a checkpoint of it."""
    directory = tmp_path_factory.mktemp("lively")

    def make(family: str) -> Path:
        if family == "deepseek_v4":
            return make_compressed_checkpoint(directory)[0]
        return make_latent_checkpoint(directory, family, seed=6)[0]

    return functools.cache(make)


def started(path: Path, family: str, condition: str, **options: Any) -> LLM:
    few = FEW_PAGES[family].get(options.get("kv_cache_dtype", "auto"), FEW_PAGES[family]["auto"])
    pages = {"num_gpu_blocks_override": few} if condition == "too few pages" else {}
    return device_llm(path, **LIMITS | CONDITIONS[condition] | pages | options)


def check_memory(llm: LLM, condition: str) -> None:
    """That the condition came about."""
    stats = llm.stats()
    if condition == "too few pages":
        assert stats.preemptions_total, "some were computed again"
    elif condition == "at once":
        assert stats.prefix_hits_total >= 128


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("family", EDGES)
def test_tokens_are_transformers(lively: Any, family: str, condition: str) -> None:
    """The second time prefixes are found."""
    path, texts, ties = lively(family), prompts(family), []
    with counted_graphs() as graphs:
        llm = started(path, family, condition)
        for _ in range(2):
            found = run(llm, texts, 0)
            ties += compare(found, of_transformers(path, texts, found))
    assert bool(graphs.replays) == ("without graphs" not in condition)
    check_memory(llm, condition)
    settle(f"{family}, {condition}", ties)


@pytest.mark.parametrize("family", EDGES)
def test_sleep_changes_no_token(lively: Any, family: str) -> None:
    path, texts, ties = lively(family), prompts(family), []
    with counted_graphs() as graphs:
        llm = started(path, family, "at once", enable_sleep_mode=True)
        before = run(llm, texts, 0)
        captures = graphs.captures
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            found = run(llm, texts, 0)
            assert (found.tokens, found.logprobs) == (before.tokens, before.logprobs), f"level {level}"
    assert graphs.captures == captures > 0
    ties += compare(before, of_transformers(path, texts, before))
    settle(f"{family}, asleep", ties)


@pytest.mark.parametrize("family", EDGES)
def test_drafts_change_no_token(tmp_path: Path, family: str) -> None:
    """Of the model's own module, in graphs, whole and in pieces."""
    path, texts, ties = make_module(tmp_path, family), prompts(family), []
    drafts = {"method": "mtp", "num_speculative_tokens": 2, "num_speculative_tokens_per_batch_size": [[1, 12, 2]]}
    for condition in ("at once", "in pieces"):
        with counted_graphs() as graphs:
            llm = started(path, family, condition, speculative_config=drafts)
            for _ in range(2):
                found = run(llm, texts, 0)
                ties += compare(found, of_transformers(path, texts, found))
        counts = llm.stats().spec
        assert counts is not None and counts.num_draft_tokens > counts.num_accepted_tokens
        assert counts.num_accepted_tokens > 50 or family == "deepseek_v4", "whose module is random"
        assert any(key.drafts == 2 for key in graphs.replays)
        del llm
        collect()
    settle(f"{family}, drafts", ties)


@pytest.mark.parametrize("pages", PAGES)
@pytest.mark.parametrize("family", EDGES)
def test_rounded_pages_give_the_same_tokens_whatever_happens(lively: Any, family: str, pages: str) -> None:
    """Those of prompts that are computed one by one, whole and without a prefix that is found."""
    path, texts, ties = lively(family), prompts(family), []
    alone = {"max_num_seqs": 1, "cudagraph_capture_sizes": [1], "enable_prefix_caching": False}
    llm = started(path, family, "at once", kv_cache_dtype=pages, **alone)
    expected = run(llm, texts, 2)
    for condition in CONDITIONS:
        if condition == "without graphs, other pages":
            continue
        del llm
        collect()
        llm = started(path, family, condition, kv_cache_dtype=pages, enable_sleep_mode=condition == "in pieces")
        for level in (0, 1, 2) if condition == "in pieces" else (0, 0):
            if level:
                llm.sleep(level)
                llm.wake_up()
            ties += compare(run(llm, texts, 0), expected, tie=LOSS, error=LOSS)
        check_memory(llm, condition)
    settle(f"{family}, {pages}", ties, most=3)
