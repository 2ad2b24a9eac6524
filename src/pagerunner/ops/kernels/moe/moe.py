"""Mixtures of experts as grouped matrix products: which kernels serve; see `ops/moe.py`. Nothing here waits for the device.

Shape letters as in `ops/moe.py`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeGuard

import torch

from pagerunner.ops import numerics
from pagerunner.ops.activation import GatedActivation
from pagerunner.ops.kernels.codes import E2M1, INT4
from pagerunner.ops.kernels.linear.linear_rounded import Rounded, rounding
from pagerunner.ops.kernels.moe import moe_piped
from pagerunner.ops.kernels.moe.moe_codes import CodesProduct, codes_config, codes_products, reads_codes
from pagerunner.ops.kernels.moe.moe_joint import (
    LARGE,
    MOST_ROWS,
    are_few,
    grouped_product,
    is_full,
    joins,
    joint_products,
    most_pairs,
)
from pagerunner.ops.kernels.moe.moe_lanes import lanes_products, serves_lanes
from pagerunner.ops.kernels.moe.moe_many import fits, many_config, many_product
from pagerunner.ops.kernels.moe.moe_one import one_token
from pagerunner.ops.kernels.moe.moe_packed import few_pairs, packs, pairs_products
from pagerunner.ops.kernels.moe.moe_piped import piped_product, row_blocks
from pagerunner.ops.kernels.moe.moe_routing import order_pairs
from pagerunner.ops.kernels.moe.moe_streams import serves_streams, streams_config, streams_products
from pagerunner.ops.kernels.moe.moe_tiles import serves
from pagerunner.ops.kernels.moe.moe_unpacked import UnpackedProduct, unpacked_products, unpacks
from pagerunner.ops.kernels.moe.pair_sums import sum_pairs
from pagerunner.ops.kernels.quantize import quantize_many
from pagerunner.ops.moe import ExpertWeights, Shared, add_shared_
from pagerunner.ops.pair_sums import PairSums
from pagerunner.ops.quantize import Quantized, quantize
from pagerunner.ops.routing import Routes
from pagerunner.ops.stored import Stored, Stored4, Stored8, dense


def _products(x_TD: torch.Tensor, routes: Routes, experts: ExpertWeights) -> torch.Tensor:
    """Both products, [P, D] in the tokens' order."""
    up, low, activation, up_bias, low_bias, weigh_inputs = experts
    config = streams_config(routes.expected, up.shape[0])
    if config is not None and _streams(x_TD, up) and _streams(x_TD, low) and up.numbers == low.numbers:
        first, second = CodesProduct.of(up, up_bias, x_TD.dtype), CodesProduct.of(low, low_bias, x_TD.dtype)
        return streams_products(x_TD, first, second, routes, activation, weigh_inputs=weigh_inputs, config=config)
    if _of_codes(x_TD, routes, up) and _of_codes(x_TD, routes, low):
        first, second = CodesProduct.of(up, up_bias, x_TD.dtype), CodesProduct.of(low, low_bias, x_TD.dtype)
        few = routes.expected <= numerics.FAST.experts.lanes * up.shape[0] and serves_lanes(up) and serves_lanes(low)
        products = lanes_products if few else codes_products
        return products(x_TD, first, second, routes, activation, weigh_inputs=weigh_inputs)
    if _unpacked_before(x_TD, routes, up) and _unpacked_before(x_TD, routes, low):
        first = UnpackedProduct(up, up_bias, weigh_inputs, activation)
        return unpacked_products(x_TD, (first, UnpackedProduct(low, low_bias, not weigh_inputs)), routes)
    if _piped(x_TD, routes, up, activation) and _piped(x_TD, routes, low, activation):
        table, dtype = row_blocks(routes), x_TD.dtype
        x = _numbers(x_TD, routes, up)
        inner_PI = piped_product(x, up, up_bias, routes, table, activation, weigh=weigh_inputs, dtype=dtype)
        x = _numbers(inner_PI, routes, low)
        return piped_product(x, low, low_bias, routes, table, None, weigh=not weigh_inputs, dtype=dtype)
    inner_PI = _any_product(x_TD, up, up_bias, routes, activation, weigh=weigh_inputs)
    return _any_product(inner_PI, low, low_bias, routes, None, weigh=not weigh_inputs)


