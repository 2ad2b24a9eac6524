"""The kernel of `kernels/moe/moe_many.py` for dense halves, and for e4m3 with scales of blocks, on Hopper, in Gluon: Triton's language with layouts that the program chooses.

Four warps copy, several steps ahead, tile after tile. Two groups of four warps multiply, each 64 pairs of a tile. So a tile's first inputs come while what
the tile before has computed is stored. Shape letters as in `ops/moe.py`; a step is 128 bytes of a row: 64 halves, or 128 numbers of 8 bits.
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
from triton.runtime.jit import constexpr_function

from pagerunner.ops.kernels.activation import CLAMPED_SWIGLU, gated, rounded
from pagerunner.ops.kernels.launch import start_next, wait_turn

SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
BLOCK_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
STORED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
"""Outputs as they are stored: a thread has 8 neighbouring features of a pair."""


@constexpr_function
def _rows(STEP: int) -> gl.BlockedLayout:
    """Rows of a step's inputs as they are copied: a thread has 16 bytes of each."""
    return gl.BlockedLayout([1, STEP // 8], [4, 8], [4, 1], [1, 0])


@gluon.jit
def _tile(tile, blocks_ptr, tiles_N: gl.constexpr, BN: gl.constexpr):
    """A tile's expert, its first row, where the expert's rows end, and its first feature. `blocks` has four numbers for each block of rows."""
    entry = blocks_ptr + tile // tiles_N * 4
    expert, before, start, end = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3)
    high = (end - start + 127) // 128
    place = tile - before * tiles_N
    return expert, start + place % high * 128, end, place // high * BN


@gluon.jit
def _copy_rows(x_ptr, x_smem, slot, sources, first, STEP: gl.constexpr):
    columns = first + gl.arange(0, STEP, gl.SliceLayout(0, _rows(STEP)))
    for half in gl.static_range(2):
        async_copy.async_copy_global_to_shared(
            x_smem.index(slot * 2 + half), x_ptr + (sources[half][:, None] + columns[None, :])
        )


@gluon.jit
def _copy(x_ptr, x_desc, w_desc, order_ptr, blocks_ptr, x_smem, w_smem, full, empty, count, programs, active, N: gl.constexpr, K: gl.constexpr, BN: gl.constexpr,
          BOX: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr, GATED: gl.constexpr, ALTERNATING: gl.constexpr):  # fmt: skip
    """The warps that copy. Of the first product, inputs are gathered; their copies are announced LAG steps later.

    That needs room for the step that is LAG further. Steps that are announced keep their room until the one behind them is, too. So LAG is at most STAGES - 2.
    """
    tiles_N: gl.constexpr = (N + BN - 1) // BN
    steps: gl.constexpr = K // STEP
    both: gl.constexpr = 2 if GATED else 1
    BYTES: gl.constexpr = 256 * 128 + (0 if GATED else 128 * 128)
    step = 0
    for tile in range(gl.program_id(0), count * tiles_N, programs):
        expert, first_row, end, first_feature = _tile(tile, blocks_ptr, tiles_N, BN)
        w_row = expert * (both * N) + first_feature * (2 if ALTERNATING else 1)
        if GATED:
            rows = first_row + gl.arange(0, 64, gl.SliceLayout(1, _rows(STEP)))
            low = gl.load(order_ptr + gl.minimum(rows, end - 1)) // active
            high = gl.load(order_ptr + gl.minimum(rows + 64, end - 1)) // active
            sources = (low * K, high * K)
        for i in range(steps):
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(slot), BYTES)
            tma.async_copy_global_to_shared(
                w_desc, [w_row, i * STEP], full.index(slot), w_smem.index(slot).slice(0, BOX)
            )
            if BOX == 128:
                tma.async_copy_global_to_shared(
                    w_desc, [w_row + N, i * STEP], full.index(slot), w_smem.index(slot).slice(128, BOX)
                )
            if GATED:
                _copy_rows(x_ptr, x_smem, slot, sources, i * STEP, STEP)
                async_copy.commit_group()
                if step >= LAG:
                    async_copy.wait_group(LAG)
                    fence_async_shared()
                    gl.thread_barrier()  # each thread has made its own copies visible to the matrix units
                    mbarrier.arrive(full.index((step - LAG) % STAGES))
            else:
                for half in gl.static_range(2):
                    tma.async_copy_global_to_shared(
                        x_desc, [first_row + half * 64, i * STEP], full.index(slot), x_smem.index(slot * 2 + half)
                    )
            step += 1
    if GATED:
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        for i in range(gl.maximum(step - LAG, 0), step):
            mbarrier.arrive(full.index(i % STAGES))


