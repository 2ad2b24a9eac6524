"""Drafts that the host has guessed: the device takes what follows the slot's last token."""

from __future__ import annotations

import pytest
import torch

from pagerunner.ops.batch import SlotState
from pagerunner.ops.guesses import take_guesses


def taken(length: int, last: int, start: int, tokens: list[int]) -> list[int]:
    """The drafts of a slot whose last token is at position `length`."""
    state = SlotState.empty(3, "cpu", 3)
    state.drafts.fill_(-9)
    state.lengths[2], state.tokens[2] = length, last
    take_guesses(torch.tensor([[2, start, *tokens]]), state)
    assert (state.drafts[[0, 1, 3]] == -9).all()
    return state.drafts[2].tolist()


@pytest.mark.parametrize(
    ("length", "last", "drafts"),
    [
        (38, 5, [-1, -1, -1]),  # a guess of what comes later says nothing of what is next
        (39, 4, [5, 6, 7]),  # nothing has come: whatever is last, the host knew it
        (40, 5, [6, 7, 8]),
        (40, 9, [-1, -1, -1]),
        (42, 7, [8, -1, -1]),
        (43, 8, [-1, -1, -1]),
        (44, 8, [-1, -1, -1]),
        (60, 8, [-1, -1, -1]),
    ],
)
def test_what_follows_the_last_token_is_drafted(length: int, last: int, drafts: list[int]) -> None:
    assert taken(length, last, 40, [5, 6, 7, 8]) == drafts
    assert taken(length, last, 40, [5, 6, 7, 8, -1, -1]) == drafts
