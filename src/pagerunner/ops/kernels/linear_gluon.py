"""The kernel of `kernels/linear_wide.py`, in Gluon: Triton's language with layouts that the program chooses.

One warp copies: codes and inputs come into shared memory by the bulk copy engine, several steps ahead. C groups of four warps compute, each the sums
of 64 output features of its own. Weights are the matrix units' first operand, in registers. While a group converts codes, its product of the
half step before runs, and so do the other groups' products. A round of two steps ends when its products have: with products on their
way from one round of the loop to the next, ptxas runs every product of the kernel alone (its warning C7515).

Shape letters: BT + MORE tokens of a tile; a step is 128 columns, 64 bytes of codes.
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

from pagerunner.ops.kernels.launch import start_next, wait_turn

CODES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]],
        lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)
"""Bytes of codes in registers: 16 neighbouring ones of the rows that the matrix units want of a thread."""
ROWS = gl.constexpr(gl.SliceLayout(1, CODES))
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
BATCH = gl.constexpr(16)
"""A group reads the scales of so many steps at a time."""
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
STORED = gl.constexpr(gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))
"""Outputs as they are stored: a thread has eight neighbouring features of a token."""


@gluon.jit
def _numbers(codes, scale, taken, HIGH: gl.constexpr, HALF: gl.constexpr, ZEROS: gl.constexpr):
    """Numbers [64, 64] of the low or the high nibbles of bytes. Of a word of bytes 0 to 3 the first two are those of bytes 0 and 2.

    bfloat16: a nibble is n * 2 ** -133, the scale s * 2 ** 70; `taken` is -8 s * 2 ** -63, or -z * 2 ** -133 if ZEROS. HALF, float16: a nibble is
    1024 + n, the scale s, and `taken` is 1032 or 1024 + z.
    """
    shifts: gl.constexpr = "shr.u32 a, $2, 4; shr.u32 b, $2, 12; " if HIGH else "mov.b32 a, $2; shr.u32 b, $2, 8; "
    if HALF:
        steps: gl.constexpr = (
            "lop3.b32 a, a, 0x000F000F, 0x64006400, 0xEA; lop3.b32 b, b, 0x000F000F, 0x64006400, 0xEA; "
            "sub.rn.f16x2 a, a, $5; sub.rn.f16x2 b, b, $6; mul.rn.f16x2 $0, a, $3; mul.rn.f16x2 $1, b, $4; }"
        )
    elif ZEROS:
        steps: gl.constexpr = (
            "and.b32 a, a, 0x000F000F; and.b32 b, b, 0x000F000F; mov.b32 c, 0x3F803F80; "
            "fma.rn.bf16x2 a, a, c, $5; fma.rn.bf16x2 b, b, c, $6; mul.rn.bf16x2 $0, a, $3; mul.rn.bf16x2 $1, b, $4; }"
        )
    else:
        steps: gl.constexpr = (
            "and.b32 a, a, 0x000F000F; and.b32 b, b, 0x000F000F; "
            "fma.rn.bf16x2 $0, a, $3, $5; fma.rn.bf16x2 $1, b, $4, $6; }"
        )
    words: gl.constexpr = "{ .reg .b32 a, b, c; " + shifts + steps
    return gl.inline_asm_elementwise(
        words, "=r,=r,r,r,r,r,r", [codes, scale, taken], dtype=scale.dtype, is_pure=True, pack=4
    )


@gluon.jit
def _operand(numbers, layout: gl.constexpr):
    """The same numbers as a first operand [64, 64]. It moves nothing; that the inputs' order fits is `linear_tiles.in_order`'s."""
    parts = gl.permute(gl.reshape(numbers, (64, 4, 4, 2, 2)), (0, 2, 3, 1, 4))  # quad, step, half, pair
    return gl.convert_layout(gl.reshape(parts, (64, 64)), layout, assert_trivial=True)


@gluon.jit
def _load_scales(s_ptr, z_ptr, s_smem, z_smem, feature, c, first, steps, num_features, num_groups, G: gl.constexpr, C: gl.constexpr,
                 HALF: gl.constexpr, ZEROS: gl.constexpr):  # fmt: skip
    """Bring scales and zero points of all steps of 64 rows into shared memory, as `_numbers` wants them, [steps C, 64]."""
    dtype: gl.constexpr = s_smem.dtype
    factor: gl.constexpr = 1.0 if HALF else 1180591620717411303424.0  # 2 ** 70
    base: gl.constexpr = 0x6400 if HALF else 0x8000
    rows = gl.minimum(feature + gl.arange(0, 64, LINE), num_features - 1).to(gl.int64) * num_groups
    last = first + steps - 1
    for begin in range(0, steps, BATCH):
        scales, zeros = (), ()
        for j in gl.static_range(BATCH):
            group = gl.minimum(
                gl.minimum(first + begin + j, last) * 128 // G, num_groups - 1
            )  # the last step may be none
            scales = scales + (gl.load(s_ptr + rows + group),)
            if ZEROS:
                zeros = zeros + (gl.load(z_ptr + rows + group),)
        for j in gl.static_range(BATCH):
            place = (begin + j) * C + c
            s_smem.index(place).store((scales[j].to(gl.float32) * factor).to(dtype))
            if ZEROS:
                z_smem.index(place).store((zeros[j].to(gl.uint16) | base).to(dtype, bitcast=True))
    gl.thread_barrier()


@gluon.jit
def _taken(scale, z_smem, place, HALF: gl.constexpr, ZEROS: gl.constexpr):
    """What `_numbers` takes off, for 64 rows."""
    if ZEROS:
        taken = z_smem.index(place).load(ROWS)
    elif HALF:
        taken = gl.full((64,), 1032.0, gl.float16, ROWS)
    else:
        taken = gl.inline_asm_elementwise(
            "{ .reg .b16 m; mov.b16 m, 0x8008; mul.rn.bf16 $0, $1, m; }", "=h,h", [scale], dtype=gl.bfloat16, is_pure=True, pack=1
        )  # fmt: skip
    return taken


@gluon.jit
def _multiply(operand, acc, more, x_smem, more_smem, place, more_operand: gl.constexpr, MORE: gl.constexpr):
    """Begin the products of an operand and half a step's inputs."""
    acc = warpgroup_mma(operand, x_smem.index(place).permute((1, 0)), acc, is_async=True)
    if MORE:
        own = gl.convert_layout(operand, more_operand, assert_trivial=True)
        more = warpgroup_mma(own, more_smem.index(place).permute((1, 0)), more, is_async=True)
    return acc, more


