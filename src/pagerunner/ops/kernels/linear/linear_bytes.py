"""Products of a token with a matrix of e4m3 codes and scales of rows (`ops/stored.py`): codes go from memory straight into the matrix units' registers.

As `kernels/linear/linear_packed.py` does it for 4 bits: a lane takes 16 neighbouring bytes of a row, and of each token the inputs of these columns.
A segment is 64 columns. A row is cut into 8 pieces, so that a token's pieces fill the 8 columns of a product. With 16 tokens, each in one
piece, the kernel took longer than `kernels/linear/linear_stored.py`'s (docs/performance/stored-weights.md).

A code's bits in place are 2 ** -120 of its number. Inputs are multiplied by 2 ** 60, and sums by 2 ** 60. Both are exact for inputs
below 2 ** 67. The norm before a product may be part of it: its weights multiply inputs, which are rounded once, and its scale multiplies sums.
"""

from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.codes import E4M3, numbers8, uses_words
from pagerunner.ops.kernels.launch import blocks, dependent, padded, start_next, wait_turn
from pagerunner.ops.kernels.linear.linear_packed import (
    PackedConfig,
    _own_bytes,
    _own_inputs,
    _rows_of,
    finished,
    own_pieces,
)
from pagerunner.ops.kernels.linear.linear_parts import NO_NORM, Product, held, norm_kind, norm_weight, put
from pagerunner.ops.kernels.stored import operands_of
from pagerunner.ops.stored import Stored, Stored8

SEGMENT = tl.constexpr(64)
RUN = tl.constexpr(16)
"""Neighbouring columns that a lane reads of a row."""
POWER = tl.constexpr(1152921504606846976.0)
"""2 ** 60."""


