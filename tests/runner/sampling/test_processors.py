"""Allowed ids, bad words, min_tokens, bias and penalties against plain code, with tokens that the host hasn't seen."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.effort import effort
from pagerunner.runner.sampling import Sampler
from pagerunner.types import SamplingParams
from runner.sampling.support import fill, sample

V = 12
EOS = 11


def reference_logits(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int], bad_words: list[list[int]]
) -> list[float]:
    """Processed logits of one row, token by token."""
    values = list(logits)
    for token in range(V):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            values[token] = -math.inf
    for word in bad_words:
        prefix = word[:-1]
        if not prefix or output[-len(prefix) :] == prefix:
            values[word[-1]] = -math.inf
    if len(output) < params.min_tokens:
        for token in (EOS, *(params.stop_token_ids or ())):
            values[token] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        values[token] += bias
    for token in range(V):
        if token in prompt or token in output:
            factor = params.repetition_penalty
            values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        values[token] -= params.frequency_penalty * output.count(token)
        values[token] -= params.presence_penalty * (token in output)
    return values


token_ids = st.integers(0, V - 1)
words = st.lists(st.lists(token_ids, min_size=1, max_size=4), max_size=6)
rows = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.5, 1.3, 2.0]),
        "frequency_penalty": st.sampled_from([-1.0, 0.7]),
        "presence_penalty": st.sampled_from([-0.5, 1.5]),
        "logit_bias": st.dictionaries(token_ids, st.sampled_from([-3.0, 2.5]), max_size=4),
        "allowed_token_ids": st.lists(token_ids, min_size=4, max_size=10),
        "stop_token_ids": st.lists(token_ids, max_size=2),
        "min_tokens": st.integers(0, 5),
    },
)
requests = st.tuples(rows, words, st.lists(token_ids, min_size=1, max_size=5), st.lists(token_ids, max_size=6))


@settings(max_examples=effort(40, 240), deadline=None)
@given(batch=st.lists(requests, min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_processors_agree_with_plain_code_over_several_steps(batch: list, seed: int) -> None:
    sampler = Sampler(len(batch), V, "cpu")
    outputs = []
    for slot, (kwargs, bad_words, prompt, output) in enumerate(batch):
        params = SamplingParams(temperature=0, max_tokens=100, **kwargs)
        sampled_words = tuple(tuple(word) for word in bad_words)
        fill(sampler, slot, params, output, prompt=prompt, bad_words_ids=sampled_words, eos_token_ids=(EOS,))
        outputs.append((params, bad_words, prompt, list(output), len(prompt) + len(output)))
    generator = torch.Generator().manual_seed(seed)
    steps = []
    for step in range(6):  # nothing is read before all six steps are launched
        logits = torch.randn(len(batch), V, generator=generator) * 3
        positions = [start + step for *_, start in outputs]
        steps.append((logits.clone(), sample(sampler, logits, list(range(len(batch))), positions)))
    for logits, sampled in steps:
        tokens = sampled.read()[0]
        for row, (params, bad_words, prompt, output, _) in enumerate(outputs):
            expected = reference_logits(logits[row].tolist(), params, prompt, output, bad_words)
            if max(expected) == -math.inf:
                assert row in sampled.errors
            else:
                assert row not in sampled.errors
                assert expected[tokens[row]] >= max(expected) - 1e-4
            output.append(tokens[row])


def greedy(sampler: Sampler, *tokens: int, position: int) -> int:
    """Sample slot 0 with `tokens` the most likely ones, in this order."""
    logits = torch.zeros(1, V)
    for place, token in enumerate(tokens):
        logits[0, token] = 10.0 - place
    return sample(sampler, logits, [0], [position]).read()[0][0]


def test_bad_word_is_banned_only_after_its_prefix() -> None:
    sampler = Sampler(1, V, "cpu")
    fill(sampler, 0, SamplingParams(temperature=0), bad_words_ids=((4, 5, 6),))
    assert [greedy(sampler, t, 9, position=3 + i) for i, t in enumerate([6, 4, 6, 5, 6, 4, 5, 6])] == [
        6, 4, 6, 5, 6, 4, 5, 9,
    ]  # fmt: skip


def test_all_of_a_long_prefix_counts() -> None:
    sampler = Sampler(1, V, "cpu")
    for first, expected in ((1, 9), (7, 5)):
        fill(sampler, 0, SamplingParams(temperature=0), output=[first, 2, 3, 4], bad_words_ids=((1, 2, 3, 4, 5), (8,)))
        assert greedy(sampler, 5, 9, position=7) == expected


def test_bad_word_prefix_may_come_from_before_a_preemption() -> None:
    sampler = Sampler(2, V, "cpu")
    fill(sampler, 1, SamplingParams(temperature=0), bad_words_ids=((1, 2),))
    fill(sampler, 0, SamplingParams(temperature=0), output=[7, 4, 5], bad_words_ids=((4, 5, 6), (3,)))
    assert greedy(sampler, 6, 3, 8, position=6) == 8


def test_prompt_is_no_prefix_of_a_bad_word() -> None:
    sampler = Sampler(1, V, "cpu")
    fill(sampler, 0, SamplingParams(temperature=0), prompt=[4, 5], bad_words_ids=((4, 5, 6),))
    assert greedy(sampler, 6, position=2) == 6


def test_min_tokens_counts_from_the_prompt() -> None:
    sampler = Sampler(1, V, "cpu")
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[3], ignore_eos=False)
    fill(sampler, 0, params, prompt=[1, 1, 1], eos_token_ids=(EOS,))
    assert [greedy(sampler, EOS, 3, 8, position=3 + i) for i in range(3)] == [8, 8, EOS]


def test_repetition_penalty_counts_prompt_frequency_does_not() -> None:
    sampler = Sampler(1, V, "cpu")
    fill(sampler, 0, SamplingParams(temperature=0, repetition_penalty=2.0), prompt=[4])
    assert greedy(sampler, 4, 5, position=1) == 5
    fill(sampler, 0, SamplingParams(temperature=0, frequency_penalty=2.0), prompt=[4, 4, 4])
    assert [greedy(sampler, 4, 5, position=3 + i) for i in range(2)] == [4, 5]
