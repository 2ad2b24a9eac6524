"""Products of up to 16 tokens with a matrix of 4-bit codes (`ops/stored.py`), which go from memory straight into the matrix units' registers.

A product of 16 rows and 16 inputs (`mma.m16n8k16` of the PTX ISA) has its first operand in registers: four lanes share a row. Which inputs a
lane holds is free, as long as the second operand's lanes hold the same. So a lane takes 16 neighbouring bytes of a row, a run of 32 columns, and
of each token the inputs of these columns. Nothing goes through shared memory but the warps' sums at the end.

The inputs are divided into segments of 128. A step of a program takes a segment for each warp and each piece. Pieces are what a row is cut into,
so that few tokens fill the 8 columns of a product: with one token a row has 8 pieces. A piece of a row meets the pieces of all tokens, and only the
product with its own counts. What a program needs of a matrix is on its way before the kernel before it has ended.

int4: a code n is the number 128 + n. The scale of a segment multiplies its sum, less 136 (or 128 + zero point) times the sum of the inputs.
In float16 it is 16 + n: with 1,024 + n, what is taken off would be so large that float32's errors show.
e2m1: a code is 2 ** -126 of its number, and its scale times 2 ** 64 multiplies it. That is exact in bfloat16 for scales from 2 ** -64 to 2 ** 63.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.codes import E2M1, INT4, behind, raw_int4, scaled_e2m1, uses_words
from pagerunner.ops.kernels.launch import blocks, dependent, padded, start_next, wait_turn
from pagerunner.ops.kernels.linear.linear_parts import Product, held, put, silu_gate
from pagerunner.ops.kernels.stored import operands_of, scale_numbers
from pagerunner.ops.stored import RUN, Stored, Stored4

SEGMENT = tl.constexpr(128)
RUNS = tl.constexpr(128 // RUN)


@triton.jit
def _rows_of(tile, rows, num_features, F: tl.constexpr, P: tl.constexpr, WHOLE: tl.constexpr, GATED: tl.constexpr):
    """Rows of the matrix that rows of a block are pieces of: F features, and with GATED F of the up projection."""
    features = tile * F + rows // P % F
    if not WHOLE:  # rows beyond the last are read as the last: their sums aren't stored
        features = tl.minimum(features, num_features - 1)
    if GATED:
        features += rows // P // F * num_features
    return features


@triton.jit
def _group_values(ptr, features, segment, K: tl.constexpr, G: tl.constexpr):
    """Scales or zero points [B, N] of a segment [B, N] of rows [1 or B, N]."""
    LAST: tl.constexpr = (K + G - 1) // G - 1
    return tl.load(ptr + features * (LAST + 1) + tl.minimum(segment * SEGMENT // G, LAST))


@triton.jit
def _e2m1_scales(raw, WORDS: tl.constexpr):
    """Scales for `scaled_e2m1`: with WORDS 2 ** 64 times them in bfloat16, infinite if that is too large, else as they are."""
    if not WORDS:
        scales = scale_numbers(raw)
    elif raw.dtype == tl.uint8:
        scales = (tl.minimum(raw.to(tl.int16) + 64, 255) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        scales = (raw.to(tl.float32) * 1.8446744073709552e19).to(tl.bfloat16)  # 2 ** 64
    return scales


@triton.jit
def _run_scales(ptr, features, segment, PLUS: tl.constexpr, K: tl.constexpr, G: tl.constexpr, WORDS: tl.constexpr):
    """Scales [B, N, RUNS] of the low (PLUS 0) or the high nibbles (PLUS 1) of runs of G or 2 G columns."""
    EACH: tl.constexpr = 2 * 16 // G
    run = segment[:, :, None] * RUNS + tl.arange(0, RUNS)[None, None, :]
    column = tl.minimum(run * EACH, K // G - EACH) + PLUS
    return _e2m1_scales(tl.load(ptr + features[:, :, None] * (K // G) + column), WORDS)


@triton.jit
def _lane_scales(ptr, rows, segment, PLUS: tl.constexpr, K: tl.constexpr, G: tl.constexpr):
    """The same as they lie in memory, [RUNS, 8, B, N / 8], of rows and segments [8, 1 or B, N / 8]: each in the lane whose codes it multiplies."""
    EACH: tl.constexpr = 2 * 16 // G
    run = (segment * RUNS)[None, :, :, :] + tl.arange(0, RUNS)[:, None, None, None]
    return tl.load(ptr + (rows * (K // G))[None, :, :, :] + (tl.minimum(run * EACH, K // G - EACH) + PLUS))


@triton.jit
def load_step(matrix, step, K: tl.constexpr, G: tl.constexpr, P: tl.constexpr, B: tl.constexpr, FORM: tl.constexpr,
          WORDS: tl.constexpr, ZEROS: tl.constexpr):  # fmt: skip
    """Bytes [8, B, N / 8, C] of one step, and their scales and zero points. Rows and segments are as `_lane_scales` wants them, or [1 or B, N]."""
    w_rows, at, s_ptr, z_ptr, features, segment = matrix
    BYTES: tl.constexpr = SEGMENT // 2
    STEP: tl.constexpr = B * P * BYTES
    if K // 2 >= (step + 1) * STEP:
        codes = tl.load(w_rows + at + step * STEP)
    else:
        codes = tl.load(w_rows + at + step * STEP, mask=at < K // 2 - step * STEP, other=0)
    segment += step * (B * P)
    if FORM == INT4:
        scales = _group_values(s_ptr, features, segment, K, G)
        second = scales
        if ZEROS:
            second = _group_values(z_ptr, features, segment, K, G)
    elif len(segment.shape) == 3:
        scales = _lane_scales(s_ptr, features, segment, 0, K, G)
        second = scales
        if G == 16:
            second = _lane_scales(s_ptr, features, segment, 1, K, G)
    else:
        scales = _run_scales(s_ptr, features, segment, 0, K, G, WORDS)
        second = scales
        if G == 16:
            second = _run_scales(s_ptr, features, segment, 1, K, G, WORDS)
    return codes, scales, second


@triton.jit
def _own_bytes(codes):
    """Bytes [8, B, H, C] of rows, at their places in a product's first operand [B, 8 H, C].

    The lanes of a row have 16 neighbouring bytes each. Four of them are neighbours in the operand: (lane, 4, 4) becomes (4, lane, 4).
    """
    B: tl.constexpr = codes.shape[1]
    H: tl.constexpr = codes.shape[2]
    C: tl.constexpr = codes.shape[3]
    codes = tl.reshape(codes, (8, B, H, C // 16, 4, 4))
    return tl.reshape(tl.permute(codes, (1, 2, 0, 4, 3, 5)), (B, 8 * H, C))


@triton.jit
def _for_bytes(scales, WORDS: tl.constexpr):
    """Scales of runs, [B, N, R] or as `_lane_scales` gives them, for the bytes that `_own_bytes` gives."""
    if len(scales.shape) == 4:
        own = tl.permute(_e2m1_scales(scales, WORDS), (2, 3, 1, 0))
        scales = tl.reshape(own, (own.shape[0], 8 * own.shape[1], own.shape[3]))
    B: tl.constexpr = scales.shape[0]
    N: tl.constexpr = scales.shape[1]
    R: tl.constexpr = scales.shape[2]
    return tl.reshape(tl.broadcast_to(scales[:, :, None, :, None], (B, N, 4, R, 4)), (B, N, 16 * R))


@triton.jit
def _own_inputs(first, second, WORDS: tl.constexpr):
    """Inputs [R, 8, B, H, 8] of columns 0 to 7 and 8 to 15 of half runs, as [B, 16 R, 8 H] in the order of `_own_bytes`.

    With WORDS, the inputs of bytes 0, 1, 2, 3 are in the order 0, 2, 1, 3, as the words of PTX make numbers.
    """
    R: tl.constexpr = first.shape[0]
    B: tl.constexpr = first.shape[2]
    H: tl.constexpr = first.shape[3]
    x = tl.join(first, second)
    if WORDS:
        x = tl.permute(tl.reshape(x, (R, 8, B, H, 2, 2, 2, 2)), (2, 7, 4, 0, 6, 5, 3, 1))
    else:
        x = tl.permute(tl.reshape(x, (R, 8, B, H, 2, 4, 2)), (2, 6, 4, 0, 5, 3, 1))
    return tl.reshape(x, (B, 16 * R, 8 * H))


@triton.jit
def load_inputs(source, step, K: tl.constexpr, P: tl.constexpr, B: tl.constexpr):
    """Inputs of a step as `_own_inputs` takes them: two halves of the low nibbles', and two of the high nibbles'."""
    place, column, live = source
    FIRST: tl.constexpr = B * P * SEGMENT
    place += step * FIRST
    inside = live & (column < K - step * FIRST)
    low, more_low = tl.load(place, mask=inside, other=0.0), tl.load(place + 8, mask=inside, other=0.0)
    high, more_high = tl.load(place + 16, mask=inside, other=0.0), tl.load(place + 24, mask=inside, other=0.0)
    return low, more_low, high, more_high


@triton.jit
def all_loaded(inputs, never, WORDS: tl.constexpr):
    """Some steps' inputs, the first of which can't be used before all are on their way. `never`: see `codes.behind`."""
    first, last = inputs[0], inputs[len(inputs) - 1]
    return ((behind(first[0], last[3], never, WORDS), first[1], first[2], first[3]),) + inputs[1:]


@triton.jit
def add_step(acc, weights, inputs, FORM: tl.constexpr, WORDS: tl.constexpr, ZEROS: tl.constexpr):
    """`acc` [B, N, M] and the products of one step."""
    codes, scales, second = weights
    low, high = _own_inputs(inputs[0], inputs[1], WORDS), _own_inputs(inputs[2], inputs[3], WORDS)
    codes = _own_bytes(codes)
    dtype: tl.constexpr = low.dtype
    if FORM == INT4:
        COUNTED: tl.constexpr = 24.0 if dtype == tl.float16 else 136.0
        OFFSET: tl.constexpr = COUNTED if WORDS else 0.0  # what a number counts from
        product = tl.zeros(acc.shape, tl.float32)
        if ZEROS or WORDS:
            ones = tl.full(codes.shape, 1.0, dtype)
            sums = tl.dot(ones, high, tl.dot(ones, low, input_precision="ieee"), input_precision="ieee")
            if not ZEROS:
                product = sums * -OFFSET
        product = tl.dot(raw_int4(codes, False, dtype, WORDS), low, product, input_precision="ieee")
        product = tl.dot(raw_int4(codes, True, dtype, WORDS), high, product, input_precision="ieee")
        if ZEROS:
            product += ((8.0 - OFFSET) - second.to(tl.float32))[:, :, None] * sums
        acc += product * scale_numbers(scales)[:, :, None]
    else:
        numbers = scaled_e2m1(codes, _for_bytes(scales, WORDS), False, dtype, WORDS)
        acc = tl.dot(numbers, low, acc, input_precision="ieee")
        numbers = scaled_e2m1(codes, _for_bytes(second, WORDS), True, dtype, WORDS)
        acc = tl.dot(numbers, high, acc, input_precision="ieee")
    return acc


@triton.jit
def own_pieces(acc, P: tl.constexpr):
    """Sums [N / P, M / P] of `acc` [B, N, M], where a piece of a row met the same piece of a token."""
    B: tl.constexpr = acc.shape[0]
    N: tl.constexpr = acc.shape[1]
    M: tl.constexpr = acc.shape[2]
    if P > 1:
        own = (tl.arange(0, N) % P)[:, None] == (tl.arange(0, M) % P)[None, :]
        acc = tl.reshape(tl.where(own[None, :, :], acc, 0.0), (B, N // P, P, M // P, P))
        acc = tl.sum(tl.sum(acc, 4), 2)
    return tl.sum(acc, 0)


@triton.jit
def finished(y, tile, factors_ptr, bias_ptr, num_features, F: tl.constexpr, POWER: tl.constexpr, FACTORS: tl.constexpr,
             BIAS: tl.constexpr, WHOLE: tl.constexpr, GATED: tl.constexpr, dtype: tl.constexpr):  # fmt: skip
    """Outputs [F, T] of sums [N, T]: times POWER and the rows' factors, with bias and gate."""
    N: tl.constexpr = y.shape[0]
    T: tl.constexpr = y.shape[1]
    features = _rows_of(tile, tl.arange(0, N), num_features, F, 1, WHOLE, GATED)
    if POWER != 1.0:
        y *= POWER
    if FACTORS:
        y *= tl.load(factors_ptr + features)[:, None]
    if BIAS:
        y += tl.load(bias_ptr + features).to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, F, T)), (1, 2, 0)))
        y = silu_gate(gate, up, dtype)
    return y.to(dtype)


