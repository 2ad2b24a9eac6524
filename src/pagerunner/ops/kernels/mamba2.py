"""Mamba-2's recurrence through pages of states. Twins: `pagerunner.ops.mamba2`.

Rows of a few tokens take them one after another (`_few`), longer ones in blocks of 64 tokens of the step (`_chunks`), cut
where rows meet by masks alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.state_rows import next_save, save_arguments, softplus, state_entry
from pagerunner.ops.state_rows import CHUNK, FEW_TOKENS, StateRows

FEW = (32, 8)  # values of a program, its warps
CHUNKS = (32, 4, 1)  # values of a program, its warps, stages of its loads


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _few(
    mixed, steps, decay_log, step_bias, skip, state, out,
    table, slots, query_start, save_start, save_end, save_target,
    num_rows, num_tokens, mixed_stride, steps_stride, state_stride, table_stride,
    HAS_SAVES: tl.constexpr, ITEM: tl.constexpr, MOST: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BP values of one head of one row of at most MOST tokens. Row R stands for the padding, whose outputs are zero."""
    head, row = tl.program_id(1), tl.program_id(2)
    values, inner = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, BN)
    in_p, in_n = values < P, inner < N
    out += head * P + values
    first = tl.load(query_start + row)
    end = num_tokens if row == num_rows else tl.load(query_start + row + 1)
    if row == num_rows:
        for token in range(first, end):
            nothing = tl.zeros((BP,), dtype=out.dtype.element_ty)
            tl.store(out + tl.cast(token, tl.int64) * (HEADS * P), nothing, mask=in_p)
        return
    if (first == end) | (end - first > MOST):
        return
    inside = head * (P * N) + values[:, None] * N + inner[None, :]
    mask = in_p[:, None] & in_n[None, :]
    own = state + state_entry(table, slots, row, table_stride) * state_stride + inside
    held = tl.load(own, mask=mask, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(decay_log + head).to(tl.float32))
    bias, passed = tl.load(step_bias + head).to(tl.float32), tl.load(skip + head).to(tl.float32)
    b_at = HEADS * P + (head // (HEADS // GROUPS)) * N + inner
    at = tl.load(save_start + row) if HAS_SAVES else 0
    stop = tl.load(save_start + row + 1) if HAS_SAVES else 0
    for token in range(first, end):
        source = mixed + tl.cast(token, tl.int64) * mixed_stride
        x = tl.load(source + head * P + values, mask=in_p, other=0.0).to(tl.float32)
        b = tl.load(source + b_at, mask=in_n, other=0.0).to(tl.float32)
        c = tl.load(source + GROUPS * N + b_at, mask=in_n, other=0.0).to(tl.float32)
        dt = softplus(tl.load(steps + token * steps_stride + head).to(tl.float32) + bias)
        held = held * tl.exp(dt * rate) + (x * dt)[:, None] * b[None, :]
        answer = tl.sum(held * c[None, :], 1) + x * passed
        tl.store(out + tl.cast(token, tl.int64) * (HEADS * P), answer.to(out.dtype.element_ty), mask=in_p)
        if HAS_SAVES:
            while next_save(save_end, at, stop) <= token + 1:
                copy = state + tl.load(save_target + at) // ITEM + inside
                tl.store(copy, held.to(state.dtype.element_ty), mask=mask)
                at += 1
    tl.store(own, held.to(state.dtype.element_ty), mask=mask)


@triton.jit
def _chunks(
    mixed, steps, decay_log, step_bias, skip, state, out,
    table, slots, query_start, save_start, save_end, save_target,
    mixed_stride, steps_stride, state_stride, table_stride,
    HAS_SAVES: tl.constexpr, ITEM: tl.constexpr, MOST: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
    SUM: tl.constexpr,
):  # fmt: skip
    """BP values of one head of one row of more than MOST tokens, block by block."""
    head, row = tl.program_id(1), tl.program_id(2)
    first, end = tl.load(query_start + row), tl.load(query_start + row + 1)
    if end - first <= MOST:
        return
    values, inner, index = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, BN), tl.arange(0, C)
    in_p, in_n = values < P, inner < N
    inside = head * (P * N) + values[:, None] * N + inner[None, :]
    mask = in_p[:, None] & in_n[None, :]
    own = state + state_entry(table, slots, row, table_stride) * state_stride + inside
    held = tl.load(own, mask=mask, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(decay_log + head).to(tl.float32))
    bias, passed = tl.load(step_bias + head).to(tl.float32), tl.load(skip + head).to(tl.float32)
    at = tl.load(save_start + row) if HAS_SAVES else 0
    stop = tl.load(save_start + row + 1) if HAS_SAVES else 0
    for block in range(first // C, tl.cdiv(end, C)):
        token = block * C + index
        mine = (token >= first) & (token < end)
        first_token = tl.cast(block, tl.int64) * C
        source = mixed + first_token * mixed_stride
        b_at = index[:, None] * mixed_stride + HEADS * P + (head // (HEADS // GROUPS)) * N + inner[None, :]
        b = tl.load(source + b_at, mask=mine[:, None] & in_n[None, :], other=0.0)
        c = tl.load(source + GROUPS * N + b_at, mask=mine[:, None] & in_n[None, :], other=0.0)
        x_at = index[:, None] * mixed_stride + head * P + values[None, :]
        x = tl.load(source + x_at, mask=mine[:, None] & in_p[None, :], other=0.0).to(tl.float32)
        step = tl.load(steps + token * steps_stride + head, mask=mine, other=0.0)
        dt = tl.where(mine, softplus(step.to(tl.float32) + bias), 0.0)
        # a strong decay makes sums large of which small differences matter
        total = tl.cumsum((dt * rate).to(SUM), 0)
        seen = (index[:, None] >= index[None, :]) & mine[:, None] & mine[None, :]
        decay = tl.where(seen, tl.exp(tl.minimum((total[:, None] - total[None, :]).to(tl.float32), 0.0)), 0.0)
        scaled = x * dt[:, None]
        weights = tl.dot(c, tl.trans(b), input_precision=PRECISION) * decay
        answer = tl.dot(weights, scaled, input_precision=PRECISION) + x * passed
        read = tl.dot(c.to(tl.float32), tl.trans(held), input_precision=PRECISION)
        answer += read * tl.exp(total.to(tl.float32))[:, None]
        target = out + first_token * (HEADS * P) + (index[:, None] * HEADS + head) * P + values[None, :]
        tl.store(target, answer.to(out.dtype.element_ty), mask=mine[:, None] & in_p[None, :])
        upto = tl.minimum(end, block * C + C)
        b_wide = b.to(tl.float32)
        if HAS_SAVES:
            while next_save(save_end, at, stop) <= upto:
                cut = tl.load(save_end + at)
                now = tl.sum(tl.where(token == cut - 1, total, 0.0), 0)
                fade = tl.where(mine & (token < cut), tl.exp(tl.minimum((now - total).to(tl.float32), 0.0)), 0.0)
                part = tl.dot(tl.trans(scaled * fade[:, None]), b_wide, input_precision=PRECISION)
                saved = held * tl.exp(now.to(tl.float32)) + part
                copy = state + tl.load(save_target + at) // ITEM + inside
                tl.store(copy, saved.to(state.dtype.element_ty), mask=mask)
                at += 1
        last = tl.sum(tl.where(token == upto - 1, total, 0.0), 0)
        tail = tl.where(mine, tl.exp(tl.minimum((last - total).to(tl.float32), 0.0)), 0.0)
        added = tl.dot(tl.trans(scaled * tail[:, None]), b_wide, input_precision=PRECISION)
        held = held * tl.exp(last.to(tl.float32)) + added
    tl.store(own, held.to(state.dtype.element_ty), mask=mask)


def mamba2_rows(
    mixed_TC: torch.Tensor,
    steps_TH: torch.Tensor,
    decay_log_H: torch.Tensor,
    step_bias_H: torch.Tensor,
    skip_H: torch.Tensor,
    state_EHPN: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """See the twin."""
    tokens, channels = mixed_TC.shape
    heads, head_dim, state_size = state_EHPN.shape[1:]
    out_THP = torch.empty(tokens, heads, head_dim, dtype=mixed_TC.dtype, device=mixed_TC.device)
    *saves, has_saves = save_arguments(rows)
    arguments = (
        mixed_TC, steps_TH, decay_log_H, step_bias_H, skip_H, state_EHPN, out_THP,
        rows.page_table, rows.slots_R, rows.query_start_R1, *saves,
    )  # fmt: skip
    strides = (mixed_TC.stride(0), steps_TH.stride(0), state_EHPN.stride(0), rows.page_table.stride(0))
    groups = (channels - heads * head_dim) // (2 * state_size)
    block_n = max(16, triton.next_power_of_2(state_size))
    options = (has_saves, state_EHPN.element_size(), FEW_TOKENS, groups, heads, head_dim, state_size)
    block_p, warps = FEW
    _few[(triton.cdiv(head_dim, block_p), heads, rows.num_rows + 1)](
        *arguments, rows.num_rows, tokens, *strides, *options, block_p, block_n, num_warps=warps
    )
    if not rows.few:
        block_p, warps, stages = CHUNKS
        precision, sums = ("tf32x3", tl.float64) if mixed_TC.dtype == torch.float32 else ("tf32", tl.float32)
        _chunks[(triton.cdiv(head_dim, block_p), heads, rows.num_rows)](
            *arguments, *strides, *options, block_p, block_n, CHUNK, precision, sums, num_warps=warps, num_stages=stages
        )
    return out_THP
