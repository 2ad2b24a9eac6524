"""Attention of tokens in the latent space, and its way back to values. Twin: `ops.latent_attention.latent_values`.

All heads share a token's vector. So a block of heads takes part in one matrix product, and the tile of vectors that a program
holds serves both products.

All (query, key tile) pairs of a step, in order, are cut into slices of about equal length, one for each program. So one row of
40,000 tokens and 256 rows of different lengths keep the device equally busy, and the grid suits every step of a graph. A cut close
to the border of two queries moves to that border. A query that lies in one slice is finished by it; of other queries each slice
leaves a part. The kernel that carries results back to values merges the parts first.

Such a query is a unit: a token with all its heads. In a strided batch (`StepRows.stride`) a unit is a row: all heads of all its tokens are the
queries that take part in a product, so a row's vectors are read once for all of its tokens, or for as many as a tile has queries. A token
sees the vectors up to its own. Example: 16 heads and 4 tokens are a tile of 64 queries.

Scores are in units of log2. Shape letters: see the twin; S slices, BN keys of a tile, U units, Q queries of a unit.
"""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pagerunner.batch import StepRows
from pagerunner.ops.kernels.latent import latent_wide
from pagerunner.ops.kernels.latent.latent_slices import Partial, Schedule, Tiles
from pagerunner.ops.kernels.latent.latent_store import page_arguments, page_sizes, scale_stride
from pagerunner.ops.kernels.launch import blocks, dependent, multiprocessors, padded, start_next, wait_turn
from pagerunner.ops.kernels.paged.paged_tiles import prefetch_tile, tile_scales
from pagerunner.ops.sparse_latents import Latents

LOWEST = tl.constexpr(-1.0e30)  # a score that nothing reaches: finite, so that its differences are finite
ALL = 0x7FFFFFFF  # more keys than a unit has
SNAP = 2  # tiles by which a cut may move to a border
BLOCK = 256  # tokens that the schedule looks at together, at most; and pairs of a token and a slice
PAIRS = 8192
FEW_TOKENS = 16  # fewer don't occupy the device, and time is a chain of latencies
EARLY_TOKENS = 160  # up to which it pays to read the schedule before the wait
MOST_PARTS = 64  # of one query, because each costs as much to merge as a third of a tile to compute


