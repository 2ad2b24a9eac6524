"""Products of many tokens with a stored matrix; see `ops/linear.py`. `kernels/linear.py` has those of few.

Three ways, by the weights and by what was measured (docs/performance.md):

* The input is rounded to 8 bits, as the weights are, where the checkpoint's writer means it so (`kernels/linear_rounded.py`).
* The weights are converted in registers (`kernels/linear_tiles.py`).
* A matrix is unpacked, some of its output features at a time, and multiplied by cuBLAS. What is unpacked at a time stays in the device's
  second-level cache.

Shape letters: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.kernels.linear_rounded import Rounded, product, rounding
from pagerunner.ops.kernels.linear_tiles import run_tiles, serves, tiles_for
from pagerunner.ops.kernels.stored import unpack
from pagerunner.ops.linear import Norm
from pagerunner.ops.quantize import ROUNDED_TOKENS, Quantized, quantize, silu_quantize
from pagerunner.ops.stored import Stored, Stored8
from pagerunner.ops.unpacked import FEW_UNPACKED_BYTES, MANY_TOKENS, TILE_TOKENS, UNPACKED_BYTES, outputs_at_once


def _parts(weight_OI: Stored, dtype: torch.dtype, tokens: int) -> Iterator[slice]:
    """The output features of each product: equal numbers of them, in whole steps."""
    features, inputs = weight_OI.shape
    most = FEW_UNPACKED_BYTES if tokens < MANY_TOKENS else UNPACKED_BYTES
    size = outputs_at_once(features, inputs, dtype.itemsize, most)
    return (slice(first, min(first + size, features)) for first in range(0, features, size))


def rounds(x_TI: torch.Tensor, weight_OI: Stored) -> bool:
    """Whether the product rounds its input."""
    return _rounding(x_TI, weight_OI) is not None


def _rounding(x_TI: torch.Tensor, weight_OI: Stored) -> Rounded | None:
    """How the product may round its input; None if it must not."""
    if not isinstance(weight_OI, Stored8) or x_TI.shape[0] < ROUNDED_TOKENS or x_TI.dtype == torch.float32:
        return None
    return rounding(weight_OI)


def linear(x_TI: torch.Tensor, weight_OI: Stored, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """See `ops/linear.py`."""
    rounded = _rounding(x_TI, weight_OI)
    if rounded is not None:
        return _rounded_product(quantize(x_TI, rounded.dtype, grouped=rounded.grouped), weight_OI, bias_O, x_TI.dtype)
    out_TO = x_TI.new_empty(x_TI.shape[0], weight_OI.shape[0])
    _product(x_TI, weight_OI, bias_O, out_TO)
    return out_TO


def linear_add_(
    x_TI: torch.Tensor, weight_OI: Stored, residual_TO: torch.Tensor, bias_O: torch.Tensor | None = None
) -> None:
    """See `ops/linear.py`."""
    if _rounding(x_TI, weight_OI) is not None:
        residual_TO.add_(linear(x_TI, weight_OI, bias_O))
        return
    _product(x_TI, weight_OI, bias_O, residual_TO, add=True)


def silu_linear_add_(
    gate_up_T2I: torch.Tensor, weight_OI: Stored, residual_TO: torch.Tensor, bias_O: torch.Tensor | None = None
) -> None:
    """See `ops/linear.py`. The product rounds its input."""
    rounded = _rounding(gate_up_T2I, weight_OI)
    assert rounded is not None
    x = silu_quantize(gate_up_T2I, rounded.dtype, grouped=rounded.grouped)
    residual_TO.add_(_rounded_product(x, weight_OI, bias_O, gate_up_T2I.dtype))


def norm_linear(x_TI: torch.Tensor, norm: Norm, weight_OI: Stored, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """See `ops/linear.py`."""
    rounded = _rounding(x_TI, weight_OI)
    if rounded is None:
        return linear(norm(x_TI), weight_OI, bias_O)
    x = quantize(x_TI, rounded.dtype, grouped=rounded.grouped, norm=norm)
    return _rounded_product(x, weight_OI, bias_O, x_TI.dtype)


def norm_linear_silu(
    x_TI: torch.Tensor, norm: Norm, weight_2OI: Stored, bias_2O: torch.Tensor | None = None
) -> torch.Tensor:
    """See `ops/linear.py`."""
    return silu_and_mul(norm_linear(x_TI, norm, weight_2OI, bias_2O))


def _rounded_product(x: Quantized, weight_OI: Stored, bias_O: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    assert isinstance(weight_OI, Stored8)
    out_TO = product(x, weight_OI, dtype)
    return out_TO if bias_O is None else out_TO.add_(bias_O)


def _product(
    x_TI: torch.Tensor, weight_OI: Stored, bias_O: torch.Tensor | None, out_TO: torch.Tensor, *, add: bool = False
) -> None:
    """Write `linear(x)` into `out`, or add it."""
    if x_TI.shape[0] <= TILE_TOKENS and x_TI.dtype != torch.float32 and out_TO.stride(1) == 1:
        tiles = tiles_for(x_TI.shape[0], weight_OI, x_TI.device)
        if serves(x_TI, weight_OI, tiles):
            run_tiles(x_TI, weight_OI, bias_O, out_TO, tiles, add=add)
            return
    parts = list(_parts(weight_OI, x_TI.dtype, x_TI.shape[0]))
    unpacked_PI = x_TI.new_empty(parts[0].stop, weight_OI.shape[1])
    for rows in parts:
        part_PI = unpacked_PI[: rows.stop - rows.start]
        unpack(weight_OI, part_PI, rows)
        if add:
            out_TO[:, rows].addmm_(x_TI, part_PI.t())
        elif bias_O is None:
            torch.mm(x_TI, part_PI.t(), out=out_TO[:, rows])
        else:
            torch.addmm(bias_O[rows], x_TI, part_PI.t(), out=out_TO[:, rows])
    if add and bias_O is not None:
        out_TO.add_(bias_O)
