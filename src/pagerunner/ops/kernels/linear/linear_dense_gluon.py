"""The kernel of `kernels/linear/linear_dense.py`, in Gluon: Triton's language with layouts that the program chooses.

One warp copies, several steps ahead. Before the kernel before has ended it fills all room for weights; after that, inputs come, too.
C groups of four warps multiply, each 64 rows of weights times all tokens. Both operands are in shared memory. With gates inside it is all tokens
times HIGH rows, so that a gate and its up are a thread's.

Shape letters: BT tokens of a tile; a step is 64 columns of C HIGH rows, which are 64 without gates; a row of tiles has S steps.
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

from pagerunner.ops.kernels.launch import start_next, wait_turn
from pagerunner.ops.kernels.linear.linear_parts import silu_gate

OPERANDS = gl.NVMMASharedLayout(128, 16, 2)
"""How weights and inputs lie in shared memory."""
STORED = gl.constexpr(gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))
"""Outputs as they are stored: a thread has eight neighbouring features of a token."""


@gluon.jit
def _copy_weights(
    w_desc, w_smem, w_full, slot, row, column, ups, C: gl.constexpr, GATED: gl.constexpr, HIGH: gl.constexpr
):
    """Begin to bring a step's weights. A group's are HIGH rows, or half as many gates and the ups that belong to them."""
    HALF: gl.constexpr = HIGH // 2
    full = w_full.index(slot)
    mbarrier.expect(full, C * HIGH * 64 * 2)
    for c in gl.static_range(C):
        place = w_smem.index(slot * C + c)
        if GATED:
            tma.async_copy_global_to_shared(w_desc, [row + c * HALF, column], full, place.slice(0, HALF))
            tma.async_copy_global_to_shared(w_desc, [row + c * HALF + ups, column], full, place.slice(HALF, HALF))
        else:
            tma.async_copy_global_to_shared(w_desc, [row + c * 64, column], full, place)


@gluon.jit
def _copy_inputs(x_desc, x_smem, x_full, slot, column, BT: gl.constexpr):
    """Begin to bring a step's inputs."""
    mbarrier.expect(x_full.index(slot), BT * 64 * 2)
    tma.async_copy_global_to_shared(x_desc, [0, column], x_full.index(slot), x_smem.index(slot))


@gluon.jit
def stages(C: gl.constexpr, W_STAGES: gl.constexpr, X_STAGES: gl.constexpr):
    """The barriers of all stages: weights are there, inputs are there, and all C groups have multiplied a step."""
    w_full = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], mbarrier.MBarrierLayout())
    x_full = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(W_STAGES):  # one loop, as all threads meet between barriers of the same array
        mbarrier.init(w_full.index(i), count=1)
        if i < X_STAGES:
            mbarrier.init(x_full.index(i), count=1)
            mbarrier.init(done.index(i), count=C)
    fence_async_shared()
    return w_full, x_full, done


