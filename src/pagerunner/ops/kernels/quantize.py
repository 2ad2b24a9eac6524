"""Activations of 8 bits, in one pass over a token; see `ops/quantize.py`. The norm before, or the gate, is part of the pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import blocks, dependent, padded, row_warps, start_next, wait_turn
from pagerunner.ops.kernels.linear.linear_parts import NO_NORM, norm_kind, norm_weight, token_inputs
from pagerunner.ops.linear import Norm
from pagerunner.ops.quantize import GROUP, LARGEST, LEAST_SCALE, Quantized

ROUNDING = tl.constexpr(12582912.0)
"""1.5 * 2 ** 23. Added to a float32 and subtracted, it rounds to whole numbers, halves to even."""
LEAST = tl.constexpr(LEAST_SCALE)
ROWS, SHORT = 4, 1024
"""Tokens of a program where there are many, of up to so many features. Otherwise starting programs takes the time."""


@triton.jit
def store_numbers(x, tokens, there, groups, cols, inside, codes_ptr, scales_ptr, scale_column, K: tl.constexpr, WIDE: tl.constexpr,
                  MOST: tl.constexpr):  # fmt: skip
    """Store the features [tokens, groups, WIDE] of tokens that are `there` in the codes' dtype, and the groups' scales."""
    # as whole numbers the bits of magnitudes are in order, and NaN is the largest; a maximum of floats would lose it
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2).to(tl.float32, bitcast=True)
    scale = largest / MOST
    scale = tl.where(largest == 0.0, 1.0, tl.where(scale < LEAST, LEAST, scale))
    scales = scales_ptr + groups.to(tl.int64)[None, :] * scale_column + tokens[:, None]
    tl.store(scales, scale, mask=(groups * WIDE < K)[None, :] & there[:, None])
    numbers = x * (1.0 / scale)[:, :, None]
    if codes_ptr.dtype.element_ty == tl.int8:
        numbers = tl.minimum(tl.maximum((numbers + ROUNDING) - ROUNDING, -MOST), MOST)
    tl.store(codes_ptr + tokens[:, None, None] * K + cols, numbers.to(codes_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["scale_column", "num_tokens"])
def _quantize_kernel(x_ptr, norm_ptr, codes_ptr, scales_ptr, num_tokens, x_row, scale_column, eps, K: tl.constexpr,
                     ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, MOST: tl.constexpr, NORM: tl.constexpr,
                     GATED: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """ROWS tokens of at most BLOCK features; one token if there is a norm. WIDE features share a scale."""
    start_next(PDL)
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = tokens < num_tokens
    groups = tl.arange(0, BLOCK // WIDE)
    cols = (groups[:, None] * WIDE + tl.arange(0, WIDE)[None, :])[None, :, :]
    inside = (cols < K) & there[:, None, None]
    weight = cols
    if NORM != NO_NORM:
        weight = norm_weight(norm_ptr, cols, inside, NORM)
    wait_turn(PDL)
    x = token_inputs(x_ptr + tokens[:, None, None] * x_row, weight, cols, inside, eps, K, NORM, GATED)
    store_numbers(x, tokens, there, groups, cols, inside, codes_ptr, scales_ptr, scale_column, K, WIDE, MOST)


def _run(
    x: torch.Tensor, inputs: int, dtype: torch.dtype, grouped: bool, norm: Norm | None, gated: bool, rows: int = 1
) -> Quantized:
    tokens = x.shape[0]
    codes_TI = torch.empty(tokens, inputs, dtype=dtype, device=x.device)
    groups = blocks(inputs, GROUP) if grouped else 1
    scales_GT = torch.empty(groups, tokens, dtype=torch.float32, device=x.device)
    if not codes_TI.numel():
        return Quantized(codes_TI, scales_GT.t())
    block = max(GROUP, padded(inputs))
    x = x if x.stride(1) == 1 else x.contiguous()
    _quantize_kernel[(blocks(tokens, rows),)](
        x, x if norm is None else norm.weight_I, codes_TI, scales_GT, tokens, x.stride(0), tokens,
        0.0 if norm is None else norm.eps, K=inputs, ROWS=rows, BLOCK=block, WIDE=GROUP if grouped else block, MOST=LARGEST[dtype],
        NORM=norm_kind(norm), GATED=gated,
        num_warps=row_warps(block) // (1 if rows > 1 else 2), **dependent(x.device),
    )  # fmt: skip
    return Quantized(codes_TI, scales_GT.t())


def quantize(x_TI: torch.Tensor, dtype: torch.dtype, *, grouped: bool = False, norm: Norm | None = None) -> Quantized:
    """See `ops/quantize.py`."""
    return _run(x_TI, x_TI.shape[1], dtype, grouped, norm, gated=False)


def quantize_many(x_TI: torch.Tensor, dtype: torch.dtype, *, grouped: bool = False) -> Quantized:
    """`quantize` of thousands of tokens."""
    return _run(x_TI, x_TI.shape[1], dtype, grouped, None, gated=False, rows=ROWS if x_TI.shape[1] <= SHORT else 1)


def silu_quantize(gate_up_T2I: torch.Tensor, dtype: torch.dtype, *, grouped: bool = False) -> Quantized:
    """See `ops/quantize.py`."""
    return _run(gate_up_T2I, gate_up_T2I.shape[1] // 2, dtype, grouped, None, gated=True)