@triton.jit(do_not_specialize=["num_units", "slices", "most_keys"])
def _schedule_kernel(
    row_ptr, slots_ptr, position_ptr, lengths_ptr, unit_ptr, part_ptr, slice_ptr, num_units, slices, most_keys,
    BN: tl.constexpr, LEAST: tl.constexpr, SNAP: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, BS: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    """One program. A slice has at least LEAST tiles, before its ends move. A unit has at most `most_keys`. EXTRA: so many tiles that aren't there lie before a unit's, as it takes as long to begin with it.

    `unit` [U + 1, 4]: a unit's first tile, its number of keys (0: padding), and its slot. `slice` [S + 1, 2]: a slice's first tile,
    and the unit that it belongs to. `part` [U, 2]: the first slice with tiles of the unit, and how many there are.
    """
    tiles = 0
    for start in range(0, num_units, BLOCK):
        unit = start + tl.arange(0, BLOCK)
        there = unit < num_units
        row = tl.load(row_ptr + unit * STRIDE, mask=there, other=-1)
        if STRIDE > 1:
            length = tl.load(lengths_ptr + row, mask=row >= 0, other=0)
        else:
            length = tl.load(position_ptr + unit, mask=row >= 0, other=-1).to(tl.int32) + 1
        length = tl.minimum(length, most_keys)
        count = tl.cdiv(length, BN)
        both = count + tl.where(count > 0, EXTRA, 0)
        tl.store(unit_ptr + unit * 4, tiles + tl.cumsum(both, 0) - count, mask=there)
        tl.store(unit_ptr + unit * 4 + 1, length, mask=there)
        tl.store(unit_ptr + unit * 4 + 2, tl.load(slots_ptr + row, mask=row >= 0, other=0), mask=there)
        tiles += tl.sum(both, 0)
    tl.store(unit_ptr + num_units * 4, tiles)
    per = tl.maximum(tl.cdiv(tiles, slices), LEAST)
    most = tl.minimum(SNAP, per // 2)
    tl.debug_barrier()  # units are read back below
    for start in range(0, num_units, BLOCK):
        unit = start + tl.arange(0, BLOCK)
        there = unit < num_units
        begin = tl.load(unit_ptr + unit * 4, mask=there, other=0)
        end = begin + tl.cdiv(tl.load(unit_ptr + unit * 4 + 1, mask=there, other=0), BN)
        first_cut = tl.cdiv(begin + most + 1, per)  # the first that is inside the unit
        cuts = tl.maximum((end - most - 1) // per - first_cut + 1, 0)
        # where no cut is inside, the slice is one of those that begin by the unit's middle; nobody asks which
        tl.store(part_ptr + unit * 2, first_cut - 1, mask=there)
        tl.store(part_ptr + unit * 2 + 1, tl.where(end > begin, cuts + 1, 0), mask=there)
    for start in range(0, slices + 1, BS):
        at = start + tl.arange(0, BS)
        cut = tl.minimum(at * per, tiles)
        unit = tl.zeros((BS,), tl.int32)
        for first in range(0, num_units, BLOCK):
            other = first + tl.arange(0, BLOCK)
            ends = tl.load(unit_ptr + other * 4 + 4, mask=other < num_units, other=0x7FFFFFFF)
            unit += tl.sum((ends[None, :] <= cut[:, None]).to(tl.int32), 1)
        inside = unit < num_units
        begin = tl.load(unit_ptr + unit * 4, mask=inside, other=0)
        end = begin + tl.cdiv(tl.load(unit_ptr + unit * 4 + 1, mask=inside, other=0), BN)
        to_end = inside & (cut - begin > most) & (end - cut <= most)
        moved = tl.where(inside & (cut - begin <= most), begin, tl.where(to_end, end, cut))
        tl.store(slice_ptr + at * 2, moved, mask=at <= slices)
        tl.store(slice_ptr + at * 2 + 1, unit + to_end.to(tl.int32), mask=at <= slices)


@triton.jit
def _numbers(codes, dtype: tl.constexpr, FP8: tl.constexpr, COMPILED: tl.constexpr):
    """fp8 codes [BN, X] as numbers of `dtype`. The words of PTX are those of `kernels/codes.py`.

    They are declared to have an effect. Otherwise the compiler converts every code in each warp that needs it.
    """
    if COMPILED and FP8 == tl.float8e4nv and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 p, q, a, b, m; mov.b32 m, 0x7b807b80;
            prmt.b32 p, 0, $2, 0x5140; prmt.b32 q, 0, $2, 0x7362;
            and.b32 a, p, 0x80008000; shr.u32 b, p, 4; lop3.b32 a, b, 0x07F007F0, a, 0xEA; mul.rn.bf16x2 $0, a, m;
            and.b32 a, q, 0x80008000; shr.u32 b, q, 4; lop3.b32 a, b, 0x07F007F0, a, 0xEA; mul.rn.bf16x2 $1, a, m; }""",
            "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=False, pack=4,
        )  # fmt: skip
    else:
        return codes.to(FP8, bitcast=True).to(dtype)


@triton.jit
def _entries(row_table, key, length, PAGE: tl.constexpr, FEW: tl.constexpr):
    """Pages of keys; any page beyond `length`. FEW: without masks, so that the loads are on their way together."""
    if FEW:
        entry = tl.load(row_table + tl.minimum(key, tl.maximum(length - 1, 0)) // PAGE)
    else:
        entry = tl.load(row_table + key // PAGE, mask=key < length, other=0)
    return entry


@triton.jit
def _tiles(
    q_low, q_high, q_rope, pages, scales, row_table, entry, first, last, length, length_Q, scale, page_stride, slot_stride, scale_stride,
    PAGE: tl.constexpr, C: tl.constexpr, P: tl.constexpr, HC: tl.constexpr, BP: tl.constexpr, BH: tl.constexpr,
    BN: tl.constexpr, FP8: tl.constexpr, PRECISION: tl.constexpr, COMPILED: tl.constexpr, FEW: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """Keys [first, last) of one unit, of which those below `length` exist, and each query sees those below its `length_Q`: log-sum-exp [BH]
    and both halves [BH, HC] of weighted latents. `entry` [BN] are the first tile's pages. A query that sees no key has a log-sum-exp that
    nothing else is below, and some weighted latents.

    FEW: few programs have work, so a tile's time is its longest chain of instructions. A tile's scores are three sums then, which don't
    wait for each other. Each is scaled by itself, because the compiler makes one sum of products that are only added. With many rows the
    device is busy with other programs meanwhile, and one sum of 36 steps has fewer instructions.
    """
    n, c, p = tl.arange(0, BN), tl.arange(0, HC), tl.arange(0, BP)
    most = tl.full((BH,), LOWEST, dtype=tl.float32)
    total = tl.zeros((BH,), dtype=tl.float32)
    low = tl.zeros((BH, HC), dtype=tl.float32)
    high = tl.zeros((BH, HC), dtype=tl.float32)
    for at in range(first, last, BN):
        key = at + n
        live = key < length
        base = pages + (entry * page_stride + (key % PAGE) * slot_stride)[:, None]
        # a tile's entries are on their way while the tile before is computed
        entry = _entries(row_table, key + BN, length, PAGE, FEW)
        k_low = tl.load(base + c[None, :], mask=live[:, None] & (c < C)[None, :], other=0)
        k_high = tl.load(base + HC + c[None, :], mask=live[:, None] & (HC + c < C)[None, :], other=0)
        k_rope = tl.load(base + C + p[None, :], mask=live[:, None] & (p < P)[None, :], other=0)
        factor = scale
        if FP8 is None:
            k_low, k_high, k_rope = k_low.to(q_low.dtype), k_high.to(q_low.dtype), k_rope.to(q_low.dtype)
        else:  # a key's weight then has the scale of the vector as a value
            k_low, k_high = _numbers(k_low, q_low.dtype, FP8, COMPILED), _numbers(k_high, q_low.dtype, FP8, COMPILED)
            k_rope = _numbers(k_rope, q_low.dtype, FP8, COMPILED)
            k_scale, exponent, share = tile_scales(
                scales, scale_stride, row_table, 0, at, 0, length, 0, PAGE, BN, False, COMPILED
            )
            factor = (k_scale * scale)[None, :]
        if FEW:
            scores = tl.dot(q_low, tl.trans(k_low), input_precision=PRECISION) * factor
            scores += tl.dot(q_high, tl.trans(k_high), input_precision=PRECISION) * factor
            scores += tl.dot(q_rope, tl.trans(k_rope), input_precision=PRECISION) * factor
        else:
            scores = tl.dot(q_low, tl.trans(k_low), input_precision=PRECISION)
            scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision=PRECISION)
            scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision=PRECISION) * factor
        if FP8 is not None:
            scores += exponent[None, :]
        seen = live[None, :]
        if STRIDE > 1:
            seen = key[None, :] < length_Q[:, None]
        scores = tl.where(seen, scores, LOWEST)
        larger = tl.maximum(most, tl.max(scores, 1))
        shrink = tl.exp2(most - larger)
        weights = tl.exp2(scores - larger[:, None])
        if FP8 is None:
            total = total * shrink + tl.sum(weights, 1)
        else:
            total = total * shrink + tl.sum(weights * share[None, :], 1)
        weights = weights.to(k_low.dtype)
        low = tl.dot(weights, k_low, low * shrink[:, None], input_precision=PRECISION)
        high = tl.dot(weights, k_high, high * shrink[:, None], input_precision=PRECISION)
        most = larger
    return most + tl.log2(total), low / total[:, None], high / total[:, None]


@triton.jit
def _tokens_of(unit, queries, there, length, num_heads, row_ptr, position_ptr, STRIDE: tl.constexpr):
    """The tokens of a unit's queries, and how many keys each sees; tokens that aren't there see none."""
    if STRIDE > 1:
        token = unit * STRIDE + queries // num_heads
        there = there & (tl.load(row_ptr + token, mask=there, other=-1) >= 0)
        sees = tl.load(position_ptr + token, mask=there, other=-1).to(tl.int32) + 1
    else:
        token, sees = unit, length
    return token.to(tl.int64), sees


@triton.jit
def _slices_kernel(
    q_latent, q_rope, pages, scales, whole, parts, found, unit_ptr, slice_ptr, row_ptr, position_ptr, table,
    num_heads, scale, qc_token, qc_head, qp_token, qp_head, page_stride, slot_stride, scale_stride, table_stride,
    whole_token, whole_head,
    PAGE: tl.constexpr, C: tl.constexpr, P: tl.constexpr, HC: tl.constexpr, BP: tl.constexpr, BH: tl.constexpr,
    BN: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr, PRECISION: tl.constexpr, COMPILED: tl.constexpr,
    FEW: tl.constexpr, STRIDE: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One slice of BH of a unit's queries: heads, of one token after another. HC: half of the latents' elements, padded.

    `parts` [S, 2, Q, C] float32 and `found` [S, 2, Q] are what the slice leaves of the unit that began before it, and of
    the unit that goes on after it. `whole` are units that lie in one slice. Each is normalised.

    EARLY: an earlier layer of the step ran this kernel on the same schedule. It let no successor start before it had waited itself.
    So the schedule and the page table can be read while the predecessor still runs, and vectors are asked for from memory.
    """
    wait_turn(PDL and not EARLY)
    start_next(PDL and not EARLY)
    piece = tl.program_id(0)
    queries = tl.program_id(1) * BH + tl.arange(0, BH)
    in_h = queries < num_heads * STRIDE
    heads = queries
    if STRIDE > 1:
        heads = queries % num_heads
    n, c, p = tl.arange(0, BN), tl.arange(0, HC), tl.arange(0, BP)
    in_low, in_high = in_h[:, None] & (c < C)[None, :], in_h[:, None] & (HC + c < C)[None, :]
    in_rope = in_h[:, None] & (p < P)[None, :]
    tile = tl.load(slice_ptr + piece * 2)
    unit = tl.load(slice_ptr + piece * 2 + 1)
    stop = tl.load(slice_ptr + piece * 2 + 2)
    waiting = EARLY
    while tile < stop:
        first_tile = tl.load(unit_ptr + unit * 4)
        length = tl.load(unit_ptr + unit * 4 + 1)
        slot = tl.load(unit_ptr + unit * 4 + 2).to(tl.int64)
        end = first_tile + tl.cdiv(length, BN)
        upto = tl.minimum(stop, end)
        if upto > tile:
            row_table = table + slot * table_stride
            first = (tile - first_tile) * BN
            entry = _entries(row_table, first + n, length, PAGE, FEW)
            if EARLY and COMPILED and FEW:
                if waiting:
                    prefetch_tile(
                        pages, page_stride, slot_stride, row_table, 1, first, 0, length, C + P, PAGE, BN, False
                    )
            if EARLY:
                if waiting:
                    wait_turn(EARLY)
                    start_next(EARLY)
                waiting = False
            token, length_Q = _tokens_of(unit, queries, in_h, length, num_heads, row_ptr, position_ptr, STRIDE)
            latent_at = q_latent + (token * qc_token + heads.to(tl.int64) * qc_head)[:, None] + c[None, :]
            rope_at = q_rope + (token * qp_token + heads * qp_head)[:, None] + p[None, :]
            q_low = tl.load(latent_at, mask=in_low, other=0.0)
            q_high = tl.load(latent_at + HC, mask=in_high, other=0.0)
            q_turned = tl.load(rope_at, mask=in_rope, other=0.0)
            lse, low, high = _tiles(
                q_low, q_high, q_turned, pages, scales, row_table, entry, first, (upto - first_tile) * BN, length, length_Q, scale,
                page_stride, slot_stride, scale_stride, PAGE, C, P, HC, BP, BH, BN, FP8, PRECISION, COMPILED, FEW,
                STRIDE,
            )  # fmt: skip
            if (tile == first_tile) & (upto == end):
                whole_at = whole + (token * whole_token + heads.to(tl.int64) * whole_head)[:, None] + c[None, :]
                tl.store(whole_at, low.to(whole.dtype.element_ty), mask=in_low)
                tl.store(whole_at + HC, high.to(whole.dtype.element_ty), mask=in_high)
            else:
                place = (piece * 2 + (tile == first_tile)).to(tl.int64) * num_heads * STRIDE + queries
                part_at = parts + place[:, None] * C + c[None, :]
                tl.store(part_at, low, mask=in_low)
                tl.store(part_at + HC, high, mask=in_high)
                tl.store(found + place, lse, mask=in_h)
            tile = upto
        unit += 1


@triton.jit
def _place_of_part(first, piece, queries, query):
    """Where tokens' parts are, [BT, X]: those of their slices `first` [BT] + `piece` [X]. A slice leaves `queries`, of which one is meant."""
    return ((first[:, None] + piece[None, :]) * 2 + (piece == 0)[None, :]).to(tl.int64) * queries + query


@triton.jit
def _shares(found, first, several, query, queries, BT: tl.constexpr, BS: tl.constexpr):
    """The highest of each token's `several` parts, and what parts count relative to it: then no round of the merge waits for the one before."""
    highest, total = tl.full((BT,), LOWEST, tl.float32), tl.zeros((BT,), tl.float32)
    for start in range(0, tl.max(several, 0), BS):
        piece = start + tl.arange(0, BS)
        live = piece[None, :] < several[:, None]
        lse = tl.load(found + _place_of_part(first, piece, queries, query), mask=live, other=LOWEST)
        larger = tl.maximum(highest, tl.max(lse, 1))
        total = total * tl.exp2(highest - larger) + tl.sum(tl.where(live, tl.exp2(lse - larger[:, None]), 0.0), 1)
        highest = larger
    return highest, 1.0 / tl.where(several > 0, total, 1.0)


@triton.jit
def _merged(x, parts, found, first, several, query, queries, c, highest, share, C: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr):  # fmt: skip
    """`x` [BT, X] of elements `c` where a token has none of `several` parts, else its parts merged, BS at a time. Blocks of 16 tokens have `_shares`."""
    total = tl.zeros((BT,), tl.float32)
    for start in range(0, tl.max(several, 0), BS):
        piece = start + tl.arange(0, BS)
        live = piece[None, :] < several[:, None]
        place = _place_of_part(first, piece, queries, query)
        lse = tl.load(found + place, mask=live, other=LOWEST)
        at = parts + place[:, :, None] * C + c[None, None, :]
        some = tl.load(at, mask=live[:, :, None] & (c < C)[None, None, :], other=0.0)
        if BT >= 16:
            weights = tl.where(live, tl.exp2(lse - highest[:, None]) * share[:, None], 0.0)
            x += tl.sum(some * weights[:, :, None], 1)
        else:
            larger = tl.maximum(highest, tl.max(lse, 1))
            weights = tl.where(live, tl.exp2(lse - larger[:, None]), 0.0)
            shrink = tl.exp2(highest - larger)
            x = tl.where((several > 0)[:, None], x * shrink[:, None] + tl.sum(some * weights[:, :, None], 1), x)
            total = total * shrink + tl.sum(weights, 1)
            highest = larger
    if BT < 16:
        x = x / tl.where(several > 0, total, 1.0)[:, None]
    return x


@triton.jit(do_not_specialize=["num_tokens"])
def _values_kernel(
    whole, parts, found, part_ptr, row_ptr, up, out, num_tokens, num_heads, whole_token, whole_head, up_head, out_token, out_head,
    C: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
    TOKENS: tl.constexpr, STRIDE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BV value elements of one head of TOKENS tokens, in a block of BT: their slices' parts, merged BS at a time, times the
    up-projection. Latents are multiplied whole, or (BC < C) BC elements at a time, so that the next ones' copies are on their way.
    """
    start_next(PDL)
    v, head = tl.program_id(0) * BV + tl.arange(0, BV), tl.program_id(1)
    tokens = tl.program_id(2) * TOKENS + tl.arange(0, BT)
    there = (tokens < num_tokens) & (tl.arange(0, BT) < TOKENS)
    c = tl.arange(0, BC)
    up_at = up + head.to(tl.int64) * up_head + v[:, None] * C + c[None, :]
    if BC >= C:
        weight = tl.load(up_at, mask=(v < V)[:, None] & (c < C)[None, :], other=0.0)
    # the schedule is complete: the kernel before has waited for it before it let this one start
    query, units = head, tokens
    if STRIDE > 1:
        units = tokens // STRIDE
        query = (tokens % STRIDE * num_heads + head)[:, None]
    first = tl.load(part_ptr + units * 2, mask=there, other=0)
    count = tl.load(part_ptr + units * 2 + 1, mask=there, other=0)
    if STRIDE > 1:
        count = tl.where(tl.load(row_ptr + tokens, mask=there, other=-1) >= 0, count, 0)
    wait_turn(PDL)
    at = whole + (tokens.to(tl.int64) * whole_token + head.to(tl.int64) * whole_head)[:, None] + c[None, :]
    several, queries = tl.where(count > 1, count, 0), num_heads * STRIDE
    highest, share = tl.full((BT,), LOWEST, tl.float32), tl.full((BT,), 1.0, tl.float32)
    if BT >= 16:
        highest, share = _shares(found, first, several, query, queries, BT, BS)
    if BC < C:
        product = tl.zeros((BV, BT), tl.float32)
        for begin in range(0, C, BC):
            inside = begin + c < C
            weight = tl.load(up_at + begin, mask=(v < V)[:, None] & inside[None, :], other=0.0)
            x = tl.load(at + begin, mask=(count == 1)[:, None] & inside[None, :], other=0.0)
            if tl.max(several, 0) > 0:
                x = _merged(x.to(tl.float32), parts, found, first, several, query, queries, begin + c, highest, share, C, BT, BS).to(weight.dtype)  # fmt: skip
            product = tl.dot(
                weight, tl.trans(x), product, input_precision=PRECISION
            )  # a first operand in registers would be overwritten too early
        y = tl.trans(product)
    else:
        x = tl.load(at, mask=(count == 1)[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)
        x = _merged(x, parts, found, first, several, query, queries, c, highest, share, C, BT, BS).to(whole.dtype.element_ty)  # fmt: skip
        if BT < 16:
            y = tl.sum(x.to(tl.float32)[:, None, :] * weight.to(tl.float32)[None, :, :], 2)
        else:
            y = tl.dot(x, tl.trans(weight), input_precision=PRECISION)
    target = out + tokens.to(tl.int64)[:, None] * out_token + head.to(tl.int64) * out_head + v[None, :]
    tl.store(target, y.to(out.dtype.element_ty), mask=there[:, None] & (v < V)[None, :])


class ValuesConfig(NamedTuple):
    """Value elements and tokens of a program, parts that it merges at a time, its warps, elements of latents at a time (0: all), and stages."""

    values: int
    tokens: int
    parts: int
    warps: int
    latents: int = 0
    stages: int = 3


def decode_tiles(heads: int, tokens: int, exact: bool, fp8: bool = False) -> Tiles:
    """By measurement (docs/performance/latents.md), for units of so many queries. Parts of one or two tokens are merged faster than a second tile is computed.

    `fp8` pages take two stages more, as a key's scale is found by its page's entry. They convert a tile of few rows in more warps.
    """
    least = 1 if tokens <= 2 else 2
    if exact:
        return Tiles(16, 32, 8, 1, 1, least)
    block = min(64, max(16, padded(heads)))
    if block == 16:
        if not fp8:
            return Tiles(16, 32, 4, 3, 2, least)
        return Tiles(16, 32, 8, 5, 1, least) if tokens <= 16 else Tiles(16, 32, 4, 5, 2, least)
    return Tiles(block, 32, 8, 3, 1, least)


def values_config(tokens: int, heads: int) -> ValuesConfig:
    """By measurement (docs/performance/latents.md). Few tokens are divided so that there is about one program a multiprocessor."""
    if tokens <= 8:
        return ValuesConfig(16, 1, 16 if tokens <= 2 else 8, 4)
    if tokens <= 32:
        divided = (each for each in (4, 8) if 2 * heads * blocks(tokens, each) <= 132)
        return ValuesConfig(64, next(divided, 16), 2, 8)
    if heads >= 128 and tokens >= 64:
        return ValuesConfig(128, 32, 1, 4, 64, 4) if tokens <= 96 else ValuesConfig(128, 64, 1, 8, 64, 4)
    return ValuesConfig(128, 16 if tokens <= 96 else 32, 1, 8)


def run_schedule(
    rows: StepRows, slices: int, tiles: Tiles, *, stride: int = 0, most: int = ALL, extra: int = 0
) -> Schedule:
    """Divide the step's units, of `stride` tokens if it isn't 0. Units have at most so many keys, and a unit counts as `extra` more tiles than it has."""
    stride = stride or max(rows.stride, 1)
    units = rows.num_tokens // stride
    block = min(BLOCK, max(16, padded(units)))
    sizes = [4 * (units + 1), -(-2 * units // 4) * 4, 2 * (slices + 1)]
    schedule = Schedule(*torch.empty(sum(sizes), dtype=torch.int32, device=rows.row_T.device).split(sizes))
    _schedule_kernel[(1,)](
        rows.row_T, rows.slots_R, rows.positions_T, rows.seq_lens_R, *schedule, units, slices, most,
        BN=tiles.keys, LEAST=tiles.least, SNAP=SNAP, STRIDE=stride, BLOCK=block, BS=min(256, PAIRS // block), EXTRA=extra, num_warps=4,
    )  # fmt: skip
    return schedule


def run_slices(
    q_THC: torch.Tensor,
    q_THP: torch.Tensor,
    pages_EXL: torch.Tensor,
    table_SW: torch.Tensor,
    rows: StepRows,
    scale: float,
    schedule: Schedule,
    tiles: Tiles,
    scales_E: torch.Tensor | None = None,
    *,
    early: bool = False,
) -> Partial:
    """Launch `_slices_kernel`. `early`: another layer has done it with the same schedule."""
    launch = dependent(q_THC.device)
    tokens, heads, latent = q_THC.shape
    device, rope, stride = q_THC.device, q_THP.shape[-1], max(rows.stride, 1)
    queries = heads * stride
    slices = schedule.slice.shape[0] // 2 - 1
    whole_THC = torch.empty(heads, tokens, latent, dtype=q_THC.dtype, device=device).transpose(0, 1)
    parts = torch.empty(slices, 2, queries, latent, dtype=torch.float32, device=device)
    found = torch.empty(slices, 2, queries, dtype=torch.float32, device=device)
    _slices_kernel[(slices, blocks(queries, tiles.heads))](
        q_THC, q_THP, *page_arguments(pages_EXL, scales_E), whole_THC, parts, found, schedule.unit, schedule.slice, rows.row_T,
        rows.positions_T, table_SW,
        heads, scale / math.log(2), *q_THC.stride()[:2], *q_THP.stride()[:2], *pages_EXL.stride()[:2],
        scale_stride(scales_E), table_SW.stride(0), *whole_THC.stride()[:2],
        **page_sizes(pages_EXL), COMPILED=os.environ.get("TRITON_INTERPRET") != "1", C=latent, P=rope, HC=max(16, padded(latent) // 2), BP=max(16, padded(rope)),
        BH=tiles.heads, BN=tiles.keys, PRECISION="tf32x3" if q_THC.dtype == torch.float32 else "tf32",
        FEW=tokens // stride < FEW_TOKENS, STRIDE=stride, num_warps=tiles.warps, num_stages=tiles.stages,
        maxnreg=min(255, 65536 // (32 * tiles.warps * tiles.programs)) // 8 * 8, EARLY=early and launch["PDL"], **launch,
    )  # fmt: skip
    return Partial(whole_THC, parts, found)


def run_values(
    partial: Partial,
    schedule: Schedule,
    rows: StepRows,
    up_HVC: torch.Tensor,
    config: ValuesConfig | None = None,
    *,
    one_by_one: bool = False,
) -> torch.Tensor:
    """Launch `_values_kernel`. `one_by_one`: each token is a unit, in strided batches too."""
    tokens, heads, latent = partial.whole_THC.shape
    value_dim = up_HVC.shape[1]
    config = config or values_config(tokens, heads)
    out_THV = partial.whole_THC.new_empty(tokens, heads, value_dim)
    _values_kernel[(blocks(value_dim, config.values), heads, blocks(tokens, config.tokens))](
        *partial, schedule.part, rows.row_T, up_HVC, out_THV, tokens, heads, *partial.whole_THC.stride()[:2],
        up_HVC.stride(0), *out_THV.stride()[:2],
        C=latent, V=value_dim, BC=config.latents or max(16, padded(latent)), BV=config.values,
        BT=config.tokens if config.tokens <= 2 else max(16, config.tokens), BS=config.parts, TOKENS=config.tokens, STRIDE=1 if one_by_one else max(rows.stride, 1),
        PRECISION="tf32x3" if out_THV.dtype == torch.float32 else "tf32", num_warps=config.warps,
        num_stages=config.stages, **dependent(out_THV.device),
    )  # fmt: skip
    return out_THV


def latent_values(
    q_THC: torch.Tensor,
    q_THP: torch.Tensor,
    pages_EXL: torch.Tensor,
    table_SW: torch.Tensor,
    rows: StepRows,
    scale: float,
    up_HVC: torch.Tensor,
    scratch: dict[Any, Any],
    scales_E: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the twin."""
    stride = max(rows.stride, 1)
    units, queries = q_THC.shape[0] // stride, q_THC.shape[1] * stride
    held = Latents(pages_EXL[..., : q_THC.shape[2]], pages_EXL[..., q_THC.shape[2] :])
    wide = units >= latent_wide.LEAST_UNITS and scales_E is None and latent_wide.serves(q_THC, q_THP, held)
    tiles = decode_tiles(queries, units, q_THC.dtype == torch.float32, scales_E is not None)
    if wide:
        tiles, programs = latent_wide.wide_tiles(queries), latent_wide.slice_count(units, queries, q_THC.device)
    else:
        programs = multiprocessors(q_THC.device) * tiles.programs // blocks(queries, tiles.heads)
    slices = max(1, min(programs, MOST_PARTS * units))
    schedule = scratch.get((slices, tiles))
    early = schedule is not None and units <= EARLY_TOKENS
    if schedule is None:
        schedule = scratch[slices, tiles] = run_schedule(rows, slices, tiles)
    if wide:
        partial = latent_wide.run_wide(q_THC, q_THP, held, table_SW, rows, scale, schedule, stride)
    else:
        partial = run_slices(q_THC, q_THP, pages_EXL, table_SW, rows, scale, schedule, tiles, scales_E, early=early)
    return run_values(partial, schedule, rows, up_HVC)