def _streams(x: torch.Tensor, weights: torch.Tensor | Stored) -> TypeGuard[Stored4]:
    """Whether `streams_products` serves such weights here."""
    return isinstance(weights, Stored4) and reads_codes(x, weights) and serves_streams(weights)


def _of_codes(x: torch.Tensor, routes: Routes, weights: torch.Tensor | Stored) -> TypeGuard[Stored4]:
    """Whether `codes_products` serves such weights, and is the fastest (docs/performance/experts.md)."""
    if not isinstance(weights, Stored4) or not reads_codes(x, weights):
        return False
    each = routes.expected / weights.shape[0]
    if each > numerics.FAST.experts.codes and unpacks(x, weights):
        return False
    return weights.numbers == "e2m1" or each > numerics.FAST.experts.few


def _piped(
    x: torch.Tensor, routes: Routes, weights: torch.Tensor | Stored, activation: GatedActivation
) -> TypeGuard[torch.Tensor | Stored8]:
    """Whether `piped_product` is the fastest kernel, and serves such weights here. Gates and ups of 8 bits in turns have scales that it doesn't know."""
    borders, dense_weights = numerics.FAST.experts, isinstance(weights, torch.Tensor)
    known = dense_weights or not activation.alternating and _rounding(x, weights) is not None
    many = routes.expected > (borders.many if dense_weights else borders.blocks) * weights.shape[0]
    return many and known and moe_piped.serves(x, weights)


def _numbers(x: torch.Tensor, routes: Routes, weights: torch.Tensor | Stored8) -> torch.Tensor | Quantized:
    """The inputs, rounded as weights of 8 bits ask."""
    rounded = None if isinstance(weights, torch.Tensor) else _rounding(x, weights)
    if rounded is None:
        return x
    many = routes.expected > numerics.FAST.experts.many * weights.shape[0]
    return (quantize_many if many else quantize)(x, rounded.dtype, grouped=rounded.grouped)


def _unpacked_before(x: torch.Tensor, routes: Routes, weights: torch.Tensor | Stored) -> TypeGuard[Stored]:
    """Whether matrices are unpacked before the product, as there are many pairs and no kernel that multiplies with their codes."""
    if isinstance(weights, torch.Tensor) or routes.expected <= numerics.FAST.experts.unpacked * weights.shape[0]:
        return False
    if _rounding(x, weights) is not None and isinstance(weights, Stored8) and fits(x, weights):
        return False
    return unpacks(x, weights)


def _any_product(
    x: torch.Tensor,
    w_EOK: torch.Tensor | Stored,
    bias_EO: torch.Tensor | None,
    routes: Routes,
    activation: GatedActivation | None,
    *,
    weigh: bool,
) -> torch.Tensor:
    """The kernel with bulk copies if it serves these weights, or another product of many pairs of each expert."""
    own = bias_EO, routes, activation
    if isinstance(w_EOK, torch.Tensor):
        return (many_product if fits(x, w_EOK) else grouped_product)(x, w_EOK, *own, weigh=weigh)
    rounded = _rounding(x, w_EOK)
    if rounded is not None and isinstance(w_EOK, Stored8) and fits(x, w_EOK):
        return many_product(_numbers(x, routes, w_EOK), w_EOK, *own, dtype=x.dtype, weigh=weigh)
    if _unpacked_before(x, routes, w_EOK):
        return unpacked_products(x, (UnpackedProduct(w_EOK, bias_EO, weigh, activation),), routes)
    return grouped_product(x, w_EOK, *own, weigh=weigh)


def _rounding(x: torch.Tensor, weights: Stored) -> Rounded | None:
    """How products of many tokens may round their input; None if they may not."""
    if not isinstance(weights, Stored8) or x.dtype == torch.float32:
        return None
    return rounding(weights._replace(codes=weights.codes[0], scales=weights.scales[0]))


