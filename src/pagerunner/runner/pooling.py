"""Pooling: one vector for a prompt, of the final hidden states of its tokens. Shape letters: T tokens of a step, D features."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from pagerunner.ops.async_copy import ToHost
from pagerunner.runner.staging import StagedStep
from pagerunner.types import Pooling, SlotInit

_STEPS = 2.0**32
"""A mean adds up whole numbers of steps of 2^-32. Below 2^53 float64 rounds none of their sums, so pieces of a prompt add up to the same bits in any order."""
_TOKENS = 256  # at a time: float64 takes memory that nobody has planned


class HiddenStatePooler:
    """Knows which slots hold pooling requests, and for means the sum over the tokens so far, in steps."""

    def __init__(self) -> None:
        self._kinds: dict[int, Pooling] = {}
        self._sums: dict[int, torch.Tensor] = {}

    def init_slot(self, init: SlotInit) -> None:
        """A request takes a slot. A mean begins again, because the request's prompt begins again."""
        self._kinds.pop(init.slot, None)
        self._sums.pop(init.slot, None)
        if init.request.pooling is not None:
            self._kinds[init.slot] = init.request.pooling

    def rows(self, slots: Sequence[int]) -> list[int]:
        """The rows of a step, given by their slots, that belong to pooling requests."""
        return [row for row, slot in enumerate(slots) if slot in self._kinds] if self._kinds else []

    def pool(self, hidden_TD: torch.Tensor, step: StagedStep, rows: Sequence[int]) -> dict[int, ToHost]:
        """Take the tokens of `rows`. Returns the vectors of the rows that end a prompt, on their way to the host."""
        found: dict[int, ToHost] = {}
        firsts = [0, *accumulate(step.query_lens)]
        for index in rows:
            row = step.rows[index]
            end = firsts[index] + row.num_tokens
            vector_D = hidden_TD[end - 1].float()
            if self._kinds[row.slot] == "mean":
                sum_D = self._sums[row.slot] if row.start else torch.zeros_like(vector_D, dtype=torch.float64)
                for part_TD in hidden_TD[firsts[index] : end].split(_TOKENS):
                    sum_D = sum_D + part_TD.double().mul_(_STEPS).round_().sum(0)
                self._sums[row.slot] = sum_D
                vector_D = (sum_D / (_STEPS * (row.start + row.num_tokens))).float()
            if row.samples:
                found[index] = ToHost((vector_D,), hidden_TD.device)
        return found
