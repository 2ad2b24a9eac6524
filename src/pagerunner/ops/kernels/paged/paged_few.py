"""Decode attention of few rows, or of rows that see few keys, from the projection on. Such a step moves few bytes: its time is a
chain of latencies. This kernel keeps the chain short.

- What doesn't depend on the projection is done while the projection is still computed: lengths, entries, the first tile of keys
  and values, angles, norms' weights.
- Each program has one part of one row and one head of keys. Rows that lie in one part need no merging.
- Keys are rows of the products and queries are columns, so a tile's results are small.
- Queries, and the row's own key, are loaded as two halves. These halves are the pairs that rotate.

As in `kernels.paged_decode`, a row's parts are merged by the last program that finishes, always in the same order. One program would take long for the
parts of a long row with few heads of keys: 240 of them take as long as their keys. So more than 32 are merged 16 at a time, by the last
program of these, and then the results. Scores are in units of log2. Shape letters: U units (a row's token), S slices, K key/value heads, G query heads per key/value head (M: as columns of
a tile), D head size, HP half of it, padded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import start_next, wait_turn
from pagerunner.ops.kernels.linear.linear_parts import NO_NORM, OFFSET_NORM
from pagerunner.ops.kernels.paged.paged_heads import turned
from pagerunner.ops.kernels.paged.paged_parts import merged, over_sinks, store_part
from pagerunner.ops.kernels.paged.paged_tiles import LOG2E, LOWEST, online, softcapped

MOST_MERGED = tl.constexpr(32)
"""Parts of a row that one program merges."""
MERGED = tl.constexpr(16)
"""Of more, so many at a time."""


@triton.jit
def _of_unit(x, mine):
    return tl.sum(tl.where(mine, x, 0), 0)


@triton.jit
def part_of(
    begin_ptr, unit_ptr, num_units, piece, slices, LEAST: tl.constexpr, UNITS: tl.constexpr, ONE_TILE: tl.constexpr
):
    """What part `piece` is: its unit (`num_units`: none), its first tile in the unit and how many it has, the unit's first part and
    how many parts the unit has; and the unit's token, table slot, first key in pages, and the key after the last.

    A part has `per` tiles, and a unit's last part what is left. There are at most `slices + num_units` parts. With ONE_TILE part n is unit n.
    """
    if ONE_TILE:
        own = unit_ptr + piece * 4
        return piece, 0, 1, piece, 1, (tl.load(own), tl.load(own + 1), tl.load(own + 2), tl.load(own + 3))
    u = tl.arange(0, UNITS)
    there = u < num_units
    # all units are loaded at once, so that no load waits for another
    begins, ends = tl.load(begin_ptr + u, mask=there, other=0), tl.load(begin_ptr + u + 1, mask=there, other=0)
    tokens, slots = tl.load(unit_ptr + u * 4, mask=there, other=0), tl.load(unit_ptr + u * 4 + 1, mask=there, other=0)
    oldest, stop = (
        tl.load(unit_ptr + u * 4 + 2, mask=there, other=0),
        tl.load(unit_ptr + u * 4 + 3, mask=there, other=0),
    )
    tiles = ends - begins
    per = tl.maximum(tl.cdiv(tl.sum(tiles, 0), slices), LEAST)
    parts = tl.cdiv(tiles, per)
    after = tl.cumsum(parts, 0)
    unit = tl.sum((there & (after <= piece)).to(tl.int32), 0)
    mine = u == unit
    first_part = _of_unit(after - parts, mine)
    first = (piece - first_part) * per
    count = tl.minimum(per, _of_unit(tiles, mine) - first)
    of_unit = _of_unit(tokens, mine), _of_unit(slots, mine), _of_unit(oldest, mine), _of_unit(stop, mine)
    return unit, first, count, first_part, _of_unit(parts, mine), of_unit


@triton.jit
def load_half_heads(at, mask, HALF: tl.constexpr):
    """Both halves of heads."""
    return tl.load(at, mask=mask, other=0.0), tl.load(at + HALF, mask=mask, other=0.0)


@triton.jit
def load_keys(pages, keys, start, HALF: tl.constexpr, HP: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, RING: tl.constexpr):  # fmt: skip
    """A tile of keys and of values as pages hold them, four halves [BN, HP]; and which of them exist.

    `pages`: where a head's keys are, with the strides of entries and of slots, and its values. `keys`: the row's page table, its columns, the
    first key that exists and the one after the last.
    """
    kp_ptr, kp_se, kp_ss, vp_ptr, vp_se, vp_ss = pages
    row_table, width, oldest, stop = keys
    h = tl.arange(0, HP)
    at = start + tl.arange(0, BN)
    there = (at >= oldest) & (at < stop)
    page = tl.minimum(at, tl.maximum(stop - 1, 0)) // PAGE  # without masks, entries are on their way together
    if RING:
        page = page % width
    entry = tl.load(row_table + page)
    inside = at % PAGE
    mask = there[:, None] & (h < HALF)[None, :]
    k_low, k_high = load_half_heads(kp_ptr + (entry * kp_se + inside * kp_ss)[:, None] + h[None, :], mask, HALF)
    v_low, v_high = load_half_heads(vp_ptr + (entry * vp_se + inside * vp_ss)[:, None] + h[None, :], mask, HALF)
    return k_low, k_high, v_low, v_high, there


@triton.jit
def _attend(queries, results, tile, scale, softcap, SOFTCAP: tl.constexpr, TO: tl.constexpr):
    """One tile of `load_keys`. Queries [HP, M] are columns, and so are both halves of the results, [HP, M].

    Scores are two short sums, neither of which waits for the other. Each is scaled by itself, because the compiler makes one sum of
    products that are only added.
    """
    q_low, q_high = queries
    highest, total, acc_low, acc_high = results
    k_low, k_high, v_low, v_high, there = tile
    scores = tl.dot(k_low.to(TO), q_low, input_precision="ieee") * scale
    scores += tl.dot(k_high.to(TO), q_high, input_precision="ieee") * scale
    if SOFTCAP:
        scores = softcapped(scores, softcap)
    scores = tl.where(there[:, None], scores * LOG2E, float("-inf"))
    weights, highest, total, shrink = online(scores, 1.0, highest, total, 0)
    weights = weights.to(TO)
    acc_low = tl.dot(tl.trans(v_low.to(TO)), weights, acc_low * shrink[None, :], input_precision="ieee")
    acc_high = tl.dot(tl.trans(v_high.to(TO)), weights, acc_high * shrink[None, :], input_precision="ieee")
    return highest, total, acc_low, acc_high


@triton.jit
def beside(ptr, there, M: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr):
    """A vector of a head's size beside each of M heads: two halves [M, HP]. As heads lie, so threads exchange nothing."""
    m, h = tl.arange(0, M), tl.arange(0, HP)
    return load_half_heads(ptr + (m * 0)[:, None] + h[None, :], there & (m < M)[:, None] & (h < HALF)[None, :], HALF)


