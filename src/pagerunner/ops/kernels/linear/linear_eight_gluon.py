"""The kernel of `kernels/linear/linear_eight.py`, in Gluon: Triton's language with layouts that the program chooses.

It is built as `kernels/linear/linear_dense_gluon.py`: one warp copies, and C groups of four warps multiply 64 rows of weights each. Both operands are codes of 8 bits in shared memory. Scales of blocks multiply each step's product, in float32; scales of rows and of tokens multiply sums.

Shape letters: N blocks of BT tokens and one of MORE are a tile's; WIDE is a power of two that holds them all. A step is 128 columns of C 64 rows; a row of tiles has S steps.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TensorDescriptor

from pagerunner.ops.kernels.launch import start_next, wait_turn
from pagerunner.ops.kernels.linear.linear_dense_gluon import next_step, stages, store_outputs

OPERANDS = gl.NVMMASharedLayout(128, 8, 2)
"""How weights and inputs lie in shared memory."""
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))


@gluon.jit
def _copy_weights(w_desc, w_smem, w_full, slot, row, column, C: gl.constexpr):
    """Begin to bring a step's weights."""
    mbarrier.expect(w_full.index(slot), C * 64 * 128)
    for c in gl.static_range(C):
        tma.async_copy_global_to_shared(w_desc, [row + c * 64, column], w_full.index(slot), w_smem.index(slot * C + c))


@gluon.jit
def _copy_inputs(x_desc, more_desc, x_smem, more_smem, x_full, slot, column, N: gl.constexpr, BT: gl.constexpr, MORE: gl.constexpr):  # fmt: skip
    """Begin to bring a step's inputs."""
    full = x_full.index(slot)
    mbarrier.expect(full, (N * BT + MORE) * 128)
    for n in gl.static_range(N):
        tma.async_copy_global_to_shared(x_desc, [n * BT, column], full, x_smem.index(slot * N + n))
    if MORE:
        tma.async_copy_global_to_shared(more_desc, [N * BT, column], full, more_smem.index(slot))


@gluon.jit
def _copy(w_desc, x_desc, more_desc, w_smem, x_smem, more_smem, w_full, x_full, done, first, count, S, N: gl.constexpr, BT: gl.constexpr,
          MORE: gl.constexpr, C: gl.constexpr, W_STAGES: gl.constexpr, X_STAGES: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """The warp that copies. `done` says that a step has been multiplied: its weights' and its inputs' room is free."""
    row, column = first // S * (C * 64), first % S * 128
    x_row, x_column = row, column
    for step in range(gl.minimum(count, W_STAGES)):
        _copy_weights(w_desc, w_smem, w_full, step, row, column, C)
        row, column = next_step(row, column, S, C * 64, 128)
    wait_turn(PDL)
    for step in range(gl.minimum(count, X_STAGES)):
        _copy_inputs(x_desc, more_desc, x_smem, more_smem, x_full, step, x_column, N, BT, MORE)
        x_row, x_column = next_step(x_row, x_column, S, C * 64, 128)
    slot, x_slot, parity = 0, 0, 0
    for step in range(X_STAGES, count):
        mbarrier.wait(done.index(x_slot), parity)
        _copy_inputs(x_desc, more_desc, x_smem, more_smem, x_full, x_slot, x_column, N, BT, MORE)
        if step - X_STAGES + W_STAGES < count:
            _copy_weights(w_desc, w_smem, w_full, slot, row, column, C)
        row, column = next_step(row, column, S, C * 64, 128)
        x_row, x_column = next_step(x_row, x_column, S, C * 64, 128)
        slot += 1
        if slot == W_STAGES:
            slot = 0
        x_slot += 1
        if x_slot == X_STAGES:
            x_slot = 0
            parity ^= 1


@gluon.jit
def _zeros(N: gl.constexpr, BT: gl.constexpr, MORE: gl.constexpr, dtype: gl.constexpr):
    """Sums [64, tokens] of each block of tokens."""
    sums = ()
    for _ in gl.static_range(N):
        sums = sums + (gl.zeros((64, BT), dtype, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 32])),)
    if MORE:
        sums = sums + (gl.zeros((64, MORE), dtype, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE, 32])),)
    return sums


@gluon.jit
def _block(x_smem, more_smem, slot, n, N: gl.constexpr):
    """The inputs of one block of tokens, a product's second operand."""
    if n < N:
        block = x_smem.index(slot * N + n)
    else:
        block = more_smem.index(slot)
    return block.permute((1, 0))


