"""`A x` of `ops/lora.py` for steps of so many tokens that each adapter has several tiles: prompts.

A program has `TOGETHER` tiles, which follow each other. Those of one adapter are multiplied together: its blocks are read once for all of them, and inputs once for all products of a layer.
Where adapters meet, a program has a turn for each. Example: 8,192 tokens of 64 prompts with adapters are 512 tiles, and 128 programs of 64 tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import blocks as blocks_of
from pagerunner.ops.kernels.launch import dependent, padded, shared_memory, start_next, wait_turn
from pagerunner.ops.lora import TILE, Blocks, Fused, WorkList

TOGETHER = 4
"""Tiles of a program."""
NONE = 1 << 30
"""Is no slot."""
STEP = 128
"""Inputs that are multiplied at once."""


def serves(tiles: int, blocks: Blocks) -> bool:
    """Whether adapters have several tiles each, if a step has so many."""
    return tiles >= TOGETHER * len(blocks.places)


@triton.jit
def _tokens(tokens_WX, slots_W, w, tiles, TILE: tl.constexpr, TOGETHER: tl.constexpr):
    """The tokens of some tiles and the slots of their adapters, -1 where there is none."""
    i = tl.arange(0, TOGETHER * TILE)
    inside = w + i // TILE < tiles
    token = tl.load(tokens_WX + w * TILE + i, inside, -1)
    return token, tl.where(token >= 0, tl.load(slots_W + w + i // TILE, inside, -1), -1)


@triton.jit
def _behind(own, slot, NONE: tl.constexpr):
    """The next slot after this one among the tokens', NONE if there is none. A loop over tiles would wait for each one's slot."""
    return tl.min(tl.where(own > slot, own, NONE), 0)


@triton.jit(do_not_specialize=["first", "tiles"])
def _shrink_many(
    x_TI, x_stride, tokens_WX, slots_W, places, pool, inner, inputs, first, products, tiles,
    BLOCKS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, TOGETHER: tl.constexpr, RANKS: tl.constexpr, K: tl.constexpr, NONE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`A x` of some tiles, a block of ranks of each product: RANKS, of which the last may be no product's."""
    # The next kernel starts when all before this one have ended, as in `_shrink`: it reads the product's outputs before its own wait.
    wait_turn(PDL)
    start_next(PDL)
    w, block = tl.program_id(0) * TOGETHER, tl.program_id(1)
    token, own = _tokens(tokens_WX, slots_W, w, tiles, TILE, TOGETHER)
    i, n, k = tl.arange(0, TOGETHER * TILE), tl.arange(0, RANKS), tl.arange(0, K)
    part = n // TILE
    x_at = x_TI + token.to(tl.int64)[:, None] * x_stride + k[None, :]
    to_tile = ((w + i // TILE).to(tl.int64) * (PARTS * BLOCKS) + block) * (TILE * TILE) + i % TILE * TILE
    to = inner + to_tile[:, None] + (part * (BLOCKS * TILE * TILE) + n % TILE)[None, :]
    slot = _behind(own, -1, NONE)
    while slot < NONE:
        product = (slot * products + first).to(tl.int64) + part
        place = tl.load(places + (product * BLOCKS + block) * 2, part < PARTS, -1)
        a_at = pool + tl.maximum(place, 0) // TILE * TILE + n % TILE * inputs
        acc = tl.zeros([TOGETHER * TILE, RANKS], tl.float32)
        for at in range(0, inputs, K):
            inside = (k < inputs - at)[None, :]
            x = tl.load(x_at + at, inside & (own == slot)[:, None], 0.0)
            a = tl.load(a_at[:, None] + at + k[None, :], inside & (place >= 0)[:, None], 0.0)
            acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
        tl.store(to, acc, (own == slot)[:, None] & (place >= 0)[None, :])
        slot = _behind(own, slot, NONE)


def shrink(x_TI: torch.Tensor, work: WorkList, blocks: Blocks, layer: Fused) -> torch.Tensor:
    """See `ops/lora.py`."""
    tiles, (_, products, per_product, _) = len(work.slots_W), blocks.places.shape
    inner = torch.empty(1, tiles, layer.parts, per_product, TILE, TILE, dtype=torch.float32, device=x_TI.device)
    ranks = TILE * padded(layer.parts)
    stages = shared_memory(x_TI.device) // ((TOGETHER * TILE + ranks) * STEP * x_TI.itemsize)
    _shrink_many[(blocks_of(tiles, TOGETHER), per_product)](
        x_TI, x_TI.stride(0), *work[:2], blocks.places, blocks.pool, inner, x_TI.shape[1], layer.first, products, tiles, BLOCKS=per_product,
        PARTS=layer.parts, TILE=TILE, TOGETHER=TOGETHER, NONE=NONE, RANKS=ranks, K=STEP, **dependent(x_TI.device), num_warps=4,
        num_stages=max(1, min(4, stages)),
    )  # fmt: skip
    return inner
