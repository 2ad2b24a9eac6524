"""The gated delta rule through pages of states. Twins: `pagerunner.ops.gdn`.

A row of a few tokens, or with drafts, takes them one after another (`_few`). Longer rows run in blocks of 64 tokens of the step. Where rows meet
inside a block, masks separate them. Three kernels run one after another:

* `_systems` does everything that doesn't depend on states, for all blocks in parallel. It solves the triangular systems (arXiv
  2412.06464, section 3.3).
* `_chunks` passes states from block to block, with four products for each block. It keeps the state before a block in which a
  state is to be saved.
* `_finish_saves` carries each kept state on to its token. The same solution serves, because a correction depends only on the
  tokens before it.

Products of half precision are of the inputs' type. Sums and states are float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.activation import logistic, power
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

FEW = (32, 4)  # values of a program, its warps
ONE = (64, 4)  # the same in steps of one token a row
# the same where rows have drafts: with one warp there are no barriers, and a third less instructions for a token
DRAFTS = (16, 1)
# of a thread of FEW and of DRAFTS, for keys up to LARGEST_KEY and aligned pages: 16 or 12 warps fit, and nothing is spilled
REGISTERS = (128, 168)
SYSTEM_WARPS = 4
ROW = 64  # the least elements of an operand's row: ptxas 12.8 gets the addresses of shorter rows wrong at some sizes
CHUNKS = (32, 4, 3)  # values of a program, its warps, stages of its loads
# the same of many rows: of two programs at a time on a multiprocessor one computes, while the other one loads
MANY = (64, 4, 1)
FINISH = (64, 4)  # values of a program that carries a kept state on, its warps
# values of a program, its warps: too few for the tensor core instructions whose addresses ptxas 12.8 gets wrong at some sizes
NARROW = (16, 2)
LARGEST_KEY = 128  # that CHUNKS are for
STARTS, WALKS = 16, 3  # programs that are started for a multiprocessor, for rows of a few tokens and for long rows
MOST_AT_ONCE = 16  # states to be saved that are finished side by side


@triton.jit
def _scale(x, extra):
    """The factors that bring rows of x to the length `extra`."""
    return extra * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)


@triton.jit
def _inputs(
    source, token, there, head, keys, values, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr
):  # fmt: skip
    """Query, key, value, and the logits of rate and decay of a token, if it is `there`."""
    mixed, mixed_stride, rates, rates_stride, decays, decays_stride = source
    q_at = mixed + tl.cast(token, tl.int64) * mixed_stride + (head // (HEADS // KEY_HEADS)) * K + keys
    v_at = mixed + tl.cast(token, tl.int64) * mixed_stride + 2 * KEY_HEADS * K + head * V + values
    q = tl.load(q_at, mask=(keys < K) & there, other=0.0)
    k = tl.load(q_at + KEY_HEADS * K, mask=(keys < K) & there, other=0.0)
    v = tl.load(v_at, mask=(values < V) & there, other=0.0)
    rate = tl.load(rates + token * rates_stride + head, mask=there, other=0.0)
    return q, k, v, rate, tl.load(decays + token * decays_stride + head, mask=there, other=0.0)


@triton.jit
def _token(
    held, inputs, out, answers, rounds, rate_of_decay, bias, values, KEPT: tl.constexpr, K: tl.constexpr, V: tl.constexpr
):  # fmt: skip
    """The state after a token, rounded as a page keeps it if it `rounds`. If it `answers`, its outputs are stored."""
    q, k, v, rate, decay = inputs
    q, k = q.to(tl.float32), k.to(tl.float32)
    fade = tl.exp(rate_of_decay * softplus(decay.to(tl.float32) + bias))
    rate = 1.0 / (1.0 + tl.exp(-rate.to(tl.float32)))
    # warps meet for two sums over keys, which don't wait for each other: the state answers before the correction is added
    squares, products = tl.split(tl.sum(tl.join(tl.join(k * k, q * q), tl.join(q * k, q * k)), 0))
    k_square, q_square = tl.split(squares)
    alike, _ = tl.split(products)
    k_scale = tl.rsqrt(k_square + 1e-6)
    held *= fade
    known, asked = tl.split(tl.sum(tl.join(held * k[:, None], held * q[:, None]), 0))
    change = (v.to(tl.float32) - known * k_scale) * rate
    held += (k * k_scale)[:, None] * change[None, :]
    if answers:
        answer = (asked + alike * k_scale * change) * (tl.rsqrt(q_square + 1e-6) * (K**-0.5))
        tl.store(out, answer.to(out.dtype.element_ty), mask=values < V)
    return tl.where(rounds, held.to(KEPT).to(tl.float32), held) if KEPT != tl.float32 else held


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _few(
    mixed, rates, decays, decay_log, decay_bias, state, out, long,
    table, slots, query_start, seq_lens, positions, accepted, save_start, save_row, save_position, save_target,
    num_rows, num_tokens, mixed_stride, rates_stride, decays_stride, state_stride, table_stride,
    HAS_SAVES: tl.constexpr, ITEM: tl.constexpr, MOST: tl.constexpr, JOURNAL: tl.constexpr,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """BV values of one head of rows that take one token after another. Row R stands for the padding, whose outputs are zero."""
    head = tl.program_id(1)
    keys, values = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    in_v = values < V
    inside = head * (K * V) + keys[:, None] * V + values[None, :]
    mask = (keys < K)[:, None] & in_v[None, :]
    source = (mixed, mixed_stride, rates, rates_stride, decays, decays_stride)
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
                nothing = tl.zeros((BV,), dtype=out.dtype.element_ty)
                tl.store(out + tl.cast(token, tl.int64) * (HEADS * V) + head * V + values, nothing, mask=in_v)
            if (first < end) & ((end - first <= MOST) | (by_one != 0)):
                own = state_entry(table, slots, row, table_stride)
                held = tl.load(state + own * state_stride + inside, mask=mask, other=0.0).to(tl.float32)
                rate_of_decay = -tl.exp(tl.load(decay_log + head).to(tl.float32))
                bias = tl.load(decay_bias + head).to(tl.float32)
                saves = saves_of(save_start, positions, row, first, end, HAS_SAVES)
                begin = first - replayed
                place = behind(begin, first, replayed, row, num_tokens, JOURNAL)
                inputs = _inputs(source, place, True, head, keys, values, KEY_HEADS, HEADS, K, V)
                for token in range(begin, end):
                    # the next token's, while this one is computed
                    place = behind(token + 1, first, replayed, row, num_tokens, JOURNAL)
                    ahead = _inputs(source, place, token + 1 < end, head, keys, values, KEY_HEADS, HEADS, K, V)
                    to = out + tl.cast(token, tl.int64) * (HEADS * V) + head * V + values
                    held = _token(
                        held, inputs, to, token >= first, by_one, rate_of_decay, bias, values, state.dtype.element_ty, K, V
                    )  # fmt: skip
                    inputs = ahead
                    if token < certain:  # states after drafts are dropped
                        keep_state(
                            state, held, inside, mask, own, token + 1, certain, save_position, save_target, saves, state_stride, ITEM
                        )  # fmt: skip


@triton.jit
def _one(
    mixed, rates, decays, decay_log, decay_bias, state, out,
    table, slots, query_start, positions, save_start, save_position, save_target,
    mixed_stride, rates_stride, decays_stride, state_stride, table_stride,
    HAS_SAVES: tl.constexpr, ITEM: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BV values of one head of a row of one token, which is the token of the row's number.

    The state is read while the convolution still runs: no other kernel of a step writes it, and earlier steps' have ended.
    """
    head, row = tl.program_id(1), tl.program_id(2)
    keys, values = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    in_v = values < V
    inside = head * (K * V) + keys[:, None] * V + values[None, :]
    own = state_entry(table, slots, row, table_stride)
    there = tl.load(query_start + row) < tl.load(query_start + row + 1)
    mask = (keys < K)[:, None] & in_v[None, :]
    held = tl.load(state + own * state_stride + inside, mask=mask & there, other=0.0).to(tl.float32)
    rate_of_decay = -tl.exp(tl.load(decay_log + head).to(tl.float32))
    bias = tl.load(decay_bias + head).to(tl.float32)
    saves = saves_of(save_start, positions, row, row, row + 1, HAS_SAVES)
    wait_turn(PDL)
    start_next(PDL)
    to = out + tl.cast(row, tl.int64) * (HEADS * V) + head * V + values
    if there:
        source = (mixed, mixed_stride, rates, rates_stride, decays, decays_stride)
        inputs = _inputs(source, row, True, head, keys, values, KEY_HEADS, HEADS, K, V)
        held = _token(held, inputs, to, True, False, rate_of_decay, bias, values, tl.float32, K, V)
        keep_state(
            state, held, inside, mask, own, row + 1, row + 1, save_position, save_target, saves, state_stride, ITEM
        )  # fmt: skip
    else:
        tl.store(to, tl.zeros((BV,), out.dtype.element_ty), mask=in_v)


