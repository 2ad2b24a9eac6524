"""Products of 33 to 64 tokens in parts, as `kernels/linear_dense_gluon.py` has them, with `A x` of adapters from further rows of each tile. In Gluon.

A program has some columns of a tile's weights, and the same columns of some blocks of A, 16 rows each: the copy engine brings both, as fast as memory gives them, and both are multiplied with the same
inputs. Blocks may lie anywhere in the pool, as one dimension of its tensor steps by 16 elements, so that rows overlap. What isn't there is zeros.

Example: 4096 x 4096 are 32 tiles of 128 rows, of each of which four programs have a quarter of the columns. With 64 adapters of rank 16 each tile has two blocks.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pagerunner.ops.kernels.launch import start_next, wait_turn
from pagerunner.ops.kernels.linear_dense_gluon import OPERANDS as OPERANDS
from pagerunner.ops.kernels.linear_dense_gluon import TensorDescriptor as TensorDescriptor
from pagerunner.ops.kernels.linear_dense_gluon import _copy_inputs, _copy_weights, _store_sums, stages


@gluon.jit
def _copy_ranks(a_desc, low, high, full, slot, column, some, units, LOW: gl.constexpr, HIGH: gl.constexpr):
    """Begin to bring 64 columns of a tile's blocks of A, if it has any."""
    if some:
        mbarrier.expect(full, (LOW + HIGH) * 2048)
        for j in gl.static_range(LOW + HIGH):
            corner = [units[j] >> 16 & 0xFFFF, units[j] & 0xFFFF, 0, column]
            if j < LOW:
                room = low.index(slot)._reinterpret(a_desc.dtype, [LOW, 1, 1, 16, 64], a_desc.layout).index(j)
                tma.async_copy_global_to_shared(a_desc, corner, full, room)
            else:
                room = high.index(slot)._reinterpret(a_desc.dtype, [HIGH, 1, 1, 16, 64], a_desc.layout).index(j - LOW)
                tma.async_copy_global_to_shared(a_desc, corner, full, room)
    else:
        mbarrier.arrive(full)


