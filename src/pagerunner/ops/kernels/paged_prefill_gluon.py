"""Prefill attention on Hopper, in Gluon: Triton's language with layouts that the program chooses.

`kernels/paged_prefill.py` says what a block is, and computes the same with plain Triton on any device. Here

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

Tiles that not all of a block's queries see come first: those of the newest tokens, then the end of the past. All others need no mask.
Values of keys that don't exist are made zeros before they are multiplied: what lies there may be no number.

Heads have D elements, 64 to 128, and lie in P panels of 64. What is in a panel beyond a head's end is the next head's: it is multiplied with zeros, or isn't stored.

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

LOWEST = gl.constexpr(-1.0e30)
LOG2E = gl.constexpr(1.4426950408889634)
N = gl.constexpr(128)
"""Keys of a tile, and rows of a block."""
STAGES = gl.constexpr(2)
"""Tiles of keys and of values at once."""
BLOCKS = gl.constexpr(3)
"""Blocks of queries and results at once."""
FACTS = gl.constexpr(8)
"""Room for what is known of a block: head of keys, first token of the row, new tokens (0: there are no more blocks), past, first query; and of a part of it: its number
among the block's, how many these are, and its number among the step's."""
FACT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PANEL = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
"""Tiles in shared memory, in panels of 64 elements of a head."""
QUERIES = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))
"""Queries as they are copied: tokens, heads, 64 elements."""
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
RESULTS = gl.constexpr((gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]), SUMS.value))
"""Of heads in one panel, and in two."""
STORED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
CLEARED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
ASKED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))
"""Queries as the lanes of one warp copy them."""


@gluon.jit
def _row_of(part_ptr, part, num_rows):
    """Whose part this is, of prefix sums [R + 1] of the rows' parts."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    row = gl.to_tensor(0)
    for start in range(0, num_rows, 256):
        i = start + gl.arange(0, 256, layout)
        ends = gl.load(part_ptr + 1 + i, mask=i < num_rows, other=0x7FFFFFFF)
        row += gl.sum((ends <= part).to(gl.int32), 0)
    return row


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
    slot = turn % BLOCKS
    mbarrier.wait(q_full.index(slot), turn // BLOCKS & 1)
    block = ()
    for at in gl.static_range(8 if DIVIDED else 5):
        block = block + (_fact(facts, slot, at),)
    return block


@gluon.jit
def _newest(first, num_new, G: gl.constexpr):
    """The tile of the newest token that a block's queries see."""
    if G & (G - 1) == 0:  # a block's queries are in one tile
        tile = first // N
    else:
        tile = (gl.minimum(first + N // G, num_new) - 1) // N
    return tile


@gluon.jit
def _counts(first, num_new, past, G: gl.constexpr):
    """Tiles of a block: those before its newest tokens' that not all its queries see (0 or 1), of an incomplete end of the past (0 or 1), of new tokens
    before the newest, and all.
    """
    partial, diagonal = (past % N != 0).to(gl.int32), _newest(first, num_new, G)
    across = diagonal - first // N
    return across, partial, diagonal, 1 + partial + diagonal + past // N


@gluon.jit
def _share(part, parts, counts):
    """The tiles that a part of a block has: the first, and the one behind the last. The first part has all that need masks. A part for which
    there are none has one too, of which it sees nothing: then the last number is 0.
    """
    across, partial, _, total = counts
    masked, each = 1 + across + partial, (total + parts - 1) // parts
    begin = gl.where(part > 0, gl.minimum(gl.maximum(part * each, masked), total), 0)
    end = gl.minimum(gl.maximum((part + 1) * each, masked), total)
    first = gl.minimum(begin, total - 1)
    return first, gl.maximum(end, first + 1), (begin < end).to(gl.int32)


@gluon.jit
def _masks(block, query_M, G: gl.constexpr, DIVIDED: gl.constexpr):
    """Of a block, or of a part of it: the last key of its first tile that each query sees, how many of this tile exist, how many tiles behind it need masks
    because not all queries see them (0 or 1) and as the end of the past (0 or 1), and how many tiles there are.
    """
    _, _, num_new, past, first = block[:5]
    counts = _counts(first, num_new, past, G)
    across, partial, diagonal, total = counts
    last_M, there = first - diagonal * N + query_M, num_new - diagonal * N
    if DIVIDED:
        begin, end, some = _share(block[5], block[6], counts)
        total = end - begin
        there = gl.where(begin == 0, there, gl.where((partial > 0) & (begin == across + 1), past % N, N))
        last_M = gl.where(block[5] == 0, last_M, some * N - 1)
        across, partial = gl.where(block[5] == 0, across, 0), gl.where(block[5] == 0, partial, 0)
    return last_M, there, across, partial, total


@gluon.jit
def _tile(i, counts, past):
    """Whether a block's i-th tile is of new tokens, and the first of its keys among these or in the past."""
    across, partial, diagonal, _ = counts
    at = i - 1 - gl.where(i > across, partial, 0)
    end = (i == across + 1) & (partial > 0)
    new = (i == 0) | ((at < diagonal) & (i > 0) & (end == 0))
    tile = past // N
    if i == 0:
        tile = diagonal
    elif end == 0:
        tile = gl.where(at < diagonal, diagonal - 1 - at, past // N - 1 - (at - diagonal))
    return new, tile * N


@gluon.jit
def _entries(row_table, start, past, PAGE: gl.constexpr):
    """The pages of a tile of the past; beyond the row's last one that one. All loads are on their way together, and each gives a number
    to all lanes: to take a page's from another lane takes longer than its copy.
    """
    found = ()
    for page in gl.static_range(N // PAGE):
        at = row_table + gl.minimum(start // PAGE + page, (past - 1) // PAGE)
        found = found + (gl.load(at, mask=past > 0, other=0).to(gl.int32),)
    return found


@gluon.jit
def _copy_tile(smem, full, empty, step, new_desc, page_desc, i, counts, past, token, column, row_table, page_rows, PAGE: gl.constexpr,
               PAGED: gl.constexpr):  # fmt: skip
    """Begin to bring a block's i-th tile of keys or of values."""
    P: gl.constexpr = smem.shape[0] // STAGES
    new, start = _tile(i, counts, past)
    slot = step % STAGES
    if PAGED:
        entries = _entries(row_table, start, past, PAGE)
    mbarrier.wait(empty.index(slot), step // STAGES & 1 ^ 1)
    mbarrier.expect(full.index(slot), N * P * 128)
    if not PAGED or new:
        for panel in gl.static_range(P):
            whole = smem.index(slot * P + panel)
            tma.async_copy_global_to_shared(new_desc, [token + start, column + panel * 64], full.index(slot), whole)
    else:
        for page in gl.static_range(N // PAGE):
            entry = entries[page] * page_rows
            for panel in gl.static_range(P):
                own = smem.index(slot * P + panel).slice(page * PAGE, PAGE)
                tma.async_copy_global_to_shared(page_desc, [entry, column + panel * 64], full.index(slot), own)


@gluon.jit
def _bring_queries(queries, q_smem, q_full, turn, block, G: gl.constexpr, D: gl.constexpr):
    """Copy a block's queries by lanes, if there is a block: 128 // G of G heads, and zeros in the rows that are left."""
    P: gl.constexpr = q_smem.shape[0] // (BLOCKS * 2)
    head, token, num_new, _, first, _ = block[:6]
    q_ptr, q_st, q_sh = queries
    if num_new > 0:
        m, d = gl.arange(0, 16, gl.SliceLayout(1, ASKED)), gl.arange(0, 64, gl.SliceLayout(0, ASKED))
        parts = q_smem._reinterpret(q_smem.dtype, [BLOCKS * P * 8, 16, 64], PANEL)
        q_ptr += (token + first).to(gl.int64) * q_st + head * G * q_sh
        for part in range(N // 16):  # of 16 rows, so that few registers hold addresses
            row = part * 16 + m
            at = q_ptr + ((row // G * q_st + row % G * q_sh)[:, None] + d[None, :])
            there = (row < gl.minimum(num_new - first, N // G) * G)[:, None]
            for panel in gl.static_range(P):
                own = parts.index(((turn % BLOCKS * 2 + part // 4) * P + panel) * 4 + part % 4)
                async_copy.async_copy_global_to_shared(own, at + panel * 64, mask=there & (d < D - panel * 64)[None, :])
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()  # each lane has made its own copies visible to the matrix units
        mbarrier.arrive(q_full.index(turn % BLOCKS))


@gluon.jit
def _begin_block(parts, q_desc, q_smem, facts, q_full, q_empty, turn, slots_ptr, starts_ptr, lengths_ptr, part_ptr, taken_ptr, num_rows, K,
                 G: gl.constexpr, DIVIDED: gl.constexpr):  # fmt: skip
    """Take the next block, begin to bring its queries where G is a power of two, and leave its facts: head of keys, the row's first token, new tokens
    (0: there are no more blocks), past, first query. Returns these, and the row's slot. The last program leaves zeros for the next launch. DIVIDED: it is a part
    of a block, whose number and count are facts and returned too.
    """
    BT: gl.constexpr = N // G
    P: gl.constexpr = q_smem.shape[0] // (BLOCKS * 2)
    item = gl.atomic_add(taken_ptr, 1, sem="relaxed")
    index, head = gl.maximum(parts - 1 - item // K, 0), item % K
    row = gl.minimum(_row_of(part_ptr, index, num_rows), num_rows - 1)
    token = gl.load(starts_ptr + row)
    num_new = gl.load(starts_ptr + row + 1) - token
    past = gl.load(lengths_ptr + row) - num_new
    block = index - gl.load(part_ptr + row)
    if DIVIDED:
        count = (gl.load(part_ptr + row + 1) - gl.load(part_ptr + row)) // gl.maximum((num_new + BT - 1) // BT, 1)
        count = gl.maximum(count, 1)
        mine = block % count
        block //= count
    first = block * BT
    table_row = gl.load(slots_ptr + row)
    num_new = gl.where(item < parts * K, num_new, 0)
    slot = turn % BLOCKS
    mbarrier.wait(q_empty.index(slot), turn // BLOCKS & 1 ^ 1)
    left = head, token, num_new, past, first
    more = ()
    if DIVIDED:
        left, more = left + (mine, count, index), (mine, count)
    for at in gl.static_range(8 if DIVIDED else 5):
        _leave(facts, slot, at, left[at])
    gl.thread_barrier()
    if num_new > 0:
        if G & (G - 1) == 0:
            mbarrier.expect(q_full.index(slot), N * P * 128)
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
    return (head, token, num_new, past, first, table_row) + more


@gluon.jit
def _copy_first(smem, full, empty, step, desc, page_desc, block, table, rows, G: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
                PAGED: gl.constexpr, DIVIDED: gl.constexpr):  # fmt: skip
    """Begin to bring a block's first keys, if there is a block."""
    P: gl.constexpr = smem.shape[0] // STAGES
    head, token, num_new, past, first, table_row = block[:6]
    if num_new > 0:
        if DIVIDED:
            counts = _counts(first, num_new, past, G)
            i, _, _ = _share(block[6], block[7], counts)
            row_table = table[0] + table_row.to(gl.int64) * table[1]
            _copy_tile(smem, full, empty, step, desc, page_desc, i, counts, past, token, head * D, row_table, rows, PAGE, PAGED)  # fmt: skip
        else:
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), step // STAGES & 1 ^ 1)
            mbarrier.expect(full.index(slot), N * P * 128)
            for panel in gl.static_range(P):
                corner = [token + _newest(first, num_new, G) * N, head * D + panel * 64]
                tma.async_copy_global_to_shared(desc, corner, full.index(slot), smem.index(slot * P + panel))


@gluon.jit
def _copy(queries, q_desc, k_desc, v_desc, kp_desc, vp_desc, q_smem, k_smem, v_smem, facts, q_full, q_empty, k_full, k_empty, v_full, v_empty, table_ptr,
          table_st, slots_ptr, starts_ptr, lengths_ptr, part_ptr, taken_ptr, num_rows, k_rows, v_rows, K, G: gl.constexpr,
          D: gl.constexpr, PAGE: gl.constexpr, PAGED: gl.constexpr, DIVIDED: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """The warp that copies: keys a tile ahead of values, as groups ask for them, and a block's first keys before the last values of the block before."""
    wait_turn(PDL)
    parts = gl.load(part_ptr + num_rows)
    step, turn = 0, 0
    block = _begin_block(parts, q_desc, q_smem, facts, q_full, q_empty, turn, slots_ptr, starts_ptr, lengths_ptr, part_ptr, taken_ptr, num_rows, K, G, DIVIDED)  # fmt: skip
    table = table_ptr, table_st
    _copy_first(k_smem, k_full, k_empty, step, k_desc, kp_desc, block, table, k_rows, G, D, PAGE, PAGED, DIVIDED)
    if G & (G - 1):
        _bring_queries(queries, q_smem, q_full, turn, block, G, D)
    while block[2] > 0:
        head, token, num_new, past, first, table_row = block[:6]
        counts = _counts(first, num_new, past, G)
        begin, end = 0, counts[3]
        if DIVIDED:
            begin, end, _ = _share(block[6], block[7], counts)
        row_table, column = table_ptr + table_row.to(gl.int64) * table_st, head * D
        for i in range(begin + 1, end):
            _copy_tile(k_smem, k_full, k_empty, step + i - begin, k_desc, kp_desc, i, counts, past, token, column, row_table, k_rows, PAGE, PAGED)  # fmt: skip
            _copy_tile(v_smem, v_full, v_empty, step + i - begin - 1, v_desc, vp_desc, i - 1, counts, past, token, column, row_table, v_rows, PAGE, PAGED)  # fmt: skip
        turn += 1
        block = _begin_block(parts, q_desc, q_smem, facts, q_full, q_empty, turn, slots_ptr, starts_ptr, lengths_ptr, part_ptr, taken_ptr, num_rows, K, G, DIVIDED)  # fmt: skip
        last, step = end - 1, step + end - begin
        _copy_first(k_smem, k_full, k_empty, step, k_desc, kp_desc, block, table, k_rows, G, D, PAGE, PAGED, DIVIDED)
        _copy_tile(v_smem, v_full, v_empty, step - 1, v_desc, vp_desc, last, counts, past, token, column, row_table, v_rows, PAGE, PAGED)  # fmt: skip
        if G & (G - 1):
            _bring_queries(queries, q_smem, q_full, turn, block, G, D)


@gluon.jit
def _wait_values(v_parts, v_full, step, valid):
    """Wait for a tile's values, of which `valid` exist. The others are made zeros by both groups: by each before it multiplies them."""
    P: gl.constexpr = v_parts.shape[0] // (STAGES * N // 16)
    slot = step % STAGES
    mbarrier.wait(v_full.index(slot), step // STAGES & 1)
    if valid < N:
        for part in range(valid // 16, N // 16):
            rows = part * 16 + gl.arange(0, 16, gl.SliceLayout(1, CLEARED))
            for panel in gl.static_range(P):
                own = v_parts.index((slot * P + panel) * (N // 16) + part)
                own.store(gl.where((rows < valid)[:, None], own.load(CLEARED), 0.0))
        fence_async_shared()
        gl.thread_barrier()


@gluon.jit
def _begin_scores(q, k_smem, step):
    """Begin to multiply a tile's keys, which are there."""
    k = k_smem.index(step % STAGES)
    return warpgroup_mma(q, k.permute((1, 0)), gl.zeros([64, N], gl.float32, SUMS), use_acc=False, is_async=True)


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
def _seen(scores, last_M):
    """Scores of the keys that each query sees."""
    n = gl.arange(0, N, gl.SliceLayout(0, SUMS))
    return gl.where(n[None, :] <= last_M[:, None], scores, float("-inf"))


@gluon.jit
def _store_part(acc, highest, weight, c, block, divided, SUM: gl.constexpr, G: gl.constexpr, D: gl.constexpr):
    """What a part leaves of a block, as `kernels.paged_parts` reads it. Returns whether it is the whole block, of which nothing is left."""
    head, _, num_new, _, first, _, parts, index = block
    values_ptr, sums_ptr, K = divided
    m, d = c * 64 + gl.arange(0, 64, gl.SliceLayout(1, SUM)), gl.arange(0, acc.shape[1], gl.SliceLayout(0, SUM))
    place, there = (index * K + head).to(gl.int64) * N + m, m < gl.minimum(num_new - first, N // G) * G
    if parts > 1:
        gl.store(values_ptr + (place * D)[:, None] + d[None, :], acc, mask=there[:, None] & (d < D)[None, :])
        gl.store(sums_ptr + place * 2, gl.convert_layout(highest, gl.SliceLayout(1, SUM)), mask=there)
        gl.store(sums_ptr + place * 2 + 1, gl.convert_layout(weight, gl.SliceLayout(1, SUM)), mask=there)
    return parts == 1


@gluon.jit
def _leave_results(acc, c, q_smem, slot, block, out, G: gl.constexpr, D: gl.constexpr):
    """Results go where the block's queries were, and from there in bulk, if all of the group's tokens are the row's and G is a power of two."""
    P: gl.constexpr = q_smem.shape[0] // (BLOCKS * 2)
    head, token, num_new, _, first = block[:5]
    out_desc, out_ptr, out_st, out_sh = out
    at = slot * 2 + c
    room = q_smem._reinterpret(q_smem.dtype, [BLOCKS * 2, 64, P * 64], PANEL).index(at)
    room.store(acc.to(out_ptr.dtype.element_ty))
    own = first + c * (64 // G)
    if (own + 64 // G <= num_new) & (G & (G - 1) == 0):
        fence_async_shared()
        gl.thread_barrier()
        for panel in gl.static_range(P):
            tma.async_copy_shared_to_global(out_desc, [token + own, head * G, panel * 64], q_smem.index(at * P + panel))
    else:
        m, d = c * 64 + gl.arange(0, 64, gl.SliceLayout(1, STORED)), gl.arange(0, P * 64, gl.SliceLayout(0, STORED))
        out_at = out_ptr + ((token + first + m // G).to(gl.int64) * out_st + (head * G + m % G) * out_sh)[:, None]
        there = m < gl.minimum(num_new - first, N // G) * G
        gl.store(out_at + d[None, :], room.load(STORED), mask=there[:, None] & (d < D)[None, :])


@gluon.jit
def _compute(c, q_smem, k_smem, v_smem, facts, q_full, q_empty, k_full, k_empty, v_full, v_empty, out_desc, out_ptr, out_st, out_sh, divided, scale, G: gl.constexpr,
             D: gl.constexpr, DIVIDED: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """One group of four warps: 64 rows of each of the program's blocks."""
    dtype: gl.constexpr = v_smem.dtype
    P: gl.constexpr = v_smem.shape[0] // STAGES
    SUM: gl.constexpr = RESULTS[P - 1]
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    factor = scale * LOG2E
    wait_turn(PDL)
    k_tiles = k_smem._reinterpret(dtype, [STAGES, N, P * 64], PANEL)
    v_tiles = v_smem._reinterpret(dtype, [STAGES, N, P * 64], PANEL)
    v_parts = v_smem._reinterpret(dtype, [STAGES * P * N // 16, 16, 64], PANEL)
    q_tiles = q_smem._reinterpret(dtype, [BLOCKS * 2, 64, P * 64], PANEL)
    query_M, step, turn = (c * 64 + gl.arange(0, 64, gl.SliceLayout(1, SUMS))) // G, 0, 0
    block = _next_block(facts, q_full, turn, DIVIDED)
    while block[2] > 0:
        past = block[3]
        last_M, there, across, partial, total = _masks(block, query_M, G, DIVIDED)
        q = q_tiles.index(turn % BLOCKS * 2 + c)
        mbarrier.wait(k_full.index(step % STAGES), step // STAGES & 1)
        scores = _begin_scores(q, k_tiles, step)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_empty.index(step % STAGES))
        scores = _seen(scores, last_M)
        highest = gl.full([64], LOWEST, gl.float32, gl.SliceLayout(1, SUMS))
        weight = gl.zeros([64], gl.float32, gl.SliceLayout(1, SUMS))
        weights, highest, weight, shrink = _weigh(scores, highest, weight, factor)
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index((turn + BLOCKS - 1) % BLOCKS), pred=turn > 0)
        p = gl.convert_layout(weights.to(dtype), WEIGHTS)
        acc = gl.zeros([64, P * 64], gl.float32, SUM)
        mbarrier.wait(k_full.index((step + 1) % STAGES), (step + 1) // STAGES & 1, pred=total > 1)
        _wait_values(v_parts, v_full, step, there)
        for masked in range(across + partial):
            step += 1
            if G & (G - 1):
                mbarrier.wait(v_full.index((step - 1) % STAGES), (step - 1) // STAGES & 1)
            scores = _begin_scores(q, k_tiles, step)
            sums = warpgroup_mma(p, v_tiles.index((step - 1) % STAGES), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=(scores,))
            mbarrier.arrive(k_empty.index(step % STAGES))
            last = gl.full([64], past % N - 1, gl.int32, gl.SliceLayout(1, SUMS))
            if G & (G - 1):
                last = gl.where(masked < across, last_M + N, last)
            scores = _seen(scores, last)
            weights, highest, weight, shrink = _weigh(scores, highest, weight, factor)
            p = _computed(gl.convert_layout(weights.to(dtype), WEIGHTS))
            mbarrier.wait(k_full.index((step + 1) % STAGES), (step + 1) // STAGES & 1, pred=total > 2 + masked)
            acc = warpgroup_mma_wait(0, deps=(sums,))
            mbarrier.arrive(v_empty.index((step - 1) % STAGES))
            acc *= gl.convert_layout(shrink, gl.SliceLayout(1, SUM))[:, None]
        if partial > 0:
            _wait_values(v_parts, v_full, step, past % N)
        for i in range(1 + across + partial, total):
            step += 1
            mbarrier.wait(v_full.index((step - 1) % STAGES), (step - 1) // STAGES & 1)
            scores = _begin_scores(q, k_tiles, step)
            sums = warpgroup_mma(p, v_tiles.index((step - 1) % STAGES), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=(scores,))
            mbarrier.arrive(k_empty.index(step % STAGES))
            weights, highest, weight, shrink = _weigh(scores, highest, weight, factor)
            p = _computed(gl.convert_layout(weights.to(dtype), WEIGHTS))
            mbarrier.wait(k_full.index((step + 1) % STAGES), (step + 1) // STAGES & 1, pred=i + 1 < total)
            acc = warpgroup_mma_wait(0, deps=(sums,))
            mbarrier.arrive(v_empty.index((step - 1) % STAGES))
            acc *= gl.convert_layout(shrink, gl.SliceLayout(1, SUM))[:, None]
        mbarrier.wait(v_full.index(step % STAGES), step // STAGES & 1)
        sums = warpgroup_mma(p, v_tiles.index(step % STAGES), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(v_empty.index(step % STAGES))
        step += 1
        whole = True
        if DIVIDED:
            whole = _store_part(acc, highest, weight, c, block, divided, SUM, G, D)
        if whole:
            results = acc * gl.convert_layout(1.0 / gl.where(weight > 0, weight, 1.0), gl.SliceLayout(1, SUM))[:, None]
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


@gluon.jit(do_not_specialize=["num_rows", "K"])
def gluon_prefill_kernel(q_desc, q_ptr, q_st, q_sh, k_desc, v_desc, kp_desc, vp_desc, out_desc, out_ptr, out_st, out_sh, table_ptr, table_st, slots_ptr, starts_ptr, lengths_ptr,
                         part_ptr, taken_ptr, values_ptr, sums_ptr, num_rows, k_rows, v_rows, scale, K, G: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, PAGED: gl.constexpr,
                         DIVIDED: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """Heads of D elements, 64 to 128, in groups of G (1 to 64), without windows, sinks or soft caps. `part` [R + 1] are prefix sums
    of the rows' blocks of 128 // G queries, or of parts of these if they are DIVIDED: `values` and `sums` are as in `paged_parts.merge_kernel`. `taken` [2]: zeros, before and behind. If G is no power of two, `q_desc` and `out_desc` may be anything.
    K: heads of keys. `k_rows`, `v_rows`: rows of the pages' descriptors from a page to the next. PAGED: rows may have a past.
    """
    start_next(PDL)
    dtype: gl.constexpr = k_desc.dtype
    P: gl.constexpr = (D + 63) // 64
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
    divided = values_ptr, sums_ptr, K
    c0, c1 = gl.to_tensor(0), gl.to_tensor(1)  # not constants, so that a group's code is translated once
    gl.warp_specialize([
        (_compute, (c0, q_smem, k_smem, v_smem, facts, q_full, q_empty, k_full, k_empty, v_full, v_empty, out_desc, out_ptr, out_st, out_sh, divided, scale, G, D, DIVIDED, PDL)),
        (_compute, (c1, q_smem, k_smem, v_smem, facts, q_full, q_empty, k_full, k_empty, v_full, v_empty, out_desc, out_ptr, out_st, out_sh, divided, scale, G, D, DIVIDED, PDL)),
        (_copy, ((q_ptr, q_st, q_sh), q_desc, k_desc, v_desc, kp_desc, vp_desc, q_smem, k_smem, v_smem, facts, q_full, q_empty, k_full, k_empty, v_full, v_empty, table_ptr,
                 table_st, slots_ptr, starts_ptr, lengths_ptr, part_ptr, taken_ptr, num_rows, k_rows, v_rows, K, G, D, PAGE, PAGED, DIVIDED, PDL)),
    ], [4, 1], [240, 24])  # fmt: skip
