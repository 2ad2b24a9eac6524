"""Products of one token with a matrix of 8-bit codes (`ops/stored.py`), in float32 registers.

Every program holds whole rows of the weights, and has all of them on their way before it waits for the kernel before it. Casts of Triton
make numbers of codes. Scales of rows multiply sums. Scales of blocks multiply inputs: all rows of a program lie in one block.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.codes import E4M3, form_of
from pagerunner.ops.kernels.launch import blocks, dependent, padded, start_next, wait_turn
from pagerunner.ops.kernels.linear.linear_parts import NO_NORM, Product, held, norm_kind, norm_weight, put, silu_gate
from pagerunner.ops.stored import Stored, Stored8


@triton.jit
def _tiles(w_ptr, first, rows, live, cols, K: tl.constexpr, BK: tl.constexpr):
    """Codes of rows [N] from `first` on, all columns in tiles [N, BK]."""
    place = (w_ptr + first.to(tl.int64) * K) + rows[:, None] * K + cols[None, :]
    tiles = (tl.load(place, mask=live[:, None] & (cols < K)[None, :], other=0),)
    for step in tl.static_range(1, (K + BK - 1) // BK):
        tiles = tiles + (tl.load(place + step * BK, mask=live[:, None] & (cols < K - step * BK)[None, :], other=0),)
    return tiles


@triton.jit
def _numbers(codes, FORM: tl.constexpr):
    """Float32 numbers of 8-bit codes."""
    dtype: tl.constexpr = tl.float8e4nv if FORM == E4M3 else tl.int8
    return codes.to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _sums(tiles, inputs, FORM: tl.constexpr, STEPS: tl.constexpr):
    """Sums [N] over tiles [N, BK] times inputs [BK]."""
    acc = _numbers(tiles[0], FORM) * inputs[0][None, :]
    for step in tl.static_range(1, STEPS):
        acc += _numbers(tiles[step], FORM) * inputs[step][None, :]
    return tl.sum(acc, 1)


@triton.jit
def _scaled(
    inputs, s_ptr, row, cols, K: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr, G: tl.constexpr, STEPS: tl.constexpr
):
    """Inputs times the scales of the blocks that row `row` lies in."""
    s_ptr += row // BO * ((K + G - 1) // G)
    scaled = (inputs[0] * tl.load(s_ptr + cols // G, mask=cols < K, other=0.0),)
    for step in tl.static_range(1, STEPS):
        k = step * BK + cols
        scaled = scaled + (inputs[step] * tl.load(s_ptr + k // G, mask=k < K, other=0.0),)
    return scaled


@triton.jit(do_not_specialize=["num_features"])
def _row_kernel(x_ptr, norm_ptr, w_ptr, s_ptr, bias_ptr, y_ptr, num_features, eps, K: tl.constexpr, G: tl.constexpr,
                BO: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr, NORM: tl.constexpr,
                GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BN output features of one token. With GATED they are gates, and BN features of the up projection come with them."""
    start_next(PDL)
    STEPS: tl.constexpr = (K + BK - 1) // BK
    w_ptr = w_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    first, rows, cols = tl.program_id(0) * BN, tl.arange(0, BN), tl.arange(0, BK)
    rows_O = first + rows
    live = rows_O < num_features
    tiles = _tiles(w_ptr, first, rows, live, cols, K, BK)
    if GATED:
        up_tiles = _tiles(w_ptr, first + num_features, rows, live, cols, K, BK)
    factor, up_factor = 1.0, 1.0
    if G == K:
        factor = tl.load(s_ptr + rows_O, mask=live, other=0.0)
        if GATED:
            up_factor = tl.load(s_ptr + num_features + rows_O, mask=live, other=0.0)
    bias, up_bias = 0.0, 0.0
    if BIAS:
        bias = tl.load(bias_ptr + rows_O, mask=live, other=0.0).to(tl.float32)
        if GATED:
            up_bias = tl.load(bias_ptr + num_features + rows_O, mask=live, other=0.0).to(tl.float32)
    norms = ()
    if NORM != NO_NORM:
        for step in tl.static_range(STEPS):
            norms = norms + (norm_weight(norm_ptr, step * BK + cols, step * BK + cols < K, NORM),)
    wait_turn(PDL)
    old = held(y_ptr + rows_O, live, ADD)
    inputs, square = (), tl.zeros((BK,), tl.float32)
    for step in tl.static_range(STEPS):
        k = step * BK + cols
        x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        if NORM != NO_NORM:
            square += x * x
            x *= norms[step]
        inputs = inputs + (x,)
    if NORM != NO_NORM:
        scale = 1.0 / tl.sqrt_rn(tl.sum(square, 0) * (1.0 / K) + eps)
        factor *= scale
        up_factor *= scale
    own = inputs if G == K else _scaled(inputs, s_ptr, first, cols, K, BK, BO, G, STEPS)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    y = _sums(tiles, own, FORM, STEPS) * factor + bias
    if GATED:
        own = inputs if G == K else _scaled(inputs, s_ptr, first + num_features, cols, K, BK, BO, G, STEPS)
        y = silu_gate(y, _sums(up_tiles, own, FORM, STEPS) * up_factor + up_bias, dtype)
    put(y_ptr + rows_O, y, old, live, ADD)


