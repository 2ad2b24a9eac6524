"""Mixtures of experts as grouped matrix products; see `ops/moe.py`. Nothing here waits for the device.

Pairs of token and expert are ordered by expert; each tile of the products belongs to one expert. How many tiles there are
is known on the device only, so the grid is the largest number there can be, and surplus programs leave at once.
The first product computes gates and ups and stores what the activation makes of them. Shape letters as in `ops/moe.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagerunner.ops.activation import GatedActivation
from pagerunner.ops.kernels import activation as kinds
from pagerunner.ops.kernels.activation import gated
from pagerunner.ops.kernels.launch import blocks, dependent, padded
from pagerunner.ops.kernels.moe_routing import order_pairs
from pagerunner.ops.linear import matrix
from pagerunner.ops.routing import Routes
from pagerunner.ops.stored import Stored

_KINDS = {
    "silu": kinds.SILU,
    "clamped_swiglu": kinds.CLAMPED_SWIGLU,
    "limited_silu": kinds.LIMITED_SILU,
}


@triton.jit(do_not_specialize=["active"])
def _grouped_kernel(x_ptr, w_ptr, bias_ptr, weights_ptr, order_ptr, starts_ptr, out_ptr, active, w_expert, w_feature,
                    limit, E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
                    BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr,
                    WEIGH: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BM pairs of one expert times BN of its N features.

    The first product (GATED) reads tokens' rows and stores what the activation makes of BN gates and ups, in expert order. The second
    product reads these rows and stores pairs in the tokens' order. WEIGH: results are multiplied by the pairs' weights.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    step: tl.constexpr = 2 if KIND == 2 else 1
    ups: tl.constexpr = 1 if KIND == 2 else N
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    experts = tl.arange(0, BE)
    starts = tl.load(starts_ptr + experts, mask=experts < E, other=0)
    ends = tl.load(starts_ptr + 1 + experts, mask=experts < E, other=0)
    tiles = (ends - starts + BM - 1) // BM
    tiles_end = tl.cumsum(tiles, 0)
    tile = tl.program_id(0)
    expert = tl.sum(((tiles_end <= tile) & (experts < E)).to(tl.int32), 0)
    if expert < E:
        own = experts == expert
        tile -= tl.sum(tl.where(own, tiles_end - tiles, 0), 0)
        last_row = tl.sum(tl.where(own, ends, 0), 0)
        rows = tl.sum(tl.where(own, starts, 0), 0) + tile * BM + tl.arange(0, BM)
        valid = rows < last_row
        pairs = tl.load(order_ptr + rows, mask=valid, other=0)
        source = (pairs // active).to(tl.int64) if GATED else rows.to(tl.int64)
        features = tl.program_id(1) * BN + tl.arange(0, BN)
        live = features < N
        w_rows = features * step if GATED else features
        cols = tl.arange(0, BK)
        x_place = x_ptr + source[:, None] * K + cols[None, :]
        w_place = w_ptr + expert.to(tl.int64) * w_expert + w_rows[None, :].to(tl.int64) * w_feature + cols[:, None]
        up_place = w_place + ups * w_feature
        acc = tl.zeros((BM, BN), tl.float32)
        up = acc
        for first in range(0, K, BK):
            inside = cols < K - first
            x = tl.load(x_place + first, mask=valid[:, None] & inside[None, :], other=0.0)
            w = tl.load(w_place + first, mask=inside[:, None] & live[None, :], other=0.0)
            acc = tl.dot(x, w, acc, input_precision="ieee")
            if GATED:
                u = tl.load(up_place + first, mask=inside[:, None] & live[None, :], other=0.0)
                up = tl.dot(x, u, up, input_precision="ieee")
        if WEIGH:
            weights = tl.load(weights_ptr + pairs, mask=valid, other=0.0)
        if GATED and WEIGH:
            acc *= weights[:, None]
            up *= weights[:, None]
        if BIAS:
            bias_place = bias_ptr + expert * (2 * N if GATED else N) + w_rows
            acc += tl.load(bias_place, mask=live, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(bias_place + ups, mask=live, other=0.0).to(tl.float32)[None, :]
        if GATED:
            y = gated(acc.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), limit, KIND, dtype)
            target = rows.to(tl.int64)
        else:
            if WEIGH:
                acc *= weights[:, None]
            y = acc.to(dtype)
            target = pairs.to(tl.int64)
        tl.store(out_ptr + target[:, None] * N + features[None, :], y, mask=valid[:, None] & live[None, :])


@triton.jit
def _sum_kernel(pairs_ptr, experts_ptr, out_ptr, features, out_stride, A: tl.constexpr, BA: tl.constexpr,
                BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Add up a token's pairs in the order of their experts. ADD: to what `out` holds."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < features
    index = tl.arange(0, BA)
    ids = tl.load(experts_ptr + token * A + index, mask=index < A, other=2147483647).to(tl.int64) * BA + index
    place = out_ptr + token * out_stride + cols
    if ADD:
        old = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    acc = tl.zeros((BLOCK,), tl.float32)
    for _ in range(A):
        lowest = tl.min(ids, 0)
        pair = token * A + lowest % BA
        acc += tl.load(pairs_ptr + pair * features + cols, mask=mask, other=0.0).to(tl.float32)
        ids = tl.where(ids == lowest, 9223372036854775807, ids)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if ADD:
        acc = acc.to(dtype).to(tl.float32) + old
    tl.store(place, acc.to(dtype), mask=mask)


def _product(
    x: torch.Tensor,
    w_EOK: torch.Tensor,
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
    per_expert = pairs / experts
    bm = 16 if per_expert <= 16 else 64 if per_expert <= 128 else 128
    bn, bk = {16: (64, 128), 64: (128, 64), 128: (256, 64)}[bm]
    if activation is not None:
        bn //= 2
    tiles = min(pairs, pairs // bm + min(experts, pairs))
    out = torch.empty(pairs, features, dtype=x.dtype, device=x.device)
    _grouped_kernel[(tiles, blocks(features, bn))](
        x, w_EOK, x if bias_EO is None else bias_EO, routes.weights_TA, routes.order_P, routes.starts_E1, out,
        active, w_EOK.stride(0), w_EOK.stride(1), 0.0 if activation is None else activation.limit, E=experts,
        N=features, K=inputs, BE=padded(experts), BM=bm, BN=min(bn, max(16, padded(features))),
        BK=min(bk, max(16, padded(inputs))), BIAS=bias_EO is not None, GATED=activation is not None,
        KIND=0 if activation is None else _KINDS[activation.kind], WEIGH=weigh,
        num_warps=8 if bm == 128 else 4, num_stages=4 if bm == 16 else 3, **dependent(x.device),
    )  # fmt: skip
    return out


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
    tokens, active = routes.experts_TA.shape
    out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format) if residual_TD is None else residual_TD
    if not tokens:
        return out_TD
    gate_up_E2ID, down_EDI = matrix(gate_up_E2ID, x_TD.dtype), matrix(down_EDI, x_TD.dtype)
    if gate_up_E2ID.stride(2) != 1 or down_EDI.stride(2) != 1 or out_TD.stride(1) != 1:
        raise ValueError(
            "The experts' matrices must be dense in their input features, and the residual in its features."
        )
    x_TD, routes = x_TD.contiguous(), _ordered(routes, gate_up_E2ID.shape[0])
    inner_PI = _product(x_TD, gate_up_E2ID, gate_up_bias_E2I, routes, activation, weigh=weigh_inputs)
    out_PD = _product(inner_PI, down_EDI, down_bias_ED, routes, None, weigh=not weigh_inputs)
    features = x_TD.shape[1]
    block = min(1024, padded(features))
    _sum_kernel[(tokens, blocks(features, block))](
        out_PD, routes.experts_TA, out_TD, features, out_TD.stride(0), A=active, BA=padded(active), BLOCK=block,
        ADD=residual_TD is not None, **dependent(x_TD.device),
    )  # fmt: skip
    return out_TD


def _ordered(routes: Routes, experts: int) -> Routes:
    """Dense routes with the order of their pairs."""
    weights_TA, experts_TA = routes.weights_TA.float().contiguous(), routes.experts_TA.contiguous()
    if routes.order_P is None:
        return Routes(weights_TA, experts_TA, *order_pairs(experts_TA, experts))
    return routes._replace(weights_TA=weights_TA, experts_TA=experts_TA)
