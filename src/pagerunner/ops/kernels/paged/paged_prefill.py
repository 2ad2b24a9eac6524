"""Prefill attention: rows with several new tokens. The past is read from pages, the new tokens from the projection.

Program (block, head) takes a block of one row's queries, with the query heads of one key/value head packed into the
tile, so that keys and values are read once for all of them. Which row a block belongs to follows from prefix sums on
the device. Blocks with most keys come first.

In a step of few blocks, most of the device would be idle. Example: 16 tokens over 8,192 keys are one block for each head of keys. So a
block's keys are divided: program (part, head) takes some of the tiles, and `kernels.paged_parts` merges the parts.

Scores are in units of log2. Shape letters: see `paged_decode`; M rows of a
tile, N keys of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagerunner.ops.kernels.paged.paged_parts import over_sinks, part_of_row, store_part
from pagerunner.ops.kernels.paged.paged_tiles import (
    LOG2E,
    LOWEST,
    attend_fp8,
    halves,
    joined,
    load_tile,
    online,
    online_of,
    softcapped,
    tile_scales,
)


@triton.jit
def _new_tiles(
    q, highest, total, acc, k_ptr, k_st, v_ptr, v_st, k_desc, v_desc, token, column_k, column_v, first, last, num_new, query_M, oldest_M, scale, softcap,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr, REACH: tl.constexpr, SOFTCAP: tl.constexpr, TMA: tl.constexpr, TO: tl.constexpr,
):  # fmt: skip
    """Keys [first, last) of the row's new tokens.

    Without MASKED all of these keys exist, are visible as far as REACH allows, and may be copied in bulk.
    """
    n = tl.arange(0, BN)
    for start in range(first, last, BN):
        at = start + n
        there = at < num_new
        if TMA and not MASKED:
            k = k_desc.load([token + start, column_k])
            v = v_desc.load([token + start, column_v])
        else:
            k = load_tile(k_ptr, tl.cast(start, tl.int64) * k_st + n * k_st, there, D, DP, None, TO)
            v = load_tile(v_ptr, tl.cast(start, tl.int64) * v_st + n * v_st, there, DV, DVP, None, TO)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        factor = scale * LOG2E
        if SOFTCAP:
            scores, factor = softcapped(scores * scale, softcap) * LOG2E, 1.0
        if MASKED or REACH:
            seen = at[None, :] <= query_M[:, None]
            if REACH:
                seen = seen & (at[None, :] >= oldest_M[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        weights, highest, total, shrink = online_of(scores, factor, highest, total)
        acc = tl.dot(weights.to(TO), v, acc * shrink[:, None], input_precision="ieee")
    return highest, total, acc


@triton.jit
def _past_tiles(
    q, highest, total, acc, kp_ptr, kp_se, kp_ss, vp_ptr, vp_se, vp_ss, scales_ptr, scales_se, row_table, width,
    first, last, past, oldest, oldest_M, scale, softcap,
    K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, PAGE: tl.constexpr,
    BN: tl.constexpr, MASKED: tl.constexpr, REACH: tl.constexpr, SOFTCAP: tl.constexpr, FP8: tl.constexpr,
    TO: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Keys [first, last) of the row's past. Without MASKED and REACH all of these keys are visible."""
    n = tl.arange(0, BN)
    if FP8 is not None:
        q_even, q_odd = halves(q)
        even, odd = halves(acc)
    for start in range(first, last, BN):
        at = start + n
        there = at < past
        page = at // PAGE
        if REACH:
            there = there & (at >= oldest)
            page = page % width
        entry = tl.load(row_table + page, mask=there, other=0)
        k_offsets, v_offsets = entry * kp_se + at % PAGE * kp_ss, entry * vp_se + at % PAGE * vp_ss
        seen = there[None, :]
        if REACH:
            seen = seen & (at[None, :] >= oldest_M[:, None])
        if FP8 is None:
            k = load_tile(kp_ptr, k_offsets, there, D, DP, FP8, TO)
            v = load_tile(vp_ptr, v_offsets, there, DV, DVP, FP8, TO)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if SOFTCAP:
                scores = softcapped(scores, softcap)
            scores = scores * LOG2E
            if MASKED or REACH:
                scores = tl.where(seen, scores, float("-inf"))
            weights, highest, total, shrink = online(scores, 1.0, highest, total, 1)
            acc = tl.dot(weights.to(TO), v, acc * shrink[:, None], input_precision="ieee")
        else:
            k_scale, exponent, share = tile_scales(
                scales_ptr, scales_se, row_table, width, start, oldest, past, K, PAGE, BN, REACH, ASM
            )
            highest, total, even, odd = attend_fp8(
                q_even, q_odd, highest, total, even, odd, kp_ptr, k_offsets, vp_ptr, v_offsets,
                k_scale, exponent, share, there, seen, scale, softcap, D, DP, DV, DVP, SOFTCAP, FP8, TO, ASM,
            )  # fmt: skip
    if FP8 is not None:
        acc = joined(even, odd)
    return highest, total, acc