@gluon.jit
def _ended(acc, more, MORE: gl.constexpr, LEFT: gl.constexpr):
    """The sums after all products but the last LEFT have ended."""
    if MORE:
        acc, more = warpgroup_mma_wait(LEFT, deps=(acc, more))
    else:
        acc = warpgroup_mma_wait(LEFT, deps=(acc,))
    return acc, more


@gluon.jit
def _round(acc, more, x_smem, more_smem, w_smem, s_smem, z_smem, full, empty, first, c, C: gl.constexpr, MORE: gl.constexpr,
           STAGES: gl.constexpr, operand: gl.constexpr, more_operand: gl.constexpr, HALF: gl.constexpr, ZEROS: gl.constexpr):  # fmt: skip
    """Two steps. Each half of a step is converted while the half before is multiplied; at the end no product is on its way."""
    LAST: gl.constexpr = 2 if MORE else 1  # products of half a step
    for u in gl.static_range(2):
        i = first + u
        slot = i % STAGES
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        codes = w_smem.index(slot * C + c).load(CODES)
        scale = s_smem.index(i * C + c).load(ROWS)
        taken = _taken(scale, z_smem, i * C + c, HALF, ZEROS)
        scale, taken = gl.expand_dims(scale, 1).broadcast_to((64, 64)), gl.expand_dims(taken, 1).broadcast_to((64, 64))
        low = _operand(_numbers(codes, scale, taken, False, HALF, ZEROS), operand)
        acc, more = _multiply(low, acc, more, x_smem, more_smem, slot * 2, more_operand, MORE)
        if u > 0:
            acc, more = _ended(acc, more, MORE, LAST)
            mbarrier.arrive(empty.index((i - 1) % STAGES))
        high = _operand(_numbers(codes, scale, taken, True, HALF, ZEROS), operand)
        acc, more = _multiply(high, acc, more, x_smem, more_smem, slot * 2 + 1, more_operand, MORE)
        acc, more = _ended(acc, more, MORE, 0 if u == 1 else LAST)
    mbarrier.arrive(empty.index((first + 1) % STAGES))
    return acc, more