@triton.jit
def _raw_e4m3(codes, dtype: tl.constexpr, WORDS: tl.constexpr):
    """Numbers of codes. With WORDS they are 2 ** -120 of that, and bytes 0, 1, 2, 3 of a word have theirs in the order 0, 2, 1, 3."""
    if not WORDS:
        numbers = numbers8(codes, dtype, E4M3, False)
    else:
        numbers = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b; shl.b32 a, $2, 4; and.b32 a, a, 0x07F007F0; shl.b32 b, $2, 8; lop3.b32 $0, b, 0x80008000, a, 0xEA;
            shr.u32 a, $2, 4; and.b32 a, a, 0x07F007F0; lop3.b32 $1, $2, 0x80008000, a, 0xEA; }""",
            "=&r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    return numbers


@triton.jit
def _step(w_rows, at, step, K: tl.constexpr, P: tl.constexpr, B: tl.constexpr):
    """Bytes [8, B, N / 8, C] of one step."""
    STEP: tl.constexpr = B * P * SEGMENT
    if K >= (step + 1) * STEP:
        codes = tl.load(w_rows + at + step * STEP)
    else:
        codes = tl.load(w_rows + at + step * STEP, mask=at < K - step * STEP, other=0)
    return codes


@triton.jit
def _norm_weights(norm_ptr, column, step, K: tl.constexpr, P: tl.constexpr, B: tl.constexpr, NORM: tl.constexpr):
    """The norm's weights for a step's inputs, in two halves as `_inputs` reads them."""
    if NORM == NO_NORM:
        first, second = column, column
    else:
        column += step * (B * P * SEGMENT)
        first = norm_weight(norm_ptr, column, column < K, NORM)
        second = norm_weight(norm_ptr, column + 8, column < K, NORM)
    return first, second


@triton.jit
def _inputs(source, weights, square, step, K: tl.constexpr, P: tl.constexpr, B: tl.constexpr, WORDS: tl.constexpr,
            NORM: tl.constexpr):  # fmt: skip
    """Inputs of a step, [B, C, M], and `square` with their squares; times the norm's weights where there is a norm."""
    place, column, live = source
    FIRST: tl.constexpr = B * P * SEGMENT
    place += step * FIRST
    inside = live & (column < K - step * FIRST)
    first, second = tl.load(place, mask=inside, other=0.0), tl.load(place + 8, mask=inside, other=0.0)
    if NORM != NO_NORM:
        dtype: tl.constexpr = first.dtype
        wide, more = first.to(tl.float32), second.to(tl.float32)
        square += wide * wide + more * more
        wide, more = wide * weights[0], more * weights[1]
        if WORDS:
            wide, more = wide * POWER, more * POWER
        first, second = wide.to(dtype), more.to(dtype)
    x = _own_inputs(first, second, WORDS)
    if WORDS and NORM == NO_NORM:
        x = tl.inline_asm_elementwise(
            "{ .reg .b32 m; mov.b32 m, 0x5D805D80; mul.rn.bf16x2 $0, $1, m; }", "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )  # fmt: skip
    return x, square


@triton.jit
def _norm_scale(square, eps, K: tl.constexpr, P: tl.constexpr):
    """What a norm multiplies each token's sums by, [T], of squares [R, 8, B, H, 8] of tokens' pieces."""
    M: tl.constexpr = square.shape[1] * square.shape[3]
    pieces = tl.permute(tl.sum(tl.sum(tl.sum(square, 4), 2), 0), (1, 0))
    sums = tl.sum(tl.reshape(pieces, (M // P, P)), 1)
    return 1.0 / tl.sqrt_rn(sums * (1.0 / K) + eps)


@triton.jit(do_not_specialize=["num_tokens", "num_features"])
def _bytes_kernel(x_ptr, norm_ptr, w_ptr, s_ptr, bias_ptr, y_ptr, num_tokens, num_features, x_stride, y_stride, eps, K: tl.constexpr,
                  P: tl.constexpr, B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, AHEAD: tl.constexpr, WORDS: tl.constexpr,
                  NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BN / P output features (or half as many gates, each with its feature of the up projection) of up to BM / P tokens.

    B segments a step, one for each warp. AHEAD steps are in flight.
    """
    start_next(PDL)
    STEPS: tl.constexpr = (K + B * P * SEGMENT - 1) // (B * P * SEGMENT)
    F: tl.constexpr = BN // P // (2 if GATED else 1)
    T: tl.constexpr = BM // P
    w_ptr = w_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    tile = tl.program_id(0)
    # dimensions in the order in which Triton gives them to lanes (the first one), to warps, and to registers
    rows = tl.arange(0, 8)[:, None] + tl.arange(0, BN // 8)[None, :] * 8
    segment = tl.arange(0, B) * P
    at = (segment * SEGMENT)[None, :, None, None] + (rows % P * SEGMENT)[:, None, :, None]
    at += tl.arange(0, SEGMENT)[None, None, None, :]
    features = _rows_of(tile, rows, num_features, F, P, WHOLE, GATED)
    w_rows = w_ptr + (features.to(tl.int64) * K)[:, None, :, None]
    steps = ()
    for i in tl.static_range(min(AHEAD, STEPS)):
        steps = steps + (_step(w_rows, at, i, K, P, B),)
    tokens, outputs = tl.arange(0, T), tile * F + tl.arange(0, F)
    y_place = y_ptr + tokens[None, :] * y_stride + outputs[:, None]
    inside_y = (tokens < num_tokens)[None, :] & (outputs < num_features)[:, None]
    m = tl.arange(0, 8)[:, None] + tl.arange(0, BM // 8)[None, :] * 8
    column = (tl.arange(0, SEGMENT // RUN) * RUN)[:, None, None, None, None] + (segment * SEGMENT)[
        None, None, :, None, None
    ]
    column += (m % P * SEGMENT)[None, :, None, :, None] + tl.arange(0, 8)[None, None, None, None, :]
    live = (m // P < num_tokens)[None, :, None, :, None]
    source = (x_ptr + (m // P * x_stride)[None, :, None, :, None] + column, column, live)
    norms = ()
    for i in tl.static_range(STEPS):
        norms = norms + (_norm_weights(norm_ptr, column, i, K, P, B, NORM),)
    wait_turn(PDL)
    old = held(y_place, inside_y, ADD)
    acc = tl.zeros((B, BN, BM), tl.float32)
    square = tl.zeros((SEGMENT // RUN, 8, B, BM // 8, 8), tl.float32)
    for i in tl.static_range(STEPS):
        x, square = _inputs(source, norms[i], square, i, K, P, B, WORDS, NORM)
        numbers = _raw_e4m3(_own_bytes(steps[i]), x.dtype, WORDS)
        acc = tl.dot(numbers, x, acc, input_precision="ieee")
        if i + AHEAD < STEPS:
            steps = steps + (_step(w_rows, at, i + AHEAD, K, P, B),)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    y = own_pieces(acc, P)
    if NORM != NO_NORM:
        y *= _norm_scale(square, eps, K, P)[None, :]
    y = finished(y, tile, s_ptr, bias_ptr, num_features, F, POWER if WORDS else 1.0, True, BIAS, WHOLE, GATED, dtype)
    put(y_place, y, old, inside_y, ADD)


def fits(x_TI: torch.Tensor, stored: Stored) -> bool:
    """Whether `_bytes_kernel` serves this number of tokens, this dtype and this form."""
    if not isinstance(stored, Stored8) or x_TI.shape[0] != 1 or x_TI.shape[1] % RUN.value:
        return False
    if not uses_words(x_TI.dtype) and os.environ.get("TRITON_INTERPRET") != "1":
        return False
    high, wide = stored.block
    return stored.codes.dtype == torch.float8_e4m3fn and high == 1 and wide >= x_TI.shape[1]


def takes_norm(inputs: int, features: int) -> bool:
    """Whether the norm before a product is part of it, by measurement: not where there are so many programs that each repeats much of it."""
    return inputs <= 8192 and features <= 8192


@functools.cache
def bytes_config(inputs: int, gated: bool) -> PackedConfig:
    """The block for `_bytes_kernel`, by measurement (docs/performance/stored-weights.md)."""
    if inputs > 8192:
        return PackedConfig(32, 4, 4)
    return PackedConfig(32, 4, 2) if gated else PackedConfig(64, 2, 2)


def run_bytes(product: Product, config: PackedConfig | None = None) -> torch.Tensor:
    """Launch `_bytes_kernel`."""
    x_TI, stored, bias_O, out_TO, norm, gated, add = product
    tokens, inputs = x_TI.shape
    features = out_TO.shape[1]
    pieces = max(1, 8 // padded(tokens))
    config = config or bytes_config(inputs, gated)
    own = config.rows // pieces // (2 if gated else 1)
    tensors, constants = operands_of(x_TI, stored, bias_O)
    _bytes_kernel[(blocks(features, own),)](
        x_TI, x_TI if norm is None else norm.weight_I, *tensors[:2], tensors[-1], out_TO, tokens, features,
        x_TI.stride(0), out_TO.stride(0), 0.0 if norm is None else norm.eps, K=inputs,
        P=pieces, B=config.warps, BM=max(8, padded(tokens)), BN=config.rows, AHEAD=config.ahead, WORDS=constants["WORDS"],
        BIAS=constants["BIAS"], NORM=norm_kind(norm), GATED=gated, ADD=add, WHOLE=features % own == 0,
        num_warps=config.warps, num_stages=1, **dependent(x_TI.device),
    )  # fmt: skip
    return out_TO
