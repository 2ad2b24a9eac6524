"""Products of many tokens with a stored matrix; see `ops/linear.py`. `kernels/linear/linear.py` has those of few.

Three ways, by the weights and by what was measured (docs/performance/stored-weights.md):

* The input is rounded to 8 bits, as the weights are, where the checkpoint's writer means it so (`kernels/linear/linear_rounded.py`).
* The weights are converted in registers (`kernels/linear/linear_wide.py` where it can, else `kernels/linear/linear_tiles.py`).
* A matrix is unpacked, some of its output features at a time, and multiplied by cuBLAS. What is unpacked at a time stays in the device's
  second-level cache.

Shape letters: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch

from pagerunner.ops import numerics
from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.kernels.launch import blocks
from pagerunner.ops.kernels.linear import linear_eight, linear_packed, linear_rounded, linear_wide
from pagerunner.ops.kernels.linear.linear_parts import Product
from pagerunner.ops.kernels.linear.linear_rounded import Rounded, product, rounding
from pagerunner.ops.kernels.linear.linear_tiles import FITTED_TOKENS, in_order, run_tiles, serves, tiles_config
from pagerunner.ops.kernels.stored import unpack
from pagerunner.ops.linear import Norm
from pagerunner.ops.quantize import Quantized, quantize, silu_quantize
from pagerunner.ops.stored import Stored, Stored4, Stored8, rows_of
from pagerunner.ops.unpacked import FEW_UNPACKED_BYTES, UNPACKED_BYTES, outputs_at_once, tile_tokens


def _parts(weight_OI: Stored, dtype: torch.dtype, tokens: int) -> Iterator[slice]:
    """The output features of each product: equal numbers of them, in whole steps."""
    features = weight_OI.shape[0]
    size = _outputs_at_once(tokens, dtype, weight_OI)
    return (slice(first, min(first + size, features)) for first in range(0, features, size))


def _outputs_at_once(tokens: int, dtype: torch.dtype, weight_OI: Stored) -> int:
    return outputs_at_once(
        weight_OI,
        dtype.itemsize,
        FEW_UNPACKED_BYTES if tokens < numerics.FAST.products.parted_tokens else UNPACKED_BYTES,
    )


def _in_tiles(tokens: int, dtype: torch.dtype, weight_OI: Stored) -> bool:
    """Whether the codes are converted in registers."""
    return tokens <= tile_tokens(weight_OI) and dtype != torch.float32 and serves(weight_OI)


def rounding_of(x_TI: torch.Tensor, weight_OI: Stored) -> Rounded | None:
    """How the product rounds its input; None if it doesn't."""
    return _rounding_of(x_TI.shape[0], x_TI.dtype, weight_OI, x_TI.device)


def _rounding_of(tokens: int, dtype: torch.dtype, weight_OI: Stored, device: torch.device) -> Rounded | None:
    """How the product may round its input; None if it must not."""
    borders = numerics.FAST.products
    if not isinstance(weight_OI, Stored8) or tokens < borders.early_tokens or dtype == torch.float32:
        return None
    how = rounding(weight_OI)
    if how is None or tokens >= borders.rounded_tokens:
        return how
    return how if linear_eight.serves(tokens, weight_OI, dtype, device, grouped=how.grouped) else None


def takes_few(tokens: int, dtype: torch.dtype, weight_OI: Stored, device: torch.device) -> bool:
    """Whether products of so few tokens are this file's, though `linear_stored.py` serves them, too."""
    borders = numerics.FAST.products
    if isinstance(weight_OI, Stored8):
        if _rounding_of(tokens, dtype, weight_OI, device) is not None:
            return True
        least = borders.early_other_tokens_8
    elif linear_packed.reads(weight_OI, dtype):
        least = borders.early_int4_tokens if weight_OI.numbers == "int4" else borders.early_fp4_tokens
    else:
        least = borders.early_other_tokens_4
    return tokens >= least and linear_wide.serves(tokens, dtype, weight_OI, device)


