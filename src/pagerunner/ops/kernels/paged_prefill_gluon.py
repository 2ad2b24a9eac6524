"""Prefill attention on Hopper, in Gluon: Triton's language with layouts that the program chooses.

`kernels/paged_prefill.py` says what a block is, and computes the same with plain Triton on any device. Here

* A program takes the next block before it copies a block's last values, so that its queries and first keys are there in time. Those with most keys
  come first, so that programs end at about the same time.
* One warp copies, in bulk: a block's queries, and tiles of 128 keys and values, two of each ahead. Tiles of the past come from pages, a page at a time.
  It is the one that takes blocks, and leaves beside a block's queries what the other warps must know of it.
* Two groups of four warps have 64 rows of a block each. A group's scores of a tile are multiplied while its values of the tile before are, so that
  one group multiplies while the other one computes weights (FlashAttention-3, arXiv 2407.08608). Barriers by which the groups take turns brought
  nothing. Results go where a block's queries were, and are copied in bulk from there.
* A group of warps has 64 // G queries of G heads. Where G is no power of two, lanes copy queries and store results, as boxes of the copy engine are powers of two.
  Example: 12 queries of 5 heads are 60 of the 64 rows.

Tiles that not all of a block's queries see come first: those of the newest tokens, then the end of the past. All others need no mask.
Values of keys that don't exist are made zeros before they are multiplied: what lies there may be no number.

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
"""Keys of a tile, rows of a block, and elements of a head."""
STAGES = gl.constexpr(2)
"""Tiles of keys and of values at once."""
BLOCKS = gl.constexpr(3)
"""Blocks of queries and results at once."""
FACTS = gl.constexpr(8)
"""Room for what is known of a block: head of keys, first token of the row, new tokens (0: there are no more blocks), past, first query."""
FACT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PANEL = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
"""Tiles in shared memory, in panels of 64 elements of a head."""
QUERIES = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))
"""Queries as they are copied: tokens, heads, 64 elements."""
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, SUMS, 2))
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
def _next_block(facts, q_full, turn):
    """Wait for a block and its queries: its facts."""
    slot = turn % BLOCKS
    mbarrier.wait(q_full.index(slot), turn // BLOCKS & 1)
    token, num_new, past = _fact(facts, slot, 1), _fact(facts, slot, 2), _fact(facts, slot, 3)
    return _fact(facts, slot, 0), token, num_new, past, _fact(facts, slot, 4)


@gluon.jit
def _newest(first, num_new, G: gl.constexpr):
    """The tile of the newest token that a block's queries see."""
    if G & (G - 1) == 0:  # a block's queries are in one tile
        tile = first // N
    else:
        tile = (gl.minimum(first + 64 // G * 2, num_new) - 1) // N
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
def _copy_tile(smem, full, empty, step, new_desc, page_desc, i, counts, past, token, head, row_table, page_rows, PAGE: gl.constexpr,
               PAGED: gl.constexpr):  # fmt: skip
    """Begin to bring a block's i-th tile of keys or of values."""
    new, start = _tile(i, counts, past)
    slot = step % STAGES
    if PAGED:
        entries = _entries(row_table, start, past, PAGE)
    mbarrier.wait(empty.index(slot), step // STAGES & 1 ^ 1)
    mbarrier.expect(full.index(slot), N * N * 2)
    if not PAGED or new:
        for half in gl.static_range(2):
            panel = smem.index(slot * 2 + half)
            tma.async_copy_global_to_shared(new_desc, [token + start, head * N + half * 64], full.index(slot), panel)
    else:
        for page in gl.static_range(N // PAGE):
            entry = entries[page] * page_rows
            for half in gl.static_range(2):
                own = smem.index(slot * 2 + half).slice(page * PAGE, PAGE)
                tma.async_copy_global_to_shared(page_desc, [entry, head * N + half * 64], full.index(slot), own)


@gluon.jit
def _ask_queries(queries, q_smem, slot, token, num_new, head, first, G: gl.constexpr):
    """Begin to copy queries by lanes: 64 // G of G heads for each group of warps, zeros in the rows that are left. `_give_queries` ends it."""
    q_ptr, q_st, q_sh = queries
    m, d = gl.arange(0, 16, gl.SliceLayout(1, ASKED)), gl.arange(0, 64, gl.SliceLayout(0, ASKED))
    parts = q_smem._reinterpret(q_smem.dtype, [BLOCKS * 16, 16, 64], PANEL)
    q_ptr += (token + first).to(gl.int64) * q_st + head * G * q_sh
    for part in range(4):  # of 16 rows, so that few registers hold addresses
        row = part * 16 + m
        query = gl.where(row < 64 // G * G, first + row // G, num_new)
        at = (row // G * q_st + row % G * q_sh)[:, None] + d[None, :]
        for panel in gl.static_range(4):
            behind = panel // 2 * (64 // G)
            own = q_ptr + (behind * q_st + panel % 2 * 64)
            there = (query + behind < num_new)[:, None]
            async_copy.async_copy_global_to_shared(parts.index((slot * 4 + panel) * 4 + part), own + at, mask=there)
    async_copy.commit_group()


@gluon.jit
def _give_queries(q_full, turn, num_new):
    """Queries that lanes have asked for are there."""
    if num_new > 0:
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()  # each lane has made its own copies visible to the matrix units
        mbarrier.arrive(q_full.index(turn % BLOCKS))


@gluon.jit
def _begin_block(parts, queries, q_desc, q_smem, facts, q_full, q_empty, turn, slots_ptr, starts_ptr, lengths_ptr, part_ptr, taken_ptr, num_rows, K,
                 G: gl.constexpr):  # fmt: skip
    """Take the next block, begin to bring its queries, and leave its facts: head of keys, the row's first token, new tokens (0: there are no more
    blocks), past, first query. Returns these, and the row's slot. The last program leaves zeros for the next launch.
    """
    BT: gl.constexpr = 64 // G * 2
    item = gl.atomic_add(taken_ptr, 1, sem="relaxed")
    index, head = gl.maximum(parts - 1 - item // K, 0), item % K
    row = gl.minimum(_row_of(part_ptr, index, num_rows), num_rows - 1)
    token = gl.load(starts_ptr + row)
    num_new = gl.load(starts_ptr + row + 1) - token
    past = gl.load(lengths_ptr + row) - num_new
    first = (index - gl.load(part_ptr + row)) * BT
    table_row = gl.load(slots_ptr + row)
    num_new = gl.where(item < parts * K, num_new, 0)
    slot = turn % BLOCKS
    mbarrier.wait(q_empty.index(slot), turn // BLOCKS & 1 ^ 1)
    left = head, token, num_new, past, first
    for at in gl.static_range(5):
        _leave(facts, slot, at, left[at])
    gl.thread_barrier()
    if num_new > 0:
        if G & (G - 1) == 0:
            mbarrier.expect(q_full.index(slot), N * N * 2)
            for part in gl.static_range(4):
                own = q_smem.index(slot * 4 + part)
                tma.async_copy_global_to_shared(
                    q_desc, [token + first + part // 2 * (BT // 2), head * G, part % 2 * 64], q_full.index(slot), own
                )
        else:
            _ask_queries(queries, q_smem, slot, token, num_new, head, first, G)
    else:
        mbarrier.arrive(q_full.index(slot))
        if gl.atomic_add(taken_ptr + 1, 1) == gl.num_programs(0) - 1:
            gl.store(taken_ptr, 0)
            gl.store(taken_ptr + 1, 0)
    return head, token, num_new, past, first, table_row


@gluon.jit
def _copy_first(smem, full, empty, step, desc, block, G: gl.constexpr):
    """Begin to bring a block's first keys, if there is a block."""
    head, token, num_new, _, first, _ = block
    if num_new > 0:
        slot = step % STAGES
        mbarrier.wait(empty.index(slot), step // STAGES & 1 ^ 1)
        mbarrier.expect(full.index(slot), N * N * 2)
        for half in gl.static_range(2):
            corner = [token + _newest(first, num_new, G) * N, head * N + half * 64]
            tma.async_copy_global_to_shared(desc, corner, full.index(slot), smem.index(slot * 2 + half))


@gluon.jit
def _copy(queries, q_desc, k_desc, v_desc, kp_desc, vp_desc, q_smem, k_smem, v_smem, facts, q_full, q_empty, k_full, k_empty, v_full, v_empty, table_ptr,
          table_st, slots_ptr, starts_ptr, lengths_ptr, part_ptr, taken_ptr, num_rows, k_rows, v_rows, K, G: gl.constexpr,
          PAGE: gl.constexpr, PAGED: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """The warp that copies: keys a tile ahead of values, as groups ask for them, and a block's first keys before the last values of the block before."""
    wait_turn(PDL)
    parts = gl.load(part_ptr + num_rows)
    step, turn = 0, 0
    block = _begin_block(parts, queries, q_desc, q_smem, facts, q_full, q_empty, turn, slots_ptr, starts_ptr, lengths_ptr, part_ptr, taken_ptr, num_rows, K, G)  # fmt: skip
    _copy_first(k_smem, k_full, k_empty, step, k_desc, block, G)
    if G & (G - 1):
        _give_queries(q_full, turn, block[2])
    while block[2] > 0:
        head, token, num_new, past, first, table_row = block
        counts = _counts(first, num_new, past, G)
        total = counts[3]
        row_table = table_ptr + table_row.to(gl.int64) * table_st
        for i in range(1, total):
            _copy_tile(k_smem, k_full, k_empty, step + i, k_desc, kp_desc, i, counts, past, token, head, row_table, k_rows, PAGE, PAGED)  # fmt: skip
            _copy_tile(v_smem, v_full, v_empty, step + i - 1, v_desc, vp_desc, i - 1, counts, past, token, head, row_table, v_rows, PAGE, PAGED)  # fmt: skip
        turn += 1
        block = _begin_block(parts, queries, q_desc, q_smem, facts, q_full, q_empty, turn, slots_ptr, starts_ptr, lengths_ptr, part_ptr, taken_ptr, num_rows, K, G)  # fmt: skip
        _copy_first(k_smem, k_full, k_empty, step + total, k_desc, block, G)
        last = total - 1
        _copy_tile(v_smem, v_full, v_empty, step + last, v_desc, vp_desc, last, counts, past, token, head, row_table, v_rows, PAGE, PAGED)  # fmt: skip
        if G & (G - 1):
            _give_queries(q_full, turn, block[2])
        step += total


@gluon.jit
def _wait_values(v_parts, v_full, step, valid):
    """Wait for a tile's values, of which `valid` exist. The others are made zeros by both groups: by each before it multiplies them."""
    slot = step % STAGES
    mbarrier.wait(v_full.index(slot), step // STAGES & 1)
    if valid < N:
        for part in range(valid // 16, N // 16):
            rows = part * 16 + gl.arange(0, 16, gl.SliceLayout(1, CLEARED))
            for half in gl.static_range(2):
                own = v_parts.index((slot * 2 + half) * (N // 16) + part)
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
def _leave_results(acc, c, room, panels, block, out, G: gl.constexpr):
    """Results go where the block's queries were, and from there in bulk, if all of the group's tokens are the row's and G is a power of two."""
    head, token, num_new, first = block
    out_desc, out_ptr, out_st, out_sh = out
    room.store(acc.to(out_ptr.dtype.element_ty))
    own = first + c * (64 // G)
    if (own + 64 // G <= num_new) & (G & (G - 1) == 0):
        fence_async_shared()
        gl.thread_barrier()
        for half in gl.static_range(2):
            tma.async_copy_shared_to_global(out_desc, [token + own, head * G, half * 64], panels[half])
    else:
        m, d = gl.arange(0, 64, gl.SliceLayout(1, STORED)), gl.arange(0, N, gl.SliceLayout(0, STORED))
        own_query, q_head = own + m // G, head * G + m % G
        at = out_ptr + ((token + own_query).to(gl.int64) * out_st + q_head * out_sh)[:, None]
        there = (own_query < num_new) & (m < 64 // G * G)
        gl.store(at + d[None, :], room.load(STORED), mask=there[:, None])


@gluon.jit
def _compute(c, q_smem, k_smem, v_smem, facts, q_full, q_empty, k_full, k_empty, v_full, v_empty, out_desc, out_ptr, out_st, out_sh, scale, G: gl.constexpr,
             PDL: gl.constexpr):  # fmt: skip
    """One group of four warps: 64 rows of each of the program's blocks."""
    dtype: gl.constexpr = v_smem.dtype
    factor = scale * LOG2E
    wait_turn(PDL)
    k_tiles = k_smem._reinterpret(dtype, [STAGES, N, N], PANEL)
    v_tiles = v_smem._reinterpret(dtype, [STAGES, N, N], PANEL)
    v_parts = v_smem._reinterpret(dtype, [STAGES * 2 * N // 16, 16, 64], PANEL)
    q_tiles = q_smem._reinterpret(dtype, [BLOCKS * 2, 64, N], PANEL)
    query_M, step, turn = c * (64 // G) + gl.arange(0, 64, gl.SliceLayout(1, SUMS)) // G, 0, 0
    head, token, num_new, past, first = _next_block(facts, q_full, turn)
    while num_new > 0:
        across, partial, diagonal, total = _counts(first, num_new, past, G)
        last_M, there = first - diagonal * N + query_M, num_new - diagonal * N
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
        acc = gl.zeros([64, N], gl.float32, SUMS)
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
            acc *= shrink[:, None]
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
            acc *= shrink[:, None]
        mbarrier.wait(v_full.index(step % STAGES), step // STAGES & 1)
        sums = warpgroup_mma(p, v_tiles.index(step % STAGES), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(v_empty.index(step % STAGES))
        step += 1
        acc *= (1.0 / gl.where(weight > 0, weight, 1.0))[:, None]
        at = turn % BLOCKS * 2 + c
        block = head, token, num_new, first
        _leave_results(
            acc, c, q, (q_smem.index(at * 2), q_smem.index(at * 2 + 1)), block, (out_desc, out_ptr, out_st, out_sh), G
        )
        turn += 1
        head, token, num_new, past, first = _next_block(facts, q_full, turn)
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
                         part_ptr, taken_ptr, num_rows, k_rows, v_rows, scale, K, G: gl.constexpr, PAGE: gl.constexpr, PAGED: gl.constexpr,
                         PDL: gl.constexpr):  # fmt: skip
    """Heads of 128 elements in halves, in groups of G (1 to 64), without windows, sinks or soft caps. `part` [R + 1] are prefix sums
    of the rows' blocks of 2 times 64 // G queries. `taken` [2]: zeros, before and behind. If G is no power of two, `q_desc` and `out_desc` may be anything.
    K: heads of keys. `k_rows`, `v_rows`: rows of the pages' descriptors from a page to the next. PAGED: rows may have a past.
    """
    start_next(PDL)
    dtype: gl.constexpr = k_desc.dtype
    if G & (G - 1) == 0:
        q_smem = gl.allocate_shared_memory(dtype, [BLOCKS * 4, 64 // G, G, 64], q_desc.layout)
    else:
        q_smem = gl.allocate_shared_memory(dtype, [BLOCKS * 4, 64, 64], PANEL)
    facts = gl.allocate_shared_memory(gl.int32, [BLOCKS * FACTS, 1], FACT)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES * 2, N, 64], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES * 2, N, 64], v_desc.layout)
    k_full, k_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    v_full, v_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    q_full, q_empty = barriers(BLOCKS, 1), barriers(BLOCKS, 2)
    fence_async_shared()
    c0, c1 = gl.to_tensor(0), gl.to_tensor(1)  # not constants, so that a group's code is translated once
    gl.warp_specialize([
        (_compute, (c0, q_smem, k_smem, v_smem, facts, q_full, q_empty, k_full, k_empty, v_full, v_empty, out_desc, out_ptr, out_st, out_sh, scale, G, PDL)),
        (_compute, (c1, q_smem, k_smem, v_smem, facts, q_full, q_empty, k_full, k_empty, v_full, v_empty, out_desc, out_ptr, out_st, out_sh, scale, G, PDL)),
        (_copy, ((q_ptr, q_st, q_sh), q_desc, k_desc, v_desc, kp_desc, vp_desc, q_smem, k_smem, v_smem, facts, q_full, q_empty, k_full, k_empty, v_full, v_empty, table_ptr,
                 table_st, slots_ptr, starts_ptr, lengths_ptr, part_ptr, taken_ptr, num_rows, k_rows, v_rows, K, G, PAGE, PAGED, PDL)),
    ], [4, 1], [240, 24])  # fmt: skip
