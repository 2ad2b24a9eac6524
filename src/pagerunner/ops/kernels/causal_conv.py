"""Causal convolution through pages of states. Twins: `pagerunner.ops.causal_conv`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import blocks
from pagerunner.ops.kernels.state_rows import save_arguments, state_entry
from pagerunner.ops.state_rows import StateRows

BLOCK_TOKENS = 16
BLOCK_CHANNELS = 256


@triton.jit
def _input(x, state, channel, in_range, token, first, x_stride, channels, taps):
    """A row's input at `token`, in x's dtype. Tokens before the row's first token of the step come from its state."""
    value = tl.load(x + token.to(tl.int64) * x_stride + channel, mask=in_range & (token >= first), other=0.0)
    held = tl.load(state + (taps - 1 + token - first) * channels + channel, mask=in_range & (token < first), other=0.0)
    return tl.where(token >= first, value, held.to(value.dtype))


@triton.jit(do_not_specialize=["num_tokens"])
def _tokens(
    x, out, state, weight, bias, table, slots, query_start, row_T,
    num_tokens, channels, x_stride, weight_stride, state_stride, table_stride,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Outputs of BT tokens and BC channels; states are read only."""
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    in_range = channel < channels
    row = tl.load(row_T + token, mask=token < num_tokens, other=-1)
    real = row >= 0
    first = tl.load(query_start + row, mask=real, other=0)
    slot = tl.load(slots + row, mask=real, other=0).to(tl.int64)
    entry = tl.load(table + slot * table_stride, mask=real, other=0)
    states = state + (entry * state_stride)[:, None]
    mask = real[:, None] & in_range[None, :]
    total = tl.zeros((BT, BC), dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        at = token - (TAPS - 1 - tap)
        value = _input(x, states, channel[None, :], mask, at[:, None], first[:, None], x_stride, channels, TAPS)
        taps = tl.load(weight + channel * weight_stride + tap, mask=in_range, other=0.0).to(tl.float32)
        total += value.to(tl.float32) * taps[None, :]
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=in_range, other=0.0).to(tl.float32)[None, :]
    total = total / (1.0 + tl.exp(-total))
    target = out + token.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(token < num_tokens)[:, None] & in_range[None, :])


@triton.jit
def _keep(x, state, target, channel, in_range, first, upto, x_stride, channels, TAPS: tl.constexpr):
    """Write the state before token `upto` to `target`, oldest first, which may be the state itself."""
    for tap in tl.static_range(TAPS - 1):
        value = _input(x, state, channel, in_range, upto - (TAPS - 1) + tap, first, x_stride, channels, TAPS)
        tl.store(target + tap * channels + channel, value.to(target.dtype.element_ty), mask=in_range)


@triton.jit
def _states(
    x, state, table, slots, query_start, save_start, save_end, save_target,
    channels, x_stride, state_stride, table_stride,
    HAS_SAVES: tl.constexpr, ITEM: tl.constexpr, TAPS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A row's saved states, then its last, of BC channels."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    in_range = channel < channels
    first = tl.load(query_start + row)
    end = tl.load(query_start + row + 1)
    if first == end:
        return
    own = state + state_entry(table, slots, row, table_stride) * state_stride
    if HAS_SAVES:
        stop = tl.load(save_start + row + 1)
        for at in range(tl.load(save_start + row), stop):
            target = state + tl.load(save_target + at) // ITEM
            _keep(x, own, target, channel, in_range, first, tl.load(save_end + at), x_stride, channels, TAPS)
    _keep(x, own, own, channel, in_range, first, end, x_stride, channels, TAPS)


@triton.jit
def _step(
    x, out, state, weight, bias, table, slots, query_start, save_start, save_end, save_target,
    channels, x_stride, weight_stride, state_stride, table_stride,
    HAS_SAVES: tl.constexpr, ITEM: tl.constexpr, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Output and state of a row of one token, which is the token of the row's number."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    in_range = channel < channels
    target = out + row.to(tl.int64) * channels + channel
    if tl.load(query_start + row) == tl.load(query_start + row + 1):
        tl.store(target, tl.zeros((BC,), dtype=out.dtype.element_ty), mask=in_range)
        return
    own = state + state_entry(table, slots, row, table_stride) * state_stride
    total = tl.zeros((BC,), dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        value = _input(x, own, channel, in_range, row - (TAPS - 1 - tap), row, x_stride, channels, TAPS)
        total += value.to(tl.float32) * tl.load(weight + channel * weight_stride + tap, mask=in_range, other=0.0).to(
            tl.float32
        )
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=in_range, other=0.0).to(tl.float32)
    total = total / (1.0 + tl.exp(-total))
    tl.store(target, total.to(out.dtype.element_ty), mask=in_range)
    if HAS_SAVES:
        at = tl.load(save_start + row)
        if at < tl.load(save_start + row + 1):
            copy = state + tl.load(save_target + at) // ITEM
            _keep(x, own, copy, channel, in_range, row, row + 1, x_stride, channels, TAPS)
    _keep(x, own, own, channel, in_range, row, row + 1, x_stride, channels, TAPS)


def causal_conv_rows(
    x_TC: torch.Tensor,
    state_EWC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    rows: StateRows,
) -> torch.Tensor:
    """See the twin."""
    tokens, channels = x_TC.shape
    out_TC = torch.empty(tokens, channels, dtype=x_TC.dtype, device=x_TC.device)
    taps, bias = weight_CW.shape[1], weight_CW if bias_C is None else bias_C
    where = (rows.page_table, rows.step.slots_R, rows.step.query_start_R1)
    *saves, has_saves = save_arguments(rows)
    strides = (x_TC.stride(0), weight_CW.stride(0), state_EWC.stride(0), rows.page_table.stride(0))
    columns = blocks(channels, BLOCK_CHANNELS)
    item = state_EWC.element_size()
    if rows.step.one_token:
        _step[(rows.step.num_rows, columns)](
            x_TC, out_TC, state_EWC, weight_CW, bias, *where, *saves, channels, *strides,
            has_saves, item, taps, bias_C is not None, BLOCK_CHANNELS,
        )  # fmt: skip
        return out_TC
    _tokens[(blocks(tokens, BLOCK_TOKENS), columns)](
        x_TC, out_TC, state_EWC, weight_CW, bias, *where, rows.step.row_T, tokens, channels, *strides,
        taps, bias_C is not None, BLOCK_TOKENS, BLOCK_CHANNELS,
    )  # fmt: skip
    _states[(rows.step.num_rows, columns)](
        x_TC, state_EWC, *where, *saves, channels, strides[0], *strides[2:],
        has_saves, item, taps, BLOCK_CHANNELS,
    )  # fmt: skip
    return out_TC
