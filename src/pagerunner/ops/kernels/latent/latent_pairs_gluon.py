"""Slices of attention in the latent space on Hopper, with 64 queries and two tiles of 64 vectors at once, in Gluon.

`kernels/latent/latent_decode.py` says what a slice is. `kernels/latent/latent_gluon.py` computes the same with all warps at one tile. Here

* Two groups of four warps have a tile each: they multiply its vectors by the queries. They tell each other their largest scores, so both have weights that are relative to the same.
* Each group has half of a latent's elements, of both tiles: it adds its own tile's with weights that it has in registers, then the other tile's with weights that the other one left.
* A warp for each tile copies, in bulk, a quarter of its latents at a time, as soon as a group has added them: while it adds the others.

So a tile's vectors are read twice by products, and the scores are computed once. Vectors beyond a row are made zeros before they are added: what lies there may be no number.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TensorDescriptor

from pagerunner.ops.kernels.latent.latent_gluon import _query, _sees
from pagerunner.ops.kernels.launch import start_next, wait_turn
from pagerunner.ops.kernels.paged.paged_prefill_gluon import CLEARED, PANEL, barriers
from pagerunner.ops.kernels.paged.paged_prefill_gluon import QUERIES as QUERIES

LOWEST = gl.constexpr(-1.0e30)
N = gl.constexpr(64)
"""Keys of a tile, queries of a program, elements of a panel and of a rotary part."""
QUARTER = gl.constexpr(128)
"""Elements of a quarter of a latent. Quarter i of tile t is t * 4 + i."""
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, SUMS, 2))
OF_QUERY = gl.constexpr(gl.SliceLayout(1, SCORES))
OF_SUM = gl.constexpr(gl.SliceLayout(1, SUMS))
TOLD = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _piece(slice_ptr):
    """A program's tiles [first, stop), and the unit that the first one is of."""
    at = slice_ptr + gl.program_id(0) * 2
    return gl.load(at), gl.load(at + 2), gl.load(at + 1)


@gluon.jit
def _unit(unit_ptr, unit, stop):
    """A unit's first tile, keys, row of the table, the end of its tiles, and of those before `stop`."""
    first, length = gl.load(unit_ptr + unit * 4), gl.load(unit_ptr + unit * 4 + 1)
    end = first + (length + N - 1) // N
    return first, length, gl.load(unit_ptr + unit * 4 + 2), end, gl.minimum(stop, end)


