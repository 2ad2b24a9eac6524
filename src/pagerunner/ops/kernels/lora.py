"""Kernels of ops/lora.py: a work list once a step, and two launches for the products of a layer.

A program of `_shrink` has a tile of tokens, a block of ranks and, with few tiles, one piece of the input features. With many it sums the
pieces itself, each from zero and in the same order, so the bits are the same. Nothing is added atomically.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import blocks as blocks_of
from pagerunner.ops.kernels.launch import dependent, start_next_and_wait
from pagerunner.ops.lora import OUTPUTS, PIECE, SPREAD_TILES, TILE, Blocks, Fused, WorkList, most_tiles

STEP = 128  # input features of one `tl.dot`


@triton.jit(do_not_specialize=["rows"])
def _work_list(
    adapters_R, query_start_R1, tokens_WX, slots_W, rows, ROWS: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    start_next_and_wait(PDL)
    w = tl.program_id(0)
    r = tl.arange(0, ROWS)
    own = tl.load(adapters_R + r, r < rows, -1)
    first = tl.load(query_start_R1 + r, r < rows, 0)
    lens = tl.where(own >= 0, tl.load(query_start_R1 + r + 1, r < rows, 0) - first, 0)
    s = tl.arange(0, SLOTS)
    counts = tl.sum(tl.where(own[None, :] == s[:, None], lens[None, :], 0), 1)
    tiles = (counts + TILE - 1) // TILE
    slot = tl.sum((tl.cumsum(tiles, 0) <= w).to(tl.int32), 0)
    before = tl.sum(tl.where(s < slot, tiles, 0), 0)
    mine = tl.where(own == slot, lens, 0)
    ends = tl.cumsum(mine, 0)
    place = (w - before) * TILE + tl.arange(0, TILE)
    inside = (ends - mine)[None, :] <= place[:, None]
    inside = inside & (place[:, None] < ends[None, :])
    token = tl.sum(tl.where(inside, (first - ends + mine)[None, :] + place[:, None], 0), 1)
    found = tl.sum(inside.to(tl.int32), 1) > 0
    tl.store(tokens_WX + w * TILE + tl.arange(0, TILE), tl.where(found, token, -1))
    tl.store(slots_W + w, tl.where(slot < SLOTS, slot, -1))


def work_list(adapters_R: torch.Tensor, query_start_R1: torch.Tensor, tokens: int, slots: int) -> WorkList:
    """See ops/lora.py."""
    count, rows = most_tiles(tokens, slots), len(adapters_R)
    tokens_WX = torch.empty(count, TILE, dtype=torch.int32, device=adapters_R.device)
    slots_W = torch.empty(count, dtype=torch.int32, device=adapters_R.device)
    if count:
        sizes = {"ROWS": triton.next_power_of_2(rows), "SLOTS": triton.next_power_of_2(slots), "TILE": TILE}
        device = dependent(adapters_R.device)
        _work_list[(count,)](adapters_R, query_start_R1, tokens_WX, slots_W, rows, **sizes, **device, num_warps=8)
    return WorkList(tokens_WX, slots_W)


@triton.jit(do_not_specialize=["first"])
def _shrink(
    x_TI, x_stride, tokens_WX, slots_W, places, pool, inner, first, products, inputs,
    BLOCKS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, PIECE: tl.constexpr, STEP: tl.constexpr, SPREAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next_and_wait(PDL)
    w, own, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots_W + w)
    if slot < 0:
        return
    part, block = own // BLOCKS, own % BLOCKS
    place = tl.load(places + (((slot * products + first + part) * BLOCKS + block) * 2).to(tl.int64))
    if place < 0:
        return
    i, k = tl.arange(0, TILE), tl.arange(0, STEP)
    tokens = tl.load(tokens_WX + w * TILE + i)
    x = x_TI + tokens.to(tl.int64)[:, None] * x_stride
    a = pool + tl.multiple_of(place, TILE) + i[:, None] * inputs
    begin, end = 0, inputs
    if SPREAD:
        begin, end = piece * PIECE, tl.minimum(piece * PIECE + PIECE, inputs)
    total = tl.zeros([TILE, TILE], tl.float32)
    for start in range(begin, end, PIECE):
        acc = tl.zeros([TILE, TILE], tl.float32)
        for at in range(start, tl.minimum(start + PIECE, inputs), STEP):
            inside = (at + k < inputs)[None, :]
            x_part = tl.load(x + at + k[None, :], inside & (tokens >= 0)[:, None], 0.0)
            a_part = tl.load(a + at + k[None, :], inside, 0.0)
            acc = tl.dot(x_part, a_part.T, acc, input_precision="ieee")
        total += acc
    to = ((piece * tl.num_programs(0) + w).to(tl.int64) * PARTS * BLOCKS + own) * TILE * TILE
    tl.store(inner + to + i[:, None] * TILE + i[None, :], total)


def shrink(x_TI: torch.Tensor, work: WorkList, blocks: Blocks, layer: Fused) -> torch.Tensor:
    """See ops/lora.py."""
    tiles, inputs = len(work.slots_W), x_TI.shape[1]
    _, products, per_product, _ = blocks.places.shape
    spread = tiles <= SPREAD_TILES
    pieces = blocks_of(inputs, PIECE) if spread else 1
    inner = torch.empty(pieces, tiles, layer.parts, per_product, TILE, TILE, dtype=torch.float32, device=x_TI.device)
    if tiles:
        sizes = {
            "BLOCKS": per_product,
            "PARTS": layer.parts,
            "TILE": TILE,
            "PIECE": PIECE,
            "STEP": STEP,
            "SPREAD": spread,
        }
        _shrink[(tiles, layer.parts * per_product, pieces)](
            x_TI, x_TI.stride(0), *work, blocks.places, blocks.pool, inner, layer.first, products, inputs, **sizes, **dependent(x_TI.device)
        )  # fmt: skip
    return inner


@triton.jit(do_not_specialize=["first"])
def _expand(
    y_TO, y_stride, inner, tokens_WX, slots_W, places, pool, tiles_N5, first, products, pieces,
    BLOCKS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, OUTPUTS: tl.constexpr, ALIGN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = tiles_N5 + tl.program_id(1) * 5
    part, count = tl.load(tile), tl.load(tile + 3)
    at, column = tl.multiple_of(tl.load(tile + 1), ALIGN), tl.multiple_of(tl.load(tile + 2), ALIGN)
    outputs = tl.multiple_of(tl.load(tile + 4), ALIGN)
    start_next_and_wait(PDL)
    w = tl.program_id(0)
    slot = tl.load(slots_W + w)
    if slot < 0:
        return
    i, o = tl.arange(0, TILE), tl.arange(0, OUTPUTS)
    acc = tl.zeros([TILE, OUTPUTS], tl.float32)
    for block in range(BLOCKS):
        place = tl.load(places + (((slot * products + first + part) * BLOCKS + block) * 2 + 1).to(tl.int64))
        if place >= 0:
            h = tl.zeros([TILE, TILE], tl.float32)
            for piece in range(pieces):
                own = ((piece * tl.num_programs(0) + w).to(tl.int64) * PARTS + part) * BLOCKS + block
                h += tl.load(inner + own * TILE * TILE + i[:, None] * TILE + i[None, :])
            place = tl.multiple_of(place, TILE)
            b = tl.load(pool + place + i[:, None] * outputs + at + o[None, :], (o < count)[None, :], 0.0)
            acc = tl.dot(h.to(b.dtype), b, acc, input_precision="ieee")
    tokens = tl.load(tokens_WX + w * TILE + i)
    y = y_TO + tokens.to(tl.int64)[:, None] * y_stride + column + o[None, :]
    there = (tokens >= 0)[:, None] & (o < count)[None, :]
    base = tl.load(y, there, 0.0)
    tl.store(y, (base.to(tl.float32) + acc).to(base.dtype), there)


def expand_(y_TO: torch.Tensor, inner: torch.Tensor, work: WorkList, blocks: Blocks, layer: Fused) -> None:
    """See ops/lora.py."""
    pieces, tiles = inner.shape[:2]
    _, products, per_product, _ = blocks.places.shape
    if tiles:
        sizes = {
            "BLOCKS": per_product,
            "PARTS": layer.parts,
            "TILE": TILE,
            "OUTPUTS": OUTPUTS,
            "ALIGN": TILE if layer.aligned else 1,
        }
        _expand[(tiles, len(layer.tiles_N5))](
            y_TO, y_TO.stride(0), inner, *work, blocks.places, blocks.pool, layer.tiles_N5, layer.first, products, pieces,
            **sizes, **dependent(y_TO.device)
        )  # fmt: skip
