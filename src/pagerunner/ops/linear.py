"""Products with a weight matrix, and what stands directly before or after one.

For a few tokens, reading the weights takes most of a product's time, and every further kernel costs as much as a small product.
So the norm before a product, the gate, and the addition to the residual stream are part of the product's own kernel there.

A matrix may be stored in 8 or 4 bits (`ops/stored.py`). Kernels convert such weights where they multiply them.

Shape letters: T tokens, I input features, O output features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from pagerunner.ops import numerics
from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.dispatch import gpu_kernel
from pagerunner.ops.norm import add_rms_norm_, rms_norm
from pagerunner.ops.stored import Stored, dense


class Norm(NamedTuple):
    """A root-mean-square norm: its weight [I], its epsilon, and whether the weight counts from 1."""

    weight_I: torch.Tensor
    eps: float
    offset: bool = False

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """The norm of `x`."""
        return rms_norm(x_TI, *self)

    def add_(self, x_TI: torch.Tensor, residual_TI: torch.Tensor) -> torch.Tensor:
        """Add `x` to `residual` in place and return the norm of the sum."""
        return add_rms_norm_(x_TI, residual_TI, *self)


def joins_few(tokens: int, dtype: torch.dtype, weights: int) -> bool:
    """Whether a GPU's product of so many tokens and weights is one kernel with the norm before it, and the gate or the addition behind it."""
    if tokens == 1:
        return True
    borders = numerics.FAST.products
    return dtype != torch.float32 and 0 < tokens <= borders.few_tokens and weights <= borders.few_weights


def matrix(weight_OI: torch.Tensor | Stored, dtype: torch.dtype) -> torch.Tensor:
    """The weights as one tensor: itself, or what a stored matrix stands for in `dtype`."""
    return weight_OI if isinstance(weight_OI, torch.Tensor) else dense(weight_OI, dtype)


@gpu_kernel("linear.linear")
def linear(x_TI: torch.Tensor, weight_OI: torch.Tensor | Stored, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`, [T, O]."""
    return F.linear(x_TI, matrix(weight_OI, x_TI.dtype), bias_O)


@gpu_kernel("linear.linear")
def linear_parts(x_TI: torch.Tensor, weight_OI: torch.Tensor, norm: Norm | None = None) -> torch.Tensor:
    """`x @ weight.T`, or of `norm(x)`, [T, O]; or float32 sums [P, T, O], maybe of more tokens, which add up to it in their order."""
    return F.linear(x_TI if norm is None else norm(x_TI), weight_OI)


@gpu_kernel("linear.linear")
def linear_add_(
    x_TI: torch.Tensor, weight_OI: torch.Tensor | Stored, residual_TO: torch.Tensor, bias_O: torch.Tensor | None = None
) -> None:
    """Add `linear(x)` to `residual` in place."""
    residual_TO.add_(F.linear(x_TI, matrix(weight_OI, x_TI.dtype), bias_O))


@gpu_kernel("linear.linear")
def silu_linear_add_(
    gate_up_T2I: torch.Tensor,
    weight_OI: torch.Tensor | Stored,
    residual_TO: torch.Tensor,
    bias_O: torch.Tensor | None = None,
) -> None:
    """Add `linear(silu(gate) * up)` to `residual` in place."""
    residual_TO.add_(F.linear(silu_and_mul(gate_up_T2I), matrix(weight_OI, gate_up_T2I.dtype), bias_O))


@gpu_kernel("linear.linear")
def norm_linear(
    x_TI: torch.Tensor, norm: Norm, weight_OI: torch.Tensor | Stored, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    """`linear(norm(x))`, [T, O]."""
    return F.linear(norm(x_TI), matrix(weight_OI, x_TI.dtype), bias_O)


@gpu_kernel("linear.linear")
def norm_linear_silu(
    x_TI: torch.Tensor, norm: Norm | None, weight_2OI: torch.Tensor | Stored, bias_2O: torch.Tensor | None = None
) -> torch.Tensor:
    """`silu(gate) * up`, [T, O], where `linear(norm(x))` is the gate's O features and then up's. Without a norm it is `linear(x)`."""
    return silu_and_mul(F.linear(x_TI if norm is None else norm(x_TI), matrix(weight_2OI, x_TI.dtype), bias_2O))