@gluon.jit
def next_step(row, column, S, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Where the next step of so many columns begins, with tiles of so many rows."""
    column += COLUMNS
    if column == S * COLUMNS:
        row += ROWS
        column = 0
    return row, column


@gluon.jit
def _copy(w_desc, x_desc, w_smem, x_smem, w_full, x_full, done, first, count, S, ups, BT: gl.constexpr, C: gl.constexpr,
          W_STAGES: gl.constexpr, X_STAGES: gl.constexpr, GATED: gl.constexpr, HIGH: gl.constexpr, LATE: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """The warp that copies. `done` says that a step has been multiplied: its weights' and its inputs' room is free.

    Rows, columns and slots are counted: working each out by division took as long as the memory takes for a step of 64 rows.
    """
    ROWS: gl.constexpr = C * HIGH // 2 if GATED else C * HIGH
    row, column = first // S * ROWS, first % S * 64
    x_row, x_column = row, column
    for step in range(gl.minimum(count, W_STAGES)):
        _copy_weights(w_desc, w_smem, w_full, step, row, column, ups, C, GATED, HIGH)
        row, column = next_step(row, column, S, ROWS, 64)
    wait_turn(PDL)
    if LATE:
        start_next(PDL)
    for step in range(gl.minimum(count, X_STAGES)):
        _copy_inputs(x_desc, x_smem, x_full, step, x_column, BT)
        x_row, x_column = next_step(x_row, x_column, S, ROWS, 64)
    slot, x_slot, parity = 0, 0, 0
    for step in range(X_STAGES, count):
        mbarrier.wait(done.index(x_slot), parity)
        _copy_inputs(x_desc, x_smem, x_full, x_slot, x_column, BT)
        if step - X_STAGES + W_STAGES < count:
            _copy_weights(w_desc, w_smem, w_full, slot, row, column, ups, C, GATED, HIGH)
        row, column = next_step(row, column, S, ROWS, 64)
        x_row, x_column = next_step(x_row, x_column, S, ROWS, 64)
        slot += 1
        if slot == W_STAGES:
            slot = 0
        x_slot += 1
        if x_slot == X_STAGES:
            x_slot = 0
            parity ^= 1


@gluon.jit
def store_outputs(acc, bias_ptr, y_ptr, feature, num_tokens, num_features, y_stride, ADD: gl.constexpr, BIAS: gl.constexpr):  # fmt: skip
    """Store outputs [64, tokens], or add them to what is there."""
    features = feature + gl.arange(0, 64, gl.SliceLayout(1, STORED))
    tokens = gl.arange(0, acc.shape[1], gl.SliceLayout(0, STORED))
    inside = (features < num_features)[:, None] & (tokens < num_tokens)[None, :]
    at = y_ptr + tokens.to(gl.int64)[None, :] * y_stride + features[:, None]
    if BIAS:
        own = feature + gl.arange(0, 64, gl.SliceLayout(1, acc.type.layout))
        acc += gl.load(bias_ptr + gl.minimum(own, num_features - 1)).to(gl.float32)[:, None]
    y = gl.convert_layout(acc.to(y_ptr.dtype.element_ty), STORED)
    if ADD:
        y = (gl.load(at, mask=inside, other=0.0).to(gl.float32) + y.to(gl.float32)).to(y.dtype)
    gl.store(at, y, mask=inside)


@gluon.jit
def _store_gated(acc, y_ptr, feature, num_tokens, y_stride):
    """Store what the gate makes of gates and then their ups, [tokens, features]."""
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    HALF: gl.constexpr = acc.shape[1] // 2
    stored: gl.constexpr = gl.BlockedLayout([1, 8, 2], [256 // HALF, HALF // 8, 1], [4, 1, 1], [2, 1, 0])
    both = gl.permute(gl.reshape(acc, (acc.shape[0], 2, HALF)), (0, 2, 1))
    gate, up = gl.split(gl.convert_layout(both, stored))
    tokens = gl.arange(0, acc.shape[0], gl.SliceLayout(1, gate.type.layout))
    features = feature + gl.arange(0, HALF, gl.SliceLayout(0, gate.type.layout))
    at = y_ptr + tokens.to(gl.int64)[:, None] * y_stride + features[None, :]
    gl.store(at, silu_gate(gate, up, dtype).to(dtype), mask=(tokens < num_tokens)[:, None])


@gluon.jit
def _store_sums(acc, place, num_tokens, BY_TOKEN: gl.constexpr):
    """Store sums [64, BT], one row after another: addresses are one register's and constants. Nobody reads beyond the last eight tokens' end.

    BY_TOKEN: one token after another, of so many features each; if it is 0, one feature after another. A warp stores eight neighbours of four tokens at a time, whole sectors of memory.
    """
    rows = gl.arange(0, 64, gl.SliceLayout(1, acc.type.layout))
    tokens = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    mask = (tokens < (num_tokens + 7) // 8 * 8)[None, :]
    if BY_TOKEN > 0:
        gl.store(place + (rows[:, None] + tokens[None, :] * BY_TOKEN), acc, mask=mask)
    else:
        gl.store(place + (rows[:, None] * acc.shape[1] + tokens[None, :]), acc, mask=mask)


@gluon.jit
def _compute(c, w_smem, x_smem, w_full, x_full, done, bias_ptr, y_ptr, first, count, num_tokens, num_features, y_stride, S, steps,
             BT: gl.constexpr, C: gl.constexpr, W_STAGES: gl.constexpr, X_STAGES: gl.constexpr, DONE: gl.constexpr, ADD: gl.constexpr,
             BIAS: gl.constexpr, GATED: gl.constexpr, HIGH: gl.constexpr, BY_TOKEN: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """One group of four warps: HIGH rows of each of the program's pieces of tiles."""
    LEFT: gl.constexpr = BT if GATED else HIGH
    RIGHT: gl.constexpr = HIGH if GATED else BT
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, RIGHT, 16])
    wait_turn(PDL)
    step = 0
    while step < count:
        tile = (first + step) // S
        end = gl.minimum((tile + 1) * S - first, count)
        acc = gl.zeros((LEFT, RIGHT), gl.float32, layout)
        begin = step
        for step in range(begin, end):
            w_slot, x_slot = step % W_STAGES, step % X_STAGES
            mbarrier.wait(w_full.index(w_slot), step // W_STAGES & 1)
            mbarrier.wait(x_full.index(x_slot), step // X_STAGES & 1)
            weights, inputs = w_smem.index(w_slot * C + c), x_smem.index(x_slot)
            if GATED:
                acc = warpgroup_mma(inputs, weights.permute((1, 0)), acc, is_async=True)
            else:
                acc = warpgroup_mma(weights, inputs.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            if step > begin:
                mbarrier.arrive(done.index((step - 1) % X_STAGES))
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(done.index((end - 1) % X_STAGES))
        feature = (tile * C + c) * (HIGH // 2 if GATED else HIGH)
        if GATED:
            _store_gated(acc, y_ptr, feature, num_tokens, y_stride)
        elif DONE:
            store_outputs(acc, bias_ptr, y_ptr, feature, num_tokens, num_features, y_stride, ADD, BIAS)
        else:
            part = gl.program_id(0) - tile * S // steps
            at = part.to(gl.int64) * y_stride * BT + feature * (1 if BY_TOKEN > 0 else BT)
            _store_sums(acc, y_ptr + at, num_tokens, BY_TOKEN)
        step = end


@gluon.jit(do_not_specialize=["num_tokens", "total", "S", "steps"])
def dense_kernel(w_desc, x_desc, bias_ptr, y_ptr, num_tokens, num_features, y_stride, total, S, steps, BT: gl.constexpr, C: gl.constexpr,
                 W_STAGES: gl.constexpr, X_STAGES: gl.constexpr, DONE: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr, HIGH: gl.constexpr, BY_TOKEN: gl.constexpr,
                 REGS: gl.constexpr, LATE: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """`steps` of all `total` steps of a product, tile after tile, so that programs read equally many bytes.

    GATED: as DONE, of the gate's `num_features` features and those of up. A tile has C HIGH / 2 of them.

    DONE: a program has whole tiles, and `y` takes the outputs; otherwise it takes one sum after another, [parts, O, BT] float32 (BY_TOKEN: [parts, BT, O]), with
    `y_stride` rows each. A tile's parts are numbered from the first program on that has some of it.
    LATE: the next kernel starts when all kernels before this one have ended, and not before. So it may read this one's inputs at once.
    """
    if not LATE:
        start_next(PDL)
    dtype: gl.constexpr = w_desc.dtype
    w_smem = gl.allocate_shared_memory(dtype, [W_STAGES * C, HIGH, 64], w_desc.layout)
    x_smem = gl.allocate_shared_memory(dtype, [X_STAGES, BT, 64], x_desc.layout)
    w_full, x_full, done = stages(C, W_STAGES, X_STAGES)
    first = gl.program_id(0) * steps
    count = gl.minimum(steps, total - first)
    # not constants, so that a group's code is translated once
    c0, c1, c2 = gl.to_tensor(0), gl.to_tensor(1), gl.to_tensor(2)
    # arguments stand in the calls, as a tuple in a variable would make tensors of constants
    if C == 1:
        gl.warp_specialize([
            (_compute, (c0, w_smem, x_smem, w_full, x_full, done, bias_ptr, y_ptr, first, count, num_tokens, num_features, y_stride, S, steps, BT, C,
                        W_STAGES, X_STAGES, DONE, ADD, BIAS, GATED, HIGH, BY_TOKEN, PDL)),
            (_copy, (w_desc, x_desc, w_smem, x_smem, w_full, x_full, done, first, count, S, num_features, BT, C, W_STAGES, X_STAGES, GATED, HIGH, LATE, PDL)),
        ], [1], [32])  # fmt: skip
    elif C == 2:
        gl.warp_specialize([
            (_compute, (c0, w_smem, x_smem, w_full, x_full, done, bias_ptr, y_ptr, first, count, num_tokens, num_features, y_stride, S, steps, BT, C,
                        W_STAGES, X_STAGES, DONE, ADD, BIAS, GATED, HIGH, BY_TOKEN, PDL)),
            (_compute, (c1, w_smem, x_smem, w_full, x_full, done, bias_ptr, y_ptr, first, count, num_tokens, num_features, y_stride, S, steps, BT, C,
                        W_STAGES, X_STAGES, DONE, ADD, BIAS, GATED, HIGH, BY_TOKEN, PDL)),
            (_copy, (w_desc, x_desc, w_smem, x_smem, w_full, x_full, done, first, count, S, num_features, BT, C, W_STAGES, X_STAGES, GATED, HIGH, LATE, PDL)),
        ], [4, 1], [REGS, 32])  # fmt: skip
    else:
        gl.warp_specialize([
            (_compute, (c0, w_smem, x_smem, w_full, x_full, done, bias_ptr, y_ptr, first, count, num_tokens, num_features, y_stride, S, steps, BT, C,
                        W_STAGES, X_STAGES, DONE, ADD, BIAS, GATED, HIGH, BY_TOKEN, PDL)),
            (_compute, (c1, w_smem, x_smem, w_full, x_full, done, bias_ptr, y_ptr, first, count, num_tokens, num_features, y_stride, S, steps, BT, C,
                        W_STAGES, X_STAGES, DONE, ADD, BIAS, GATED, HIGH, BY_TOKEN, PDL)),
            (_compute, (c2, w_smem, x_smem, w_full, x_full, done, bias_ptr, y_ptr, first, count, num_tokens, num_features, y_stride, S, steps, BT, C,
                        W_STAGES, X_STAGES, DONE, ADD, BIAS, GATED, HIGH, BY_TOKEN, PDL)),
            (_copy, (w_desc, x_desc, w_smem, x_smem, w_full, x_full, done, first, count, S, num_features, BT, C, W_STAGES, X_STAGES, GATED, HIGH, LATE, PDL)),
        ], [4, 4, 1], [REGS, REGS, 32])  # fmt: skip