@triton.jit
def oldest_keys(past, first, query_M, window, chunk, REACH: tl.constexpr):
    """The oldest position that the block's first query sees, and that every query sees."""
    oldest = 0
    oldest_M = tl.zeros_like(query_M)
    if REACH:
        if chunk > 0:
            oldest = (past + first) // chunk * chunk
            oldest_M = (past + query_M) // chunk * chunk
        else:
            oldest = tl.maximum(past + first - window + 1, 0)
            oldest_M = past + query_M - window + 1
    return oldest, oldest_M


@triton.jit
def _keys_of_part(part, parts, past_from, past_to, new_from, new_to, BN: tl.constexpr):
    """What a part has of its block's keys, the past [past_from, past_to) and the new tokens [new_from, new_to).

    All parts but the last ones have equally many tiles. Either stretch may be empty.
    """
    past_keys = tl.maximum(tl.cdiv(past_to - past_from, BN), 0) * BN
    each = tl.cdiv(past_keys + tl.cdiv(new_to - new_from, BN) * BN, parts * BN) * BN
    first = part * each
    of_new = new_from - past_keys + first
    return (
        past_from + first,
        tl.minimum(past_from + first + each, past_to),
        tl.maximum(of_new, new_from),
        tl.minimum(of_new + each, new_to),
    )


@triton.jit
def row_of(part_ptr, part, num_rows):
    """Whose part this is, of prefix sums [R + 1] of the rows' parts."""
    row = 0
    for start in range(0, num_rows, 256):
        i = start + tl.arange(0, 256)
        ends = tl.load(part_ptr + 1 + i, mask=i < num_rows, other=0x7FFFFFFF)
        row += tl.sum((ends <= part).to(tl.int32), 0)
    return row


