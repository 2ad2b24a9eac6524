"""Sampling kernels against their twins, in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch

from pagerunner.ops.kernels import sample as kernels
from pagerunner.ops.sample import Filters, draw, greedy

INF = math.inf


@pytest.fixture(autouse=True)
def _any_number_of_rows(monkeypatch):
    monkeypatch.setattr(kernels, "FEWEST_ROWS", 1)


def test_greedy_takes_the_lowest_of_the_best(monkeypatch):
    monkeypatch.setattr(kernels, "GREEDY_BLOCK", 8)
    logits = torch.randn(7, 21)
    logits[1, [5, 12, 20]] = 9.0
    logits[2] = -INF
    logits[3, [4, 9]] = float("nan")
    logits[4, 13] = INF
    logits[5] = torch.tensor([-0.0, 0.0] * 10 + [-1.0])
    tokens, best = greedy.kernel(logits)
    want_tokens, want_best = greedy.twin(logits)
    assert tokens.tolist() == want_tokens.tolist()
    torch.testing.assert_close(best, want_best, equal_nan=True, atol=0, rtol=0)
    half = logits.to(torch.float16)
    assert greedy.kernel(half)[0].tolist() == greedy.twin(half)[0].tolist()
    assert greedy.kernel(logits[:0])[0].shape == (0,)


def filters(vocab, *rows):
    """Rows of (temperature, min-p, top-k, top-p); 0 and 1 turn the last two off."""
    temperature, min_p, top_k, top_p = zip(*rows, strict=True)
    cut = [i for i, (k, p) in enumerate(zip(top_k, top_p, strict=True)) if k or p < 1]
    return Filters(
        torch.tensor(temperature),
        torch.tensor(min_p),
        torch.tensor([k or vocab for k in top_k]),
        torch.tensor([p if p < 1 else INF for p in top_p], dtype=torch.float64),
        torch.tensor(cut),
        max((top_k[i] or vocab for i in cut), default=0),
    )


ROWS = [
    (1.0, 0.0, 0, 1.0),
    (0.5, 0.2, 0, 1.0),
    (1.0, 0.0, 5, 1.0),
    (1.3, 0.0, 0, 0.8),
    (0.8, 0.05, 9, 0.6),
    (2.0, 0.0, 1, 1.0),
    (1.0, 0.0, 0, 1e-6),
    (1.0, 1.0, 0, 0.9),
]


@pytest.mark.parametrize("kept", [8, 64], ids=["some candidates stay in place", "all are copied aside"])
def test_the_same_uniform_draws_the_same_token(monkeypatch, kept):
    monkeypatch.setattr(kernels, "KEPT", kept)
    monkeypatch.setattr(kernels, "DRAW_BLOCK", 16)
    generator = torch.Generator().manual_seed(kept)
    for _ in range(3):
        logits = torch.randn(len(ROWS), 50, generator=generator) * 2
        logits[:, 7] = -INF
        uniform = torch.rand(len(ROWS), generator=generator, dtype=torch.float64)
        uniform[0] = 0.0
        asked = filters(50, *ROWS)
        tokens, best = draw.kernel(logits, asked, uniform)
        want_tokens, want_best = draw.twin(logits, asked, uniform)
        assert tokens.tolist() == want_tokens.tolist()
        assert torch.equal(best, want_best)


def test_ties_with_the_last_token_kept_stay():
    logits = torch.tensor([[1.0, 0.0, 0.0, 0.0, -1.0]]).repeat(9, 1)
    uniform = torch.linspace(0, 0.999, 9, dtype=torch.float64)
    asked = filters(5, *[(1.0, 0.0, 2, 1.0)] * 9)
    tokens = draw.kernel(logits, asked, uniform)[0].tolist()
    assert tokens == draw.twin(logits, asked, uniform)[0].tolist()
    assert set(tokens) == {0, 1, 2, 3}


def test_the_end_of_the_distribution_and_rows_that_have_none():
    logits = torch.tensor([[0.0, 1.0, 2.0, -INF], [-INF] * 4, [0.0, float("nan"), 0.0, 0.0], [0.0, INF, 1.0, 0.0]])
    asked = filters(4, *[(1.0, 0.0, 3, 0.9)] * 4)
    uniform = torch.full((4,), math.nextafter(1.0, 0.0), dtype=torch.float64)
    tokens, best = draw.kernel(logits, asked, uniform)
    assert tokens[0] == 2 and all(0 <= token < 4 for token in tokens.tolist())
    assert best[0] == 2 and best[1] == -INF and best[2].isnan() and best[3] == INF
    plain, _ = draw.kernel(logits, Filters(), uniform)
    assert plain[0] == 2


def test_few_rows_are_left_to_the_library(monkeypatch):
    monkeypatch.setattr(kernels, "FEWEST_ROWS", 3)
    monkeypatch.setattr(kernels, "_draw_kernel", None)
    uniform = torch.tensor([0.1, 0.9], dtype=torch.float64)
    assert draw.kernel(torch.zeros(2, 10), Filters(), uniform)[0].tolist() == [1, 9]
