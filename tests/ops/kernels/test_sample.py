"""Sampling kernels against their twin, in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from helpers.effort import TEST_DAY, effort
from pagerunner.ops.kernels.sampling import sample as kernels
from pagerunner.ops.philox import uniforms
from pagerunner.ops.sample import SlotSettings, greedy, sample

INF = math.inf
SMALL = {"RUN": 8, "TILE": 32, "MOST_K": 6, "LISTED": 16, "CANDIDATES": 16, "SEARCHED": 128}

# temperature, min-p, top-k, top-p of a slot
ASKED = {
    "greedy": (0.0, 0.0, 0, 1.0),
    "plain": (1.0, 0.0, 0, 1.0),
    "usual": (0.7, 0.0, 4, 0.95),
    "top-k": (1.0, 0.0, 5, 1.0),
    "top-k one": (2.0, 0.0, 1, 1.0),
    "large top-k": (1.0, 0.0, 40, 1.0),
    "large top-k, top-p": (1.5, 0.0, 60, 0.9),
    "top-p": (1.3, 0.0, 0, 0.8),
    "small top-p": (0.3, 0.0, 0, 0.3),
    "tiny top-p": (1.0, 0.0, 0, 1e-300),
    "min-p": (0.5, 0.2, 0, 1.0),
    "small min-p": (1.0, 1e-4, 0, 1.0),
    "min-p one": (1.0, 1.0, 0, 0.9),
    "small min-p, top-p": (1.0, 0.001, 0, 0.7),
    "everything": (0.8, 0.05, 9, 0.6),
    "hottest": (1e30, 0.0, 7, 0.5),
}


def settings_of(*slots, seed=0):
    found = SlotSettings.empty(len(slots), "cpu")
    for slot, (temperature, min_p, top_k, top_p) in enumerate(slots):
        words = SlotSettings.pack(seed=77 * slot - seed, temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
        found.words[slot] = torch.tensor(words)
    return found


def agree(logits, settings, position, slots=None):
    """The kernel's tokens, which are the twin's."""
    slots = torch.arange(len(logits)) if slots is None else slots
    positions = torch.full((len(logits),), position)
    tokens, best = sample.kernel(logits, slots, positions, settings)
    want_tokens, want_best = sample.twin(logits, slots, positions, settings)
    assert tokens.tolist() == want_tokens.tolist()
    torch.testing.assert_close(best, want_best, equal_nan=True, atol=0, rtol=0)
    return tokens.tolist()


@pytest.fixture
def small(monkeypatch):
    """Runs and room for candidates so small that a short row has many of them."""
    for name, value in SMALL.items():
        monkeypatch.setattr(kernels, name, value)


@pytest.mark.parametrize(
    ("vocab", "dtype", "spread", "names"),
    [
        (203, torch.float32, 3.0, list(ASKED)),
        (128, torch.bfloat16, 2.0, effort(list(ASKED)[TEST_DAY % 2 :: 2], list(ASKED))),
        (
            100,
            torch.float16,
            0.02,
            effort(list(ASKED)[1 - TEST_DAY % 2 :: 2], list(ASKED)),
        ),  # those that bfloat16 leaves out
        (7, torch.float32, 1.0, list(ASKED)),
    ],
)
def test_every_filter_takes_the_twins_tokens(small, vocab, dtype, spread, names):
    settings = settings_of(*[ASKED[name] for name in names])
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(len(names), vocab, generator=generator) * spread).to(dtype)
    logits[:, 5] = -INF
    assert len(set(agree(logits, settings, vocab))) > len(names) // 3 or vocab < 10


def test_rows_of_the_kernels_own_sizes():
    """A vocabulary that ends inside a run, of more than one tile."""
    asked = [ASKED[name] for name in ("greedy", "plain", "usual", "top-p", "large top-k, top-p")]
    logits = torch.randn(5, 4096 + 1000, generator=torch.Generator().manual_seed(5)) * 3
    agree(logits, settings_of(*asked), 9)
    agree(logits.to(torch.bfloat16), settings_of(*asked), 10)


def test_a_row_gets_the_same_token_alone_and_among_others(small):
    asked = [ASKED[name] for name in ("greedy", "plain", "usual", "large top-k, top-p", "small min-p")]
    settings = settings_of(*asked)
    logits = torch.randn(len(asked), 90, generator=torch.Generator().manual_seed(6)) * 2
    together = agree(logits, settings, 3)
    order = torch.randperm(len(asked), generator=torch.Generator().manual_seed(7))
    assert agree(logits[order], settings, 3, order) == [together[row] for row in order]
    for row in (2, 3):
        assert agree(logits[row : row + 1], settings, 3, torch.tensor([row])) == [together[row]]


def test_greedy_takes_the_lowest_of_the_best(small):
    logits = torch.randn(7, 71)
    logits[1, [5, 12, 60]] = 9.0
    logits[2] = -INF
    logits[3, [4, 9]] = float("nan")
    logits[4, 13] = INF
    logits[5] = torch.tensor([-0.0, 0.0] * 35 + [-1.0])
    settings = settings_of(*[ASKED["greedy"]] * 7)
    tokens = agree(logits, settings, 0)
    assert tokens == greedy(logits)[0].tolist() and (tokens[1], tokens[3], tokens[4], tokens[5]) == (5, 4, 13, 0)
    agree(logits.to(torch.float16), settings, 0)
    assert sample.kernel(logits[:0], torch.zeros(0).long(), torch.zeros(0).long(), settings)[0].shape == (0,)


def test_padding_is_greedy_whatever_slot_0_asks(small):
    logits = torch.randn(3, 40)
    tokens = agree(logits, settings_of(ASKED["top-k one"], ASKED["hottest"]), 5, torch.tensor([-1, 0, -1]))
    assert tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("asked", ["top-k", "usual", "large top-k"])
def test_ties_with_the_last_token_kept_stay(small, asked):
    """More of them than there is room for candidates, too."""
    rows = effort(4, 9)
    logits = torch.tensor([[2.0, *[1.0] * 30, 0.0, -1.0]]).repeat(rows, 1)
    seen = set(agree(logits, settings_of(*[ASKED[asked]] * rows), 0))
    assert any(6 < token <= 30 for token in seen) and (asked == "large top-k" or not seen & {31, 32})


def test_the_ends_of_the_distribution_and_rows_that_have_none(small):
    rows = [
        [0.0, 1.0, 2.0, -INF, 5.0 - 1e4],
        [-INF] * 5,
        [0.0, float("nan"), 0.0, 0.0, 1.0],
        [0.0, INF, 1.0, 0.0, -INF],
        [-INF, -INF, -3.0, -INF, -INF],
    ]
    for asked in ("plain", "usual", "large top-k, top-p", "small min-p"):
        logits, settings = torch.tensor(rows), settings_of(*[ASKED[asked]] * 5)
        slots, positions = torch.arange(5), torch.arange(5)
        tokens, best = sample.kernel(logits, slots, positions, settings)
        assert tokens[0] == sample.twin(logits, slots, positions, settings)[0][0] != 3
        assert all(0 <= token < 5 for token in tokens.tolist()) and tokens[4] == 2
        assert best[1] == -INF and best[2].isnan() and best[3] == INF and best[4] == -3


def test_rows_may_be_apart_and_logits_transposed(small):
    settings = settings_of(*[ASKED["usual"], ASKED["top-p"]])
    wide = torch.randn(2, 90, generator=torch.Generator().manual_seed(8))
    assert agree(wide[:, :60], settings, 1) == agree(wide[:, :60].clone(), settings, 1)
    assert agree(wide.T.contiguous().T[:, :60], settings, 1) == agree(wide[:, :60].clone(), settings, 1)


@triton.jit
def _uniforms(seeds_ptr, positions_ptr, out_ptr):
    index = tl.program_id(0)
    tl.store(out_ptr + index, kernels.uniform_of(tl.load(seeds_ptr + index), tl.load(positions_ptr + index)))


def test_the_kernels_uniforms_are_the_twins_to_the_last_bit():
    seeds = torch.tensor([0, 1, -1, 2**62 + 12345, -(2**63), 7, 7])
    positions = torch.tensor([0, 1, 2, 2**33 + 5, 4095, 100, 101])
    found = torch.empty(len(seeds), dtype=torch.float64)
    _uniforms[(len(seeds),)](seeds, positions, found)
    assert torch.equal(found, uniforms(seeds, positions))
