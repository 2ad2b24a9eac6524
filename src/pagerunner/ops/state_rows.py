"""Which tokens of a step run through which recurrent state, as kernels and their twins read it on the device.

A row's state lies in the page whose table entry is in column 0 of its slot's table. Rows without tokens (padding)
touch no state.

A row that generates may have drafts behind its first token, which is certain. The page then has a journal: what the recurrence
took of the row's last drafts. Such a row takes its tokens one after another, as if each had a step of its own:

1. It begins with the state in its page and runs the drafts that were accepted meanwhile, from the journal.
2. It runs its first token. That state goes to the page.
3. It runs its drafts and puts them into the journal. The state after them is dropped.

So a step reads and writes one state, whatever the number of drafts. Example: positions up to 99 are in the page, the journal
has 100 to 102, and 100 and 101 were accepted. The row's tokens are at 102 to 105. It runs 100 and 101 from the journal, then 102.
The page has the state after 102, and the journal 103 to 105.

Shape letters: T tokens of the step, R rows, N saves, E page table entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from pagerunner.batch import StepRows

# Rows of at most so many tokens, and rows that generate, take one token after another; others run in chunks of CHUNK.
FEW_TOKENS = 8
CHUNK = 64


class StateSaves(NamedTuple):
    """States to keep from within a step: those of row r are `start_R1[r]` to `start_R1[r + 1]`, in order of positions.

    The state after the tokens before `position_N` (int32) goes to the page at byte offset `target_N` (int64), if the row passes
    there: a row that generates passes its accepted drafts and its first token. `row_N` (int32) are their rows. Entries beyond
    `start_R1[-1]` are not read.
    """

    start_R1: torch.Tensor
    row_N: torch.Tensor
    position_N: torch.Tensor
    target_N: torch.Tensor


class StateRows(NamedTuple):
    """The rows of a step, the group's page table of all slots, [slots, W] int64, and the states to keep from within the step."""

    step: StepRows
    page_table: torch.Tensor
    saves: StateSaves | None = None

    @property
    def few(self) -> bool:
        """Whether every row takes its tokens one after another."""
        return self.step.one_token or self.step.stride > 0 or self.step.max_query_len <= FEW_TOKENS

    def entries(self, inputs: torch.Tensor) -> int:
        """Drafts of a row's journal, where `inputs` are the step's tokens and behind them every row's accepted ones.

        Entry j of row r is at T + r * entries + j.
        """
        return (inputs.shape[0] - self.step.num_tokens) // self.step.num_rows


class Span(NamedTuple):
    """One row, for twins: its tokens, its table entry, and (token, byte offset) of the states to save.

    Tokens before `first` are the `replayed` accepted drafts. The state after the tokens before `certain` goes to the page; where
    `by_one`, the row takes one token after another.
    """

    row: int
    first: int
    end: int
    entry: int
    saves: list[tuple[int, int]]
    replayed: int
    certain: int
    by_one: bool

    @property
    def begin(self) -> int:
        """The first token after the state in the page."""
        return self.first - self.replayed


def spans(rows: StateRows) -> Iterator[Span]:
    """The rows that have tokens; reads the device."""
    step = rows.step
    start, lengths = step.query_start_R1.tolist(), step.seq_lens_R.tolist()
    positions = step.positions_T[step.query_start_R1[:-1].clamp(max=step.num_tokens - 1).long()].tolist()
    accepted = None if step.accepted_R is None else step.accepted_R.tolist()
    for row, slot in enumerate(step.slots_R.tolist()):
        first = start[row]
        if first == start[row + 1] or not lengths[row]:
            continue
        end, by_one = first + lengths[row] - positions[row], accepted is not None and accepted[row] >= 0
        replayed = accepted[row] if accepted is not None and by_one else 0
        certain = first + 1 if by_one else end
        saves: list[tuple[int, int]] = []
        if rows.saves is not None:
            at = slice(*rows.saves.start_R1[row : row + 2].tolist())
            ends = (first + position - positions[row] for position in rows.saves.position_N[at].tolist())
            found = zip(ends, rows.saves.target_N[at].tolist(), strict=True)
            saves = [(upto, target) for upto, target in found if first - replayed < upto <= certain]
            assert by_one or len(saves) == at.stop - at.start, (
                f"row {row} has saves beyond its {certain - first} tokens"
            )
        yield Span(row, first, end, int(rows.page_table[slot, 0]), saves, replayed, certain, by_one)


def run_span(
    span: Span,
    states: torch.Tensor,
    run: Callable[[slice, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    out: torch.Tensor,
    rows: StateRows,
) -> None:
    """Run a row on from its state in `states` [E, ..], divided at its saves.

    Write its last state and its saves into pages. `out` has places for the replayed tokens behind the step's, as inputs have.
    """
    unit = states.stride(0) * states.element_size()
    behind = rows.step.num_tokens + span.row * rows.entries(out)
    done, state = span.begin, states[span.entry]
    for upto, target in (*span.saves, (span.certain, None), (span.end, -1)):
        while done < upto:
            stop = done + 1 if span.by_one else upto
            first = done if done >= span.first else behind + done - span.begin
            part = slice(first, first + stop - done)
            out[part], state = run(part, state)
            state = state.to(states.dtype) if span.by_one else state
            done = stop
        if target != -1:
            states[span.entry if target is None else target // unit] = state.to(states.dtype)
