"""Mamba-2's recurrence through pages of states. Twins: `pagerunner.ops.mamba2`.

A row of a few tokens, or with drafts, takes them one after another (`_few`). Longer rows run in blocks of 64 tokens of the step. Where rows meet
inside a block, masks separate them. Three kernels run one after another:

* `_prepare` does everything that doesn't depend on states, for all blocks in parallel.
* `_chunks` passes states from block to block (arXiv 2405.21060, section 6). It keeps the state before a block in which a state
  is to be saved.
* `_finish_saves` carries each kept state on to its token.

Products of half precision are of the inputs' type. Sums and states are float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.activation import power
from pagerunner.ops.kernels.launch import blocks, dependent, multiprocessors, padded, start_next, wait_turn
from pagerunner.ops.kernels.recurrent.state_rows import (
    LISTED,
    any_of_few,
    at_once,
    behind,
    keep_state,
    least_rows,
    list_long_rows,
    row_arguments,
    row_or_padding,
    row_sums,
    row_tokens,
    save_arguments,
    save_begin,
    save_token,
    saved_entry,
    saves_of,
    softplus,
    stages,
    state_entry,
    unfinished,
    unfinished_entry,
)
from pagerunner.ops.state_rows import CHUNK, FEW_TOKENS, StateRows

FEW = (32, 8)  # values of a program, its warps
ONE = (64, 8)  # the same in steps of one token a row
# of a thread of FEW, for states up to LARGEST_STATE and aligned pages: 32 warps fit, and nothing is spilled
REGISTERS = 64
PREPARE = (6, 2)  # programs of a multiprocessor that prepare blocks at a time, warps of each
CHUNKS = (64, 4, 3)  # values of a program, its warps, stages of its loads
MANY = (64, 4, 2)  # the same of many rows: two programs at a time have room on a multiprocessor
# values of a program, its warps: too few for the tensor core instructions whose addresses ptxas 12.8 gets wrong at some sizes
NARROW = (16, 2)
LARGEST_STATE = 128  # that CHUNKS are for
STARTS, WALKS = 16, 3  # programs that are started for a multiprocessor, for rows of a few tokens and for long rows
MOST_AT_ONCE = 16  # states to be saved that are finished side by side


@triton.jit
def _token(
    held, token, to, answers, rounds, source, out, rate, bias, passed, head, values, inner,
    KEPT: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The state after a token, rounded as a page keeps it if it `rounds`. If it `answers`, the outputs of token `to` are stored."""
    mixed, mixed_stride, steps, steps_stride = source
    in_p, in_n = values < P, inner < N
    b_at = HEADS * P + (head // (HEADS // GROUPS)) * N + inner
    source = mixed + tl.cast(token, tl.int64) * mixed_stride
    x = tl.load(source + head * P + values, mask=in_p, other=0.0).to(tl.float32)
    b = tl.load(source + b_at, mask=in_n, other=0.0).to(tl.float32)
    c = tl.load(source + GROUPS * N + b_at, mask=in_n, other=0.0).to(tl.float32)
    dt = softplus(tl.load(steps + token * steps_stride + head).to(tl.float32) + bias)
    held = held * tl.exp(dt * rate) + (x * dt)[:, None] * b[None, :]
    if answers:
        answer = tl.sum(held * c[None, :], 1) + x * passed
        tl.store(
            out + tl.cast(to, tl.int64) * (HEADS * P) + head * P + values, answer.to(out.dtype.element_ty), mask=in_p
        )
    return tl.where(rounds, held.to(KEPT).to(tl.float32), held) if KEPT != tl.float32 else held


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _few(
    mixed, steps, decay_log, step_bias, skip, state, out, long,
    table, slots, query_start, seq_lens, positions, accepted, save_start, save_row, save_position, save_target,
    num_rows, num_tokens, mixed_stride, steps_stride, state_stride, table_stride,
    HAS_SAVES: tl.constexpr, ITEM: tl.constexpr, MOST: tl.constexpr, JOURNAL: tl.constexpr,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """BP values of one head of rows that take one token after another. Row R stands for the padding, whose outputs are zero."""
    head = tl.program_id(1)
    values, inner = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, BN)
    in_p = values < P
    inside = head * (P * N) + values[:, None] * N + inner[None, :]
    mask = in_p[:, None] & (inner < N)[None, :]
    rate = -tl.exp(tl.load(decay_log + head).to(tl.float32))
    bias, passed = tl.load(step_bias + head).to(tl.float32), tl.load(skip + head).to(tl.float32)
    source = (mixed, mixed_stride, steps, steps_stride)
    if tl.program_id(0) + head + tl.program_id(2) == 0:
        list_long_rows(long, query_start, seq_lens, positions, accepted, num_rows, MOST, JOURNAL, LISTED)
    for part in range(0, num_rows + 1, LISTED):
        last = tl.minimum(part + LISTED, num_rows + 1)
        if JOURNAL == 0:  # a graph has room for many rows
            last = tl.where(any_of_few(query_start, part, num_rows, MOST, LISTED), last, part)
        for row in range(part + tl.program_id(2), last, tl.num_programs(2)):
            first, end, certain, replayed, by_one, room = row_or_padding(
                query_start, seq_lens, positions, accepted, row, num_rows, num_tokens, JOURNAL
            )
            for token in range(end, room):
                nothing = tl.zeros((BP,), dtype=out.dtype.element_ty)
                tl.store(out + tl.cast(token, tl.int64) * (HEADS * P) + head * P + values, nothing, mask=in_p)
            if (first < end) & ((end - first <= MOST) | (by_one != 0)):
                own = state_entry(table, slots, row, table_stride)
                held = tl.load(state + own * state_stride + inside, mask=mask, other=0.0).to(tl.float32)
                saves = saves_of(save_start, positions, row, first, end, HAS_SAVES)
                for token in range(first - replayed, end):
                    place = behind(token, first, replayed, row, num_tokens, JOURNAL)
                    held = _token(
                        held, place, token, token >= first, by_one, source, out, rate, bias, passed, head, values, inner,
                        state.dtype.element_ty, GROUPS, HEADS, P, N,
                    )  # fmt: skip
                    if token < certain:  # states after drafts are dropped
                        keep_state(
                            state, held, inside, mask, own, token + 1, certain, save_position, save_target, saves, state_stride, ITEM
                        )  # fmt: skip


@triton.jit
def _one(
    mixed, steps, decay_log, step_bias, skip, state, out, table, slots, query_start, positions, save_start, save_position, save_target,
    mixed_stride, steps_stride, state_stride, table_stride, HAS_SAVES: tl.constexpr, ITEM: tl.constexpr,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BP values of one head of a row of one token, which is the token of the row's number. Its state is read early, as in the gated delta rule."""
    head, row = tl.program_id(1), tl.program_id(2)
    values, inner = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, BN)
    in_p = values < P
    inside = head * (P * N) + values[:, None] * N + inner[None, :]
    own = state_entry(table, slots, row, table_stride)
    there = tl.load(query_start + row) < tl.load(query_start + row + 1)
    mask = in_p[:, None] & (inner < N)[None, :]
    held = tl.load(state + own * state_stride + inside, mask=mask & there, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(decay_log + head).to(tl.float32))
    bias, passed = tl.load(step_bias + head).to(tl.float32), tl.load(skip + head).to(tl.float32)
    saves = saves_of(save_start, positions, row, row, row + 1, HAS_SAVES)
    wait_turn(PDL)
    start_next(PDL)
    if there:
        source = (mixed, mixed_stride, steps, steps_stride)
        held = _token(
            held, row, row, True, False, source, out, rate, bias, passed, head, values, inner,
            tl.float32, GROUPS, HEADS, P, N,
        )  # fmt: skip
        keep_state(
            state, held, inside, mask, own, row + 1, row + 1, save_position, save_target, saves, state_stride, ITEM
        )  # fmt: skip
    else:
        to = out + tl.cast(row, tl.int64) * (HEADS * P) + head * P + values
        tl.store(to, tl.zeros((BP,), out.dtype.element_ty), mask=in_p)


@triton.jit(do_not_specialize=["num_tokens", "each"])
def _prepare(
    mixed, steps, decay_log, step_bias, weights, factors, row_T, num_tokens, each, mixed_stride, steps_stride,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What doesn't depend on states, of one block and `each` heads of a group.

    Outputs read inputs of their block through `weights` [T, H, C]. `factors` [2, H, T] are the running sums of log decays
    since the row's or block's beginning, and step sizes.
    """
    inner, index = tl.arange(0, BN), tl.arange(0, C)
    token, group = tl.program_id(0) * C + index, tl.program_id(2)
    live = token < num_tokens
    row = tl.load(row_T + token, mask=live, other=-1)
    mask = (row >= 0)[:, None] & (inner < N)[None, :]
    b_at = mixed + token.to(tl.int64)[:, None] * mixed_stride + HEADS * P + group * N + inner[None, :]
    b = tl.load(b_at, mask=mask, other=0.0)
    c = tl.load(b_at + GROUPS * N, mask=mask, other=0.0)
    seen = (row[:, None] == row[None, :]) & (index[:, None] >= index[None, :]) & (row >= 0)[:, None]
    product = tl.where(seen, tl.dot(c, tl.trans(b), input_precision=PRECISION), 0.0)
    first_head, stop = tl.program_id(1) * each, HEADS // GROUPS
    for head in range(group * stop + first_head, group * stop + tl.minimum(first_head + each, stop)):
        step = tl.load(steps + token * steps_stride + head, mask=row >= 0, other=0.0).to(tl.float32)
        dt = tl.where(row >= 0, softplus(step + tl.load(step_bias + head).to(tl.float32)), 0.0)
        fade = -tl.exp(tl.load(decay_log + head).to(tl.float32)) * dt
        # a strong decay makes sums large of which small differences matter
        total = row_sums(fade.to(factors.dtype.element_ty), row, row_T, token, index)
        decay = power(tl.minimum((total[:, None] - total[None, :]).to(tl.float32), 0.0))
        target = weights + (token.to(tl.int64) * HEADS + head)[:, None] * C + index[None, :]
        tl.store(target, (product * decay * dt[None, :]).to(b.dtype), mask=live[:, None])
        at = factors + head * num_tokens + token
        tl.store(at, total, mask=live)
        tl.store(at + HEADS * num_tokens, dt, mask=live)


@triton.jit
def _block(
    held, block, first, cut, mixed, weights, factors, passed, out, num_tokens, mixed_stride, head,
    OUTPUTS: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state [BN, BP] before token `cut`, from the state before this block; and outputs of tokens from `first` up to `cut`."""
    values, inner, index = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, BN), tl.arange(0, C)
    first_token = tl.cast(block, tl.int64) * C
    token = block * C + index
    mine = (token >= first) & (token < cut)
    in_p, in_n = mine[:, None] & (values < P)[None, :], mine[:, None] & (inner < N)[None, :]
    group = head // (HEADS // GROUPS)
    source = mixed + first_token * mixed_stride
    b_at = source + HEADS * P + group * N + (index[:, None] * mixed_stride + inner[None, :])
    b = tl.load(b_at, mask=in_n, other=0.0)
    x = tl.load(source + head * P + (index[:, None] * mixed_stride + values[None, :]), mask=in_p, other=0.0)
    factors += head * num_tokens
    total = tl.load(factors + token, mask=mine, other=0.0)
    dt = tl.load(factors + HEADS * num_tokens + token, mask=mine, other=0.0).to(tl.float32)
    last = tl.load(factors + cut - 1)
    wide = x.to(tl.float32)
    if OUTPUTS:
        c = tl.load(b_at + GROUPS * N, mask=in_n, other=0.0)
        own = (index * HEADS + head)[:, None]
        weights_at = weights + first_token * (HEADS * C) + (own * C + index[None, :])
        inside = tl.load(weights_at, mask=mine[:, None], other=0.0)
        answer = tl.dot(c, held.to(c.dtype), input_precision=PRECISION) * tl.exp(total.to(tl.float32))[:, None]
        answer = tl.dot(inside, x, answer, input_precision=PRECISION) + wide * passed
        target = out + first_token * (HEADS * P) + (own * P + values[None, :])
        tl.store(target, answer.to(x.dtype), mask=in_p)
    kept = wide * (tl.exp(tl.minimum((last - total).to(tl.float32), 0.0)) * dt)[:, None]
    return tl.dot(tl.trans(b), kept.to(x.dtype), held * tl.exp(last.to(tl.float32)), input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_tokens"])
def _chunks(
    mixed, weights, factors, skip, state, out, long, table, slots, query_start, seq_lens, positions, accepted,
    save_start, save_row, save_position, save_target, num_tokens, mixed_stride, state_stride, table_stride,
    HAS_SAVES: tl.constexpr, ITEM: tl.constexpr, JOURNAL: tl.constexpr,
    GROUPS: tl.constexpr, HEADS: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BP values of one head of `long` rows, block by block from save to save."""
    head = tl.program_id(1)
    values, inner = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, BN)
    inside = head * (P * N) + values[:, None] * N + inner[None, :]
    mask = (values < P)[:, None] & (inner < N)[None, :]
    passed = tl.load(skip + head).to(tl.float32)
    for which in range(tl.program_id(2), tl.load(long), tl.num_programs(2)):
        row = tl.load(long + 1 + which)
        first, end, _, _, _ = row_tokens(query_start, seq_lens, positions, accepted, row, JOURNAL)
        own = state_entry(table, slots, row, table_stride)
        held = tl.trans(tl.load(state + own * state_stride + inside, mask=mask, other=0.0).to(tl.float32))
        at, stop, shift = saves_of(save_start, positions, row, first, end, HAS_SAVES)
        for save in range(at, stop + 1):
            # whole blocks before the token at which a state is to be saved; the last time, all blocks that are left
            begin = save_begin(save_position, save, at, shift, first)
            upto = save_token(save_position, save, stop, shift, end + C - 1)
            for whole in range(begin // C, upto // C):
                held = _block(
                    held, whole, first, tl.minimum(end, whole * C + C), mixed, weights, factors, passed, out,
                    num_tokens, mixed_stride, head, True, GROUPS, HEADS, P, N, BP, BN, C, PRECISION,
                )  # fmt: skip
            to = saved_entry(save_target, save, stop, own, state_stride, ITEM)
            tl.store(state + to * state_stride + inside, tl.trans(held).to(state.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _finish_saves(
    mixed, weights, factors, state, out, query_start, seq_lens, positions, accepted,
    save_start, save_row, save_position, save_target, num_rows, num_tokens, mixed_stride, state_stride,
    ITEM: tl.constexpr, MOST: tl.constexpr, JOURNAL: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BP values of one head of states to be saved. Their pages hold the states before their blocks."""
    head, values, inner = tl.program_id(1), tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, BN)
    inside = head * (P * N) + values[:, None] * N + inner[None, :]
    mask = (values < P)[:, None] & (inner < N)[None, :]
    for save in range(tl.program_id(2), tl.load(save_start + num_rows), tl.num_programs(2)):
        cut, first, within = unfinished(
            save_row, save_position, save, query_start, seq_lens, positions, accepted, JOURNAL, MOST, C
        )
        if within:
            own = state + unfinished_entry(save_target, save, state_stride, ITEM) * state_stride + inside
            held = tl.trans(tl.load(own, mask=mask, other=0.0).to(tl.float32))
            held = _block(
                held, cut // C, first, cut, mixed, weights, factors, 0.0, out,
                num_tokens, mixed_stride, head, False, GROUPS, HEADS, P, N, BP, BN, C, PRECISION,
            )  # fmt: skip
            tl.store(own, tl.trans(held).to(state.dtype.element_ty), mask=mask)


def _long_rows(
    inputs: tuple[torch.Tensor, ...],
    strides: tuple[int, ...],
    skip_H: torch.Tensor,
    state_EHPN: torch.Tensor,
    out_THP: torch.Tensor,
    long: torch.Tensor,
    groups: int,
    rows: StateRows,
) -> None:
    """Rows of more than FEW_TOKENS, block by block."""
    mixed_TC = inputs[0]
    tokens, (heads, head_dim, state_size) = rows.step.num_tokens, state_EHPN.shape[1:]
    wide = mixed_TC.dtype == torch.float32
    sizes, block_n = (groups, heads, head_dim, state_size), max(16, padded(state_size))
    weights, precision = mixed_TC.new_empty(tokens, heads, CHUNK), "tf32x3" if wide else "tf32"
    factors = torch.empty(2, heads, tokens, dtype=torch.float64 if wide else torch.float32, device=mixed_TC.device)
    at_a_time, warps = PREPARE
    each = blocks(blocks(tokens, CHUNK) * heads, at_a_time * multiprocessors(mixed_TC.device))
    _prepare[(blocks(tokens, CHUNK), blocks(heads // groups, each), groups)](
        *inputs, weights, factors, rows.step.row_T, tokens, each, *strides, *sizes, block_n, CHUNK, precision,
        num_warps=warps,
    )  # fmt: skip
    block_p, warps, most = CHUNKS if block_n <= LARGEST_STATE else (*NARROW, 1)
    many = least_rows(rows) * blocks(head_dim, MANY[0]) * heads
    if block_n <= LARGEST_STATE and not wide and 2 * many > 3 * multiprocessors(mixed_TC.device):
        block_p, warps, most = MANY
    tile_bytes = CHUNK * (2 * block_n + block_p + CHUNK) * mixed_TC.element_size()
    state_strides, (*saves, has_saves) = (state_EHPN.stride(0), rows.page_table.stride(0)), save_arguments(rows)
    (slots, *where), entries = row_arguments(rows, mixed_TC)
    item, constants, lengths = state_EHPN.element_size(), (entries, *sizes), (tokens, mixed_TC.stride(0))
    _chunks[(blocks(head_dim, block_p), heads, at_once(rows, blocks(head_dim, block_p) * heads, WALKS))](
        mixed_TC, weights, factors, skip_H, state_EHPN, out_THP, long, rows.page_table, slots, *where,
        *saves, *lengths, *state_strides, has_saves, item, *constants, block_p, block_n, CHUNK, precision,
        num_warps=warps, num_stages=stages(1 if wide else most, tile_bytes, mixed_TC.device),
    )  # fmt: skip
    if rows.saves is not None:
        block_p, warps = NARROW
        _finish_saves[(blocks(head_dim, block_p), heads, min(MOST_AT_ONCE, rows.saves.row_N.shape[0]))](
            mixed_TC, weights, factors, state_EHPN, out_THP, *where, *saves,
            rows.step.num_rows, *lengths, state_strides[0], item, FEW_TOKENS, *constants, block_p, block_n, CHUNK, precision, num_warps=warps,
        )  # fmt: skip


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
    tokens, channels = rows.step.num_tokens, mixed_TC.shape[1]
    heads, head_dim, state_size = state_EHPN.shape[1:]
    out_THP = torch.empty(tokens, heads, head_dim, dtype=mixed_TC.dtype, device=mixed_TC.device)
    inputs, strides = (mixed_TC, steps_TH, decay_log_H, step_bias_H), (mixed_TC.stride(0), steps_TH.stride(0))
    groups = (channels - heads * head_dim) // (2 * state_size)
    (*saves, has_saves), (block_p, warps), (where, entries) = save_arguments(rows), FEW, row_arguments(rows, mixed_TC)
    if rows.step.one_token and not entries:
        slots, start, _, positions, _ = where
        block_p, warps = ONE
        _one[(blocks(head_dim, block_p), heads, rows.step.num_rows)](
            *inputs, skip_H, state_EHPN, out_THP, rows.page_table, slots, start, positions, saves[0], *saves[2:],
            *strides, state_EHPN.stride(0), rows.page_table.stride(0), has_saves, state_EHPN.element_size(),
            groups, heads, head_dim, state_size, block_p, max(16, padded(state_size)), num_warps=warps,
            **dependent(mixed_TC.device),
        )  # fmt: skip
        return out_THP
    capped = state_size <= LARGEST_STATE and state_EHPN.stride(0) % 16 == 0
    long = torch.empty(rows.step.num_rows + 1, dtype=torch.int32, device=mixed_TC.device)
    at = rows.step.num_rows + 1 if rows.few else at_once(rows, blocks(head_dim, block_p) * heads, STARTS)
    _few[(blocks(head_dim, block_p), heads, at)](
        *inputs, skip_H, state_EHPN, out_THP, long, rows.page_table, *where, *saves,
        rows.step.num_rows, tokens, *strides, state_EHPN.stride(0), rows.page_table.stride(0),
        has_saves, state_EHPN.element_size(), FEW_TOKENS, entries, groups, heads, head_dim, state_size,
        block_p, max(16, padded(state_size)), LISTED, num_warps=warps, maxnreg=REGISTERS if capped else None,
    )  # fmt: skip
    if not rows.few:
        _long_rows(inputs, strides, skip_H, state_EHPN, out_THP, long, groups, rows)
    return out_THP
