"""The kernels of `kernels/lora/lora.py` beside a product of several tokens, in Gluon: Triton's language with layouts that the program chooses.

Adapters go from memory into the registers from which matrix units take them, so no thread waits for another one's numbers. Ranks of A, or outputs of B, are rows of
a matrix unit's result, and a tile's tokens, 8 at most, its columns. A column's sums are its own: one without a token computes the first one's again, and
nobody stores them.

A thread loads 16 bytes: of A eight features of a rank, as in `kernels/linear/linear_held_gluon.py`; of B eight outputs of each of four ranks. These are two rows each of
four results, so a thread has eight neighbouring outputs of a token. Example: outputs 0 to 7 are rows 0 and 8 of a warp's four results.

A thread stands still at the first number that it needs and that isn't there. So what says where numbers lie is asked for at once, and then all numbers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from pagerunner.ops.kernels.launch import start_next, wait_turn


@gluon.jit
def _places(places, slot, product, products, BLOCKS: gl.constexpr):
    """Where it is said where a product's blocks lie; slot 0's, if there is no slot."""
    return places + (gl.maximum(slot, 0) * products + product).to(gl.int64) * (BLOCKS * 2)


@gluon.jit
def _step(at, cols, left, axis: gl.constexpr, EVEN: gl.constexpr):
    """A step's numbers, zeros behind the inputs. `axis` is the one of `at` that isn't one of columns."""
    if EVEN:
        numbers = gl.load(at)
    else:
        numbers = gl.load(at, mask=gl.expand_dims(cols < left, axis), other=0.0)
    return numbers


@gluon.jit
def _shrink_program(x_TI, x_stride, tokens_WX, slots_W, places, pool, inner, inputs, first, products, w, own, piece, BLOCKS: gl.constexpr, PARTS: gl.constexpr,
                    K: gl.constexpr, STEP: gl.constexpr, S: gl.constexpr, EVEN: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """`A x` of a tile, a block of ranks and K input features, which S warps divide between them."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [S, 1, 1], [1, 16, 8])
    one: gl.constexpr = gl.DotOperandLayout(0, mma, 8)
    two: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    outs: gl.constexpr = gl.SliceLayout(0, mma)
    tokens = tokens_WX + w * 16
    slot, least = gl.load(slots_W + w), gl.load(tokens)
    token = gl.load(tokens + gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, two))))
    if slot >= 0:
        place = gl.load(_places(places, slot, first + own // BLOCKS, products, BLOCKS) + own % BLOCKS * 2)
        if place >= 0:
            left = inputs - piece * K
            a_cols = gl.expand_dims(gl.arange(0, S, gl.SliceLayout(1, gl.SliceLayout(1, one))), 1) * (K // S)
            a_cols = a_cols + gl.expand_dims(gl.arange(0, STEP, gl.SliceLayout(0, gl.SliceLayout(1, one))), 0)
            ranks = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, one)))
            a_at = pool + (place // 16 * 16 + piece * K) + (ranks * inputs)[None, :, None] + a_cols[:, None, :]
            x_cols = gl.expand_dims(gl.arange(0, S, gl.SliceLayout(1, gl.SliceLayout(2, two))), 1) * (K // S)
            x_cols = x_cols + gl.expand_dims(gl.arange(0, STEP, gl.SliceLayout(0, gl.SliceLayout(2, two))), 0)
            to = inner + ((piece * gl.num_programs(0) + w).to(gl.int64) * PARTS * BLOCKS + own) * 256
            to_rank = gl.arange(0, 16, gl.SliceLayout(1, outs))
            token = gl.where(token < 0, least, token)
            x_at = x_TI + piece * K + token.to(gl.int64)[None, None, :] * x_stride + x_cols[:, :, None]
            acc = gl.zeros((S, 16, 8), gl.float32, mma)
            for step in gl.static_range(K // S // STEP):
                a = _step(a_at + step * STEP, a_cols, left - step * STEP, 1, EVEN)
                x = _step(x_at + step * STEP, x_cols, left - step * STEP, 2, EVEN)
                acc = mma_v2(a, x, acc)
            to_column = gl.arange(0, 8, gl.SliceLayout(0, outs))
            there = gl.load(tokens + to_column) >= 0
            gl.store(to + to_column[None, :] * 16 + to_rank[:, None], gl.sum(acc, 0), mask=there[None, :])
    # Programs of the first tile wait in any case, so this kernel doesn't end before the one before, and who comes next waits for this one alone.
    if (w == 0) & (own == 0) & (piece == 0):
        wait_turn(PDL)


@gluon.jit
def _sum_program(number, sums, bias_O, y_TO, y_stride, num_tokens, num_outputs, all_features, rows, total, steps, BT: gl.constexpr,
                 SUMS: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """512 of the product's outputs: the sums of their parts, SUMS at most, as `_sum_kernel` of `linear_dense.py` makes them. A thread has eight of each part."""
    BLOCK: gl.constexpr = 512 // BT
    layout: gl.constexpr = gl.BlockedLayout([2, 4], [128 // BT, BT // 4], [2, 1], [1, 0])
    stored: gl.constexpr = gl.BlockedLayout([8, 1], [BLOCK // 8, BT // 2], [1, 2], [0, 1])
    first = number * BLOCK
    features = first + gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
    tokens = gl.arange(0, BT, gl.SliceLayout(0, layout))
    begin = first // rows * total
    count = (begin + total - 1) // steps - begin // steps + 1
    at = sums + (features.to(gl.int64)[:, None] * BT + tokens[None, :])
    known = (features < num_outputs)[:, None] & (tokens < (num_tokens + 7) // 8 * 8)[None, :]
    out = first + gl.arange(0, BLOCK, gl.SliceLayout(1, stored))
    token = gl.arange(0, BT, gl.SliceLayout(0, stored))
    y_at = y_TO + token.to(gl.int64)[None, :] * y_stride + out[:, None]
    there = (out < num_outputs)[:, None] & (token < num_tokens)[None, :]
    wait_turn(PDL)
    parts = ()
    for part in gl.static_range(SUMS):
        parts = parts + (gl.load(at + part * (all_features * BT), mask=known & (part < count), other=0.0),)
    old = gl.zeros((BLOCK, BT), gl.float32, stored)
    if ADD:
        old = gl.load(y_at, mask=there, other=0.0).to(gl.float32)
    acc = parts[0]
    for part in gl.static_range(1, SUMS):
        acc += parts[part]
    if BIAS:
        acc += gl.load(bias_O + gl.minimum(features, num_outputs - 1)).to(gl.float32)[:, None]
    y = gl.convert_layout(acc.to(y_TO.dtype.element_ty), stored)
    if ADD:
        y = (old + y.to(gl.float32)).to(y_TO.dtype.element_ty)
    gl.store(y_at, y, mask=there)


@gluon.jit(do_not_specialize=["first", "pieces", "num_tokens", "all_features", "rows", "total", "steps"])
def shrink_kernel(x_TI, x_stride, tokens_WX, slots_W, places, pool, inner, inputs, first, products, pieces, sums, bias_O, y_TO, y_stride, num_tokens, num_outputs,
                  all_features, rows, total, steps, BLOCKS: gl.constexpr, PARTS: gl.constexpr, K: gl.constexpr, STEP: gl.constexpr, S: gl.constexpr, EVEN: gl.constexpr,
                  BT: gl.constexpr, SUMS: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """Programs of `A x`, and behind them those that add up the product's own sums, if it has left some. The product lets this kernel start when all before have ended."""
    start_next(PDL)
    w, own, piece = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    if piece < pieces:
        _shrink_program(
            x_TI, x_stride, tokens_WX, slots_W, places, pool, inner, inputs, first, products, w, own, piece, BLOCKS, PARTS, K, STEP, S, EVEN, PDL,
        )  # fmt: skip
    if SUMS:
        number = ((piece - pieces) * gl.num_programs(1) + own) * gl.num_programs(0) + w
        if (piece >= pieces) & (number * (512 // BT) < num_outputs):
            _sum_program(
                number, sums, bias_O, y_TO, y_stride, num_tokens, num_outputs, all_features, rows, total, steps, BT, SUMS, ADD, BIAS, PDL,
            )  # fmt: skip


@gluon.constexpr_function
def _ranks_layout(warps):
    """B as it is loaded, [16 ranks, 64 outputs of each warp]."""
    lanes = [[4, 0], [8, 0], [0, 8], [0, 16], [0, 32]]
    among = [[0, 64 << bit] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [1, 0], [2, 0]], lanes, among, [], [16, 64 * warps])


@gluon.constexpr_function
def _outputs_layout(warps):
    """Outputs as they are loaded and stored, [8 tokens, 64 outputs of each warp]."""
    lanes = [[2, 0], [4, 0], [0, 8], [0, 16], [0, 32]]
    among = [[0, 64 << bit] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [1, 0]], lanes, among, [], [8, 64 * warps])


@gluon.jit
def _ranks(pool, place, outputs, at, count, WARPS: gl.constexpr):
    """A block of B for the outputs from `at` on, `count` at most; zeros without a place."""
    layout: gl.constexpr = _ranks_layout(WARPS)
    ranks = gl.arange(0, 16, gl.SliceLayout(1, layout))
    o = gl.arange(0, 64 * WARPS, gl.SliceLayout(0, layout))
    b_at = pool + (gl.maximum(place, 0) // 16 * 16 + at) + (ranks * outputs)[:, None] + o[None, :]
    return gl.load(b_at, mask=((o < count) & (place >= 0))[None, :], other=0.0)


@gluon.jit
def _inner(inner, column, step, PIECES: gl.constexpr, dtype: gl.constexpr, WARPS: gl.constexpr):
    """`A x` of a block's ranks and a tile's tokens, [16, 8]: the sum of the pieces in their order."""
    two: gl.constexpr = gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8]), 4)
    at = inner + column[None, :] * 16 + gl.arange(0, 16, gl.SliceLayout(1, two))[:, None]
    h = gl.load(at)
    for piece in gl.static_range(1, PIECES):
        h += gl.load(at + piece * step)
    return h.to(dtype)


@gluon.jit
def _times(b, h, acc, WARPS: gl.constexpr):
    """The sums with `B h` of a tile's tokens, [outputs, 8], whose rows are in the order of matrix units' results."""
    one: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8]), 4)
    b = gl.permute(gl.reshape(b, [16, WARPS, 8, 4, 2]), (3, 1, 4, 2, 0))
    return mma_v2(gl.convert_layout(gl.reshape(b, [64 * WARPS, 16]), one), h, acc)


@gluon.jit
def _in_order(acc, WARPS: gl.constexpr):
    """These sums as [8 tokens, outputs]."""
    acc = gl.permute(gl.reshape(acc, [4, WARPS, 2, 8, 8]), (4, 1, 3, 0, 2))
    return gl.convert_layout(gl.reshape(acc, [8, 64 * WARPS]), _outputs_layout(WARPS))


@gluon.jit(do_not_specialize=["first"])
def expand_kernel(y_TO, y_stride, inner, tokens_WX, slots_W, places, pool, tiles_N5, first, products, PIECES: gl.constexpr, BLOCKS: gl.constexpr,
                  PARTS: gl.constexpr, UNITS: gl.constexpr, WARPS: gl.constexpr, ALIGN: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """Add `B (A x)` of a tile's tokens to outputs of a product: UNITS of 64 for each warp, whose ranks are on their way before the turn."""
    start_next(PDL)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    SIZE: gl.constexpr = 64 * WARPS
    w, tile = gl.program_id(0), tiles_N5 + gl.program_id(1) * 5
    tokens = tokens_WX + w * 16
    slot = gl.load(slots_W + w)
    part, at, out = gl.load(tile), gl.load(tile + 1) // ALIGN * ALIGN, gl.load(tile + 2) // ALIGN * ALIGN
    count, outputs = gl.load(tile + 3) // ALIGN * ALIGN, gl.load(tile + 4) // ALIGN * ALIGN
    token = gl.load(tokens + gl.arange(0, 8, gl.SliceLayout(1, _outputs_layout(WARPS))))
    column = gl.arange(0, 8, gl.SliceLayout(0, gl.DotOperandLayout(1, mma, 4)))
    column = gl.where(gl.load(tokens + column) < 0, 0, column)
    if (slot < 0) & (w > 0):  # as in `shrink_kernel`
        return
    own = _places(places, slot, first + part, products, BLOCKS) + 1
    place = gl.load(own)
    b = ()
    for unit in gl.static_range(UNITS):
        b = b + (_ranks(pool, place, outputs, at + unit * SIZE, count - unit * SIZE, WARPS),)
    step = gl.num_programs(0) * (PARTS * BLOCKS * 256)
    inner += (w * PARTS + part) * (BLOCKS * 256)
    o = gl.arange(0, SIZE, gl.SliceLayout(0, _outputs_layout(WARPS)))
    wait_turn(PDL)
    if (slot < 0) | (place < 0):
        return
    y_at = y_TO + out + token.to(gl.int64)[:, None] * y_stride + o[None, :]
    y, sums = (), ()
    for unit in gl.static_range(UNITS):
        there = (token >= 0)[:, None] & (o < count - unit * SIZE)[None, :]
        y = y + (gl.load(y_at + unit * SIZE, mask=there, other=0.0),)
        sums = sums + (gl.zeros((SIZE, 8), gl.float32, mma),)
    for block in gl.static_range(BLOCKS):
        h = _inner(inner + block * 256, column, step, PIECES, pool.dtype.element_ty, WARPS)
        if block > 0:
            place = gl.load(own + block * 2)
            h, b = gl.where(place < 0, gl.zeros_like(h), h), ()  # what isn't there left anything
            for unit in gl.static_range(UNITS):
                b = b + (_ranks(pool, place, outputs, at + unit * SIZE, count - unit * SIZE, WARPS),)
        before, sums = sums, ()
        for unit in gl.static_range(UNITS):
            sums = sums + (_times(b[unit], h, before[unit], WARPS),)
    for unit in gl.static_range(UNITS):
        there = (token >= 0)[:, None] & (o < count - unit * SIZE)[None, :]
        total = y[unit].to(gl.float32) + _in_order(sums[unit], WARPS)
        gl.store(y_at + unit * SIZE, total.to(y_TO.dtype.element_ty), mask=there)