@gluon.jit
def _store(acc, bias_ptr, y_ptr, feature, token, num_tokens, num_features, y_stride, layout: gl.constexpr, HALF: gl.constexpr,
           DONE: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr):  # fmt: skip
    """Store sums [64, tokens], or add them to what is there. DONE: these are the outputs, and not one of several sums."""
    if not HALF:
        acc = acc * 9223372036854775808.0  # 2 ** 63
    features = feature + gl.arange(0, 64, gl.SliceLayout(1, layout))
    tokens = token + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    inside = (features < num_features)[:, None] & (tokens < num_tokens)[None, :]
    at = y_ptr + tokens.to(gl.int64)[None, :] * y_stride + features[:, None]
    if not DONE:
        gl.store(at, acc, mask=inside)
    else:
        if BIAS:
            own = feature + gl.arange(0, 64, gl.SliceLayout(1, acc.type.layout))
            acc += gl.load(bias_ptr + gl.minimum(own, num_features - 1)).to(gl.float32)[:, None]
        y = gl.convert_layout(acc.to(y_ptr.dtype.element_ty), layout)
        if ADD:
            y = (gl.load(at, mask=inside, other=0.0).to(gl.float32) + y.to(gl.float32)).to(y.dtype)
        gl.store(at, y, mask=inside)


@gluon.jit
def _compute(c, x_smem, more_smem, w_smem, full, empty, s_ptr, z_ptr, s_smem, z_smem, bias_ptr, y_ptr, feature, row, first, steps, num_tokens,
             num_features, num_groups, y_stride, G: gl.constexpr, BT: gl.constexpr, MORE: gl.constexpr, C: gl.constexpr,
             STAGES: gl.constexpr, ZEROS: gl.constexpr, DONE: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr,
             PDL: gl.constexpr):  # fmt: skip
    """One group of four warps: the sums of its rows, and their outputs."""
    HALF: gl.constexpr = x_smem.dtype == gl.float16
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    more_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE if MORE else 8, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    more_operand: gl.constexpr = gl.DotOperandLayout(0, more_layout, 2)
    feature += c * 64
    _load_scales(s_ptr, z_ptr, s_smem, z_smem, feature, c, first, steps, num_features, num_groups, G, C, HALF, ZEROS)
    acc = gl.zeros((64, BT), gl.float32, layout)
    more = acc
    if MORE:
        more = gl.zeros((64, MORE), gl.float32, more_layout)
    for i in range(0, steps, 2):
        acc, more = _round(acc, more, x_smem, more_smem, w_smem, s_smem, z_smem, full, empty, i, c, C, MORE, STAGES, operand, more_operand,
                           HALF, ZEROS)  # fmt: skip
    out: gl.constexpr = STORED if DONE else layout
    out_more: gl.constexpr = STORED if DONE else more_layout
    wait_turn(PDL)
    _store(acc, bias_ptr, y_ptr, feature, row, num_tokens, num_features, y_stride, out, HALF, DONE, ADD, BIAS)
    if MORE:
        row += BT
        _store(more, bias_ptr, y_ptr, feature, row, num_tokens, num_features, y_stride, out_more, HALF, DONE, ADD, BIAS)


@gluon.jit
def _copy_codes(w_desc, w_smem, full, slot, feature, step, C: gl.constexpr, BYTES: gl.constexpr):
    """Begin to bring a step's codes; `full` counts BYTES, the inputs' among them."""
    mbarrier.expect(full.index(slot), BYTES)
    for r in gl.static_range(C):
        tma.async_copy_global_to_shared(
            w_desc, [feature + r * 64, step * 64], full.index(slot), w_smem.index(slot * C + r)
        )


