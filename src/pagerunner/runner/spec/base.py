"""What a drafter is given and what it must do. Whose drafts they are changes no token: see `ops/accept.py`."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from pagerunner.types import SlotInit


class Verified(NamedTuple):
    """What a step's rows have got, on the device: S rows, padding included, with W places each.

    `found_SW` int64: a row's tokens, one or more, then numbers below 0. `slots_S` int64: -1 in padding. `positions_S` int64: of the tokens that the rows' first places
    are for, so the first of the new tokens is one further. The last two may have any stride.
    """

    found_SW: torch.Tensor
    slots_S: torch.Tensor
    positions_S: torch.Tensor


class Drafter(Protocol):
    """Guesses the next tokens of slots, and leaves them in the slots' state."""

    def init_slot(self, init: SlotInit) -> None:
        """A request takes a slot; nothing of the slot's former request remains."""

    def draft(self, verified: Verified, count: int) -> None:
        """Write `count` drafts for the next step of each row, -1 where there is none. Called after each step that samples, also for 0 drafts."""


class NoDrafts:
    """An engine without drafts."""

    def init_slot(self, init: SlotInit) -> None:
        """See Drafter."""

    def draft(self, verified: Verified, count: int) -> None:
        """See Drafter."""
