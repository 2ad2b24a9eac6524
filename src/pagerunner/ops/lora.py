"""What adapters add to products with weight matrices: `B (A x)` for the rows that have an adapter, each its own.

Adapters lie in *blocks* of 16 ranks anywhere in one flat `pool`: A's block is [16, I], and B's [16, O]. A table on the device says where,
`places[slot, product, block]` (A's, then B's), -1 for a block that isn't there; the first is there if any is. Blocks begin at multiples of 16
elements. An adapter of rank 40 has three blocks, and zeros fill the last. So ranks mix at no cost, and blocks may move without a change of kernels or
graphs.

A step's tokens are ordered by adapter, in tiles of 16, or of 8 in small steps (`work_list`), once for all layers. Example: rows with 1, 20 and 1 tokens have
adapters 1, none and 1. Their tokens are 0, 1 to 20, and 21. Tile 0 is of slot 1, with tokens 0 and 21; and there are no more.

Two launches make a product's sum: `shrink` and `expand_`. All parts of a fused layer share them. Up to 64 tokens with a matrix in floats have the
first beside the product (`with_shrink_`), and kernels of their own for both (`kernels/lora/lora_gluon.py`). For one token and a matrix in
floats there is none (`adapted_row_`). Sums have a fixed order, so a step made again has the same bits. A row's bits may differ with the number
of rows: above `SPREAD_TILES` tiles the norm before a product is rounded first, and other kernels add up otherwise. So `batch_invariant` refuses adapters.

Shape letters: T tokens, R rows, W tiles, I input features, O output features, N tiles of outputs, S slots of adapters, P products, B blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.dispatch import gpu_kernel, has_triton
from pagerunner.ops.linear import Norm

TILE = 16
"""Tokens of a tile, and ranks of a block."""
OUTPUTS = 128
"""Output features that one program of `expand_` computes."""
WIDE_OUTPUTS = 512
"""As many with more than `FEW_TILES` tiles: each program reads what `shrink` has left, which is more than B's part of 128 features."""
FEW_TILES = 16
PIECE = 512
"""Input features whose sum is made at once; the sums of pieces are added in their order."""
SMALL_STEP, SMALL_TILE = 64, 8
"""Up to so many tokens, a tile has 8 at most: the columns of a matrix unit's result. One adapter's 64 tokens then have eight programs where they had four."""
SPREAD_TILES = 128
"""Up to so many tiles, pieces are summed by programs of their own: with 64 adapters, in steps of up to 1,088 tokens."""


COPIES = 32
"""Of what the first programs of one token's product tell the others: some 500 ask at once, and a part of the cache answers one after another."""


class WorkList(NamedTuple):
    """Which tokens meet in a tile, -1 where it has fewer, and the slot of their adapter, -1 for a tile without tokens.

    `places` [P, B, 2], in steps of one token: where its adapter's blocks lie. So no program looks up a slot before it knows where.
    """

    tokens_WX: torch.Tensor  # [W, 16] int32
    slots_W: torch.Tensor  # int32
    places: torch.Tensor | None = None


class Blocks(NamedTuple):
    """Where all adapters' blocks lie: `places` [S, P, B, 2] int64, in elements of `pool`. `experts_S`: which slots' adapters have products of experts, None: all may."""

    pool: torch.Tensor
    places: torch.Tensor
    experts_S: torch.Tensor | None = None

    def of(self, slot: int, product: int) -> torch.Tensor:
        """A product's places, [B, 2]; it is the slot's, or, with one product a slot, that many slots behind it."""
        return self.places.flatten(0, 1)[slot * self.places.shape[1] + product]


class Fused(NamedTuple):
    """The products of one layer: the first one's number, how many follow each other, and their outputs in tiles.

    A row of `tiles` [N, 5] (int32): which of the products, its first output, the layer's first output, how many, and the product's outputs.
    `aligned`: all products have a multiple of 16 outputs. `wide`: the same outputs in larger tiles. `sizes`: the outputs of each product.
    """

    first: int
    parts: int
    tiles_N5: torch.Tensor
    aligned: bool
    wide_N5: torch.Tensor
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, first: int, outputs: Sequence[int], device: torch.device | str = "cpu") -> Fused:
        """Of products with so many outputs, which stand beside each other."""
        tiles = []
        for wide in (OUTPUTS, WIDE_OUTPUTS):
            rows, before = [], 0
            for part, size in enumerate(outputs):
                rows += [(part, at, before + at, min(wide, size - at), size) for at in range(0, size, wide)]
                before += size
            tiles.append(torch.tensor(rows, dtype=torch.int32).to(device))
        aligned = all(size % TILE == 0 for size in outputs)
        return cls(first, len(outputs), tiles[0], aligned, tiles[1], tuple(outputs))


