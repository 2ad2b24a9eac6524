"""Causal convolution through pages of states. Twins: `pagerunner.ops.causal_conv`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.activation import logistic
from pagerunner.ops.kernels.launch import blocks, dependent, padded, start_next, wait_turn
from pagerunner.ops.kernels.recurrent.state_rows import (
    behind,
    row_arguments,
    row_tokens,
    save_arguments,
    save_token,
    saves_of,
    state_entry,
)
from pagerunner.ops.state_rows import StateRows

GROUP = 8  # tokens of a row whose inputs are read together
BLOCK_TOKENS = 4  # of several rows
BLOCK_CHANNELS = 256
DRAFTED_TOKENS = 4  # of a row with drafts, at once


@triton.jit
def _place(channel, GROUPS: tl.constexpr, KEY: tl.constexpr, VALUES: tl.constexpr):
    """Where a channel is in a token's inputs: at its number, or ordered by groups, as `ops/side_by_side.py` has it."""
    if GROUPS == 0:
        return channel
    wide: tl.constexpr = 2 * KEY + 2 * VALUES
    keys: tl.constexpr = 2 * GROUPS * KEY
    key = channel // KEY % GROUPS * wide + channel // (GROUPS * KEY) * KEY + channel % KEY
    value = (channel - keys) // VALUES * wide + 2 * KEY + (channel - keys) % VALUES
    return tl.where(channel < keys, key, value)


@triton.jit
def _input(source, channel, in_range, token, by_one, taps, JOURNAL: tl.constexpr):
    """A row's input at `token`, in x's dtype. Before the row's first token of the step come its accepted drafts, and before them
    what its state holds. If a row takes tokens one after another (`by_one`), each is rounded as a state is for those after it.

    `source`: the step's inputs, the row's state and journal; its first token, how many accepted drafts are before it, the channels,
    and where `channel` is in the inputs.
    """
    x, x_stride, state, entries, first, replayed, channels, place = source
    value = tl.load(x + tl.cast(token, tl.int64) * x_stride + place, mask=in_range & (token >= first), other=0.0)
    before = token - first + replayed
    held = tl.load(state + (taps - 1 + before) * channels + channel, mask=in_range & (before < 0), other=0.0)
    if JOURNAL > 0:
        draft = tl.load(
            entries + before * channels + channel, mask=in_range & (before >= 0) & (token < first), other=0.0
        )
        value = tl.where(token >= first, value, draft)
        if state.dtype != x.dtype:
            value = tl.where(by_one, value.to(state.dtype.element_ty).to(value.dtype), value)
    return tl.where(before >= 0, value, held.to(value.dtype))


@triton.jit
def _output(
    source, weights, channel, mask, token, by_one, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, JOURNAL: tl.constexpr
):
    """Outputs of one token or several. Tokens and what belongs to them are in the first dimension, or are one number."""
    weight, weight_stride, bias = weights
    _, _, _, _, _, _, channels, _ = source
    in_range = channel < channels
    for tap in tl.static_range(TAPS):
        at = token - (TAPS - 1 - tap)
        late = by_one & (tap < TAPS - 1)  # the token's own input isn't rounded
        value = _input(source, channel, mask, at, late, TAPS, JOURNAL)
        factor = tl.load(weight + channel * weight_stride + tap, mask=in_range, other=0.0).to(tl.float32)
        if tap == 0:
            total = value.to(tl.float32) * factor
        else:
            total += value.to(tl.float32) * factor
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=in_range, other=0.0).to(tl.float32)
    return total * logistic(total)


