"""Prefill attention on Hopper, in Gluon: Triton's language with layouts that the program chooses.

`kernels/paged/paged_prefill.py` says what a block is, and computes the same with plain Triton on any device. Here

* A program takes the next block before it copies a block's last values, so that its queries and first keys are there in time. Those with most keys
  come first, so that programs end at about the same time.
* One warp copies, in bulk: a block's queries, and tiles of 128 keys and values, two of each ahead. Tiles of the past come from pages, a page at a time.
  It is the one that takes blocks, and leaves beside a block's queries what the other warps must know of it.
* Two groups of four warps have 64 rows of a block each. A group's scores of a tile are multiplied while its values of the tile before are, so that
  one group multiplies while the other one computes weights (FlashAttention-3, arXiv 2407.08608). Barriers by which the groups take turns brought
  nothing. Results go where a block's queries were, and are copied in bulk from there.
* A block has 128 // G queries of G heads. Where G is no power of two, lanes copy queries and store results, as boxes of the copy engine are powers of two.
  Example: 25 queries of 5 heads are 125 of the 128 rows, and both groups have heads of the 13th.

In a step of few blocks a block's tiles are divided: programs take parts of blocks, and `kernels.paged_parts` merges what they leave. The first part has all tiles that need
masks. Example: 256 tokens of 32 query heads over 8 heads of keys are 64 blocks, and after 8,192 tokens each has 2 parts of 33 tiles.

Tiles that not all of a block's queries see come first: those of the newest tokens, then the end of the past. All others need no mask, but for the oldest in a window.
Values of keys that don't exist are made zeros before they are multiplied: what lies there may be no number.

Heads have D elements, 64 to 256, and lie in P panels of 64. What is in a panel beyond a head's end is the next head's: it is multiplied with zeros, or isn't stored.
Where D is more than 128, a tile has 64 keys, and there is room for one block's queries: the next block's are asked for when the last scores are known, and results go from registers.

Shape letters: see `paged_prefill`; a tile has N keys, a block 2 times 64 rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TensorDescriptor

from pagerunner.ops.kernels.launch import start_next, wait_turn
from pagerunner.ops.kernels.paged.paged_blocks_gluon import (
    M,
    counts_of,
    masks_of,
    newest_tile,
    older_in_last,
    older_in_partial,
    reached,
    row_of,
    rows_of_pieces,
    share_of,
    tile_at,
)

LOWEST = gl.constexpr(-1.0e30)
LOG2E = gl.constexpr(1.4426950408889634)
STAGES = gl.constexpr(2)
"""Tiles of keys and of values at once."""
FACTS = gl.constexpr(8)
"""Room for what is known of a block: head of keys, first token of the row, new tokens (0: there are no more blocks), past, first query; and of a part of it: its number
among the block's, how many these are, and its number among the step's."""
FACT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PANEL = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
"""Tiles in shared memory, in panels of 64 elements of a head."""
QUERIES = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))
"""Queries as they are copied: tokens, heads, 64 elements."""
SUMS = gl.constexpr(tuple(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64 * count, 16]) for count in (1, 2, 3, 4)))
"""Of so many times 64 keys, or elements of a head."""
WRITTEN = gl.constexpr(gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [0, 128], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
                                                  [[16, 0], [32, 0]], [], [64, 256]))  # fmt: skip
"""Results of 256 elements: four lanes have what they had of a row, in pieces of 16 bytes."""
STORED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
CLEARED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
ASKED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))
"""Queries as the lanes of one warp copy them."""


@gluon.jit
def _leave(facts, slot, at: gl.constexpr, value):
    """Note a fact about the block in `slot`."""
    facts.index(slot * FACTS + at).store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def _fact(facts, slot, at: gl.constexpr):
    return gl.sum(facts.index(slot * FACTS + at).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _next_block(facts, q_full, turn, DIVIDED: gl.constexpr):
    """Wait for a block and its queries: its facts."""
    BLOCKS: gl.constexpr = facts.shape[0] // FACTS
    slot = turn % BLOCKS
    mbarrier.wait(q_full.index(slot), turn // BLOCKS & 1)
    block = ()
    for at in gl.static_range(8 if DIVIDED else 5):
        block = block + (_fact(facts, slot, at),)
    return block


@gluon.jit
def _copy_tile(smem, full, empty, step, new_desc, page_desc, i, counts, past, token, column, row_table, page_rows, reach, PAGE: gl.constexpr,
               PAGED: gl.constexpr, REACH: gl.constexpr):  # fmt: skip
    """Begin to bring a block's i-th tile of keys or of values."""
    P: gl.constexpr = smem.shape[0] // STAGES
    N: gl.constexpr = smem.shape[1]
    PIECE: gl.constexpr = min(PAGE & -PAGE, N)
    new, start = tile_at(i, counts, past, N)
    slot = step % STAGES
    if PAGED:
        rows = rows_of_pieces(row_table, start, past, counts[5], reach[2], page_rows, PIECE, N, PAGE, REACH)
    mbarrier.wait(empty.index(slot), step // STAGES & 1 ^ 1)
    mbarrier.expect(full.index(slot), N * P * 128)
    if not PAGED or new:
        for panel in gl.static_range(P):
            whole = smem.index(slot * P + panel)
            tma.async_copy_global_to_shared(new_desc, [token + start, column + panel * 64], full.index(slot), whole)
    else:
        for piece in gl.static_range(N // PIECE):
            for panel in gl.static_range(P):
                own = smem.index(slot * P + panel).slice(piece * PIECE, PIECE)
                tma.async_copy_global_to_shared(page_desc, [rows[piece], column + panel * 64], full.index(slot), own)


@gluon.jit
def _bring_queries(queries, q_smem, q_full, turn, block, G: gl.constexpr, D: gl.constexpr):
    """Copy a block's queries by lanes, if there is a block: 128 // G of G heads, and zeros in the rows that are left."""
    BLOCKS: gl.constexpr = 3 if D <= 128 else 1
    P: gl.constexpr = q_smem.shape[0] // (BLOCKS * 2)
    head, token, num_new, _, first, _ = block[:6]
    q_ptr, q_st, q_sh = queries
    if num_new > 0:
        m, d = gl.arange(0, 16, gl.SliceLayout(1, ASKED)), gl.arange(0, 64, gl.SliceLayout(0, ASKED))
        parts = q_smem._reinterpret(q_smem.dtype, [BLOCKS * P * 8, 16, 64], PANEL)
        q_ptr += (token + first).to(gl.int64) * q_st + head * G * q_sh
        for part in range(M // 16):  # of 16 rows, so that few registers hold addresses
            row = part * 16 + m
            at = q_ptr + ((row // G * q_st + row % G * q_sh)[:, None] + d[None, :])
            there = (row < gl.minimum(num_new - first, M // G) * G)[:, None]
            for panel in gl.static_range(P):
                own = parts.index(((turn % BLOCKS * 2 + part // 4) * P + panel) * 4 + part % 4)
                async_copy.async_copy_global_to_shared(own, at + panel * 64, mask=there & (d < D - panel * 64)[None, :])
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()  # each lane has made its own copies visible to the matrix units
        mbarrier.arrive(q_full.index(turn % BLOCKS))


@gluon.jit
def _take_block(parts, slots_ptr, starts_ptr, lengths_ptr, part_ptr, taken_ptr, num_rows, K, G: gl.constexpr, DIVIDED: gl.constexpr):  # fmt: skip
    """Take the next block: head of keys, the row's first token, new tokens (0: there are no more blocks), past, first query, and the row's slot. DIVIDED: it is
    a part of a block, whose number, count and number among the step's follow.
    """
    BT: gl.constexpr = M // G
    item = gl.atomic_add(taken_ptr, 1, sem="relaxed")
    index, head = gl.maximum(parts - 1 - item // K, 0), item % K
    row = gl.minimum(row_of(part_ptr, index, num_rows), num_rows - 1)
    token = gl.load(starts_ptr + row)
    num_new = gl.load(starts_ptr + row + 1) - token
    past = gl.load(lengths_ptr + row) - num_new
    block = index - gl.load(part_ptr + row)
    more = ()
    if DIVIDED:
        count = (gl.load(part_ptr + row + 1) - gl.load(part_ptr + row)) // gl.maximum((num_new + BT - 1) // BT, 1)
        count = gl.maximum(count, 1)
        more = block % count, count, index
        block //= count
    first = block * BT
    table_row = gl.load(slots_ptr + row)
    num_new = gl.where(item < parts * K, num_new, 0)
    return (head, token, num_new, past, first, table_row) + more


@gluon.jit
def _bring_block(block, q_desc, q_smem, facts, q_full, q_empty, turn, taken_ptr, G: gl.constexpr, DIVIDED: gl.constexpr):  # fmt: skip
    """Leave a block's facts, and begin to bring its queries where G is a power of two. The last program leaves zeros for the next launch."""
    BT: gl.constexpr = M // G
    BLOCKS: gl.constexpr = facts.shape[0] // FACTS
    P: gl.constexpr = q_smem.shape[0] // (BLOCKS * 2)
    head, token, num_new, _, first, _ = block[:6]
    slot = turn % BLOCKS
    mbarrier.wait(q_empty.index(slot), turn // BLOCKS & 1 ^ 1)
    left = block[:5] + block[6:]
    for at in gl.static_range(8 if DIVIDED else 5):
        _leave(facts, slot, at, left[at])
    gl.thread_barrier()
    if num_new > 0:
        if G & (G - 1) == 0:
            mbarrier.expect(q_full.index(slot), M * P * 128)
            for part in gl.static_range(2 * P):
                own = q_smem.index(slot * 2 * P + part)
                tma.async_copy_global_to_shared(
                    q_desc, [token + first + part // P * (BT // 2), head * G, part % P * 64], q_full.index(slot), own
                )
    else:
        mbarrier.arrive(q_full.index(slot))
        if gl.atomic_add(taken_ptr + 1, 1) == gl.num_programs(0) - 1:
            gl.store(taken_ptr, 0)
            gl.store(taken_ptr + 1, 0)


@gluon.jit
def _copy_first(smem, full, empty, step, desc, page_desc, block, table, rows, reach, G: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
                PAGED: gl.constexpr, DIVIDED: gl.constexpr, REACH: gl.constexpr):  # fmt: skip
    """Begin to bring a block's first keys, if there is a block."""
    P: gl.constexpr = smem.shape[0] // STAGES
    N: gl.constexpr = smem.shape[1]
    head, token, num_new, past, first, table_row = block[:6]
    if num_new > 0:
        if DIVIDED:
            counts = counts_of(first, num_new, past, reach, G, N, REACH)
            i, _, _ = share_of(block[6], block[7], counts)
            row_table = table[0] + table_row.to(gl.int64) * table[1]
            _copy_tile(smem, full, empty, step, desc, page_desc, i, counts, past, token, head * D, row_table, rows, reach, PAGE, PAGED, REACH)  # fmt: skip
        else:
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), step // STAGES & 1 ^ 1)
            mbarrier.expect(full.index(slot), N * P * 128)
            for panel in gl.static_range(P):
                corner = [token + newest_tile(first, num_new, G, N) * N, head * D + panel * 64]
                tma.async_copy_global_to_shared(desc, corner, full.index(slot), smem.index(slot * P + panel))


@gluon.jit
def _copy(queries, q_desc, k_desc, v_desc, kp_desc, vp_desc, q_smem, k_smem, v_smem, facts, q_full, q_empty, k_full, k_empty, v_full, v_empty, table_ptr,
          table_st, slots_ptr, starts_ptr, lengths_ptr, part_ptr, taken_ptr, num_rows, k_rows, v_rows, reach, K, G: gl.constexpr,
          D: gl.constexpr, PAGE: gl.constexpr, PAGED: gl.constexpr, DIVIDED: gl.constexpr, REACH: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """The warp that copies: keys a tile ahead of values, as groups ask for them, and a block's first keys before the last values of the block before, if there is room for its queries."""
    AHEAD: gl.constexpr = facts.shape[0] > FACTS
    N: gl.constexpr = k_smem.shape[1]
    wait_turn(PDL)
    parts = gl.load(part_ptr + num_rows)
    step, turn = 0, 0
    block = _take_block(parts, slots_ptr, starts_ptr, lengths_ptr, part_ptr, taken_ptr, num_rows, K, G, DIVIDED)
    _bring_block(block, q_desc, q_smem, facts, q_full, q_empty, turn, taken_ptr, G, DIVIDED)
    table = table_ptr, table_st
    _copy_first(
        k_smem, k_full, k_empty, step, k_desc, kp_desc, block, table, k_rows, reach, G, D, PAGE, PAGED, DIVIDED, REACH
    )
    if G & (G - 1):
        _bring_queries(queries, q_smem, q_full, turn, block, G, D)
    while block[2] > 0:
        head, token, num_new, past, first, table_row = block[:6]
        counts = counts_of(first, num_new, past, reach, G, N, REACH)
        begin, end = 0, counts[3]
        if DIVIDED:
            begin, end, _ = share_of(block[6], block[7], counts)
        row_table, column = table_ptr + table_row.to(gl.int64) * table_st, head * D
        for i in range(begin + 1, end):
            _copy_tile(k_smem, k_full, k_empty, step + i - begin, k_desc, kp_desc, i, counts, past, token, column, row_table, k_rows, reach, PAGE, PAGED, REACH)  # fmt: skip
            _copy_tile(v_smem, v_full, v_empty, step + i - begin - 1, v_desc, vp_desc, i - 1, counts, past, token, column, row_table, v_rows, reach, PAGE, PAGED, REACH)  # fmt: skip
        turn += 1
        block = _take_block(parts, slots_ptr, starts_ptr, lengths_ptr, part_ptr, taken_ptr, num_rows, K, G, DIVIDED)
        last, step = end - 1, step + end - begin
        if not AHEAD:
            _copy_tile(v_smem, v_full, v_empty, step - 1, v_desc, vp_desc, last, counts, past, token, column, row_table, v_rows, reach, PAGE, PAGED, REACH)  # fmt: skip
        _bring_block(block, q_desc, q_smem, facts, q_full, q_empty, turn, taken_ptr, G, DIVIDED)
        _copy_first(
            k_smem,
            k_full,
            k_empty,
            step,
            k_desc,
            kp_desc,
            block,
            table,
            k_rows,
            reach,
            G,
            D,
            PAGE,
            PAGED,
            DIVIDED,
            REACH,
        )
        if AHEAD:
            _copy_tile(v_smem, v_full, v_empty, step - 1, v_desc, vp_desc, last, counts, past, token, column, row_table, v_rows, reach, PAGE, PAGED, REACH)  # fmt: skip
        if G & (G - 1):
            _bring_queries(queries, q_smem, q_full, turn, block, G, D)


@gluon.jit
def _wait_values(v_parts, v_full, step, oldest, valid, N: gl.constexpr, REACH: gl.constexpr):
    """Wait for a tile's values, of which those from `oldest` (0 without a REACH) to `valid` exist. The others are made zeros by both groups: by each before it multiplies them."""
    P: gl.constexpr = v_parts.shape[0] // (STAGES * N // 16)
    slot = step % STAGES
    mbarrier.wait(v_full.index(slot), step // STAGES & 1)
    some, first, last = valid < N, valid // 16, N // 16
    if REACH:
        some = some | (oldest > 0)
        first = gl.where(oldest > 0, 0, first)
        last = gl.where(valid < N, last, (oldest + 15) // 16)
    if some:
        for part in range(first, last):
            rows = part * 16 + gl.arange(0, 16, gl.SliceLayout(1, CLEARED))
            there = rows < valid
            if REACH:
                there = there & (rows >= oldest)
            for panel in gl.static_range(P):
                own = v_parts.index((slot * P + panel) * (N // 16) + part)
                own.store(gl.where(there[:, None], own.load(CLEARED), 0.0))
        fence_async_shared()
        gl.thread_barrier()


@gluon.jit
def _begin_scores(q, k_smem, step):
    """Begin to multiply a tile's keys, which are there."""
    N: gl.constexpr = k_smem.shape[1]
    k = k_smem.index(step % STAGES)
    SUM: gl.constexpr = SUMS[N // 64 - 1]
    room = gl.zeros([64, N], gl.float32, SUM)
    return warpgroup_mma(q, k.permute((1, 0)), room, use_acc=False, is_async=True)


@gluon.jit
def _weigh(scores, highest, total, factor):
    """Weights of a tile's keys, and what earlier sums are multiplied by."""
    new = gl.maximum(highest, gl.max(scores, 1) * factor)
    weights = gl.exp2(scores * factor - new[:, None])
    shrink = gl.exp2(highest - new)
    return weights, new, total * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def _computed(weights):
    """The weights, which the compiler has to have computed before what follows."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [weights], dtype=weights.dtype, is_pure=False, pack=2)


@gluon.jit
def _seen(scores, first_M, last_M, REACH: gl.constexpr):
    """Scores of the keys that each query sees."""
    SUM: gl.constexpr = SUMS[scores.shape[1] // 64 - 1]
    n = gl.arange(0, scores.shape[1], gl.SliceLayout(0, SUM))
    seen = n[None, :] <= last_M[:, None]
    if REACH:
        seen = seen & (n[None, :] >= first_M[:, None])
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def _capped(scores, bend, SOFTCAP: gl.constexpr):
    """Scores in units of the soft cap, if there is one: hyperbolic tangents. `bend`: what a product is multiplied by in a power of two."""
    if SOFTCAP:
        scores = 1.0 - 2.0 / (1.0 + gl.exp2(scores * bend))
    return scores


@gluon.jit
def _factor(highest, weight, c, block, sinks_ptr, ROWS: gl.constexpr, G: gl.constexpr, SINKS: gl.constexpr):
    """What weighted values are multiplied by: one over the total weight, in which the heads' sinks count."""
    factor = gl.full([64], 1.0, gl.float32, ROWS)
    if SINKS:
        sink = gl.load(sinks_ptr + block[0] * G + (c * 64 + gl.arange(0, 64, ROWS)) % G).to(gl.float32) * LOG2E
        new = gl.maximum(highest, sink)
        factor = gl.exp2(highest - new)
        weight = weight * factor + gl.exp2(sink - new)
    return factor / gl.where(weight > 0, weight, 1.0)


@gluon.jit
def _store_part(acc, highest, weight, c, block, divided, SUM: gl.constexpr, G: gl.constexpr, D: gl.constexpr):
    """What a part leaves of a block, as `kernels.paged_parts` reads it. Returns whether it is the whole block, of which nothing is left."""
    head, _, num_new, _, first, _, parts, index = block
    values_ptr, sums_ptr, K = divided
    m, d = c * 64 + gl.arange(0, 64, gl.SliceLayout(1, SUM)), gl.arange(0, acc.shape[1], gl.SliceLayout(0, SUM))
    place, there = (index * K + head).to(gl.int64) * M + m, m < gl.minimum(num_new - first, M // G) * G
    if parts > 1:
        gl.store(values_ptr + (place * D)[:, None] + d[None, :], acc, mask=there[:, None] & (d < D)[None, :])
        gl.store(sums_ptr + place * 2, gl.convert_layout(highest, gl.SliceLayout(1, SUM)), mask=there)
        gl.store(sums_ptr + place * 2 + 1, gl.convert_layout(weight, gl.SliceLayout(1, SUM)), mask=there)
    return parts == 1


@gluon.jit
def _write(values, c, block, out, LAYOUT: gl.constexpr, G: gl.constexpr, D: gl.constexpr):
    """A group's results, by lanes."""
    head, token, num_new, _, first = block[:5]
    _, out_ptr, out_st, out_sh = out
    m = c * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, values.shape[1], gl.SliceLayout(0, LAYOUT))
    out_at = out_ptr + ((token + first + m // G).to(gl.int64) * out_st + (head * G + m % G) * out_sh)[:, None]
    there = m < gl.minimum(num_new - first, M // G) * G
    gl.store(out_at + d[None, :], values, mask=there[:, None] & (d < D)[None, :])


@gluon.jit
def _leave_results(acc, c, q_smem, slot, block, out, G: gl.constexpr, D: gl.constexpr):
    """Results go where the block's queries were, if other queries can't be there yet, and from there in bulk, if all of the group's tokens are the row's and G is a power of two."""
    P: gl.constexpr = acc.shape[1] // 64
    head, token, num_new, _, first = block[:5]
    results, at = acc.to(q_smem.dtype), slot * 2 + c
    if P > 2:
        _write(gl.convert_layout(results, WRITTEN), c, block, out, WRITTEN, G, D)
    else:
        room = q_smem._reinterpret(q_smem.dtype, [q_smem.shape[0] // P, 64, P * 64], PANEL).index(at)
        room.store(results)
        own = first + c * (64 // G)
        if (own + 64 // G <= num_new) & (G & (G - 1) == 0):
            fence_async_shared()
            gl.thread_barrier()
            for panel in gl.static_range(P):
                tma.async_copy_shared_to_global(out[0], [token + own, head * G, panel * 64], q_smem.index(at * P + panel))  # fmt: skip
        else:
            _write(room.load(STORED), c, block, out, STORED, G, D)


@gluon.jit
def _first_tile(q, tiles, met, step, bounds, factors, REACH: gl.constexpr, SOFTCAP: gl.constexpr):
    """The same for the first tile, before which there is none: what is carried to the next."""
    k_tiles, v_tiles = tiles
    k_full, k_empty, _ = met
    SCORES: gl.constexpr = SUMS[k_tiles.shape[1] // 64 - 1]
    D: gl.constexpr = v_tiles.shape[2]
    SUM: gl.constexpr = SUMS[D // 64 - 1]
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    mbarrier.wait(k_full.index(step % STAGES), step // STAGES & 1)
    scores = _begin_scores(q, k_tiles, step)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(k_empty.index(step % STAGES))
    scores = _seen(_capped(scores, factors[1], SOFTCAP), *bounds, REACH)
    highest, weight = gl.full([64], LOWEST, gl.float32, ROWS), gl.zeros([64], gl.float32, ROWS)
    weights, highest, weight, _ = _weigh(scores, highest, weight, factors[0])
    p = gl.convert_layout(weights.to(q.dtype), gl.DotOperandLayout(0, SUM, 2))
    return p, gl.zeros([64, D], gl.float32, SUM), highest, weight


@gluon.jit
def _next_tile(q, tiles, met, step, carried, bounds, more, factors, MASKED: gl.constexpr, REACH: gl.constexpr, SOFTCAP: gl.constexpr):  # fmt: skip
    """Multiply the keys of a tile, and the values of the tile before, with the weights that are carried. Weights of the tile are computed meanwhile. `bounds`, if
    MASKED: the first and the last key that each query sees. `more`: another tile follows.
    """
    k_tiles, v_tiles = tiles
    k_full, k_empty, v_empty = met
    p, acc, highest, weight = carried
    factor, bend = factors
    SUM: gl.constexpr = SUMS[acc.shape[1] // 64 - 1]
    scores = _begin_scores(q, k_tiles, step)
    sums = warpgroup_mma(p, v_tiles.index((step - 1) % STAGES), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(k_empty.index(step % STAGES))
    scores = _capped(scores, bend, SOFTCAP)
    if MASKED:
        scores = _seen(scores, *bounds, REACH)
    weights, highest, weight, shrink = _weigh(scores, highest, weight, factor)
    p = _computed(gl.convert_layout(weights.to(p.dtype), gl.DotOperandLayout(0, SUM, 2)))
    mbarrier.wait(k_full.index((step + 1) % STAGES), (step + 1) // STAGES & 1, pred=more)
    acc = warpgroup_mma_wait(0, deps=(sums,))
    mbarrier.arrive(v_empty.index((step - 1) % STAGES))
    return p, acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUM))[:, None], highest, weight


@gluon.jit
def _compute(c, q_smem, k_smem, v_smem, facts, q_full, q_empty, k_full, k_empty, v_full, v_empty, out_desc, out_ptr, out_st, out_sh, divided, sinks_ptr, scale, softcap, reach, G: gl.constexpr,
             D: gl.constexpr, DIVIDED: gl.constexpr, SINKS: gl.constexpr, SOFTCAP: gl.constexpr, REACH: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """One group of four warps: 64 rows of each of the program's blocks."""
    dtype: gl.constexpr = v_smem.dtype
    P: gl.constexpr = v_smem.shape[0] // STAGES
    N: gl.constexpr = v_smem.shape[1]
    BLOCKS: gl.constexpr = facts.shape[0] // FACTS
    SUM: gl.constexpr = SUMS[P - 1]
    SCORES: gl.constexpr = SUMS[N // 64 - 1]
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    factors = scale * LOG2E, 0.0
    if SOFTCAP:
        factors = softcap * LOG2E, 2.0 * LOG2E * scale / softcap
    wait_turn(PDL)
    k_tiles = k_smem._reinterpret(dtype, [STAGES, N, P * 64], PANEL)
    v_tiles = v_smem._reinterpret(dtype, [STAGES, N, P * 64], PANEL)
    v_parts = v_smem._reinterpret(dtype, [STAGES * P * N // 16, 16, 64], PANEL)
    q_tiles = q_smem._reinterpret(dtype, [BLOCKS * 2, 64, P * 64], PANEL)
    tiles, met = (k_tiles, v_tiles), (k_full, k_empty, v_empty)
    query_M, step, turn = (c * 64 + gl.arange(0, 64, ROWS)) // G, 0, 0
    block = _next_block(facts, q_full, turn, DIVIDED)
    while block[2] > 0:
        past = block[3]
        found = masks_of(block, query_M, reach, G, N, DIVIDED, REACH)
        last_M, there, across, partial, total, begin, counts, tail, oldest_M = found
        q = q_tiles.index(turn % BLOCKS * 2 + c)
        bounds = reached(oldest_M, begin, counts, past, N, REACH), last_M
        carried = _first_tile(q, tiles, met, step, bounds, factors, REACH, SOFTCAP)
        if BLOCKS > 1:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index((turn + BLOCKS - 1) % BLOCKS), pred=turn > 0)
        mbarrier.wait(k_full.index((step + 1) % STAGES), (step + 1) // STAGES & 1, pred=total > 1)
        _wait_values(v_parts, v_full, step, 0, there, N, REACH)
        for masked in range(across + partial):
            step += 1
            if N % (M // G):
                mbarrier.wait(v_full.index((step - 1) % STAGES), (step - 1) // STAGES & 1)
            last = gl.full([64], past % N - 1, gl.int32, ROWS)
            if N % (M // G):
                last = gl.where(masked < across, last_M + N, last)
            bounds = reached(oldest_M, begin + 1 + masked, counts, past, N, REACH), last
            carried = _next_tile(q, tiles, met, step, carried, bounds, total > 2 + masked, factors, True, REACH, SOFTCAP)  # fmt: skip
        if partial > 0:
            _wait_values(v_parts, v_full, step, older_in_partial(counts, past, N, REACH), past % N, N, REACH)
        for i in range(1 + across + partial, total - tail):
            step += 1
            mbarrier.wait(v_full.index((step - 1) % STAGES), (step - 1) // STAGES & 1)
            carried = _next_tile(q, tiles, met, step, carried, (), i + 1 < total, factors, False, REACH, SOFTCAP)
        if REACH:
            for i in range(total - tail, total):
                step += 1
                mbarrier.wait(v_full.index((step - 1) % STAGES), (step - 1) // STAGES & 1)
                bounds = reached(oldest_M, begin + i, counts, past, N, REACH), gl.full([64], N, gl.int32, ROWS)
                carried = _next_tile(q, tiles, met, step, carried, bounds, i + 1 < total, factors, True, REACH, SOFTCAP)
        if BLOCKS == 1:
            mbarrier.arrive(q_empty.index(0))
        if REACH:
            _wait_values(v_parts, v_full, step, older_in_last(begin + total, counts, N), N, N, REACH)
        else:
            mbarrier.wait(v_full.index(step % STAGES), step // STAGES & 1)
        p, acc, highest, weight = carried
        sums = warpgroup_mma(p, v_tiles.index(step % STAGES), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(v_empty.index(step % STAGES))
        step += 1
        whole = True
        if DIVIDED:
            whole = _store_part(acc, highest, weight, c, block, divided, SUM, G, D)
        if whole:
            over = _factor(highest, weight, c, block, sinks_ptr, ROWS, G, SINKS)
            results = acc * gl.convert_layout(over, gl.SliceLayout(1, SUM))[:, None]
            _leave_results(results, c, q_smem, turn % BLOCKS, block, (out_desc, out_ptr, out_st, out_sh), G, D)
        turn += 1
        block = _next_block(facts, q_full, turn, DIVIDED)
    tma.store_wait(0)


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """So many barriers in shared memory, each of which ends a phase after so many arrivals."""
    found = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(found.index(i), count=arrivals)
    return found


@gluon.jit(do_not_specialize=["num_rows", "width", "window", "chunk", "K"])
def gluon_prefill_kernel(q_desc, q_ptr, q_st, q_sh, k_desc, v_desc, kp_desc, vp_desc, out_desc, out_ptr, out_st, out_sh, table_ptr, table_st, slots_ptr, starts_ptr, lengths_ptr,
                         part_ptr, taken_ptr, values_ptr, sums_ptr, sinks_ptr, num_rows, k_rows, v_rows, width, window, chunk, scale, softcap, K, G: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, PAGED: gl.constexpr,
                         DIVIDED: gl.constexpr, SINKS: gl.constexpr, SOFTCAP: gl.constexpr, REACH: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """Heads of D elements, 64 to 256, in groups of G (1 to 64). `part` [R + 1] are prefix sums
    of the rows' blocks of 128 // G queries, or of parts of these if they are DIVIDED: `values` and `sums` are as in `paged_parts.merge_kernel`. `taken` [2]: zeros, before and behind. If G is no power of two, `q_desc` and `out_desc` may be anything.
    K: heads of keys. `k_rows`, `v_rows`: rows of the pages' descriptors from a page to the next. PAGED: rows may have a past. REACH: queries see the last `window` keys, or those of their `chunk`, and pages are in rings of `width`.
    """
    start_next(PDL)
    dtype: gl.constexpr = k_desc.dtype
    P: gl.constexpr = (D + 63) // 64 if D <= 128 else 4
    N: gl.constexpr = 128 if P <= 2 else 64
    BLOCKS: gl.constexpr = 3 if P <= 2 else 1
    if G & (G - 1) == 0:
        q_smem = gl.allocate_shared_memory(dtype, [BLOCKS * 2 * P, 64 // G, G, 64], q_desc.layout)
    else:
        q_smem = gl.allocate_shared_memory(dtype, [BLOCKS * 2 * P, 64, 64], PANEL)
    facts = gl.allocate_shared_memory(gl.int32, [BLOCKS * FACTS, 1], FACT)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES * P, N, 64], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES * P, N, 64], v_desc.layout)
    k_full, k_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    v_full, v_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    q_full, q_empty = barriers(BLOCKS, 1), barriers(BLOCKS, 2)
    fence_async_shared()
    divided, reach = (values_ptr, sums_ptr, K), (window, chunk, width)
    c0, c1 = gl.to_tensor(0), gl.to_tensor(1)  # not constants, so that a group's code is translated once
    gl.warp_specialize([
        (_compute, (c0, q_smem, k_smem, v_smem, facts, q_full, q_empty, k_full, k_empty, v_full, v_empty, out_desc, out_ptr, out_st, out_sh, divided, sinks_ptr, scale, softcap, reach, G, D, DIVIDED, SINKS, SOFTCAP, REACH, PDL)),
        (_compute, (c1, q_smem, k_smem, v_smem, facts, q_full, q_empty, k_full, k_empty, v_full, v_empty, out_desc, out_ptr, out_st, out_sh, divided, sinks_ptr, scale, softcap, reach, G, D, DIVIDED, SINKS, SOFTCAP, REACH, PDL)),
        (_copy, ((q_ptr, q_st, q_sh), q_desc, k_desc, v_desc, kp_desc, vp_desc, q_smem, k_smem, v_smem, facts, q_full, q_empty, k_full, k_empty, v_full, v_empty, table_ptr,
                 table_st, slots_ptr, starts_ptr, lengths_ptr, part_ptr, taken_ptr, num_rows, k_rows, v_rows, reach, K, G, D, PAGE, PAGED, DIVIDED, REACH, PDL)),
    ], [4, 1], [240, 24])  # fmt: skip
