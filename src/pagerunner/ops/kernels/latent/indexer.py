"""Scores of an indexer over paged keys, and the exact best of them. Twin: `pagerunner.ops.indexer.choose_slots`.

One to four kernels. None needs anything of the host but bounds, so graphs capture them.

1. *Scores*. A program has a block of tokens, whose queries lie in shared memory, and a part of the slots that they see. Keys are the product's
   first operand, so that 128 of them meet all heads of the block's tokens at once. How many parts there are doesn't depend on lengths: each
   row's own slots are divided among them.
2. *Best*. A program has a token's scores in registers. The order of floats is that of integers, and the integer from which on k scores count
   is searched for by thirds: a round counts two bounds in one sum.

If rows may see more than CHUNK slots, two kernels between these leave about 1.4 k of a row that sees more than 2 k. One finds the largest score of
each of up to 2 k groups of slots, and a bound that k of these reach, so at least k slots do. The other finds the slots that do, a slice a program.

Where rows have one token and see few slots (`takes_few`), one kernel does the work of the first two: the last of a token's programs chooses. Where attention's programs choose
(`kernels/latent/vectors_choice_gluon.py`), only scores are made here.
Scores of rows of one token may be made in Gluon (`kernels/latent/indexer_one.py`).

Rows that see at most `top_k` slots have no scores: all their slots are chosen.

Shape letters: see the twin; BN slots of a tile, BQ tokens of a program, H slices, G groups.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pagerunner.batch import StepRows
from pagerunner.ops.indexer import equal_parts, is_choice, width_of
from pagerunner.ops.kernels.latent.indexer_one import run_one, takes_gluon
from pagerunner.ops.kernels.launch import blocks, dependent, multiprocessors, padded, start_next, wait_turn
from pagerunner.ops.kernels.paged.paged_heads import FP8_MAX, fitting_scale, fp8_type, quantise

PROGRAMS = 1024  # of the scores' kernel, about: enough for rows of unequal lengths
FULL = 256  # programs of tiles of 128, about, that are on the device at once
PART = 2048  # slots of such a program; of more, programs may have less than others by far
MOST_PARTS = 256
CHUNK = 8192  # slots that one program chooses from by their scores
SLICE = 2048  # slots of a long row, of which a program finds those that may be among the best
MOST_SLICES = 128
GROUPS = 128  # of such a row's slots, whose largest scores a program finds
LEAST = tl.constexpr(-(2**31))
FEW_KEYS = 128  # slots of a tile where scores and choice are one launch
FEW_TOKENS = 256  # of such a launch at most
FEW_SLOTS = 4096  # that each of several tokens sees at most: with more, a multiprocessor has one program
BLOCK_SCORES = 2**25  # of prompts' tokens that exist at once: 128 MiB, and half as much for places
ANYWHERE = ["row_ptr", "position_ptr"]
"""Where a block begins depends on the length, and each alignment would have a kernel."""


@triton.jit
def _of_row(row_ptr, position_ptr, tokens, there, RATIO: tl.constexpr):
    """Tokens' rows (-1: padding), and how many slots they see."""
    row = tl.load(row_ptr + tokens, mask=there, other=-1)
    position = tl.load(position_ptr + tokens, mask=there, other=-1)  # neither load waits for the other
    return row, tl.where(row >= 0, (position + 1) // RATIO, 0).to(tl.int32)


@triton.jit
def _queries(q_ptr, weights_ptr, token, head, there, i, q_token, q_head, weights_token, D: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr):  # fmt: skip
    """Queries [X, BI] and their weights [X]; in fp8 with their scales in the weights."""
    q = tl.load(
        q_ptr + (token * q_token + head * q_head)[:, None] + i[None, :],
        mask=there[:, None] & (i < D)[None, :], other=0.0,
    )  # fmt: skip
    weights = tl.load(weights_ptr + token * weights_token + head, mask=there, other=0.0).to(tl.float32)
    if FP8 is not None:
        q = q.to(tl.float32)
        scale = fitting_scale(tl.max(tl.abs(q), 1), FP8_MAX)
        q = quantise(q, scale[:, None], FP8_MAX, FP8)
        weights *= scale
    return q, weights


@triton.jit
def _score(
    q, weights, keys_ptr, scales_ptr, row_table, scores, limit, part, parts, i, page_stride, slot_stride, scale_page, scale_slot,
    D: tl.constexpr, BQ: tl.constexpr, BJ: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of BQ tokens of a row, in one of `parts` parts of the slots that they see: `limit` [BQ] so many each. `scores` [1, BQ]: where theirs begin."""
    n, length = tl.arange(0, BN), tl.max(limit, 0)
    per = tl.cdiv(tl.cdiv(length, BN), parts) * BN
    first = part * per
    last = tl.minimum(first + per, length)
    entry = tl.load(row_table + (first + n) // PAGE, mask=first + n < last, other=0)
    for at in range(first, last, BN):
        slot = at + n
        live, place = slot < last, slot % PAGE
        base = keys_ptr + entry * page_stride + place * slot_stride
        own = entry  # the next tile's are on their way meanwhile
        entry = tl.load(row_table + (slot + BN) // PAGE, mask=slot + BN < last, other=0)
        keys = tl.load(base[:, None] + i[None, :], mask=live[:, None] & (i < D)[None, :], other=0)
        if FP8 is not None:
            keys = keys.to(FP8, bitcast=True)
        else:
            keys = keys.to(q.dtype)
        dots = tl.dot(keys, tl.trans(q), input_precision=PRECISION)
        dots = tl.maximum(dots, 0.0) * weights[None, :]
        score = tl.sum(tl.reshape(dots, (BN, BQ, BJ)), 2)
        if FP8 is not None:
            k_scale = tl.load(scales_ptr + own * scale_page + place * scale_slot, mask=live, other=0.0)
            score *= k_scale[:, None]
        score = tl.where(score == 0.0, 0.0, score)  # a zero has one sign
        tl.store(scores + slot[:, None], score, mask=live[:, None] & (slot[:, None] < limit[None, :]))


@triton.jit(do_not_specialize=["group", "parts"], do_not_specialize_on_alignment=ANYWHERE)
def _scores_kernel(
    q_ptr, weights_ptr, keys_ptr, scales_ptr, scores_ptr, row_ptr, position_ptr, slots_ptr, table_ptr, group, parts,
    q_token, q_head, weights_token, page_stride, slot_stride, scale_page, scale_slot, table_stride, scores_stride,
    J: tl.constexpr, D: tl.constexpr, BJ: tl.constexpr, BI: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr,
    BQ: tl.constexpr, RATIO: tl.constexpr, TOP_K: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr,
    PRECISION: tl.constexpr, ONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BQ tokens of a group, and one of `parts` parts of the slots that they see. `group`: so many tokens belong together. ONE: token t belongs to row t.

    Table entries of slots that a token sees are at least 0, drafts' too: a drafter's pass goes no further than its row's pages
    (`ops/drafting.py`).
    """
    wait_turn(PDL)
    start_next(PDL)  # attention that chooses itself begins with what is complete by now
    blocks_of_group = tl.cdiv(group, BQ)
    inside = tl.program_id(0) % blocks_of_group * BQ
    first_token = (tl.program_id(0) // blocks_of_group).to(tl.int64) * group + inside
    query = tl.arange(0, BQ)
    if ONE:  # no load waits for another
        slot = tl.load(slots_ptr + first_token).to(tl.int64)
    row, seen = _of_row(row_ptr, position_ptr, first_token + query, inside + query < group, RATIO)
    x, i = tl.arange(0, BQ * BJ), tl.arange(0, BI)
    token, head = first_token + x // BJ, x % BJ
    there = (inside + x // BJ < group) & (head < J)
    q, weights = _queries(q_ptr, weights_ptr, token, head, there, i, q_token, q_head, weights_token, D, FP8, FP8_MAX)
    left = row
    current = tl.max(left, 0)
    while current >= 0:  # rows of a prompt's block, or the only one
        limit = tl.where(row == current, seen, 0)
        if tl.max(limit, 0) > TOP_K:
            if not ONE:
                slot = tl.load(slots_ptr + current).to(tl.int64)
            row_table = table_ptr + slot * table_stride
            scores = scores_ptr + (first_token + query)[None, :] * scores_stride
            _score(
                q, weights, keys_ptr, scales_ptr, row_table, scores, limit, tl.program_id(1), parts, i, page_stride, slot_stride, scale_page, scale_slot,
                D, BQ, BJ, BN, PAGE, FP8, PRECISION,
            )  # fmt: skip
        left = tl.where(left == current, -1, left)
        current = tl.max(left, 0)


@triton.jit
def _read(scores, at, live):
    """Integers in the order of scores, all of them more than LEAST, which stands where nothing is live."""
    bits = tl.load(scores + at, mask=live, other=0.0).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(live, tl.maximum(key, LEAST + 1), LEAST)


@triton.jit
def _bound(key, count, k, B: tl.constexpr, WARPS: tl.constexpr):
    """A bound that at least k of `count` keys reach, the first of B, and hardly more.

    Each warp halves for the part of k that it would have of evenly spread keys. It waits for no other warp. With 10 rounds and not 18, of scores of both
    signs twice as many reach the bound.
    """
    WIDTH: tl.constexpr = 128 if B > 128 else B
    W: tl.constexpr = WARPS if B >= WIDTH * WARPS else 1
    keys = tl.reshape(key, (B // (WIDTH * W), W, WIDTH))
    part = tl.cdiv(k, W)
    low = tl.min(tl.min(tl.where(keys == LEAST, 0x7FFFFFFF, keys), 0), 1)
    low = tl.where(count // (WIDTH * W) * WIDTH >= part, low, LEAST + 1)
    high = tl.maximum(tl.max(tl.max(keys, 0), 1), low)
    for _ in range(18):
        middle = (low | high) - ((low ^ high) >> 1)
        many = tl.sum(tl.sum((keys >= middle[None, :, None]).to(tl.int32), 0), 1)
        high = tl.maximum(tl.where(many > part, high, tl.where(many == part, middle, middle - 1)), low)
        low = tl.where(many >= part, middle, low)
    return tl.min(low, 0)


@triton.jit
def _sums_before(x, B: tl.constexpr):
    """Sums of `x` [B] up to each element and with it. Warps have rows of 128, so that they wait for each other once."""
    WIDTH: tl.constexpr = 128 if B > 128 else B
    rows = tl.reshape(x, (B // WIDTH, WIDTH))
    totals = tl.sum(rows, 1)
    before = tl.cumsum(totals, 0) - totals
    return tl.reshape(tl.cumsum(rows, 1) + before[:, None], (B,))


@triton.jit
def _ends(low, high, other_low, other_high):
    """The least and the largest of two ranges."""
    return tl.minimum(low, other_low), tl.maximum(high, other_high)


@triton.jit
def in_order(score, live):
    """Integers in the order of scores, less than any score's where nothing is live; and the least and the largest of the others."""
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    low, high = tl.reduce((tl.where(live, key, 0x7FFFFFFF), tl.where(live, key, -0x7FFFFFFF)), 0, _ends)
    return tl.where(live, key, -0x7FFFFFFF - 1), low, high


@triton.jit
def thirds(low, high):
    """Two bounds between low and high, which are no further from each other than two of 32 bits can be."""
    far = (high - low).to(tl.uint32, bitcast=True)
    third = far // 3 + 1
    return low + third.to(tl.int32, bitcast=True), low + tl.minimum(third * 2, far).to(tl.int32, bitcast=True)


@triton.jit
def narrowed(low, high, over, lower, upper, most, many, k):
    """What is known if `most` are as large as the lower bound and `many` as the upper one: at least k are as large as low, and `over`, fewer, are larger than high.
    If k are as large as both, these are the best, and `over` is 0."""
    over = tl.where(many > k, over, tl.where((many == k) | (most == k), 0, tl.where(most > k, many, most)))
    high = tl.where(many > k, high, tl.where(many == k, upper, tl.where(most > k, upper - 1, tl.where(most == k, lower, lower - 1))))  # fmt: skip
    return tl.where(many >= k, upper, tl.where(most >= k, lower, low)), high, over


@triton.jit
def border(score, live, count, k, B: tl.constexpr):
    """Which of the B scores are larger than the least of the best k of the live ones, `count` so many; which are equal to it; and how many of these are among the best.

    All threads of a program wait for each other at each sum, so there are few: two counts are one, and what is known isn't counted.
    """
    key, low, high = in_order(score, live)
    over = 0
    if count <= k:
        high = low
    BITS: tl.constexpr = 16 if B <= 32768 else 32
    BOTH: tl.constexpr = (1 << BITS) + 1
    while low < high:
        lower, upper = thirds(low, high)
        counts = tl.sum(tl.where(key >= upper, BOTH, tl.where(key >= lower, 1, 0)), 0)
        most, many = (counts & ((1 << BITS) - 1)).to(tl.int32), ((counts >> BITS) & ((1 << BITS) - 1)).to(tl.int32)
        low, high, over = narrowed(low, high, over, lower, upper, most, many, k)
    return live & (key > low), live & (key == low), k - over


@triton.jit
def _kept(score, live, count, k, B: tl.constexpr):
    """Which of the B scores are the best k of the live ones, `count` so many, of equal ones the first; and how many of these are before each of them."""
    above, equal, need = border(score, live, count, k, B)
    if B <= 16384:  # both in one word
        sums = _sums_before(tl.where(above, 1, tl.where(equal, 65536, 0)), B)
        larger, same = sums & 0xFFFF, sums >> 16
    else:
        larger, same = _sums_before(above.to(tl.int32), B), _sums_before(equal.to(tl.int32), B)
    kept = above | (equal & (same <= need))
    return kept, larger + tl.minimum(same, need) - 1


@triton.jit(do_not_specialize_on_alignment=ANYWHERE)
def _tops_kernel(
    scores_ptr, tops_ptr, bound_ptr, counter_ptr, row_ptr, position_ptr, scores_stride,
    X: tl.constexpr, EACH: tl.constexpr, BG: tl.constexpr, TOP_K: tl.constexpr, RATIO: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The largest key of each of BG groups, of at most X, of a token's slots. Slots of a group are far from each other, as near ones may be alike.

    The program that ends last finds a bound: TOP_K groups' largest are as large, so at least TOP_K slots are. `counter` [T] is zeros, and is left so.
    """
    wait_turn(PDL)
    start_next(PDL)
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BG
    _, seen = _of_row(row_ptr, position_ptr, token, True, RATIO)
    groups = tl.cdiv(seen, tl.maximum(tl.cdiv(seen, X), 1))
    if (seen > X) & (first < groups):
        group = first + tl.arange(0, BG)
        top = tl.full((BG,), LEAST, tl.int32)
        for start in range(0, tl.cdiv(seen, groups), EACH):
            at = (start + tl.arange(0, EACH))[:, None] * groups + group[None, :]
            live = (group < groups)[None, :] & (at < seen)
            top = tl.maximum(top, tl.max(_read(scores_ptr + token * scores_stride, at, live), 0))
        tops, every = tops_ptr + token * X, tl.arange(0, X)
        tl.store(tops + group, top, mask=group < groups)
        tl.debug_barrier()  # all of the program's are stored before it is counted
        if tl.atomic_add(counter_ptr + token, 1, sem="acq_rel", scope="gpu") == tl.cdiv(groups, BG) - 1:
            tl.store(counter_ptr + token, 0)
            key = tl.load(tops + every, mask=every < groups, other=LEAST)
            tl.store(bound_ptr + token, _bound(key, groups, TOP_K, X, WARPS))


@triton.jit(do_not_specialize=["slices"], do_not_specialize_on_alignment=ANYWHERE)
def _above_kernel(
    scores_ptr, bound_ptr, places_ptr, count_ptr, row_ptr, position_ptr, scores_stride, slices,
    X: tl.constexpr, S: tl.constexpr, BH: tl.constexpr, RATIO: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Slots of one slice of a token's scores that are within the bound: `places` in the slice [T, H, S], and `count` [T, BH]."""
    wait_turn(PDL)
    start_next(PDL)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, seen = _of_row(row_ptr, position_ptr, token, True, RATIO)
    if (seen > X) & (part * S < seen):
        bound = tl.load(bound_ptr + token)
        place = tl.arange(0, S)
        live = part * S + place < seen
        kept = _read(scores_ptr + token * scores_stride, part * S + place, live) >= bound
        sums = _sums_before(kept.to(tl.int32), S)
        tl.store(places_ptr + (token * slices + part) * S + sums - 1, place.to(tl.int16), mask=kept)
        tl.store(count_ptr + token * BH + part, tl.max(sums, 0))


@triton.jit(do_not_specialize=["width", "slices"], do_not_specialize_on_alignment=ANYWHERE)
def _best_kernel(
    scores_ptr, chosen_ptr, places_ptr, count_ptr, row_ptr, position_ptr, scores_stride, width, slices,
    X: tl.constexpr, S: tl.constexpr, BH: tl.constexpr, TOP_K: tl.constexpr, RATIO: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best slots of one token: of up to X, or of what `_above_kernel` has left of more (BH), whose `count` is overwritten.

    `width` of `chosen` and `slices` follow from the step's longest row, so they are no constants: each length would have a kernel.
    """
    wait_turn(PDL)
    start_next(PDL)  # attention begins with what is complete by now
    token, x = tl.program_id(0).to(tl.int64), tl.arange(0, X)
    _, seen = _of_row(row_ptr, position_ptr, token, True, RATIO)
    scores, chosen = scores_ptr + token * scores_stride, chosen_ptr + token * width
    if seen <= TOP_K:
        tl.store(chosen + x, tl.where(x < seen, x, -1), mask=x < width)
    elif seen <= X:
        kept, place = _kept(tl.load(scores + x, mask=x < seen, other=0.0), x < seen, seen, TOP_K, X)
        tl.store(chosen + place, x, mask=kept)
    elif BH:
        h, done, best, counts = tl.arange(0, BH), 0, 0, count_ptr + token * BH
        ends = tl.cumsum(tl.load(counts + h, mask=h * S < seen, other=0), 0)
        tl.debug_barrier()  # counts have been read
        tl.store(counts + h, ends)
        tl.debug_barrier()
        left = tl.max(ends, 0)
        while done < left:  # once, unless many scores are equal: the best so far, and of what is left as many as fit
            at, part, step = done + x - best, tl.zeros((X,), tl.int32), 1
            while step * 2 * S < seen:
                step *= 2
            while step > 0:  # the slice of what is left: as many end before it
                part += tl.where(tl.load(counts + part + step - 1) <= at, step, 0)
                step = step // 2
            inside = at - tl.load(counts + part - 1, mask=part > 0, other=0)
            there = (x >= best) & (at < left)
            at = part * S + tl.load(places_ptr + (token * slices + part) * S + inside, mask=there, other=0)
            at = tl.where(x < best, tl.load(chosen + x, mask=x < best, other=0), at)
            some = tl.minimum(best + left - done, X)
            live = x < some
            kept, place = _kept(tl.load(scores + at, mask=live, other=0.0), live, some, TOP_K, X)
            tl.debug_barrier()  # the best so far have been read
            tl.store(chosen + place, at, mask=kept)
            tl.debug_barrier()
            done, best = done + X - best, TOP_K


@triton.jit(do_not_specialize=["parts", "width"])
def _few_kernel(
    q_ptr, weights_ptr, keys_ptr, scales_ptr, scores_ptr, chosen_ptr, counter_ptr, row_ptr, position_ptr, slots_ptr, table_ptr, parts, width,
    q_token, q_head, weights_token, page_stride, slot_stride, scale_page, scale_slot, table_stride, scores_stride,
    J: tl.constexpr, D: tl.constexpr, BJ: tl.constexpr, BI: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, C: tl.constexpr,
    RATIO: tl.constexpr, TOP_K: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One of `parts` parts of the slots that a token sees, at most C. The program that ends last chooses. `counter` [T] is zeros, and is left so."""
    wait_turn(PDL)
    start_next(PDL)  # attention begins with what is complete by now
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + token).to(tl.int64)  # token t belongs to row t, so no load waits for another
    _, seen = _of_row(row_ptr, position_ptr, token, True, RATIO)
    chosen = chosen_ptr + token * width
    at = tl.arange(0, C)
    if seen <= TOP_K:
        if part == 0:
            tl.store(chosen + at, tl.where(at < seen, at, -1), mask=at < width)
    else:
        i, head, one = tl.arange(0, BI), tl.arange(0, BJ), tl.arange(0, 1)
        q, weights = _queries(q_ptr, weights_ptr, token + head * 0, head, head < J, i, q_token, q_head, weights_token, D, FP8, FP8_MAX)  # fmt: skip
        row_table = table_ptr + slot * table_stride
        scores = scores_ptr + token * scores_stride
        _score(
            q, weights, keys_ptr, scales_ptr, row_table, scores + one[None, :], one + seen, part, parts, i, page_stride, slot_stride, scale_page,
            scale_slot, D, 1, BJ, BN, PAGE, FP8, PRECISION,
        )  # fmt: skip
        tl.debug_barrier()  # all of the program's scores are stored before it is counted
        if tl.atomic_add(counter_ptr + token, 1, sem="acq_rel", scope="gpu") == parts - 1:
            tl.store(counter_ptr + token, 0)
            kept, place = _kept(tl.load(scores + at, mask=at < seen, other=0.0), at < seen, seen, TOP_K, C)
            tl.store(chosen + place, at, mask=kept)


class Sizes(NamedTuple):
    """How a step's scores are divided: tokens of a program, how many belong together, parts of their slots, slots of a tile; its warps
    and stages."""

    tokens: int
    group: int
    parts: int
    keys: int
    warps: int
    stages: int


def score_sizes(rows: StepRows, tokens: int, heads: int, width: int, dtype: torch.dtype) -> Sizes:
    """Tokens of a row share the keys that a program reads. `width`: slots that a token sees at most. `dtype`: what is multiplied. Two programs of one
    token fit a multiprocessor.

    Products in float32 are three of parts of their operands, so more than one token's queries don't fit a program.
    """
    group = 1 if rows.one_token else rows.stride or tokens
    together = min(4, padded(group)) if heads <= 64 and dtype.itemsize < 4 else 1
    units = blocks(tokens, group) * blocks(group, together)
    parts = max(1, min(MOST_PARTS, PROGRAMS // units))
    if dtype.itemsize == 4:
        return Sizes(1, group, parts, 64 if heads <= 64 else 32, 8, 2)
    if together > 1:
        return Sizes(together, group, parts, 128, 8, 3)
    if heads > 64:
        return Sizes(1, group, parts, 128 if dtype.itemsize == 1 else 64, 4, 4)
    return Sizes(1, group, max(1, FULL // units, min(parts, blocks(width, PART))), 128, 4, 3)


def _width(rows: StepRows, ratio: int) -> int:
    """Scores of a token, so that each token's begin where kernels read many bytes at once."""
    return blocks(width_of(rows, ratio), 128) * 128


def best_size(width: int, top_k: int) -> int:
    """Slots that one program chooses from: all that a row may see, or of more than CHUNK twice as many as are chosen."""
    return max(16, padded(max(width, top_k))) if width <= CHUNK else 2 * padded(top_k)


def slice_size(width: int) -> int:
    """Slots of a slice of a row that sees more."""
    return SLICE * padded(blocks(width, SLICE * MOST_SLICES))


def choose_slots_kernels(tokens: int, top_k: int, ratio: int) -> tuple[int, int]:
    """See `Op.kernels_for`. It is the length of a step's longest row that decides, in tokens: whether there is a choice, and among how many."""
    width = max(1, tokens // ratio)
    return best_size(width, top_k) if width > top_k else 0, slice_size(width) if width > CHUNK else 0


def run_scores(
    q_TJI: torch.Tensor,
    weights_TJ: torch.Tensor,
    top_k: int,
    pages_ESI: torch.Tensor,
    table_SW: torch.Tensor,
    rows: StepRows,
    ratio: int,
    scales_ES: torch.Tensor | None,
    sizes: Sizes | None = None,
    early: int = 0,
) -> torch.Tensor:
    """Scores of the slots that tokens see, [T, N] float32; anything where a token sees at most `top_k`, and behind what it sees. `early`: see `run_one`."""
    tokens, heads, size = q_TJI.shape
    dtype, fp8 = pages_ESI.dtype, scales_ES is not None
    gluon = sizes is None and takes_gluon(q_TJI, pages_ESI, rows, fp8)
    sizes = sizes or score_sizes(rows, tokens, heads, width_of(rows, ratio), dtype if fp8 else q_TJI.dtype)
    scores_TN = torch.empty(tokens, _width(rows, ratio), dtype=torch.float32, device=q_TJI.device)
    held, scales = (pages_ESI.view(torch.uint8), scales_ES) if scales_ES is not None else (pages_ESI, pages_ESI)
    if gluon:
        run_one(q_TJI, weights_TJ, top_k, pages_ESI, table_SW, rows, ratio, scales_ES, scores_TN, sizes.parts, early)
        return scores_TN
    units = blocks(tokens, sizes.group) * blocks(sizes.group, sizes.tokens)
    _scores_kernel[(units, sizes.parts)](
        q_TJI, weights_TJ, held, scales, scores_TN, rows.row_T, rows.positions_T, rows.slots_R, table_SW, sizes.group, sizes.parts,
        *q_TJI.stride()[:2], weights_TJ.stride(0), *held.stride()[:2], *(scales.stride() if fp8 else (0, 0)),
        table_SW.stride(0), scores_TN.stride(0),
        J=heads, D=size, BJ=max(16, padded(heads)), BI=max(32 if fp8 else 16, padded(size)), PAGE=pages_ESI.shape[1],
        BN=sizes.keys, BQ=sizes.tokens, RATIO=ratio, TOP_K=top_k, FP8=fp8_type(dtype), FP8_MAX=FP8_MAX.get(dtype, 0.0),
        PRECISION="tf32x3" if q_TJI.dtype == torch.float32 else "tf32", ONE=rows.one_token and sizes.tokens == 1, num_warps=sizes.warps, num_stages=sizes.stages,
        **dependent(q_TJI.device),
    )  # fmt: skip
    return scores_TN


def _counter(scratch: dict[Any, Any], tokens: int, device: torch.device) -> torch.Tensor:
    """Zeros, which programs count themselves in and leave as zeros: the layers of a step share them."""
    if ("counter", tokens) not in scratch:
        scratch["counter", tokens] = torch.zeros(tokens, dtype=torch.int32, device=device)
    counter_T: torch.Tensor = scratch["counter", tokens]
    return counter_T


def run_choice(scores_TN: torch.Tensor, top_k: int, rows: StepRows, ratio: int, shared: dict[Any, Any]) -> torch.Tensor:
    """The best slots by their scores; see the twin."""
    tokens, width, device = scores_TN.shape[0], width_of(rows, ratio), scores_TN.device
    size, part = best_size(width, top_k), slice_size(width)
    count, slices, group = min(top_k, width), blocks(width, part) if width > CHUNK else 0, min(size, GROUPS)
    chosen_TK = torch.empty(tokens, count, dtype=torch.int32, device=device)
    where, stride = (rows.row_T, rows.positions_T), scores_TN.stride(0)
    common = {"X": size, "RATIO": ratio, **dependent(device)}
    places_THS, counts_TH = chosen_TK.view(torch.int16), chosen_TK  # nothing, of the same types
    if slices:
        tops_TX = torch.empty(tokens, size, dtype=torch.int32, device=device)
        counts_TH = torch.empty(tokens, MOST_SLICES, dtype=torch.int32, device=device)
        places_THS = torch.empty(tokens, slices, part, dtype=torch.int16, device=device)
        bound_T, counter_T = torch.empty_like(rows.row_T[:tokens]), _counter(shared, tokens, device)
        _tops_kernel[(tokens, blocks(size, group))](
            scores_TN, tops_TX, bound_T, counter_T, *where, stride, EACH=16, BG=group, TOP_K=top_k, WARPS=4, num_warps=4, **common
        )  # fmt: skip
        _above_kernel[(tokens, slices)](
            scores_TN, bound_T, places_THS, counts_TH, *where, stride, slices, S=part, BH=MOST_SLICES, num_warps=4, **common
        )  # fmt: skip
    _best_kernel[(tokens,)](
        scores_TN, chosen_TK, places_THS, counts_TH, *where, stride, count, slices,
        S=part, BH=MOST_SLICES if slices else 0, TOP_K=top_k, num_warps=max(4, size // (512 if slices else 1024)), **common
    )  # fmt: skip
    return chosen_TK


def run_few(
    q_TJI: torch.Tensor,
    weights_TJ: torch.Tensor,
    top_k: int,
    pages_ESI: torch.Tensor,
    table_SW: torch.Tensor,
    rows: StepRows,
    ratio: int,
    counter_T: torch.Tensor,
    scales_ES: torch.Tensor | None,
    parts: int = 0,
    by_gluon: bool = False,
    early: int = 0,
) -> torch.Tensor:
    """Scores and choice in one launch. `early`: see `run_one`."""
    (tokens, heads, size), device = q_TJI.shape, q_TJI.device
    dtype, fp8, width = pages_ESI.dtype, scales_ES is not None, width_of(rows, ratio)
    keys, chunk = FEW_KEYS, padded(width)
    parts = parts or max(1, min(2 * multiprocessors(device) // tokens, blocks(width, keys)))
    scores_TN = torch.empty(tokens, _width(rows, ratio), dtype=torch.float32, device=device)
    chosen_TK = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
    held, scales = (pages_ESI.view(torch.uint8), scales_ES) if scales_ES is not None else (pages_ESI, pages_ESI)
    if by_gluon:
        own = q_TJI, weights_TJ, top_k, pages_ESI, table_SW, rows, ratio, scales_ES
        run_one(*own, scores_TN, parts, early, (chosen_TK, counter_T), chunk)
        return chosen_TK
    _few_kernel[(tokens, parts)](
        q_TJI, weights_TJ, held, scales, scores_TN, chosen_TK, counter_T, rows.row_T, rows.positions_T, rows.slots_R, table_SW, parts, top_k,
        *q_TJI.stride()[:2], weights_TJ.stride(0), *held.stride()[:2], *(scales.stride() if fp8 else (0, 0)),
        table_SW.stride(0), scores_TN.stride(0),
        J=heads, D=size, BJ=max(16, padded(heads)), BI=max(32 if fp8 else 16, padded(size)), PAGE=pages_ESI.shape[1], BN=keys, C=chunk,
        RATIO=ratio, TOP_K=top_k, FP8=fp8_type(dtype), FP8_MAX=FP8_MAX.get(dtype, 0.0), PRECISION="tf32", num_warps=few_warps(chunk, fp8), num_stages=3,
        **dependent(device),
    )  # fmt: skip
    return chosen_TK


def few_warps(slots: int, fp8: bool) -> int:
    """Warps of a program that scores and chooses among so many slots: fewer wait for each other less, but make numbers of codes more slowly."""
    return 8 if fp8 or slots > 1024 else 4


def takes_few(rows: StepRows, tokens: int, heads: int, width: int, dtype: torch.dtype) -> bool:
    """Whether scores and choice are one launch. In float32 their products need more registers than there are. `dtype`: what is multiplied."""
    if not rows.one_token or heads > 64 or dtype.itemsize == 4 or width > CHUNK:
        return False
    return tokens == 1 or (tokens <= FEW_TOKENS and width <= FEW_SLOTS)


def choose_slots(
    q_TJI: torch.Tensor,
    weights_TJ: torch.Tensor,
    top_k: int,
    pages_ESI: torch.Tensor,
    table_SW: torch.Tensor,
    rows: StepRows,
    ratio: int,
    scratch: dict[Any, Any],
    scales_ES: torch.Tensor | None = None,
    *,
    beside: bool = False,
) -> torch.Tensor:
    """See the twin."""
    tokens, width = q_TJI.shape[0], width_of(rows, ratio)
    if not is_choice(rows, ratio, top_k):
        chosen_TK: torch.Tensor | None = scratch.get("all slots")
        if chosen_TK is None:
            nothing = torch.empty(1, 16, dtype=torch.float32, device=q_TJI.device)  # as aligned as others
            chosen_TK = scratch["all slots"] = run_choice(nothing.expand(tokens, 16), top_k, rows, ratio, scratch)
        return chosen_TK
    fp8 = scales_ES is not None
    by_gluon = takes_gluon(q_TJI, pages_ESI, rows, fp8)
    early, scratch["scored"] = 2 if beside else int("scored" in scratch), True
    if takes_few(rows, tokens, q_TJI.shape[1], width, pages_ESI.dtype if fp8 else q_TJI.dtype):
        counter_T = _counter(scratch, tokens, q_TJI.device)
        own = q_TJI, weights_TJ, top_k, pages_ESI, table_SW, rows, ratio, counter_T, scales_ES
        return run_few(*own, by_gluon=by_gluon, early=early)
    together = max(rows.stride, 1)
    most = max(1, BLOCK_SCORES // _width(rows, ratio) // together)
    chosen, edges = [], equal_parts(blocks(tokens, together), most)
    for first, last in pairwise(min(edge * together, tokens) for edge in edges):
        part = slice(first, last)
        some = replace(rows, row_T=rows.row_T[part], positions_T=rows.positions_T[part])
        given = q_TJI[part], weights_TJ[part], top_k, pages_ESI, table_SW, some, ratio, scales_ES
        scores_TN = run_scores(*given, early=early)
        chosen.append(run_choice(scores_TN, top_k, some, ratio, scratch))
    return torch.cat(chosen) if len(chosen) > 1 else chosen[0]
