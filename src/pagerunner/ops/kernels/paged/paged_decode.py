"""Decode attention over pages: rows with one new token each, in a grid whose size depends on the device alone.

All (row, key tile) pairs of a step, in order, are cut into slices of equal length. Program (slice, head) works through one
slice. So one row of 40,000 tokens and 256 rows of 1,000 keep the device equally busy. A graph fixes the grid, and this grid suits
every step.

A row that lies in one slice is finished by that slice's program. If slice boundaries cut a row, each of its programs leaves a
partial result. The last program to finish merges them all, always in the same order. In steps of few rows, more than 32 are merged 16 at a
time, as in `kernels.paged_few`.

Scores are in units of log2. Shape letters: U units (a row's token), S slices, K key/value heads, G query heads per
key/value head (M: as rows of a tile), V size of a value head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import start_next, wait_turn
from pagerunner.ops.kernels.paged.paged_few import MERGED, MOST_MERGED, is_last
from pagerunner.ops.kernels.paged.paged_own import own_value, prepared, with_own_code
from pagerunner.ops.kernels.paged.paged_tiles import (
    LOG2E,
    LOWEST,
    attend_fp8_few,
    halves,
    joined,
    keys_at,
    load_tile,
    online,
    prefetch_tile,
    softcapped,
    tile_scales,
)


@triton.jit
def store_part(
    part_ptr, sums_ptr, place, highest, total, acc,
    G: tl.constexpr, M: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
):  # fmt: skip
    """A slice's result for a unit that other slices have, too."""
    g = tl.arange(0, M)
    dv = tl.arange(0, DVP)
    at = place * G + g
    tl.store(sums_ptr + at * 2, highest, mask=g < G)
    tl.store(sums_ptr + at * 2 + 1, total, mask=g < G)
    tl.store(part_ptr + at[:, None] * DV + dv[None, :], acc, mask=(g < G)[:, None] & (dv < DV)[None, :])


