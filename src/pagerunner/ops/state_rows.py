"""Which tokens of a step run through which recurrent state, as kernels and their twins read it on the device.

A row's state lies in the page whose table entry is in column 0 of its slot's table. Rows without tokens (padding)
touch no state. Shape letters: T tokens of the step, R rows, N saves, E page table entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from pagerunner.batch import StepRows

# Rows of at most so many tokens take one token after another; longer ones run in chunks of CHUNK.
FEW_TOKENS = 8
CHUNK = 64


class StateSaves(NamedTuple):
    """States to keep from within a step: those of row r are `start_R1[r]` to `start_R1[r + 1]`, in order of tokens.

    The state before batch token `end_N` (int32) goes to the page at byte offset `target_N` (int64). Entries beyond
    `start_R1[-1]` are not read.
    """

    start_R1: torch.Tensor
    end_N: torch.Tensor
    target_N: torch.Tensor


class StateRows(NamedTuple):
    """The rows of a step, the group's page table of all slots, [slots, W] int64, and the states to keep from within the step."""

    step: StepRows
    page_table: torch.Tensor
    saves: StateSaves | None = None

    @property
    def few(self) -> bool:
        """Whether every row takes its tokens one after another."""
        return self.step.one_token or self.step.max_query_len <= FEW_TOKENS


class Span(NamedTuple):
    """One row: its tokens, its table entry, and (token, byte offset) of the states to save, for twins."""

    first: int
    end: int
    entry: int
    saves: list[tuple[int, int]]


def spans(rows: StateRows) -> Iterator[Span]:
    """The rows that have tokens; reads the device."""
    start = rows.step.query_start_R1.tolist()
    for row, slot in enumerate(rows.step.slots_R.tolist()):
        first, end = start[row], start[row + 1]
        if first < end:
            saves: list[tuple[int, int]] = []
            if rows.saves is not None:
                at = slice(*rows.saves.start_R1[row : row + 2].tolist())
                saves = list(zip(rows.saves.end_N[at].tolist(), rows.saves.target_N[at].tolist(), strict=True))
            yield Span(first, end, int(rows.page_table[slot, 0]), saves)


def run_span(
    span: Span,
    states: torch.Tensor,
    run: Callable[[slice, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    out: torch.Tensor,
) -> None:
    """Run a row on from its state in `states` [E, ..], divided at its saves.

    Write its last state and its saves into pages.
    """
    unit = states.stride(0) * states.element_size()
    done, state = span.first, states[span.entry]
    for upto, target in (*span.saves, (span.end, None)):
        if upto > done:
            result, state = run(slice(done, upto), state)
            out[done:upto] = result
            done = upto
        states[span.entry if target is None else target // unit] = state.to(states.dtype)
