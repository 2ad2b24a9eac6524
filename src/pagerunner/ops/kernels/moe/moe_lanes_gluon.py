"""The kernels of `kernels/moe/moe_lanes.py`: experts' products with e2m1 weights of a few pairs of an expert, in Gluon.

As in `kernels/moe/moe_codes.py` weights are the first operand, and codes become numbers in the registers that a matrix unit reads. What differs is how
memory is read, which is what takes the time (docs/performance/experts.md):

* A *chunk* is 256 columns. A copy brings 128 neighbouring bytes of a row. Four lanes share a row, and each has 32 neighbouring bytes, two runs.
* So the scales of a lane's two runs are neighbours, too, and are one load.
* A product needs no barrier, only the inputs do, which the warps of a program share.

`place_of` says where inputs have a column, so that they meet the weights. The rows of the last tile begin earlier where they would go beyond the
last one. Some features are computed twice then, with the same result.

Gluon has no interpreter. Tests compile these kernels, and run them on a card.

Shape letters as in `ops/moe.py`; N rows of a tile, M its pairs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.runtime.jit import constexpr_function

from pagerunner.ops.kernels.activation import CLAMPED_SWIGLU, gated, rounded
from pagerunner.ops.kernels.codes import E2M1, INT4
from pagerunner.ops.kernels.launch import start_next_and_wait
from pagerunner.ops.kernels.moe.moe_lanes import COLUMNS

CHUNK = gl.constexpr(COLUMNS)
LIFT = gl.constexpr(63)
"""e2m1's bits in place are 2 ** -126 of a number. Half of that is in the inputs, 2 ** 63, the other half in the scales."""
X_SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@constexpr_function
def _row_bases(BN: int, W: int) -> tuple[list[int], list[int]]:
    """Rows of a tile by bits of the register and of the warp, as matrix units have them. A lane's own bits are 1, 2 and 4."""
    warps = [16 << bit for bit in range(W.bit_length() - 1)]
    return [8, *(16 * W << bit for bit in range((BN // (16 * W)).bit_length() - 1))], warps


@constexpr_function
def _lanes_layout(BN: int, W: int, BITS: int) -> gl.DistributedLinearLayout:
    """[N, 4 lanes x 2 ** BITS]: each of the 4 lanes of a row has so many neighbours."""
    registers, warps = _row_bases(BN, W)
    own = [[0, 1 << bit] for bit in range(BITS)] + [[row, 0] for row in registers]
    lanes = [[0, 1 << BITS], [0, 2 << BITS], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(own, lanes, [[row, 0] for row in warps], [], [BN, 4 << BITS])


@constexpr_function
def _codes_layout(BN: int, W: int, RUNS: int) -> gl.DistributedLinearLayout:
    """[N, 16 RUNS] words of 4 lanes, each with RUNS runs of 4 words; RUNS is 1 or 2."""
    return _lanes_layout(BN, W, RUNS + 1)


@constexpr_function
def _words_layout(BN: int, W: int) -> gl.DistributedLinearLayout:
    """[N, 4, 4] words of 4 lanes with a run each."""
    registers, warps = _row_bases(BN, W)
    own = [[0, 0, 1], [0, 0, 2]] + [[row, 0, 0] for row in registers]
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(own, lanes, [[row, 0, 0] for row in warps], [], [BN, 4, 4])


@constexpr_function
def _scales_layout(BN: int, W: int, RUNS: int) -> gl.DistributedLinearLayout:
    """[N, 4 RUNS] scales, where their words are."""
    return _lanes_layout(BN, W, RUNS - 1)


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def _find_tile(starts_ptr, tile, E: gl.constexpr, BE: gl.constexpr, BM: gl.constexpr):
    """As `moe_tiles.find_tile`, by each warp for itself."""
    experts = gl.arange(0, BE, gl.BlockedLayout([max(1, BE // 32)], [32], [gl.num_warps()], [0]))
    starts = gl.load(starts_ptr + experts, mask=experts < E, other=0)
    ends = gl.load(starts_ptr + 1 + experts, mask=experts < E, other=0)
    tiles = (ends - starts + BM - 1) // BM
    tiles_end = gl.associative_scan(tiles, 0, _plus)
    expert = gl.sum(((tiles_end <= tile) & (experts < E)).to(gl.int32), 0)
    own = experts == expert
    first_row = gl.sum(gl.where(own, starts + (tile - tiles_end + tiles) * BM, 0), 0)
    return expert, first_row, gl.sum(gl.where(own, ends, 0), 0)


@gluon.jit
def place_of(column, K: gl.constexpr):
    """Where arranged inputs of K columns have a column.

    In a chunk a lane has two runs of 32 columns; in half a chunk it has one. A step is one run of each lane.
    """
    half, word, second, odd = (column >> 4) & 1, (column >> 2) & 3, (column >> 1) & 1, column & 1
    inside = half * 64 + word * 16 + odd * 8 + second
    lane, step = (column >> 6) & 3, (column >> 5) & 1
    place = (column & -256) + step * 128 + lane * 2 + inside
    if K % CHUNK > 0 and K % CHUNK <= 128:
        short = (column & -128) + ((column >> 5) & 3) * 2 + inside
        place = gl.where(column >= K // CHUNK * CHUNK, short, place)
    return place


@gluon.jit
def arrange_kernel(x_ptr, out_ptr, x_row, K: gl.constexpr, WIDE: gl.constexpr, BLOCK: gl.constexpr, PDL: gl.constexpr):
    """BLOCK columns of a token's inputs, put where `place_of` says, times 2 ** LIFT; zeros beyond column K."""
    start_next_and_wait(PDL)
    token = gl.program_id(0).to(gl.int64)
    column = gl.program_id(1) * BLOCK + gl.arange(0, BLOCK, gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))
    power: gl.constexpr = 2.0**LIFT
    x = gl.load(x_ptr + token * x_row + column, mask=column < K, other=0.0).to(gl.float32) * power
    gl.store(out_ptr + token * WIDE + place_of(column, K), x.to(out_ptr.dtype.element_ty), mask=column < WIDE)


@gluon.jit
def _rows_of(local, N: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr):
    """Rows of weights of a tile's rows, from its first on. Of 16 rows of the first product's, 8 are gates and 8 their ups."""
    if GATED:
        feature = local // 16 * 8 + local % 8
        if KIND == CLAMPED_SWIGLU:
            rows = feature * 2 + local // 8 % 2
        else:
            rows = feature + local // 8 % 2 * N
    else:
        rows = local
    return rows


@gluon.jit
def _load_scales(place, run, chunk, K: gl.constexpr, RUNS: gl.constexpr):
    """Scales of a chunk, each run's own; those of the last runs for runs beyond."""
    LAST: gl.constexpr = K // 32 - 1
    if (LAST + 1) % RUNS == 0:  # neighbours stay neighbours
        at = gl.minimum(chunk * 8 + run // RUNS * RUNS, LAST + 1 - RUNS) + run % RUNS
    else:
        at = gl.minimum(chunk * 8 + run, LAST)
    return gl.load(place + at[None, :])


@constexpr_function
def lift_of(FORM: int) -> int:
    """The power of two that inputs have in the other products."""
    return LIFT.value if FORM == E2M1.value else 0


E4M3_FACTORS = gl.constexpr(
    "{ .reg .b32 a, b; mov.b32 a, 0x7F007F00; mov.b32 b, 0x5B805B80; mul.rn.bf16x2 a, a, $1; mul.rn.bf16x2 $0, a, b; }"
)
"""Two of e4m3's bits in place, which are 2 ** -120 of a number, lifted."""


@constexpr_function
def numbers_of(HALF: int, FORM: int) -> str:
    """What makes $0 and $1, pairs of numbers times $4, of codes: the low nibbles (HALF 0) or the high ones of every second byte of $2, and of $3.

    e2m1: a product with two powers of two puts a nibble in two places; the mask leaves the sign of one and the rest of the other. int4: 128 and a
    code are a number whose last bits are the code.
    """
    if FORM == INT4.value:
        nibbles = "shr.u32 a, $2, 4; shr.u32 b, $3, 4;" if HALF else "mov.b32 a, $2; mov.b32 b, $3;"
        numbers = """lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA; lop3.b32 b, b, 0x000F000F, 0x43004300, 0xEA;
            mov.b32 c, 0xC308C308; add.rn.bf16x2 a, a, c; add.rn.bf16x2 b, b, c;"""
    else:
        mask, powers = ("0x00F000F0", "0x104") if HALF else ("0x000F000F", "0x1040")
        nibbles = f"and.b32 a, $2, {mask}; and.b32 b, $3, {mask}; mul.lo.u32 a, a, {powers}; mul.lo.u32 b, b, {powers};"
        numbers = "and.b32 a, a, 0x81C081C0; and.b32 b, b, 0x81C081C0;"
    return f"{{ .reg .b32 a, b, c; {nibbles} {numbers} mul.rn.bf16x2 $0, a, $4; mul.rn.bf16x2 $1, b, $4; }}"


@gluon.jit
def factors_of(scales, HALF: gl.constexpr, FORM: gl.constexpr):
    """What numbers of the low nibbles (HALF 0) or the high ones are multiplied by, as pairs of bfloat16: e2m1's are lifted.

    int4 has scales in bfloat16. e2m1 has bytes of e8m0, or words of two bytes of e4m3, one for each half of a run.
    """
    if FORM == INT4:
        factors = scales.to(gl.uint16, bitcast=True).to(gl.uint32) * 0x00010001
    elif scales.dtype == gl.uint8:
        factors = gl.minimum(scales.to(gl.uint32) + LIFT, 255) * 0x00800080
    else:
        bits = ((scales.to(gl.uint32) >> (8 * HALF)) & 0x7F) * 0x00100010
        factors = gl.inline_asm_elementwise(E4M3_FACTORS, "=r,r", [bits], dtype=gl.uint32, is_pure=True, pack=1)
    return factors


@gluon.jit
def half_of(words, factors, HALF: gl.constexpr, FORM: gl.constexpr):
    """bfloat16 [N, 64] in places of the low nibbles (HALF 0) or the high ones of words [N, 4 lanes, 4], times factors [N, 4]."""
    BN: gl.constexpr = words.shape[0]
    factors, words = gl.broadcast(gl.expand_dims(factors, 2), words)
    even, odd = gl.inline_asm_elementwise(
        numbers_of(HALF, FORM), "=r,=r,r,r,r", [words, words >> 8, factors], dtype=(gl.uint32, gl.uint32), is_pure=True, pack=1
    )  # fmt: skip
    both = gl.join(even, odd)  # lane, word, odd
    first = (both & 0xFFFF).to(gl.uint16).to(gl.bfloat16, bitcast=True)
    second = (both >> 16).to(gl.uint16).to(gl.bfloat16, bitcast=True)
    return gl.reshape(gl.permute(gl.join(first, second), [0, 2, 3, 1, 4]), [BN, 64])


@gluon.jit
def _steps_of(codes, scales, RUNS: gl.constexpr):
    """Words [N, 4, 4] and scales [N, 4] of each step of a chunk."""
    BN: gl.constexpr = codes.shape[0]
    LAYOUT: gl.constexpr = _words_layout(BN, gl.num_warps())
    if RUNS == 1:
        words, own = (gl.reshape(codes, [BN, 4, 4]),), (scales,)
    else:
        words = gl.split(gl.permute(gl.reshape(codes, [BN, 4, 2, 4]), [0, 1, 3, 2]))
        own = gl.split(gl.reshape(scales, [BN, 4, 2]))
    steps = ()
    for step in gl.static_range(RUNS):
        steps = steps + (
            (
                gl.convert_layout(words[step], LAYOUT, assert_trivial=True),
                gl.convert_layout(own[step], gl.SliceLayout(2, LAYOUT), assert_trivial=True),
            ),
        )
    return steps


@gluon.jit
def _add_chunk(acc, codes, scales, x_buffer, RUNS: gl.constexpr):
    """`acc` and the products of a chunk, whose inputs are in the buffer."""
    LAYOUT: gl.constexpr = acc.type.layout
    steps = _steps_of(codes, scales, RUNS)
    for step in gl.static_range(RUNS):
        for half in gl.static_range(2):
            numbers = half_of(steps[step][0], factors_of(steps[step][1], half, E2M1), half, E2M1)
            numbers = gl.convert_layout(numbers, gl.DotOperandLayout(0, LAYOUT, 2), assert_trivial=True)
            x = x_buffer.slice(step * 128 + half * 64, 64, 1).permute([1, 0])
            acc = mma_v2(numbers, x.load(gl.DotOperandLayout(1, LAYOUT, 2)), acc)
    return acc


@gluon.jit
def _ask(
    x_buffers, x_place, x_column, valid, w_buffers, w_place, word, chunk, slot, K: gl.constexpr, WIDE: gl.constexpr
):
    """Copy a chunk's inputs and codes to their buffers; those of the last run for runs beyond."""
    at = gl.minimum(chunk * 32 + word // 4 * 4, K // 8 - 4) + word % 4
    async_copy.async_copy_global_to_shared(w_buffers.index(slot), w_place + at[None, :])
    mask = (chunk * CHUNK + x_column < WIDE)[None, :] & valid[:, None]
    async_copy.async_copy_global_to_shared(x_buffers.index(slot), x_place + chunk * CHUNK, mask=mask)
    async_copy.commit_group()


@gluon.jit
def _sums(x_ptr, source, valid, w, s, BM: gl.constexpr, BN: gl.constexpr, N: gl.constexpr, K: gl.constexpr, WIDE: gl.constexpr,
          STAGES: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr, X: gl.constexpr, SUMS: gl.constexpr):  # fmt: skip
    """Rows of weights, the tile's first at `w` and its scales at `s`, times rows `source` of inputs; float32 [N, M]."""
    W: gl.constexpr = gl.num_warps()
    SHORT: gl.constexpr = K % CHUNK > 0 and K % CHUNK <= 128
    CHUNKS: gl.constexpr = K // CHUNK if SHORT else (K + CHUNK - 1) // CHUNK
    x_column = gl.arange(0, CHUNK, gl.SliceLayout(0, X))
    x_place = x_ptr + source.to(gl.int64)[:, None] * WIDE + x_column[None, :]
    CODES: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [W, 1], [1, 0])
    word = gl.arange(0, 32, gl.SliceLayout(0, CODES))
    w_place = w + (_rows_of(gl.arange(0, BN, gl.SliceLayout(1, CODES)), N, GATED, KIND) * (K // 8))[:, None]
    SCALES: gl.constexpr = _scales_layout(BN, W, 2)
    run = gl.arange(0, 8, gl.SliceLayout(0, SCALES))
    s_rows = _rows_of(gl.arange(0, BN, gl.SliceLayout(1, SCALES)), N, GATED, KIND)
    s_place = s + (s_rows * (K // 32))[:, None]
    x_buffers = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES, BM, CHUNK], X_SHARED)
    w_buffers = gl.allocate_shared_memory(gl.uint32, [STAGES, BN, 32], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    for chunk in gl.static_range(STAGES - 1):
        _ask(x_buffers, x_place, x_column, valid, w_buffers, w_place, word, chunk, chunk, K, WIDE)
    scales = _load_scales(s_place, run, 0, K, 2)
    next_scales = _load_scales(s_place, run, 1, K, 2)
    acc = gl.full([BN, BM], 0.0, gl.float32, SUMS)
    slot = 0
    free = STAGES - 1
    for chunk in range(CHUNKS):
        async_copy.wait_group(STAGES - 2)
        gl.thread_barrier()
        _ask(x_buffers, x_place, x_column, valid, w_buffers, w_place, word, chunk + STAGES - 1, free, K, WIDE)
        later_scales = _load_scales(s_place, run, chunk + 2, K, 2)
        codes = w_buffers.index(slot).load(_codes_layout(BN, W, 2))
        acc = _add_chunk(acc, codes, scales, x_buffers.index(slot), 2)
        scales = next_scales
        next_scales = later_scales
        free = slot
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    async_copy.wait_group(0)
    if SHORT:
        gl.thread_barrier()
        HALF: gl.constexpr = _scales_layout(BN, W, 1)
        place = s + (gl.convert_layout(s_rows, gl.SliceLayout(1, HALF)) * (K // 32))[:, None]
        scales = _load_scales(place, gl.arange(0, 4, gl.SliceLayout(0, HALF)), CHUNKS, K, 1)
        codes = w_buffers.index(slot).slice(0, 16, 1).load(_codes_layout(BN, W, 1))
        acc = _add_chunk(acc, codes, scales, x_buffers.index(slot), 1)
    return acc


@gluon.jit
def _store(y, out_ptr, order_ptr, first, first_row, last_row, N: gl.constexpr, OUT: gl.constexpr, GATED: gl.constexpr):
    """Store results [F, M] of features from `first` on: the first product's in expert order and arranged, with zeros in places beyond."""
    F: gl.constexpr = y.shape[0]
    BM: gl.constexpr = y.shape[1]
    OWN: gl.constexpr = gl.BlockedLayout([1, 8], [256 // F, F // 8], [gl.num_warps(), 1], [1, 0])
    y = gl.convert_layout(gl.permute(y, [1, 0]), OWN)
    pair_rows = first_row + gl.arange(0, BM, gl.SliceLayout(1, OWN))
    inside = (pair_rows < last_row)[:, None]
    target = pair_rows if GATED else gl.load(order_ptr + gl.minimum(pair_rows, last_row - 1))
    line = out_ptr + target.to(gl.int64)[:, None] * OUT
    feature = first + gl.arange(0, F, gl.SliceLayout(0, OWN))
    gl.store(line + (place_of(feature, N) if GATED else feature)[None, :], y, mask=inside & (feature < N)[None, :])
    if GATED and OUT > N:
        if gl.program_id(1) == 0:
            beyond = N + gl.arange(0, CHUNK, gl.SliceLayout(0, OWN))
            zeros = gl.full([BM, CHUNK], 0.0, y.dtype, OWN)
            gl.store(line + place_of(beyond, N)[None, :], zeros, mask=inside & (beyond < OUT)[None, :])


@gluon.jit(do_not_specialize=["active"])
def lanes_kernel(x_ptr, w_ptr, s_ptr, r_ptr, w_expert, s_expert, bias_ptr, weights_ptr, order_ptr, starts_ptr, out_ptr, active, limit,
                  E: gl.constexpr, BE: gl.constexpr, N: gl.constexpr, K: gl.constexpr, WIDE: gl.constexpr, OUT: gl.constexpr,
                  BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr,
                  KIND: gl.constexpr, WEIGH: gl.constexpr, FACTORS: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """BN rows of weights times BM pairs of one expert, whose inputs are arranged.

    The first product (GATED) reads tokens' rows and stores what the activation makes of BN / 2 gates and ups, in expert order and arranged.
    The second product reads these rows and stores pairs in the tokens' order. Rows of inputs have WIDE places, those of the result OUT.
    """
    W: gl.constexpr = gl.num_warps()
    F: gl.constexpr = BN // 2 if GATED else BN
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[W, 1], instr_shape=[16, 8])
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    start_next_and_wait(PDL)
    expert, first_row, last_row = _find_tile(starts_ptr, gl.program_id(0), E, BE, BM)
    if expert < E:
        first = gl.minimum(gl.program_id(1) * F, N - F)
        outputs: gl.constexpr = 2 * N if GATED else N
        first_w = first * 2 if GATED and KIND == CLAMPED_SWIGLU else first
        X: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [W, 1], [1, 0])
        pair_rows = first_row + gl.arange(0, BM, gl.SliceLayout(1, X))
        valid = pair_rows < last_row
        pair_rows = gl.minimum(pair_rows, last_row - 1)
        source = gl.load(order_ptr + pair_rows) // active if GATED else pair_rows
        w = w_ptr + expert.to(gl.int64) * w_expert + first_w * (K // 8)
        s = s_ptr + expert.to(gl.int64) * s_expert + first_w * (K // 32)
        acc = _sums(x_ptr, source, valid, w, s, BM, BN, N, K, WIDE, STAGES, GATED, KIND, X, SUMS)
        own_rows = _rows_of(gl.arange(0, BN, gl.SliceLayout(1, SUMS)), N, GATED, KIND)
        if FACTORS:
            acc *= gl.load(r_ptr + expert * outputs + first_w + own_rows)[:, None]
        weights = 1.0
        if WEIGH:
            pair_rows = first_row + gl.arange(0, BM, gl.SliceLayout(0, SUMS))
            pairs = gl.load(order_ptr + gl.minimum(pair_rows, last_row - 1))
            weights = gl.load(weights_ptr + pairs)[None, :]
            if GATED:
                acc *= weights
        if BIAS:
            acc += gl.load(bias_ptr + expert * outputs + first_w + own_rows).to(gl.float32)[:, None]
        if GATED:
            gate, up = gl.split(gl.permute(gl.reshape(acc, [BN // 16, 2, 8, BM]), [0, 2, 3, 1]))
            lift: gl.constexpr = 2.0**LIFT
            y = gated(rounded(gate, dtype), rounded(up, dtype), limit, KIND, dtype).to(gl.float32) * lift
            y = gl.reshape(y.to(dtype), [F, BM])
        else:
            y = (acc * weights).to(dtype)
        _store(y, out_ptr, order_ptr, first, first_row, last_row, N, OUT, GATED)
