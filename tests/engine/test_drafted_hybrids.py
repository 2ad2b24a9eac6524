"""Models with recurrent layers draft: tokens and prefix hits are those without drafts, whatever becomes of pages meanwhile."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import write_tokenizer
from helpers.checkpoints_compressed import make_compressed_checkpoint
from helpers.checkpoints_hybrid import make_hybrid_checkpoint
from helpers.compiler import needs_compiler
from helpers.effort import TEST_DAY, effort, share_of_the_day
from helpers.recount import recount
from pagerunner import LLM, SamplingParams
from pagerunner.config import EngineArgs
from pagerunner.demo import demo_path
from pagerunner.engine.startup.resolve import resolve

pytest.importorskip("transformers")

FAMILIES = ["qwen3_next", "qwen3_5_windowed", "bamba", "deepseek_v4"]
DRAFTS = 3
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
ALWAYS = {"num_speculative_tokens_per_batch_size": [[1, 64, DRAFTS]]}  # not as many as pay
TIER = {"kv_offloading_size": 0.06}
PRESSURE = {"max_num_batched_tokens": 40, "max_num_seqs": 5, "max_in_flight": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a family to its checkpoint's directory."""

    def make(family: str) -> str:
        directory = tmp_path_factory.mktemp("drafted")
        if family == "demo":
            return str(demo_path("demo-hybrid"))
        path: Path
        if family == "deepseek_v4":
            path, _ = make_compressed_checkpoint(directory, seed=3)
        else:
            path, _ = make_hybrid_checkpoint(directory, family, seed=3)
        write_tokenizer(path, 512, add_bos=False)
        return str(path)

    return functools.cache(make)


def prompts(seed: int, count: int) -> list[list[int]]:
    """Texts that repeat themselves, some with the same beginning, so that there is something to draft and to find."""
    rand = random.Random(seed)
    shared = [rand.randrange(4, 60) for _ in range(20)]
    made = []
    for _ in range(count):
        own = [rand.randrange(4, 60) for _ in range(rand.randint(2, 12))]
        made.append((shared if rand.random() < 0.5 else []) + own * rand.randint(1, 6))
    return made


def run(path: str, new_tokens: int, speculation: dict[str, Any] | None, **options: Any) -> tuple[Any, LLM]:
    """Tokens of two turns of some conversations, and how many of each prompt were found; greedy and seeded."""
    llm = LLM(path, poison_fresh_pages=True, skip_tokenizer_init=True, speculative_config=speculation, **options)
    params = [
        SamplingParams(
            temperature=0.7 * (at % 2), seed=at, max_tokens=new_tokens - at, ignore_eos=True, detokenize=False
        )
        for at in range(6)
    ]
    turn, found = prompts(TEST_DAY, 6), []
    for _ in range(2):
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in turn], params, use_tqdm=False)
        assert not any(output.error for output in outputs)
        made = [list(output.outputs[0].token_ids) for output in outputs]
        found.append((made, [output.num_cached_tokens for output in outputs], list(map(len, turn))))
        turn = [prompt + tokens + [5, 6] for prompt, tokens in zip(turn, made, strict=True)]
    return found, llm


def same(path: str, new_tokens: int, *, hits: bool = True, **options: Any) -> LLM:
    """Run with and without drafts; the engine with drafts, in which all pages are free."""
    wanted, _ = run(path, new_tokens, None, **options)
    found, llm = run(path, new_tokens, NGRAM | ALWAYS, **options)
    assert [made for made, *_ in found] == [made for made, *_ in wanted]
    if hits:
        assert found[0][1] == wanted[0][1]
        for mine, theirs, length in zip(found[1][1], wanted[1][1], found[1][2], strict=True):
            # the last drafts of a text are in the journal when it ends: its state hasn't come by there
            assert mine == theirs or (mine < theirs and length - 2 - 1 - theirs < DRAFTS)
    assert llm.stats().spec.num_draft_tokens > 0
    manager = llm._core._scheduler.manager
    recount(manager)
    assert not any(manager.pool.used)
    return llm


@pytest.mark.parametrize("family", [FAMILIES[at] for at in share_of_the_day(4, 4)])
def test_tokens_and_hits_are_those_without_drafts(checkpoint: Any, family: str) -> None:
    same(checkpoint(family), effort(50, 70), max_num_batched_tokens=64)


def test_the_demo_model_accepts_drafts_and_says_the_same(checkpoint: Any) -> None:
    counts = same(checkpoint("demo"), 60).stats().spec
    assert sum(counts.accepted[1:]) > 20, "drafts of texts that repeat themselves are right sometimes"


@pytest.mark.days(2)
@pytest.mark.parametrize("tier", [{}, TIER], ids=["no tier", "host memory"])
def test_a_pool_that_is_too_small(checkpoint: Any, tier: dict[str, Any]) -> None:
    path = checkpoint(FAMILIES[TEST_DAY // 2 % 4])
    limits = {"max_model_len": 300} | PRESSURE | tier
    args = EngineArgs(model=path, device="cpu", speculative_config=NGRAM, kv_cache_memory_bytes=4_000_000, **limits)
    pages = int(2.1 * resolve(args).plan.request_bytes(300))
    stats = same(path, 60, hits=False, kv_cache_memory_bytes=pages, **limits).stats()
    assert stats.preemptions_total or sum(group.evictions for group in stats.groups)


@needs_compiler
def test_drafts_come_and_go_and_steps_without_any_are_recorded(checkpoint: Any) -> None:
    path, options = checkpoint("demo"), {"max_model_len": 256, "max_num_seqs": 4}
    wanted, _ = run(path, 50, None, **options)
    few = {"num_speculative_tokens_per_batch_size": [[1, 2, DRAFTS], [3, 64, 0]]}
    found, llm = run(path, 50, NGRAM | few, **options)
    assert [made for made, *_ in found] == [made for made, *_ in wanted]
    steps = llm._core._executor._runner._recorded
    assert steps.recorded == steps.steps > 20 and llm.stats().spec.num_accepted_tokens > 0
