"""What is done to a head on its way from the projection into a page, and the scales of fp8 pages: parts of kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.fp8 import ROOM as SCALE_ROOM
from pagerunner.ops.kernels.linear.linear_parts import NO_NORM, OFFSET_NORM, PLAIN_NORM, norm_weight
from pagerunner.ops.paged_attention import HeadPrep

FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
ROOM = tl.constexpr(SCALE_ROOM)


def fp8_type(dtype: torch.dtype) -> tl.dtype | None:
    """Triton's name of an fp8 dtype; None for other dtypes."""
    return {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}.get(dtype)


def head_norm(prep: HeadPrep | None) -> int:
    """A kernel's NORM: what is done to heads before attention."""
    if prep is None or prep.q_norm_D is None:
        return int(NO_NORM.value)
    return int((OFFSET_NORM if prep.offset else PLAIN_NORM).value)


@triton.jit
def magnitude(x):
    """Of latents that become fp8. Some of their readers make 480 of an e4m3 code that is no number, so its scale has to be infinite."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def fitting_scale(largest, FP8_MAX: tl.constexpr):
    """As ops.fp8.fitting_scale: the smallest power of two, from the float's exponent bits. FP8_MAX is 1.75 times 2^8 or 2^15, so a fraction above 1.75 needs the next power."""
    POWER: tl.constexpr = 8 if FP8_MAX == 448.0 else 15
    exponent = tl.maximum(((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - POWER, 1)
    fitting = tl.where(largest < float("inf"), (exponent << 23).to(tl.float32, bitcast=True), float("inf"))
    return tl.where(largest > 0, fitting, 0.0)


@triton.jit
def grown_scale(old, largest, FP8_MAX: tl.constexpr):
    """As ops.fp8.grown_scale."""
    fitting = fitting_scale(largest, FP8_MAX)
    return tl.where(fitting > old, fitting * ROOM, old)


@triton.jit
def quantise(x, scale, FP8_MAX: tl.constexpr, FP8: tl.constexpr):
    """As ops.fp8.to_fp8, by a scale that is a power of two. No number stays none, so that what is broken is noticed."""
    scale = tl.where(scale > 0, scale, 1.0)
    shrink = (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)  # 1 / 2^n to the bit
    shrink = tl.where(scale < float("inf"), shrink, 0.0)
    return _saturated(x * shrink, FP8_MAX).to(FP8)


@triton.jit
def divided(x, scale, FP8_MAX: tl.constexpr, FP8: tl.constexpr):
    """As `quantise`, by any scale: those of checkpoints are what their writers measured."""
    return _saturated(tl.math.div_rn(x, tl.where(scale > 0, scale, 1.0) + tl.zeros_like(x)), FP8_MAX).to(FP8)


@triton.jit
def _saturated(x, FP8_MAX: tl.constexpr):
    least = tl.maximum(x, -FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(least, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def normed(low, high, norm_ptr, eps, D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, NORM: tl.constexpr):
    """Root-mean-square norm of heads in halves [N, HALF_P]."""
    d = tl.arange(0, HALF_P)
    squares = tl.sum(low * low + high * high, 1) / D
    inverse = tl.math.rsqrt(squares + eps)[:, None]
    low = low * inverse * norm_weight(norm_ptr, d, d < HALF, NORM)[None, :]
    high = high * inverse * norm_weight(norm_ptr + HALF, d, d < D - HALF, NORM)[None, :]
    return low, high


@triton.jit
def turned(low, high, cos_low, cos_high, sin_low, sin_high):
    """Rotated by angles of the same shape, or of one row."""
    return low * cos_low + high * sin_low, high * cos_high + low * sin_high


@triton.jit
def rescale_page(
    page_ptr, stride_s, stride_h, factor, K, PAGE: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr,
):  # fmt: skip
    """Multiply a page's heads by `factor` [ROWS].

    SLOTS slots are loaded at once, so that the program doesn't wait for each of them.
    """
    row = tl.arange(0, SLOTS * ROWS)
    d = tl.arange(0, HALF_P)
    head = row % ROWS
    factor = tl.reshape(tl.broadcast_to(factor[None, :], [SLOTS, ROWS]), [SLOTS * ROWS])[:, None]
    for first in range(0, PAGE, SLOTS):
        slot = first + row // ROWS
        at = page_ptr + (slot * stride_s + head * stride_h)[:, None] + d[None, :]
        there = ((head < K) & (slot < PAGE))[:, None]
        low = tl.load(at, mask=there & (d < HALF)[None, :], other=0).to(FP8, bitcast=True).to(tl.float32)
        high = tl.load(at + HALF, mask=there & (d < D - HALF)[None, :], other=0).to(FP8, bitcast=True).to(tl.float32)
        low, high = _saturated(low * factor, FP8_MAX).to(FP8), _saturated(high * factor, FP8_MAX).to(FP8)
        tl.store(at, low.to(tl.uint8, bitcast=True), mask=there & (d < HALF)[None, :])
        tl.store(at + HALF, high.to(tl.uint8, bitcast=True), mask=there & (d < D - HALF)[None, :])