@gluon.jit
def _product(acc, weights, inputs):
    """Begin a step's product with one block of tokens, of the layout of its sums."""
    layout: gl.constexpr = acc.type.layout
    zero = gl.zeros((64, acc.shape[1]), gl.int32 if weights.dtype == gl.int8 else gl.float32, layout)
    return warpgroup_mma(weights, inputs, zero, use_acc=False, is_async=True)


@gluon.jit
def _add_one(acc, product, scales, FIRST: gl.constexpr, LEFT: gl.constexpr):
    """`acc` and a product times the scales of the tokens from FIRST on, after all products but the last LEFT have ended."""
    layout: gl.constexpr = acc.type.layout
    own = warpgroup_mma_wait(LEFT, deps=(product,)).to(gl.float32)
    scale = scales.slice(FIRST, acc.shape[1]).load(gl.SliceLayout(0, layout))
    return acc + own * scale[None, :]


@gluon.jit
def _add_scaled(
    sums, weights, x_smem, more_smem, slot, scales, N: gl.constexpr, BT: gl.constexpr, SERIAL: gl.constexpr
):
    """`sums` and a step's products, times `scales` [WIDE] of the tokens. SERIAL: a product begins when the one before has been added."""
    COUNT: gl.constexpr = len(sums)
    after, products = (), ()
    for n in gl.static_range(COUNT):
        products = products + (_product(sums[n], weights, _block(x_smem, more_smem, slot, n, N)),)
        if SERIAL:
            after = after + (_add_one(sums[n], products[n], scales, n * BT, 0),)
    if not SERIAL:
        for n in gl.static_range(COUNT):
            after = after + (_add_one(sums[n], products[n], scales, n * BT, COUNT - 1 - n),)
    return after


@gluon.jit
def _add(sums, weights, x_smem, more_smem, slot, N: gl.constexpr):
    """`sums` and a step's products, which are on their way; those of the step before have ended."""
    after = ()
    for n in gl.static_range(len(sums)):
        after = after + (warpgroup_mma(weights, _block(x_smem, more_smem, slot, n, N), sums[n], is_async=True),)
    return _ended(after, len(sums))


@gluon.jit
def _ended(sums, LEFT: gl.constexpr):
    """The sums after all products but the last LEFT have ended."""
    if len(sums) == 1:
        after = (warpgroup_mma_wait(LEFT, deps=(sums[0],)),)
    else:
        after = warpgroup_mma_wait(LEFT, deps=sums)
    return after


@gluon.jit
def _store(acc, scales, w_scales_ptr, bias_ptr, y_ptr, feature, num_tokens, num_features, y_stride, FIRST: gl.constexpr, GROUPED: gl.constexpr,
           DONE: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr):  # fmt: skip
    """Store sums [64, tokens] of the tokens from FIRST on, with all scales: as outputs, or as one of several parts."""
    token = gl.to_tensor(FIRST)
    features = feature + gl.arange(0, 64, gl.SliceLayout(1, acc.type.layout))
    tokens = token + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    acc = acc.to(gl.float32)
    if not GROUPED:
        w_scale = gl.load(w_scales_ptr + gl.minimum(features, num_features - 1))
        x_scale = scales.slice(FIRST, acc.shape[1]).load(gl.SliceLayout(0, acc.type.layout))
        acc = acc * (w_scale[:, None] * x_scale[None, :])
    if DONE:
        store_outputs(
            acc, bias_ptr, y_ptr + token.to(gl.int64) * y_stride, feature, num_tokens - token, num_features, y_stride, ADD, BIAS
        )  # fmt: skip
    else:
        inside = (features < num_features)[:, None] & (tokens < num_tokens)[None, :]
        gl.store(y_ptr + (tokens[None, :] * y_stride + features[:, None]), acc, mask=inside)


