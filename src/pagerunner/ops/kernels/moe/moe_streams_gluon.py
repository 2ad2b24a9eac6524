"""The kernels of `kernels/moe/moe_streams.py`: experts' products with 4-bit weights, in Gluon, for dozens to hundreds of pairs of an expert.

One warp copies. Codes and inputs come into shared memory by the bulk copy engine, several stages ahead, across the end of a tile. C groups of warps
compute, each the sums of 64 rows of weights, a *block*. Weights are the matrix units' first operand, in registers: a row's codes become numbers
once for all pairs of the tile. While a group converts codes, its product of the step before runs, and so do the other groups' products.

A *part* is C blocks of an expert and one tile of its pairs. There are as many programs as multiprocessors, and they take parts in turns, in the order in which weights lie.

A *step* is 128 columns: a row's four lanes have a run of 32 columns each, 16 neighbouring bytes. A stage is one or two steps. `place_of` says where
inputs have a column, so that they meet the weights.

Shape letters as in `ops/moe.py`; M pairs of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.runtime.jit import constexpr_function

from pagerunner.ops.kernels.activation import CLAMPED_SWIGLU, gated, rounded
from pagerunner.ops.kernels.launch import start_next, start_next_and_wait, wait_turn
from pagerunner.ops.kernels.moe.moe_lanes_gluon import factors_of, half_of, lift_of

PLAIN, PAIRED, APART = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
"""Rows of a block: features; gates and ups in turns; 32 gates, then their ups."""
C = gl.constexpr(3)
"""Groups of four warps."""
BOX = gl.constexpr(16)
"""Pairs whose inputs are copied together."""


@constexpr_function
def _bits(ROWS: int) -> tuple[list[int], list[int], int]:
    """Rows of a block by the bits of a lane's row, of the warp, and of a thread's second row. Lanes' first bit is 4, so that eight lanes meet all banks."""
    if ROWS == 0:
        return [4, 1, 2], [16, 32], 8
    return ([4, 2, 8], [16, 32], 1) if ROWS == 1 else ([4, 1, 2], [8, 16], 32)


@constexpr_function
def _layout(
    ROWS: int, columns: list[list[int]], lanes: list[list[int]], shape: list[int]
) -> gl.DistributedLinearLayout:
    """Rows of a block, as matrix units have them, and what a thread (`columns`) and its row's four lanes have of each."""
    rest = [0] * (len(shape) - 1)
    lane, warp, second = _bits(ROWS)
    return gl.DistributedLinearLayout(
        [*columns, [second, *rest]], lanes + [[bit, *rest] for bit in lane], [[bit, *rest] for bit in warp], [], shape
    )


@constexpr_function
def _codes_layout(ROWS: int, S: int) -> gl.DistributedLinearLayout:
    """[64, 16 S] words."""
    return _layout(ROWS, [[0, 1], [0, 2], *([[0, 16]] if S == 2 else [])], [[0, 4], [0, 8]], [64, 16 * S])


@constexpr_function
def _scales_layout(ROWS: int, S: int) -> gl.DistributedLinearLayout:
    """[64, 4 S] scales, where their words are."""
    return _layout(ROWS, [[0, 4]] if S == 2 else [], [[0, 1], [0, 2]], [64, 4 * S])


@constexpr_function
def _words_layout(ROWS: int) -> gl.DistributedLinearLayout:
    """[64, 4, 4] words of 4 lanes."""
    return _layout(ROWS, [[0, 0, 1], [0, 0, 2]], [[0, 1, 0], [0, 2, 0]], [64, 4, 4])


@constexpr_function
def _in_order(ROWS: int) -> list[int]:
    """The six bits of a row, the highest first, in the order in which matrix units have rows: warp, second, lane."""
    lane, warp, second = _bits(ROWS)
    return [5 - (row.bit_length() - 1) for row in (warp[1], warp[0], second, lane[2], lane[1], lane[0])]


@gluon.jit
def place_of(column):
    """Where arranged inputs have a column."""
    half, word, second, odd = (column >> 4) & 1, (column >> 2) & 3, (column >> 1) & 1, column & 1
    return (column & -128) + half * 64 + word * 16 + odd * 8 + ((column >> 5) & 3) * 2 + second


