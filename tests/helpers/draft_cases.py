"""Cases for the operations on drafts, at tiny shapes on the CPU and at real ones on a device."""

from __future__ import annotations

import dataclasses
import random

import torch

from helpers.step_cases import moved
from pagerunner.ops.accept import Chances, accept
from pagerunner.ops.batch import SlotState
from pagerunner.ops.ngram import draft_ngrams


def check_accept(found, rows: int, width: int, *, by_chance: bool, device: str = "cpu") -> None:
    """`found` accepts what the twin does, and changes no slot but the rows'."""
    generator = torch.Generator().manual_seed(rows * 100 + width)
    slots, drafts = rows + 3, width + 1

    def numbers(least: int, most: int, *shape: int) -> torch.Tensor:
        return torch.randint(least, most, shape, generator=generator)

    state = SlotState.empty(slots, "cpu", drafts)
    state.drafts.copy_(numbers(-1, 3, slots + 1, drafts))  # of three tokens, so that many are right
    targets, own = numbers(0, 3, rows, width), torch.randperm(slots, generator=generator)[:rows]
    own[1::5] = -1
    positions = numbers(1, 500, rows, 3)[:, 1]  # with a stride
    ends = (positions + numbers(1, width + 1, rows)).to(torch.int32)
    chances = Chances(torch.rand(drafts, dtype=torch.float64), numbers(0, 2**40, slots, 4)[:, 0]) if by_chance else None
    expected, other = moved(state, "cpu"), moved(_copied(state), device)
    wanted = accept.twin(targets, own, positions, ends, expected, chances)
    there = None if chances is None else Chances(chances.rates_K.to(device), chances.seeds_N.to(device))
    strided = torch.stack([positions] * 3, 1).to(device)[:, 1]
    got = found(targets.to(device), own.to(device), strided, ends.to(device), other, there)
    assert torch.equal(got.cpu(), wanted)
    for field in dataclasses.fields(state):
        assert torch.equal(getattr(other, field.name)[:-1].cpu(), getattr(expected, field.name)[:-1]), field.name


def _copied(state: SlotState) -> SlotState:
    return SlotState(*(getattr(state, field.name).clone() for field in dataclasses.fields(state)))


def check_ngrams(
    draft, rows: int, width: int, *, length: int, tokens: int, count: int, least: int, most: int, device: str = "cpu"
) -> None:
    """`draft` finds what the twin does in random texts of so many different tokens, and writes the same texts."""
    rng = random.Random(rows + 10 * width + 100 * length + tokens)
    texts = torch.tensor([[rng.randrange(tokens) for _ in range(length + 8)] for _ in range(rows + 2)]).to(torch.int32)
    slots = torch.tensor(rng.sample(range(rows + 1), rows))
    slots[1::4] = -1
    positions = torch.tensor([rng.randint(0, length) for _ in range(rows)])
    found = torch.full((rows, width), -1)
    for row in range(rows):
        for place in range(rng.randint(1, width)):
            found[row, place] = rng.randrange(tokens)
    drafts = torch.full((rows + 2, 7), -9)
    expected = texts.clone(), drafts.clone()
    draft_ngrams.twin(found, slots, positions, *expected, count, least, most)
    got = texts.to(device), drafts.to(device)
    draft(found.to(device), slots.to(device), positions.to(device), *got, count, least, most)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one.cpu(), other)
