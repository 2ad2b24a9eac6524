"""The backend of recurrent groups: layers whose memory is one state per request instead of tokens in pages.

A row's state is read from the page in column 0 of its table and written back after the row's tokens of the step. A row
that begins at position 0 finds a zeroed page. Rows of one token take a step together. Longer rows run one after another, in
chunks. If the plan asks for the state at a position inside a row, the row is divided there.

Shape letters: T tokens of the step, B rows, L tokens of a row, C convolution channels, W taps of the convolution, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F

from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.attention.calls import Recurrence, RecurrentCall, Tensors
from pagerunner.attention.capability import Capabilities
from pagerunner.batch import StatePages, StepRows
from pagerunner.ops.causal_conv import causal_conv, causal_conv_rows
from pagerunner.ops.gdn import decay_logs, gated_delta_chunks, gated_delta_rows, gated_delta_step, split_heads
from pagerunner.ops.mamba2 import mamba2_chunks, mamba2_rows, mamba2_step, split_parts
from pagerunner.ops.native import recurrent as native
from pagerunner.ops.state_rows import StateRows


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Convolution, then the gated delta rule. Inputs: queries, keys and values side by side [T, C], rates' logits [T, H]
    and decays' [T, H]. States: (W - 1, C) and (H, key_dim, value_dim). Outputs: [T, H, value_dim] in the inputs' dtype.
    """

    conv_weight_CW: torch.Tensor
    decay_log_H: torch.Tensor
    decay_bias_H: torch.Tensor
    num_key_heads: int
    key_dim: int
    value_dim: int

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

    def rows(self, inputs: Tensors, pages: Tensors, rows: StateRows) -> torch.Tensor:
        """See Recurrence."""
        x_TC, rates_TH, decays_TH = inputs
        mixed_TC = causal_conv_rows(x_TC, pages[0], self.conv_weight_CW, None, rows)
        decay = (self.decay_log_H, self.decay_bias_H)
        return gated_delta_rows(mixed_TC, rates_TH, decays_TH, *decay, pages[1], self.num_key_heads, rows)

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

    def rows(self, inputs: Tensors, pages: Tensors, rows: StateRows) -> torch.Tensor:
        """See Recurrence."""
        x_TC, steps_TH = inputs
        mixed_TC = causal_conv_rows(x_TC, pages[0], self.conv_weight_CW, self.conv_bias_C, rows)
        return mamba2_rows(mixed_TC, steps_TH, self.decay_log_H, self.step_bias_H, self.skip_H, pages[1], rows)

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


@dataclass(frozen=True, slots=True)
class _LongRow:
    row: int
    first: int
    length: int
    start: int
    entry: int


@dataclass(frozen=True, slots=True)
class TorchRecurrentPlan:
    """How a step's rows are divided into rows of one token and longer rows.

    Rows of one token have a row number, a position, a token index and a table entry. Longer rows have a first token, a
    number of tokens, a start in the sequence and a table entry. `saves` are by row and in order. A save is (position, byte
    offset of a page): the state after the tokens before the position goes to that page.
    """

    single_rows: list[int]
    single_starts: list[int]
    single_tokens: torch.Tensor
    single_entries: torch.Tensor
    long_rows: list[_LongRow]
    saves: dict[int, list[tuple[int, int]]]


class RecurrentBackend:
    """See the module. Holds nothing between calls."""

    name = "recurrent"
    capabilities = Capabilities(forms=frozenset({"recurrent"}))

    def new_state(self, shape: GraphShape | None) -> None:
        """None: it is never captured, and keeps nothing of a step."""

    def plan(self, inputs: PlanInputs, state: None) -> TorchRecurrentPlan:
        """Divide the rows."""
        query_lens, seq_lens = inputs.query_lens, inputs.seq_lens
        entries_R = inputs.page_table[:, 0].index_select(0, inputs.rows.slots_R)
        hosts, firsts = entries_R.tolist(), [0, *accumulate(query_lens)]
        single = [row for row, length in enumerate(query_lens) if length == 1]
        single_R = torch.tensor(single, dtype=torch.int64, device=entries_R.device)
        saves: dict[int, list[tuple[int, int]]] = {}
        for save in sorted(inputs.state_saves, key=lambda save: save.position):
            saves.setdefault(save.row, []).append((save.position, save.target))
        return TorchRecurrentPlan(
            single_rows=single,
            single_starts=[seq_lens[row] - 1 for row in single],
            single_tokens=inputs.rows.query_start_R1[:-1][single_R].long(),
            single_entries=entries_R[single_R],
            long_rows=[
                _LongRow(row, firsts[row], length, seq_lens[row] - length, hosts[row])
                for row, length in enumerate(query_lens)
                if length > 1
            ],
            saves=saves,
        )

    def run(self, call: RecurrentCall) -> torch.Tensor:
        """See RecurrentCall."""
        recurrence, inputs, pages, group, _ = call
        plan: TorchRecurrentPlan = group.plan
        out: torch.Tensor | None = None
        if plan.single_rows:
            every = not plan.long_rows
            chosen = inputs if every else tuple(x.index_select(0, plan.single_tokens) for x in inputs)
            result = _step(recurrence, chosen, pages, plan)
            if every:
                return result
            out = result.new_empty(inputs[0].shape[0], *result.shape[1:])
            out.index_copy_(0, plan.single_tokens, result)
        for row in plan.long_rows:
            part = slice(row.first, row.first + row.length)
            result = _chunks(recurrence, tuple(x[part] for x in inputs), pages, row, plan.saves.get(row.row, []))
            if row.length == inputs[0].shape[0]:
                return result
            if out is None:
                out = result.new_empty(inputs[0].shape[0], *result.shape[1:])
            out[part] = result
        assert out is not None, "a step has no rows"
        return out


def _entry(memory: StatePages, target: int) -> int:
    """The table entry of the page at a byte offset."""
    state = memory.states[0]
    return target // int(state.stride(0) * state.element_size())


def _store(memory: StatePages, entry: int, states: Tensors) -> None:
    for pages, state in zip(memory.states, states, strict=True):
        pages[entry].copy_(state)


def _step(
    recurrence: Recurrence,
    inputs: Tensors,
    memory: StatePages,
    plan: TorchRecurrentPlan,
) -> torch.Tensor:
    entries = plan.single_entries
    out, states = recurrence.step(inputs, tuple(pages.index_select(0, entries) for pages in memory.states))
    for pages, state in zip(memory.states, states, strict=True):
        pages[entries] = state.to(pages.dtype)
    if plan.saves:
        for index, (row, start) in enumerate(zip(plan.single_rows, plan.single_starts, strict=True)):
            for position, target in plan.saves.get(row, []):
                assert position == start + 1, f"state save at {position} of a row of position {start}"
                _store(memory, _entry(memory, target), tuple(state[index] for state in states))
    return out


def _chunks(
    recurrence: Recurrence, inputs: Tensors, memory: StatePages, row: _LongRow, saves: list[tuple[int, int]]
) -> torch.Tensor:
    states = tuple(pages[row.entry] for pages in memory.states)
    outputs = []
    done = 0
    for position, target in saves:
        upto = position - row.start
        assert 0 < upto <= row.length, f"state save at {position} of a row of [{row.start}, +{row.length})"
        if upto > done:
            out, states = recurrence.chunks(tuple(x[done:upto] for x in inputs), states)
            outputs.append(out)
            done = upto
        _store(memory, _entry(memory, target), states)
    if done < row.length:
        out, states = recurrence.chunks(tuple(x[done:] for x in inputs), states)
        outputs.append(out)
    _store(memory, row.entry, states)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
