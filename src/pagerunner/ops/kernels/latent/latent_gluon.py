"""Slices of attention in the latent space on Hopper, in Gluon: Triton's language with layouts that the program chooses.

`kernels/latent/latent_decode.py` says what a slice is, and computes the same with plain Triton on any device. Here

* 64 queries are the products' first operand. Up to 16 are their second one, and vectors the first. Queries that a unit doesn't have are zeros.
* A tile of 64 vectors serves both products from where it lies in shared memory. Two groups of four warps divide a tile's scores among them, by keys or (of 16
  queries) by queries, and the sums by elements of the latents. Plain Triton has each group compute all scores.
* The groups write their largest scores down, wait once, and read both.
* A tile is on its way while the one before is computed. Its pages are looked up while the one before that is.

A unit's keys are the slots of its row in order, or with CHOSEN those that an indexer has chosen.
Gluon has no interpreter. Tests compile this kernel, run it as Python, and run it on a card.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.runtime.jit import constexpr_function

from pagerunner.ops.kernels.launch import start_next, wait_turn

LOWEST = gl.constexpr(-1.0e30)
N = gl.constexpr(64)
"""Keys of a tile, and queries of a program."""
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
"""Queries and numbers of codes: a warp has a vector."""
BYTES = gl.constexpr(gl.BlockedLayout([1, 16], [1, 32], [8, 1], [1, 0]))
"""Codes in fp8 as they are copied."""
BLOCKS = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 2, 16], [8, 1, 1], [2, 1, 0]))
"""Latents by blocks that have a scale each, in fp8."""
NARROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
"""Latents and rotary parts as they are copied. A lane has parts of two vectors, so it looks up two pages and not eight."""
FEW = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [8, 1], [1, 0]))
"""Scales as they are copied."""
BOTH = gl.constexpr(gl.DistributedLinearLayout([[0, 1], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0], [0, 0]], [], [64, 2]))  # fmt: skip
"""Two numbers of each of 64 queries, as a product has their rows."""
OPERAND = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@constexpr_function
def _scores_layout(H: int, warps: int = 8) -> gl.NVMMADistributedLayout:
    """Of keys by 16 queries, or of 64 queries by keys; two groups of warps divide the columns."""
    groups = warps // 4
    return gl.NVMMADistributedLayout([3, 0], [4, groups], [16, (H if H < 64 else N.value) // groups, 16])


@constexpr_function
def _sums_layout(H: int, warps: int = 8) -> gl.NVMMADistributedLayout:
    """Of weighted latents by 16 queries, or of 64 queries by them."""
    if H < 64:
        return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, 16, 16])
    return gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, 256, 16])


@constexpr_function
def _told_layout(warps: int) -> gl.DistributedLinearLayout:
    """A number of each of four warps for 16 queries, as a product has their columns; two groups have eight queries each."""
    last = [0, 8]
    registers, groups = [[1, 0], [2, 0], [0, 1]], [[0, 0], [0, 0]]
    lanes = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
    if warps == 4:
        return gl.DistributedLinearLayout([*registers, last], lanes, groups, [], [4, 16])
    return gl.DistributedLinearLayout(registers, lanes, [*groups, last], [], [4, 16])


@gluon.jit
def _slots(own, key, length, CHOSEN: gl.constexpr):
    """Slots of a unit's keys; of keys beyond `length`, the last one's."""
    key = gl.minimum(key, length - 1)
    if CHOSEN:
        key = gl.load(own + key)
    return key


@gluon.jit
def _query(unit, query, num_heads, STRIDE: gl.constexpr):
    """Token and head of a unit's queries."""
    if STRIDE > 1:
        token, head = unit * STRIDE + query // num_heads, query % num_heads
    else:
        token, head = unit + query * 0, query
    return token.to(gl.int64), head.to(gl.int64)