@gluon.jit
def _copy(x_desc, more_desc, w_desc, x_smem, more_smem, w_smem, full, empty, feature, row, first, steps, BT: gl.constexpr,
          MORE: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """The warp that copies. The codes of the first steps are on their way before the kernel before has ended."""
    BYTES: gl.constexpr = C * 64 * 64 + (BT + MORE) * 256
    for i in gl.static_range(STAGES):
        if i < steps:
            _copy_codes(w_desc, w_smem, full, i, feature, first + i, C, BYTES)
    wait_turn(PDL)
    for i in range(steps):
        slot = i % STAGES
        if i >= STAGES:
            mbarrier.wait(empty.index(slot), (i // STAGES - 1) & 1)
            _copy_codes(w_desc, w_smem, full, slot, feature, first + i, C, BYTES)
        for half in gl.static_range(2):
            column = (first + i) * 128 + half * 64
            tma.async_copy_global_to_shared(x_desc, [row, column], full.index(slot), x_smem.index(slot * 2 + half))
            if MORE:
                tma.async_copy_global_to_shared(
                    more_desc, [row + BT, column], full.index(slot), more_smem.index(slot * 2 + half)
                )


@gluon.jit(do_not_specialize=["num_tokens", "num_groups", "total", "steps"])
def wide_kernel(x_desc, more_desc, w_desc, s_ptr, z_ptr, bias_ptr, y_ptr, num_tokens, num_features, num_groups, y_stride, total, steps, G: gl.constexpr,
                BT: gl.constexpr, MORE: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr, ROOM: gl.constexpr,
                ZEROS: gl.constexpr, DONE: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """64 C output features of BT + MORE tokens, over up to `steps` of all `total` steps; the next part of the input features is the next program's.

    ROOM: scales of so many steps have room. `steps` is an even number. A number of steps is made even: what is beyond the last input feature is copied as zeros.

    DONE: there are no other parts, and `y` takes the outputs; otherwise it takes one sum after another, [parts, T, O] float32.
    """
    start_next(PDL)
    dtype: gl.constexpr = x_desc.dtype
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * 2, BT, 64], x_desc.layout)
    more_smem = gl.allocate_shared_memory(dtype, [STAGES * 2 if MORE else 1, MORE if MORE else 8, 64], more_desc.layout)
    w_smem = gl.allocate_shared_memory(gl.uint8, [STAGES * C, 64, 64], w_desc.layout)
    s_smem = gl.allocate_shared_memory(dtype, [ROOM * C, 64], PLAIN)
    z_smem = s_smem
    if ZEROS:
        z_smem = gl.allocate_shared_memory(dtype, [ROOM * C, 64], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=C)
    fence_async_shared()
    token_tiles = (num_tokens + (BT + MORE) - 1) // (BT + MORE)
    feature = gl.program_id(0) // token_tiles * (64 * C)
    row = gl.program_id(0) % token_tiles * (BT + MORE)
    first = gl.program_id(1) * steps
    steps = gl.minimum(steps, total - first)
    steps += steps % 2
    y_ptr += gl.program_id(1) * num_tokens.to(gl.int64) * y_stride
    c0, c1, c2 = (
        gl.to_tensor(0),
        gl.to_tensor(1),
        gl.to_tensor(2),
    )  # not constants, so that a group's code is translated once
    # arguments stand in the calls, as a tuple in a variable would make tensors of constants
    if C == 2:
        gl.warp_specialize([
            (_compute, (c0, x_smem, more_smem, w_smem, full, empty, s_ptr, z_ptr, s_smem, z_smem, bias_ptr, y_ptr, feature, row, first, steps, num_tokens,
                        num_features, num_groups, y_stride, G, BT, MORE, C, STAGES, ZEROS, DONE, ADD, BIAS, PDL)),
            (_compute, (c1, x_smem, more_smem, w_smem, full, empty, s_ptr, z_ptr, s_smem, z_smem, bias_ptr, y_ptr, feature, row, first, steps, num_tokens,
                        num_features, num_groups, y_stride, G, BT, MORE, C, STAGES, ZEROS, DONE, ADD, BIAS, PDL)),
            (_copy, (x_desc, more_desc, w_desc, x_smem, more_smem, w_smem, full, empty, feature, row, first, steps, BT, MORE, C, STAGES, PDL)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_compute, (c0, x_smem, more_smem, w_smem, full, empty, s_ptr, z_ptr, s_smem, z_smem, bias_ptr, y_ptr, feature, row, first, steps, num_tokens,
                        num_features, num_groups, y_stride, G, BT, MORE, C, STAGES, ZEROS, DONE, ADD, BIAS, PDL)),
            (_compute, (c1, x_smem, more_smem, w_smem, full, empty, s_ptr, z_ptr, s_smem, z_smem, bias_ptr, y_ptr, feature, row, first, steps, num_tokens,
                        num_features, num_groups, y_stride, G, BT, MORE, C, STAGES, ZEROS, DONE, ADD, BIAS, PDL)),
            (_compute, (c2, x_smem, more_smem, w_smem, full, empty, s_ptr, z_ptr, s_smem, z_smem, bias_ptr, y_ptr, feature, row, first, steps, num_tokens,
                        num_features, num_groups, y_stride, G, BT, MORE, C, STAGES, ZEROS, DONE, ADD, BIAS, PDL)),
            (_copy, (x_desc, more_desc, w_desc, x_smem, more_smem, w_smem, full, empty, feature, row, first, steps, BT, MORE, C, STAGES, PDL)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip
