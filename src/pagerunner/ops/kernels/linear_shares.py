"""Products of some hundred tokens with a stored matrix, whose tiles (`kernels/linear_tiles.py`) are dealt out in equal shares.

A device computes PLACES tiles at a time. Whole rounds of that many tiles are computed as they are. The steps of the tiles that are left, one
tile's behind another's, are cut into PLACES shares of equal length, whatever the number of these tiles. A share may have the end of one tile and the
beginning of the next. Such sums lie beside each other in float32, and a second kernel adds those of each tile in their order. Example: 192 tiles
of 32 steps and 132 places. One round is 132 tiles. The 60 tiles left are 1,920 steps, 14 or 15 for each place. So a place has 47 steps at most; without
shares some have 64.

The scheme is "stream-K" of Osama et al., 2023 (arXiv 2301.03598), with whole tiles first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from pagerunner.ops.kernels.codes import INT4
from pagerunner.ops.kernels.launch import blocks, dependent, multiprocessors, padded, start_next, start_next_and_wait
from pagerunner.ops.kernels.linear_parts import Product, halves, store_or_add, tile_of
from pagerunner.ops.kernels.linear_tiles import TilesConfig, _features, constants_of, row_factors, store_sums, tile_sums
from pagerunner.ops.kernels.stored import operands_of


@triton.jit(do_not_specialize=["num_tokens", "whole", "left"])
def _shares_kernel(x_desc, more_desc, w_ptr, s_ptr, z_ptr, factors_ptr, bias_ptr, y_ptr, sums_ptr, num_tokens, num_features,
                   y_stride, whole, left, PLACES: tl.constexpr, K: tl.constexpr, G: tl.constexpr, BO: tl.constexpr, BT: tl.constexpr,
                   MORE: tl.constexpr, R: tl.constexpr, W: tl.constexpr, FORM: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr,
                   HELD: tl.constexpr, S_WORD: tl.constexpr, Z_WORD: tl.constexpr, ZEROS: tl.constexpr, FACTORS: tl.constexpr,
                   ADD: tl.constexpr, BIAS: tl.constexpr, WAIT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One of the `whole` tiles, or a share of the `left` ones, whose sums are [2 PLACES, BT + MORE, 16 W R] float32."""
    start_next(PDL)
    BK: tl.constexpr = 128 if FORM >= INT4 else 64
    BN: tl.constexpr = 16 * W
    STEPS: tl.constexpr = (K + BK - 1) // BK
    place = tl.program_id(0)
    begin, end = place * STEPS, place * STEPS + STEPS
    if place >= whole:
        place -= whole
        begin = whole * STEPS + place * (left * STEPS) // PLACES
        end = whole * STEPS + (place + 1) * (left * STEPS) // PLACES
    part = 2 * place
    while begin < end:
        tile = begin // STEPS
        stop = tl.minimum(end, tile * STEPS + STEPS)
        token_tile, feature_tile = tile_of(tile, num_tokens, num_features, BT + MORE, BN * R, 8)
        row, first = token_tile * (BT + MORE), (begin - tile * STEPS) * BK
        sums, more = tile_sums(x_desc, more_desc, w_ptr, s_ptr, z_ptr, row, feature_tile, num_features, first,
                               tl.minimum(first + (stop - begin) * BK, K), K, G, BO, BT, MORE, R, W, FORM, WORDS, SCALES, HELD,
                               S_WORD, Z_WORD, ZEROS, WAIT, PDL)  # fmt: skip
        for r in tl.static_range(R):
            local = r * BN + _features(tl.arange(0, BN), W)
            features = feature_tile * (BN * R) + local
            if stop - begin == STEPS:
                store_sums(sums[r], s_ptr, factors_ptr, bias_ptr, y_ptr, row + tl.arange(0, BT), features, num_tokens, num_features,
                           y_stride, SCALES, FACTORS, ADD, BIAS)  # fmt: skip
                if MORE:
                    store_sums(more[r], s_ptr, factors_ptr, bias_ptr, y_ptr, row + BT + tl.arange(0, MORE), features, num_tokens,
                               num_features, y_stride, SCALES, FACTORS, ADD, BIAS)  # fmt: skip
            else:
                outs = tl.minimum(features, num_features - 1).to(tl.int64)
                at = sums_ptr + part * ((BT + MORE) * BN * R) + local[:, None]
                acc = row_factors(sums[r], s_ptr, factors_ptr, outs, SCALES, FACTORS)
                tl.store(at + tl.arange(0, BT)[None, :] * (BN * R), acc)
                if MORE:
                    acc = row_factors(more[r], s_ptr, factors_ptr, outs, SCALES, FACTORS)
                    tl.store(at + (BT + tl.arange(0, MORE))[None, :] * (BN * R), acc)
        part += 1
        begin = stop


@triton.jit(do_not_specialize=["num_tokens", "whole", "left"])
def _add_shares_kernel(sums_ptr, bias_ptr, y_ptr, num_tokens, num_features, y_stride, whole, left, PLACES: tl.constexpr,
                       STEPS: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                       ADD: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """ROWS tokens of one of the tiles left: the sum of all shares that have some of its steps."""
    start_next_and_wait(PDL)
    tile, total = tl.program_id(0), left * STEPS
    first, last = ((tile * STEPS + 1) * PLACES - 1) // total, ((tile + 1) * STEPS * PLACES - 1) // total
    if first < last:  # else one program had the whole tile
        token_tile, feature_tile = tile_of(whole + tile, num_tokens, num_features, BT, BF, 8)
        own, local = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
        tokens, features = token_tile * BT + own, feature_tile * BF + local
        live = (features < num_features) & (local < BF)
        inside = (tokens < num_tokens)[:, None] & live[None, :]
        acc = tl.zeros((ROWS, BLOCK), tl.float32)
        for place in range(first, last + 1):
            begin, end = place * total // PLACES, (place + 1) * total // PLACES
            part = 2 * place + tile - begin // STEPS
            there = inside & (begin < end)  # with more places than steps, some have none
            acc += tl.load(sums_ptr + part * (BT * BF) + own[:, None] * BF + local[None, :], mask=there, other=0.0)
        if BIAS:
            acc += tl.load(bias_ptr + features, mask=live, other=0.0).to(tl.float32)[None, :]
        at = y_ptr + tokens.to(tl.int64)[:, None] * y_stride + features[None, :]
        store_or_add(at, acc, inside, ADD)


class Shares(NamedTuple):
    """How tiles are dealt out: whole ones, those that are cut, the shares of these, and the memory for their sums."""

    whole: int
    left: int
    places: int
    sums: torch.Tensor

    @property
    def programs(self) -> int:
        """Of the first kernel."""
        return self.whole + (self.places if self.left else 0)


def _shares(tiles: int, tokens: int, features: int, each: int, device: torch.device) -> Shares:
    """For tiles of so many tokens and features on a device whose multiprocessors hold `each` programs."""
    places = each * multiprocessors(device)
    left = tiles % places
    sums = torch.empty(2 * places if left else 1, tokens, features, dtype=torch.float32, device=device)
    return Shares(tiles - left, left, places, sums)


def _add_shares(shares: Shares, steps: int, bias_O: torch.Tensor | None, out_TO: torch.Tensor, *, add: bool) -> None:
    """Add up the sums of each tile that was cut."""
    if not shares.left:
        return
    _, high, wide = shares.sums.shape
    rows = 8
    _add_shares_kernel[(shares.left, blocks(high, rows))](
        shares.sums, shares.sums if bias_O is None else bias_O, out_TO, *out_TO.shape, out_TO.stride(0), shares.whole,
        shares.left, PLACES=shares.places, STEPS=steps, BT=high, BF=wide, ROWS=rows, BLOCK=padded(wide), ADD=add,
        BIAS=bias_O is not None, num_warps=4, **dependent(out_TO.device),
    )  # fmt: skip


def run_shares(product: Product, config: TilesConfig) -> None:
    """Write `linear(x)` into `out`, or add it. `x` is in the order that `in_order` makes. A multiprocessor holds `config.shares` programs."""
    x_TI, weight_OI, bias_O, out_TO, _, _, add = product
    tokens = x_TI.shape[0]
    features, inputs = weight_OI.shape
    own, wide = constants_of(x_TI, weight_OI)
    tiles = blocks(tokens, config.tokens) * blocks(features, config.features)
    shares = _shares(tiles, config.tokens, config.features, config.shares, x_TI.device)
    tensors, constants = operands_of(x_TI, weight_OI, bias_O)
    high, more = halves(config.tokens)
    _shares_kernel[(shares.programs,)](
        TensorDescriptor.from_tensor(x_TI, [high, wide]), TensorDescriptor.from_tensor(x_TI, [more or 8, wide]), *tensors, out_TO, shares.sums, tokens, features,
        out_TO.stride(0), shares.whole, shares.left, PLACES=shares.places, K=inputs, BT=high, MORE=more, R=config.rows,
        W=config.warps, ADD=add, num_warps=config.warps, num_stages=config.stages, **own, **constants,
        **dependent(x_TI.device),
    )  # fmt: skip
    _add_shares(shares, blocks(inputs, wide), bias_O, out_TO, add=add)
