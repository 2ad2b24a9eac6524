"""Tokens from logits that lie divided among ranks are those that the whole sampler takes: twins, and kernels in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.effort import effort
from pagerunner.ops import vocab_pick
from pagerunner.ops.kernels.sampling import sample as kernels
from pagerunner.ops.sample import SlotSettings, greedy, sample

INF, NAN = math.inf, math.nan


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Runs and tiles so small that a rank has many of them."""
    monkeypatch.setattr(kernels, "RUN", 8)
    monkeypatch.setattr(kernels, "TILE", 32)


def picked(logits, bounds, way):
    """The most likely tokens and their logits, from keys of all ranks."""
    ids = [range(*pair) for pair in zip(bounds, bounds[1:], strict=False)]
    keys = [
        getattr(vocab_pick.best_keys, way)(logits[:, one.start : one.stop], one.start, max(map(len, ids)))
        for one in ids
    ]
    return getattr(vocab_pick.tokens_of_keys, way)(torch.stack(keys), logits.shape[1])


def drawn(logits, bounds, position, asked, way):
    """Tokens that all ranks draw together."""
    rows = len(logits)
    slots, positions = torch.arange(rows), torch.full((rows,), position)
    _, best = picked(logits, bounds, way)
    mass, draw = getattr(vocab_pick.own_mass, way), getattr(vocab_pick.own_draw, way)
    parts = [logits[:, first:stop] for first, stop in zip(bounds, bounds[1:], strict=False)]
    own_rows = vocab_pick.DrawnRows(best, slots, positions, asked)
    found = [mass(part, own_rows) for part in parts]
    masses = torch.stack([one for one, _ in found])
    tokens = [
        draw(part, own_rows, masses, own, rank, bounds[rank])
        for rank, (part, (_, own)) in enumerate(zip(parts, found, strict=True))
    ]
    return torch.stack(tokens).amax(0)


def free(*temperatures):
    found = SlotSettings.empty(len(temperatures), "cpu")
    for slot, temperature in enumerate(temperatures):
        words = SlotSettings.pack(seed=99 * slot, temperature=temperature, min_p=0.0, top_k=0, top_p=1.0)
        found.words[slot] = torch.tensor(words)
    return found


@pytest.mark.parametrize("way", ["twin", "kernel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_key_is_the_most_likely_token(way, dtype):
    """Ties within a rank and between ranks, both zeros, rows without a finite logit, NaN; ranks of unequal widths."""
    logits = torch.randn(9, 101)
    logits[1, [70, 33, 99]] = 9.0
    logits[2, [40, 41]] = 9.0
    logits[3] = -INF
    logits[4, [80, 50]] = NAN
    logits[5, 13] = INF
    logits[6] = torch.tensor([-0.0, 0.0] * 50 + [-1.0])
    logits[7] = -INF
    logits[7, 66] = -3.0e38
    logits[8] = -logits[8].abs() - 1.0
    logits = logits.to(dtype)
    tokens, best = greedy(logits)
    for bounds in ([0, 101], [0, 50, 101], [0, 33, 67, 101], [0, 1, 65, 66, 101]):
        found, found_best = picked(logits, bounds, way)
        assert found.tolist() == tokens.tolist(), bounds
        torch.testing.assert_close(found_best, best, equal_nan=True, atol=0, rtol=0)
    assert vocab_pick.best_tokens(logits).tolist() == tokens.tolist()
    wide = torch.stack([logits, logits], 2)[:, :, 0]  # columns that aren't neighbours
    assert picked(wide, [0, 50, 101], way)[0].tolist() == tokens.tolist()
    assert picked(logits[:0], [0, 50, 101], way)[0].shape == (0,)


def test_whatever_is_gathered_the_ids_are_in_range():
    """A rank that looks which kernels it must compile gets no keys."""
    for way in ("twin", "kernel"):
        keys = torch.randint(-(2**62), 2**62, (2, 5, 3))
        tokens, _ = getattr(vocab_pick.tokens_of_keys, way)(keys, 50)
        assert ((tokens >= 0) & (tokens < 50)).all()


@settings(max_examples=effort(30, 400), deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(2, 4),
    st.integers(4, 300),
    st.sampled_from([0.01, 1.0, 8.0]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_ranks_draw_what_the_whole_sampler_draws(seed, ranks, vocab, spread, dtype):
    """Some tokens are ruled out, and some ranks have none that is left; many tie in few bits."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(4, vocab, generator=generator) * spread).to(dtype)
    logits[1, : vocab // 2] = -INF
    logits[2, torch.randperm(vocab, generator=generator)[: vocab - 2]] = -INF
    bounds = sorted({0, vocab, *(vocab * rank // ranks for rank in range(ranks))})
    asked = free(0.7, 1.0, 1.5, 30.0)
    wanted, _ = sample.twin(logits, torch.arange(4), torch.full((4,), seed), asked)
    assert drawn(logits, bounds, seed, asked, "twin").tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("vocab", "ranks", "dtype", "run"),
    [(101, 2, torch.float32, 8), (203, 3, torch.bfloat16, 8), (64, 4, torch.float16, 8), (515, 2, torch.bfloat16, 128)],
)
def test_the_kernels_draw_what_the_whole_sampler_draws(vocab, ranks, dtype, run, monkeypatch):
    monkeypatch.setattr(kernels, "RUN", run)
    monkeypatch.setattr(kernels, "TILE", 4 * run)
    bounds = [vocab * rank // ranks for rank in range(ranks + 1)]
    logits = (torch.randn(5, vocab) * 3).to(dtype)
    logits[1, : vocab // 2] = -INF
    logits[2, :-1] = -INF
    asked, seen = free(1.0, 0.5, 1.0, 5.0, 1e30), set()
    for position in range(effort(4, 20)):
        row = torch.arange(5), torch.full((5,), position), asked
        wanted, _ = sample.twin(logits, *row)
        assert sample.kernel(logits, *row)[0].tolist() == wanted.tolist()
        assert drawn(logits, bounds, position, asked, "kernel").tolist() == wanted.tolist()
        seen |= set(wanted.tolist())
    assert len(seen) > 5


@pytest.mark.parametrize("way", ["twin", "kernel"])
def test_rows_that_have_no_distribution_get_some_id(way):
    logits = torch.randn(4, 20)
    logits[0], logits[1, 3], logits[2, 15] = -INF, NAN, INF
    asked = free(1.0, 1.0, 1.0, 1.0)
    found = drawn(logits, [0, 10, 20], 5, asked, way)
    assert ((found >= 0) & (found < 20)).all()
    assert found[3] == sample.twin(logits, torch.arange(4), torch.full((4,), 5), asked)[0][3]
