"""Drafts that the host makes, in a whole engine: tokens are those without drafts, with plans in flight and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from helpers.effort import share_of_the_day
from helpers.families import MAKERS
from helpers.once import made_once
from pagerunner import LLM, SamplingParams
from pagerunner.demo import demo_path
from pagerunner.sched.stats import SpecCounts
from pagerunner.types import StructuredOutputsParams

QUESTIONS = ["What is 127 + 58?", "Sort these numbers: 71, 12, 94, 38, 55.", "What is 12 + 30?", "Hello, who are you?"]
CHATS: list[Any] = [[{"role": "user", "content": question}] for question in QUESTIONS]
PARAMS = SamplingParams(temperature=0.7, seed=5, max_tokens=40)
FIXED = {"method": "suffix", "num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [[1, 64, 4]]}


def engine(**options: Any) -> LLM:
    return LLM(str(demo_path()), **{"num_gpu_blocks_override": 256, "max_num_seqs": 4, "use_tqdm": False} | options)


def answers(llm: LLM, chats: list[Any] = CHATS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.chat(chats, PARAMS, use_tqdm=False)]


def counts(llm: LLM) -> SpecCounts:
    spec = llm.stats().spec
    assert spec is not None
    return spec


@pytest.mark.parametrize("in_flight", [1, 2])
def test_tokens_are_those_without_drafts_and_steps_are_fewer(in_flight: int) -> None:
    plain = engine(max_in_flight=in_flight)
    drafted = engine(max_in_flight=in_flight, speculative_config=FIXED)
    assert plain.stats().spec is None
    for rounds in range(1, 4):
        assert answers(drafted) == answers(plain)
        assert counts(drafted).num_accepted_tokens >= 12 * (rounds - 1), "answers come again"
    assert drafted.stats().steps_total < 0.8 * plain.stats().steps_total
    assert len(counts(drafted).accepted) == 5 and counts(drafted).accepted[4] > 0


def test_a_request_with_a_salt_has_nothing_to_do_with_others() -> None:
    llm = engine(speculative_config=FIXED)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    said, accepted = [], []
    for salt in ("a", "b", "", "", "a"):
        prompt = {"prompt_token_ids": [9, *range(60, 90)], "cache_salt": salt}
        before = counts(llm).num_accepted_tokens
        said.append(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)
        accepted.append(counts(llm).num_accepted_tokens - before)
    assert all(tokens == said[0] for tokens in said)
    own, _, _, again, _ = accepted
    assert accepted == [own, own, own, again, own], "without a salt, too, nothing is known of answers with one"
    assert again > own, "an answer without a salt is"


def test_preemption_stops_siblings_and_grammars_change_no_token() -> None:
    prompts = [[9, *range(60 + i, 90 + i)] * 2 for i in range(5)]
    kinds = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(
            temperature=1.0, seed=1, n=2, max_tokens=30, ignore_eos=True, logprobs=1, repetition_penalty=1.2
        ),
        SamplingParams(temperature=0, max_tokens=40, stop=["e", "1"], min_tokens=3),
        SamplingParams(temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="(ab|cd){3,9}")),
        SamplingParams(temperature=0.8, seed=4, top_p=0.9, max_tokens=33, ignore_eos=True),
    ]
    found, states = [], []
    for config in (None, FIXED):
        llm = engine(max_in_flight=2, speculative_config=config, num_gpu_blocks_override=13, max_model_len=160)
        for _ in range(2):
            outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], kinds, use_tqdm=False)
            found.append([(one.token_ids, one.text, one.finish_reason) for output in outputs for one in output.outputs])
        states.append(llm.stats())
    assert found[:2] == found[2:]
    assert states[1].preemptions_total > 0 and counts(llm).num_accepted_tokens > 30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    pytest.importorskip("transformers")
    return made_once(tmp_path_factory, MAKERS)


@pytest.mark.parametrize("family", [list(MAKERS)[number] for number in share_of_the_day(len(MAKERS), 8)])
def test_every_family_has_its_tokens(checkpoint: Callable[[str], str], family: str) -> None:
    prompts = [{"prompt_token_ids": [(7 * i + 3 * j * (i + 1)) % 40 + 4 for j in range(40 + 8 * i)]} for i in range(5)]
    kinds = [
        SamplingParams(temperature=temperature, seed=3, max_tokens=30, ignore_eos=True, detokenize=False)
        for temperature in (0.0, 1.0, 0.0, 0.7, 1.0)
    ]
    found = []
    for config in (None, FIXED | {"suffix_decoding_min_token_prob": 0.0}):
        llm = LLM(
            checkpoint(family), max_model_len=160, max_num_seqs=3, max_num_batched_tokens=48, kv_cache_memory_bytes=3_000_000, max_in_flight=2,
            skip_tokenizer_init=True, poison_fresh_pages=True, use_tqdm=False, speculative_config=config,
        )  # fmt: skip
        for _ in range(2):
            outputs = llm.generate(prompts, kinds, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[:2] == found[2:] and counts(llm).num_accepted_tokens > 60
