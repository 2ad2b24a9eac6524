"""The backend of recurrent groups: layers whose memory is one state per request instead of tokens in pages.

A row's state is read from the page in column 0 of its table and written back after the row's tokens of the step. A row
that begins at position 0 finds a zeroed page. Rows that generate take one token after another, all rows together; drafts
are journaled, see `ops.state_rows`. Longer rows run one after another, in chunks. If the plan asks for the state at a position
inside a row, the row is divided there.

Shape letters: T tokens of the step, B rows, L tokens of a row, C convolution channels, W taps of the convolution, H heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.attention.calls import RecurrentCall, SteppedRecurrence, Tensors
from pagerunner.attention.capability import Capabilities
from pagerunner.batch import StatePages, StepRows
from pagerunner.ops.causal_conv import causal_conv, causal_conv_rows, journaled_conv_rows
from pagerunner.ops.gdn import decay_logs, gated_delta_chunks, gated_delta_rows, gated_delta_step, split_heads
from pagerunner.ops.mamba2 import mamba2_chunks, mamba2_rows, mamba2_step, split_parts
from pagerunner.ops.native import recurrent as native
from pagerunner.ops.state_rows import Span, StateRows, StateSaves, spans


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Convolution, then the gated delta rule. Inputs: queries, keys and values side by side [T, C], rates' logits [T, H]
    and decays' [T, H]. States: (W - 1, C) and (H, key_dim, value_dim). Outputs: [T, H, value_dim] in the inputs' dtype.

    `grouped`: the first input is a projection ordered by key heads, with gates (`ops.side_by_side.by_groups`). Only `rows` without
    journals takes it.
    """

    conv_weight_CW: torch.Tensor
    decay_log_H: torch.Tensor
    decay_bias_H: torch.Tensor
    num_key_heads: int
    key_dim: int
    value_dim: int
    grouped: bool = False

    def step(self, inputs: Tensors, states: Tensors) -> tuple[torch.Tensor, Tensors]:
        """See Recurrence."""
        x_BC, rates_BH, decays_BH = inputs
        mixed, conv = causal_conv(x_BC.unsqueeze(1), states[0], self.conv_weight_CW, None)
        q, k, v = self._heads(mixed.squeeze(1))
        out, state = gated_delta_step(q, k, v, self._log_decay(decays_BH), rates_BH.sigmoid(), states[1])
        return out.to(x_BC.dtype), (conv, state)

    def chunks(self, inputs: Tensors, states: Tensors) -> tuple[torch.Tensor, Tensors]:
        """See Recurrence."""
        x_LC, rates_LH, decays_LH = inputs
        mixed, conv = causal_conv(x_LC.unsqueeze(0), states[0].unsqueeze(0), self.conv_weight_CW, None)
        q, k, v = self._heads(mixed.squeeze(0))
        out, state = gated_delta_chunks(q, k, v, self._log_decay(decays_LH), rates_LH.sigmoid(), states[1])
        return out.to(x_LC.dtype), (conv.squeeze(0), state)

    def rows(self, inputs: Tensors, memory: StatePages, rows: StateRows) -> torch.Tensor:
        """See Recurrence."""
        order = (self.num_key_heads, self.key_dim) if self.grouped else ()
        mixed_TC, rates_TH, decays_TH = _convolved(inputs, memory, self.conv_weight_CW, None, rows, *order)
        decay = (self.decay_log_H, self.decay_bias_H)
        return gated_delta_rows(mixed_TC, rates_TH, decays_TH, *decay, memory.states[1], self.num_key_heads, rows)

    def one_token(self, inputs: Tensors, pages: Tensors, table_SX: torch.Tensor, rows: StepRows) -> torch.Tensor:
        """See NativeRecurrence."""
        x_TC, rates_TH, decays_TH = inputs
        conv, delta = (native.RowStates(states, table_SX, rows) for states in pages)
        mixed_TC = native.convolution(x_TC, conv, self.conv_weight_CW, None)
        decay = (self.decay_log_H, self.decay_bias_H)
        return native.gated_delta(mixed_TC, rates_TH, decays_TH, *decay, delta, self.num_key_heads)

    def _heads(self, mixed_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return split_heads(mixed_TC, self.num_key_heads, self.decay_log_H.shape[0], self.key_dim)

    def _log_decay(self, decays_TH: torch.Tensor) -> torch.Tensor:
        return decay_logs(decays_TH, self.decay_log_H, self.decay_bias_H)


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Convolution, then Mamba-2's recurrence. Inputs: x, B and C side by side [T, C] and step sizes before their bias
    [T, H]. States: (W - 1, C) and (H, head_dim, state_size). Outputs: [T, H, head_dim] in the inputs' dtype.
    """

    conv_weight_CW: torch.Tensor
    conv_bias_C: torch.Tensor | None
    decay_log_H: torch.Tensor
    step_bias_H: torch.Tensor
    skip_H: torch.Tensor
    head_dim: int
    num_groups: int
    state_size: int

    def step(self, inputs: Tensors, states: Tensors) -> tuple[torch.Tensor, Tensors]:
        """See Recurrence."""
        x_BC, steps_BH = inputs
        mixed, conv = causal_conv(x_BC.unsqueeze(1), states[0], self.conv_weight_CW, self.conv_bias_C)
        x, b, c = self._parts(mixed.squeeze(1))
        out, state = mamba2_step(x, self._steps(steps_BH), self._decay(), b, c, self.skip_H, states[1])
        return out.to(x_BC.dtype), (conv, state)

    def chunks(self, inputs: Tensors, states: Tensors) -> tuple[torch.Tensor, Tensors]:
        """See Recurrence."""
        x_LC, steps_LH = inputs
        mixed, conv = causal_conv(x_LC.unsqueeze(0), states[0].unsqueeze(0), self.conv_weight_CW, self.conv_bias_C)
        x, b, c = self._parts(mixed.squeeze(0))
        out, state = mamba2_chunks(x, self._steps(steps_LH), self._decay(), b, c, self.skip_H, states[1])
        return out.to(x_LC.dtype), (conv.squeeze(0), state)

    def rows(self, inputs: Tensors, memory: StatePages, rows: StateRows) -> torch.Tensor:
        """See Recurrence."""
        mixed_TC, steps_TH = _convolved(inputs, memory, self.conv_weight_CW, self.conv_bias_C, rows)
        return mamba2_rows(mixed_TC, steps_TH, self.decay_log_H, self.step_bias_H, self.skip_H, memory.states[1], rows)

    def one_token(self, inputs: Tensors, pages: Tensors, table_SX: torch.Tensor, rows: StepRows) -> torch.Tensor:
        """See NativeRecurrence."""
        x_TC, steps_TH = inputs
        conv, heads = (native.RowStates(states, table_SX, rows) for states in pages)
        mixed_TC = native.convolution(x_TC, conv, self.conv_weight_CW, self.conv_bias_C)
        weights = (self.decay_log_H, self.step_bias_H, self.skip_H)
        return native.mamba2(mixed_TC, steps_TH, *weights, heads, self.num_groups)

    def _parts(self, mixed_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return split_parts(mixed_TC, self.decay_log_H.shape[0], self.head_dim, self.state_size)

    def _steps(self, steps_TH: torch.Tensor) -> torch.Tensor:
        return F.softplus(steps_TH.float() + self.step_bias_H)

    def _decay(self) -> torch.Tensor:
        return -self.decay_log_H.float().exp()


def _convolved(
    inputs: Tensors,
    memory: StatePages,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    rows: StateRows,
    *order: int,
) -> Tensors:
    """The inputs with the first one convolved, and with accepted drafts behind the step's tokens if there is a journal."""
    x_TC, *gates = inputs
    if not memory.journal:
        return causal_conv_rows(x_TC, memory.states[0], weight_CW, bias_C, rows, *order), *gates
    assert not order, "drafts have their parts beside each other"
    return journaled_conv_rows(x_TC, tuple(gates), memory.states[0], memory.journal, weight_CW, bias_C, rows)


@dataclass(frozen=True, slots=True)
class TorchRecurrentPlan:
    """A step's rows: those that take one token after another, with their pages' table entries, and longer ones.

    `saves` are by row, as (token of the step, byte offset of a page): the state after the tokens before it goes to that page.
    """

    short: list[Span]
    entries: torch.Tensor
    long: list[Span]
    every: StateRows

    @property
    def steps(self) -> range:
        """Tokens that rows take one after another, counted from each row's first one: accepted drafts come before it."""
        return range(
            -max((row.replayed for row in self.short), default=0),
            max((row.end - row.first for row in self.short), default=0),
        )


class RecurrentBackend:
    """See the module. Holds nothing between calls."""

    name = "recurrent"
    capabilities = Capabilities(forms=frozenset({"recurrent"}))

    def new_state(self, shape: GraphShape | None) -> None:
        """None: it is never captured, and keeps nothing of a step."""

    def plan(self, inputs: PlanInputs, state: None) -> TorchRecurrentPlan:
        """Divide the rows."""
        saves = StateSaves(*map(torch.from_numpy, saves_by_row(inputs, inputs.rows.num_rows)))
        short: list[Span] = []
        long: list[Span] = []
        every = StateRows(inputs.rows, inputs.page_table, saves)
        for row in spans(every):
            (short if row.by_one or row.end - row.first == 1 else long).append(row)
        entries = torch.tensor([row.entry for row in short], dtype=torch.int64, device=inputs.page_table.device)
        return TorchRecurrentPlan(short, entries, long, every)

    def run(self, call: RecurrentCall) -> torch.Tensor:
        """See RecurrentCall."""
        recurrence, inputs, pages, group, _ = call
        plan: TorchRecurrentPlan = group.plan
        if not isinstance(recurrence, SteppedRecurrence):
            return recurrence.rows(inputs, pages, plan.every)
        tokens = inputs[0].shape[0]
        parts = [*self._one_by_one(recurrence, inputs, pages, plan)] if plan.short else []
        for row in plan.long:
            part = torch.arange(row.first, row.end, device=inputs[0].device)
            parts.append((part, _chunks(recurrence, tuple(x[row.first : row.end] for x in inputs), pages, row)))
        assert parts, "a step has no rows"
        if len(parts) == 1 and len(parts[0][0]) == tokens:  # rows are in order
            return parts[0][1]
        out = parts[0][1].new_zeros(tokens, *parts[0][1].shape[1:])
        for part, found in parts:
            out.index_copy_(0, part, found)
        return out

    def step(self, recurrence: SteppedRecurrence, inputs: Tensors, states: Tensors) -> tuple[torch.Tensor, Tensors]:
        """`Recurrence.step`, which may change `states` in place."""
        return recurrence.step(inputs, states)

    def _one_by_one(
        self, recurrence: SteppedRecurrence, inputs: Tensors, memory: StatePages, plan: TorchRecurrentPlan
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Tokens of the step, and their outputs."""
        device, journal = plan.entries.device, memory.journal
        states = tuple(pages.index_select(0, plan.entries) for pages in memory.states)
        for offset in plan.steps:
            rows = [at for at, row in enumerate(plan.short) if -row.replayed <= offset < row.end - row.first]
            every = len(rows) == len(plan.short)
            rows_N = torch.tensor(rows, dtype=torch.int64, device=device)
            tokens_N = torch.tensor([plan.short[at].first + offset for at in rows], dtype=torch.int64, device=device)
            if offset < 0:  # what isn't journaled, as positions, is of no account to states
                places_N = torch.tensor([plan.short[at].replayed + offset for at in rows], device=device)
                chosen = tuple(entries[plan.entries[rows_N], places_N] for entries in journal)
                chosen += tuple(x.new_zeros(len(rows), *x.shape[1:]) for x in inputs[len(journal) :])
            else:
                chosen = tuple(x.index_select(0, tokens_N) for x in inputs)
            before = states if every else tuple(state.index_select(0, rows_N) for state in states)
            out, after = self.step(recurrence, chosen, before)
            if every:
                states = tuple(new.to(old.dtype) for new, old in zip(after, states, strict=True))
            else:
                for state, new in zip(states, after, strict=True):
                    state.index_copy_(0, rows_N, new.to(state.dtype))
            for at in rows:
                row = plan.short[at]
                for upto, target in row.saves:
                    if upto == row.first + offset + 1:
                        _store(memory, _entry(memory, target), tuple(state[at] for state in states))
            if offset == 0:
                for pages, state in zip(memory.states, states, strict=True):
                    pages[plan.entries] = state
            if offset >= 0:
                yield tokens_N, out
        for row in plan.short:
            for entries, x in zip(journal, inputs, strict=False):
                entries[row.entry, : row.end - row.certain] = x[row.certain : row.end]


def saves_by_row(inputs: PlanInputs, rows: int) -> tuple[np.ndarray, ...]:
    """Start [rows + 1], rows, positions and targets of the step's saves; see StateSaves."""
    saves = sorted(inputs.state_saves, key=lambda save: (save.row, save.position))
    counts = np.bincount([save.row for save in saves], minlength=rows)
    first = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    owners, positions = ([save[at] for save in saves] for at in (0, 1))
    targets = np.array([save.target for save in saves], dtype=np.int64)
    return first, np.array(owners, dtype=np.int32), np.array(positions, dtype=np.int32), targets


def _entry(memory: StatePages, target: int) -> int:
    """The table entry of the page at a byte offset."""
    state = memory.states[0]
    return target // int(state.stride(0) * state.element_size())


def _store(memory: StatePages, entry: int, states: Tensors) -> None:
    for pages, state in zip(memory.states, states, strict=True):
        pages[entry].copy_(state)


def _chunks(recurrence: SteppedRecurrence, inputs: Tensors, memory: StatePages, row: Span) -> torch.Tensor:
    states = tuple(pages[row.entry] for pages in memory.states)
    outputs, done = [], 0
    for upto, target in (*row.saves, (row.end, None)):
        if upto - row.first > done:
            out, states = recurrence.chunks(tuple(x[done : upto - row.first] for x in inputs), states)
            outputs.append(out)
            done = upto - row.first
        _store(memory, row.entry if target is None else _entry(memory, target), states)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