@triton.jit
def _projected(at, mask, part_st, HALF: tl.constexpr, PARTS: tl.constexpr, TO: tl.constexpr):
    """Both halves of heads as the projection has them. PARTS: it comes as so many sums in float32, `part_st` apart, which are added up in their order."""
    low, high = load_half_heads(at, mask, HALF)
    for part in tl.static_range(1, PARTS):
        more_low, more_high = load_half_heads(at + part * part_st, mask, HALF)
        low += more_low
        high += more_high
    return low.to(TO), high.to(TO)


@triton.jit
def prepared_halves(
    low, high, weight_low, weight_high, cos_low, cos_high, sin_low, sin_high, eps, D: tl.constexpr, NORM: tl.constexpr
):
    """Heads in halves [M, HP], normed, rotated, and rounded to their dtype; float32."""
    dtype: tl.constexpr = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    if NORM != NO_NORM:
        inverse = tl.math.rsqrt(tl.sum(low * low + high * high, 1) / D + eps)[:, None]
        weight_low, weight_high = weight_low.to(tl.float32), weight_high.to(tl.float32)
        if NORM == OFFSET_NORM:
            weight_low, weight_high = weight_low + 1.0, weight_high + 1.0
        low = low * inverse * weight_low
        high = high * inverse * weight_high
    else:
        # A sum or maximum over the head keeps the compiler from converting all that is loaded to the products' layout, one after
        # another. That took 600 cycles after the wait, and this takes 100.
        one = tl.where(tl.max(tl.abs(low), 1) < float("inf"), 1.0, float("nan"))[:, None]
        low *= one
        high *= one
    low, high = turned(
        low, high, cos_low.to(tl.float32), cos_high.to(tl.float32), sin_low.to(tl.float32), sin_high.to(tl.float32)
    )
    return low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)


