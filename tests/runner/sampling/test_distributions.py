"""Sampled tokens follow the distribution that plain Python computes, for every filter alone and combined."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.effort import effort
from pagerunner.ops.sample import first_above, invert
from pagerunner.types import SamplingParams
from runner.sampling.support import assert_follows, draw_many, one_sampler, reference_probabilities, sample

LOGITS = [2.0, 1.5, 1.4, 1.0, 0.7, 0.3, 0.2, 0.0, -0.4, -0.8, -1.0, -1.7, -2.5, -3.0, -5.0, -9.0]

FILTERS = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 2.5},
    "top_k": {"top_k": 5},
    "top_k_one": {"top_k": 1},
    "top_k_above_vocabulary": {"top_k": 100},
    "top_p": {"top_p": 0.8},
    "top_p_tiny": {"top_p": 1e-6},
    "min_p": {"min_p": 0.2},
    "min_p_one": {"min_p": 1.0},
    "top_k_top_p": {"top_k": 8, "top_p": 0.6},
    "top_p_min_p": {"top_p": 0.9, "min_p": 0.3},
    "all": {"temperature": 1.3, "top_k": 9, "top_p": 0.85, "min_p": 0.1},
}


@pytest.mark.parametrize("kwargs", FILTERS.values(), ids=FILTERS.keys())
def test_filter(kwargs: dict) -> None:
    params = SamplingParams(**kwargs)
    assert_follows(draw_many(torch.tensor(LOGITS), params), reference_probabilities(LOGITS, params))


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"top_p": 0.7},
        {"top_k": 300},
        {"top_k": 40, "top_p": 0.9},
        {"min_p": 0.05},
        {"top_k": 300, "top_p": 0.9, "temperature": 3.0},
    ],
)
def test_filter_over_a_large_vocabulary(kwargs: dict) -> None:
    """So large that a partial sort of 256 tokens is tried before the full one."""
    logits = (torch.randn(effort(1200, 5000), generator=torch.Generator().manual_seed(3)) * 2.5).tolist()
    params = SamplingParams(**kwargs)
    assert_follows(
        draw_many(torch.tensor(logits), params, rows=100, steps=effort(30, 60)), reference_probabilities(logits, params)
    )


def test_a_flat_distribution_needs_the_full_sort() -> None:
    logits = (torch.randn(20_000, generator=torch.Generator().manual_seed(4)) * 0.01).tolist()
    params = SamplingParams(top_p=0.5)
    counts = draw_many(torch.tensor(logits), params, rows=20, steps=5)
    allowed = torch.tensor(reference_probabilities(logits, params)) > 0
    assert counts[~allowed].sum() == 0
    last = torch.tensor(logits).topk(5000).values[-1]
    assert counts[torch.tensor(logits) < last].sum() > 25  # about half of the 100 draws


def test_rows_of_one_batch_keep_their_own_filters() -> None:
    kinds = [SamplingParams(**kwargs) for kwargs in FILTERS.values()] + [SamplingParams(temperature=0)]
    rows = kinds * 40
    sampler = one_sampler(16, *rows)
    counts = torch.zeros(len(kinds), 16, dtype=torch.int64)
    for step in range(50):
        tokens = sample(
            sampler, torch.tensor(LOGITS).repeat(len(rows), 1), list(range(len(rows))), [3 + step] * len(rows)
        )
        for row, token in enumerate(tokens.read()[0]):
            counts[row % len(kinds), token] += 1
    for kind, params in enumerate(kinds[:-1]):
        assert_follows(counts[kind], reference_probabilities(LOGITS, params))
    assert counts[-1, 0] == 2000


def test_tokens_tied_with_the_last_one_kept_stay() -> None:
    counts = draw_many(torch.tensor([1.0, 0.0, 0.0, 0.0, -1.0]), SamplingParams(top_k=2), rows=100, steps=10)
    assert (counts[:4] > 0).all() and counts[4] == 0


def test_temperature_near_zero_is_greedy_and_enormous_is_uniform() -> None:
    assert draw_many(torch.tensor(LOGITS), SamplingParams(temperature=1e-7), rows=10, steps=2)[0] == 20
    masked = torch.tensor([*LOGITS, -math.inf])
    counts = draw_many(masked, SamplingParams(temperature=1e300))
    assert_follows(counts, [1 / 16] * 16 + [0.0])


@settings(max_examples=effort(25, 120), deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 0.3, 1.0]), min_size=1, max_size=600).filter(lambda w: max(w) > 0.1),
    uniform=st.one_of(st.just(0.0), st.just(1 - 2**-53), st.floats(0, 1, exclude_max=True)),
)
def test_inverse_is_the_running_sum_and_never_a_token_of_weight_zero(weights: list[float], uniform: float) -> None:
    token = int(invert(torch.tensor([weights]), torch.tensor([uniform], dtype=torch.float64)))
    assert weights[token] > 0
    rounded = torch.tensor(weights).double().tolist()
    before, total = sum(rounded[:token]), sum(rounded)
    assert before - 1e-9 <= uniform * total <= before + rounded[token] + 1e-9


def test_a_target_rounded_up_to_the_total_still_finds_a_token_with_weight() -> None:
    cumulative = torch.tensor([[0.0, 1.0, 2.0, 2.0, 2.0]], dtype=torch.float64)
    index, _ = first_above(cumulative, torch.tensor([[2.0]], dtype=torch.float64))
    assert index.item() == 2
