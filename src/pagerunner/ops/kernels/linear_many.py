"""Products of many tokens with a stored matrix; see `ops/linear.py`. `kernels/linear.py` has those of few.

A matrix is unpacked, some of its output features at a time, and multiplied by cuBLAS. What is unpacked at a time stays in the device's second-level cache.

Shape letters: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.kernels.stored import unpack
from pagerunner.ops.linear import Norm
from pagerunner.ops.stored import Stored

UNPACKED_BYTES = 2**25  # unpacked at a time, at most
STEP = 128  # output features: a multiple of every format's blocks


def _parts(weight_OI: Stored, dtype: torch.dtype) -> Iterator[slice]:
    """The output features of each product: equal numbers of them, in whole steps."""
    features, inputs = weight_OI.shape
    most = max(UNPACKED_BYTES // (inputs * dtype.itemsize), STEP)
    steps = -(-features // STEP)
    count = -(-features // most)
    size = -(-steps // count) * STEP
    return (slice(first, min(first + size, features)) for first in range(0, features, size))


def linear(x_TI: torch.Tensor, weight_OI: Stored, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """See `ops/linear.py`."""
    out_TO = x_TI.new_empty(x_TI.shape[0], weight_OI.shape[0])
    _product(x_TI, weight_OI, bias_O, out_TO)
    return out_TO


def linear_add_(
    x_TI: torch.Tensor, weight_OI: Stored, residual_TO: torch.Tensor, bias_O: torch.Tensor | None = None
) -> None:
    """See `ops/linear.py`."""
    _product(x_TI, weight_OI, None, residual_TO, add=True)
    if bias_O is not None:
        residual_TO.add_(bias_O)


def norm_linear(x_TI: torch.Tensor, norm: Norm, weight_OI: Stored, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """See `ops/linear.py`."""
    return linear(norm(x_TI), weight_OI, bias_O)


def norm_linear_silu(
    x_TI: torch.Tensor, norm: Norm, weight_2OI: Stored, bias_2O: torch.Tensor | None = None
) -> torch.Tensor:
    """See `ops/linear.py`."""
    return silu_and_mul(norm_linear(x_TI, norm, weight_2OI, bias_2O))


def _product(
    x_TI: torch.Tensor, weight_OI: Stored, bias_O: torch.Tensor | None, out_TO: torch.Tensor, *, add: bool = False
) -> None:
    """Write `linear(x)` into `out`, or add it."""
    parts = list(_parts(weight_OI, x_TI.dtype))
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