@triton.jit
def _within_row(
    x, x_stride, out, weights, begin, end, channel, place, channels,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Outputs of tokens whose taps are all inputs of the step, GROUP at a time: an input is read and widened once for all of them."""
    weight, weight_stride, bias = weights
    in_range = channel < channels
    factors = ()
    for tap in tl.static_range(TAPS):
        factor = tl.load(weight + channel * weight_stride + tap, mask=in_range, other=0.0)
        factors = factors + (factor.to(tl.float32),)  # noqa: RUF005
    shift = tl.load(bias + channel, mask=in_range, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
    for group in range(begin, end, GROUP):
        values = ()
        for at in tl.static_range(GROUP + TAPS - 1):
            token = group + at - (TAPS - 1)
            value = tl.load(x + tl.cast(token, tl.int64) * x_stride + place, mask=in_range & (token < end), other=0.0)
            values = values + (value.to(tl.float32),)  # noqa: RUF005
        for at in tl.static_range(GROUP):
            total = values[at] * factors[0]
            for tap in tl.static_range(1, TAPS):
                total += values[at + tap] * factors[tap]
            if HAS_BIAS:
                total += shift
            found = (total * logistic(total)).to(out.dtype.element_ty)
            to = out + tl.cast(group + at, tl.int64) * channels + channel
            tl.store(to, found, mask=in_range & (group + at < end))


@triton.jit(do_not_specialize=["num_tokens", "length"])
def _tokens(
    x, out, state, journal, weight, bias, table, slots, query_start, seq_lens, positions, accepted, row_T,
    num_tokens, length, channels, x_stride, weight_stride, state_stride, journal_stride, table_stride,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, JOURNAL: tl.constexpr, GROUPS: tl.constexpr, KEY: tl.constexpr, VALUES: tl.constexpr,
    GROUP: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Outputs of `length` tokens and BC channels; states are read only."""
    begin = tl.program_id(1) * length
    end = tl.minimum(begin + length, num_tokens)
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    weights = (weight, weight_stride, bias)
    only = tl.load(row_T + end - 1)
    alike = (begin >= TAPS - 1) & (only >= 0) & (tl.load(row_T + tl.maximum(begin - (TAPS - 1), 0)) == only)
    if JOURNAL > 0:
        alike &= tl.load(accepted + tl.maximum(only, 0)) < 0
    if alike:
        ordered = _place(channel, GROUPS, KEY, VALUES)
        _within_row(x, x_stride, out, weights, begin, end, channel, ordered, channels, TAPS, HAS_BIAS, GROUP)
    else:
        many = channel[None, :]
        place = _place(many, GROUPS, KEY, VALUES)
        for part in range(begin, end, BT):
            token = (part + tl.arange(0, BT))[:, None]
            row = tl.load(row_T + token, mask=token < end, other=-1)
            real = row >= 0
            first = tl.load(query_start + row, mask=real, other=0)
            slot = tl.load(slots + row, mask=real, other=0).to(tl.int64)
            entry = tl.load(table + slot * table_stride, mask=real, other=0)
            held = tl.load(accepted + row, mask=real, other=-1) if JOURNAL > 0 else tl.full((BT, 1), -1, tl.int32)
            own, entries = state + entry * state_stride, journal + entry * journal_stride
            mask = real & (many < channels)
            source = (x, x_stride, own, entries, first, tl.maximum(held, 0), channels, place)
            found = _output(source, weights, many, mask, token, held >= 0, TAPS, HAS_BIAS, JOURNAL)
            target = out + token.to(tl.int64) * channels + many
            tl.store(target, found.to(out.dtype.element_ty), mask=(token < end) & (many < channels))


@triton.jit
def _keep(source, target, channel, in_range, upto, TAPS: tl.constexpr, JOURNAL: tl.constexpr):
    """Write the state before token `upto` to `target`, oldest first, which may be the state itself."""
    _, _, _, _, _, _, channels, _ = source
    for tap in tl.static_range(TAPS - 1):
        at = upto - (TAPS - 1) + tap
        value = _input(source, channel, in_range, at, True, TAPS, JOURNAL)
        tl.store(target + tap * channels + channel, value.to(target.dtype.element_ty), mask=in_range)


@triton.jit
def _one_token(
    x, x_stride, out, state, own, weights, row, token, channel, in_range, positions, saves, channels,
    HAS_SAVES: tl.constexpr, ITEM: tl.constexpr, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Output and state of a row that has one token, and no accepted drafts before it."""
    save_start, save_position, save_target = saves
    source = (x, x_stride, own, own, token, 0, channels, channel)
    total = _output(source, weights, channel, in_range, token, False, TAPS, HAS_BIAS, 0)
    tl.store(out + tl.cast(token, tl.int64) * channels + channel, total.to(out.dtype.element_ty), mask=in_range)
    if HAS_SAVES:
        for save in range(tl.load(save_start + row), tl.load(save_start + row + 1)):
            there = in_range & (tl.load(save_position + save) == tl.load(positions + token) + 1)
            copy = state + tl.load(save_target + save) // ITEM
            _keep(source, copy, channel, there, token + 1, TAPS, 0)
    _keep(source, own, channel, in_range, token + 1, TAPS, 0)


@triton.jit
def _gates(gate, gate_stride, gate_out, entries, row, tokens, num_tokens, OUTPUTS: tl.constexpr, JOURNAL: tl.constexpr,
           HEADS: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    """Accepted drafts' gates go from the journal to their places behind the step's tokens, and drafts' gates into the journal.

    `tokens`: the row's, as `row_tokens` gives them.
    """
    first, end, certain, replayed, _ = tokens
    head = tl.arange(0, BH)
    inside = head < HEADS
    for at in range(replayed):
        value = tl.load(entries + at * HEADS + head, mask=inside)
        tl.store(gate_out + (num_tokens + row * JOURNAL + at).to(tl.int64) * HEADS + head, value, mask=inside)
    tl.debug_barrier()
    for token in range(first if OUTPUTS else certain, end):
        value = tl.load(gate + tl.cast(token, tl.int64) * gate_stride + head, mask=inside)
        if OUTPUTS:
            tl.store(gate_out + tl.cast(token, tl.int64) * HEADS + head, value, mask=inside)
        tl.store(
            entries + (token - certain) * HEADS + head,
            value,
            mask=inside & (token >= certain) & (token < certain + JOURNAL),
        )


@triton.jit(do_not_specialize=["num_tokens"])
def _rows(
    x, out, state, journal, weight, bias, gate, gate_out, gate_journal, gate_2, gate_2_out, gate_2_journal,
    table, slots, query_start, seq_lens, positions, accepted, save_start, save_row, save_position, save_target,
    num_tokens, channels, x_stride, weight_stride, gate_stride, gate_2_stride, state_stride, journal_stride, table_stride,
    HAS_SAVES: tl.constexpr, ITEM: tl.constexpr, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, JOURNAL: tl.constexpr,
    OUTPUTS: tl.constexpr, GATES: tl.constexpr, HEADS: tl.constexpr, BH: tl.constexpr,
    GROUPS: tl.constexpr, KEY: tl.constexpr, VALUES: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A row's saved states, then its last, of BC channels. With a journal also the outputs of accepted drafts, and the drafts go
    into the journal. With OUTPUTS also the outputs of the step's tokens. Behind the channels comes a program for each gate.
    """
    row, column = tl.program_id(0), tl.program_id(1)
    channel = column * BC + tl.arange(0, BC)
    in_range = channel < channels
    tokens = row_tokens(query_start, seq_lens, positions, accepted, row, JOURNAL)
    first, end, certain, replayed, by_one = tokens
    weights, saves = (weight, weight_stride, bias), (save_start, save_position, save_target)
    if OUTPUTS:
        for token in range(end, tl.load(query_start + row + 1)):
            tl.store(
                out + tl.cast(token, tl.int64) * channels + channel,
                tl.zeros((BC,), out.dtype.element_ty),
                mask=in_range,
            )
    if first == end:
        return
    entry = state_entry(table, slots, row, table_stride)
    if JOURNAL > 0:
        which = column - tl.cdiv(channels, BC)
        if which == 0:
            held = gate_journal + entry * journal_stride
            _gates(gate, gate_stride, gate_out, held, row, tokens, num_tokens, OUTPUTS, JOURNAL, HEADS, BH)
        if GATES > 1:
            if which == 1:
                held = gate_2_journal + entry * journal_stride
                _gates(gate_2, gate_2_stride, gate_2_out, held, row, tokens, num_tokens, OUTPUTS, JOURNAL, HEADS, BH)
        if which >= 0:
            return
    own = state + entry * state_stride
    entries = journal + entry * journal_stride
    if OUTPUTS:
        if (replayed == 0) & (end == first + 1):  # as when drafts don't pay
            _one_token(
                x, x_stride, out, state, own, weights, row, first, channel, in_range, positions, saves, channels,
                HAS_SAVES, ITEM, TAPS, HAS_BIAS,
            )  # fmt: skip
            return
    source = (x, x_stride, own, entries, first, replayed, channels, _place(channel, GROUPS, KEY, VALUES))
    if JOURNAL > 0:
        stop = end if OUTPUTS else first
        for begin in range(first - replayed, stop, BT):
            many, there = (begin + tl.arange(0, BT))[:, None], channel[None, :]
            mask = (many < stop) & in_range[None, :]
            found = _output(source, weights, there, mask, many, by_one, TAPS, HAS_BIAS, JOURNAL)
            to = out + behind(many, first, replayed, row, num_tokens, JOURNAL).to(tl.int64) * channels + there
            tl.store(to, found.to(out.dtype.element_ty), mask=mask)
        tl.debug_barrier()  # all is read before anything is written
    at, stop, shift = saves_of(save_start, positions, row, first, end, HAS_SAVES)
    for save in range(at, stop):
        upto = save_token(save_position, save, stop, shift, certain)
        there = in_range & (upto > first - replayed) & (upto <= certain)
        target = state + tl.load(save_target + save) // ITEM
        _keep(source, target, channel, there, upto, TAPS, JOURNAL)
    _keep(source, own, channel, in_range, certain, TAPS, JOURNAL)
    if JOURNAL > 0:
        tl.debug_barrier()
        for token in range(certain, tl.minimum(end, certain + JOURNAL)):
            value = tl.load(x + tl.cast(token, tl.int64) * x_stride + channel, mask=in_range)
            tl.store(entries + (token - certain) * channels + channel, value, mask=in_range)


@triton.jit
def _step(
    x, out, state, weight, bias, table, slots, query_start, positions, save_start, save_position, save_target,
    channels, x_stride, weight_stride, state_stride, table_stride,
    HAS_SAVES: tl.constexpr, ITEM: tl.constexpr, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Output and state of a row of one token, which is the token of the row's number. What comes after it may read states before it waits."""
    wait_turn(PDL)
    start_next(PDL)
    row = tl.program_id(0)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    in_range = channel < channels
    if tl.load(query_start + row) == tl.load(query_start + row + 1):
        target = out + row.to(tl.int64) * channels + channel
        tl.store(target, tl.zeros((BC,), dtype=out.dtype.element_ty), mask=in_range)
        return
    own = state + state_entry(table, slots, row, table_stride) * state_stride
    weights, saves = (weight, weight_stride, bias), (save_start, save_position, save_target)
    _one_token(
        x, x_stride, out, state, own, weights, row, row, channel, in_range, positions, saves, channels,
        HAS_SAVES, ITEM, TAPS, HAS_BIAS,
    )  # fmt: skip


def tokens_each(tokens: int) -> int:
    """How many tokens of a step a program has one after another: few programs read a token's neighbours twice, many leave no multiprocessor idle."""
    return 4 if tokens <= 512 else 8 if tokens <= 2048 else 16


def causal_conv_rows(
    x_TC: torch.Tensor,
    state_EWC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    rows: StateRows,
    groups: int = 0,
    key_dim: int = 0,
) -> torch.Tensor:
    """See the twin."""
    if groups or not rows.step.one_token:
        return journaled_conv_rows(x_TC, (), state_EWC, (), weight_CW, bias_C, rows, groups, key_dim)[0]
    channels = x_TC.shape[1]
    out_TC = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    start, _, position, target, has_saves = save_arguments(rows)
    _step[(rows.step.num_rows, blocks(channels, BLOCK_CHANNELS))](
        x_TC, out_TC, state_EWC, weight_CW, weight_CW if bias_C is None else bias_C, rows.page_table, rows.step.slots_R,
        rows.step.query_start_R1, rows.step.positions_T, start, position, target, channels,
        x_TC.stride(0), weight_CW.stride(0), state_EWC.stride(0), rows.page_table.stride(0),
        has_saves, state_EWC.element_size(), weight_CW.shape[1], bias_C is not None, BLOCK_CHANNELS, **dependent(x_TC.device),
    )  # fmt: skip
    return out_TC


def journaled_conv_rows(
    x_TC: torch.Tensor,
    gates: tuple[torch.Tensor, ...],
    state_EWC: torch.Tensor,
    journal: tuple[torch.Tensor, ...],
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    rows: StateRows,
    groups: int = 0,
    key_dim: int = 0,
) -> tuple[torch.Tensor, ...]:
    """See the twin. Without a journal, x may be ordered by `groups`, as `causal_conv_rows` says."""
    tokens, channels, count = x_TC.shape[0], weight_CW.shape[0], journal[0].shape[1] if journal else 0
    places, order = tokens + rows.step.num_rows * count, (0, 0, 0)
    if groups:
        order = groups, key_dim, channels // groups - 2 * key_dim
    out, *gates_out = (x_TC.new_empty(places, part.shape[1]) for part in (weight_CW.t(), *gates))
    where, _ = row_arguments(rows, out)
    assert len({kept.stride(0) for kept in journal}) < 2, "journals are parts of pages: one stride leads to all of them"
    (*saves, has_saves), taps, one_launch = save_arguments(rows), weight_CW.shape[1], bool(journal) and rows.few
    weights = (weight_CW, weight_CW if bias_C is None else bias_C)
    strides = (state_EWC.stride(0), journal[0].stride(0) if journal else 0, rows.page_table.stride(0))
    columns, entries = blocks(channels, BLOCK_CHANNELS), journal[0] if journal else state_EWC
    if not one_launch:
        length = tokens_each(tokens)
        _tokens[(columns, blocks(tokens, length))](
            x_TC, out, state_EWC, entries, *weights, rows.page_table, *where, rows.step.row_T, tokens, length, channels,
            x_TC.stride(0), weight_CW.stride(0), *strides,
            taps, bias_C is not None, count, *order, GROUP, BLOCK_TOKENS, BLOCK_CHANNELS, num_warps=1,
        )  # fmt: skip
        for gate, copy in zip(gates, gates_out, strict=True):
            copy[:tokens].copy_(gate)
    held = [(gate, copy, kept) for gate, copy, kept in zip(gates, gates_out, journal[1:], strict=True)]
    nothing = (x_TC, out, entries)
    one, two = (*held, nothing, nothing)[:2]
    heads = gates[0].shape[1] if gates else 1
    _rows[(rows.step.num_rows, columns + len(gates))](
        x_TC, out, state_EWC, entries, *weights, *one, *two, rows.page_table, *where, *saves, tokens, channels,
        x_TC.stride(0), weight_CW.stride(0), one[0].stride(0), two[0].stride(0), *strides,
        has_saves, state_EWC.element_size(), taps, bias_C is not None, count, one_launch, len(gates), heads, padded(heads),
        *order, DRAFTED_TOKENS, BLOCK_CHANNELS,
    )  # fmt: skip
    return out, *gates_out
