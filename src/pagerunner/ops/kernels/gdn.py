"""The gated delta rule through pages of states. Twins: `pagerunner.ops.gdn`.

Rows of a few tokens take them one after another (`_few`). Longer rows run in blocks of 64 tokens of the step, cut where
rows meet by masks alone: `_systems` solves every block's triangular system in parallel, `_chunks` passes states from
block to block. A correction depends on the tokens before it only, so the state after any token of a block follows from
the same solution, and a save costs one more product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.state_rows import next_save, save_arguments, softplus, state_entry
from pagerunner.ops.state_rows import CHUNK, FEW_TOKENS, StateRows

FEW = (32, 4)  # values of a program, its warps
SYSTEM_WARPS = 4
CHUNKS = (32, 8, 1)  # values of a program, its warps, stages of its loads
SOLVE = tl.constexpr(16)  # rows of a system that are solved one after another


@triton.jit
def _scale(x, extra):
    """What makes rows of x as long as `extra`."""
    return extra * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _few(
    mixed, rates, decays, decay_log, decay_bias, state, out,
    table, slots, query_start, save_start, save_end, save_target,
    num_rows, num_tokens, mixed_stride, rates_stride, decays_stride, state_stride, table_stride,
    HAS_SAVES: tl.constexpr, ITEM: tl.constexpr, MOST: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """BV values of one head of one row of at most MOST tokens. Row R stands for the padding, whose outputs are zero."""
    head, row = tl.program_id(1), tl.program_id(2)
    keys, values = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    in_k, in_v = keys < K, values < V
    out += head * V + values
    first = tl.load(query_start + row)
    end = num_tokens if row == num_rows else tl.load(query_start + row + 1)
    if row == num_rows:
        for token in range(first, end):
            nothing = tl.zeros((BV,), dtype=out.dtype.element_ty)
            tl.store(out + tl.cast(token, tl.int64) * (HEADS * V), nothing, mask=in_v)
        return
    if (first == end) | (end - first > MOST):
        return
    inside = head * (K * V) + keys[:, None] * V + values[None, :]
    mask = in_k[:, None] & in_v[None, :]
    own = state + state_entry(table, slots, row, table_stride) * state_stride + inside
    held = tl.load(own, mask=mask, other=0.0).to(tl.float32)
    rate_of_decay = -tl.exp(tl.load(decay_log + head).to(tl.float32))
    bias = tl.load(decay_bias + head).to(tl.float32)
    q_at = (head // (HEADS // KEY_HEADS)) * K + keys
    at = tl.load(save_start + row) if HAS_SAVES else 0
    stop = tl.load(save_start + row + 1) if HAS_SAVES else 0
    for token in range(first, end):
        source = mixed + tl.cast(token, tl.int64) * mixed_stride
        q = tl.load(source + q_at, mask=in_k, other=0.0).to(tl.float32)
        k = tl.load(source + KEY_HEADS * K + q_at, mask=in_k, other=0.0).to(tl.float32)
        v = tl.load(source + 2 * KEY_HEADS * K + head * V + values, mask=in_v, other=0.0).to(tl.float32)
        q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * (K**-0.5)
        k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        rate = 1.0 / (1.0 + tl.exp(-tl.load(rates + token * rates_stride + head).to(tl.float32)))
        fade = rate_of_decay * softplus(tl.load(decays + token * decays_stride + head).to(tl.float32) + bias)
        held *= tl.exp(fade)
        change = (v - tl.sum(held * k[:, None], 0)) * rate
        held += k[:, None] * change[None, :]
        answer = tl.sum(held * q[:, None], 0)
        tl.store(out + tl.cast(token, tl.int64) * (HEADS * V), answer.to(out.dtype.element_ty), mask=in_v)
        if HAS_SAVES:
            while next_save(save_end, at, stop) <= token + 1:
                copy = state + tl.load(save_target + at) // ITEM + inside
                tl.store(copy, held.to(state.dtype.element_ty), mask=mask)
                at += 1
    tl.store(own, held.to(state.dtype.element_ty), mask=mask)


@triton.jit
def _inverse(a, index, C: tl.constexpr):
    """The inverse of I + a, where a [C, C] is strictly lower triangular.

    Blocks of SOLVE on the diagonal by substitution, all of them at once; what is left is nilpotent in blocks.
    """
    blocks: tl.constexpr = C // SOLVE
    same = (index[:, None] // SOLVE) == (index[None, :] // SOLVE)
    split = tl.reshape(tl.where(same, -a, 0.0), (blocks, SOLVE, blocks, SOLVE))
    found = tl.sum(split, 2)
    lane = tl.arange(0, SOLVE)
    for i in tl.static_range(1, SOLVE):
        row = tl.sum(tl.where((lane == i)[None, :, None], found, 0.0), 1)
        row += tl.sum(row[:, :, None] * found, 1)
        found = tl.where((lane == i)[None, :, None], row[:, None, :], found)
    found += (lane[:, None] == lane[None, :]).to(tl.float32)[None, :, :]
    whole = tl.reshape(tl.broadcast_to(found[:, :, None, :], (blocks, SOLVE, blocks, SOLVE)), (C, C))
    diagonal = tl.where(same, whole, 0.0)
    off = tl.dot(diagonal, tl.where(same, 0.0, a), input_precision="tf32x3")
    one = (index[:, None] == index[None, :]).to(tl.float32)
    square = tl.dot(off, off, input_precision="tf32x3")
    rest = one - off + square - tl.dot(off, square, input_precision="tf32x3")
    return tl.dot(rest, diagonal, input_precision="tf32x3")


@triton.jit(do_not_specialize=["num_tokens"])
def _systems(
    mixed, rates, decays, decay_log, decay_bias, solved, attended, sums, row_T,
    num_tokens, mixed_stride, rates_stride, decays_stride,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Of one head and block: the running sums of log decays since the row's or block's beginning [T, H], the matrix
    from wanted values to corrections and that from corrections to outputs [T, H, C].
    """
    head, index = tl.program_id(1), tl.arange(0, C)
    token, keys = tl.program_id(0) * C + index, tl.arange(0, BK)
    live = token < num_tokens
    row = tl.load(row_T + token, mask=live, other=-1)
    mask = (row >= 0)[:, None] & (keys < K)[None, :]
    q_at = token.to(tl.int64)[:, None] * mixed_stride + (head // (HEADS // KEY_HEADS)) * K + keys[None, :]
    q = tl.load(mixed + q_at, mask=mask, other=0.0)
    k = tl.load(mixed + KEY_HEADS * K + q_at, mask=mask, other=0.0)
    q_scale, k_scale = _scale(q.to(tl.float32), K**-0.5), _scale(k.to(tl.float32), 1.0)
    rate = 1.0 / (1.0 + tl.exp(-tl.load(rates + token * rates_stride + head, mask=live, other=0.0).to(tl.float32)))
    logit = tl.load(decays + token * decays_stride + head, mask=live, other=0.0).to(tl.float32)
    rate_of_decay = -tl.exp(tl.load(decay_log + head).to(tl.float32))
    fade = rate_of_decay * softplus(logit + tl.load(decay_bias + head).to(tl.float32))
    seen = (row[:, None] == row[None, :]) & (index[:, None] >= index[None, :]) & (row >= 0)[:, None]
    # a strong decay makes sums large of which small differences matter
    total = tl.sum(tl.where(seen, tl.broadcast_to(fade[None, :], (C, C)).to(SUM), 0.0), 1)
    other = tl.sum(tl.where(index[:, None] == index[None, :], total[:, None], 0.0), 0)
    decay = tl.where(seen, tl.exp(tl.minimum((total[:, None] - other[None, :]).to(tl.float32), 0.0)), 0.0)
    alike = tl.dot(k, tl.trans(k), input_precision=PRECISION) * (k_scale[:, None] * k_scale[None, :])
    strict = tl.where(index[:, None] > index[None, :], alike * decay * rate[:, None], 0.0)
    inverse = _inverse(strict, index, C)
    answers = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay * (q_scale[:, None] * k_scale[None, :])
    at = (token.to(tl.int64) * HEADS + head)[:, None] * C + index[None, :]
    tl.store(solved + at, inverse * rate[None, :], mask=live[:, None])
    tl.store(attended + at, answers, mask=live[:, None])
    tl.store(sums + token * HEADS + head, total.to(tl.float32), mask=live)


@triton.jit
def _chunks(
    mixed, solved, attended, sums, state, out, table, slots, query_start, save_start, save_end, save_target,
    mixed_stride, state_stride, table_stride,
    HAS_SAVES: tl.constexpr, ITEM: tl.constexpr, MOST: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BV values of one head of one row of more than MOST tokens, block by block."""
    head, row = tl.program_id(1), tl.program_id(2)
    first, end = tl.load(query_start + row), tl.load(query_start + row + 1)
    if end - first <= MOST:
        return
    keys, values, index = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, C)
    in_k, in_v = keys < K, values < V
    inside = head * (K * V) + keys[:, None] * V + values[None, :]
    mask = in_k[:, None] & in_v[None, :]
    own = state + state_entry(table, slots, row, table_stride) * state_stride + inside
    held = tl.load(own, mask=mask, other=0.0).to(tl.float32)
    at = tl.load(save_start + row) if HAS_SAVES else 0
    stop = tl.load(save_start + row + 1) if HAS_SAVES else 0
    for block in range(first // C, tl.cdiv(end, C)):
        token = block * C + index
        mine = (token >= first) & (token < end)
        first_token = tl.cast(block, tl.int64) * C
        source = mixed + first_token * mixed_stride
        q_at = index[:, None] * mixed_stride + (head // (HEADS // KEY_HEADS)) * K + keys[None, :]
        k = tl.load(source + KEY_HEADS * K + q_at, mask=mine[:, None] & in_k[None, :], other=0.0).to(tl.float32)
        v_at = index[:, None] * mixed_stride + 2 * KEY_HEADS * K + head * V + values[None, :]
        v = tl.load(source + v_at, mask=mine[:, None] & in_v[None, :], other=0.0).to(tl.float32)
        total = tl.load(sums + token * HEADS + head, mask=mine, other=0.0)
        m_at = first_token * (HEADS * C) + ((index * HEADS + head)[:, None] * C + index[None, :])
        k *= _scale(k, 1.0)[:, None]
        fade = tl.exp(total)
        wanted = v - tl.dot(k, held, input_precision=PRECISION) * fade[:, None]
        solution = tl.load(solved + m_at, mask=mine[:, None], other=0.0)
        change = tl.dot(solution, wanted, input_precision=PRECISION)
        q = tl.load(source + q_at, mask=mine[:, None] & in_k[None, :], other=0.0).to(tl.float32)
        answer = tl.dot(q, held, input_precision=PRECISION) * (fade * _scale(q, K**-0.5))[:, None]
        weights = tl.load(attended + m_at, mask=mine[:, None], other=0.0)
        answer += tl.dot(weights, change, input_precision=PRECISION)
        target = out + first_token * (HEADS * V) + ((index[:, None] * HEADS + head) * V + values[None, :])
        tl.store(target, answer.to(out.dtype.element_ty), mask=mine[:, None] & in_v[None, :])
        upto = tl.minimum(end, block * C + C)
        if HAS_SAVES:
            while next_save(save_end, at, stop) <= upto:
                cut = tl.load(save_end + at)
                now = tl.load(sums + (cut - 1) * HEADS + head)
                part = k * tl.where(mine & (token < cut), tl.exp(tl.minimum(now - total, 0.0)), 0.0)[:, None]
                saved = held * tl.exp(now) + tl.dot(tl.trans(part), change, input_precision=PRECISION)
                copy = state + tl.load(save_target + at) // ITEM + inside
                tl.store(copy, saved.to(state.dtype.element_ty), mask=mask)
                at += 1
        last = tl.load(sums + (upto - 1) * HEADS + head)
        kept = k * tl.where(mine, tl.exp(tl.minimum(last - total, 0.0)), 0.0)[:, None]
        held = held * tl.exp(last) + tl.dot(tl.trans(kept), change, input_precision=PRECISION)
    tl.store(own, held.to(state.dtype.element_ty), mask=mask)


def gated_delta_rows(
    mixed_TC: torch.Tensor,
    rates_TH: torch.Tensor,
    decays_TH: torch.Tensor,
    decay_log_H: torch.Tensor,
    decay_bias_H: torch.Tensor,
    state_EHKV: torch.Tensor,
    key_heads: int,
    rows: StateRows,
) -> torch.Tensor:
    """See the twin."""
    tokens = mixed_TC.shape[0]
    heads, key_dim, value_dim = state_EHKV.shape[1:]
    out_THV = torch.empty(tokens, heads, value_dim, dtype=mixed_TC.dtype, device=mixed_TC.device)
    inputs = (mixed_TC, rates_TH, decays_TH, decay_log_H, decay_bias_H)
    where = (rows.page_table, rows.slots_R, rows.query_start_R1)
    *saves, has_saves = save_arguments(rows)
    strides = (mixed_TC.stride(0), rates_TH.stride(0), decays_TH.stride(0))
    to_state = (state_EHKV.stride(0), rows.page_table.stride(0))
    block_k = max(16, triton.next_power_of_2(key_dim))
    shape = (key_heads, heads, key_dim)
    options = (has_saves, state_EHKV.element_size(), FEW_TOKENS, *shape, value_dim, block_k)
    block_v, warps = FEW
    _few[(triton.cdiv(value_dim, block_v), heads, rows.num_rows + 1)](
        *inputs, state_EHKV, out_THV, *where, *saves, rows.num_rows, tokens, *strides, *to_state, *options, block_v,
        num_warps=warps,
    )  # fmt: skip
    if rows.few:
        return out_THV
    precision = "tf32x3" if mixed_TC.dtype == torch.float32 else "tf32"
    solved = torch.empty(2, tokens, heads, CHUNK, dtype=torch.float32, device=mixed_TC.device)
    sums = torch.empty(tokens, heads, dtype=torch.float32, device=mixed_TC.device)
    _systems[(triton.cdiv(tokens, CHUNK), heads)](
        *inputs, *solved, sums, rows.row_T, tokens, *strides, *shape, block_k, CHUNK, precision,
        tl.float64 if mixed_TC.dtype == torch.float32 else tl.float32, num_warps=SYSTEM_WARPS,
    )  # fmt: skip
    block_v, warps, stages = CHUNKS
    _chunks[(triton.cdiv(value_dim, block_v), heads, rows.num_rows)](
        mixed_TC, *solved, sums, state_EHKV, out_THV, *where, *saves, strides[0], *to_state, *options, block_v,
        CHUNK, precision, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out_THV
