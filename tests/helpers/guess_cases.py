"""Cases for guesses, at tiny shapes on the CPU and at real ones on a device."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from pagerunner.ops.batch import SlotState
from pagerunner.ops.guesses import take_guesses


def check_guesses(found: Any, guesses: int, width: int, count: int, device: str = "cpu") -> None:
    """`found` takes what the twin does."""
    generator = torch.Generator().manual_seed(guesses)
    slots = guesses + 2

    def numbers(least: int, most: int, *shape: int) -> torch.Tensor:
        return torch.randint(least, most, shape, generator=generator)

    state = SlotState(
        numbers(0, 2, slots), numbers(10, 12, slots), numbers(0, 3, slots).int(), numbers(0, 9, slots, count)
    )
    given = torch.cat(
        (
            torch.randperm(slots, generator=generator)[:guesses, None],
            numbers(10, 15, guesses, 1),
            numbers(-1, 2, guesses, width),
        ),
        1,
    )
    other = SlotState(*(getattr(state, field.name).clone().to(device) for field in dataclasses.fields(state)))
    take_guesses.twin(given, state)
    found(given.to(device), other)
    for field in dataclasses.fields(state):
        assert torch.equal(getattr(other, field.name).cpu(), getattr(state, field.name)), field.name
