"""Products of 2 to 8 tokens with bfloat16 or float16 weights on Hopper: weights go from memory into registers of matrix units.

One token's kernel (`kernels/linear/linear.py`) asks for its weights before its turn, has the norm before the product, and the gate or the addition behind it. This
kernel (`kernels/linear/linear_held_gluon.py`, in Gluon) does the same for a few tokens, so a step of four tokens costs little more than one of one token.
Weights don't pass through shared memory: a thread loads what it multiplies.

Shape letters: T tokens, I input features, O output features.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import torch

from pagerunner.ops import numerics
from pagerunner.ops.kernels.launch import blocks, dependent
from pagerunner.ops.kernels.linear.linear_parts import Product, norm_kind
from pagerunner.ops.kernels.linear.linear_wide import has_gluon


class HeldConfig(NamedTuple):
    """Warps that share the inputs, output features of a program, its registers a thread, and how many steps' weights are on their way."""

    warps: int
    features: int
    registers: int
    early: int


def config_of(inputs: int, gated: bool, warps: int, features: int, registers: int) -> HeldConfig:
    """The configuration in which weights on their way have half of the registers."""
    step = (16 if features == 16 else 8) * (2 if gated else 1)
    return HeldConfig(warps, features, registers, max(1, min(blocks(inputs, warps * 64), registers // 2 // step)))


@functools.cache
def held_config(inputs: int, features: int, behind_norm: bool, gated: bool) -> HeldConfig:
    """What was fastest on an H200, or within 3 % of it, of eight blocks for 13 matrices (2026-11-27).

    A norm's sum of squares has registers too. Few features are shared out among more programs.
    """
    if behind_norm:
        return config_of(inputs, gated, 4, 16, 168)
    return config_of(inputs, gated, 4, 8 if features <= 2048 and inputs >= 1024 else 16, 128)


@functools.cache
def _gluon() -> Any:
    """The kernel's module. It isn't imported with Triton versions that may not have what it names."""
    return importlib.import_module("pagerunner.ops.kernels.linear.linear_held_gluon")


def serves(tokens: int, dtype: torch.dtype, weight_OI: torch.Tensor, device: torch.device, gated: bool = False) -> bool:
    """Whether the kernel computes products of so many tokens."""
    borders = numerics.FAST.products
    most = borders.held_gated_weights if gated else borders.held_weights
    if tokens not in borders.held_tokens or weight_OI.numel() > most or weight_OI.shape[1] % 8:
        return False
    half = weight_OI.dtype == dtype and dtype in (torch.bfloat16, torch.float16)
    return half and weight_OI.is_contiguous() and has_gluon(device)


def fits(x_TI: torch.Tensor, weight_OI: torch.Tensor, gated: bool) -> bool:
    """Whether the kernel computes this product, with inputs that lie like these."""
    return serves(x_TI.shape[0], x_TI.dtype, weight_OI, x_TI.device, gated) and x_TI.dim() == 2 and x_TI.stride(1) == 1


def run_held(product: Product, config: HeldConfig | None = None) -> torch.Tensor:
    """Write `linear(x)` behind a norm or not, gated or not, into `out`, or add it."""
    x_TI, weight_OI, bias_O, out_TO, norm, gated, add = product
    tokens, inputs = x_TI.shape
    features = out_TO.shape[1]
    config = config or held_config(inputs, features, norm is not None, gated)
    _gluon().held_kernel[(blocks(features, config.features),)](
        x_TI, x_TI if norm is None else norm.weight_I, weight_OI, x_TI if bias_O is None else bias_O, out_TO, tokens, features, x_TI.stride(0),
        out_TO.stride(0), 0.0 if norm is None else norm.eps, K=inputs, S=config.warps, BM=8, BN=config.features, EARLY=config.early,
        NORM=norm_kind(norm), GATED=gated, ADD=add, BIAS=bias_O is not None, num_warps=config.warps, maxnreg=config.registers, **dependent(x_TI.device),
    )  # fmt: skip
    return out_TO
