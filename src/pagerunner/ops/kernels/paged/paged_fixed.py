"""Attention in which nothing but a token's position decides the order of its sums: one kernel for prompts and for decode.

Keys are taken in pieces of `PIECE` at absolute positions, a piece in tiles of keys. A piece has a softmax of its own, and pieces are merged from the
first to the last, by the program that computes them all or by `_merge_kernel`. So how many programs share a query's pieces changes nothing. A key
that a query doesn't see changes neither sums nor maxima, so neither do the other queries of a tile. Matrix units make all sums, those of weights
too, and sum up in one order whatever a tile's rows, warps and instructions are. So decode has small tiles and prompts have large ones.

Shape letters: see `paged_prefill`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from pagerunner.batch import KVPages, StepRows
from pagerunner.ops.kernels.launch import blocks, dependent, multiprocessors, padded, start_next_and_wait
from pagerunner.ops.kernels.paged.paged_parts import over_sinks, store_part
from pagerunner.ops.kernels.paged.paged_prefill import oldest_keys, row_of
from pagerunner.ops.kernels.paged.paged_tiles import LOG2E, LOWEST, load_tile, softcapped
from pagerunner.ops.numerics import FIXED
from pagerunner.ops.paged_attention import PagedPlan, Scores


@triton.jit
def _with_piece(highest, total, acc, piece_highest, piece_total, piece_acc):
    """A query's result with the next piece."""
    new = tl.maximum(highest, piece_highest)
    old, own = tl.math.exp2(highest - new), tl.math.exp2(piece_highest - new)
    return new, total * old + piece_total * own, acc * old[:, None] + piece_acc * own[:, None]


@triton.jit
def _tile(
    at, oldest, past, end, k_at, k_st, v_at, v_st, kp_at, kp_se, kp_ss, vp_at, vp_se, vp_ss, row_table, width,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, PAGE: tl.constexpr, REACH: tl.constexpr, TO: tl.constexpr,
):  # fmt: skip
    """Keys and values at positions `at`. All are in pages, or with REACH only those of the past, and the others in k and v."""
    exists, page = at < end, at // PAGE
    if REACH:
        exists = exists & (at >= oldest)
        page = page % width
    held = exists & (at < past) if REACH else exists
    entry = tl.load(row_table + page, mask=held, other=0)
    k = load_tile(kp_at, entry * kp_se + at % PAGE * kp_ss, held, D, DP, None, TO)
    v = load_tile(vp_at, entry * vp_se + at % PAGE * vp_ss, held, DV, DVP, None, TO)
    if REACH:
        fresh, place = exists & (at >= past), (at - past).to(tl.int64)
        k = tl.where(fresh[:, None], load_tile(k_at, place * k_st, fresh, D, DP, None, TO), k)
        v = tl.where(fresh[:, None], load_tile(v_at, place * v_st, fresh, DV, DVP, None, TO), v)
    return k, v


@triton.jit
def _with_tile(products, factor, v, ones, highest, total, acc, TO: tl.constexpr):
    """A piece's result with the next tile. Matrix units sum up the weights, too: their order doesn't depend on a tile's rows or its warps."""
    new = tl.maximum(highest, tl.max(products, 1) * factor)
    weights, shrink = tl.math.exp2(tl.fma(products, factor, -new[:, None])).to(TO), tl.math.exp2(highest - new)
    total = tl.dot(weights, ones, total * shrink[:, None], input_precision="ieee")
    return new, total, tl.dot(weights, v, acc * shrink[:, None], input_precision="ieee")