def moe_experts(
    x_TD: torch.Tensor, routes: Routes, experts: ExpertWeights, residual_TD: torch.Tensor | None = None
) -> torch.Tensor:
    """See `ops/moe.py`."""
    add = residual_TD is not None
    out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format) if residual_TD is None else residual_TD
    pairs = moe_experts_then(x_TD, routes, experts, out_TD, add=add)
    if pairs is not None:
        sum_pairs(out_TD, pairs, add=add)
    return out_TD


def moe_experts_then(
    x_TD: torch.Tensor,
    routes: Routes,
    experts: ExpertWeights,
    residual_TD: torch.Tensor,
    shared: Shared | None = None,
    *,
    add: bool = True,
) -> PairSums | None:
    """See `ops/moe.py`."""
    tokens = x_TD.shape[0]
    if not tokens:
        return None
    if residual_TD.stride(1) != 1:
        raise ValueError("The residual must be dense in its features.")
    x_TD = x_TD.contiguous()
    gate_up_E2ID, down_EDI = (_readable(weights, x_TD.dtype) for weights in experts[:2])
    experts = experts._replace(gate_up_E2ID=gate_up_E2ID, down_EDI=down_EDI)
    packed = _is_packed(x_TD, routes, gate_up_E2ID, down_EDI)
    routes = _dense(routes) if packed else _ordered(routes, gate_up_E2ID.shape[0])
    joint = tokens > 1 and not packed and _is_joint(x_TD, routes, gate_up_E2ID, down_EDI, alone=shared is None)
    beside = joint or tokens == 1 and not packed
    if shared is not None and not (beside and joins(shared, gate_up_E2ID, down_EDI, x_TD.dtype)):
        add_shared_(x_TD, shared, experts.activation, residual_TD)
        shared = None
    if packed:
        pairs_products(x_TD, routes, experts, residual_TD, add=add)
        return None
    if tokens == 1:
        one_token(x_TD, routes, experts, residual_TD, shared, add=add)
        return None
    if joint:
        out_PD = joint_products(x_TD, routes, experts, shared, residual_TD)
    else:
        out_PD = _products(x_TD, routes, experts)
    return PairSums(out_PD, routes.experts_TA)


def fixed_pairs(x_TD: torch.Tensor, routes: Routes, experts: ExpertWeights) -> torch.Tensor:
    """See `ops/moe.py`. Each output is the sum of all its inputs in ascending order by one program. Matrix units have the same bits in each tile."""
    up, low, activation, up_bias, low_bias, weigh_inputs = experts
    assert isinstance(up, torch.Tensor) and isinstance(low, torch.Tensor), "numbers of codes have other sums"
    routes, x_TD = _ordered(routes, up.shape[0]), x_TD.contiguous()
    inner_PI = _fixed_product(x_TD, up, up_bias, routes, activation, weigh=weigh_inputs)
    return _fixed_product(inner_PI, low, low_bias, routes, None, weigh=not weigh_inputs)


def _fixed_product(
    x: torch.Tensor,
    w_EOK: torch.Tensor,
    bias_EO: torch.Tensor | None,
    routes: Routes,
    activation: GatedActivation | None,
    *,
    weigh: bool,
) -> torch.Tensor:
    if fits(x, w_EOK):
        return many_product(x, w_EOK, bias_EO, routes, activation, weigh=weigh)
    tile = numerics.FIXED.tile_pairs
    return grouped_product(x, w_EOK, bias_EO, routes, activation, weigh=weigh, tile_pairs=tile)


def pair_routes(
    weights_TA: torch.Tensor,
    experts_TA: torch.Tensor,
    experts: int,
    ranks: int = 1,
    order_P: torch.Tensor | None = None,
    starts_E1: torch.Tensor | None = None,
) -> Routes:
    """See `ops/moe.py`."""
    if order_P is not None:
        return _dense(Routes(weights_TA, experts_TA, order_P, starts_E1, ranks=ranks))
    routes = _ordered(Routes(weights_TA, experts_TA, ranks=ranks), experts)
    assert routes.order_P is not None, "the pairs have no order"
    # Behind the experts' pairs it says nothing, and rows are taken by it.
    return routes._replace(order_P=routes.order_P.clamp_(0, experts_TA.numel() - 1))


