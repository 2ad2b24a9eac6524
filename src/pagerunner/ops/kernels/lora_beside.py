"""Products of 2 to 64 tokens with adapters and a matrix in floats, of `ops/lora.py`: which kernels are launched, of `kernels/lora_gluon.py` and `kernels/lora_dense.py`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Hashable
from typing import Any

import torch

from pagerunner.ops.kernels import linear_dense, linear_held
from pagerunner.ops.kernels.launch import blocks as blocks_of
from pagerunner.ops.kernels.launch import dependent
from pagerunner.ops.kernels.linear_dense import STEP as STEP_COLUMNS
from pagerunner.ops.kernels.linear_dense import DenseConfig
from pagerunner.ops.kernels.linear_parts import Product
from pagerunner.ops.kernels.lora_dense import run_adapted
from pagerunner.ops.lora import FEW_TILES, SMALL_STEP, TILE, Blocks, Fused, WorkList

SHRINK_WARPS, STEP, LONG_PIECE = 2, 128, 1024
"""Warps of a program of `A x` beside a product, features of each that are multiplied at once, and the program's. Few programs have room beside a product, and each first asks where its block lies."""
EXPAND_WARPS = 2
"""Warps of a program of B behind it."""
SHRINK_REGISTERS = 128
"""By its own choice ptxas takes 68, and lets 48 loads come in five turns and not in two."""
EXPAND_TILES, EXPAND_REGISTERS = 4, 176
"""Tiles of a program of B behind it with more than `FEW_TILES`, each with 128 outputs, and registers of a thread: all that a tile needs comes at once."""
GATE_UNITS = 2
"""Of B with a gate: 64 gates and ups of each warp, so many times."""


@functools.cache
def _gluon() -> Any:
    """The module of the kernels beside a product. It isn't imported with Triton versions that may not have what it names."""
    return importlib.import_module("pagerunner.ops.kernels.lora_gluon")