@gluon.jit
def _rows(row_table, start, length, page_rows, PAGE: gl.constexpr):
    """Where a tile's pages begin in the table of all slots; beyond the row's last page, that one."""
    found = ()
    for part in gl.static_range(N // PAGE if PAGE < N else 1):
        key = start + part * PAGE
        entry = gl.load(row_table + gl.minimum(key, length - 1) // PAGE).to(gl.int32)
        found = found + (entry * page_rows + key % PAGE,)
    return found


@gluon.jit
def _copy_panels(smem, panel, COUNT: gl.constexpr, desc, rows, column, full, PAGE: gl.constexpr):
    """Begin to bring COUNT panels of a tile."""
    for i in gl.static_range(COUNT):
        for part in gl.static_range(N // PAGE if PAGE < N else 1):
            own = smem.index(panel + i)
            if PAGE < N:
                own = own.slice(part * PAGE, PAGE)
            tma.async_copy_global_to_shared(desc, [rows[part], column + i * 64], full, own)


@gluon.jit
def _copy_quarter(rooms, descs, rows, turned, full, empty, step, tile: gl.constexpr, part: gl.constexpr, ROPE: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """Begin to bring a quarter of a tile, with its rotary parts or without."""
    at: gl.constexpr = tile * 4 + part
    mbarrier.wait(empty.index(at), step & 1 ^ 1)
    mbarrier.expect(full.index(at), N * (3 if ROPE else 2) * 64 * 2)
    _copy_panels(rooms[2], at * 2, 2, descs[2], rows, part * QUARTER, full.index(at), PAGE)
    if ROPE:
        _copy_panels(rooms[3], tile, 1, descs[3], turned, 0, full.index(at), PAGE)


@gluon.jit
def _copy(T: gl.constexpr, descs, rooms, met, unit_ptr, slice_ptr, table, table_stride, page_rows, rope_rows, num_heads, PAGE: gl.constexpr,
          STRIDE: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """The warp that copies tile T of each two: first quarters that its own group adds, then the others, and with the last one the rotary parts. Warp 0
    copies queries as well. One warp for both took longer than products with pages of 16 slots.
    """
    wait_turn(PDL)
    q_full, q_empty, full, empty = met
    tile, stop, unit = _piece(slice_ptr)
    query, step, turn = gl.program_id(1) * N, 0, 0
    while tile < stop:
        first, length, row, end, upto = _unit(unit_ptr, unit, stop)
        if upto > tile:
            row_table = table + row.to(gl.int64) * table_stride
            if T == 0:
                token, head = unit * STRIDE + query // num_heads * (STRIDE > 1), query
                if STRIDE > 1:
                    head = query % num_heads
                mbarrier.wait(q_empty.index(0), turn & 1 ^ 1)
                mbarrier.expect(q_full.index(0), N * 9 * 64 * 2)
                for i in gl.static_range(8):
                    tma.async_copy_global_to_shared(descs[0], [token, head, i * 64], q_full.index(0), rooms[0].index(i))
                tma.async_copy_global_to_shared(descs[1], [token, head, 0], q_full.index(0), rooms[1].index(0))
            for at in range((tile - first) * N, (upto - first) * N, 2 * N):
                rows = _rows(row_table, at + T * N, length, page_rows, PAGE)
                turned = _rows(row_table, at + T * N, length, rope_rows, PAGE)
                for i in gl.static_range(4):
                    _copy_quarter(rooms, descs, rows, turned, full, empty, step, T, (T ^ (i // 2)) * 2 + i % 2, i == 3, PAGE)  # fmt: skip
                step += 1
            turn += 1
            tile = upto
        unit += 1


@gluon.jit
def _clear(k_parts, half, valid):
    """Make half a tile's elements zeros from the vector `valid` on."""
    for part in range(gl.maximum(valid, 0) // 16, N // 16):
        rows = part * 16 + gl.arange(0, 16, gl.SliceLayout(1, CLEARED))
        for panel in gl.static_range(4):
            own = k_parts.index((half * 4 + panel) * (N // 16) + part)
            own.store(gl.where((rows < valid)[:, None], own.load(CLEARED), 0.0))


@gluon.jit
def _tell(c, told, heard, values, phase):
    """Leave numbers for the other group, and read its."""
    told.index(c).store(values)
    gl.thread_barrier()
    mbarrier.arrive(heard.index(c))
    mbarrier.wait(heard.index(1 - c), phase)
    return told.index(1 - c).load(OF_QUERY)


@gluon.jit
def _scores(c, q_tiles, turned, k_tiles, rope, full, phase):
    """Multiply tile c by the queries, a quarter after the other as they come."""
    mbarrier.wait(full.index(6 * c), phase)
    scores = gl.zeros([N, N], gl.float32, SCORES)
    scores = warpgroup_mma(q_tiles.index(c * 2), k_tiles.index(6 * c).permute((1, 0)), scores, use_acc=False, is_async=True)  # fmt: skip
    for i in gl.static_range(1, 4):
        part = (c * 2 + i) % 4
        mbarrier.wait(full.index(c * 4 + part), phase)
        scores = warpgroup_mma(q_tiles.index(part), k_tiles.index(c * 4 + part).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma(turned, rope.permute((1, 0)), scores, is_async=True)
    return warpgroup_mma_wait(0, deps=(scores,))


@gluon.jit
def _compute(c, rooms, told, counts, met, heard, weighed, counted, results, unit_ptr, slice_ptr, row_ptr, position_ptr, num_heads, scale, STRIDE: gl.constexpr,
             PDL: gl.constexpr):  # fmt: skip
    """One group of four warps: tile c of each two, and elements of half c of the latents: quarters of its own tile from `mine` on, of the other from `others`."""
    wait_turn(PDL)
    q_full, q_empty, full, empty = met
    rope_smem = rooms[3]
    dtype: gl.constexpr = rope_smem.dtype
    q_tiles = rooms[0]._reinterpret(dtype, [4, N, QUARTER], PANEL)
    turned = rooms[1]._reinterpret(dtype, [1, N, N], PANEL).index(0)
    k_tiles = rooms[2]._reinterpret(dtype, [8, N, QUARTER], PANEL)
    k_parts = rooms[2]._reinterpret(dtype, [64, 16, 64], PANEL)
    tile, stop, unit = _piece(slice_ptr)
    first_query, queries = gl.program_id(1) * N, num_heads * STRIDE
    key = gl.arange(0, N, gl.SliceLayout(0, SCORES))
    mine, others = 6 * c, 4 - 2 * c
    step, turn = 0, 0
    while tile < stop:
        first, length, row, end, upto = _unit(unit_ptr, unit, stop)
        if upto > tile:
            query = first_query + gl.arange(0, N, OF_QUERY)
            token, head = _query(unit, query, num_heads, STRIDE)
            last = (upto - first) * N
            sees = gl.minimum(_sees(row_ptr, position_ptr, token, query < queries, length, STRIDE), last)
            mbarrier.wait(q_full.index(0), turn & 1)
            # no query's highest score is above the scaled scores of keys that it doesn't see
            most = gl.full([N], LOWEST, gl.float32, OF_QUERY) * gl.maximum(scale, 1.0)
            total = gl.zeros([N], gl.float32, OF_QUERY)
            low, high = gl.zeros([N, QUARTER], gl.float32, SUMS), gl.zeros([N, QUARTER], gl.float32, SUMS)
            for at in range((tile - first) * N, last, 2 * N):
                phase, own = step & 1, at + c * N
                scores = _scores(c, q_tiles, turned, k_tiles, rope_smem.index(c), full, phase)
                if own + N > gl.minimum(length, last) - (STRIDE - 1):  # some keys may not be there, or not be seen by some queries  # fmt: skip
                    scores = gl.where((own + key)[None, :] < sees[:, None], scores, LOWEST)
                largest = gl.max(scores, 1) * scale
                larger = gl.maximum(gl.maximum(most, largest), _tell(c, told, heard, largest, phase))
                shrink = gl.exp2(most - larger)
                weights = gl.exp2(scores * scale - larger[:, None])
                total = total * shrink + gl.sum(weights, 1)
                most = larger
                p = weights.to(dtype)
                rope_smem.index(c).store(p)  # the rotary parts have been multiplied
                fence_async_shared()
                gl.thread_barrier()
                mbarrier.arrive(weighed.index(c))
                shrink = gl.convert_layout(shrink, OF_SUM)
                low, high = low * shrink[:, None], high * shrink[:, None]
                if at + 2 * N > length:
                    for i in gl.static_range(2):
                        mbarrier.wait(full.index(others + i), phase)
                    _clear(k_parts, c, length - at)
                    _clear(k_parts, 2 + c, length - at - N)
                    fence_async_shared()
                    gl.thread_barrier()
                p = gl.convert_layout(p, WEIGHTS)
                low = warpgroup_mma(p, k_tiles.index(mine), low, is_async=True)
                high = warpgroup_mma(p, k_tiles.index(mine + 1), high, is_async=True)
                mbarrier.wait(weighed.index(1 - c), phase)
                mbarrier.wait(full.index(others), phase)
                low = warpgroup_mma(rope_smem.index(1 - c), k_tiles.index(others), low, is_async=True)
                mbarrier.wait(full.index(others + 1), phase)
                high = warpgroup_mma(rope_smem.index(1 - c), k_tiles.index(others + 1), high, is_async=True)
                for i in gl.static_range(4):
                    low, high = warpgroup_mma_wait(3 - i, deps=(low, high))
                    mbarrier.arrive(empty.index((mine if i < 2 else others) + i % 2))
                step += 1
            mbarrier.arrive(q_empty.index(0))
            total += _tell(c, counts, counted, total, turn & 1)
            _leave(c, low, high, total, most, results, unit, first_query, queries, num_heads, tile == first, upto == end, STRIDE)  # fmt: skip
            turn += 1
            tile = upto
        unit += 1


@gluon.jit
def _leave(c, low, high, total, most, results, unit, first_query, queries, num_heads, begins, ends, STRIDE: gl.constexpr):  # fmt: skip
    """A unit's results, or a part of them with what it is relative to."""
    whole, whole_token, whole_head, parts, found = results
    share = gl.convert_layout(1.0 / total, OF_SUM)[:, None]
    rows = first_query + gl.arange(0, N, OF_SUM)
    there, columns = (rows < queries)[:, None], gl.arange(0, QUARTER, gl.SliceLayout(0, SUMS))[None, :] + c * (2 * QUARTER)  # fmt: skip
    if begins & ends:
        token, head = _query(unit, rows, num_heads, STRIDE)
        target = whole + (token * whole_token + head * whole_head)[:, None] + columns
        gl.store(target, (low * share).to(whole.dtype.element_ty), mask=there)
        gl.store(target + QUARTER, (high * share).to(whole.dtype.element_ty), mask=there)
    else:
        place = (gl.program_id(0) * 2 + begins.to(gl.int32)).to(gl.int64) * queries
        part = parts + (place + rows)[:, None] * (4 * QUARTER) + columns
        gl.store(part, low * share, mask=there)
        gl.store(part + QUARTER, high * share, mask=there)
        if c == 0:
            query = first_query + gl.arange(0, N, OF_QUERY)
            gl.store(found + place + query, most + gl.log2(total), mask=query < queries)


@gluon.jit(do_not_specialize=["num_heads"])
def pairs_kernel(q_desc, turned_desc, page_desc, rope_desc, whole, parts, found, unit_ptr, slice_ptr, row_ptr, position_ptr, table, num_heads, scale,
                 table_stride, page_rows, rope_rows, whole_token, whole_head, PAGE: gl.constexpr, STRIDE: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """One slice of 64 of a unit's queries, of latents of 512 elements and rotary parts of 64; see `latent_decode._slices_kernel`. `page_rows`, `rope_rows`:
    rows of the pages' descriptors from a page to the next. PAGE: 16, 32, or a multiple of 64.
    """
    start_next(PDL)
    dtype: gl.constexpr = page_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [8, 1, N, 64], q_desc.layout)
    turned_smem = gl.allocate_shared_memory(dtype, [1, 1, N, 64], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [16, N, 64], PANEL)
    rope_smem = gl.allocate_shared_memory(dtype, [2, N, 64], PANEL)
    told, counts = gl.allocate_shared_memory(gl.float32, [2, N], TOLD), gl.allocate_shared_memory(gl.float32, [2, N], TOLD)  # fmt: skip
    met = barriers(1, 1), barriers(1, 2), barriers(8, 1), barriers(8, 1)
    # counts have barriers of their own: with one for both, a group might end two of its phases while the other waits for the first
    heard, weighed, counted = barriers(2, 1), barriers(2, 1), barriers(2, 1)
    fence_async_shared()
    c0, c1 = gl.to_tensor(0), gl.to_tensor(1)  # not constants, so that a group's code is translated once
    descs, rooms = (q_desc, turned_desc, page_desc, rope_desc), (q_smem, turned_smem, k_smem, rope_smem)
    results = whole, whole_token, whole_head, parts, found
    gl.warp_specialize([
        (_compute, (c0, rooms, told, counts, met, heard, weighed, counted, results, unit_ptr, slice_ptr, row_ptr, position_ptr, num_heads, scale, STRIDE, PDL)),
        (_compute, (c1, rooms, told, counts, met, heard, weighed, counted, results, unit_ptr, slice_ptr, row_ptr, position_ptr, num_heads, scale, STRIDE, PDL)),
        (_copy, (0, descs, rooms, met, unit_ptr, slice_ptr, table, table_stride, page_rows, rope_rows, num_heads, PAGE, STRIDE, PDL)),
        (_copy, (1, descs, rooms, met, unit_ptr, slice_ptr, table, table_stride, page_rows, rope_rows, num_heads, PAGE, STRIDE, PDL)),
    ], [4, 1, 1], [240, 24, 24])  # fmt: skip