@triton.jit
def _write_tiles(starts_ptr, tiles_ptr, count_ptr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr):
    """For each tile of up to BM pairs its expert, its first row among all pairs in expert order, and how many it has. And how many tiles there are."""
    experts = tl.arange(0, BE)
    starts = tl.load(starts_ptr + experts, mask=experts < E, other=0)
    ends = tl.load(starts_ptr + 1 + experts, mask=experts < E, other=0)
    high = (ends - starts + BM - 1) // BM
    before = tl.cumsum(high, 0) - high
    tl.store(count_ptr, tl.sum(high, 0))
    tile, most = 0, tl.max(high, 0)
    while tile < most:
        place = tiles_ptr + (before + tile) * 4
        mask = tile < high
        tl.store(place, experts, mask=mask)
        tl.store(place + 1, starts + tile * BM, mask=mask)
        tl.store(place + 2, tl.minimum(ends - starts - tile * BM, BM), mask=mask)
        tile += 1


@triton.jit(do_not_specialize=["active"])
def arrange_kernel(x_ptr, order_ptr, starts_ptr, out_ptr, tiles_ptr, count_ptr, x_row, active, K: tl.constexpr, WIDE: tl.constexpr,
                   E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, LIFTED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BLOCK columns of a pair's inputs, in expert order, put where `place_of` says, times 2 ** LIFTED; zeros beyond column K. The first program writes tiles."""
    start_next_and_wait(PDL)
    pair = tl.program_id(0) - 1
    if pair < 0:
        if tl.program_id(1) == 0:
            _write_tiles(starts_ptr, tiles_ptr, count_ptr, E, BE, BM)
    elif pair < tl.load(starts_ptr + E):
        token = (tl.load(order_ptr + pair) // active).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        power: tl.constexpr = 2.0**LIFTED
        x = tl.load(x_ptr + token * x_row + column, mask=column < K, other=0.0).to(tl.float32) * power
        x = tl.reshape(x.to(out_ptr.dtype.element_ty), (BLOCK // 128, 4, 2, 4, 2, 2))  # lane, half, word, second, odd
        x = tl.reshape(tl.permute(x, (0, 2, 3, 5, 1, 4)), (BLOCK,))
        tl.store(out_ptr + pair.to(tl.int64) * WIDE + column, x, mask=column < WIDE)


@gluon.jit
def _part(place, tiles_ptr, BLOCKS: gl.constexpr):
    """A part: its expert, its tile's first row and pairs, its first block of the expert's, and how many blocks."""
    PARTS: gl.constexpr = (BLOCKS + C - 1) // C
    entry = tiles_ptr + place // PARTS * 4
    inside = place % PARTS * C
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), inside, gl.minimum(BLOCKS - inside, C)


@gluon.jit
def _next(slot, phase, STAGES: gl.constexpr):
    """The slot of the next stage, and the phase of its barriers."""
    ends = slot == STAGES - 1
    return gl.where(ends, 0, slot + 1), gl.where(ends, phase ^ 1, phase)


@gluon.jit
def _copy_codes(
    w_desc, w_smem, full, slot, expert, inside, count, stage, N: gl.constexpr, S: gl.constexpr, ROWS: gl.constexpr
):
    """Begin to bring a stage's codes of `count` blocks."""
    outputs: gl.constexpr = N if ROWS == PLAIN else 2 * N
    for c in gl.static_range(C):
        if c < count:
            mbarrier.expect(full.index(slot), 64 * 64 * S)
            own = w_smem.index(slot * C + c)
            if ROWS == APART:
                row = expert * outputs + (inside + c) * 32
                tma.async_copy_global_to_shared(w_desc, [row, stage * (16 * S)], full.index(slot), own.slice(0, 32))
                tma.async_copy_global_to_shared(
                    w_desc, [row + N, stage * (16 * S)], full.index(slot), own.slice(32, 32)
                )
            else:
                row = expert * outputs + (inside + c) * 64
                tma.async_copy_global_to_shared(w_desc, [row, stage * (16 * S)], full.index(slot), own)
        else:
            mbarrier.arrive(full.index(slot))


@gluon.jit
def _copy(x_desc, w_desc, x_smem, w_smem, full, empty, tiles_ptr, first, last, programs, N: gl.constexpr, K: gl.constexpr, BM: gl.constexpr,
          S: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """The warp that copies. EARLY: the first stages' codes are on their way before the kernel before has ended."""
    outputs: gl.constexpr = N if ROWS == PLAIN else 2 * N
    BLOCKS: gl.constexpr = (outputs + 63) // 64
    ROUNDS: gl.constexpr = (K + 128 * S - 1) // (128 * S)
    AHEAD: gl.constexpr = (STAGES if STAGES < ROUNDS else ROUNDS) if EARLY else 0
    if EARLY:
        if first < last:
            expert, row, size, inside, count = _part(first, tiles_ptr, BLOCKS)
            for i in gl.static_range(AHEAD):
                _copy_codes(w_desc, w_smem, full, i, expert, inside, count, i, N, S, ROWS)
        wait_turn(PDL)
    place = first
    done = 0
    slot = 0
    phase = 0
    while place < last:
        expert, row, size, inside, count = _part(place, tiles_ptr, BLOCKS)
        place += programs
        for stage in range(ROUNDS):
            if done >= AHEAD:
                mbarrier.wait(empty.index(slot), phase ^ 1)
                _copy_codes(w_desc, w_smem, full, slot, expert, inside, count, stage, N, S, ROWS)
            for box in gl.static_range(BM // BOX):
                if box * BOX < size:
                    mbarrier.expect(full.index(slot), BOX * 256 * S)
                    for i in gl.static_range(2 * S):
                        tma.async_copy_global_to_shared(
                            x_desc, [row + box * BOX, (stage * (2 * S) + i) * 64], full.index(slot),
                            x_smem.index(slot * (2 * S) + i).slice(box * BOX, BOX),
                        )  # fmt: skip
                else:
                    mbarrier.arrive(full.index(slot))
            done += 1
            slot, phase = _next(slot, phase, STAGES)


@gluon.jit
def _load_scales(
    s_ptr, rows, first_row, columns, stage, K: gl.constexpr, S: gl.constexpr, TOTAL: gl.constexpr, SHARE: gl.constexpr
):
    """Scales of a stage; those of the last run for runs beyond."""
    ROW: gl.constexpr = K // 32 // SHARE
    own = gl.minimum(rows, TOTAL - 1 - first_row) * ROW
    at = gl.minimum(stage * (4 * S) + columns, K // 32 - 1) // SHARE
    return gl.load(s_ptr + first_row.to(gl.int64) * ROW + (own[:, None] + at[None, :]))


@gluon.jit
def _half(words, factors, HALF: gl.constexpr, FORM: gl.constexpr, OPERAND: gl.constexpr, ROWS: gl.constexpr):
    """The first operand that `half_of` makes, with rows in the matrix units' order."""
    ORDER: gl.constexpr = _in_order(ROWS)
    bits = gl.reshape(half_of(words, factors, HALF, FORM), [2, 2, 2, 2, 2, 2, 64])
    bits = gl.permute(bits, [ORDER[0], ORDER[1], ORDER[2], ORDER[3], ORDER[4], ORDER[5], 6])
    return gl.convert_layout(gl.reshape(bits, [64, 64]), OPERAND, assert_trivial=True)


@gluon.jit
def _steps_of(codes, scales, S: gl.constexpr, ROWS: gl.constexpr):
    """Words [64, 4, 4] and scales [64, 4] of each step of a stage."""
    LAYOUT: gl.constexpr = _words_layout(ROWS)
    if S == 1:
        words, own = (codes,), (scales,)
    else:
        words = gl.split(gl.permute(gl.reshape(codes, [64, 2, 16]), [0, 2, 1]))
        own = gl.split(gl.permute(gl.reshape(scales, [64, 2, 4]), [0, 2, 1]))
    steps = ()
    for step in gl.static_range(S):
        steps = steps + (
            (
                gl.convert_layout(gl.reshape(words[step], [64, 4, 4]), LAYOUT, assert_trivial=True),
                gl.convert_layout(own[step], gl.SliceLayout(2, LAYOUT), assert_trivial=True),
            ),
        )
    return steps


@gluon.jit
def _sums(x_smem, w_smem, full, empty, c, slot, phase, s_ptr, rows, columns, first_row, scales, later, K: gl.constexpr, TOTAL: gl.constexpr,
          M: gl.constexpr, S: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, FORM: gl.constexpr, SHARE: gl.constexpr):  # fmt: skip
    """A group's rows of weights times a tile's pairs, float32 [64, M]. Products of a step run while the next step's codes become numbers."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    acc = gl.zeros((64, M), gl.float32, SUMS)
    for stage in range((K + 128 * S - 1) // (128 * S)):
        mbarrier.wait(full.index(slot), phase)
        codes = w_smem.index(slot * C + c).load(_codes_layout(ROWS, S))
        steps = _steps_of(codes, scales, S, ROWS)
        scales = later
        later = _load_scales(s_ptr, rows, first_row, columns, stage + 2, K, S, TOTAL, SHARE)
        for step in gl.static_range(S):
            for half in gl.static_range(2):
                factors = factors_of(steps[step][1], half, FORM)
                numbers = _half(steps[step][0], factors, half, FORM, OPERAND, ROWS)
                x = x_smem.index(slot * (2 * S) + (step * 2 + half)).slice(0, M)
                acc = warpgroup_mma(numbers, x.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(2 if step + 1 < S else 0, deps=(acc,))
        mbarrier.arrive(empty.index(slot))
        slot, phase = _next(slot, phase, STAGES)
    return acc, slot, phase


@gluon.jit
def _finish(acc, r_ptr, bias_ptr, weights_ptr, order_ptr, out_ptr, limit, expert, row, size, block, N: gl.constexpr, OUT: gl.constexpr,
            ROWS: gl.constexpr, BIAS: gl.constexpr, KIND: gl.constexpr, WEIGH: gl.constexpr, FORM: gl.constexpr, FACTORS: gl.constexpr):  # fmt: skip
    """Store what becomes of sums [64, M]: the first product's in expert order and arranged, with zeros in places beyond."""
    M: gl.constexpr = acc.shape[1]
    SUMS: gl.constexpr = acc.type.layout
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    local = gl.arange(0, 64, gl.SliceLayout(1, SUMS))  # as matrix units have rows: 3 bits of lanes, second, warps
    pair = gl.arange(0, M, gl.SliceLayout(0, SUMS))
    own = gl.minimum(row + pair, row + size - 1)
    if WEIGH:
        weights = gl.load(weights_ptr + gl.load(order_ptr + own))[None, :]
    if ROWS == PLAIN:
        feature = block * 64 + (local & 56) + (local >> 1 & 1) + (local >> 2 & 1) * 2 + (local & 1) * 4
        inside = feature < N
        if FACTORS:
            acc = acc * gl.load(r_ptr + expert * N + gl.minimum(feature, N - 1))[:, None]
        if BIAS:
            acc += gl.load(bias_ptr + expert * N + gl.minimum(feature, N - 1)).to(gl.float32)[:, None]
        if WEIGH:
            acc = acc * weights
        target = gl.load(order_ptr + own)
        place = out_ptr + (target * OUT)[None, :] + feature[:, None]
        gl.store(place, acc.to(dtype), mask=inside[:, None] & (pair < size)[None, :])
    else:
        if WEIGH:
            acc = acc * weights
        gate, up = gl.split(gl.permute(gl.reshape(acc, [4, 2, 8, M]), [0, 2, 3, 1]))
        gate, up = gl.reshape(gate, [32, M]), gl.reshape(up, [32, M])
        HALF: gl.constexpr = gate.type.layout
        step: gl.constexpr = 2 if ROWS == PAIRED else 1
        ups: gl.constexpr = 1 if ROWS == PAIRED else N
        local = gl.arange(0, 32, gl.SliceLayout(1, HALF))
        pair = gl.arange(0, M, gl.SliceLayout(0, HALF))
        lane = local & 7
        if ROWS == PAIRED:
            lane = (lane & 4) + (lane & 1) * 2 + (lane >> 1 & 1)
        else:
            lane = (lane & 1) * 4 + (lane >> 1)
        feature = block * 32 + (local & -8) + lane
        inside = feature < N
        own = expert * (2 * N) + gl.minimum(feature, N - 1) * step
        if FACTORS:
            gate = gate * gl.load(r_ptr + own)[:, None]
            up = up * gl.load(r_ptr + (own + ups))[:, None]
        if BIAS:
            gate += gl.load(bias_ptr + own).to(gl.float32)[:, None]
            up += gl.load(bias_ptr + (own + ups)).to(gl.float32)[:, None]
        power: gl.constexpr = 2.0 ** lift_of(FORM)
        y = gated(rounded(gate, dtype), rounded(up, dtype), limit, KIND, dtype).to(gl.float32) * power
        line = out_ptr + ((row + pair) * OUT)[None, :]
        valid = (pair < size)[None, :]
        gl.store(line + place_of(feature)[:, None], y.to(dtype), mask=inside[:, None] & valid)
        if OUT > N:
            if block == 0:
                for more in gl.static_range((OUT - N + 31) // 32):
                    beyond = N + more * 32 + local
                    zeros = gl.zeros([32, M], dtype, HALF)
                    gl.store(line + place_of(beyond)[:, None], zeros, mask=(beyond < OUT)[:, None] & valid)


@gluon.jit
def _begin(c, place, last, s_ptr, tiles_ptr, rows, columns, N: gl.constexpr, K: gl.constexpr, S: gl.constexpr, ROWS: gl.constexpr, TOTAL: gl.constexpr, SHARE: gl.constexpr):  # fmt: skip
    """The part at a place or, beyond the last one, the last; a group's first row of weights there, and its first two stages' scales."""
    outputs: gl.constexpr = N if ROWS == PLAIN else 2 * N
    expert, row, size, inside, count = _part(gl.minimum(place, last - 1), tiles_ptr, (outputs + 63) // 64)
    first_row = expert * outputs + (inside + c) * (32 if ROWS == APART else 64)
    first_row = gl.minimum(first_row, TOTAL - 1)
    scales = _load_scales(s_ptr, rows, first_row, columns, 0, K, S, TOTAL, SHARE)
    later = _load_scales(s_ptr, rows, first_row, columns, 1, K, S, TOTAL, SHARE)
    return expert, row, size, inside, count, first_row, scales, later


@gluon.jit
def _compute(c, x_smem, w_smem, full, empty, s_ptr, r_ptr, bias_ptr, weights_ptr, order_ptr, tiles_ptr, out_ptr, first, last, programs, limit,
             E: gl.constexpr, N: gl.constexpr, K: gl.constexpr, OUT: gl.constexpr, WIDTHS: gl.constexpr, S: gl.constexpr,
             ROWS: gl.constexpr, STAGES: gl.constexpr, BIAS: gl.constexpr, KIND: gl.constexpr, WEIGH: gl.constexpr, FORM: gl.constexpr,
             SHARE: gl.constexpr, FACTORS: gl.constexpr):  # fmt: skip
    """A group of warps: the sums of 64 rows of each part, and what is stored of them. A tile is computed with the first of WIDTHS that holds its pairs."""
    outputs: gl.constexpr = N if ROWS == PLAIN else 2 * N
    ROUNDS: gl.constexpr = (K + 128 * S - 1) // (128 * S)
    TOTAL: gl.constexpr = E * outputs
    SCALES: gl.constexpr = _scales_layout(ROWS, S)
    rows = gl.arange(0, 64, gl.SliceLayout(1, SCALES))
    if ROWS == APART:
        rows = rows % 32 + rows // 32 * N
    columns = gl.arange(0, 4 * S, gl.SliceLayout(0, SCALES))
    slot = 0
    phase = 0
    place = first
    if first < last:
        then = _begin(c, first, last, s_ptr, tiles_ptr, rows, columns, N, K, S, ROWS, TOTAL, SHARE)
        expert, row, size, inside, count, first_row, scales, later = then
        while place < last:
            place += programs
            then = expert, row, size, inside, count, first_row, scales, later
            if c < count:
                for way in gl.static_range(len(WIDTHS)):
                    if (size > (WIDTHS[way - 1] if way else 0)) & (size <= WIDTHS[way]):
                        acc, slot, phase = _sums(x_smem, w_smem, full, empty, c, slot, phase, s_ptr, rows, columns, first_row, scales,
                                                 later, K, TOTAL, WIDTHS[way], S, ROWS, STAGES, FORM, SHARE)  # fmt: skip
                        then = _begin(c, place, last, s_ptr, tiles_ptr, rows, columns, N, K, S, ROWS, TOTAL, SHARE)
                        _finish(acc, r_ptr, bias_ptr, weights_ptr, order_ptr, out_ptr, limit, expert, row, size, inside + c, N, OUT, ROWS,
                                BIAS, KIND, WEIGH, FORM, FACTORS)  # fmt: skip
            else:
                for _stage in range(ROUNDS):
                    mbarrier.wait(full.index(slot), phase)
                    mbarrier.arrive(empty.index(slot))
                    slot, phase = _next(slot, phase, STAGES)
                then = _begin(c, place, last, s_ptr, tiles_ptr, rows, columns, N, K, S, ROWS, TOTAL, SHARE)
            expert, row, size, inside, count, first_row, scales, later = then


@gluon.jit(do_not_specialize=["programs"])
def streams_kernel(x_desc, w_desc, s_ptr, r_ptr, bias_ptr, weights_ptr, order_ptr, tiles_ptr, count_ptr, out_ptr, programs, limit, E: gl.constexpr,
                   N: gl.constexpr, K: gl.constexpr, OUT: gl.constexpr, WIDTHS: gl.constexpr, S: gl.constexpr, STAGES: gl.constexpr,
                   BIAS: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr, WEIGH: gl.constexpr, FORM: gl.constexpr, SHARE: gl.constexpr,
                   FACTORS: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """One of the two products. The first (GATED) reads pairs' inputs and stores what the activation makes of gates and ups, both in expert order and
    arranged. The second reads these rows and stores pairs in the tokens' order."""
    ROWS: gl.constexpr = (PAIRED if KIND == CLAMPED_SWIGLU else APART) if GATED else PLAIN
    BM: gl.constexpr = WIDTHS[len(WIDTHS) - 1]
    if GATED:  # the second product reads the tiles before its turn, so they must be there when it starts
        wait_turn(PDL)
    start_next(PDL)
    dtype: gl.constexpr = x_desc.dtype
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * 2 * S, BM, 64], x_desc.layout)
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES * C, 64, 16 * S], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=C + BM // BOX)
        mbarrier.init(empty.index(i), count=C)
    fence_async_shared()
    outputs: gl.constexpr = 2 * N if GATED else N
    PARTS: gl.constexpr = ((outputs + 63) // 64 + C - 1) // C
    first, last = gl.program_id(0), gl.load(count_ptr) * PARTS
    gl.warp_specialize([
        (_compute, (gl.to_tensor(0), x_smem, w_smem, full, empty, s_ptr, r_ptr, bias_ptr, weights_ptr, order_ptr, tiles_ptr, out_ptr, first, last,
                    programs, limit, E, N, K, OUT, WIDTHS, S, ROWS, STAGES, BIAS, KIND, WEIGH, FORM, SHARE, FACTORS)),
        (_compute, (gl.to_tensor(1), x_smem, w_smem, full, empty, s_ptr, r_ptr, bias_ptr, weights_ptr, order_ptr, tiles_ptr, out_ptr, first, last,
                    programs, limit, E, N, K, OUT, WIDTHS, S, ROWS, STAGES, BIAS, KIND, WEIGH, FORM, SHARE, FACTORS)),
        (_compute, (gl.to_tensor(2), x_smem, w_smem, full, empty, s_ptr, r_ptr, bias_ptr, weights_ptr, order_ptr, tiles_ptr, out_ptr, first, last,
                    programs, limit, E, N, K, OUT, WIDTHS, S, ROWS, STAGES, BIAS, KIND, WEIGH, FORM, SHARE, FACTORS)),
        (_copy, (x_desc, w_desc, x_smem, w_smem, full, empty, tiles_ptr, first, last, programs, N, K, BM, S, ROWS, STAGES, not GATED, PDL)),
    ], [4, 4, 1], [160, 160, 24])  # fmt: skip
