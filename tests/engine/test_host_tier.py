"""Pages in host memory: tokens are those of an engine without it, for every kind of memory, while few pages fit on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from helpers.effort import by_days
from helpers.families import MAKERS
from helpers.once import made_once
from pagerunner import LLM, SamplingParams
from pagerunner.config import EngineArgs
from pagerunner.engine.startup.resolve import resolve

pytest.importorskip("transformers")

# full, window, chunks, recurrent state of three kinds, latents, latents with an indexer, compressed
KINDS = ("qwen3", "gpt_oss", "llama4_text", "qwen3_next", "bamba", "deepseek_v2", "deepseek_v32", "deepseek_v4")
PROMPTS = [[(7 * i + 3 * j * (i + 1)) % 490 + 4 for j in range(130 + 8 * i)] for i in range(8)]
LONGER = [[*prompt, 9, 9] for prompt in PROMPTS]
ROUNDS = (PROMPTS, LONGER)
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
TIER = {"kv_offloading_size": 0.06}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    return made_once(tmp_path_factory, MAKERS)


def engine(path: str, **options: Any) -> LLM:
    """An engine whose pages hold two to three of the prompts."""
    limits = {
        "max_model_len": 256,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 64,
        "skip_tokenizer_init": True,
    } | options
    plan = resolve(EngineArgs(model=path, device="cpu", kv_cache_memory_bytes=2_000_000, **limits)).plan
    pages = int(2.6 * plan.request_bytes(256))
    return LLM(path, kv_cache_memory_bytes=pages, poison_fresh_pages=True, use_tqdm=False, **limits)


def run(llm: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Tokens, and how many tokens of each prompt were found."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS, use_tqdm=False)
    assert not any(output.error for output in outputs)
    return [list(output.outputs[0].token_ids) for output in outputs], [output.num_cached_tokens for output in outputs]


def nothing_held(llm: LLM) -> None:
    """Nothing is under way, and no page is in use."""
    scheduler = llm._core._scheduler
    while llm._core.has_work:
        llm._core.step()
    scheduler.manager.check_integrity()
    assert not any(scheduler.manager.pool.used) and not scheduler.tiers.busy
    scheduler.tiers.host.pool.check()
    assert not any(scheduler.tiers.host.pool.used)


@pytest.mark.parametrize(("family", "dtype"), by_days(KINDS, ("auto", "fp8", "bfloat16")))
def test_tokens_are_those_of_an_engine_without_host_memory(
    checkpoint: Callable[[str], str], family: str, dtype: str
) -> None:
    path = checkpoint(family)
    without, tiered = engine(path, kv_cache_dtype=dtype), engine(path, kv_cache_dtype=dtype, **TIER)
    wanted = [run(without, prompts) for prompts in ROUNDS]
    found = [run(tiered, prompts) for prompts in ROUNDS]
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    stats = tiered.stats().tier
    assert stats is not None and stats.load_bytes_total > 0 and stats.failed_total == 0
    assert sum(found[1][1]) > sum(wanted[1][1]), "prompts come back from host memory"
    nothing_held(tiered)
