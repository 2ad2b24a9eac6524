"""Sampling kernels on the device: the twin's tokens over a real vocabulary, the distribution, and graphs."""

from __future__ import annotations

import math

import pytest
import torch

from pagerunner.ops.sample import SlotSettings, greedy, sample
from pagerunner.ops.vocab_pick import DrawnRows, best_keys, own_draw, own_mass, tokens_of_keys

VOCAB = 151_936
KINDS = {
    "plain": (1.0, 0.0, 0, 1.0),
    "usual": (0.7, 0.0, 20, 0.95),
    "top-p": (0.7, 0.0, 0, 0.9),
    "min-p": (1.0, 0.1, 0, 1.0),
    "large top-k": (0.7, 0.0, 50_000, 0.99),
    "min-p, top-p": (1.0, 0.001, 0, 0.8),
    "largest candidates": (1.0, 0.0, 128, 1.0),
}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(sum(shape)))


def settings_of(rows: int, *kinds: tuple[float, float, int, float]) -> SlotSettings:
    words = [
        SlotSettings.pack(
            seed=slot * 991 - 5,
            temperature=kinds[slot % len(kinds)][0],
            min_p=kinds[slot % len(kinds)][1],
            top_k=kinds[slot % len(kinds)][2],
            top_p=kinds[slot % len(kinds)][3],
        )
        for slot in range(rows)
    ]
    return SlotSettings(torch.tensor(words, device="cuda"))


def places(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    slots = torch.arange(rows, device="cuda")
    return slots, slots * 3 + 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 200])
def test_greedy(rows, dtype):
    logits = random(rows, VOCAB).bfloat16().to(dtype)  # rounded: with ties
    settings = settings_of(rows, (0.0, 0.0, 0, 1.0))
    for got, want in zip(sample(logits, *places(rows), settings), greedy(logits), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spread", [0.3, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_twins_tokens(kind, spread, dtype):
    rows = 40
    logits, settings = (random(rows, VOCAB) * spread).to(dtype), settings_of(rows, KINDS[kind])
    got, best = sample(logits, *places(rows), settings)
    want, want_best = sample.twin(logits, *places(rows), settings)
    assert torch.equal(best, want_best)
    assert int((got != want).sum()) <= 1  # a uniform may fall within a rounding of a span's edge


@pytest.mark.parametrize("spread", [0.3, 4.0])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_draw_from_their_parts_what_is_drawn_from_whole_rows(ranks, spread):
    rows = 40
    logits, settings = (random(rows, VOCAB) * spread).bfloat16(), settings_of(rows, KINDS["plain"])
    parts = logits.tensor_split(ranks, 1)
    widest, first = parts[0].shape[1], [sum(part.shape[1] for part in parts[:rank]) for rank in range(ranks)]
    keys = torch.stack([best_keys(part, start, widest) for part, start in zip(parts, first, strict=True)])
    tokens, best = tokens_of_keys(keys, VOCAB)
    assert torch.equal(tokens, greedy(logits)[0])
    asked = DrawnRows(best, *places(rows), settings)
    masses, own = zip(*(own_mass(part, asked) for part in parts), strict=True)
    drawn = [own_draw(parts[rank], asked, torch.stack(masses), own[rank], rank, first[rank]) for rank in range(ranks)]
    want, _ = sample(logits, *places(rows), settings)
    assert int((torch.stack(drawn).amax(0) != want).sum()) <= 1


@pytest.mark.parametrize("kind", ["plain", "usual", "top-p"])
def test_tokens_follow_the_distribution(kind):
    """Chi-square over a vocabulary of which all but some hundred tokens are hopeless."""
    temperature, _, top_k, top_p = KINDS[kind]
    logits = random(1, VOCAB) * 0.01 - 60.0
    likely = torch.arange(300, device="cuda") * 499
    logits[0, likely] = random(300) * 2
    settings = settings_of(4096, KINDS[kind])
    counts = torch.zeros(VOCAB, dtype=torch.int64, device="cuda")
    slots = torch.arange(4096, device="cuda")
    for first in range(8):
        tokens, _ = sample(logits.expand(4096, -1), slots, slots + first * 5000, settings)
        counts += torch.bincount(tokens, minlength=VOCAB)
    scaled = logits[0].double() / temperature
    order = scaled.argsort(descending=True)
    chances = scaled[order].softmax(-1)
    if top_k:
        chances[top_k:] = 0
    chances[chances.cumsum(-1) - chances >= top_p * chances.sum()] = 0
    chances /= chances.sum()
    expected, seen = chances * counts.sum(), counts[order]
    assert int(seen[chances == 0].sum()) == 0
    common = expected >= 5
    statistic = float(((seen - expected)[common] ** 2 / expected[common]).sum())
    freedom = int(common.sum()) - 1
    assert freedom > 5 and statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_rows_of_every_kind_side_by_side_get_what_they_get_alone():
    rows = 64
    logits = (random(rows, VOCAB) * 3).bfloat16()
    settings = settings_of(rows, *KINDS.values(), (0.0, 0.0, 0, 1.0))
    slots, positions = places(rows)
    together, _ = sample(logits, slots, positions, settings)
    for row in range(0, rows, 5):
        alone, _ = sample(logits[row : row + 1], slots[row : row + 1], positions[row : row + 1], settings)
        assert alone[0] == together[row]


def test_a_graph_reads_settings_and_positions_anew():
    logits, settings = (random(9, VOCAB) * 2).bfloat16(), settings_of(9, KINDS["usual"])
    slots, positions = places(9)
    sample(logits, slots, positions, settings)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, _ = sample(logits, slots, positions, settings)
    for change in range(3):
        positions += 1
        settings.words.copy_(settings_of(9, list(KINDS.values())[change]).words)
        graph.replay()
        assert torch.equal(tokens, sample(logits, slots, positions, settings)[0])


def test_rows_without_a_distribution_stay_in_range():
    logits = random(12, VOCAB)
    logits[0, 70_000] = math.nan
    logits[1, 3] = math.inf
    logits[2] = -math.inf
    logits[3] = 0.0
    for kind in KINDS.values():
        tokens, best = sample(logits, *places(12), settings_of(12, kind))
        assert 0 <= int(tokens.min()) and int(tokens.max()) < VOCAB
        assert best[0].isnan() and best[1] == math.inf and best[2] == -math.inf and best[3] == 0
