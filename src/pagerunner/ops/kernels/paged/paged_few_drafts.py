"""Decode attention of few rows with drafts, from the projection on: `kernels.paged_few` for strided batches, in one launch.

A unit is a row. Its tokens of this step are no keys of its pages yet: they are one more small tile, which the program of the row's last
part prepares from the projection, multiplies and stores. So no program waits for another, and tiles of older keys are on their way while
the projection is still computed. Queries, the heads of one token after another, are the rows of TILES tiles of M; they share each tile of keys.
More queries are several blocks, each with programs of its own: few rows leave the device idle, and the second-level cache has the keys.

Scores are in units of log2. Shape letters: see `kernels.paged_few`; NEW tokens of a row, padded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import start_next, wait_turn
from pagerunner.ops.kernels.linear.linear_parts import NO_NORM
from pagerunner.ops.kernels.paged.paged_few import beside, load_half_heads, load_keys, part_of, prepared_halves
from pagerunner.ops.kernels.paged.paged_parts import merged, over_sinks
from pagerunner.ops.kernels.paged.paged_tiles import LOG2E, LOWEST, online, softcapped


@triton.jit
def _tokens(token, first, end, row_ptr, position_ptr, N: tl.constexpr, G: tl.constexpr):
    """Of queries [N] from the row's query `first` on, of those before `end`: their tokens' numbers in the row, their tokens, which of them
    are in the batch, which are there, and the tokens' positions. `token` is the row's first.
    """
    at = first + tl.arange(0, N)
    inside = at < end
    number = at // G
    there = inside & (tl.load(row_ptr + token + number, mask=inside, other=-1) >= 0)
    position = tl.load(position_ptr + token + number, mask=there, other=0).to(tl.int32)
    return number, token + number, inside, there, position


@triton.jit
def _oldest(position, window, chunk):
    """The first positions that tokens at `position` see."""
    oldest = position // tl.maximum(chunk, 1) * chunk
    return tl.where(window > 0, tl.maximum(position - window + 1, 0), oldest)


@triton.jit
def _prepare(ptr, at_N, mask_N, token_N, rope, norm_ptr, eps, N: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, NORM: tl.constexpr):  # fmt: skip
    """Heads at `at` [N], each with its token's angles, normed, rotated and rounded: two halves [N, HP] float32.

    `rope`: where tokens' cosines and sines are, and their stride.
    """
    cos_ptr, sin_ptr, stride_rope = rope
    angle_N = token_N * stride_rope
    HALF: tl.constexpr = D // 2
    h = tl.arange(0, HP)[None, :]
    mask = mask_N[:, None] & (h < HALF)
    low, high = load_half_heads(ptr + at_N[:, None] + h, mask, HALF)
    cos_low, cos_high = load_half_heads(cos_ptr + angle_N[:, None] + h, mask, HALF)
    sin_low, sin_high = load_half_heads(sin_ptr + angle_N[:, None] + h, mask, HALF)
    weight_low, weight_high = cos_low, cos_high
    if NORM != NO_NORM:
        weight_low, weight_high = beside(norm_ptr, True, N, HALF, HP)
    return prepared_halves(low, high, weight_low, weight_high, cos_low, cos_high, sin_low, sin_high, eps, D, NORM)


@triton.jit
def _attend(q_low, q_high, results, tile, seen, scale, softcap, SOFTCAP: tl.constexpr, TO: tl.constexpr):
    """One tile of queries and one of keys. Scores are two short sums, as in `kernels.paged_few`."""
    highest, total, acc_low, acc_high = results
    k_low, k_high, v_low, v_high, _ = tile
    scores = tl.dot(q_low, tl.trans(k_low.to(TO)), input_precision="ieee") * scale
    scores += tl.dot(q_high, tl.trans(k_high.to(TO)), input_precision="ieee") * scale
    if SOFTCAP:
        scores = softcapped(scores, softcap)
    scores = tl.where(seen, scores * LOG2E, float("-inf"))
    weights, highest, total, shrink = online(scores, 1.0, highest, total, 1)
    weights = weights.to(TO)
    acc_low = tl.dot(weights, v_low.to(TO), acc_low * shrink[:, None], input_precision="ieee")
    acc_high = tl.dot(weights, v_high.to(TO), acc_high * shrink[:, None], input_precision="ieee")
    return highest, total, acc_low, acc_high


@triton.jit
def _attend_pages(
    queries, results, tile, start, scale, softcap,
    BN: tl.constexpr, REACH: tl.constexpr, SOFTCAP: tl.constexpr, TO: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A tile of keys from pages, which all tokens see, but for windows and chunks: tuples of results."""
    q_low, q_high, oldest_M = queries
    highest, total, acc_low, acc_high = results
    _, _, _, _, there = tile
    new_highest, new_total, new_low, new_high = (), (), (), ()
    for i in tl.static_range(TILES):
        seen = there[None, :]
        if REACH:
            seen = seen & ((start + tl.arange(0, BN))[None, :] >= oldest_M[i][:, None])
        before = (highest[i], total[i], acc_low[i], acc_high[i])
        most, sums, low, high = _attend(q_low[i], q_high[i], before, tile, seen, scale, softcap, SOFTCAP, TO)
        new_highest, new_total = new_highest + (most,), new_total + (sums,)
        new_low, new_high = new_low + (low,), new_high + (high,)
    return new_highest, new_total, new_low, new_high