@triton.jit(do_not_specialize=["num_rows", "width", "window", "chunk", "splits", "most_pieces"])
def fixed_kernel(
    q_ptr, q_st, q_sh, k_ptr, k_st, k_sh, v_ptr, v_st, v_sh, out_ptr, out_st, out_sh,
    kp_ptr, kp_se, kp_ss, kp_sh, vp_ptr, vp_se, vp_ss, vp_sh, table_ptr, table_st, width, slots_ptr, starts_ptr, lengths_ptr, tiles_ptr, num_rows,
    values_ptr, sums_ptr, sinks_ptr, scale, softcap, window, chunk, splits, most_pieces,
    K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, BM: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, PIECE: tl.constexpr,
    ONE: tl.constexpr, REACH: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr, SPLIT: tl.constexpr, TO: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A tile of BM // GP tokens of one row, and a head of keys. `tiles` [R + 1] are prefix sums of the rows' tiles. If rows are of ONE token,
    `tiles` [R] is the order in which they begin: rows with most keys first, so that programs end at about the same time.

    With SPLIT program (tile, head, split) leaves each of its pieces, one of `splits` equal shares, in `values` and `sums`: see `_merge_kernel`.
    """
    BT: tl.constexpr = BM // GP
    start_next_and_wait(PDL)
    head, row = tl.program_id(0) % K, tl.program_id(0) // K
    num_new, first, index = 1, 0, row
    if ONE:
        row = tl.load(tiles_ptr + row).to(tl.int32)
        token = row
    else:
        index = tl.load(tiles_ptr + num_rows) - 1 - row  # later tiles have more keys
        row = row_of(tiles_ptr, index, num_rows)
        token = 0
    if index >= 0:
        if not ONE:
            token = tl.load(starts_ptr + row)
            num_new = tl.load(starts_ptr + row + 1) - token
            first = (index - tl.load(tiles_ptr + row)) * BT
        past = tl.load(lengths_ptr + row) - num_new
        m, n, d, dv = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, DP), tl.arange(0, DVP)
        new_M, q_head = first + m // GP, head * G + m % GP
        query_M, there_M = past + new_M, (new_M < num_new) & (m % GP < G)
        token_M = (token + new_M).to(tl.int64)
        q_at = q_ptr + (token_M * q_st + q_head * q_sh)[:, None] + d[None, :]
        q = tl.load(q_at, mask=there_M[:, None] & (d < D)[None, :], other=0.0).to(TO)
        oldest, oldest_M = oldest_keys(past, first, new_M, window, chunk, REACH)
        row_table = table_ptr + tl.load(slots_ptr + row).to(tl.int64) * table_st
        k_at = k_ptr + tl.cast(token, tl.int64) * k_st + head * k_sh
        v_at = v_ptr + tl.cast(token, tl.int64) * v_st + head * v_sh
        end, ones = past + tl.minimum(first + BT, num_new), tl.full([BN, 16], 1.0, TO)
        factor = LOG2E if SOFTCAP else scale * LOG2E
        lowest, none = tl.full([BM], LOWEST, tl.float32), tl.zeros([BM, DVP], tl.float32)
        highest, total, acc = lowest, tl.zeros([BM], tl.float32), none
        own, own_total, own_acc = lowest, tl.zeros([BM, 16], tl.float32), none  # of the piece
        share = tl.cdiv(tl.cdiv(end, PIECE) - oldest // PIECE, splits) * PIECE
        begin = oldest // PIECE * PIECE + tl.program_id(1) * share
        stop, place_M = tl.minimum(begin + share, end), (token_M * (K * G) + q_head) * most_pieces + begin // PIECE
        for start in range(tl.maximum(begin, oldest // BN * BN), stop, BN):
            at = start + n
            k, v = _tile(
                at, oldest, past, end, k_at, k_st, v_at, v_st, kp_ptr + head * kp_sh, kp_se, kp_ss, vp_ptr + head * vp_sh, vp_se, vp_ss, row_table, width,
                D, DP, DV, DVP, PAGE, REACH, TO,
            )  # fmt: skip
            products = tl.dot(q, tl.trans(k), input_precision="ieee")
            if SOFTCAP:
                products = softcapped(products * scale, softcap)
            if REACH or start + BN > past + first:  # others are seen by all
                seen = at[None, :] <= tl.minimum(query_M, end - 1)[:, None]
                if REACH:
                    seen = seen & (at[None, :] >= oldest_M[:, None])
                products = tl.where(seen, products, float("-inf"))
            if start % PIECE == 0 and start > begin:  # here products of the tile before have ended
                if SPLIT:
                    store_part(values_ptr, sums_ptr, place_M, own, tl.max(own_total, 1), own_acc, there_M, DV, DVP)
                    place_M += 1
                else:
                    highest, total, acc = _with_piece(highest, total, acc, own, tl.max(own_total, 1), own_acc)
                own, own_total, own_acc = lowest, tl.zeros([BM, 16], tl.float32), none
            own, own_total, own_acc = _with_tile(products, factor, v, ones, own, own_total, own_acc, TO)
        if SPLIT:
            store_part(
                values_ptr, sums_ptr, place_M, own, tl.max(own_total, 1), own_acc, there_M & (begin < stop), DV, DVP
            )
        else:
            highest, total, acc = _with_piece(highest, total, acc, own, tl.max(own_total, 1), own_acc)
            acc *= over_sinks(highest, total, sinks_ptr, q_head, there_M, SINKS)[:, None]
            out_at = out_ptr + (token_M * out_st + q_head * out_sh)[:, None] + dv[None, :]
            tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=there_M[:, None] & (dv < DV)[None, :])


@triton.jit(do_not_specialize=["most_pieces"])
def _merge_kernel(
    out_ptr, out_st, out_sh, row_ptr, positions_ptr, values_ptr, sums_ptr, sinks_ptr, most_pieces,
    K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, PIECE: tl.constexpr,
    SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The pieces of one token and one head of keys, of `values` [T, H, pieces, DV] and `sums` [T, H, pieces, 2], from the first to the last."""
    start_next_and_wait(PDL)
    token, head = tl.program_id(0) // K, tl.program_id(0) % K
    g, d = tl.arange(0, GP), tl.arange(0, DVP)
    heads, mask = head * G + g, (g < G)[:, None] & (d < DV)[None, :]
    highest, total, acc = tl.full([GP], LOWEST, tl.float32), tl.zeros([GP], tl.float32), tl.zeros([GP, DVP], tl.float32)
    if tl.load(row_ptr + token) >= 0:
        for piece in range(tl.load(positions_ptr + token).to(tl.int32) // PIECE + 1):
            place = (tl.cast(token, tl.int64) * (K * G) + heads) * most_pieces + piece
            values = tl.load(values_ptr + place[:, None] * DV + d[None, :], mask=mask, other=0.0)
            piece_highest = tl.load(sums_ptr + place * 2, mask=g < G, other=LOWEST)
            piece_total = tl.load(sums_ptr + place * 2 + 1, mask=g < G, other=0.0)
            highest, total, acc = _with_piece(highest, total, acc, piece_highest, piece_total, values)
    acc *= over_sinks(highest, total, sinks_ptr, heads, g < G, SINKS)[:, None]
    at = out_ptr + tl.cast(token, tl.int64) * out_st + heads[:, None] * out_sh + d[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=mask)


class FixedTiles(NamedTuple):
    """How `fixed_kernel` is launched: rows and keys of a tile, warps, stages, and most registers of a thread. A model's shapes alone decide the keys."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int = 255


def fixed_tiles(group_padded: int, row_bytes: int, exact: bool, one_token: int, reach: bool = False) -> FixedTiles:
    """Tiles for heads of keys that so many query heads share, and heads of so many bytes in pages. `one_token`: 0, or so many heads of rows of one token.

    Bits don't depend on rows, warps and stages. Entries of the page table are a pipeline's first stage, so with five stages two tiles are on their way while one
    is multiplied. Two warps are faster once all multiprocessors have several programs.
    """
    if exact:
        return FixedTiles(max(FIXED.exact_rows, group_padded), FIXED.exact_keys, 4, 2)
    if row_bytes > 256:
        return FixedTiles(max(FIXED.query_rows, group_padded), max(FIXED.keys // 2, 16), 8, 2)
    if one_token:
        return FixedTiles(max(16, group_padded), FIXED.keys, 2 if one_token > 1024 else 4, 3 if reach else 5)
    return FixedTiles(max(FIXED.query_rows, group_padded), FIXED.keys, 4, 3)


def _tiles(rows: StepRows, plan: PagedPlan, queries: int) -> torch.Tensor:
    """Prefix sums of the rows' tiles, or the order of rows of one token, computed once a step for all layers that are alike."""
    key = "fixed tiles", queries
    if key not in plan.scratch and plan.one_token:
        plan.scratch[key] = rows.seq_lens_R.argsort(descending=True)
    elif key not in plan.scratch:
        counts_R = (rows.query_start_R1.diff() + (queries - 1)) // queries
        plan.scratch[key] = F.pad(counts_R.cumsum(0, dtype=torch.int32), (1, 0))
    found: torch.Tensor = plan.scratch[key]
    return found


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: KVPages,
    table: torch.Tensor,
    rows: StepRows,
    plan: PagedPlan,
    scores: Scores,
    dot: tl.dtype,
    splits: int = 0,
) -> torch.Tensor:
    """See `ops.paged_attention.paged_attention`; products are of dtype `dot`. `splits`: programs for a tile's pieces, 0 as many as occupy the device.

    Pieces of a divided step have the same room whatever the step is: that of the longest rows of one token, as many as are divided. So the warm-up has
    taken it. More pieces aren't divided: those of 100 tokens at the end of 131,072 would take 850 MB with 32 heads of 128, where the room is 140.
    """
    (tokens, heads, dim), (kv_heads, dim_v) = q.shape, v.shape[1:]
    group, page, reach, device = heads // kv_heads, pages.k.shape[1], bool(plan.window or plan.chunk), q.device
    dims = max(16, padded(dim)), max(16, padded(dim_v))
    group_padded = padded(group)
    row_bytes, one_token = max(dims) * pages.k.itemsize, plan.one_token * tokens * kv_heads
    shape = fixed_tiles(group_padded, row_bytes, dot == tl.float32, one_token, reach)
    queries, num_rows = shape.rows // group_padded, rows.slots_R.shape[0]
    tiles = tokens if plan.one_token else blocks(tokens, queries) + min(num_rows, tokens)
    longest, most = table.shape[1] * page, multiprocessors(device)
    pieces = blocks(min(rows.max_seq_len, longest), FIXED.piece)
    places, room = tokens * heads * pieces, most * group * blocks(longest, FIXED.piece)
    splits = splits or (max(2 * most // max(tiles * kv_heads, 1), 1) if places <= room else 1)
    splits = 1 if reach else min(splits, pieces)
    make = torch.empty if plan.one_token or splits > 1 else torch.zeros  # padding belongs to no row
    out = make(tokens, heads, dim_v, dtype=q.dtype, device=device)
    room = max(room, places) if splits > 1 else 0
    values, sums = torch.empty(room * (dim_v + 2), dtype=torch.float32, device=device).split([room * dim_v, room * 2])
    sinks = out if scores.sinks_H is None else scores.sinks_H
    alike = {
        "K": kv_heads,
        "G": group,
        "GP": group_padded,
        "DV": dim_v,
        "DVP": dims[1],
        "PIECE": FIXED.piece,
        "SINKS": scores.sinks_H is not None,
    }
    alike |= {"enable_fp_fusion": False, **dependent(device)}  # what is fused would differ between the two kernels
    fixed_kernel[(tiles * kv_heads, splits)](
        q, *q.stride()[:2], k, *k.stride()[:2], v, *v.stride()[:2], out, *out.stride()[:2], pages.k, *pages.k.stride()[:3], pages.v, *pages.v.stride()[:3],
        table, table.stride(0), table.shape[1], rows.slots_R, rows.query_start_R1, rows.seq_lens_R, _tiles(rows, plan, queries), num_rows,
        values, sums, sinks, scores.scale, scores.softcap, plan.window, plan.chunk, splits, pieces,
        BM=shape.rows, D=dim, DP=dims[0], PAGE=page, BN=shape.keys, ONE=plan.one_token, REACH=reach, SOFTCAP=bool(scores.softcap), SPLIT=splits > 1,
        TO=dot, num_warps=shape.warps, num_stages=shape.stages, maxnreg=shape.registers, **alike,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(tokens * kv_heads,)](
            out, *out.stride()[:2], rows.row_T, rows.positions_T, values, sums, sinks, pieces, num_warps=4, **alike
        )
    return out
