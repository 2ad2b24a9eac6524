"""The number of drafts changes from plan to plan, and tokens stay those without drafts: random engines, requests and memory."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

from helpers.effort import TEST_DAY, effort
from helpers.traffic import AnyLength
from pagerunner import LLM, SamplingParams
from pagerunner.engine.startup import build as build_module
from pagerunner.sched.stats import SpecCounts
from pagerunner.types import StructuredOutputsParams

LENGTH = 128
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ngram": ("demo", {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}),
    "suffix": (
        "demo",
        {"method": "suffix", "suffix_decoding_min_token_prob": 0.0, "suffix_decoding_max_spec_factor": 4},
    ),
    "head": ("demo", {"method": "eagle3", "model": "demo-eagle3"}),
    "module": ("demo-hybrid", {"method": "mtp"}),
}
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "n": 2},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0.7, "logprobs": 2, "min_tokens": 5, "ignore_eos": False},
    {"stop": ["e", "1"], "ignore_eos": False},
    {"bad_words": ["the", "1 2"]},
    {"structured_outputs": StructuredOutputsParams(regex="(ab|cd){3,9}"), "ignore_eos": False},
]
PAGES = {"demo": 900_000, "demo-hybrid": 600_000}  # bytes, for one long request and little more


@functools.cache
def plain(model: str) -> LLM:
    return LLM(model, max_model_len=LENGTH, max_num_seqs=8, kv_cache_memory_bytes=2**25, use_tqdm=False)


def requests(rng: random.Random) -> tuple[list[Any], list[SamplingParams]]:
    prompts, params = [], []
    for number in rng.sample(range(len(KINDS)), 6):
        base = [rng.randrange(60, 90) for _ in range(rng.randrange(2, 9))]
        prompt = [9, *(base * LENGTH)[: rng.choice((1, 5, 16, 31, 60, 90))]]
        usual = {"temperature": 0.0, "seed": rng.randrange(99), "ignore_eos": True}
        prompts.append({"prompt_token_ids": prompt})
        params.append(SamplingParams(**usual | {"max_tokens": rng.choice((5, 9, 30))} | KINDS[number]))
    return prompts, params


def answers(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> list[Any]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        (one.token_ids, one.text, one.finish_reason, one.stop_reason, [sorted(place) for place in one.logprobs or ()])
        for output in outputs
        for one in output.outputs
    ]


@pytest.mark.parametrize("chosen", ["at random", "by what pays"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_those_without_drafts(monkeypatch: pytest.MonkeyPatch, drafter: str, chosen: str) -> None:
    seed = f"{TEST_DAY} {drafter} {chosen}"
    rng = random.Random(seed)
    for case in range(effort(1, 12)):
        model, asked = DRAFTERS[drafter]
        plain(model)
        drafts, scarce = rng.choice((1, 3, 8, 16)), rng.random() < 0.7
        if chosen == "at random":
            monkeypatch.setattr(
                build_module, "_draft_length", lambda *_, most=drafts: AnyLength(most, rng.randrange(99))
            )
        limits = {
            "max_num_seqs": rng.choice((2, 4)),
            "max_num_batched_tokens": rng.choice((8, 24, 64)),
            "max_in_flight": rng.choice((1, 2, 3)),
            "kv_cache_memory_bytes": PAGES[model] if scarce else 2**25,
        }
        config = asked | {"num_speculative_tokens": drafts}
        llm = LLM(
            model, max_model_len=LENGTH, poison_fresh_pages=True, use_tqdm=False, speculative_config=config, **limits
        )
        for _ in range(2):  # the second time prompts are found
            prompts, params = requests(rng)
            wanted = answers(plain(model), prompts, params)
            assert answers(llm, prompts, params) == wanted, (seed, case, drafts, limits)
        counts: SpecCounts | None = llm.stats().spec
        assert counts is not None and (chosen != "at random" or counts.num_draft_tokens > 0)