class RowConfig(NamedTuple):
    """Output features (of each half, if gated) and input features of a tile, and a program's warps."""

    features: int
    inputs: int
    warps: int


@functools.cache
def row_config(inputs: int, gated: bool) -> RowConfig:
    """The block for `_row_kernel`, by measurement (docs/performance/stored-weights.md)."""
    block = min(4096, max(16, padded(inputs)))
    features = 2 if gated or inputs > block else max(4, 4096 // block)
    warps = 4
    registers = (1 + features * (2 if gated else 1) / 4) * inputs / 32  # of all inputs, and of all rows' codes
    while registers / warps > 192:  # of a thread; with more, these don't fit beside scales and addresses
        warps *= 2
    return RowConfig(features, block, warps)


def fits(x_TI: torch.Tensor, stored: Stored, features: int) -> bool:
    """Whether `_row_kernel` serves one token and this form, for so many output features."""
    if x_TI.shape[0] != 1 or not isinstance(stored, Stored8):
        return False
    high, wide = stored.block
    block = row_config(x_TI.shape[1], stored.shape[0] != features).features
    if wide >= x_TI.shape[1]:
        return high == 1
    return high % block == 0 and features % block == 0


def joins(x_TI: torch.Tensor, stored: Stored) -> bool:
    """Whether the norm before a product of one token, and the gate behind it, are best inside its kernel.

    Not with more work for each input (scales of blocks) or for each code (int8): kernels of their own took less (docs/performance/stored-weights.md).
    """
    return x_TI.shape[0] == 1 and isinstance(stored, Stored8) and form_of(stored) == E4M3.value and stored.block[0] == 1


def run_row(product: Product, config: RowConfig | None = None) -> torch.Tensor:
    """Launch `_row_kernel` for one token."""
    x_TI, stored, bias_O, out_TO, norm, gated, add = product
    inputs, features = x_TI.shape[1], out_TO.shape[1]
    config = config or row_config(inputs, gated)
    high, wide = stored.block
    _row_kernel[(blocks(features, config.features),)](
        x_TI, x_TI if norm is None else norm.weight_I, stored.codes, stored.scales, x_TI if bias_O is None else bias_O, out_TO,
        features, 0.0 if norm is None else norm.eps, K=inputs, G=inputs if high == 1 else wide, BO=high, BN=config.features,
        BK=config.inputs, FORM=form_of(stored), NORM=norm_kind(norm),
        GATED=gated, ADD=add, BIAS=bias_O is not None, num_warps=config.warps, **dependent(x_TI.device),
    )  # fmt: skip
    return out_TO