def kernels_of(tokens: int, dtype: torch.dtype, weight_OI: Stored, device: torch.device) -> Hashable:
    """What decides which kernels the products of this file launch for so many tokens."""
    if (how := _rounding_of(tokens, dtype, weight_OI, device)) is not None:
        return linear_rounded.kernels_of(tokens, _of_8_bits(weight_OI), dtype, device, grouped=how.grouped)
    if linear_wide.serves(tokens, dtype, weight_OI, device):
        parts = [rows_of(weight_OI, rows.start, rows.stop) for rows in linear_wide.pieces(tokens, weight_OI, device)]
        wide = [linear_wide.wide_config(tokens, part, device) for part in parts]
        return *wide, blocks(tokens, wide[0].tokens)  # 256 tokens are two tiles of 128, and 160 lie between
    if _in_tiles(tokens, dtype, weight_OI):
        config = tiles_config(tokens, weight_OI, device)
        return config, tokens <= FITTED_TOKENS  # large numbers of tokens have tiles that small ones have
    return _outputs_at_once(tokens, dtype, weight_OI)


def linear_add_(
    x_TI: torch.Tensor, weight_OI: Stored, residual_TO: torch.Tensor, bias_O: torch.Tensor | None = None
) -> None:
    """See `ops/linear.py`."""
    if (how := rounding_of(x_TI, weight_OI)) is not None:
        x = quantize(x_TI, how.dtype, grouped=how.grouped)
        product(x, _of_8_bits(weight_OI), bias_O, x_TI.dtype, residual_TO)
        return
    _product(Product(x_TI, weight_OI, bias_O, residual_TO, add=True))


def silu_linear_add_(
    gate_up_T2I: torch.Tensor, weight_OI: Stored, residual_TO: torch.Tensor, bias_O: torch.Tensor | None = None
) -> None:
    """See `ops/linear.py`."""
    if (how := rounding_of(gate_up_T2I, weight_OI)) is not None:
        x = silu_quantize(gate_up_T2I, how.dtype, grouped=how.grouped)
        product(x, _of_8_bits(weight_OI), bias_O, gate_up_T2I.dtype, residual_TO)
        return
    _product(Product(gate_up_T2I, weight_OI, bias_O, residual_TO, gated=True, add=True))


def product_of(x: Quantized, weight_OI: Stored, bias_O: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """`linear` in `dtype` of an input that is rounded as `rounding_of` says."""
    return product(x, _of_8_bits(weight_OI), bias_O, dtype)


def _of_8_bits(weight_OI: Stored) -> Stored8:
    """The matrix, which `rounding_of` has found to be of 8 bits."""
    assert isinstance(weight_OI, Stored8)
    return weight_OI


def linear(
    x_TI: torch.Tensor, weight_OI: Stored, bias_O: torch.Tensor | None = None, norm: Norm | None = None
) -> torch.Tensor:
    """See `ops/linear.py`; of the input's norm, if there is one."""
    if (how := rounding_of(x_TI, weight_OI)) is not None:
        x = quantize(x_TI, how.dtype, grouped=how.grouped, norm=norm)
        return product(x, _of_8_bits(weight_OI), bias_O, x_TI.dtype)
    out_TO = x_TI.new_empty(x_TI.shape[0], weight_OI.shape[0])
    _product(Product(x_TI, weight_OI, bias_O, out_TO, norm))
    return out_TO


def _product(given: Product) -> None:
    """Write the product into `out`, or add it; `gated`: the input is `silu(gate) * up`."""
    x_TI, weight_OI, bias_O, out_TO, norm, gated, add = given
    if not out_TO.numel():
        return
    tokens, device = x_TI.shape[0], x_TI.device
    if linear_wide.serves(tokens, x_TI.dtype, weight_OI, device) and x_TI.stride(1) == out_TO.stride(1) == 1:
        ordered = in_order(x_TI, weight_OI, norm, gated=gated, pairs=isinstance(weight_OI, Stored4))
        whole = Product(ordered, weight_OI, bias_O, out_TO, add=add)
        for rows in linear_wide.pieces(tokens, weight_OI, device):
            part = whole.of_rows(rows.start, rows.stop)
            assert not isinstance(part.weight_OI, torch.Tensor)
            linear_wide.run_wide(part, linear_wide.wide_config(tokens, part.weight_OI, device))
        return
    if _in_tiles(tokens, x_TI.dtype, weight_OI) and x_TI.stride(1) == out_TO.stride(1) == 1:
        ordered = in_order(x_TI, weight_OI, norm, gated=gated)
        config = tiles_config(tokens, weight_OI, device)
        run_tiles(Product(ordered, weight_OI, bias_O, out_TO, add=add), config)
        return
    if norm is not None:
        x_TI = norm(x_TI)
    if gated:
        x_TI = silu_and_mul(x_TI)
    parts = list(_parts(weight_OI, x_TI.dtype, tokens))
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
