"""Pooling: one vector for a prompt, of the final hidden states of its tokens. Shape letters: T tokens of a step, D features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from pagerunner.ops.async_copy import ToHost, to_device
from pagerunner.runner.staging import StagedStep
from pagerunner.types import Pooling, SlotInit

_STEPS = 2.0**32
"""A mean adds up whole numbers of steps of 2^-32. Below 2^53 float64 rounds none of their sums, so pieces of a prompt add up to the same bits in any order."""
_TOKENS = 256  # at a time: float64 takes memory that nobody has planned


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The vectors of rows whose prompts end in a step, on their way to the host."""

    rows: Sequence[int] = ()
    copy: ToHost | None = None

    def read(self) -> dict[int, list[float]]:
        """By row. Waits for the step that made them only."""
        return {} if self.copy is None else dict(zip(self.rows, self.copy.lists()[0], strict=True))


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

    def pool(self, hidden_TD: torch.Tensor, step: StagedStep, rows: Sequence[int]) -> PooledRows:
        """Take the tokens of `rows`. Returns the vectors of the rows that end a prompt, on their way to the host together."""
        if not rows:
            return PooledRows()
        firsts = [0, *accumulate(step.query_lens)]
        means = [self._mean(hidden_TD, step, index, firsts[index]) for index in rows if self._is_mean(step, index)]
        ended = [index for index in rows if step.rows[index].samples]
        last = [index for index in ended if not self._is_mean(step, index)]
        found = [vector_D[None] for vector_D in means if vector_D is not None]
        if last:
            ends = [firsts[index] + step.rows[index].num_tokens - 1 for index in last]
            found.append(hidden_TD.index_select(0, to_device(ends, torch.int64, hidden_TD.device)).float())
        if not found:
            return PooledRows()
        order = [index for index in ended if self._is_mean(step, index)] + last
        return PooledRows(order, ToHost((torch.cat(found),), hidden_TD.device))

    def _is_mean(self, step: StagedStep, index: int) -> bool:
        return self._kinds[step.rows[index].slot] == "mean"

    def _mean(self, hidden_TD: torch.Tensor, step: StagedStep, index: int, first: int) -> torch.Tensor | None:
        """Add a row's tokens up; their mean where the prompt ends."""
        row = step.rows[index]
        before = self._sums[row.slot] if row.start else None
        sum_D = torch.zeros_like(hidden_TD[first], dtype=torch.float64) if before is None else before
        for part_TD in hidden_TD[first : first + row.num_tokens].split(_TOKENS):
            sum_D = sum_D + part_TD.double().mul_(_STEPS).round_().sum(0)
        self._sums[row.slot] = sum_D
        return (sum_D / (_STEPS * (row.start + row.num_tokens))).float() if row.samples else None