@triton.jit
def _constants(
    cos_at, sin_at, q_norm_ptr, k_norm_ptr, M: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr, NORM: tl.constexpr
):
    """A token's angles, and the norms' weights of queries and of keys, in halves [M, HP]."""
    cos_low, cos_high = beside(cos_at, True, M, HALF, HP)
    sin_low, sin_high = beside(sin_at, True, M, HALF, HP)
    q_weights, k_weights = (cos_low, cos_high), (cos_low, cos_high)
    if NORM != NO_NORM:
        q_weights, k_weights = beside(q_norm_ptr, True, M, HALF, HP), beside(k_norm_ptr, True, M, HALF, HP)
    return (cos_low, cos_high, sin_low, sin_high), q_weights, k_weights


@triton.jit
def _heads(
    q_at, q_sh, k_at, v_at, part_st, has_own, turns, q_weights, k_weights, eps,
    held: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr,
    NORM: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A token's queries, ready; and beside each of them its key, ready, and its value, as pages hold them. Halves [M, HP].

    The key stands beside each query, so that their products need no exchange between threads. All is loaded before anything is
    computed.
    """
    m, h = tl.arange(0, M), tl.arange(0, HP)
    mask = (m < G)[:, None] & (h < HALF)[None, :]
    own, own_mask = (m * 0)[:, None] + h[None, :], has_own & (m < M)[:, None] & (h < HALF)[None, :]
    q_low, q_high = _projected(q_at + m[:, None] * q_sh + h[None, :], mask, part_st, HALF, PARTS, DTYPE)
    k_low, k_high = _projected(k_at + own, own_mask, part_st, HALF, PARTS, DTYPE)
    v_low, v_high = _projected(v_at + own, own_mask, part_st, HALF, PARTS, DTYPE)
    if PARTS > 1:  # as in `prepared_halves`: else the compiler converts each part by itself
        one = tl.where(tl.max(tl.abs(v_low.to(tl.float32)), 1) == -1.0, 0.0, 1.0)[:, None]
        v_low, v_high = (v_low * one).to(DTYPE), (v_high * one).to(DTYPE)
    q_low, q_high = prepared_halves(q_low, q_high, *q_weights, *turns, eps, D, NORM)
    k_low, k_high = prepared_halves(k_low, k_high, *k_weights, *turns, eps, D, NORM)
    return q_low, q_high, k_low.to(held), k_high.to(held), v_low.to(held), v_high.to(held)


@triton.jit
def _own_score(q_low, q_high, k_low, k_high, has_own, scale, softcap, SOFTCAP: tl.constexpr):
    """Highest score and total weight of the token's own key alone; of no key, if the part doesn't have it."""
    own = tl.sum(q_low * k_low.to(tl.float32) + q_high * k_high.to(tl.float32), 1) * scale
    if SOFTCAP:
        own = softcapped(own, softcap)
    return tl.where(has_own, own * LOG2E, LOWEST), tl.where(has_own, 1.0, tl.zeros_like(own))


@triton.jit
def _store_whole(
    out_ptr, out_sh, sinks_ptr, results, head, G: tl.constexpr, M: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr, SINKS: tl.constexpr
):  # fmt: skip
    """The output of a unit that is one part."""
    highest, total, acc_low, acc_high = results
    m, h = tl.arange(0, M), tl.arange(0, HP)
    q_head = head * G + m
    mask = (m < G)[None, :] & (h < HALF)[:, None]
    factor = over_sinks(highest, total, sinks_ptr, q_head, m < G, SINKS)[None, :]
    at = out_ptr + q_head[None, :] * out_sh + h[:, None]
    tl.store(at, (acc_low * factor).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(at + HALF, (acc_high * factor).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_part(
    part_ptr, sums_ptr, place, results, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, HP: tl.constexpr
):
    HALF: tl.constexpr = D // 2
    highest, total, acc_low, acc_high = results
    m, h = tl.arange(0, M), tl.arange(0, HP)
    at = place + m
    mask = (m < G)[None, :] & (h < HALF)[:, None]
    tl.store(sums_ptr + at * 2, highest, mask=m < G)
    tl.store(sums_ptr + at * 2 + 1, total, mask=m < G)
    part_at = part_ptr + at[None, :] * D + h[:, None]
    tl.store(part_at, acc_low, mask=mask)
    tl.store(part_at + HALF, acc_high, mask=mask)


@triton.jit
def is_last(counter, count):
    """Whether this program is the last of `count` to have stored what it has. The counter is then as before."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def _merge_some(
    part_ptr, sums_ptr, first_part, count, head, K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Leave the result of `count` parts, which have been stored, where the first of them was."""
    g = tl.arange(0, GP)
    first = (first_part * K + head) * G + g
    highest, total, acc = merged(part_ptr, sums_ptr, first, K * G, count, g < G, D, DP, AT_ONCE)
    tl.debug_barrier()  # all have read the first part
    store_part(part_ptr, sums_ptr, first, highest, total, acc, g < G, D, DP)


@triton.jit
def _store_merged(
    out_ptr, out_sh, sinks_ptr, part_ptr, sums_ptr, first_part, each, count, head,
    K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SINKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The output of a unit whose parts have all been stored, and are merged `each` at a time."""
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    q_head = head * G + g
    first = (first_part * K + head) * G + g
    highest, total, acc = merged(part_ptr, sums_ptr, first, each * K * G, tl.cdiv(count, each), g < G, D, DP, AT_ONCE)
    acc *= over_sinks(highest, total, sinks_ptr, q_head, g < G, SINKS)[:, None]
    at = out_ptr + q_head[:, None] * out_sh + d[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(g < G)[:, None] & (d < D)[None, :])


@triton.jit
def _store_own(ptr, low, high, M: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr):
    """A vector that stands beside each of M heads, once."""
    m, h = tl.arange(0, M), tl.arange(0, HP)
    at = ptr + (m * 0)[:, None] + h[None, :]
    mask = (m == 0)[:, None] & (h < HALF)[None, :]
    tl.store(at, low, mask=mask)
    tl.store(at + HALF, high, mask=mask)


@triton.jit(do_not_specialize=["num_units", "width", "slices"])
def few_kernel(
    q_ptr, q_st, q_sh, k_ptr, k_st, k_sh, v_ptr, v_st, v_sh, out_ptr, out_st, out_sh, part_st,
    kp_ptr, kp_se, kp_ss, kp_sh, vp_ptr, vp_se, vp_ss, vp_sh,
    cos_ptr, sin_ptr, stride_rope, q_norm_ptr, k_norm_ptr, eps, entry_ptr, offset_ptr,
    table_ptr, table_st, width, begin_ptr, unit_ptr, num_units, slices, counter_ptr,
    part_ptr, sums_ptr, sinks_ptr, scale, softcap,
    LEAST: tl.constexpr, UNITS: tl.constexpr, K: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    HP: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, RING: tl.constexpr, NORM: tl.constexpr, SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr, TO: tl.constexpr, GP: tl.constexpr, AT_ONCE: tl.constexpr, ONE_TILE: tl.constexpr,
    GROUPED: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One part of one row and one head of keys. `begin` and `unit`: see `decode_kernel`. `part` [S, K, G, D] and `sums` [S, K, G, 2]
    are what parts leave; `counter` [U, K] counts them. GROUPED: a unit may have more than MOST_MERGED parts, and `counter` [U + S, K] also counts those that
    are merged together. ONE_TILE: no unit has more than one tile, so each is one part, and there may be many.
    PARTS: queries, keys and values are still so many sums, see `_projected`.

    EARLY: an earlier layer of the step ran this kernel on the same schedule. It let no successor start before it had waited itself. So
    the schedule, and all that earlier steps have stored, can be read while the predecessor still runs.
    """
    wait_turn(PDL and not EARLY)
    start_next(PDL and not EARLY)
    HALF: tl.constexpr = D // 2
    head = tl.program_id(0) % K
    piece = tl.program_id(0) // K
    unit, first, tiles, first_part, count, of_unit = part_of(
        begin_ptr, unit_ptr, num_units, piece, slices, LEAST, UNITS, ONE_TILE
    )
    if unit < num_units:
        token, slot, oldest, stop = of_unit
        wide = tl.cast(token, tl.int64)
        entry, inside = tl.load(entry_ptr + token), tl.load(offset_ptr + token)
        turns, q_weights, k_weights = _constants(
            cos_ptr + wide * stride_rope, sin_ptr + wide * stride_rope, q_norm_ptr, k_norm_ptr, M, HALF, HP, NORM
        )
        has_own = (first_part + count - 1 == piece) & (slot >= 0)
        kp_ptr += head * kp_sh
        vp_ptr += head * vp_sh
        row_table = table_ptr + tl.cast(tl.maximum(slot, 0), tl.int64) * table_st
        pages, keys = (kp_ptr, kp_se, kp_ss, vp_ptr, vp_se, vp_ss), (row_table, width, oldest, stop)
        start = oldest + first * BN
        tile = load_keys(pages, keys, start, HALF, HP, PAGE, BN, RING)
        wait_turn(EARLY)
        start_next(EARLY)
        q_low, q_high, k_low, k_high, v_low, v_high = _heads(
            q_ptr + wide * q_st + head * G * q_sh, q_sh, k_ptr + wide * k_st + head * k_sh, v_ptr + wide * v_st + head * v_sh,
            part_st, has_own, turns, q_weights, k_weights, eps, kp_ptr.dtype.element_ty, G, M, D, HALF, HP, NORM,
            PARTS, out_ptr.dtype.element_ty,
        )  # fmt: skip
        highest, total = _own_score(q_low, q_high, k_low, k_high, has_own, scale, softcap, SOFTCAP)
        acc_low, acc_high = tl.trans(v_low.to(tl.float32)), tl.trans(v_high.to(tl.float32))
        queries = (tl.trans(q_low.to(TO)), tl.trans(q_high.to(TO)))
        results = _attend(queries, (highest, total, acc_low, acc_high), tile, scale, softcap, SOFTCAP, TO)
        if tiles > 1:
            for more in range(start + BN, start + tiles * BN, BN):
                tile = load_keys(pages, keys, more, HALF, HP, PAGE, BN, RING)
                results = _attend(queries, results, tile, scale, softcap, SOFTCAP, TO)
        if count == 1:
            _store_whole(out_ptr + wide * out_st, out_sh, sinks_ptr, results, head, G, M, HALF, HP, SINKS)
        else:
            _store_part(part_ptr, sums_ptr, (piece * K + head) * G, results, G, M, D, HP)
            each, ready = 1, True
            if GROUPED:
                each = tl.where(count > MOST_MERGED, MERGED, 1)
                begin = first_part + (piece - first_part) // each * each
                some = tl.minimum(first_part + count - begin, each)
                ready = some == 1
                if some > 1:
                    ready = is_last(counter_ptr + (num_units + begin) * K + head, some)
                    if ready:
                        _merge_some(part_ptr, sums_ptr, begin, some, head, K, G, GP, D, 2 * HP, AT_ONCE)
            if ready:
                if is_last(counter_ptr + unit * K + head, tl.cdiv(count, each)):
                    _store_merged(
                        out_ptr + wide * out_st, out_sh, sinks_ptr, part_ptr, sums_ptr, first_part, each, count, head,
                        K, G, GP, D, 2 * HP, SINKS, AT_ONCE,
                    )  # fmt: skip
        if has_own & (entry >= 0):
            _store_own(kp_ptr + entry * kp_se + inside * kp_ss, k_low, k_high, M, HALF, HP)
            _store_own(vp_ptr + entry * vp_se + inside * vp_ss, v_low, v_high, M, HALF, HP)