@gluon.jit
def _compute(c, w_smem, x_smem, more_smem, s_smem, w_full, x_full, done, x_scales_ptr, w_scales_ptr, bias_ptr, y_ptr, first, count, num_tokens,
             num_features, y_stride, group_stride, num_groups, S, steps, N: gl.constexpr, BT: gl.constexpr, MORE: gl.constexpr, WIDE: gl.constexpr,
             C: gl.constexpr, W_STAGES: gl.constexpr, X_STAGES: gl.constexpr, GROUPED: gl.constexpr, HIGH: gl.constexpr, SERIAL: gl.constexpr,
             DONE: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """One group of four warps: 64 rows of each of the program's tiles, or of its part of one."""
    dtype: gl.constexpr = gl.int32 if (w_smem.dtype == gl.int8 and not GROUPED) else gl.float32
    own_tokens = gl.minimum(gl.arange(0, WIDE, LINE), num_tokens - 1)
    wait_turn(PDL)
    if not GROUPED:  # in shared memory, as the compiler would hold all addresses throughout
        s_smem.index(2 * c).store(gl.load(x_scales_ptr + own_tokens))
        gl.thread_barrier()
    step = 0
    while step < count:
        tile = (first + step) // S
        end = gl.minimum((tile + 1) * S - first, count)
        feature = (tile * C + c) * 64
        group = gl.minimum(first + step - tile * S, num_groups - 1)
        w_scales = w_scales_ptr + gl.minimum(feature, num_features - 1) // HIGH * num_groups
        if GROUPED:
            w_scale = gl.load(w_scales + group)
            x_scale = gl.load(x_scales_ptr + group * group_stride + own_tokens)
        sums = _zeros(N, BT, MORE, dtype)
        begin = step
        for step in range(begin, end):
            w_slot, x_slot = step % W_STAGES, step % X_STAGES
            weights = w_smem.index(w_slot * C + c)
            if GROUPED:
                scales = s_smem.index(2 * c + step % 2)
                scales.store(x_scale * w_scale)
                gl.thread_barrier()
                group = gl.minimum(group + 1, num_groups - 1)  # the next step's are on their way during this one
                w_scale = gl.load(w_scales + group)
                x_scale = gl.load(x_scales_ptr + group * group_stride + own_tokens)
            mbarrier.wait(w_full.index(w_slot), step // W_STAGES & 1)
            mbarrier.wait(x_full.index(x_slot), step // X_STAGES & 1)
            if GROUPED:
                sums = _add_scaled(sums, weights, x_smem, more_smem, x_slot, scales, N, BT, SERIAL)
                mbarrier.arrive(done.index(x_slot))
            else:
                sums = _add(sums, weights, x_smem, more_smem, x_slot, N)
                if step > begin:
                    mbarrier.arrive(done.index((step - 1) % X_STAGES))
        if not GROUPED:
            sums = _ended(sums, 0)
            mbarrier.arrive(done.index((end - 1) % X_STAGES))
        target = y_ptr
        if not DONE:
            target += (gl.program_id(0) - tile * S // steps).to(gl.int64) * num_tokens * y_stride
        for n in gl.static_range(len(sums)):
            _store(sums[n], s_smem.index(2 * c), w_scales_ptr, bias_ptr, target, feature, num_tokens, num_features, y_stride, n * BT, GROUPED, DONE, ADD, BIAS)  # fmt: skip
        step = end


@gluon.jit(do_not_specialize=["num_tokens", "num_groups", "total", "S", "steps", "group_stride"])
def eight_kernel(w_desc, x_desc, more_desc, x_scales_ptr, w_scales_ptr, bias_ptr, y_ptr, num_tokens, num_features, y_stride, group_stride, num_groups, total, S, steps,
                 N: gl.constexpr, BT: gl.constexpr, MORE: gl.constexpr, WIDE: gl.constexpr, C: gl.constexpr, W_STAGES: gl.constexpr,
                 X_STAGES: gl.constexpr, GROUPED: gl.constexpr, HIGH: gl.constexpr, SERIAL: gl.constexpr, DONE: gl.constexpr, ADD: gl.constexpr,
                 BIAS: gl.constexpr, REGS: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """`steps` of all `total` steps of a product, tile after tile: whole tiles, or one of a tile's parts. Steps beyond the last column are zeros.

    GROUPED: 128 columns of a token share a scale, and 128 columns of HIGH rows of weights; else whole tokens and whole rows.

    DONE: a program has whole tiles, and `y` takes the outputs; otherwise it takes one sum after another, [parts, T, O] float32.
    """
    start_next(PDL)
    dtype: gl.constexpr = w_desc.dtype
    w_smem = gl.allocate_shared_memory(dtype, [W_STAGES * C, 64, 128], w_desc.layout)
    x_smem = gl.allocate_shared_memory(dtype, [X_STAGES * N, BT, 128], x_desc.layout)
    more_smem = gl.allocate_shared_memory(dtype, [X_STAGES if MORE else 1, MORE if MORE else 8, 128], more_desc.layout)
    s_smem = gl.allocate_shared_memory(gl.float32, [2 * C, WIDE], PLAIN)
    w_full, x_full, done = stages(C, W_STAGES, X_STAGES)
    first = gl.program_id(0) * steps
    count = gl.minimum(steps, total - first)
    # not constants, so that a group's code is translated once
    c0, c1, c2 = gl.to_tensor(0), gl.to_tensor(1), gl.to_tensor(2)
    # arguments stand in the calls, as a tuple in a variable would make tensors of constants
    if C == 1:
        gl.warp_specialize([
            (_compute, (c0, w_smem, x_smem, more_smem, s_smem, w_full, x_full, done, x_scales_ptr, w_scales_ptr, bias_ptr, y_ptr, first, count, num_tokens, num_features,
                        y_stride, group_stride, num_groups, S, steps, N, BT, MORE, WIDE, C, W_STAGES, X_STAGES, GROUPED, HIGH, SERIAL, DONE, ADD, BIAS, PDL)),
            (_copy, (w_desc, x_desc, more_desc, w_smem, x_smem, more_smem, w_full, x_full, done, first, count, S, N, BT, MORE, C, W_STAGES, X_STAGES, PDL)),
        ], [1], [32])  # fmt: skip
    elif C == 2:
        gl.warp_specialize([
            (_compute, (c0, w_smem, x_smem, more_smem, s_smem, w_full, x_full, done, x_scales_ptr, w_scales_ptr, bias_ptr, y_ptr, first, count, num_tokens, num_features,
                        y_stride, group_stride, num_groups, S, steps, N, BT, MORE, WIDE, C, W_STAGES, X_STAGES, GROUPED, HIGH, SERIAL, DONE, ADD, BIAS, PDL)),
            (_compute, (c1, w_smem, x_smem, more_smem, s_smem, w_full, x_full, done, x_scales_ptr, w_scales_ptr, bias_ptr, y_ptr, first, count, num_tokens, num_features,
                        y_stride, group_stride, num_groups, S, steps, N, BT, MORE, WIDE, C, W_STAGES, X_STAGES, GROUPED, HIGH, SERIAL, DONE, ADD, BIAS, PDL)),
            (_copy, (w_desc, x_desc, more_desc, w_smem, x_smem, more_smem, w_full, x_full, done, first, count, S, N, BT, MORE, C, W_STAGES, X_STAGES, PDL)),
        ], [4, 1], [REGS, 32])  # fmt: skip
    else:
        gl.warp_specialize([
            (_compute, (c0, w_smem, x_smem, more_smem, s_smem, w_full, x_full, done, x_scales_ptr, w_scales_ptr, bias_ptr, y_ptr, first, count, num_tokens, num_features,
                        y_stride, group_stride, num_groups, S, steps, N, BT, MORE, WIDE, C, W_STAGES, X_STAGES, GROUPED, HIGH, SERIAL, DONE, ADD, BIAS, PDL)),
            (_compute, (c1, w_smem, x_smem, more_smem, s_smem, w_full, x_full, done, x_scales_ptr, w_scales_ptr, bias_ptr, y_ptr, first, count, num_tokens, num_features,
                        y_stride, group_stride, num_groups, S, steps, N, BT, MORE, WIDE, C, W_STAGES, X_STAGES, GROUPED, HIGH, SERIAL, DONE, ADD, BIAS, PDL)),
            (_compute, (c2, w_smem, x_smem, more_smem, s_smem, w_full, x_full, done, x_scales_ptr, w_scales_ptr, bias_ptr, y_ptr, first, count, num_tokens, num_features,
                        y_stride, group_stride, num_groups, S, steps, N, BT, MORE, WIDE, C, W_STAGES, X_STAGES, GROUPED, HIGH, SERIAL, DONE, ADD, BIAS, PDL)),
            (_copy, (w_desc, x_desc, more_desc, w_smem, x_smem, more_smem, w_full, x_full, done, first, count, S, N, BT, MORE, C, W_STAGES, X_STAGES, PDL)),
        ], [4, 4, 1], [REGS, REGS, 32])  # fmt: skip