@gluon.jit
def _copy(w_desc, x_desc, a_desc, w_smem, x_smem, low, high, w_full, x_full, done, slots_W, places, tile, apart, units, first, products, column, steps,
          C: gl.constexpr, W_STAGES: gl.constexpr, X_STAGES: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, BLOCKS: gl.constexpr, OWN: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """The warp that copies, as that of products without adapters. Of the layer's blocks of A a tile has every so manieth, as many as there are tiles of rows."""
    row = tile * (C * 64)
    for step in range(gl.minimum(steps, W_STAGES)):
        _copy_weights(w_desc, w_smem, w_full, step, row, column + step * 64, 0, C, False, 64)
    index = gl.arange(0, 8, gl.BlockedLayout([1], [32], [1], [0]))
    unit = tile + index * apart
    slot_of = gl.load(slots_W + unit // OWN, mask=(unit < units) & (index < LOW + HIGH), other=-1)
    at = (slot_of * products + first + unit % OWN // BLOCKS).to(gl.int64) * (2 * BLOCKS) + unit % BLOCKS * 2
    place = (gl.load(places + at, mask=slot_of >= 0, other=-1) >> 4).to(gl.int32)
    some = gl.max(place, 0) >= 0
    own = ()
    for j in gl.static_range(LOW + HIGH):
        own = own + (gl.sum(gl.where(index == j, place, 0), 0),)
    for step in range(gl.minimum(steps, W_STAGES)):
        _copy_ranks(a_desc, low, high, w_full.index(step), step, column + step * 64, some, own, LOW, HIGH)
    wait_turn(PDL)
    for step in range(gl.minimum(steps, X_STAGES)):
        _copy_inputs(x_desc, x_smem, x_full, step, column + step * 64, 64)
    slot, x_slot, parity = 0, 0, 0
    for step in range(X_STAGES, steps):
        mbarrier.wait(done.index(x_slot), parity)
        _copy_inputs(x_desc, x_smem, x_full, x_slot, column + step * 64, 64)
        ahead = step - X_STAGES + W_STAGES
        if ahead < steps:
            _copy_weights(w_desc, w_smem, w_full, slot, row, column + ahead * 64, 0, C, False, 64)
            _copy_ranks(a_desc, low, high, w_full.index(slot), slot, column + ahead * 64, some, own, LOW, HIGH)
        slot += 1
        if slot == W_STAGES:
            slot = 0
        x_slot += 1
        if x_slot == X_STAGES:
            x_slot = 0
            parity ^= 1


@gluon.jit
def _multiply(c, w_smem, x_smem, w_full, x_full, done, sums_PTO, tile, part, steps, num_tokens, C: gl.constexpr, W_STAGES: gl.constexpr, X_STAGES: gl.constexpr,
              OUTPUTS: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """One group of four warps: 64 rows of weights."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    wait_turn(PDL)
    acc = gl.zeros((64, 64), gl.float32, layout)
    for step in range(steps):
        w_slot, x_slot = step % W_STAGES, step % X_STAGES
        mbarrier.wait(w_full.index(w_slot), step // W_STAGES & 1)
        mbarrier.wait(x_full.index(x_slot), step // X_STAGES & 1)
        acc = warpgroup_mma(w_smem.index(w_slot * C + c), x_smem.index(x_slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        if step > 0:
            mbarrier.arrive(done.index((step - 1) % X_STAGES))
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(done.index((steps - 1) % X_STAGES))
    at = part.to(gl.int64) * (64 * OUTPUTS) + (tile * C + c) * 64
    _store_sums(acc, sums_PTO + at, num_tokens, OUTPUTS)


@gluon.jit
def _store_ranks(
    acc, inner, position, tile, apart, units, part, tiles, before: gl.constexpr, OWN: gl.constexpr, layout: gl.constexpr
):
    """Store `A x` [tokens, ranks] of blocks from the one `before` which so many are: each block's for the tokens of its own tile."""
    rank = gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    unit = tile + (before + rank // 16) * apart
    at = ((part * tiles + unit // OWN) * OWN + unit % OWN) * 256 + rank % 16
    mine = gl.expand_dims(position >> 4, 1) == gl.expand_dims(unit // OWN, 0)
    gl.store(
        inner + (gl.expand_dims(at, 0) + gl.expand_dims(position & 15, 1) * 16),
        acc,
        mask=mine & gl.expand_dims(unit < units, 0),
    )


@gluon.jit
def _inner(x_smem, low, high, w_full, x_full, done, inner, positions_T, tile, apart, units, part, tiles, steps, num_tokens, W_STAGES: gl.constexpr, X_STAGES: gl.constexpr,
           LOW: gl.constexpr, HIGH: gl.constexpr, OWN: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """Four warps more: `A x` of the tile's blocks, with all tokens."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16 * LOW, 16])
    token = gl.arange(0, 64, gl.SliceLayout(1, layout))
    position = gl.load(positions_T + token, mask=token < num_tokens, other=-1)
    acc = gl.zeros((64, 16 * LOW), gl.float32, layout)
    if HIGH > 0:
        layout_more: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16 * HIGH, 16])
        more = gl.zeros((64, 16 * HIGH), gl.float32, layout_more)
    wait_turn(PDL)
    for step in range(steps):
        w_slot, x_slot = step % W_STAGES, step % X_STAGES
        mbarrier.wait(w_full.index(w_slot), step // W_STAGES & 1)
        mbarrier.wait(x_full.index(x_slot), step // X_STAGES & 1)
        acc = warpgroup_mma(x_smem.index(x_slot), low.index(w_slot).permute((1, 0)), acc, is_async=True)
        if HIGH > 0:
            more = warpgroup_mma(x_smem.index(x_slot), high.index(w_slot).permute((1, 0)), more, is_async=True)
            acc, more = warpgroup_mma_wait(2, deps=(acc, more))
        else:
            acc = warpgroup_mma_wait(1, deps=(acc,))
        if step > 0:
            mbarrier.arrive(done.index((step - 1) % X_STAGES))
    if HIGH > 0:
        acc, more = warpgroup_mma_wait(0, deps=(acc, more))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(done.index((steps - 1) % X_STAGES))
    _store_ranks(acc, inner, position, tile, apart, units, part, tiles, 0, OWN, layout)
    if HIGH > 0:
        of_more = gl.convert_layout(position, gl.SliceLayout(1, layout_more))
        _store_ranks(more, inner, of_more, tile, apart, units, part, tiles, LOW, OWN, layout_more)


@gluon.jit(do_not_specialize=["num_tokens", "apart", "units", "tiles", "first", "steps"])
def adapted_kernel(w_desc, x_desc, a_desc, sums_PTO, inner, slots_W, positions_T, places, num_tokens, apart, units, tiles, first, products, steps, PARTS: gl.constexpr,
                   C: gl.constexpr, W_STAGES: gl.constexpr, X_STAGES: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, BLOCKS: gl.constexpr, OWN: gl.constexpr,
                   OUTPUTS: gl.constexpr, REGS: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """A product's sums [PARTS, 64, OUTPUTS], of `steps` steps each, and `A x` [PARTS, tiles of tokens, OWN, 16, 16] of `units` blocks of the layer's products, OWN of each tile of tokens.
    `apart`: how many tiles of rows there are.
    """
    start_next(PDL)
    dtype: gl.constexpr = w_desc.dtype
    w_smem = gl.allocate_shared_memory(dtype, [W_STAGES * C, 64, 64], w_desc.layout)
    low = gl.allocate_shared_memory(dtype, [W_STAGES, 16 * LOW, 64], w_desc.layout)
    high = low
    if HIGH > 0:
        high = gl.allocate_shared_memory(dtype, [W_STAGES, 16 * HIGH, 64], w_desc.layout)
    x_smem = gl.allocate_shared_memory(dtype, [X_STAGES, 64, 64], x_desc.layout)
    w_full, x_full, done = stages(C + 1, W_STAGES, X_STAGES, 2)
    tile, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    column = part * steps * 64
    c0, c1, c2 = gl.to_tensor(0), gl.to_tensor(1), gl.to_tensor(2)
    if C == 1:
        gl.warp_specialize([
            (_multiply, (c0, w_smem, x_smem, w_full, x_full, done, sums_PTO, tile, part, steps, num_tokens, C, W_STAGES, X_STAGES, OUTPUTS, PDL)),
            (_inner, (x_smem, low, high, w_full, x_full, done, inner, positions_T, tile, apart, units, part, tiles, steps, num_tokens, W_STAGES, X_STAGES, LOW, HIGH, OWN, PDL)),
            (_copy, (w_desc, x_desc, a_desc, w_smem, x_smem, low, high, w_full, x_full, done, slots_W, places, tile, apart, units, first, products, column, steps, C, W_STAGES, X_STAGES,
                     LOW, HIGH, BLOCKS, OWN, PDL)),
        ], [4, 1], [REGS, 48])  # fmt: skip
    elif C == 2:
        gl.warp_specialize([
            (_multiply, (c0, w_smem, x_smem, w_full, x_full, done, sums_PTO, tile, part, steps, num_tokens, C, W_STAGES, X_STAGES, OUTPUTS, PDL)),
            (_multiply, (c1, w_smem, x_smem, w_full, x_full, done, sums_PTO, tile, part, steps, num_tokens, C, W_STAGES, X_STAGES, OUTPUTS, PDL)),
            (_inner, (x_smem, low, high, w_full, x_full, done, inner, positions_T, tile, apart, units, part, tiles, steps, num_tokens, W_STAGES, X_STAGES, LOW, HIGH, OWN, PDL)),
            (_copy, (w_desc, x_desc, a_desc, w_smem, x_smem, low, high, w_full, x_full, done, slots_W, places, tile, apart, units, first, products, column, steps, C, W_STAGES, X_STAGES,
                     LOW, HIGH, BLOCKS, OWN, PDL)),
        ], [4, 4, 1], [REGS, REGS, 48])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (c0, w_smem, x_smem, w_full, x_full, done, sums_PTO, tile, part, steps, num_tokens, C, W_STAGES, X_STAGES, OUTPUTS, PDL)),
            (_multiply, (c1, w_smem, x_smem, w_full, x_full, done, sums_PTO, tile, part, steps, num_tokens, C, W_STAGES, X_STAGES, OUTPUTS, PDL)),
            (_multiply, (c2, w_smem, x_smem, w_full, x_full, done, sums_PTO, tile, part, steps, num_tokens, C, W_STAGES, X_STAGES, OUTPUTS, PDL)),
            (_inner, (x_smem, low, high, w_full, x_full, done, inner, positions_T, tile, apart, units, part, tiles, steps, num_tokens, W_STAGES, X_STAGES, LOW, HIGH, OWN, PDL)),
            (_copy, (w_desc, x_desc, a_desc, w_smem, x_smem, low, high, w_full, x_full, done, slots_W, places, tile, apart, units, first, products, column, steps, C, W_STAGES, X_STAGES,
                     LOW, HIGH, BLOCKS, OWN, PDL)),
        ], [4, 4, 4, 1], [REGS, REGS, REGS, 48])  # fmt: skip