@triton.jit(do_not_specialize=["num_tokens", "num_features"])
def _packed_kernel(x_ptr, w_ptr, s_ptr, z_ptr, r_ptr, bias_ptr, y_ptr, num_tokens, num_features, x_stride, y_stride,
                   K: tl.constexpr, G: tl.constexpr, P: tl.constexpr, B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                   AHEAD: tl.constexpr, FORM: tl.constexpr, WORDS: tl.constexpr, ZEROS: tl.constexpr,
                   FACTORS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
                   WHOLE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BN / P output features (or half as many gates, each with its feature of the up projection) of up to BM / P tokens.

    B segments a step, one for each warp. AHEAD steps are in flight.
    """
    start_next(PDL)
    STEPS: tl.constexpr = (K + B * P * SEGMENT - 1) // (B * P * SEGMENT)
    F: tl.constexpr = BN // P // (2 if GATED else 1)
    T: tl.constexpr = BM // P
    tile = tl.program_id(0)
    # dimensions in the order in which Triton gives them to lanes (the first one), to warps, and to registers
    rows = tl.arange(0, 8)[:, None] + tl.arange(0, BN // 8)[None, :] * 8
    features = _rows_of(tile, rows, num_features, F, P, WHOLE, GATED)
    segment = tl.arange(0, B) * P
    at = (segment * (SEGMENT // 2))[None, :, None, None] + (rows % P * (SEGMENT // 2))[:, None, :, None]
    at += tl.arange(0, SEGMENT // 2)[None, None, None, :]
    w_rows = w_ptr + (features.to(tl.int64) * (K // 2))[:, None, :, None]
    rows_N = tl.arange(0, BN)
    features = _rows_of(tile, rows_N, num_features, F, P, WHOLE, GATED)[None, :]
    matrix = (w_rows, at, s_ptr, z_ptr, features, segment[:, None] + (rows_N % P)[None, :])
    steps = ()
    for i in tl.static_range(min(AHEAD, STEPS)):
        steps = steps + (load_step(matrix, i, K, G, P, B, FORM, WORDS, ZEROS),)
    tokens, outputs = tl.arange(0, T), tile * F + tl.arange(0, F)
    y_place = y_ptr + tokens[None, :] * y_stride + outputs[:, None]
    inside_y = (tokens < num_tokens)[None, :] & (outputs < num_features)[:, None]
    m = tl.arange(0, 8)[:, None] + tl.arange(0, BM // 8)[None, :] * 8
    column = (tl.arange(0, RUNS) * 32)[:, None, None, None, None] + (segment * SEGMENT)[None, None, :, None, None]
    column += (m % P * SEGMENT)[None, :, None, :, None] + tl.arange(0, 8)[None, None, None, None, :]
    live = (m // P < num_tokens)[None, :, None, :, None]
    source = (x_ptr + (m // P * x_stride)[None, :, None, :, None] + column, column, live)
    wait_turn(PDL)
    old = held(y_place, inside_y, ADD)
    acc = tl.zeros((B, BN, BM), tl.float32)
    for i in tl.static_range(STEPS):
        acc = add_step(acc, steps[i], load_inputs(source, i, K, P, B), FORM, WORDS, ZEROS)
        if i + AHEAD < STEPS:
            steps = steps + (load_step(matrix, i + AHEAD, K, G, P, B, FORM, WORDS, ZEROS),)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    y = own_pieces(acc, P)
    POWER: tl.constexpr = 4611686018427387904.0 if FORM == E2M1 and WORDS else 1.0  # 2 ** 62
    y = finished(y, tile, r_ptr, bias_ptr, num_features, F, POWER, FACTORS, BIAS, WHOLE, GATED, dtype)
    put(y_place, y, old, inside_y, ADD)


class PackedConfig(NamedTuple):
    """A block: pieces of output features, warps, and steps in flight."""

    rows: int
    warps: int
    ahead: int


MAX_TOKENS = 16


def fits(x_TI: torch.Tensor, stored: Stored) -> bool:
    """Whether `_packed_kernel` serves this number of tokens, this dtype and this form."""
    return 0 < x_TI.shape[0] <= MAX_TOKENS and isinstance(stored, Stored4) and reads(stored, x_TI.dtype)


def has_words(stored: Stored, dtype: torch.dtype) -> bool:
    """A kernel's WORDS: whether PTX makes numbers of this dtype of such codes here."""
    half = dtype == torch.float16 and isinstance(stored, Stored4) and stored.numbers == "int4"
    return uses_words(dtype) or half and os.environ.get("TRITON_INTERPRET") != "1"


def reads(stored: Stored4, dtype: torch.dtype) -> bool:
    """Whether lanes read such codes for activations of this dtype: with scales of 128 columns or more, or exact scales of e2m1."""
    if not has_words(stored, dtype) and os.environ.get("TRITON_INTERPRET") != "1":
        return False
    if stored.numbers == "int4":
        return stored.group % SEGMENT.value == 0 or stored.group >= stored.shape[-1]
    return stored.group in (RUN // 2, RUN) and stored.scales.dtype in (torch.uint8, torch.float8_e4m3fn)


@functools.cache
def packed_config(inputs: int, features: int, tokens: int, gated: bool, e2m1: bool) -> PackedConfig:
    """The block for `_packed_kernel`, by measurement (docs/performance/stored-weights.md). `tokens` is a power of two."""
    long = inputs > 8192
    if tokens == 1 and e2m1:
        return PackedConfig(64, 2, 3) if long else PackedConfig(32, 1, 4)
    if tokens == 1 and gated and features > 16384:
        return PackedConfig(64, 1, 5)
    if tokens == 1:
        return PackedConfig(64, 4, 3) if inputs > 16384 else PackedConfig(64, 2, 4 if long else 2)
    if tokens == 2:
        return PackedConfig(64, 4, 3 if long else 2)
    if tokens == 4:
        return PackedConfig(64, 8, 2) if long else PackedConfig(64, 4, 4)
    if long:
        return PackedConfig(32, 8, 3)
    if tokens == 8 and e2m1:
        return PackedConfig(32, 8, 4)
    if tokens == 8:
        return PackedConfig(32, 4, 4) if gated or features >= 12288 else PackedConfig(16, 8, 4)
    if gated or features >= 12288:
        return PackedConfig(64, 4, 2)
    return PackedConfig(64, 8, 2) if features > 4096 else PackedConfig(32, 8, 4)


def run_packed(product: Product, config: PackedConfig | None = None) -> torch.Tensor:
    """Launch `_packed_kernel`."""
    x_TI, stored, bias_O, out_TO, _, gated, add = product
    tokens, inputs = x_TI.shape
    features = out_TO.shape[1]
    pieces = max(1, 8 // padded(tokens))
    config = config or packed_config(inputs, features, padded(tokens), gated, stored.numbers == "e2m1")
    own = config.rows // pieces // (2 if gated else 1)
    tensors, constants = operands_of(x_TI, stored, bias_O)
    constants["WORDS"] = has_words(stored, x_TI.dtype)
    _packed_kernel[(blocks(features, own),)](
        x_TI, *tensors, out_TO, tokens, features, x_TI.stride(0), out_TO.stride(0), K=inputs, G=stored.group,
        P=pieces, B=config.warps, BM=max(8, padded(tokens)), BN=config.rows, AHEAD=config.ahead, GATED=gated, ADD=add,
        WHOLE=features % own == 0, num_warps=config.warps, num_stages=1, **constants, **dependent(x_TI.device),
    )  # fmt: skip
    return out_TO
