"""What a drafter is given and what it must do. Whose drafts they are changes no token: see `ops/accept.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from pagerunner.batch import ForwardBatch
from pagerunner.types import SlotInit, StepRow


class Verified(NamedTuple):
    """What a step's rows have got, on the device: S rows, padding included, with W places each.

    `found_SW` int64: a row's tokens, one or more, then numbers below 0. `slots_S` int64: -1 in padding. `positions_S` int64: of the tokens that the rows' first places
    are for, so the first of the new tokens is one further. The last two may have any stride.
    """

    found_SW: torch.Tensor
    slots_S: torch.Tensor
    positions_S: torch.Tensor


class Computed(NamedTuple):
    """What the model has computed in a step, for a drafter that goes on from it.

    `rows` are the step's, `batch` is what the model ran, and `taken_TX` what it left of every token; see `Decoder.run`. `places_S` int64: the places in T of the
    sampled rows' first places, as many as `Verified` has rows. `states` are those of the attention backends in a graph; None: eager steps'.
    """

    rows: Sequence[StepRow]
    batch: ForwardBatch
    taken_TX: torch.Tensor
    places_S: torch.Tensor
    states: Sequence[Any] | None = None


class OnwardDrafter(Protocol):
    """One that goes on from what the model has computed. That may be a part of a graph."""

    def room_for(self, tokens: int) -> torch.Tensor:
        """Room for what the model leaves of so many tokens, [T, X]."""

    def go_on(self, computed: Computed, slots_S: torch.Tensor, count: int) -> None:
        """Draft so many tokens for each of `slots` (-1: padding). The slots know already what the step has led to."""


class Drafter(Protocol):
    """Guesses the next tokens of slots, and leaves them in the slots' state."""

    @property
    def onward(self) -> OnwardDrafter | None:
        """Itself, if it goes on from what the model has computed."""

    def init_slot(self, init: SlotInit) -> None:
        """A request takes a slot; nothing of the slot's former request remains."""

    def draft(self, verified: Verified | None, count: int, computed: Computed | None) -> None:
        """Write `count` drafts for the next step of each row, -1 where there is none. Called after each step that samples, also for 0 drafts.

        An onward one is also called after steps that sample nothing (`verified` is None), and alone has `computed`.
        """


class NoDrafts:
    """An engine without drafts."""

    onward = None

    def init_slot(self, init: SlotInit) -> None:
        """See Drafter."""

    def draft(self, verified: Verified | None, count: int, computed: Computed | None) -> None:
        """See Drafter."""
