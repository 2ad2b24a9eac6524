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
    "smaller model": ("demo-hybrid", {"method": "draft_model", "model": "demo"}),
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
PAGES = {
    "module": 600_000,
    "smaller model": 1_100_000,
}  # bytes, for one long request and little more; of the others 900,000


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


def answers(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> dict[int, Any]:
    return dict(enumerate(llm.generate(prompts, params, use_tqdm=False)))


def answers_with_trouble(
    llm: LLM, prompts: list[Any], params: list[SamplingParams], rng: random.Random
) -> dict[int, Any]:
    """By number, of two thirds of the streams. The others are left in the middle, and then the engine sleeps, with or without its weights."""
    streams = [llm.stream(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    last: list[Any] = [next(stream) for stream in streams]
    for _ in range(rng.randrange(6)):
        number = rng.randrange(len(streams))
        last[number] = next(streams[number], last[number])
    for stream in streams[::3]:
        stream.close()
    llm.sleep(rng.randrange(3), mode="keep")
    llm.wake_up()
    return {number: [last[number], *stream][-1] for number, stream in enumerate(streams) if number % 3}


def said(output: Any) -> list[Any]:
    return [
        (one.token_ids, one.text, one.finish_reason, one.stop_reason, [sorted(place) for place in one.logprobs or ()])
        for one in output.outputs
    ]


def is_tie(model: str, output: Any, other: Any, params: SamplingParams) -> bool:
    """Whether the first token that differs is as likely as the other one, but for how sums are rounded."""
    tokens, others = output.outputs[0].token_ids, other.outputs[0].token_ids
    place = next((at for at, (one, two) in enumerate(zip(tokens, others, strict=False)) if one != two), None)
    if place is None or params.temperature:
        return False
    prompt = {"prompt_token_ids": [*output.prompt_token_ids, *tokens[:place]]}
    asked = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    found = plain(model).generate(prompt, asked, use_tqdm=False)[0].outputs[0].logprobs[0]
    both = [found[token].logprob for token in (tokens[place], others[place]) if token in found]
    return len(both) == 2 and abs(both[0] - both[1]) < 1e-4


@pytest.mark.days(3)
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
            "kv_cache_memory_bytes": PAGES.get(drafter, 900_000) if scarce else 2**25,
        }
        config = asked | {"num_speculative_tokens": drafts}
        llm = LLM(
            model, max_model_len=LENGTH, poison_fresh_pages=True, use_tqdm=False, enable_sleep_mode=True, speculative_config=config, **limits
        )  # fmt: skip
        for trouble in (False, True, False):  # prompts come again, and are found unless the engine has slept
            prompts, params = requests(rng)
            wanted = plain(model).generate(prompts, params, use_tqdm=False)
            found = answers_with_trouble(llm, prompts, params, rng) if trouble else answers(llm, prompts, params)
            for number, output in found.items():
                if said(output) != said(wanted[number]) and not is_tie(model, output, wanted[number], params[number]):
                    assert said(output) == said(wanted[number]), (seed, case, drafts, limits, trouble, number)
        counts: SpecCounts | None = llm.stats().spec
        assert counts is not None and (chosen != "at random" or counts.num_draft_tokens > 0)