def joins_row(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    """Whether the product of `x` with a matrix in floats has what adapters add in its own kernel: one token's on a GPU."""
    fits = x_TI.shape[0] == 1 and x_TI.stride(-1) == 1 and x_TI.dtype == weight_OI.dtype and weight_OI.is_contiguous()
    return fits and x_TI.is_cuda and has_triton()


def joins_product(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    """Whether `with_shrink_` has `A x` beside the product of several tokens with a matrix in floats."""
    several = x_TI.is_cuda and x_TI.shape[0] > 1 and has_triton()
    return several and bool(with_shrink_.kernels_for(x_TI.shape[0], x_TI, weight_OI))


class FusedExperts(NamedTuple):
    """The products of a layer's experts: those of the first expert, whose gate, up and down follow each other, as the other experts' do behind."""

    gate_up: Fused
    down: Fused
    experts: int

    @classmethod
    def of(
        cls, first: int, experts: int, features: int, inner: int, device: torch.device | str = "cpu"
    ) -> FusedExperts:
        """Of experts with so many features of the stream, and inner ones."""
        return cls(Fused.of(first, [inner, inner], device), Fused.of(first + 2, [features], device), experts)


def tile_tokens(tokens: int) -> int:
    """How many tokens of a step of so many a tile has at most."""
    return SMALL_TILE if tokens <= SMALL_STEP else TILE


def most_tiles(tokens: int, slots: int, most: int = TILE) -> int:
    """The most tiles of up to `most` tokens that so many tokens can need with so many adapters: a step's grid."""
    used = min(tokens, slots)
    return min(tokens, (tokens + (most - 1) * used) // most)


@gpu_kernel("lora.lora")
def work_list(
    adapters_R: torch.Tensor, query_start_R1: torch.Tensor, tokens: int, slots: int, places: torch.Tensor | None = None
) -> WorkList:
    """The tiles of a step of `tokens` tokens, whose rows have the adapters in these slots, -1 for none. Both tensors are int32. `places`: those of `Blocks`."""
    own: dict[int, list[int]] = {}
    starts = query_start_R1.tolist()
    for adapter, first, end in zip(adapters_R.tolist(), starts, starts[1:], strict=False):
        if adapter >= 0:
            own.setdefault(adapter, []).extend(range(first, end))
    most = tile_tokens(tokens)
    count = most_tiles(tokens, slots, most)
    tokens_WX = torch.full((count, TILE), -1, dtype=torch.int32)
    slots_W = torch.full((count,), -1, dtype=torch.int32)
    tile = 0
    for slot in sorted(own):
        for some in torch.tensor(own[slot], dtype=torch.int32).split(most):
            if len(some):
                tokens_WX[tile, : len(some)], slots_W[tile] = some, slot
                tile += 1
    if places is None or tokens != 1:
        return WorkList(tokens_WX, slots_W)
    slot = int(slots_W[0])
    return WorkList(tokens_WX, slots_W, torch.full_like(places[0], -1) if slot < 0 else places[slot].clone())


class PairLists(NamedTuple):
    """The tiles of pairs of a token and an expert, with the pairs' tokens and with their numbers. `experts_TA`: the experts of pairs that are computed, -1 for others.

    `order_P` and `starts_E1` are those of `Routes`, if they were found on the way; the order says something behind the experts' pairs, too.
    """

    experts_TA: torch.Tensor
    tokens: WorkList
    pairs: WorkList
    order_P: torch.Tensor | None = None
    starts_E1: torch.Tensor | None = None


@gpu_kernel("lora.lora")
def pair_lists(
    experts_TA: torch.Tensor,
    slots_T: torch.Tensor,
    products: int,
    none: int,
    tiles: int,
    experts: int,
    *,
    alone: bool = False,
) -> PairLists:
    """Lists of pairs: each slot's pairs of each of the `experts`, `slot * products + 3 * expert`, are those of a slot. At most `tiles` are needed.

    Computed are pairs that have an expert and whose token has a slot, or with `alone` all that have an expert.
    `none` is above all slots. The tiles' order is anybody's, and between them there may be some without pairs.
    """
    active = experts_TA.shape[1]
    own_TA = experts_TA.masked_fill(slots_T.unsqueeze(1) < 0, -1)
    keys_TA = slots_T.unsqueeze(1) * products + 3 * experts_TA
    pairs = _pairs_work_list(keys_TA.masked_fill(own_TA < 0, none).flatten(), none, tiles)
    tokens_WX = pairs.tokens_WX.div(active, rounding_mode="floor")
    return PairLists(experts_TA if alone else own_TA, WorkList(tokens_WX, pairs.slots_W), pairs)


@gpu_kernel("lora.lora")
def shrink(
    x_TI: torch.Tensor, work: WorkList, blocks: Blocks, layer: Fused, norm: Norm | None = None, *, known: bool = False
) -> torch.Tensor:
    """`A x`, or `A norm(x)`, of each tile and each of the layer's products, [pieces, W, parts, B, tokens of a tile, ranks of a block] in float32.

    It is for `expand_` alone: kernels leave `A (x * weight)` and another row for what the norm divides by. What belongs to no block holds
    anything. `known`: a `shrink` with this work list is among the kernels before.
    """
    if norm is not None:
        x_TI = norm(x_TI)
    tiles, per_product = len(work.slots_W), blocks.places.shape[2]
    inner = torch.zeros(1, tiles, layer.parts, per_product, TILE, TILE)
    for tile, (slot, tokens) in enumerate(zip(work.slots_W.tolist(), work.tokens_WX.long(), strict=True)):
        if slot < 0:
            continue
        x_XI = torch.where((tokens >= 0).unsqueeze(1), x_TI[tokens.clamp(min=0)], 0).float()
        for part in range(layer.parts):
            for block, (place, _) in enumerate(blocks.of(slot, layer.first + part).tolist()):
                if place >= 0:
                    a_XI = blocks.pool[place : place + TILE * x_TI.shape[1]].view(TILE, -1)
                    inner[0, tile, part, block] = x_XI @ a_XI.float().T
    return inner


@gpu_kernel("lora.lora")
def expand_(
    y_TO: torch.Tensor,
    inner: torch.Tensor,
    work: WorkList,
    blocks: Blocks,
    layer: Fused,
    norm: Norm | None = None,
    *,
    beside: bool = False,
) -> None:
    """Add `B` of what `shrink` of this norm has left to the layer's output in place. Tokens without an adapter aren't touched.

    Nothing may be launched between the two: the output is read before `shrink` has ended. `beside`: it is `with_shrink_` that has left it.
    """
    products = [row for row in layer.tiles_N5.tolist() if row[1] == 0]
    for tile, (slot, tokens) in enumerate(zip(work.slots_W.tolist(), work.tokens_WX.long(), strict=True)):
        if slot < 0:
            continue
        there = tokens >= 0
        for part, _, column, _, outputs in products:
            total = torch.zeros(TILE, outputs)
            for block, (_, place) in enumerate(blocks.of(slot, layer.first + part).tolist()):
                if place >= 0:
                    b_XO = blocks.pool[place : place + TILE * outputs].view(TILE, outputs)
                    h = inner[:, tile, part, block].sum(0).to(b_XO.dtype)
                    total += h.float() @ b_XO.float()
            rows = tokens[there]
            y_TO[rows, column : column + outputs] = (y_TO[rows, column : column + outputs].float() + total[there]).to(
                y_TO.dtype
            )


@gpu_kernel("lora.lora")
def expand_silu(
    y_T2O: torch.Tensor,
    inner: torch.Tensor,
    work: WorkList,
    adapters: Blocks,
    layer: Fused,
    own_R: torch.Tensor,
    row_T: torch.Tensor | None,
    norm: Norm | None = None,
) -> torch.Tensor:
    """`silu(gate) * up`, [T, O], behind `expand_` to a layer's gate and up, in one launch. `own_R` and `row_T` are those of `Adapters`. `y` is undefined
    afterwards, and nothing may be launched between `shrink` and this either.
    """
    expand_.twin(y_T2O, inner, work, adapters, layer, norm)
    return silu_and_mul(y_T2O)


@gpu_kernel("linear.linear")
def with_shrink_(
    out_TO: torch.Tensor, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, work: WorkList, adapters: Blocks,
    layer: Fused, *, add: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Write the layer's own product into `out`, or add it, and return what `shrink` says of `x`, which is computed meanwhile."""
    y_TO = F.linear(x_TI, weight_OI, bias_O)
    out_TO.copy_(out_TO + y_TO if add else y_TO)
    return shrink.twin(x_TI, work, adapters, layer)


@gpu_kernel("linear.linear")
def adapted_row_(
    out_TO: torch.Tensor,
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    words: torch.Tensor,
    turn: int,
    work: WorkList,
    adapters: Blocks,
    layer: Fused,
    norm: Norm | None = None,
    *,
    gated: bool = False,
    add: bool = False,
) -> None:
    """Write one token's product with the layer's own matrix and what its adapter adds into `out`, or add them.

    `gated`: it is `silu(gate) * up` of the gate's features and then up's. It is one launch, as a token's own product alone: its programs tell
    each other `A x` in `words`, which were zeros before the first `turn`. A word has a number and its turn, and no two launches in a row have the same.
    """
    x_TI = x_TI if norm is None else norm(x_TI)
    y_TO = F.linear(x_TI, weight_OI, bias_O)
    expand_.twin(y_TO, shrink.twin(x_TI, work, adapters, layer), work, adapters, layer)
    if gated:
        y_TO = silu_and_mul(y_TO)
    out_TO.copy_(out_TO + y_TO if add else y_TO)


class PairAdapters(NamedTuple):
    """What adapters add to products of pairs of a token and an expert, as if each pair of a slot and an expert were a slot."""

    lists: PairLists
    blocks: Blocks

    def add_(self, x: torch.Tensor, layer: Fused, y_PO: torch.Tensor, *, known: bool) -> None:
        """Add what adapters say of each pair's input, or of its token's, to the pairs' outputs. `known`: it isn't the first time."""
        pairs = self.lists.pairs
        inner = shrink(x, pairs if len(x) == len(y_PO) else self.lists.tokens, self.blocks, layer, known=known)
        expand_(y_PO, inner, pairs, self.blocks, layer)


@dataclass(slots=True)
class Adapters:
    """The adapters of some tokens, and what is made of them once for all layers: each row's slot of at most `slots` (`own_R`, int32, -1 for none),
    and each token's row. Without `row_T` token t is row t's.
    """

    own_R: torch.Tensor
    row_T: torch.Tensor | None
    slots: int
    blocks: Blocks
    work: WorkList
    known: bool = False
    """Whether a product has used the work list."""
    experts: bool = True
    """Whether any of the adapters may have products of experts."""
    _apart: tuple[torch.Tensor, torch.Tensor] | None = None
    words: torch.Tensor | None = None
    turns: int = 0
    """Of products of one token; see `adapted_row_`."""

    @classmethod
    def of_rows(
        cls,
        adapters_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        row_T: torch.Tensor,
        slots: int,
        blocks: Blocks,
        *,
        experts: bool = True,
    ) -> Adapters:
        """Of a step whose rows have these adapters. Tokens whose row is negative are padding."""
        work = work_list(adapters_R, query_start_R1, len(row_T), slots, blocks.places)
        return cls(adapters_R, row_T, slots, blocks, work, experts=experts)

    def of_tokens(self, tokens_S: torch.Tensor) -> Adapters:
        """Of the tokens at these places alone."""
        rows_S = tokens_S if self.row_T is None else self.row_T.index_select(0, tokens_S)
        slots_S = self.own_R.index_select(0, rows_S.clamp(min=0)).masked_fill_(rows_S < 0, -1)
        each = torch.arange(len(slots_S) + 1, dtype=torch.int32, device=slots_S.device)
        work = work_list(slots_S, each, len(slots_S), self.slots, self.blocks.places)
        return Adapters(slots_S, None, self.slots, self.blocks, work, experts=self.experts)

    def apart(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots [T] of tokens whose adapter has products of any experts, -1 for others; and which tokens these are, [T, 1]. All layers ask, and it is found once."""
        if self._apart is None:
            slots_T = self._slots_T()
            if self.blocks.experts_S is not None:
                has_T = self.blocks.experts_S.index_select(0, slots_T.clamp(min=0))
                slots_T = slots_T.masked_fill(has_T.logical_not(), -1)
            self._apart = slots_T, (slots_T >= 0).unsqueeze(1)
        return self._apart

    def of_pairs(self, experts_TA: torch.Tensor, layer: FusedExperts, *, alone: bool = False) -> PairAdapters:
        """Of the pairs of a token and one of these experts, -1 for none. `alone`: see `pair_lists`."""
        slots, products, per_product, _ = self.blocks.places.shape
        none, tiles = slots * products, most_tiles(experts_TA.numel(), slots * layer.experts)
        lists = pair_lists(experts_TA, self.apart()[0], products, none, tiles, layer.experts, alone=alone)
        return PairAdapters(lists, Blocks(self.blocks.pool, self.blocks.places.view(none, 1, per_product, 2)))

    def _slots_T(self) -> torch.Tensor:
        """Each token's slot, -1 for none."""
        if self.row_T is None:
            return self.own_R
        return self.own_R.index_select(0, self.row_T.clamp(min=0)).masked_fill_(self.row_T < 0, -1)

    def row(
        self, layer: Fused, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, out_TO: torch.Tensor,
        norm: Norm | None = None, *, gated: bool = False, add: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """`adapted_row_` of the layer's product of one token."""
        x_TI, norm = _in_range(x_TI, norm)
        size = COPIES * layer.parts * self.blocks.places.shape[2] * TILE
        # torch's launch ends before the product begins, and so has the work list
        if self.words is None or len(self.words) < size:
            self.words, self.known = torch.zeros(size, dtype=torch.int64, device=x_TI.device), True
        self.turns += 1
        own = self.words, self.turns, self.work, self.blocks, layer, norm
        adapted_row_(out_TO, x_TI, weight_OI, bias_O, *own, gated=gated, add=add)
        return out_TO

    def product(
        self, layer: Fused, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, out_TO: torch.Tensor, *,
        gated: bool = False, add: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """The layer's own product and what adapters add, into `out` or added to it. `gated`: `out` is for gates and ups, and the result is another tensor. See `with_shrink_`."""
        own, self.known = (self.work, self.blocks, layer), True
        expand_(out_TO, with_shrink_(out_TO, x_TI, weight_OI, bias_O, *own, add=add), *own, beside=True)
        return silu_and_mul(out_TO) if gated else out_TO

    def gated(self, x_TI: torch.Tensor, layer: Fused, y_T2O: torch.Tensor, norm: Norm | None = None) -> torch.Tensor:
        """`silu(gate) * up` behind `add_` to a layer's gate and up, [T, O]. `y` is undefined afterwards."""
        x_TI, norm = _in_range(x_TI, norm)
        inner = shrink(x_TI, self.work, self.blocks, layer, norm, known=self.known)
        self.known = True
        return expand_silu(y_T2O, inner, self.work, self.blocks, layer, self.own_R, self.row_T, norm)

    def add_(self, x_TI: torch.Tensor, layer: Fused, y_TO: torch.Tensor, norm: Norm | None = None) -> None:
        """Add to the layer's output for `x`, or for `norm(x)`, what each token's adapter says. Tokens without an adapter aren't touched."""
        x_TI, norm = _in_range(x_TI, norm)
        inner = shrink(x_TI, self.work, self.blocks, layer, norm, known=self.known)
        self.known = True
        expand_(y_TO, inner, self.work, self.blocks, layer, norm)


def _in_range(x_TI: torch.Tensor, norm: Norm | None) -> tuple[torch.Tensor, Norm | None]:
    """In float16 the norm is made before the product: kernels multiply by its weight before they divide, and 30,000 times 4 would be infinite."""
    return (x_TI, norm) if norm is None or x_TI.dtype != torch.float16 else (norm(x_TI), None)


def _pairs_work_list(own_P: torch.Tensor, none: int, count: int) -> WorkList:
    """The tiles of pairs with these slots, `none` for those without one. Many slots are a matter of sorting, which runs on any device."""
    slots_P, order_P = own_P.sort(stable=True)
    place_P = torch.arange(len(own_P), device=own_P.device)
    place_P -= torch.searchsorted(slots_P, slots_P)  # among the pairs of the slot
    tile_P = (place_P % TILE == 0).cumsum(0) - 1
    tile_P = torch.where(slots_P < none, tile_P, count)  # a tile that is left out
    tokens_WX = own_P.new_full(((count + 1) * TILE,), -1)
    tokens_WX.scatter_(0, tile_P * TILE + place_P % TILE, order_P.to(own_P.dtype))
    slots_W = own_P.new_full((count + 1,), -1).scatter_(0, tile_P, slots_P)
    return WorkList(tokens_WX.view(-1, TILE)[:count], slots_W[:count])