def shrink_beside(
    product: Product, work: WorkList, adapters: Blocks, layer: Fused, sums_POT: torch.Tensor | None, config: DenseConfig
) -> torch.Tensor:
    """`shrink` beside a product, which lets it start when all before have ended. Further programs add up the sums that the product leaves, and are ready when it ends."""
    x_TI, _, bias_O, out_TO, _, _, add = product
    (tokens, inputs), outputs, tiles = x_TI.shape, out_TO.shape[1], len(work.slots_W)
    _, products, per_product, _ = adapters.places.shape
    pieces, own = blocks_of(inputs, LONG_PIECE), layer.parts * per_product
    inner = torch.empty(pieces, tiles, layer.parts, per_product, TILE, TILE, dtype=torch.float32, device=x_TI.device)
    sums: torch.Tensor = inner if sums_POT is None else sums_POT
    parts, features, size = (0, 0, SMALL_STEP) if sums_POT is None else sums_POT.shape
    more = blocks_of(blocks_of(outputs, 512 // size), tiles * own) if parts else 0
    _gluon().shrink_kernel[(tiles, own, pieces + more) if parts else (own, pieces, tiles)](
        x_TI, x_TI.stride(0), *work[:2], adapters.places, adapters.pool, inner, inputs, layer.first, products, pieces, sums,
        x_TI if bias_O is None else bias_O, out_TO, out_TO.stride(0), tokens, outputs, features, config.rows, blocks_of(inputs, STEP_COLUMNS), config.steps,
        BLOCKS=per_product, PARTS=layer.parts, K=LONG_PIECE, STEP=STEP, S=SHRINK_WARPS, EVEN=inputs % LONG_PIECE == 0, BT=size, SUMS=parts, ADD=add,
        BIAS=bias_O is not None, **dependent(x_TI.device), num_warps=SHRINK_WARPS, maxnreg=SHRINK_REGISTERS,
    )  # fmt: skip
    return inner


def expand_beside(
    y_TO: torch.Tensor, inner: torch.Tensor, work: WorkList, adapters: Blocks, layer: Fused, sums_PTO: torch.Tensor | None = None
) -> None:  # fmt: skip
    """`expand_` of what `shrink_beside` has left. `sums`: add up those of the product, too."""
    pieces, tiles, parts, per_product, _, _ = inner.shape
    each = 1 if tiles <= FEW_TILES else EXPAND_TILES
    groups, more, others_VX, sums = blocks_of(tiles, each), 0, work.tokens_WX, inner
    if sums_PTO is not None:
        assert work.others_VX is not None
        others_VX, sums, more = work.others_VX, sums_PTO, len(work.others_VX)
    _gluon().expand_kernel[(groups + blocks_of(more, each), len(layer.tiles_N5))](
        y_TO, y_TO.stride(0), sums, sums.stride(0), inner, *work[:2], others_VX, adapters.places, adapters.pool, layer.tiles_N5, layer.first,
        adapters.places.shape[1], tiles, groups, more, y_TO.shape[1], PIECES=pieces, BLOCKS=per_product, PARTS=parts, SUMS=0 if sums_PTO is None else len(sums_PTO),
        EACH=each, WARPS=EXPAND_WARPS, ALIGN=TILE if layer.aligned else 1, **dependent(y_TO.device), num_warps=EXPAND_WARPS,
        maxnreg=EXPAND_REGISTERS,
    )  # fmt: skip


def expand_gates(
    y_T2O: torch.Tensor, inner: torch.Tensor, work: WorkList, adapters: Blocks, layer: Fused
) -> torch.Tensor:
    """As `expand_beside`, and `silu(gate) * up` of that, [T, O]."""
    pieces, tiles, _, per_product, _, _ = inner.shape
    tokens, outputs = y_T2O.shape[0], y_T2O.shape[1] // 2
    assert work.others_VX is not None
    out_TO, wide = y_T2O.new_empty(tokens, outputs), 64 * GATE_UNITS * EXPAND_WARPS
    _gluon().gates_kernel[(tiles + len(work.others_VX), blocks_of(outputs, wide))](
        out_TO, y_T2O, y_T2O.stride(0), inner, *work[:2], work.others_VX, adapters.places, adapters.pool, outputs, layer.first,
        adapters.places.shape[1], tiles, PIECES=pieces, BLOCKS=per_product, UNITS=GATE_UNITS, WARPS=EXPAND_WARPS, **dependent(y_T2O.device),
        num_warps=EXPAND_WARPS, maxnreg=EXPAND_REGISTERS,
    )  # fmt: skip
    return out_TO


def adapted_product__kernels(tokens: int, x_TI: torch.Tensor, weight_OI: torch.Tensor) -> Hashable:
    """See `Op.kernels_for`: the product's configuration, None if its kernel doesn't let another run beside it."""
    fits = linear_dense.fits(x_TI, weight_OI) and not linear_held.fits(x_TI, weight_OI, False)
    if tokens > SMALL_STEP or not fits:
        return None
    return linear_dense.kernels_of(tokens, x_TI.dtype, weight_OI, x_TI.device)


def _run_beside(product: Product, work: WorkList, adapters: Blocks, layer: Fused) -> torch.Tensor:
    """Compute a product, and `A x` beside it."""
    inner: list[torch.Tensor] = []

    def beside(sums_POT: torch.Tensor | None, config: DenseConfig) -> None:
        inner.append(shrink_beside(product, work, adapters, layer, sums_POT, config))

    linear_dense.run_dense(product, beside=beside)
    return inner[0]


def adapted_product_(
    out_TO: torch.Tensor, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, work: WorkList, adapters: Blocks,
    layer: Fused, *, add: bool = False, known: bool = True,
) -> None:  # fmt: skip
    """See `ops/lora.py`."""
    if known and add and bias_O is None:
        found = run_adapted(x_TI, weight_OI, work, adapters, layer, own=True)
        if found is not None:
            return expand_beside(out_TO, found[1], work, adapters, layer, found[0])
    inner = _run_beside(Product(x_TI, weight_OI, bias_O, out_TO, add=add), work, adapters, layer)
    return expand_beside(out_TO, inner, work, adapters, layer)


def adapted_gates(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, work: WorkList, adapters: Blocks, layer: Fused
) -> torch.Tensor:  # fmt: skip
    """See `ops/lora.py`."""
    product = Product(x_TI, weight_OI, bias_O, x_TI.new_empty(len(x_TI), len(weight_OI)))
    return expand_gates(product.out_TO, _run_beside(product, work, adapters, layer), work, adapters, layer)


def adapted_parts(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, work: WorkList, adapters: Blocks, layer: Fused, *, known: bool = True
) -> torch.Tensor:
    """See `ops/lora.py`."""
    found = run_adapted(x_TI, weight_OI, work, adapters, layer) if known else None
    if found is not None:
        expand_beside(found[0][0], found[1], work, adapters, layer)
        return found[0]
    out_TO = x_TI.new_empty(len(x_TI), len(weight_OI))
    adapted_product_(out_TO, x_TI, weight_OI, None, work, adapters, layer)
    return out_TO