@triton.jit
def merged_parts(
    part_ptr, sums_ptr, first, pieces, head,
    K: tl.constexpr, G: tl.constexpr, M: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, begin=0, each=1,
):  # fmt: skip
    """The partial results of one unit: of slice `first` in its second place, of later slices in their first. Those of pieces from `begin` to `pieces`, or
    of one in `each`.
    """
    g = tl.arange(0, M)
    d = tl.arange(0, DVP)
    BLOCK: tl.constexpr = 16
    highest = tl.full([M], LOWEST, tl.float32)
    for start in range(begin, pieces, BLOCK * each):
        piece = start + tl.arange(0, BLOCK) * each
        place = ((first + piece) * 2 + (piece == 0)) * K + head
        mask = (piece < pieces)[:, None] & (g < G)[None, :]
        some = tl.load(sums_ptr + (place[:, None] * G + g[None, :]) * 2, mask=mask, other=LOWEST, cache_modifier=".cg")
        highest = tl.maximum(highest, tl.max(some, 0))
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DVP], tl.float32)
    for start in range(begin, pieces, 4 * each):
        for one in tl.static_range(4):
            piece = start + one * each
            place = ((first + piece) * 2 + (1 if piece == 0 else 0)) * K + head
            mask = (g < G) & (piece < pieces)
            at = place * G + g
            weight = tl.math.exp2(tl.load(sums_ptr + at * 2, mask=mask, other=LOWEST, cache_modifier=".cg") - highest)
            weight = tl.where(mask, weight, 0.0)
            total += weight * tl.load(sums_ptr + at * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
            values = tl.load(
                part_ptr + at[:, None] * DV + d[None, :],
                mask=mask[:, None] & (d < DV)[None, :], other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            acc += weight[:, None] * values
    return highest, total, acc


@triton.jit
def _merge(
    part_ptr, sums_ptr, counter_ptr, unit, num_units, piece, first, pieces, head, highest, total, acc,
    K: tl.constexpr, G: tl.constexpr, M: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Whether this is the last of a unit's slices, which begin with slice `first`, to have stored its part, and their result then. GROUPED: the last
    of some slices merges these before, and leaves the result where the first of them had its part.
    """
    each, ready, done = 1, pieces > 0, pieces == 0
    if GROUPED:
        each = tl.where(pieces > MOST_MERGED, MERGED, 1)
        group = (piece - first) // each * each
        some = tl.minimum(pieces - group, each)
        ready = some == 1
        if some > 1:
            ready = is_last(counter_ptr + (num_units + first + group) * K + head, some)
            if ready:
                highest, total, acc = merged_parts(
                    part_ptr, sums_ptr, first, group + some, head, K, G, M, DV, DVP, group
                )
                tl.debug_barrier()  # all have read the first part
                place = ((first + group) * 2 + (group == 0)) * K + head
                store_part(part_ptr, sums_ptr, place, highest, total, acc, G, M, DV, DVP)
    if ready:
        done = is_last(counter_ptr + unit * K + head, tl.cdiv(pieces, each))
        if done:
            highest, total, acc = merged_parts(part_ptr, sums_ptr, first, pieces, head, K, G, M, DV, DVP, 0, each)
    return done, highest, total, acc


@triton.jit
def slice_of(begin_ptr, num_units, piece, S: tl.constexpr):
    """Tiles of a full slice; and of slice `piece` the first tile, the number of tiles, and the unit of the first tile."""
    total_tiles = tl.load(begin_ptr + num_units)
    per = tl.maximum(tl.cdiv(total_tiles, S), 1)
    tile = piece * per
    left = tl.minimum(per, total_tiles - tile)
    unit = 0
    if (num_units > 1) & (tile > 0) & (left > 0):
        for start in range(0, num_units, 256):
            at = start + tl.arange(0, 256)
            ends = tl.load(begin_ptr + 1 + at, mask=at < num_units, other=0x7FFFFFFF)
            unit += tl.sum((ends <= tile).to(tl.int32), 0)
    return per, tile, left, unit


@triton.jit
def unit_of(begin_ptr, unit_ptr, unit, num_units):
    """A unit: its first tile and the one after its last, and what `decode_kernel` says of `unit`. Padding if there are no more units."""
    there = unit < num_units
    begin = tl.load(begin_ptr + unit, mask=there, other=0)
    end = tl.load(begin_ptr + unit + 1, mask=there, other=0)
    token = tl.load(unit_ptr + unit * 4, mask=there, other=0)
    slot = tl.load(unit_ptr + unit * 4 + 1, mask=there, other=-1)
    oldest = tl.load(unit_ptr + unit * 4 + 2, mask=there, other=0)
    stop = tl.load(unit_ptr + unit * 4 + 3, mask=there, other=0)
    return begin, end, token, slot, oldest, stop


@triton.jit
def _attend(
    q, highest, total, acc, pages, keys, first, last, scale, softcap,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr,
    RING: tl.constexpr, SOFTCAP: tl.constexpr, TO: tl.constexpr,
):  # fmt: skip
    """Attend to tiles [first, last) of keys. Keys [oldest, stop) exist; others are masked."""
    kp_ptr, kp_se, kp_ss, vp_ptr, vp_se, vp_ss = pages
    row_table, width, oldest, stop = keys
    for start in range(first, last, BN):
        _, mask, entry, inside = keys_at(row_table, width, start, oldest, stop, PAGE, BN, RING)
        k = load_tile(kp_ptr, entry * kp_se + inside * kp_ss, mask, D, DP, None, TO)
        v = load_tile(vp_ptr, entry * vp_se + inside * vp_ss, mask, DV, DVP, None, TO)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP:
            scores = softcapped(scores, softcap)
        scores = tl.where(mask[None, :], scores * LOG2E, float("-inf"))
        weights, highest, total, shrink = online(scores, 1.0, highest, total, 1)
        acc = tl.dot(weights.to(TO), v, acc * shrink[:, None], input_precision="ieee")
    return highest, total, acc


@triton.jit
def _attend_fp8(
    q_even, q_odd, highest, total, even, odd, pages, scales_ptr, scales_se, keys, first, last, scale, softcap,
    K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, PAGE: tl.constexpr,
    BN: tl.constexpr, RING: tl.constexpr, SOFTCAP: tl.constexpr, FP8: tl.constexpr, TO: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """As `_attend`, with queries and results as `attend_fp8_few` has them."""
    kp_ptr, kp_se, kp_ss, vp_ptr, vp_se, vp_ss = pages
    row_table, width, oldest, stop = keys
    for start in range(first, last, BN):
        _, mask, entry, inside = keys_at(row_table, width, start, oldest, stop, PAGE, BN, RING)
        k_scale, exponent, share = tile_scales(
            scales_ptr, scales_se, row_table, width, start, oldest, stop, K, PAGE, BN, RING, ASM
        )
        highest, total, even, odd = attend_fp8_few(
            q_even, q_odd, highest, total, even, odd, kp_ptr, entry * kp_se + inside * kp_ss,
            vp_ptr, entry * vp_se + inside * vp_ss, k_scale, exponent, share, mask, mask[:, None], scale, softcap,
            D, DP, DV, DVP, SOFTCAP, FP8, TO, ASM,
        )  # fmt: skip
    return highest, total, even, odd


@triton.jit
def _with_shared(
    highest, total, acc, unit, q_head, there, shared_ptr, shared_sums_ptr, shared_count_ptr, shared_split,
    HEADS: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
):  # fmt: skip
    """Results of a unit's queries [M] that are `there`, merged with those over the shared prefix."""
    dv = tl.arange(0, DVP)
    for split in range(tl.load(shared_count_ptr)):
        at = split * shared_split + unit * HEADS + q_head
        other = tl.load(shared_sums_ptr + at * 2, mask=there, other=LOWEST)
        other_total = tl.load(shared_sums_ptr + at * 2 + 1, mask=there, other=0.0)
        at_values = shared_ptr + at[:, None] * DV + dv[None, :]
        other_acc = tl.load(at_values, mask=there[:, None] & (dv < DV)[None, :], other=0.0)
        new = tl.maximum(highest, other)
        a = tl.math.exp2(highest - new)
        b = tl.math.exp2(other - new)
        total = total * a + other_total * b
        acc = acc * a[:, None] + other_acc * b[:, None]
        highest = new
    return highest, total, acc


@triton.jit
def finish(
    highest, total, acc, token, q_head, there, out_ptr, out_st, out_sh, sinks_ptr,
    DV: tl.constexpr, DVP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Add the sinks, and write the output of queries [M] that are `there`. `token` is one for all, or one for each."""
    dv = tl.arange(0, DVP)
    mask = there[:, None] & (dv < DV)[None, :]
    if SINKS:
        sink = tl.load(sinks_ptr + q_head, mask=there, other=0.0).to(tl.float32) * LOG2E
        new = tl.maximum(highest, sink)
        shrink = tl.math.exp2(highest - new)
        total = total * shrink + tl.math.exp2(sink - new)
        acc = acc * shrink[:, None]
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_at = out_ptr + (tl.cast(token, tl.int64) * out_st + q_head * out_sh)[:, None] + dv[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _unit_part(
    q_ptr, q_st, q_sh, k_ptr, k_st, k_sh, v_ptr, v_st, v_sh, pages, scales_ptr, scales_se, cos_ptr, sin_ptr, stride_rope,
    q_norm_ptr, k_norm_ptr, eps, entry_ptr, offset_ptr, keys, token, slot, head, begins, ends, skipped, upto, scale, softcap,
    K: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr,
    DVP: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, RING: tl.constexpr, OWN: tl.constexpr, FUSED: tl.constexpr,
    NORM: tl.constexpr, SOFTCAP: tl.constexpr, FP8: tl.constexpr, TO: tl.constexpr,
    ASM: tl.constexpr, FP8_MAX: tl.constexpr, STATIC: tl.constexpr, PAGE_P: tl.constexpr,
):  # fmt: skip
    """One part of a unit, its tiles [skipped, upto): highest score, total weight and weighted values.

    A unit is one row and one head of keys. `begins` says that the part holds the unit's first tile, `ends` that it holds
    its last. One part of the unit adds the row's own token, which comes from the projection. Usually the part that begins
    adds it. With fp8 pages that this kernel writes (FUSED), the part that ends adds it: writing the token may raise its
    page's scale and convert what the page holds, and no other part reads that page.
    """
    _, _, oldest, _ = keys
    g = tl.arange(0, M)
    d = tl.arange(0, DP)
    rows = (g < G)[:, None]
    q_at = q_ptr + tl.cast(token, tl.int64) * q_st + (head * G + g)[:, None] * q_sh
    angle = tl.cast(token, tl.int64) * stride_rope
    if FUSED:
        wide_q = prepared(q_at, rows, q_norm_ptr, angle, cos_ptr, sin_ptr, eps, D, DP, NORM)
        wide_q = wide_q.to(q_ptr.dtype.element_ty).to(tl.float32)
    else:
        wide_q = tl.load(q_at + d[None, :], mask=rows & (d < D)[None, :], other=0.0).to(tl.float32)
    highest = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DVP], tl.float32)
    CODES: tl.constexpr = FUSED and FP8 is not None
    k_own = k_ptr + tl.cast(token, tl.int64) * k_st + head * k_sh
    v_own = v_ptr + tl.cast(token, tl.int64) * v_st + head * v_sh
    if OWN and not CODES:
        if begins & (slot >= 0):
            highest, value = own_value(
                wide_q, k_own, v_own, angle, cos_ptr, sin_ptr, k_norm_ptr, eps, entry_ptr, offset_ptr, token, pages,
                scale, softcap, D, DP, DV, DVP, FUSED, NORM, SOFTCAP,
            )  # fmt: skip
            total += 1.0
            acc += value[None, :]
    first = (oldest // BN + skipped) * BN
    last = (oldest // BN + upto) * BN
    if FP8 is None:
        highest, total, acc = _attend(
            wide_q.to(TO), highest, total, acc, pages, keys, first, last, scale, softcap, D, DP, DV, DVP, PAGE, BN, RING, SOFTCAP, TO,
        )  # fmt: skip
    else:
        if FUSED:
            q_even, q_odd = halves(wide_q.to(TO))
        else:
            twos = 2 * tl.arange(0, DP // 2)[None, :]
            q_even = tl.load(q_at + twos, mask=rows & (twos < D), other=0.0).to(TO)
            q_odd = tl.load(q_at + twos + 1, mask=rows & (twos < D), other=0.0).to(TO)
        even, odd = halves(acc)
        highest, total, even, odd = _attend_fp8(
            tl.trans(q_even), tl.trans(q_odd), highest, total, tl.trans(even), tl.trans(odd),
            pages, scales_ptr, scales_se, keys, first, last, scale, softcap, K, D, DP, DV, DVP, PAGE, BN, RING, SOFTCAP, FP8, TO, ASM,
        )  # fmt: skip
        acc = joined(tl.trans(even), tl.trans(odd))
    if CODES:
        if ends & (slot >= 0):
            highest, total, acc = with_own_code(
                wide_q, highest, total, acc, k_own, v_own, angle, cos_ptr, sin_ptr, k_norm_ptr, eps,
                tl.load(entry_ptr + token), tl.load(offset_ptr + token), pages, scales_ptr, scales_se, scale, softcap,
                K, D, DP, DV, DVP, PAGE, PAGE_P, NORM, SOFTCAP, FP8, FP8_MAX, STATIC,
            )  # fmt: skip
    return highest, total, acc


@triton.jit
def prefetch(pages, scales_ptr, scales_se, keys, start, K: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
             BN: tl.constexpr, RING: tl.constexpr, FP8: tl.constexpr):  # fmt: skip
    """A tile of keys and values, and their scales."""
    kp_ptr, kp_se, kp_ss, vp_ptr, vp_se, vp_ss = pages
    row_table, width, oldest, stop = keys
    prefetch_tile(kp_ptr, kp_se, kp_ss, row_table, width, start, oldest, stop, D, PAGE, BN, RING)
    prefetch_tile(vp_ptr, vp_se, vp_ss, row_table, width, start, oldest, stop, DV, PAGE, BN, RING)
    if FP8 is not None:
        prefetch_tile(scales_ptr, scales_se, 0, row_table, width, start, oldest, stop, 1, PAGE, BN, RING)
        prefetch_tile(scales_ptr + K, scales_se, 0, row_table, width, start, oldest, stop, 1, PAGE, BN, RING)


@triton.jit(do_not_specialize=["num_units", "width", "least", "shared_split", "entry_tiles"])
def decode_kernel(
    q_ptr, q_st, q_sh, k_ptr, k_st, k_sh, v_ptr, v_st, v_sh, out_ptr, out_st, out_sh,
    kp_ptr, kp_se, kp_ss, kp_sh, vp_ptr, vp_se, vp_ss, vp_sh, scales_ptr, scales_se,
    cos_ptr, sin_ptr, stride_rope, q_norm_ptr, k_norm_ptr, eps, entry_ptr, offset_ptr,
    table_ptr, table_st, width, begin_ptr, unit_ptr, num_units, entry_tiles, counter_ptr,
    part_ptr, sums_ptr, shared_ptr, shared_sums_ptr, shared_count_ptr, shared_split, sinks_ptr, scale, softcap,
    S: tl.constexpr, K: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, RING: tl.constexpr, OWN: tl.constexpr,
    FUSED: tl.constexpr, NORM: tl.constexpr, SHARED: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr,
    FP8: tl.constexpr, TO: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr, FP8_MAX: tl.constexpr,
    STATIC: tl.constexpr, PAGE_P: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """One slice of one head.

    `begin` [U + 1] are prefix sums of the units' tiles. `unit` [U, 4] are a unit's token, table slot (-1: padding), first key in
    pages, and the key after the last. A unit's first `entry_tiles` tiles have no keys. They stand for the time that beginning a
    unit takes, so that a slice of many short rows takes no longer than other slices. No slice is shorter than a tile.

    OWN: the token itself is read from the projection, as it may be in no page. FUSED: heads are as the projection made them, and
    the program that has the token stores its key and value. EARLY: the schedule is complete, because the decode kernel of an
    earlier layer fills the device and has waited for the schedule. So the schedule is read, and the first tile is brought into
    the second-level cache, while the predecessor still runs. GROUPED: `counter` [U + S, K] also counts parts that are merged together.
    """
    start_next(PDL)
    wait_turn(PDL and not EARLY)
    head = tl.program_id(0) % K
    piece = tl.program_id(0) // K
    per, tile, left, unit = slice_of(begin_ptr, num_units, piece, S)
    kp_ptr += head * kp_sh
    vp_ptr += head * vp_sh
    scales_ptr += head
    pages = (kp_ptr, kp_se, kp_ss, vp_ptr, vp_se, vp_ss)
    begin, end, token, slot, oldest, stop = unit_of(begin_ptr, unit_ptr, unit, num_units)
    if EARLY:
        if left > 0:
            start = (oldest // BN + tl.maximum(tile - begin - entry_tiles, 0)) * BN
            keys = (table_ptr + tl.cast(slot, tl.int64) * table_st, width, oldest, stop)
            prefetch(pages, scales_ptr, scales_se, keys, start, K, D, DV, PAGE, BN, RING, FP8)
        wait_turn(EARLY)
    while left > 0:
        next_begin, next_end, next_token, next_slot, next_oldest, next_stop = unit_of(
            begin_ptr, unit_ptr, unit + 1, num_units
        )
        run = tl.minimum(left, end - tile)
        skipped = tl.maximum(tile - begin - entry_tiles, 0)
        upto = tl.maximum(tile - begin + run - entry_tiles, 0)
        keys = (table_ptr + tl.cast(slot, tl.int64) * table_st, width, oldest, stop)
        highest, total, acc = _unit_part(
            q_ptr, q_st, q_sh, k_ptr, k_st, k_sh, v_ptr, v_st, v_sh, pages, scales_ptr, scales_se, cos_ptr, sin_ptr, stride_rope,
            q_norm_ptr, k_norm_ptr, eps, entry_ptr, offset_ptr, keys, token, slot, head, tile == begin, tile + run == end,
            skipped, upto, scale, softcap, K, G, M, D, DP, DV, DVP, PAGE, BN, RING, OWN, FUSED, NORM, SOFTCAP, FP8, TO, PDL,
            FP8_MAX, STATIC, PAGE_P,
        )  # fmt: skip
        pieces = (end - 1) // per - begin // per + 1
        done = pieces == 1
        if pieces > 1:
            place = (piece * 2 + (1 if tile == begin else 0)) * K + head
            store_part(part_ptr, sums_ptr, place, highest, total, acc, G, M, DV, DVP)
            done, highest, total, acc = _merge(
                part_ptr, sums_ptr, counter_ptr, unit, num_units, piece, begin // per, pieces, head, highest, total, acc, K, G, M, DV, DVP, GROUPED,
            )  # fmt: skip
        if done:
            g = tl.arange(0, M)
            q_head = head * G + g
            if SHARED:
                highest, total, acc = _with_shared(
                    highest, total, acc, unit, q_head, (g < G) & (slot >= 0), shared_ptr, shared_sums_ptr, shared_count_ptr,
                    shared_split, K * G, DV, DVP,
                )  # fmt: skip
            finish(highest, total, acc, token, q_head, g < G, out_ptr, out_st, out_sh, sinks_ptr, DV, DVP, SINKS)
        tile += run
        left -= run
        unit += 1
        begin, end, token, slot = next_begin, next_end, next_token, next_slot
        oldest, stop = next_oldest, next_stop