@gluon.jit
def _store_half(y, out_ptr, targets, row, end, feature, N: gl.constexpr, WIDE: gl.constexpr):
    """Store outputs [64, WIDE]."""
    y = gl.convert_layout(y, STORED)
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, STORED))
    features = feature + gl.arange(0, WIDE, gl.SliceLayout(0, STORED))
    inside = (rows < end)[:, None] & (features < N)[None, :]
    gl.store(out_ptr + (targets.to(gl.int64) * N)[:, None] + features[None, :], y, mask=inside)


@gluon.jit
def _sums(x_smem, w_smem, full, empty, step, c: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, ALTERNATING: gl.constexpr):  # fmt: skip
    """Sums of a tile's gates and of its ups, or of the features of its two halves; and the step behind them."""
    acc = gl.zeros((64, 256), gl.float32, SUMS)
    for i in range(K // 64):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), step // STAGES & 1)
        acc = warpgroup_mma(x_smem.index(slot * 2 + c), w_smem.index(slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        if i > 0:
            mbarrier.arrive(empty.index((step - 1) % STAGES))
        step += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((step - 1) % STAGES))
    if ALTERNATING:
        left, right = gl.split(gl.reshape(acc, (64, 128, 2)))
    else:
        left, right = gl.split(gl.permute(gl.reshape(acc, (64, 2, 128)), (0, 2, 1)))
    return left, right, step


@gluon.jit
def _block_sums(x_smem, w_smem, full, empty, step, xs_place, x_step, s_place, more_place, c: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """As `_sums`, of numbers of 8 bits. A step's products are scaled before they are added up: each row of inputs, and each half of the weights, has a scale."""
    zero = gl.zeros((64, 128), gl.float32, BLOCK_SUMS)
    left, right = zero, zero
    x_scale, scale, more_scale = gl.load(xs_place), gl.load(s_place), gl.load(more_place)
    for i in range(K // 128):
        slot = step % STAGES
        factors, more_factors = x_scale * scale, x_scale * more_scale
        ahead = gl.minimum(i + 1, K // 128 - 1)
        x_scale = gl.load(xs_place + ahead * x_step)
        scale, more_scale = gl.load(s_place + ahead), gl.load(more_place + ahead)
        mbarrier.wait(full.index(slot), step // STAGES & 1)
        x, w = x_smem.index(slot * 2 + c), w_smem.index(slot)
        product = warpgroup_mma(x, w.slice(0, 128).permute((1, 0)), zero, use_acc=False, is_async=True)
        left += warpgroup_mma_wait(0, deps=(product,)) * factors[:, None]
        product = warpgroup_mma(x, w.slice(128, 128).permute((1, 0)), zero, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=(product,))
        mbarrier.arrive(empty.index(slot))
        right += product * more_factors[:, None]
        step += 1
    return left, right, step


@gluon.jit
def _compute(c: gl.constexpr, x_smem, w_smem, full, empty, xs_ptr, x_step, s_ptr, blocks_ptr, bias_ptr, weights_ptr, order_ptr, out_ptr, count, programs,
             active, limit, N: gl.constexpr, K: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr,
             ALTERNATING: gl.constexpr, KIND: gl.constexpr, WEIGH: gl.constexpr, BLOCKS: gl.constexpr):  # fmt: skip
    """One group of four warps: the sums of 64 pairs of each tile, and what is stored of them."""
    tiles_N: gl.constexpr = (N + BN - 1) // BN
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    step = 0
    for tile in range(gl.program_id(0), count * tiles_N, programs):
        expert, first_row, end, first_feature = _tile(tile, blocks_ptr, tiles_N, BN)
        row = first_row + c * 64
        if BLOCKS:
            source = gl.minimum(row + gl.arange(0, 64, gl.SliceLayout(1, BLOCK_SUMS)), end - 1)
            if GATED:
                source = gl.load(order_ptr + source) // active
            s_row = expert * ((2 * N if GATED else N) // 128) + first_feature // 128
            more_row = s_row + (N // 128 if GATED else 1)
            left, right, step = _block_sums(x_smem, w_smem, full, empty, step, xs_ptr + source, x_step, s_ptr + s_row * (K // 128),
                                            s_ptr + more_row * (K // 128), c, K, STAGES)  # fmt: skip
        else:
            left, right, step = _sums(x_smem, w_smem, full, empty, step, c, K, STAGES, GATED, ALTERNATING)
        if GATED:
            gate, up = left, right
            if WEIGH:
                own = gl.minimum(row + gl.arange(0, 64, gl.SliceLayout(1, gate.type.layout)), end - 1)
                weight = gl.load(weights_ptr + gl.load(order_ptr + own))[:, None]
                gate, up = gate * weight, up * weight
            if BIAS:
                columns = gl.minimum(first_feature + gl.arange(0, 128, gl.SliceLayout(0, gate.type.layout)), N - 1)
                place = bias_ptr + expert * (2 * N) + columns * (2 if ALTERNATING else 1)
                gate += gl.load(place).to(gl.float32)[None, :]
                up += gl.load(place + (1 if ALTERNATING else N)).to(gl.float32)[None, :]
            y = gated(rounded(gate, dtype), rounded(up, dtype), limit, KIND, dtype)
            targets = row + gl.arange(0, 64, gl.SliceLayout(1, STORED))
            _store_half(y, out_ptr, targets, row, end, first_feature, N, 128)
        else:
            own = gl.minimum(row + gl.arange(0, 64, gl.SliceLayout(1, left.type.layout)), end - 1)
            pairs = gl.load(order_ptr + own)
            if BIAS:
                columns = gl.arange(0, 128, gl.SliceLayout(0, left.type.layout))
                place = bias_ptr + expert * N
                left += gl.load(place + gl.minimum(first_feature + columns, N - 1)).to(gl.float32)[None, :]
                right += gl.load(place + gl.minimum(first_feature + 128 + columns, N - 1)).to(gl.float32)[None, :]
            if WEIGH:
                weight = gl.load(weights_ptr + pairs)[:, None]
                left, right = left * weight, right * weight
            targets = gl.convert_layout(pairs, gl.SliceLayout(1, STORED))
            _store_half(left.to(dtype), out_ptr, targets, row, end, first_feature, N, 128)
            _store_half(right.to(dtype), out_ptr, targets, row, end, first_feature + 128, N, 128)


@gluon.jit(do_not_specialize=["active", "programs", "x_step"])
def many_kernel(x_ptr, x_desc, w_desc, xs_ptr, s_ptr, bias_ptr, weights_ptr, order_ptr, blocks_ptr, starts_ptr, out_ptr, active, programs, limit, x_step, E: gl.constexpr,
                N: gl.constexpr, K: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr,
                WEIGH: gl.constexpr, REGS: gl.constexpr, COPY_REGS: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """Tiles of 128 pairs of an expert times 128 gates and as many ups, or 256 features, of N; see `_many_kernel` of `kernels/moe/moe_many.py`.

    Numbers of 8 bits have scales of 128 x 128 of the weights, and of 128 of a row of inputs, whose steps are `x_step` apart.
    """
    wait_turn(PDL)
    start_next(PDL)
    BN: gl.constexpr = 128 if GATED else 256
    ALTERNATING: gl.constexpr = GATED and KIND == CLAMPED_SWIGLU
    dtype: gl.constexpr = w_desc.dtype
    BLOCKS: gl.constexpr = dtype == gl.float8e4nv
    STEP: gl.constexpr = 128 if BLOCKS else 64
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * 2, 64, STEP], x_desc.layout)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES, 256, STEP], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2 if GATED else 1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    count = gl.load(starts_ptr + E)
    gl.warp_specialize([
        (_compute, (0, x_smem, w_smem, full, empty, xs_ptr, x_step, s_ptr, blocks_ptr, bias_ptr, weights_ptr, order_ptr, out_ptr, count, programs, active,
                    limit, N, K, BN, STAGES, BIAS, GATED, ALTERNATING, KIND, WEIGH, BLOCKS)),
        (_compute, (1, x_smem, w_smem, full, empty, xs_ptr, x_step, s_ptr, blocks_ptr, bias_ptr, weights_ptr, order_ptr, out_ptr, count, programs, active,
                    limit, N, K, BN, STAGES, BIAS, GATED, ALTERNATING, KIND, WEIGH, BLOCKS)),
        (_copy, (x_ptr, x_desc, w_desc, order_ptr, blocks_ptr, x_smem, w_smem, full, empty, count, programs, active, N, K, BN, BOX, STEP, STAGES, LAG, GATED,
                 ALTERNATING)),
    ], [4, 4], [REGS, COPY_REGS])  # fmt: skip