@gluon.jit
def _sees(row_ptr, position_ptr, token, there, length, STRIDE: gl.constexpr):
    """How many of a unit's keys each query sees."""
    if STRIDE > 1:
        there = there & (gl.load(row_ptr + token, mask=there, other=-1) >= 0)
        sees = gl.load(position_ptr + token, mask=there, other=-1).to(gl.int32) + 1
    else:
        sees = there.to(gl.int32) * 0 + length
    return sees


@gluon.jit
def _entries(row_table, slot, PAGE: gl.constexpr):
    """Pages of slots. Their numbers have 32 bits, so that they take half the registers."""
    return gl.load(row_table + slot // PAGE).to(gl.int32)


@gluon.jit
def _places(row_table, own, first, n, length, PAGE: gl.constexpr, CHOSEN: gl.constexpr):
    """Pages and slots of a tile's keys."""
    slot = _slots(own, first + n, length, CHOSEN)
    return _entries(row_table, slot, PAGE), slot


@gluon.jit
def _copy(
    target, source, entry, slot, page_stride, slot_stride, UNIT: gl.constexpr, PAGE: gl.constexpr, COPIED: gl.constexpr
):
    """Begin to bring what a tile's slots hold. Strides are counted in UNIT elements, so that the compiler knows what they are multiples of."""
    x = gl.arange(0, target.shape[1], gl.SliceLayout(0, COPIED))
    at = entry.to(gl.int64) * (page_stride * UNIT) + (slot % PAGE) * (slot_stride * UNIT)
    async_copy.async_copy_global_to_shared(target, source + at[:, None] + x[None, :])


@gluon.jit
def numbers_of_codes(codes):
    """Numbers of e4m3 codes. The words of PTX are those of `latent_decode._numbers`."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 p, q, a, b, m; mov.b32 m, 0x7b807b80;
        prmt.b32 p, 0, $2, 0x5140; prmt.b32 q, 0, $2, 0x7362;
        and.b32 a, p, 0x80008000; shr.u32 b, p, 4; lop3.b32 a, b, 0x07F007F0, a, 0xEA; mul.rn.bf16x2 $0, a, m;
        and.b32 a, q, 0x80008000; shr.u32 b, q, 4; lop3.b32 a, b, 0x07F007F0, a, 0xEA; mul.rn.bf16x2 $1, a, m; }""",
        "=r,=r,r", [codes], dtype=gl.bfloat16, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _convert(codes, scales, target):
    """Make numbers of a tile's e4m3 codes, as many at once as there are registers for beside 64 queries' sums: the compiler has a barrier before each store to `target`."""
    C: gl.constexpr = codes.shape[1]
    G: gl.constexpr = scales.shape[1]
    ROWS: gl.constexpr = N // 2
    for part in gl.static_range(N // ROWS):
        numbers = numbers_of_codes(codes.slice(part * ROWS, ROWS).load(WIDE))
        numbers = gl.convert_layout(gl.reshape(numbers, [ROWS, G, C // G]), BLOCKS, assert_trivial=True)
        factors = scales.slice(part * ROWS, ROWS).load(gl.SliceLayout(2, BLOCKS)).to(gl.bfloat16)
        numbers = gl.reshape(numbers * gl.expand_dims(factors, 2), [ROWS, C])
        target.slice(part * ROWS, ROWS).store(gl.convert_layout(numbers, WIDE, assert_trivial=True))


@gluon.jit
def _copy_tile(held, k_rope, factors, pages, rope, scales, wide_entry, wide_slot, entry, slot, few_entry, few_slot, page_stride, slot_stride,
               rope_page, rope_slot, scale_page, scale_slot, G: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """Begin to bring all of a tile."""
    UNIT: gl.constexpr = 16 if G > 0 else 8
    if G > 0:
        _copy(held, pages, wide_entry, wide_slot, page_stride, slot_stride, UNIT, PAGE, BYTES)
    else:
        _copy(held, pages, entry, slot, page_stride, slot_stride, UNIT, PAGE, NARROW)
    _copy(k_rope, rope, entry, slot, rope_page, rope_slot, 8, PAGE, NARROW)
    if G > 0:
        _copy(factors, scales, few_entry, few_slot, scale_page, scale_slot, 4, PAGE, FEW)


@gluon.jit
def _queries(
    room, source, unit, first_query, num_heads, token_stride, head_stride, STRIDE: gl.constexpr, COPIED: gl.constexpr
):
    """Where a unit's queries are, and which are there."""
    x = gl.arange(0, room.shape[1], gl.SliceLayout(0, COPIED))
    query = first_query + gl.arange(0, room.shape[0], gl.SliceLayout(1, COPIED))
    token, head = _query(unit, query, num_heads, STRIDE)
    at = source + (token * token_stride + head * head_stride)[:, None] + x[None, :]
    return at, (query < num_heads * STRIDE)[:, None]


@gluon.jit
def _read_queries(
    room, source, unit, first_query, num_heads, token_stride, head_stride, STRIDE: gl.constexpr, COPIED: gl.constexpr
):
    """Bring a unit's queries; those that aren't there are zeros."""
    at, there = _queries(room, source, unit, first_query, num_heads, token_stride, head_stride, STRIDE, COPIED)
    room.store(gl.load(at, mask=there, other=0.0))


@gluon.jit
def _scores(q_low, q_turned, latents, rope, H: gl.constexpr):
    """Begin to multiply a tile's vectors by the queries."""
    SCORES: gl.constexpr = _scores_layout(H, gl.num_warps())
    if H < 64:
        scores = gl.zeros([N, H], gl.float32, SCORES)
        scores = warpgroup_mma(latents, q_low.permute((1, 0)), scores, use_acc=False, is_async=True)
        scores = warpgroup_mma(rope, q_turned.permute((1, 0)), scores, is_async=True)
    else:
        scores = gl.zeros([H, N], gl.float32, SCORES)
        scores = warpgroup_mma(q_low, latents.permute((1, 0)), scores, use_acc=False, is_async=True)
        scores = warpgroup_mma(q_turned, rope.permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def _largest(scores, H: gl.constexpr):
    """The largest score of each query. Warps, or of 64 queries the two groups of them, tell each other theirs and wait once."""
    SCORES: gl.constexpr = _scores_layout(H, gl.num_warps())
    if H < 64:
        largest = gl.max(gl.reshape(scores, [4, N // 4, H]), 1)
        largest = gl.max(gl.convert_layout(largest, _told_layout(gl.num_warps())), 0)
        largest = gl.convert_layout(largest, gl.SliceLayout(0, SCORES), assert_trivial=True)
    else:
        largest = gl.max(gl.reshape(scores, [H, 2, N // 2]), 2)
        largest = gl.max(gl.convert_layout(largest, BOTH), 1)
        largest = gl.convert_layout(largest, gl.SliceLayout(1, SCORES), assert_trivial=True)
    return largest


@gluon.jit
def _none_yet(scale, C: gl.constexpr, H: gl.constexpr):
    """What weights are relative to, weights by keys of a tile, and sums, before any key. No query's highest score is above the scaled scores of keys that it doesn't see."""
    SCORES: gl.constexpr = _scores_layout(H, gl.num_warps())
    most = gl.full([H], LOWEST, gl.float32, gl.SliceLayout(0 if H < 64 else 1, SCORES)) * gl.maximum(scale, 1.0)
    total = gl.zeros([N, H] if H < 64 else [H, N], gl.float32, SCORES)
    return most, total, gl.zeros([C, H] if H < 64 else [H, C], gl.float32, _sums_layout(H, gl.num_warps()))


@gluon.jit
def _soften(scores, most, total, sums, start, sees, certain, scale, never, H: gl.constexpr):
    """A tile's weights, and what there is so far relative to its largest scores, too. Keys from `certain` on may not be there, or not be seen by some queries: their scores are `never`."""
    KEYS: gl.constexpr = 0 if H < 64 else 1
    if start + N > certain:
        key = gl.arange(0, N, gl.SliceLayout(1 - KEYS, _scores_layout(H, gl.num_warps())))
        seen = gl.expand_dims(start + key, 1 - KEYS) < gl.expand_dims(sees, KEYS)
        scores = gl.where(seen, scores, never)
    larger = gl.maximum(most, _largest(scores, H) * scale)
    shrink = gl.exp2(most - larger)
    weights = gl.exp2(scores * scale - gl.expand_dims(larger, KEYS))
    total = total * gl.expand_dims(shrink, KEYS) + weights
    own = gl.convert_layout(shrink, gl.SliceLayout(KEYS, _sums_layout(H, gl.num_warps())))
    return weights, larger, total, sums * gl.expand_dims(own, KEYS)


@gluon.jit
def _weigh(weights, latents, p_shared, sums, H: gl.constexpr):
    """Store a tile's weights, and begin to add its latents with them."""
    if H < 64:
        p_shared.store(gl.permute(weights, (1, 0)))
    else:
        p_shared.store(weights)
    fence_async_shared()
    gl.thread_barrier()
    if H < 64:
        acc = warpgroup_mma(latents.permute((1, 0)), p_shared.permute((1, 0)), sums, is_async=True)
    else:
        acc = warpgroup_mma(p_shared, latents, sums, is_async=True)
    return acc


@gluon.jit
def _tiles(q_low, q_turned, held, k_latent, k_rope, factors, p_shared, pages, rope, scales, own, row_table, at, last, length, sees, scale,
           page_stride, slot_stride, rope_page, rope_slot, scale_page, scale_slot, PAGE: gl.constexpr, C: gl.constexpr, G: gl.constexpr,
           CHOSEN: gl.constexpr, STRIDE: gl.constexpr, H: gl.constexpr):  # fmt: skip
    """Keys [at, last) of a unit, the first tile of which is on its way: weighted latents, the sum of the weights, and what they are relative to."""
    # a tile is asked for before the scores, which 64 queries take long to compute
    AT_ONCE: gl.constexpr = H < 64 or G > 0
    wide_n = gl.arange(0, N, gl.SliceLayout(1, BYTES))
    n, few_n = gl.arange(0, N, gl.SliceLayout(1, NARROW)), gl.arange(0, N, gl.SliceLayout(1, FEW))
    entry, slot = _places(row_table, own, at + N, n, length, PAGE, CHOSEN)
    later = _slots(own, at + 2 * N + n, length, CHOSEN)
    wide_entry, wide_slot, wide_later, few_entry, few_slot, few_later = entry, slot, slot, entry, slot, slot
    if G > 0:
        wide_entry, wide_slot = _places(row_table, own, at + N, wide_n, length, PAGE, CHOSEN)
        wide_later = _slots(own, at + 2 * N + wide_n, length, CHOSEN)
        few_entry, few_slot = _places(row_table, own, at + N, few_n, length, PAGE, CHOSEN)
        few_later = _slots(own, at + 2 * N + few_n, length, CHOSEN)
    most, total, acc = _none_yet(scale, C, H)
    acc = warpgroup_mma_init(acc)
    stage = 0
    for start in range(at, last, N):
        async_copy.wait_group(0)  # the compiler has all warps wait for each other behind it
        sums = warpgroup_mma_wait(0, deps=(acc,))
        fence_async_shared()
        later_stage = 1 - stage
        if AT_ONCE:
            gl.thread_barrier()
            if start + N < last:
                _copy_tile(held.index(later_stage), k_rope.index(later_stage), factors.index(later_stage), pages, rope, scales, wide_entry, wide_slot,
                           entry, slot, few_entry, few_slot, page_stride, slot_stride, rope_page, rope_slot, scale_page, scale_slot, G, PAGE)  # fmt: skip
        if G > 0:
            _convert(held.index(stage), factors.index(stage), k_latent.index(0))
            fence_async_shared()
            gl.thread_barrier()
        latents = k_latent.index(0 if G > 0 else stage)
        scores = _scores(q_low, q_turned, latents, k_rope.index(stage), H)
        if not AT_ONCE:
            gl.thread_barrier()  # all have added the latents of the tile before
            if start + N < last:
                _copy_tile(held.index(later_stage), k_rope.index(later_stage), factors.index(later_stage), pages, rope, scales, wide_entry, wide_slot,
                           entry, slot, few_entry, few_slot, page_stride, slot_stride, rope_page, rope_slot, scale_page, scale_slot, G, PAGE)  # fmt: skip
        async_copy.commit_group()
        entry, slot = _entries(row_table, later, PAGE), later
        later = _slots(own, start + 3 * N + n, length, CHOSEN)
        if G > 0:
            wide_entry, wide_slot = _entries(row_table, wide_later, PAGE), wide_later
            wide_later = _slots(own, start + 3 * N + wide_n, length, CHOSEN)
            few_entry, few_slot = _entries(row_table, few_later, PAGE), few_later
            few_later = _slots(own, start + 3 * N + few_n, length, CHOSEN)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        weights, most, total, sums = _soften(
            scores, most, total, sums, start, sees, length - (STRIDE - 1), scale, LOWEST, H
        )
        acc = _weigh(weights.to(q_low.dtype), latents, p_shared, sums, H)
        stage = later_stage
    return warpgroup_mma_wait(0, deps=(acc,)), total, most


@gluon.jit
def _leave(sums, total, most, unit, begins, ends, first_query, num_heads, results, up, C: gl.constexpr, STRIDE: gl.constexpr, H: gl.constexpr, MIXED: gl.constexpr):  # fmt: skip
    """A unit's results, or a part of them with what it is relative to. Sums are `up` times too small. MIXED: of each four elements the second one is behind the third one."""
    whole, whole_token, whole_head, parts, found = results
    KEYS: gl.constexpr = 0 if H < 64 else 1
    SUMS: gl.constexpr = _sums_layout(H, gl.num_warps())
    count, queries = gl.sum(total, KEYS), num_heads * STRIDE
    sums = sums * gl.expand_dims(gl.convert_layout(up / count, gl.SliceLayout(KEYS, SUMS)), KEYS)
    rows = first_query + gl.arange(0, H, gl.SliceLayout(KEYS, SUMS))
    columns = gl.arange(0, C, gl.SliceLayout(1 - KEYS, SUMS))
    if MIXED:
        columns = columns // 4 * 4 + columns % 2 * 2 + columns // 2 % 2
    columns = gl.expand_dims(columns, 1 - KEYS)
    there = gl.expand_dims(rows < queries, KEYS)
    if begins & ends:
        token, head = _query(unit, rows, num_heads, STRIDE)
        target = whole + gl.expand_dims(token * whole_token + head * whole_head, KEYS) + columns
        gl.store(target, sums.to(whole.dtype.element_ty), mask=there)
    else:
        place = (gl.program_id(0) * 2 + begins.to(gl.int32)).to(gl.int64) * queries
        gl.store(parts + gl.expand_dims(place + rows, KEYS) * C + columns, sums, mask=there)
        query = first_query + gl.arange(0, H, gl.SliceLayout(KEYS, _scores_layout(H, gl.num_warps())))
        gl.store(found + place + query, most + gl.log2(count), mask=query < queries)


@gluon.jit(do_not_specialize=["num_heads", "chosen_stride"])
def slices_kernel(q_latent, q_rope, pages, rope, scales, chosen, whole, parts, found, unit_ptr, slice_ptr, row_ptr, position_ptr, table, num_heads,
                  scale, qc_token, qc_head, qp_token, qp_head, page_stride, slot_stride, rope_page, rope_slot, scale_page, scale_slot, table_stride,
                  chosen_stride, whole_token, whole_head, PAGE: gl.constexpr, C: gl.constexpr, P: gl.constexpr, G: gl.constexpr,
                  CHOSEN: gl.constexpr, STRIDE: gl.constexpr, H: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """One slice of H of a unit's queries; see `latent_decode._slices_kernel`. C elements of a latent, and P of a rotary part.

    G isn't 0: latents are e4m3 codes of G blocks that have a scale each, and H is 64. A tile's numbers have one room then, its codes two.
    """
    wait_turn(PDL)
    start_next(PDL)
    dtype: gl.constexpr = q_latent.dtype.element_ty
    KEYS: gl.constexpr = 0 if H < 64 else 1
    q_low = gl.allocate_shared_memory(dtype, [H, C], OPERAND)
    q_turned = gl.allocate_shared_memory(dtype, [H, P], OPERAND)
    k_latent = gl.allocate_shared_memory(dtype, [1 if G > 0 else 2, N, C], OPERAND)
    k_rope = gl.allocate_shared_memory(dtype, [2, N, P], OPERAND)
    p_shared = gl.allocate_shared_memory(dtype, [H, N], OPERAND)
    held, factors = k_latent, k_latent
    if G > 0:
        held = gl.allocate_shared_memory(gl.uint8, [2, N, C], gl.SwizzledSharedLayout(16, 1, 1, [1, 0]))
        factors = gl.allocate_shared_memory(gl.float32, [2, N, G], gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))
    piece, first_query, queries = gl.program_id(0), gl.program_id(1) * H, num_heads * STRIDE
    results = whole, whole_token, whole_head, parts, found
    tile = gl.load(slice_ptr + piece * 2)
    unit = gl.load(slice_ptr + piece * 2 + 1)
    stop = gl.load(slice_ptr + piece * 2 + 2)
    while tile < stop:
        first_tile = gl.load(unit_ptr + unit * 4)
        length = gl.load(unit_ptr + unit * 4 + 1)
        row_table = table + gl.load(unit_ptr + unit * 4 + 2).to(gl.int64) * table_stride
        end = first_tile + (length + N - 1) // N
        upto, tile = gl.minimum(stop, end), gl.maximum(tile, first_tile)
        if upto > tile:
            own = chosen + unit.to(gl.int64) * chosen_stride
            at, last = (tile - first_tile) * N, (upto - first_tile) * N
            wide_n = gl.arange(0, N, gl.SliceLayout(1, BYTES))
            wide_entry, wide_slot = _places(row_table, own, at, wide_n, length, PAGE, CHOSEN)
            n = gl.arange(0, N, gl.SliceLayout(1, NARROW))
            entry, slot = _places(row_table, own, at, n, length, PAGE, CHOSEN)
            few_n = gl.arange(0, N, gl.SliceLayout(1, FEW))
            few_entry, few_slot = _places(row_table, own, at, few_n, length, PAGE, CHOSEN)
            gl.thread_barrier()  # all have read the unit before
            _copy_tile(held.index(0), k_rope.index(0), factors.index(0), pages, rope, scales, wide_entry, wide_slot, entry, slot, few_entry,
                       few_slot, page_stride, slot_stride, rope_page, rope_slot, scale_page, scale_slot, G, PAGE)  # fmt: skip
            async_copy.commit_group()
            _read_queries(q_low, q_latent, unit, first_query, num_heads, qc_token, qc_head, STRIDE, WIDE)
            _read_queries(q_turned, q_rope, unit, first_query, num_heads, qp_token, qp_head, STRIDE, NARROW)
            query = first_query + gl.arange(0, H, gl.SliceLayout(KEYS, _scores_layout(H)))
            score_token, score_head = _query(unit, query, num_heads, STRIDE)
            sees = _sees(row_ptr, position_ptr, score_token, query < queries, length, STRIDE)
            sums, total, most = _tiles(
                q_low, q_turned, held, k_latent, k_rope, factors, p_shared, pages, rope, scales, own, row_table, at, last, length, sees, scale,
                page_stride, slot_stride, rope_page, rope_slot, scale_page, scale_slot, PAGE, C, G, CHOSEN, STRIDE, H,
            )  # fmt: skip
            _leave(sums, total, most, unit, tile == first_tile, upto == end, first_query, num_heads, results, 1.0, C, STRIDE, H, False)  # fmt: skip
            tile = upto
        unit += 1
