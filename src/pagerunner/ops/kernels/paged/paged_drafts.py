"""Decode attention over pages for strided batches: a row's last token and its drafts, STRIDE tokens at most.

It is `kernels.paged_decode` with two differences. A unit is a row, so its keys and values are read once for all of its tokens. And all
tokens are in pages already. A row's tokens are cut into blocks of TOKENS, for which a program has registers; usually there is one. The
queries of a block, token after token, are the rows of one or more tiles.

Each token sees its own keys: those up to its position, from where its own window or chunk begins. A tile of keys that only later tokens
see has weight 0 for it, which changes no bit. So a token's result is that of `decode_kernel`, bit for bit, if three things hold: a row of
one token has tiles of as many queries (M), its keys would be cut at the same places, and there is no window. In steps with a window `decode_kernel`
adds the token's own key first.

Scores are in units of log2. Shape letters: see `kernels.paged_decode`; U units are rows here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import start_next, wait_turn
from pagerunner.ops.kernels.paged.paged_decode import finish, merged_parts, prefetch, slice_of, store_part, unit_of
from pagerunner.ops.kernels.paged.paged_tiles import (
    LOG2E,
    LOWEST,
    attend_fp8_few,
    halves,
    joined,
    keys_at,
    load_tile,
    online,
    softcapped,
    tile_scales,
)


@triton.jit
def _queries(row, first, end, G: tl.constexpr, STRIDE: tl.constexpr, M: tl.constexpr, REACH: tl.constexpr):
    """Queries [M] from the row's query `first` on, of those before `end`: the token and the query head of each, the oldest key that it
    sees, and the key after the last. A query that isn't there sees none. `row`: its first token and its slot, where tokens' rows and positions
    are, and what tokens see.
    """
    token, slot, row_ptr, position_ptr, window, chunk = row
    at = first + tl.arange(0, M)
    inside = (at < end) & (at < STRIDE * G)
    token_M = token + at // G
    real = inside & (slot >= 0)
    real = real & (tl.load(row_ptr + token_M, mask=real, other=-1) >= 0)
    position = tl.load(position_ptr + token_M, mask=real, other=0).to(tl.int32)
    oldest = tl.zeros([M], tl.int32)
    if REACH:
        if chunk > 0:
            oldest = position // chunk * chunk
        else:
            oldest = tl.maximum(position - window + 1, 0)
    return token_M, at % G, inside, oldest, tl.where(real, position + 1, 0)


@triton.jit
def _attend(
    q, oldest_M, stop_M, results, pages, keys, first, last, scale, softcap,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr,
    REACH: tl.constexpr, SOFTCAP: tl.constexpr, TO: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Tiles [first, last) of keys, of which [oldest, stop) exist, for TILES tiles of queries: tuples of what `decode_kernel` has."""
    highest, total, acc = results
    kp_ptr, kp_se, kp_ss, vp_ptr, vp_se, vp_ss = pages
    row_table, width, oldest, stop = keys
    for start in range(first, last, BN):
        at, mask, entry, inside = keys_at(row_table, width, start, oldest, stop, PAGE, BN, REACH)
        k = tl.trans(load_tile(kp_ptr, entry * kp_se + inside * kp_ss, mask, D, DP, None, TO))
        v = load_tile(vp_ptr, entry * vp_se + inside * vp_ss, mask, DV, DVP, None, TO)
        new_highest, new_total, new_acc = (), (), ()
        for i in tl.static_range(TILES):
            scores = tl.dot(q[i], k, input_precision="ieee") * scale
            if SOFTCAP:
                scores = softcapped(scores, softcap)
            seen = at[None, :] < stop_M[i][:, None]
            if REACH:
                seen = seen & (at[None, :] >= oldest_M[i][:, None])
            scores = tl.where(seen, scores * LOG2E, float("-inf"))
            weights, most, sums, shrink = online(scores, 1.0, highest[i], total[i], 1)
            new_highest, new_total = new_highest + (most,), new_total + (sums,)
            new_acc = new_acc + (tl.dot(weights.to(TO), v, acc[i] * shrink[:, None], input_precision="ieee"),)
        highest, total, acc = new_highest, new_total, new_acc
    return highest, total, acc