@triton.jit(do_not_specialize=["num_rows", "width", "window", "chunk"])
def prefill_kernel(
    q_ptr, q_st, q_sh, k_ptr, k_st, k_sh, v_ptr, v_st, v_sh, out_ptr, out_st, out_sh,
    kp_ptr, kp_se, kp_ss, kp_sh, vp_ptr, vp_se, vp_ss, vp_sh, scales_ptr, scales_se,
    k_desc, v_desc, table_ptr, table_st, width, slots_ptr, starts_ptr, lengths_ptr, part_ptr, num_rows,
    values_ptr, sums_ptr, sinks_ptr, scale, softcap, window, chunk,
    K: tl.constexpr, G: tl.constexpr, BM: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr,
    REACH: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr, TMA: tl.constexpr, FP8: tl.constexpr,
    TO: tl.constexpr, PAST: tl.constexpr, DIVIDED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """`part` [R + 1] are prefix sums of the rows' parts. A block has BM // G queries, and one part if keys aren't DIVIDED. `values` and
    `sums`: see `merge_kernel`. Products are of dtype TO, with pages of dtype PAST.
    """
    BT: tl.constexpr = BM // G
    head = tl.program_id(0) % K
    index = tl.load(part_ptr + num_rows) - 1 - tl.program_id(0) // K
    if index >= 0:
        row = row_of(part_ptr, index, num_rows)
        token = tl.load(starts_ptr + row)
        num_new = tl.load(starts_ptr + row + 1) - token
        first_part, parts = part_of_row(part_ptr, row, num_new, BT)
        first = (index - first_part) // parts * BT
        past = tl.load(lengths_ptr + row) - num_new
        slot = tl.load(slots_ptr + row).to(tl.int64)

        m, d = tl.arange(0, BM), tl.arange(0, DP)
        query_M = first + m // G
        q_head = head * G + m % G
        there = (query_M < num_new) & (m < BT * G)
        token_M = (token + query_M).to(tl.int64)
        q_at = q_ptr + (token_M * q_st + q_head * q_sh)[:, None] + d[None, :]
        q = tl.load(q_at, mask=there[:, None] & (d < D)[None, :], other=0.0).to(TO)
        oldest, oldest_M = oldest_keys(past, first, query_M, window, chunk, REACH)
        highest, total = tl.full([BM], LOWEST, tl.float32), tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, DVP], tl.float32)

        q_past = q.to(PAST)
        row_table = table_ptr + slot * table_st
        kp_at, vp_at = kp_ptr + head * kp_sh, vp_ptr + head * vp_sh
        scales_ptr += head
        whole = past // BN * BN
        begin = tl.maximum(oldest - past, 0) // BN * BN
        past_from, past_to, new_from, new_to = oldest // BN * BN, past, begin, tl.minimum(first + BT, num_new)
        if DIVIDED:
            part = (index - first_part) % parts
            past_from, past_to, new_from, new_to = _keys_of_part(part, parts, past_from, past_to, new_from, new_to, BN)
        highest, total, acc = _past_tiles(
            q_past, highest, total, acc, kp_at, kp_se, kp_ss, vp_at, vp_se, vp_ss, scales_ptr, scales_se, row_table, width,
            past_from, tl.minimum(whole, past_to), past, oldest, oldest_M, scale, softcap,
            K, D, DP, DV, DVP, PAGE, BN, False, REACH, SOFTCAP, FP8, PAST, ASM,
        )  # fmt: skip
        if (past_from <= whole) & (whole < past_to) & (oldest < past):
            highest, total, acc = _past_tiles(
                q_past, highest, total, acc, kp_at, kp_se, kp_ss, vp_at, vp_se, vp_ss, scales_ptr, scales_se, row_table,
                width, whole, past, past, oldest, oldest_M, scale, softcap,
                K, D, DP, DV, DVP, PAGE, BN, True, REACH, SOFTCAP, FP8, PAST, ASM,
            )  # fmt: skip

        k_at = k_ptr + tl.cast(token, tl.int64) * k_st + head * k_sh
        v_at = v_ptr + tl.cast(token, tl.int64) * v_st + head * v_sh
        diagonal = tl.maximum(first // BN * BN, begin)
        highest, total, acc = _new_tiles(
            q, highest, total, acc, k_at, k_st, v_at, v_st, k_desc, v_desc, token, head * D, head * DV, new_from, tl.minimum(diagonal, new_to),
            num_new, query_M, oldest_M - past, scale, softcap,
            D, DP, DV, DVP, BN, False, REACH, SOFTCAP, TMA, TO,
        )  # fmt: skip
        highest, total, acc = _new_tiles(
            q, highest, total, acc, k_at, k_st, v_at, v_st, k_desc, v_desc, token, head * D, head * DV, tl.maximum(diagonal, new_from),
            new_to, num_new, query_M, oldest_M - past, scale, softcap,
            D, DP, DV, DVP, BN, True, REACH, SOFTCAP, TMA, TO,
        )  # fmt: skip

        if DIVIDED and parts > 1:
            place_M = (index * K + head) * BM + m
            store_part(values_ptr, sums_ptr, place_M, highest, total, acc, there, DV, DVP)
        else:
            acc *= over_sinks(highest, total, sinks_ptr, q_head, there, SINKS)[:, None]
            dv = tl.arange(0, DVP)
            out_at = out_ptr + (token_M * out_st + q_head * out_sh)[:, None] + dv[None, :]
            tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=there[:, None] & (dv < DV)[None, :])
