"""Rows whose keys are divided among programs: each program leaves a part of the result, and the parts are merged.

A part is the highest score of its keys, their total weight, and the values' weighted sum. Parts are merged in the order of their keys,
so a result doesn't depend on which program was first. Scores are in units of log2. Shape letters: see `kernels.paged_decode`; P parts,
M queries of a block times G heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import start_next_and_wait
from pagerunner.ops.kernels.paged.paged_tiles import LOG2E, LOWEST


@triton.jit
def merged(
    part_ptr, sums_ptr, first_G, stride, count, real_G, D: tl.constexpr, DP: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The result of `count` parts: highest scores [GP], total weights [GP], weighted values [GP, DP].

    Head g's first part is at place `first_G[g]`, and its next parts are `stride` places further each. Those of AT_ONCE parts are
    on their way together.
    """
    d, some = tl.arange(0, DP), tl.arange(0, AT_ONCE)
    GP: tl.constexpr = first_G.shape[0]
    highest = tl.full([GP], LOWEST, tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    for start in range(0, count, AT_ONCE):
        # parts are the second dimension, which a thread holds whole: so threads exchange no values
        at = first_G[:, None] + (start + some)[None, :] * stride
        there = (start + some < count)[None, :] & real_G[:, None]
        values = tl.load(
            part_ptr + at[:, :, None] * D + d[None, None, :],
            mask=there[:, :, None] & (d < D)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        scores = tl.load(sums_ptr + at * 2, mask=there, other=LOWEST, cache_modifier=".cg")
        totals = tl.load(sums_ptr + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        new = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.math.exp2(highest - new)
        weights = tl.where(there, tl.math.exp2(scores - new[:, None]), 0.0)
        total = total * shrink + tl.sum(weights * totals, 1)
        acc = acc * shrink[:, None] + tl.sum(values * weights[:, :, None], 1)
        highest = new
    return highest, total, acc


@triton.jit
def over_sinks(highest, total, sinks_ptr, heads, there, SINKS: tl.constexpr):
    """The factor of weighted values: one over the total weight, in which the heads' sinks count."""
    factor = tl.full([heads.shape[0]], 1.0, tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + heads, mask=there, other=0.0).to(tl.float32) * LOG2E
        new = tl.maximum(highest, sink)
        factor = tl.math.exp2(highest - new)
        total = total * factor + tl.math.exp2(sink - new)
    return factor / tl.where(total > 0, total, 1.0)


@triton.jit
def part_of_row(part_ptr, row, num_new, BT: tl.constexpr):
    """Of a row with `num_new` tokens: its first part, and how many parts each of its blocks of BT queries has (0: it has no blocks)."""
    first = tl.load(part_ptr + row)
    return first, (tl.load(part_ptr + row + 1) - first) // tl.maximum(tl.cdiv(num_new, BT), 1)


@triton.jit
def store_part(
    values_ptr, sums_ptr, place_M, highest, total, acc, there_M, D: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    """A part of each of M queries, at its place."""
    d = tl.arange(0, DP)
    tl.store(sums_ptr + place_M * 2, highest, mask=there_M)
    tl.store(sums_ptr + place_M * 2 + 1, total, mask=there_M)
    tl.store(values_ptr + place_M[:, None] * D + d[None, :], acc, mask=there_M[:, None] & (d < D)[None, :])


@triton.jit
def merge_kernel(
    out_ptr, out_st, out_sh, row_ptr, starts_ptr, part_ptr, values_ptr, sums_ptr, sinks_ptr,
    K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, BM: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    SINKS: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Output of one token and one head of keys, if `prefill_kernel` has left it in several parts.

    `part` [R + 1]: prefix sums of rows' parts. `values` [P, K, BM, D] and `sums` [P, K, BM, 2] are the parts.
    """
    BT: tl.constexpr = BM // G
    start_next_and_wait(PDL)
    token, head = tl.program_id(0) // K, tl.program_id(0) % K
    row = tl.load(row_ptr + token)
    if row >= 0:
        begin = tl.load(starts_ptr + row)
        first, parts = part_of_row(part_ptr, row, tl.load(starts_ptr + row + 1) - begin, BT)
        if parts > 1:
            g, d = tl.arange(0, GP), tl.arange(0, DP)
            query = token - begin
            place = ((first + query // BT * parts) * K + head) * BM + query % BT * G + g
            highest, total, acc = merged(values_ptr, sums_ptr, place, K * BM, parts, g < G, D, DP, AT_ONCE)
            heads = head * G + g
            acc *= over_sinks(highest, total, sinks_ptr, heads, g < G, SINKS)[:, None]
            at = out_ptr + tl.cast(token, tl.int64) * out_st + heads[:, None] * out_sh + d[None, :]
            tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(g < G)[:, None] & (d < D)[None, :])