def pair_products(
    x: torch.Tensor, routes: Routes, weights_EOI: torch.Tensor | Stored, bias_EO: torch.Tensor | None = None
) -> torch.Tensor:
    """See `ops/moe.py`."""
    order_P, (tokens, active) = routes.order_P, routes.experts_TA.shape
    assert order_P is not None, "the routes aren't those of `pair_routes`"
    x_PI = x.index_select(0, order_P if len(x) == tokens * active else order_P // active)
    return _any_product(x_PI, _readable(weights_EOI, x.dtype), bias_EO, routes, None, weigh=False)


def _is_packed(x_TD: torch.Tensor, routes: Routes, gate_up: torch.Tensor | Stored, down: torch.Tensor | Stored) -> bool:
    """Whether these are pairs for `pairs_products`."""
    tokens, experts = routes.experts_TA.shape[0], gate_up.shape[0]
    return few_pairs(tokens, experts, routes.expected) and packs(x_TD.dtype, gate_up, down)


def _is_joint(
    x_TD: torch.Tensor, routes: Routes, gate_up: torch.Tensor | Stored, down: torch.Tensor | Stored, *, alone: bool
) -> bool:
    """Whether both products are one launch: few pairs of each expert, unless they have kernels of their own. `alone`: with nothing that all tokens pass."""
    borders, most = numerics.FAST.experts, numerics.FAST.experts.few
    if isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor):
        large = alone and x_TD.dtype.itemsize == 2 and down.shape[2] > LARGE
        most = borders.few_large if large else borders.few_plain
    few = routes.expected <= most * gate_up.shape[0]
    return few and not (_of_codes(x_TD, routes, gate_up) and _of_codes(x_TD, routes, down))


def _readable(weights: torch.Tensor | Stored, dtype: torch.dtype) -> torch.Tensor | Stored:
    """The weights, unpacked in the rare forms that the kernels don't read."""
    if serves(weights):
        return weights
    return weights.contiguous() if isinstance(weights, torch.Tensor) else dense(weights, dtype)


def moe_experts_kernels(tokens: int, experts: int, active: int, ranks: int) -> tuple[Hashable, ...]:
    """See `Op.kernels_for`: everything that products choose by, whatever form the weights have. The experts are one of so many `ranks`'."""
    pairs = -(-tokens * active // ranks)
    each = pairs / experts
    few = (
        tokens == 1,
        few_pairs(tokens, experts, pairs),
        each <= numerics.FAST.experts.few,
        each <= numerics.FAST.experts.few_plain,
    )
    joint = (
        (is_full(pairs, experts), are_few(pairs, experts), tokens <= MOST_ROWS)
        if each <= numerics.FAST.experts.few_plain
        else ()
    )
    own = numerics.FAST.experts
    ways = *few, joint, *(each > most for most in (own.few_large, own.unpacked, own.codes, own.blocks))
    many = (many_config(pairs, experts, 1024, rounded, gated) for rounded in (False, True) for gated in (False, True))
    codes = (codes_config(pairs, experts, form.value) for form in (INT4, E2M1))
    fours = each <= numerics.FAST.experts.lanes, streams_config(pairs, experts)
    return *ways, *fours, most_pairs(pairs, experts), *codes, *many


def _dense(routes: Routes) -> Routes:
    """The routes as kernels read them."""
    return routes._replace(weights_TA=routes.weights_TA.float().contiguous(), experts_TA=routes.experts_TA.contiguous())


def _ordered(routes: Routes, experts: int) -> Routes:
    """Dense routes with the order of their pairs."""
    routes = _dense(routes)
    if routes.order_P is None:
        ordered = order_pairs(routes.experts_TA, experts, routes.ranks)
        return Routes(routes.weights_TA, routes.experts_TA, *ordered, routes.ranks)
    return routes
