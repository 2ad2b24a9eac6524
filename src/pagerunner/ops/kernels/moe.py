"""Mixtures of experts as grouped matrix products; see `ops/moe.py`. Nothing here waits for the device.

Pairs of token and expert are ordered by expert; each tile of the products belongs to one expert. How many tiles there are
is known on the device only, so the grid is the largest number there can be, and surplus programs leave at once.
The first product computes gates and ups and stores what the activation makes of them. Shape letters as in `ops/moe.py`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeGuard

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagerunner.ops.activation import GatedActivation
from pagerunner.ops.kernels.activation import CLAMPED_SWIGLU
from pagerunner.ops.kernels.codes import E2M1, INT4
from pagerunner.ops.kernels.launch import blocks, dependent, padded
from pagerunner.ops.kernels.linear_rounded import Rounded, rounding
from pagerunner.ops.kernels.moe_codes import CodesProduct, codes_config, codes_products, reads_codes
from pagerunner.ops.kernels.moe_many import MANY_PAIRS, fits, many_config, many_product, unpacked_product, unpacks
from pagerunner.ops.kernels.moe_one import one_token
from pagerunner.ops.kernels.moe_packed import few_pairs, packs, pairs_products
from pagerunner.ops.kernels.moe_routing import order_pairs
from pagerunner.ops.kernels.moe_tiles import (
    add_step,
    find_tile,
    finish,
    kind_of,
    row_factors,
    serves,
    stored_args,
)
from pagerunner.ops.kernels.pair_sums import sum_pairs
from pagerunner.ops.kernels.quantize import quantize_many
from pagerunner.ops.moe import STEP
from pagerunner.ops.pair_sums import PairSums
from pagerunner.ops.quantize import quantize
from pagerunner.ops.routing import Routes
from pagerunner.ops.stored import Stored, Stored4, Stored8, dense
from pagerunner.ops.unpacked import WORTH_UNPACKING

MOST_FEW = 16
"""Pairs of an expert, on average, up to which reading the weights takes the time."""

MOST_OF_CODES = 256
"""Pairs of an expert, on average, up to which `codes_products` is faster than unpacking. It is more than WORTH_UNPACKING, so plans count enough."""


@triton.jit(do_not_specialize=["active"])
def _grouped_kernel(x_ptr, w_ptr, s_ptr, z_ptr, r_ptr, w_expert, s_expert, bias_ptr, weights_ptr, order_ptr, starts_ptr,
                    out_ptr, active, limit, E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BE: tl.constexpr,
                    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr, WORDS: tl.constexpr,
                    G: tl.constexpr, BO: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr,
                    FACTORS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr,
                    WEIGH: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BM pairs of one expert times BN of its N features.

    The first product (GATED) reads tokens' rows and stores what the activation makes of BN gates and ups, in expert order. The second
    product reads these rows and stores pairs in the tokens' order. WEIGH: results are multiplied by the pairs' weights.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    step: tl.constexpr = 2 if KIND == CLAMPED_SWIGLU else 1
    ups: tl.constexpr = 1 if KIND == CLAMPED_SWIGLU else N
    outputs: tl.constexpr = 2 * N if GATED else N
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    FOUR: tl.constexpr = FORM == INT4 or FORM == E2M1
    expert, first_row, last_row = find_tile(starts_ptr, tl.program_id(0), E, BE, BM)
    if expert < E:
        rows = first_row + tl.arange(0, BM)
        valid = rows < last_row
        pairs = tl.load(order_ptr + rows, mask=valid, other=0)
        source = (pairs // active if GATED else rows).to(tl.int64)
        features = tl.program_id(1) * BN + tl.arange(0, BN)
        live = features < N
        w_rows = features * step if GATED else features
        wide = expert.to(tl.int64)
        w, s, z, r = w_ptr + wide * w_expert, s_ptr + wide * s_expert, z_ptr + wide * s_expert, r_ptr + expert * outputs
        i = tl.arange(0, BK // 2 if FOUR else BK)
        cols = i // 16 * 32 + i % 16 if FOUR else i
        x_place = x_ptr + source[:, None] * K + cols[None, :]
        acc = tl.zeros((BM, BN), tl.float32)
        up = acc
        for first in range(0, K, BK):
            x = tl.load(x_place + first, mask=valid[:, None] & (cols < K - first)[None, :], other=0.0)
            x_high = x
            if FOUR:
                x_high = tl.load(x_place + first + 16, mask=valid[:, None] & (cols < K - first)[None, :], other=0.0)
            acc = add_step(acc, x, x_high, w, s, z, w_rows, live, first, K, G, BO, BK, FORM, WORDS, SCALES, ZEROS)
            if GATED:
                up = add_step(
                    up, x, x_high, w, s, z, w_rows + ups, live, first, K, G, BO, BK, FORM, WORDS, SCALES, ZEROS
                )
        acc = row_factors(acc, s, r, w_rows, live, BO, FORM, SCALES, FACTORS)
        if GATED:
            up = row_factors(up, s, r, w_rows + ups, live, BO, FORM, SCALES, FACTORS)
        y = finish(acc, up, bias_ptr + expert * outputs, weights_ptr, pairs, valid, w_rows, live, ups, limit, dtype,
                   BIAS, GATED, KIND, WEIGH)  # fmt: skip
        target = (rows if GATED else pairs).to(tl.int64)
        tl.store(out_ptr + target[:, None] * N + features[None, :], y, mask=valid[:, None] & live[None, :])


def _most_pairs(pairs: int, experts: int) -> int:
    """Pairs of a tile, by measurement (docs/performance.md)."""
    each = pairs / experts
    return 16 if each <= MOST_FEW else 64 if each <= 128 else 128


def _product(
    x: torch.Tensor,
    w_EOK: torch.Tensor | Stored,
    bias_EO: torch.Tensor | None,
    routes: Routes,
    activation: GatedActivation | None,
    *,
    weigh: bool,
) -> torch.Tensor:
    """The first product if there is an activation, [P, I] in expert order; else the second one, [P, D] in the tokens' order."""
    assert routes.order_P is not None and routes.starts_E1 is not None, "the pairs have no order"
    experts, outputs, inputs = w_EOK.shape
    features = outputs if activation is None else outputs // 2
    pairs, active = routes.order_P.shape[0], routes.experts_TA.shape[1]
    bm = _most_pairs(pairs, experts)
    bn, bk, warps, stages = {16: (64, 128, 4, 3), 64: (128, 64, 4, 3), 128: (256, 64, 8, 3)}[bm]
    tensors, constants = stored_args(w_EOK, x.dtype)
    if not isinstance(w_EOK, torch.Tensor):
        bn, bk = 64, STEP
    elif activation is not None and bm > 16:
        bn //= 2
    tiles = min(pairs, pairs // bm + min(experts, pairs))
    out = torch.empty(pairs, features, dtype=x.dtype, device=x.device)
    _grouped_kernel[(tiles, blocks(features, bn))](
        x, *tensors, x if bias_EO is None else bias_EO, routes.weights_TA, routes.order_P, routes.starts_E1, out,
        active, 0.0 if activation is None else activation.limit, E=experts, N=features, K=inputs, BE=padded(experts),
        BM=bm, BN=min(bn, max(16, padded(features))), BK=min(bk, max(32, padded(inputs))), BIAS=bias_EO is not None,
        GATED=activation is not None, KIND=kind_of(activation), WEIGH=weigh, num_warps=warps, num_stages=stages,
        **constants, **dependent(x.device),
    )  # fmt: skip
    return out


def _products(
    x_TD: torch.Tensor,
    routes: Routes,
    gate_up: tuple[torch.Tensor | Stored, torch.Tensor | None],
    down: tuple[torch.Tensor | Stored, torch.Tensor | None],
    activation: GatedActivation,
    *,
    weigh_inputs: bool,
) -> torch.Tensor:
    """Both products, [P, D] in the tokens' order. Weights come with their biases."""
    (up, up_bias), (low, low_bias) = gate_up, down
    if _of_codes(x_TD, routes, up) and _of_codes(x_TD, routes, low):
        first, second = CodesProduct.of(up, up_bias, x_TD.dtype), CodesProduct.of(low, low_bias, x_TD.dtype)
        return codes_products(x_TD, first, second, routes, activation, weigh_inputs=weigh_inputs)
    inner_PI = _any_product(x_TD, *gate_up, routes, activation, weigh=weigh_inputs)
    return _any_product(inner_PI, *down, routes, None, weigh=not weigh_inputs)


def _of_codes(x: torch.Tensor, routes: Routes, weights: torch.Tensor | Stored) -> TypeGuard[Stored4]:
    """Whether `codes_products` serves such weights, and is the fastest (docs/performance.md)."""
    if not isinstance(weights, Stored4) or not reads_codes(x, weights):
        return False
    each = routes.experts_TA.numel() / weights.shape[0]
    if each > MOST_OF_CODES and unpacks(x, weights):
        return False
    return weights.numbers == "e2m1" or each > MOST_FEW


def _any_product(
    x: torch.Tensor,
    w_EOK: torch.Tensor | Stored,
    bias_EO: torch.Tensor | None,
    routes: Routes,
    activation: GatedActivation | None,
    *,
    weigh: bool,
) -> torch.Tensor:
    """`_product`, or for many pairs of each expert the kernel with bulk copies if it serves these weights."""
    experts = w_EOK.shape[0]
    own = bias_EO, routes, activation
    if routes.experts_TA.numel() <= MOST_FEW * experts:
        return _product(x, w_EOK, *own, weigh=weigh)
    if isinstance(w_EOK, torch.Tensor):
        return (many_product if fits(x, w_EOK) else _product)(x, w_EOK, *own, weigh=weigh)
    rounded = _rounding(x, w_EOK)
    if rounded is not None and isinstance(w_EOK, Stored8) and fits(x, w_EOK):
        many = routes.experts_TA.numel() > MANY_PAIRS * experts
        numbers = (quantize_many if many else quantize)(x, rounded.dtype, grouped=rounded.grouped)
        return many_product(numbers, w_EOK, *own, dtype=x.dtype, weigh=weigh)
    if routes.experts_TA.numel() > WORTH_UNPACKING * experts and unpacks(x, w_EOK):
        return unpacked_product(x, w_EOK, *own, weigh=weigh)
    return _product(x, w_EOK, *own, weigh=weigh)


def _rounding(x: torch.Tensor, weights: Stored) -> Rounded | None:
    """How products of many tokens may round their input; None if they may not."""
    if not isinstance(weights, Stored8) or x.dtype == torch.float32:
        return None
    return rounding(weights._replace(codes=weights.codes[0], scales=weights.scales[0]))


def moe_experts(
    x_TD: torch.Tensor,
    routes: Routes,
    gate_up_E2ID: torch.Tensor | Stored,
    down_EDI: torch.Tensor | Stored,
    activation: GatedActivation,
    gate_up_bias_E2I: torch.Tensor | None = None,
    down_bias_ED: torch.Tensor | None = None,
    *,
    weigh_inputs: bool = False,
    residual_TD: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ops/moe.py`."""
    add = residual_TD is not None
    out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format) if residual_TD is None else residual_TD
    weights = gate_up_E2ID, down_EDI, activation, gate_up_bias_E2I, down_bias_ED
    pairs = _run(x_TD, routes, *weights, out_TD, weigh_inputs=weigh_inputs, add=add)
    if pairs is not None:
        sum_pairs(out_TD, pairs, add=add)
    return out_TD


def moe_experts_then(
    x_TD: torch.Tensor,
    routes: Routes,
    gate_up_E2ID: torch.Tensor | Stored,
    down_EDI: torch.Tensor | Stored,
    activation: GatedActivation,
    gate_up_bias_E2I: torch.Tensor | None = None,
    down_bias_ED: torch.Tensor | None = None,
    *,
    residual_TD: torch.Tensor,
    weigh_inputs: bool = False,
) -> PairSums | None:
    """See `ops/moe.py`."""
    weights = gate_up_E2ID, down_EDI, activation, gate_up_bias_E2I, down_bias_ED
    return _run(x_TD, routes, *weights, residual_TD, weigh_inputs=weigh_inputs, add=True)


def _run(
    x_TD: torch.Tensor,
    routes: Routes,
    gate_up_E2ID: torch.Tensor | Stored,
    down_EDI: torch.Tensor | Stored,
    activation: GatedActivation,
    gate_up_bias_E2I: torch.Tensor | None,
    down_bias_ED: torch.Tensor | None,
    out_TD: torch.Tensor,
    *,
    weigh_inputs: bool,
    add: bool,
) -> PairSums | None:
    """Write the experts' sums into `out`, or add them; or return what is to be added up."""
    tokens = x_TD.shape[0]
    if not tokens:
        return None
    if out_TD.stride(1) != 1:
        raise ValueError("The residual must be dense in its features.")
    x_TD = x_TD.contiguous()
    gate_up_E2ID, down_EDI = _readable(gate_up_E2ID, x_TD.dtype), _readable(down_EDI, x_TD.dtype)
    if few_pairs(tokens, gate_up_E2ID.shape[0], routes.experts_TA.shape[1]) and packs(
        x_TD.dtype, gate_up_E2ID, down_EDI
    ):
        assert isinstance(gate_up_E2ID, Stored4) and isinstance(down_EDI, Stored4)
        routes = _dense(routes)
        own = x_TD, routes, gate_up_E2ID, down_EDI, activation, gate_up_bias_E2I, down_bias_ED, out_TD
        pairs_products(*own, weigh_inputs=weigh_inputs, add=add)
        return None
    routes = _ordered(routes, gate_up_E2ID.shape[0])
    if tokens == 1:
        own = x_TD, routes, gate_up_E2ID, down_EDI, activation, gate_up_bias_E2I, down_bias_ED, out_TD
        one_token(*own, weigh_inputs=weigh_inputs, add=add)
        return None
    out_PD = _products(
        x_TD,
        routes,
        (gate_up_E2ID, gate_up_bias_E2I),
        (down_EDI, down_bias_ED),
        activation,
        weigh_inputs=weigh_inputs,
    )
    return PairSums(out_PD, routes.experts_TA)


def _readable(weights: torch.Tensor | Stored, dtype: torch.dtype) -> torch.Tensor | Stored:
    """The weights, unpacked in the rare forms that the kernels don't read."""
    if serves(weights):
        return weights
    return weights.contiguous() if isinstance(weights, torch.Tensor) else dense(weights, dtype)


def moe_experts_kernels(tokens: int, experts: int, active: int) -> tuple[Hashable, ...]:
    """See `Op.kernels_for`: everything that products choose by, whatever form the weights have."""
    pairs = tokens * active
    each = pairs / experts
    few = tokens == 1, few_pairs(tokens, experts, active), each <= MOST_FEW
    ways = *few, each > WORTH_UNPACKING, each > MOST_OF_CODES
    many = (many_config(pairs, experts, 1024, rounded, gated) for rounded in (False, True) for gated in (False, True))
    codes = (codes_config(pairs, experts, form.value) for form in (INT4, E2M1))
    return *ways, _most_pairs(pairs, experts), *codes, *many


def _dense(routes: Routes) -> Routes:
    """The routes as kernels read them."""
    return routes._replace(weights_TA=routes.weights_TA.float().contiguous(), experts_TA=routes.experts_TA.contiguous())


def _ordered(routes: Routes, experts: int) -> Routes:
    """Dense routes with the order of their pairs."""
    routes = _dense(routes)
    if routes.order_P is None:
        return Routes(routes.weights_TA, routes.experts_TA, *order_pairs(routes.experts_TA, experts))
    return routes