@triton.jit
def _attend_fp8(
    q_even, q_odd, oldest_M, stop_M, highest, total, even, odd, pages, scales_ptr, scales_se, keys, first, last, scale, softcap,
    K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, PAGE: tl.constexpr,
    BN: tl.constexpr, REACH: tl.constexpr, SOFTCAP: tl.constexpr, FP8: tl.constexpr, TO: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """As `_attend`, for one tile of queries, with queries and results as `attend_fp8_few` has them."""
    kp_ptr, kp_se, kp_ss, vp_ptr, vp_se, vp_ss = pages
    row_table, width, oldest, stop = keys
    for start in range(first, last, BN):
        at, mask, entry, inside = keys_at(row_table, width, start, oldest, stop, PAGE, BN, REACH)
        k_scale, exponent, share = tile_scales(
            scales_ptr, scales_se, row_table, width, start, oldest, stop, K, PAGE, BN, REACH, ASM
        )
        seen = at[:, None] < stop_M[None, :]
        if REACH:
            seen = seen & (at[:, None] >= oldest_M[None, :])
        highest, total, even, odd = attend_fp8_few(
            q_even, q_odd, highest, total, even, odd, kp_ptr, entry * kp_se + inside * kp_ss,
            vp_ptr, entry * vp_se + inside * vp_ss, k_scale, exponent, share, mask, seen, scale, softcap,
            D, DP, DV, DVP, SOFTCAP, FP8, TO, ASM,
        )  # fmt: skip
    return highest, total, even, odd


@triton.jit
def _block_part(
    q_ptr, q_st, q_sh, row, head, first_query, pages, scales_ptr, scales_se, keys, skipped, upto, scale, softcap,
    K: tl.constexpr, G: tl.constexpr, STRIDE: tl.constexpr, END: tl.constexpr, M: tl.constexpr, TILES: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr,
    REACH: tl.constexpr, SOFTCAP: tl.constexpr, FP8: tl.constexpr, TO: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A block's results over the row's tiles [skipped, upto): tuples of highest scores, total weights and weighted values."""
    d = tl.arange(0, DP)
    _, _, oldest, _ = keys
    first, last = (oldest // BN + skipped) * BN, (oldest // BN + upto) * BN
    q, oldest_M, stop_M, highest, total, acc = (), (), (), (), (), ()
    for i in tl.static_range(TILES):
        token_M, g, inside, oldest_of, stop_of = _queries(
            row, first_query + i * M, first_query + END, G, STRIDE, M, REACH
        )
        oldest_M, stop_M = oldest_M + (oldest_of,), stop_M + (stop_of,)
        at = q_ptr + (token_M.to(tl.int64) * q_st + (head * G + g) * q_sh)[:, None]
        if FP8 is None:
            q = q + (tl.load(at + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0).to(TO),)
        else:
            twos = 2 * tl.arange(0, DP // 2)[None, :]
            there = inside[:, None] & (twos < D)
            q = (tl.load(at + twos, mask=there, other=0.0).to(TO), tl.load(at + twos + 1, mask=there, other=0.0).to(TO))
        highest, total = highest + (tl.full([M], LOWEST, tl.float32),), total + (tl.zeros([M], tl.float32),)
        acc = acc + (tl.zeros([M, DVP], tl.float32),)
    if FP8 is None:
        highest, total, acc = _attend(
            q, oldest_M, stop_M, (highest, total, acc), pages, keys, first, last, scale, softcap,
            D, DP, DV, DVP, PAGE, BN, REACH, SOFTCAP, TO, TILES,
        )  # fmt: skip
    else:
        even, odd = halves(acc[0])
        most, sums, even, odd = _attend_fp8(
            tl.trans(q[0]), tl.trans(q[1]), oldest_M[0], stop_M[0], highest[0], total[0], tl.trans(even), tl.trans(odd),
            pages, scales_ptr, scales_se, keys, first, last, scale, softcap, K, D, DP, DV, DVP, PAGE, BN, REACH, SOFTCAP, FP8, TO, ASM,
        )  # fmt: skip
        highest, total, acc = (most,), (sums,), (joined(tl.trans(even), tl.trans(odd)),)
    return highest, total, acc


@triton.jit
def _finish_block(
    highest, total, acc, row, head, first_query, column, first_piece, pieces, part_ptr, sums_ptr, out_ptr, out_st, out_sh, sinks_ptr,
    COLUMNS: tl.constexpr, K: tl.constexpr, G: tl.constexpr, STRIDE: tl.constexpr, END: tl.constexpr, M: tl.constexpr,
    TILES: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, REACH: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """The block's output, of what the program has or of all `pieces` that slices have left."""
    for i in tl.static_range(TILES):
        most, sums, values = highest[i], total[i], acc[i]
        if pieces > 1:
            most, sums, values = merged_parts(
                part_ptr + i * (M * DV), sums_ptr + i * (M * 2), first_piece, pieces, column, COLUMNS, TILES * M, M, DV, DVP
            )  # fmt: skip
        token_M, g, inside, _, _ = _queries(row, first_query + i * M, first_query + END, G, STRIDE, M, REACH)
        finish(most, sums, values, token_M, head * G + g, inside, out_ptr, out_st, out_sh, sinks_ptr, DV, DVP, SINKS)


@triton.jit(do_not_specialize=["num_units", "width", "entry_tiles", "window", "chunk"])
def drafts_kernel(
    q_ptr, q_st, q_sh, out_ptr, out_st, out_sh,
    kp_ptr, kp_se, kp_ss, kp_sh, vp_ptr, vp_se, vp_ss, vp_sh, scales_ptr, scales_se, row_ptr, position_ptr,
    table_ptr, table_st, width, begin_ptr, unit_ptr, num_units, entry_tiles, counter_ptr, part_ptr, sums_ptr,
    sinks_ptr, scale, softcap, window, chunk,
    S: tl.constexpr, K: tl.constexpr, G: tl.constexpr, STRIDE: tl.constexpr, TOKENS: tl.constexpr, M: tl.constexpr,
    TILES: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, PAGE: tl.constexpr,
    BN: tl.constexpr, REACH: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr,
    FP8: tl.constexpr, TO: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One slice of one head and one block of each row's tokens. `begin`, `unit`, `entry_tiles`: see `decode_kernel`.

    EARLY: an earlier layer of the step ran this kernel on the same schedule. It let no successor start before it had waited itself. So
    the schedule and the page table can be read while the predecessor still runs. That one stores the step's tokens; the first tile,
    which may hold them, is only brought into the second-level cache.
    """
    wait_turn(PDL and not EARLY)
    start_next(PDL and not EARLY)
    COLUMNS: tl.constexpr = K * ((STRIDE + TOKENS - 1) // TOKENS)
    column = tl.program_id(0) % COLUMNS
    piece = tl.program_id(0) // COLUMNS
    head = column % K
    first_query = column // K * (TOKENS * G)
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
            prefetch(pages, scales_ptr, scales_se, keys, start, K, D, DV, PAGE, BN, REACH, FP8)
        wait_turn(EARLY)
        start_next(EARLY)
    while left > 0:
        next_begin, next_end, next_token, next_slot, next_oldest, next_stop = unit_of(
            begin_ptr, unit_ptr, unit + 1, num_units
        )
        run = tl.minimum(left, end - tile)
        row = (token, slot, row_ptr, position_ptr, window, chunk)
        keys = (table_ptr + tl.cast(slot, tl.int64) * table_st, width, oldest, stop)
        highest, total, acc = _block_part(
            q_ptr, q_st, q_sh, row, head, first_query, pages, scales_ptr, scales_se, keys,
            tl.maximum(tile - begin - entry_tiles, 0), tl.maximum(tile - begin + run - entry_tiles, 0), scale, softcap,
            K, G, STRIDE, TOKENS * G, M, TILES, D, DP, DV, DVP, PAGE, BN, REACH, SOFTCAP, FP8, TO, PDL,
        )  # fmt: skip
        pieces = (end - 1) // per - begin // per + 1
        done = pieces == 1
        if pieces > 1:
            place = (piece * 2 + (1 if tile == begin else 0)) * COLUMNS + column
            for i in tl.static_range(TILES):
                store_part(
                    part_ptr + i * (M * DV), sums_ptr + i * (M * 2), place, highest[i], total[i], acc[i], TILES * M, M, DV, DVP
                )  # fmt: skip
            tl.debug_barrier()
            done = tl.atomic_add(counter_ptr + unit * COLUMNS + column, 1, sem="acq_rel", scope="gpu") == pieces - 1
            if done:
                tl.store(counter_ptr + unit * COLUMNS + column, 0)
        if done:
            _finish_block(
                highest, total, acc, row, head, first_query, column, begin // per, pieces, part_ptr, sums_ptr,
                out_ptr, out_st, out_sh, sinks_ptr, COLUMNS, K, G, STRIDE, TOKENS * G, M, TILES, DV, DVP, REACH, SINKS,
            )  # fmt: skip
        tile += run
        left -= run
        unit += 1
        begin, end, token, slot = next_begin, next_end, next_token, next_slot
        oldest, stop = next_oldest, next_stop
