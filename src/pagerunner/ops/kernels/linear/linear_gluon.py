"""The kernel of `kernels/linear/linear_wide.py`, in Gluon: Triton's language with layouts that the program chooses.

One warp copies: codes and inputs come into shared memory by the bulk copy engine, several steps ahead. C groups of four warps compute, each the sums
of 64 output features of its own. Weights are the matrix units' first operand, in registers. While a group converts codes, its product of the
half step before runs, and so do the other groups' products. A round of two steps ends when its products have: with products on their
way from one round of the loop to the next, ptxas runs every product of the kernel alone (its warning C7515).

Shape letters: BT + MORE tokens of a tile; a step is 128 columns, 64 bytes of codes of 4 bits and twice 64 of 8 bits.
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

from pagerunner.ops.kernels.codes import (
    E2M1,
    INT4,
    INT8,
    eight_scales,
    lifted_int4,
    numbers8,
    scaled_e2m1,
    scaled_int4,
    zero_bits,
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
RUNS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [8, 0, 0]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[64, 4, 16],
    )
)
"""The same bytes as four runs of 16."""
OF_RUNS = gl.constexpr(gl.SliceLayout(2, RUNS))
"""What each run has one of, in the threads that have its bytes."""
_SCALED = """{ .reg .b32 a, c, p; .reg .f32 x, y; xor.b32 a, $2, 0x80808080; mov.b32 c, 0x47000000;
    prmt.b32 p, a, c, 0x7404; fma.rn.f32 x, p, $3, $7; prmt.b32 p, a, c, 0x7414; fma.rn.f32 y, p, $3, $7; cvt.rn.DTYPE.f32 $0, y, x;
    prmt.b32 p, a, c, 0x7424; fma.rn.f32 x, p, $3, $7; prmt.b32 p, a, c, 0x7434; fma.rn.f32 y, p, $3, $7; cvt.rn.DTYPE.f32 $1, y, x; }"""
TO_FLOAT16 = gl.constexpr(_SCALED.replace("DTYPE", "f16x2"))
TO_BFLOAT16 = gl.constexpr(_SCALED.replace("DTYPE", "bf16x2"))
"""Four int8 times their scales."""
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
BATCH = gl.constexpr(16)
"""A group reads the scales of so many steps at a time."""
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
STORED = gl.constexpr(gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))
"""Outputs as they are stored: a thread has eight neighbouring features of a token."""


@gluon.jit
def _of_bytes(values):
    """Values of rows [64], or of runs of rows [64, 4], for each byte [64, 64]."""
    if len(values.shape) == 1:
        both = gl.expand_dims(values, 1).broadcast_to((64, 64))
    else:
        both = gl.reshape(gl.expand_dims(values, 2).broadcast_to((64, 4, 16)), (64, 64))
    return gl.convert_layout(both, CODES, assert_trivial=True)


@gluon.jit
def _raw_scales(s_ptr, rows, step, num_runs, G: gl.constexpr):
    """The scales of a step's runs of 64 rows [64, 4] as they lie in memory; with groups of 16 a word has those of both half runs."""
    run = gl.minimum(step * 4 + gl.arange(0, 4, gl.SliceLayout(0, OF_RUNS)), num_runs - 1)
    if G == 16:
        s_ptr = s_ptr.to(gl.pointer_type(gl.uint16), bitcast=True)
    EACH: gl.constexpr = 2 if G == 64 else 1
    return gl.load(s_ptr + rows[:, None] * (num_runs // EACH) + (run // EACH)[None, :])


@gluon.jit
def _byte_scales(s_ptr, rows, step, num_groups, HALF: gl.constexpr, G: gl.constexpr, BO: gl.constexpr):
    """The scales of half a step's codes of 8 bits: of 64 rows, or of their runs [64, 4] where fewer than 128 columns share one."""
    at = s_ptr + rows // BO * num_groups
    if G < 128:
        columns = step * 128 + HALF * 64 + gl.arange(0, 4, gl.SliceLayout(0, OF_RUNS)) * 16
        scales = gl.load(at[:, None] + gl.minimum(columns // G, num_groups - 1)[None, :])
    else:
        scales = gl.load(at + gl.minimum(step * 128 // G, num_groups - 1))
    return scales


@gluon.jit
def _lifted(raw, HIGH: gl.constexpr, FORM: gl.constexpr, dtype: gl.constexpr):
    """Scales of the low or the high nibbles of runs, as `scaled_int4` and `scaled_e2m1` want them: times 2 ** 70 for int4 in bfloat16, 2 ** 64 for e2m1."""
    if FORM == E2M1 and raw.dtype == gl.uint8:
        scales = (gl.minimum(raw.to(gl.int16) + 64, 255) << 7).to(gl.int16).to(gl.bfloat16, bitcast=True)
    elif FORM == E2M1:  # e4m3's bits in place are 2 ** -120 of the number
        byte = raw.to(gl.int32) >> 8 if HIGH else raw.to(gl.int32)
        bits = ((byte & 0x7F) << 4) | ((byte & 0x80) << 8)
        scales = gl.inline_asm_elementwise(
            "{ .reg .b16 a, m; mov.b16 m, 0x6D80; mul.rn.bf16 a, $1, m; mul.rn.bf16 $0, a, m; }", "=h,h",
            [bits.to(gl.int16).to(gl.bfloat16, bitcast=True)], dtype=gl.bfloat16, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        scales = lifted_int4(raw)
    return scales


@gluon.jit
def _operand(numbers, layout: gl.constexpr):
    """The same numbers as a first operand [64, 64]. It moves nothing; that the inputs' order fits is `linear_tiles.in_order`'s."""
    parts = gl.permute(gl.reshape(numbers, (64, 4, 4, 2, 2)), (0, 2, 3, 1, 4))  # quad, step, half, pair
    return gl.convert_layout(gl.reshape(parts, (64, 64)), layout, assert_trivial=True)


@gluon.jit
def _load_scales(s_ptr, z_ptr, s_smem, z_smem, feature, c, first, steps, num_features, num_groups, G: gl.constexpr, C: gl.constexpr,
                 HALF: gl.constexpr, ZEROS: gl.constexpr):  # fmt: skip
    """Bring scales and zero points of all steps of 64 rows into shared memory, as `scaled_int4` wants them, [steps C, 64]."""
    dtype: gl.constexpr = s_smem.dtype
    factor: gl.constexpr = 1.0 if HALF else 1180591620717411303424.0  # 2 ** 70
    rows = gl.minimum(feature + gl.arange(0, 64, LINE), num_features - 1).to(gl.int64) * num_groups
    last = first + steps - 1
    for begin in range(0, steps, BATCH):
        scales, zeros = (), ()
        for j in gl.static_range(BATCH):
            step = gl.minimum(first + begin + j, last)  # the last step may be none
            group = gl.minimum(step * 128 // G, num_groups - 1)
            scales = scales + (gl.load(s_ptr + rows + group),)
            if ZEROS:
                zeros = zeros + (gl.load(z_ptr + rows + group),)
        for j in gl.static_range(BATCH):
            place = (begin + j) * C + c
            s_smem.index(place).store((scales[j].to(gl.float32) * factor).to(dtype))
            if ZEROS:
                z_smem.index(place).store(zero_bits(zeros[j], dtype))
    gl.thread_barrier()


@gluon.jit
def _taken(scale, zero, z_smem, place, HALF: gl.constexpr, ZEROS: gl.constexpr):
    """What `scaled_int4` takes off, for 64 rows, or for their runs with the zero points `zero`."""
    if ZEROS and len(scale.shape) == 2:
        taken = zero_bits(zero, scale.dtype)
    elif ZEROS:
        taken = z_smem.index(place).load(ROWS)
    elif HALF:
        taken = gl.full(scale.shape, 1032.0, gl.float16, scale.type.layout)
    else:
        taken = eight_scales(scale)
    return taken


@gluon.jit
def _zeros(BT: gl.constexpr, MORE: gl.constexpr, layout: gl.constexpr, more_layout: gl.constexpr):
    """Sums [64, BT] and [64, MORE]."""
    acc = gl.zeros((64, BT), gl.float32, layout)
    more = acc
    if MORE:
        more = gl.zeros((64, MORE), gl.float32, more_layout)
    return acc, more


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
def _scales(raw, zero, s_smem, z_smem, place, HIGH: gl.constexpr, G: gl.constexpr, FORM: gl.constexpr, dtype: gl.constexpr, HALF: gl.constexpr, ZEROS: gl.constexpr):  # fmt: skip
    """Scales and what is taken off, of a step's bytes; nothing where scales multiply whole rows' sums (G is 0)."""
    if FORM < INT4:
        scale = raw
    elif G < 128:
        scale = _lifted(raw, HIGH, FORM, dtype)
    else:
        scale = s_smem.index(place).load(ROWS)
    taken = scale
    if FORM == INT4:
        taken = _taken(scale, zero, z_smem, place, HALF, ZEROS)
    if G > 0:
        scale, taken = _of_bytes(scale), _of_bytes(taken)
    return scale, taken


@gluon.jit
def _scaled8(codes, scale, FORM: gl.constexpr, dtype: gl.constexpr):
    """Numbers of 8 bits times float32 scales, rounded once.

    For int8 n, 128 + n in the middle of a float32 is 32896 + n. What is taken off is exact for scales of up to 15 bits, so for those that were 16-bit numbers.
    """
    if FORM == INT8 and dtype == gl.float16:
        numbers = gl.inline_asm_elementwise(
            TO_FLOAT16, "=&r,=r,r,f,f,f,f,f,f,f,f", [codes, scale, scale * -32896.0], dtype=gl.float16, is_pure=True, pack=4
        )  # fmt: skip
    elif FORM == INT8:
        numbers = gl.inline_asm_elementwise(
            TO_BFLOAT16, "=&r,=r,r,f,f,f,f,f,f,f,f", [codes, scale, scale * -32896.0], dtype=gl.bfloat16, is_pure=True, pack=4
        )  # fmt: skip
    else:
        numbers = (codes.to(gl.float8e4nv, bitcast=True).to(gl.float32) * scale).to(dtype)
    return numbers


@gluon.jit
def _converted(codes, scale, taken, HIGH: gl.constexpr, G: gl.constexpr, FORM: gl.constexpr, ZEROS: gl.constexpr, operand: gl.constexpr, dtype: gl.constexpr):  # fmt: skip
    """The first operand of half a step."""
    if FORM == E2M1:
        numbers = scaled_e2m1(codes, scale, HIGH, gl.bfloat16, True)
    elif FORM == INT4:
        numbers = scaled_int4(codes, scale, taken, HIGH, ZEROS)
    elif G > 0:
        numbers = _scaled8(codes, scale, FORM, dtype)
    else:
        numbers = numbers8(codes, dtype, FORM, FORM == INT8 or dtype == gl.bfloat16)
    return _operand(numbers, operand)


@gluon.jit
def _round(acc, more, raws, x_smem, more_smem, w_smem, s_smem, z_smem, full, empty, first, c, C: gl.constexpr, MORE: gl.constexpr,
           STAGES: gl.constexpr, operand: gl.constexpr, more_operand: gl.constexpr, G: gl.constexpr, FORM: gl.constexpr, HALF: gl.constexpr,
           ZEROS: gl.constexpr):  # fmt: skip
    """Two steps. Each half of a step is converted while the half before is multiplied; at the end no product is on its way."""
    LAST: gl.constexpr = 2 if MORE else 1  # products of half a step
    dtype: gl.constexpr = x_smem.dtype
    for u in gl.static_range(2):
        i = first + u
        slot, place = i % STAGES, i * C + c
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        own = (slot * C + c) * (2 if FORM < INT4 else 1)
        codes = w_smem.index(own).load(CODES)
        scale, taken = _scales(raws[u], raws[len(raws) - 2 + u], s_smem, z_smem, place, False, G, FORM, dtype, HALF, ZEROS)  # fmt: skip
        low = _converted(codes, scale, taken, False, G, FORM, ZEROS, operand, dtype)
        acc, more = _multiply(low, acc, more, x_smem, more_smem, slot * 2, more_operand, MORE)
        if u > 0:
            acc, more = _ended(acc, more, MORE, LAST)
            mbarrier.arrive(empty.index((i - 1) % STAGES))
        if FORM < INT4:
            codes = w_smem.index(own + 1).load(CODES)
        if G == 16 or (FORM < INT4 and G > 0 and G < 128):
            scale, taken = _scales(raws[len(raws) - 2 + u], raws[u], s_smem, z_smem, place, True, G, FORM, dtype, HALF, ZEROS)  # fmt: skip
        high = _converted(codes, scale, taken, True, G, FORM, ZEROS, operand, dtype)
        acc, more = _multiply(high, acc, more, x_smem, more_smem, slot * 2 + 1, more_operand, MORE)
        acc, more = _ended(acc, more, MORE, 0 if u == 1 else LAST)
    mbarrier.arrive(empty.index((first + 1) % STAGES))
    return acc, more


@gluon.jit
def _store(acc, r_ptr, bias_ptr, y_ptr, feature, token, num_tokens, num_features, y_stride, layout: gl.constexpr, FORM: gl.constexpr,
           HALF: gl.constexpr, FACTORS: gl.constexpr, DONE: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr):  # fmt: skip
    """Store sums [64, tokens], or add them to what is there. DONE: these are the outputs, and not one of several sums."""
    if FORM == E2M1:
        acc = acc * 4611686018427387904.0  # 2 ** 62
    elif FORM == INT4 and not HALF:
        acc = acc * 9223372036854775808.0  # 2 ** 63
    if FACTORS:
        rows = feature + gl.arange(0, 64, gl.SliceLayout(1, acc.type.layout))
        acc *= gl.load(r_ptr + gl.minimum(rows, num_features - 1))[:, None]
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
def _ahead(raws, s_ptr, z_ptr, rows, step, num_groups, G: gl.constexpr, BO: gl.constexpr, FORM: gl.constexpr, ZEROS: gl.constexpr):  # fmt: skip
    """What threads read themselves for two steps: scales, then zero points or second halves' scales; `raws` where there are none."""
    if FORM < INT4 and G > 0:
        raws = _byte_scales(s_ptr, rows, step, num_groups, 0, G, BO), _byte_scales(s_ptr, rows, step + 1, num_groups, 0, G, BO)  # fmt: skip
        if G < 128:
            raws = raws + (_byte_scales(s_ptr, rows, step, num_groups, 1, G, BO), _byte_scales(s_ptr, rows, step + 1, num_groups, 1, G, BO))  # fmt: skip
    elif FORM >= INT4 and G < 128:
        num_runs = num_groups * G // 32
        raws = _raw_scales(s_ptr, rows, step, num_runs, G), _raw_scales(s_ptr, rows, step + 1, num_runs, G)
        if ZEROS:
            raws = raws + (_raw_scales(z_ptr, rows, step, num_runs, G), _raw_scales(z_ptr, rows, step + 1, num_runs, G))
    return raws


@gluon.jit
def _sums(c, x_smem, more_smem, w_smem, full, empty, s_ptr, z_ptr, s_smem, z_smem, feature, first, steps, num_features, num_groups, G: gl.constexpr,
          BO: gl.constexpr, BT: gl.constexpr, MORE: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr, operand: gl.constexpr, more_operand: gl.constexpr,
          layout: gl.constexpr, more_layout: gl.constexpr, FORM: gl.constexpr, HALF: gl.constexpr, ZEROS: gl.constexpr):  # fmt: skip
    """The sums of a group's rows, over all steps; see `_store` for the power of two that they lack."""
    of_rows: gl.constexpr = ROWS if FORM < INT4 and (G == 0 or G >= 128) else gl.SliceLayout(1, OF_RUNS)
    rows = gl.minimum(feature + gl.arange(0, 64, of_rows), num_features - 1).to(gl.int64)
    if FORM >= INT4 and G >= 128:
        _load_scales(s_ptr, z_ptr, s_smem, z_smem, feature, c, first, steps, num_features, num_groups, G, C, HALF, ZEROS)  # fmt: skip
    raws = _ahead((c, c), s_ptr, z_ptr, rows, first, num_groups, G, BO, FORM, ZEROS)
    acc, more = _zeros(BT, MORE, layout, more_layout)
    for i in range(0, steps, 2):
        # The next round's are on their way during this one.
        after = _ahead(raws, s_ptr, z_ptr, rows, first + i + 2, num_groups, G, BO, FORM, ZEROS)
        acc, more = _round(acc, more, raws, x_smem, more_smem, w_smem, s_smem, z_smem, full, empty, i, c, C, MORE, STAGES, operand, more_operand,
                           G, FORM, HALF, ZEROS)  # fmt: skip
        raws = after
    return acc, more


@gluon.jit
def _compute(c, x_smem, more_smem, w_smem, full, empty, s_ptr, z_ptr, r_ptr, s_smem, z_smem, bias_ptr, y_ptr, feature, row, first, steps, num_tokens,
             num_features, num_groups, y_stride, G: gl.constexpr, BO: gl.constexpr, BT: gl.constexpr, MORE: gl.constexpr, C: gl.constexpr,
             STAGES: gl.constexpr, FORM: gl.constexpr, ZEROS: gl.constexpr, FACTORS: gl.constexpr, DONE: gl.constexpr, ADD: gl.constexpr,
             BIAS: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """One group of four warps: the sums of its rows, and their outputs."""
    HALF: gl.constexpr = x_smem.dtype == gl.float16
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    more_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE if MORE else 8, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    more_operand: gl.constexpr = gl.DotOperandLayout(0, more_layout, 2)
    feature += c * 64
    acc, more = _sums(c, x_smem, more_smem, w_smem, full, empty, s_ptr, z_ptr, s_smem, z_smem, feature, first, steps, num_features, num_groups, G, BO, BT,
                      MORE, C, STAGES, operand, more_operand, layout, more_layout, FORM, HALF, ZEROS)  # fmt: skip
    out: gl.constexpr = STORED if DONE else layout
    out_more: gl.constexpr = STORED if DONE else more_layout
    wait_turn(PDL)
    _store(acc, r_ptr, bias_ptr, y_ptr, feature, row, num_tokens, num_features, y_stride, out, FORM, HALF, FACTORS, DONE, ADD, BIAS)  # fmt: skip
    if MORE:
        row += BT
        _store(more, r_ptr, bias_ptr, y_ptr, feature, row, num_tokens, num_features, y_stride, out_more, FORM, HALF, FACTORS, DONE, ADD, BIAS)  # fmt: skip


@gluon.jit
def _copy_codes(w_desc, w_smem, full, slot, feature, step, C: gl.constexpr, PIECES: gl.constexpr, BYTES: gl.constexpr):
    """Begin to bring a step's codes, PIECES times 64 bytes of a row; `full` counts BYTES, the inputs' among them."""
    mbarrier.expect(full.index(slot), BYTES)
    for r in gl.static_range(C * PIECES):
        place = [feature + r // PIECES * 64, (step * PIECES + r % PIECES) * 64]
        tma.async_copy_global_to_shared(w_desc, place, full.index(slot), w_smem.index(slot * (C * PIECES) + r))


@gluon.jit
def _copy(x_desc, more_desc, w_desc, x_smem, more_smem, w_smem, full, empty, feature, row, first, steps, BT: gl.constexpr,
          MORE: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr, FORM: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """The warp that copies. The codes of the first steps are on their way before the kernel before has ended."""
    PIECES: gl.constexpr = 2 if FORM < INT4 else 1
    BYTES: gl.constexpr = C * PIECES * 64 * 64 + (BT + MORE) * 256
    for i in gl.static_range(STAGES):
        if i < steps:
            _copy_codes(w_desc, w_smem, full, i, feature, first + i, C, PIECES, BYTES)
    wait_turn(PDL)
    for i in range(steps):
        slot = i % STAGES
        if i >= STAGES:
            mbarrier.wait(empty.index(slot), (i // STAGES - 1) & 1)
            _copy_codes(w_desc, w_smem, full, slot, feature, first + i, C, PIECES, BYTES)
        for half in gl.static_range(2):
            column = (first + i) * 128 + half * 64
            tma.async_copy_global_to_shared(x_desc, [row, column], full.index(slot), x_smem.index(slot * 2 + half))
            if MORE:
                place = more_smem.index(slot * 2 + half)
                tma.async_copy_global_to_shared(more_desc, [row + BT, column], full.index(slot), place)


@gluon.jit(do_not_specialize=["num_tokens", "num_groups", "total", "steps"])
def wide_kernel(x_desc, more_desc, w_desc, s_ptr, z_ptr, r_ptr, bias_ptr, y_ptr, num_tokens, num_features, num_groups, y_stride, total, steps, G: gl.constexpr,
                BO: gl.constexpr, BT: gl.constexpr, MORE: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr, ROOM: gl.constexpr,
                FORM: gl.constexpr, ZEROS: gl.constexpr, FACTORS: gl.constexpr, DONE: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr, REGS: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """64 C output features of BT + MORE tokens, over up to `steps` of all `total` steps; the next part of the input features is the next program's.

    ROOM: scales of so many steps have room. `steps` is an even number. A number of steps is made even: what is beyond the last input feature is copied as zeros.

    DONE: there are no other parts, and `y` takes the outputs; otherwise it takes one sum after another, [parts, T, O] float32.
    """
    start_next(PDL)
    dtype: gl.constexpr = x_desc.dtype
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * 2, BT, 64], x_desc.layout)
    more_smem = gl.allocate_shared_memory(dtype, [STAGES * 2 if MORE else 1, MORE if MORE else 8, 64], more_desc.layout)
    w_smem = gl.allocate_shared_memory(gl.uint8, [STAGES * C * (2 if FORM < INT4 else 1), 64, 64], w_desc.layout)
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
    # not constants, so that a group's code is translated once
    c0, c1, c2 = gl.to_tensor(0), gl.to_tensor(1), gl.to_tensor(2)
    # arguments stand in the calls, as a tuple in a variable would make tensors of constants
    if C == 2:
        gl.warp_specialize([
            (_compute, (c0, x_smem, more_smem, w_smem, full, empty, s_ptr, z_ptr, r_ptr, s_smem, z_smem, bias_ptr, y_ptr, feature, row, first, steps, num_tokens,
                        num_features, num_groups, y_stride, G, BO, BT, MORE, C, STAGES, FORM, ZEROS, FACTORS, DONE, ADD, BIAS, PDL)),
            (_compute, (c1, x_smem, more_smem, w_smem, full, empty, s_ptr, z_ptr, r_ptr, s_smem, z_smem, bias_ptr, y_ptr, feature, row, first, steps, num_tokens,
                        num_features, num_groups, y_stride, G, BO, BT, MORE, C, STAGES, FORM, ZEROS, FACTORS, DONE, ADD, BIAS, PDL)),
            (_copy, (x_desc, more_desc, w_desc, x_smem, more_smem, w_smem, full, empty, feature, row, first, steps, BT, MORE, C, STAGES, FORM, PDL)),
        ], [4, 1], [REGS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_compute, (c0, x_smem, more_smem, w_smem, full, empty, s_ptr, z_ptr, r_ptr, s_smem, z_smem, bias_ptr, y_ptr, feature, row, first, steps, num_tokens,
                        num_features, num_groups, y_stride, G, BO, BT, MORE, C, STAGES, FORM, ZEROS, FACTORS, DONE, ADD, BIAS, PDL)),
            (_compute, (c1, x_smem, more_smem, w_smem, full, empty, s_ptr, z_ptr, r_ptr, s_smem, z_smem, bias_ptr, y_ptr, feature, row, first, steps, num_tokens,
                        num_features, num_groups, y_stride, G, BO, BT, MORE, C, STAGES, FORM, ZEROS, FACTORS, DONE, ADD, BIAS, PDL)),
            (_compute, (c2, x_smem, more_smem, w_smem, full, empty, s_ptr, z_ptr, r_ptr, s_smem, z_smem, bias_ptr, y_ptr, feature, row, first, steps, num_tokens,
                        num_features, num_groups, y_stride, G, BO, BT, MORE, C, STAGES, FORM, ZEROS, FACTORS, DONE, ADD, BIAS, PDL)),
            (_copy, (x_desc, more_desc, w_desc, x_smem, more_smem, w_smem, full, empty, feature, row, first, steps, BT, MORE, C, STAGES, FORM, PDL)),
        ], [4, 4, 1], [REGS, REGS, 24])  # fmt: skip