@triton.jit
def _inverse(a, index, DOUBLINGS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of I + a, where a [C, C] is strictly lower triangular.

    The inverses of two neighbouring blocks on the diagonal give the inverse of the block twice as large. No entry is beyond
    [-1, 1], because subtracting a key's part from another key never makes that key longer.
    """
    found = tl.where(index[:, None] == index[None, :], 1.0, 0.0)
    found = tl.where((index[:, None] ^ index[None, :]) == 1, found - a, found)
    for doubling in tl.static_range(1, DOUBLINGS):
        block = index >> doubling
        below = (block[:, None] ^ block[None, :]) == 1
        part, known = tl.where(below, a, 0.0).to(OPERAND), found.to(OPERAND)
        part = tl.dot(part, known, input_precision=PRECISION).to(OPERAND)
        found -= tl.dot(known, part, input_precision=PRECISION)
    return found


@triton.jit(do_not_specialize=["num_tokens"])
def _systems(
    mixed, rates, decays, decay_log, decay_bias, wanted, known, attended, factors, row_T,
    num_tokens, mixed_stride, rates_stride, decays_stride,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, DOUBLINGS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """What doesn't depend on states, of one head and block.

    Corrections are `wanted` [T, H, V] less `known` [T, H, K] times the state before the block; outputs read them through
    `attended` [T, H, C]. `factors` [3, H, T] are the running sums of log decays since the row's or block's beginning and
    the factors that bring keys and queries to their length.
    """
    head, index = tl.program_id(1), tl.arange(0, C)
    token, keys, values = tl.program_id(0) * C + index, tl.arange(0, BK), tl.arange(0, BV)
    live = token < num_tokens
    row = tl.load(row_T + token, mask=live, other=-1)
    mask = (row >= 0)[:, None] & (keys < K)[None, :]
    source = mixed + token.to(tl.int64)[:, None] * mixed_stride
    q_at = source + (head // (HEADS // KEY_HEADS)) * K + keys[None, :]
    q = tl.load(q_at, mask=mask, other=0.0)
    k = tl.load(q_at + KEY_HEADS * K, mask=mask, other=0.0)
    q_scale, k_scale = _scale(q.to(tl.float32), K**-0.5), _scale(k.to(tl.float32), 1.0)
    rate = logistic(tl.load(rates + token * rates_stride + head, mask=live, other=0.0).to(tl.float32))
    logit = tl.load(decays + token * decays_stride + head, mask=live, other=0.0).to(tl.float32)
    rate_of_decay = -tl.exp(tl.load(decay_log + head).to(tl.float32))
    fade = rate_of_decay * softplus(logit + tl.load(decay_bias + head).to(tl.float32))
    seen = (row[:, None] == row[None, :]) & (index[:, None] >= index[None, :]) & (row >= 0)[:, None]
    # a strong decay makes sums large of which small differences matter
    total = row_sums(fade.to(SUM), row, row_T, token, index)
    decay = tl.where(seen, power(tl.minimum((total[:, None] - total[None, :]).to(tl.float32), 0.0)), 0.0)
    answers = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay * k_scale[None, :]
    at = token.to(tl.int64) * HEADS + head
    tl.store(attended + at[:, None] * C + index[None, :], answers.to(k.dtype), mask=live[:, None])
    alike = tl.dot(k, tl.trans(k), input_precision=PRECISION) * (k_scale[:, None] * k_scale[None, :])
    alike = tl.where(index[:, None] > index[None, :], alike * decay * rate[:, None], 0.0)
    solution = _inverse(alike, index, DOUBLINGS, OPERAND, PRECISION) * rate[None, :]
    v_at = source + 2 * KEY_HEADS * K + head * V + values[None, :]
    v = tl.load(v_at, mask=(row >= 0)[:, None] & (values < V)[None, :], other=0.0)
    found = tl.dot(solution.to(v.dtype), v, input_precision=PRECISION)
    tl.store(wanted + at[:, None] * V + values[None, :], found.to(v.dtype), mask=live[:, None] & (values < V)[None, :])
    solution *= (k_scale * tl.exp(total.to(tl.float32)))[None, :]
    found = tl.dot(solution.to(k.dtype), k, input_precision=PRECISION)
    tl.store(known + at[:, None] * K + keys[None, :], found.to(k.dtype), mask=live[:, None] & (keys < K)[None, :])
    factors += head * num_tokens + token
    tl.store(factors, total.to(tl.float32), mask=live)
    tl.store(factors + HEADS * num_tokens, k_scale, mask=live)
    tl.store(factors + 2 * HEADS * num_tokens, q_scale, mask=live)


@triton.jit
def _block(
    held, block, first, cut, mixed, wanted, known, attended, factors, out, num_tokens, mixed_stride, head,
    OUTPUTS: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state before token `cut`, from the state before this block; and the outputs of tokens from `first` up to `cut`."""
    keys, values, index = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, C)
    first_token = tl.cast(block, tl.int64) * C
    token = block * C + index
    mine = (token >= first) & (token < cut)
    in_k, in_v = mine[:, None] & (keys < K)[None, :], mine[:, None] & (values < V)[None, :]
    own = (index * HEADS + head)[:, None]
    factors += head * num_tokens
    reading = tl.load(factors + 2 * HEADS * num_tokens + token, mask=mine, other=0.0) if OUTPUTS else 0.0
    q_at = first_token * mixed_stride + (head // (HEADS // KEY_HEADS)) * K
    q_at = mixed + q_at + (index[:, None] * mixed_stride + keys[None, :])
    k = tl.load(q_at + KEY_HEADS * K, mask=in_k, other=0.0)
    before = tl.load(known + first_token * (HEADS * K) + (own * K + keys[None, :]), mask=in_k, other=0.0)
    v_at = first_token * (HEADS * V) + (own * V + values[None, :])
    change = tl.load(wanted + v_at, mask=in_v, other=0.0).to(tl.float32)
    total = tl.load(factors + token, mask=mine, other=0.0)
    k_scale = tl.load(factors + HEADS * num_tokens + token, mask=mine, other=0.0)
    last = tl.load(factors + cut - 1)
    state = held.to(k.dtype)
    change -= tl.dot(before, state, input_precision=PRECISION)
    if OUTPUTS:
        q = tl.load(q_at, mask=in_k, other=0.0)
        weights_at = first_token * (HEADS * C) + (own * C + index[None, :])
        weights = tl.load(attended + weights_at, mask=mine[:, None], other=0.0)
        answer = tl.dot(q, state, input_precision=PRECISION) * tl.exp(total)[:, None]
        answer = tl.dot(weights, change.to(k.dtype), answer, input_precision=PRECISION) * reading[:, None]
        tl.store(out + v_at, answer.to(k.dtype), mask=in_v)
    kept = change * (tl.exp(tl.minimum(last - total, 0.0)) * k_scale)[:, None]
    return tl.dot(tl.trans(k), kept.to(k.dtype), held * tl.exp(last), input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_tokens"])
def _chunks(
    mixed, wanted, known, attended, factors, state, out, long,
    table, slots, query_start, seq_lens, positions, accepted,
    save_start, save_row, save_position, save_target, num_tokens, mixed_stride, state_stride, table_stride,
    HAS_SAVES: tl.constexpr, ITEM: tl.constexpr, JOURNAL: tl.constexpr,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BV values of one head of `long` rows, block by block from save to save."""
    head = tl.program_id(1)
    keys, values = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    inside = head * (K * V) + keys[:, None] * V + values[None, :]
    mask = (keys < K)[:, None] & (values < V)[None, :]
    for which in range(tl.program_id(2), tl.load(long), tl.num_programs(2)):
        row = tl.load(long + 1 + which)
        first, end, _, _, _ = row_tokens(query_start, seq_lens, positions, accepted, row, JOURNAL)
        own = state_entry(table, slots, row, table_stride)
        held = tl.load(state + own * state_stride + inside, mask=mask, other=0.0).to(tl.float32)
        at, stop, shift = saves_of(save_start, positions, row, first, end, HAS_SAVES)
        for save in range(at, stop + 1):
            # whole blocks before the token at which a state is to be saved; the last time, all blocks that are left
            begin = save_begin(save_position, save, at, shift, first)
            upto = save_token(save_position, save, stop, shift, end + C - 1)
            for whole in range(begin // C, upto // C):
                held = _block(
                    held, whole, first, tl.minimum(end, whole * C + C), mixed, wanted, known, attended, factors, out,
                    num_tokens, mixed_stride, head, True, KEY_HEADS, HEADS, K, V, BK, BV, C, PRECISION,
                )  # fmt: skip
            to = saved_entry(save_target, save, stop, own, state_stride, ITEM)
            tl.store(state + to * state_stride + inside, held.to(state.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _finish_saves(
    mixed, wanted, known, attended, factors, state, out, query_start, seq_lens, positions, accepted,
    save_start, save_row, save_position, save_target, num_rows, num_tokens, mixed_stride, state_stride,
    ITEM: tl.constexpr, MOST: tl.constexpr, JOURNAL: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BV values of one head of states to be saved. Their pages hold the states before their blocks."""
    head, keys, values = tl.program_id(1), tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    inside = head * (K * V) + keys[:, None] * V + values[None, :]
    mask = (keys < K)[:, None] & (values < V)[None, :]
    for save in range(tl.program_id(2), tl.load(save_start + num_rows), tl.num_programs(2)):
        cut, first, within = unfinished(
            save_row, save_position, save, query_start, seq_lens, positions, accepted, JOURNAL, MOST, C
        )
        if within:
            own = state + unfinished_entry(save_target, save, state_stride, ITEM) * state_stride + inside
            held = tl.load(own, mask=mask, other=0.0).to(tl.float32)
            held = _block(
                held, cut // C, first, cut, mixed, wanted, known, attended, factors, out,
                num_tokens, mixed_stride, head, False, KEY_HEADS, HEADS, K, V, BK, BV, C, PRECISION,
            )  # fmt: skip
            tl.store(own, held.to(state.dtype.element_ty), mask=mask)


def _long_rows(
    inputs: tuple[torch.Tensor, ...],
    strides: tuple[int, ...],
    state_EHKV: torch.Tensor,
    out_THV: torch.Tensor,
    long: torch.Tensor,
    key_heads: int,
    rows: StateRows,
) -> None:
    """Rows of more than FEW_TOKENS, block by block."""
    mixed_TC = inputs[0]
    tokens, (heads, key_dim, value_dim) = rows.step.num_tokens, state_EHKV.shape[1:]
    wide = mixed_TC.dtype == torch.float32
    sizes, block_k = (key_heads, heads, key_dim, value_dim), max(16, padded(key_dim))
    wanted, known, attended = (mixed_TC.new_empty(tokens, heads, size) for size in (value_dim, key_dim, CHUNK))
    factors = torch.empty(3, heads, tokens, dtype=torch.float32, device=mixed_TC.device)
    parts, precision = (wanted, known, attended, factors), "tf32x3" if wide else "tf32"
    _systems[(blocks(tokens, CHUNK), heads)](
        *inputs, *parts, rows.step.row_T, tokens, *strides, *sizes, max(ROW, padded(key_dim)), max(ROW, padded(value_dim)), CHUNK,
        CHUNK.bit_length() - 1, tl.float32 if wide else tl.float16, precision, tl.float64 if wide else tl.float32,
        num_warps=SYSTEM_WARPS,
    )  # fmt: skip
    block_v, warps, most = CHUNKS if block_k <= LARGEST_KEY else (*NARROW, 1)
    many = least_rows(rows) * blocks(value_dim, MANY[0]) * heads
    if block_k <= LARGEST_KEY and not wide and 2 * many > 3 * multiprocessors(mixed_TC.device):
        block_v, warps, most = MANY
    tile_bytes = CHUNK * (3 * block_k + block_v + CHUNK) * mixed_TC.element_size()
    (slots, *where), entries = row_arguments(rows, mixed_TC)
    state_strides, (*saves, has_saves) = (state_EHKV.stride(0), rows.page_table.stride(0)), save_arguments(rows)
    item, constants = state_EHKV.element_size(), (entries, *sizes, block_k)
    lengths = (tokens, mixed_TC.stride(0))
    programs = blocks(value_dim, block_v) * heads
    _chunks[(blocks(value_dim, block_v), heads, at_once(rows, programs, WALKS))](
        mixed_TC, *parts, state_EHKV, out_THV, long, rows.page_table, slots, *where, *saves,
        *lengths, *state_strides, has_saves, item, *constants, block_v, CHUNK, precision,
        num_warps=warps, num_stages=stages(1 if wide else most, tile_bytes, mixed_TC.device),
    )  # fmt: skip
    if rows.saves is not None:
        block_v, warps = FINISH if block_k <= LARGEST_KEY and not wide else NARROW
        _finish_saves[(blocks(value_dim, block_v), heads, min(MOST_AT_ONCE, rows.saves.row_N.shape[0]))](
            mixed_TC, *parts, state_EHKV, out_THV, *where, *saves,
            rows.step.num_rows, *lengths, state_strides[0], item, FEW_TOKENS, *constants, block_v, CHUNK, precision, num_warps=warps,
        )  # fmt: skip


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
    tokens = rows.step.num_tokens
    heads, key_dim, value_dim = state_EHKV.shape[1:]
    out_THV = torch.empty(tokens, heads, value_dim, dtype=mixed_TC.dtype, device=mixed_TC.device)
    inputs = (mixed_TC, rates_TH, decays_TH, decay_log_H, decay_bias_H)
    strides = (mixed_TC.stride(0), rates_TH.stride(0), decays_TH.stride(0))
    (*saves, has_saves), (where, entries) = save_arguments(rows), row_arguments(rows, mixed_TC)
    if rows.step.one_token and not entries:
        slots, start, _, positions, _ = where
        block_v, warps = ONE if key_dim <= LARGEST_KEY else FEW
        _one[(blocks(value_dim, block_v), heads, rows.step.num_rows)](
            *inputs, state_EHKV, out_THV, rows.page_table, slots, start, positions, saves[0], *saves[2:],
            *strides, state_EHKV.stride(0), rows.page_table.stride(0), has_saves, state_EHKV.element_size(),
            key_heads, heads, key_dim, value_dim, max(16, padded(key_dim)), block_v, num_warps=warps,
            **dependent(mixed_TC.device),
        )  # fmt: skip
        return out_THV
    block_v, warps = DRAFTS if entries else FEW
    capped = key_dim <= LARGEST_KEY and state_EHKV.stride(0) % 16 == 0
    long = torch.empty(rows.step.num_rows + 1, dtype=torch.int32, device=mixed_TC.device)
    programs = blocks(value_dim, block_v) * heads
    _few[(blocks(value_dim, block_v), heads, rows.step.num_rows + 1 if rows.few else at_once(rows, programs, STARTS))](
        *inputs, state_EHKV, out_THV, long, rows.page_table, *where, *saves,
        rows.step.num_rows, tokens, *strides, state_EHKV.stride(0), rows.page_table.stride(0),
        has_saves, state_EHKV.element_size(), FEW_TOKENS, entries, key_heads, heads, key_dim, value_dim,
        max(16, padded(key_dim)), block_v, LISTED, num_warps=warps, maxnreg=REGISTERS[entries > 0] if capped else None,
    )  # fmt: skip
    if not rows.few:
        _long_rows(inputs, strides, state_EHKV, out_THV, long, key_heads, rows)
    return out_THV
