"""Products of 33 to 64 tokens with adapters in parts, of `ops/lora.py`: one launch for the product's sums and `A x`, of `kernels/lora_dense_gluon.py`."""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import torch

from pagerunner.ops.kernels import linear_dense
from pagerunner.ops.kernels.launch import blocks as blocks_of
from pagerunner.ops.kernels.launch import dependent
from pagerunner.ops.kernels.linear_dense import STEP, DenseConfig
from pagerunner.ops.lora import SMALL_STEP, SMALL_TILE, TILE, Blocks, Fused, WorkList, most_tiles

MOST_RANKS = 6
"""Blocks of A beside a tile of weights. Each takes 2 KB of a step's room, and its sums 8 registers of a thread."""
UNITS = 1 << 16
"""A place in the pool is a number of 16 elements, in two parts: coordinates of the copy engine have 31 bits."""


REGISTERS, COPY_REGISTERS = 88, 48
"""Of a thread that multiplies, and of one that copies."""


class Ranks(NamedTuple):
    """Blocks of A beside each tile, as two sums of a power of two of them, and steps of weights and of inputs for which there is room."""

    low: int
    high: int
    w_stages: int
    x_stages: int


@functools.cache
def _gluon() -> Any:
    """The kernel's module. It isn't imported with Triton versions that may not have what it names."""
    return importlib.import_module("pagerunner.ops.kernels.lora_dense_gluon")


def ranks_of(config: DenseConfig, units: int, tiles: int) -> Ranks | None:
    """For so many blocks of A and tiles of weights; None if these have no room."""
    ranks = blocks_of(units, tiles)
    if config.tokens != 64 or ranks > MOST_RANKS:
        return None
    low = 1 << (ranks.bit_length() - 1)
    high = ranks - low
    room, size, inputs = linear_dense.ROOM - 2048, (config.rows + TILE * (low + high)) * STEP * 2, 64 * STEP * 2
    stages = min(config.x_stages, max(4, config.x_stages - 2 * (ranks > 2)))
    stages = min(stages, (room - stages * inputs) // size)
    return Ranks(low, high, (room - stages * inputs) // size, stages)


def registers(groups: int) -> int:
    """Of a thread as the kernel starts, of which the copying warp has the place of a group."""
    return blocks_of(REGISTERS * (groups + 1) + COPY_REGISTERS, 8 * (groups + 2)) * 8


def run_adapted(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, work: WorkList, adapters: Blocks, layer: Fused, *, own: bool = False
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What `linear_dense.run_parts` says of the product, and what `shrink_beside` says of its adapters, [P, W, parts, B, tokens of a tile, ranks of a block].

    None where this kernel doesn't compute them.
    """
    (tokens, inputs), outputs, tiles = x_TI.shape, weight_OI.shape[0], len(work.slots_W)
    config = linear_dense.parts_config(x_TI, weight_OI, own=own)
    pool, (_, products, per_product, _) = adapters.pool, adapters.places.shape
    if (
        config is None
        or work.positions_T is None
        or pool.dtype != x_TI.dtype
        or pool.numel() > TILE * UNITS * (UNITS - 1)
    ):
        return None
    each, apart = layer.parts * per_product, outputs // config.rows
    most = most_tiles(SMALL_STEP, len(adapters.places), SMALL_TILE)  # not this step's, so that one kernel serves all
    parts = blocks_of(inputs, STEP) // config.steps
    ranks = ranks_of(config, max(most, tiles) * each, apart)
    if ranks is None:
        return None
    sums_PTO = torch.empty(parts, config.tokens, outputs, dtype=torch.float32, device=x_TI.device)
    inner = torch.empty(parts, tiles, layer.parts, per_product, TILE, TILE, dtype=torch.float32, device=x_TI.device)
    gluon = _gluon()
    described = gluon.TensorDescriptor
    shape, strides = [blocks_of(pool.numel(), TILE * UNITS), UNITS, TILE, inputs], [TILE * UNITS, TILE, inputs, 1]
    anywhere = described(pool, shape, strides, [1, 1, TILE, STEP], gluon.gl.NVMMASharedLayout(128, 16, 4))
    gluon.adapted_kernel[(apart * parts,)](
        described.from_tensor(weight_OI, [64, STEP], gluon.OPERANDS), described.from_tensor(x_TI, [64, STEP], gluon.OPERANDS), anywhere, sums_PTO, inner,
        work.slots_W, work.positions_T, adapters.places, tokens, apart, tiles * each, tiles, layer.first, products, config.steps, PARTS=parts,
        C=config.groups, W_STAGES=ranks.w_stages, X_STAGES=ranks.x_stages, LOW=ranks.low, HIGH=ranks.high, BLOCKS=per_product, OWN=each, OUTPUTS=outputs,
        REGS=REGISTERS, num_warps=4, maxnreg=registers(config.groups), **dependent(x_TI.device),
    )  # fmt: skip
    return sums_PTO, inner