@triton.jit
def _new_tile(
    token, has_new, stores, k_ptr, k_st, v_ptr, v_st, rope, k_norm_ptr, eps, entry_ptr, offset_ptr, row_ptr, position_ptr, pages,
    STRIDE: tl.constexpr, NEW: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The row's new tokens, as pages hold them: keys and values in halves [NEW, HP], and which of them are there. One block `stores` them, too."""
    kp_ptr, kp_se, kp_ss, vp_ptr, vp_se, vp_ss = pages
    HALF: tl.constexpr = D // 2
    h = tl.arange(0, HP)[None, :]
    end = tl.where(has_new, STRIDE, 0)
    number, token_N, inside, there, position = _tokens(token, 0, end, row_ptr, position_ptr, NEW, 1)
    wide = token_N.to(tl.int64)
    k_low, k_high = _prepare(k_ptr, wide * k_st, there, wide, rope, k_norm_ptr, eps, NEW, D, HP, NORM)
    mask = there[:, None] & (h < HALF)
    v_low, v_high = load_half_heads(v_ptr + (wide * v_st)[:, None] + h, mask, HALF)
    held: tl.constexpr = kp_ptr.dtype.element_ty
    k_low, k_high, v_low, v_high = k_low.to(held), k_high.to(held), v_low.to(held), v_high.to(held)
    entry = tl.load(entry_ptr + token_N, mask=there, other=-1)
    slot = tl.load(offset_ptr + token_N, mask=there, other=0)
    stored = mask & (entry >= 0)[:, None] & stores
    k_at = kp_ptr + (entry * kp_se + slot * kp_ss)[:, None] + h
    v_at = vp_ptr + (entry * vp_se + slot * vp_ss)[:, None] + h
    tl.store(k_at, k_low, mask=stored)
    tl.store(k_at + HALF, k_high, mask=stored)
    tl.store(v_at, v_low, mask=stored)
    tl.store(v_at + HALF, v_high, mask=stored)
    return k_low, k_high, v_low, v_high, there


@triton.jit
def _begin(
    token, head, first_query, first, q_ptr, q_st, q_sh, rope, q_norm_ptr, eps, row_ptr, position_ptr, window, chunk, tile, scale, softcap,
    G: tl.constexpr, STRIDE: tl.constexpr, M: tl.constexpr, TILES: tl.constexpr, NEW: tl.constexpr, D: tl.constexpr,
    HP: tl.constexpr, REACH: tl.constexpr, NORM: tl.constexpr, SOFTCAP: tl.constexpr, TO: tl.constexpr,
):  # fmt: skip
    """Queries, ready, with the oldest keys that they see, and their results over the row's new tokens: tuples. `first` is the position of the first."""
    _, _, _, _, there = tile
    q_low, q_high, oldest_M, highest, total, acc_low, acc_high = (), (), (), (), (), (), ()
    for i in tl.static_range(TILES):
        number, token_M, inside, real, position = _tokens(
            token, first_query + i * M, STRIDE * G, row_ptr, position_ptr, M, G
        )
        q_head = head * G + (first_query + i * M + tl.arange(0, M)) % G
        wide = token_M.to(tl.int64)
        low, high = _prepare(q_ptr, wide * q_st + q_head * q_sh, inside, wide, rope, q_norm_ptr, eps, M, D, HP, NORM)
        low, high = low.to(TO), high.to(TO)
        seen = there[None, :] & (tl.arange(0, NEW)[None, :] <= number[:, None])
        if REACH:
            oldest_of = _oldest(position, window, chunk)
            oldest_M = oldest_M + (oldest_of,)
            seen = seen & ((first + tl.arange(0, NEW))[None, :] >= oldest_of[:, None])
        zeros = tl.zeros([M, HP], tl.float32)
        nothing = (tl.full([M], LOWEST, tl.float32), tl.zeros([M], tl.float32), zeros, zeros)
        most, sums, values_low, values_high = _attend(low, high, nothing, tile, seen, scale, softcap, SOFTCAP, TO)
        q_low, q_high, highest, total = q_low + (low,), q_high + (high,), highest + (most,), total + (sums,)
        acc_low, acc_high = acc_low + (values_low,), acc_high + (values_high,)
    return (q_low, q_high, oldest_M), (highest, total, acc_low, acc_high)


@triton.jit
def _finish(
    part_ptr, sums_ptr, out_ptr, out_st, out_sh, sinks_ptr, row_ptr, position_ptr, counter, token, head, first_query, column, piece, first_part,
    count, results,
    COLUMNS: tl.constexpr, G: tl.constexpr, STRIDE: tl.constexpr, M: tl.constexpr, TILES: tl.constexpr, D: tl.constexpr,
    HP: tl.constexpr, SINKS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The output of a unit that is one part. Of another it leaves the part, and the last program to do so merges them all."""
    HALF: tl.constexpr = D // 2
    highest, total, acc_low, acc_high = results
    h = tl.arange(0, HP)[None, :]
    done = count == 1
    if count > 1:
        for i in tl.static_range(TILES):
            place = ((piece * COLUMNS + column) * TILES + i) * M + tl.arange(0, M)
            tl.store(sums_ptr + place * 2, highest[i])
            tl.store(sums_ptr + place * 2 + 1, total[i])
            at = part_ptr + place[:, None] * D + h
            tl.store(at, acc_low[i], mask=h < HALF)
            tl.store(at + HALF, acc_high[i], mask=h < HALF)
        tl.debug_barrier()
        done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1
        if done:
            tl.store(counter, 0)
    if done:
        for i in tl.static_range(TILES):
            number, token_M, inside, there, position = _tokens(
                token, first_query + i * M, STRIDE * G, row_ptr, position_ptr, M, G
            )
            q_head = head * G + (first_query + i * M + tl.arange(0, M)) % G
            at = out_ptr + (token_M.to(tl.int64) * out_st + q_head * out_sh)[:, None]
            if count > 1:
                d = tl.arange(0, 2 * HP)[None, :]
                place = ((first_part * COLUMNS + column) * TILES + i) * M + tl.arange(0, M)
                stride = COLUMNS * TILES * M
                most, sums, acc = merged(part_ptr, sums_ptr, place, stride, count, inside, D, 2 * HP, AT_ONCE)
                factor = tl.where(there, over_sinks(most, sums, sinks_ptr, q_head, inside, SINKS), 0.0)[:, None]
                tl.store(at + d, (acc * factor).to(out_ptr.dtype.element_ty), mask=inside[:, None] & (d < D))
            else:
                factor = tl.where(there, over_sinks(highest[i], total[i], sinks_ptr, q_head, inside, SINKS), 0.0)
                mask, factor = inside[:, None] & (h < HALF), factor[:, None]
                tl.store(at + h, (acc_low[i] * factor).to(out_ptr.dtype.element_ty), mask=mask)
                tl.store(at + h + HALF, (acc_high[i] * factor).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_units", "width", "slices", "window", "chunk"])
def few_drafts_kernel(
    q_ptr, q_st, q_sh, k_ptr, k_st, k_sh, v_ptr, v_st, v_sh, out_ptr, out_st, out_sh,
    kp_ptr, kp_se, kp_ss, kp_sh, vp_ptr, vp_se, vp_ss, vp_sh,
    cos_ptr, sin_ptr, stride_rope, q_norm_ptr, k_norm_ptr, eps, entry_ptr, offset_ptr, row_ptr, position_ptr,
    table_ptr, table_st, width, begin_ptr, unit_ptr, num_units, slices, counter_ptr,
    part_ptr, sums_ptr, sinks_ptr, scale, softcap, window, chunk,
    UNITS: tl.constexpr, K: tl.constexpr, G: tl.constexpr, STRIDE: tl.constexpr, M: tl.constexpr, TILES: tl.constexpr,
    NEW: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, REACH: tl.constexpr,
    NORM: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr, TO: tl.constexpr, AT_ONCE: tl.constexpr,
    PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One part of one row, one head of keys and one block of queries. `begin`, `unit`: see `decode_kernel`. `counter`, EARLY: see `few_kernel`.

    `part` [P, COLUMNS, TILES * M, D] and `sums` [P, COLUMNS, TILES * M, 2] are what parts leave.
    """
    wait_turn(PDL and not EARLY)
    start_next(PDL and not EARLY)
    HALF: tl.constexpr = D // 2
    COLUMNS: tl.constexpr = K * ((STRIDE * G + TILES * M - 1) // (TILES * M))
    column = tl.program_id(0) % COLUMNS
    piece = tl.program_id(0) // COLUMNS
    head, first_query = column % K, column // K * (TILES * M)
    unit, first, tiles, first_part, count, of_unit = part_of(
        begin_ptr, unit_ptr, num_units, piece, slices, 1, UNITS, False
    )
    if unit < num_units:
        token, slot, oldest, stop = of_unit
        kp_ptr += head * kp_sh
        vp_ptr += head * vp_sh
        row_table = table_ptr + tl.cast(tl.maximum(slot, 0), tl.int64) * table_st
        pages, keys = (kp_ptr, kp_se, kp_ss, vp_ptr, vp_se, vp_ss), (row_table, width, oldest, stop)
        start, rope = oldest + first * BN, (cos_ptr, sin_ptr, stride_rope)
        tile = load_keys(pages, keys, start, HALF, HP, PAGE, BN, REACH)
        wait_turn(EARLY)
        start_next(EARLY)
        has_new = (first_part + count - 1 == piece) & (slot >= 0)
        new = _new_tile(
            token, has_new, first_query == 0, k_ptr + head * k_sh, k_st, v_ptr + head * v_sh, v_st, rope, k_norm_ptr, eps,
            entry_ptr, offset_ptr, row_ptr, position_ptr, pages, STRIDE, NEW, D, HP, NORM,
        )  # fmt: skip
        queries, results = _begin(
            token, head, first_query, stop, q_ptr, q_st, q_sh, rope, q_norm_ptr, eps, row_ptr, position_ptr, window, chunk, new,
            scale, softcap, G, STRIDE, M, TILES, NEW, D, HP, REACH, NORM, SOFTCAP, TO,
        )  # fmt: skip
        results = _attend_pages(queries, results, tile, start, scale, softcap, BN, REACH, SOFTCAP, TO, TILES)
        if tiles > 1:
            for more in range(start + BN, start + tiles * BN, BN):
                tile = load_keys(pages, keys, more, HALF, HP, PAGE, BN, REACH)
                results = _attend_pages(queries, results, tile, more, scale, softcap, BN, REACH, SOFTCAP, TO, TILES)
        _finish(
            part_ptr, sums_ptr, out_ptr, out_st, out_sh, sinks_ptr, row_ptr, position_ptr, counter_ptr + unit * COLUMNS + column,
            token, head, first_query, column, piece, first_part, count, results, COLUMNS, G, STRIDE, M, TILES, D, HP, SINKS, AT_ONCE,
        )  # fmt: skip
