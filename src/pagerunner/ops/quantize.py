"""Activations of 8 bits, for products with weights of 8 bits: numbers with a scale for each token, or for each 128 features of it.

A scale is the largest magnitude over the largest number: 448 of e4m3, 127 of int8. So it follows the token ("dynamic" in the field's words), and no
scale comes from a checkpoint. Example: a token whose largest feature is 8.96 has the scale 0.02, and 0.05 becomes 2.5. A scale of zeros is 1.
No scale is below LEAST_SCALE. A NaN makes all numbers that share its scale NaN.

Shape letters: T tokens, I input features, G groups of 128 input features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.dispatch import gpu_kernel
from pagerunner.ops.linear import Norm
from pagerunner.ops.stored import Stored8

GROUP = 128
"""Input features that share a scale, where not all features of a token do."""
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}

LEAST_SCALE = 2.0**-126
"""The smallest scale. It is the smallest normal float32, and numbers are multiplied by its reciprocal, which is finite."""


class Quantized(NamedTuple):
    """`codes` [T, I] of e4m3 or int8, and float32 `scales` that multiply them: [T, 1], or [T, G] with a token's neighbour beside it in memory."""

    codes: torch.Tensor
    scales: torch.Tensor


class Rounded(NamedTuple):
    """How a product rounds its input: to which dtype, and whether groups of its features have scales of their own."""

    dtype: torch.dtype
    grouped: bool


def rounding(weight_OI: Stored8) -> Rounded | None:
    """How products with these weights may round their input; None if they may not."""
    dtype, inputs = weight_OI.codes.dtype, weight_OI.shape[1]
    rows_alone = weight_OI.block[1] >= inputs
    if weight_OI.activations == "none" or inputs % 16 or not weight_OI.codes.is_contiguous():
        return None
    if rows_alone and weight_OI.block[0] == 1:
        return Rounded(dtype, grouped=False)
    return Rounded(dtype, grouped=True) if weight_OI.block[1] == GROUP else None


@gpu_kernel("quantize")
def quantize(x_TI: torch.Tensor, dtype: torch.dtype, *, grouped: bool = False, norm: Norm | None = None) -> Quantized:
    """`x`, or `norm(x)`, in `dtype`: with a scale for each token, or for each GROUP features where `grouped`."""
    return _quantized(x_TI if norm is None else norm(x_TI), dtype, grouped)


@gpu_kernel("quantize")
def silu_quantize(gate_up_T2I: torch.Tensor, dtype: torch.dtype, *, grouped: bool = False) -> Quantized:
    """`silu(gate) * up` in `dtype`, as `quantize` does it."""
    return _quantized(silu_and_mul(gate_up_T2I), dtype, grouped)


def _quantized(x_TI: torch.Tensor, dtype: torch.dtype, grouped: bool) -> Quantized:
    tokens, inputs = x_TI.shape
    wide = GROUP if grouped else max(inputs, 1)
    groups_TGW = torch.nn.functional.pad(x_TI.float(), (0, -inputs % wide)).unflatten(1, (-1, wide))
    largest_TG1 = groups_TGW.abs().amax(2, keepdim=True)
    scales_TG1 = (largest_TG1 / LARGEST[dtype]).clamp(min=LEAST_SCALE).masked_fill(largest_TG1 == 0, 1.0)
    numbers_TI = (groups_TGW * (1.0 / scales_TG1)).flatten(1)[:, :inputs].clamp(-LARGEST[dtype], LARGEST[dtype])
    codes_TI = numbers_TI.to(dtype) if dtype.is_floating_point else numbers_TI.round().to(dtype)
    return Quantized(codes_TI, scales_TG1.squeeze(2).t().contiguous().t())
