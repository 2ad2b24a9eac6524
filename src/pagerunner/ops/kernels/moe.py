"""Mixtures of experts as grouped matrix products; see `ops/moe.py`. Nothing here waits for the device.

Pairs of token and expert are ordered by expert; each tile of the products belongs to one expert. How many tiles there are
is known on the device only, so the grid is the largest number there can be, and surplus programs leave at once.
Shape letters as in `ops/moe.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import blocks, padded


@triton.jit(do_not_specialize=["num_pairs"])
def _order_kernel(experts_ptr, order_ptr, starts_ptr, num_pairs, BLOCK: tl.constexpr):
    """Program e places expert e's pairs, in their own order, behind those of all smaller experts."""
    expert = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    smaller = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_pairs, BLOCK):
        mask = first + index < num_pairs
        ids = tl.load(experts_ptr + first + index, mask=mask, other=0).to(tl.int32)
        smaller += (mask & (ids < expert)).to(tl.int32)
    place = tl.sum(smaller, 0)
    tl.store(starts_ptr + expert, place)
    for first in range(0, num_pairs, BLOCK):
        mask = first + index < num_pairs
        ids = tl.load(experts_ptr + first + index, mask=mask, other=0).to(tl.int32)
        own = (mask & (ids == expert)).to(tl.int32)
        rank = tl.cumsum(own, 0) - own
        tl.store(order_ptr + place + rank, first + index, mask=own != 0)
        place += tl.sum(own, 0)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts_ptr + expert + 1, place)


@triton.jit(do_not_specialize=["active"])
def _grouped_kernel(x_ptr, w_ptr, bias_ptr, weights_ptr, order_ptr, starts_ptr, out_ptr, active, w_expert, w_feature,
                    E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
                    BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, LAST: tl.constexpr):  # fmt: skip
    """BM pairs of one expert times BN of its features.

    The first product reads tokens' rows and stores pairs in expert order. The second product (LAST) reads the pairs, multiplies
    them by their weights, and stores them in the tokens' order.
    """
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
        source = rows.to(tl.int64) if LAST else (pairs // active).to(tl.int64)
        features = tl.program_id(1) * BN + tl.arange(0, BN)
        live = features < N
        cols = tl.arange(0, BK)
        x_place = x_ptr + source[:, None] * K + cols[None, :]
        w_place = w_ptr + expert.to(tl.int64) * w_expert + features[None, :].to(tl.int64) * w_feature + cols[:, None]
        acc = tl.zeros((BM, BN), tl.float32)
        for first in range(0, K, BK):
            inside = cols < K - first
            x = tl.load(x_place + first, mask=valid[:, None] & inside[None, :], other=0.0)
            w = tl.load(w_place + first, mask=inside[:, None] & live[None, :], other=0.0)
            acc = tl.dot(x, w, acc, input_precision="ieee")
        if BIAS:
            acc += tl.load(bias_ptr + expert * N + features, mask=live, other=0.0).to(tl.float32)[None, :]
        dtype = out_ptr.dtype.element_ty
        y = acc.to(dtype)
        if LAST:
            weights = tl.load(weights_ptr + pairs, mask=valid, other=0.0).to(tl.float32)
            y = (y.to(tl.float32) * weights[:, None]).to(dtype)
            target = pairs.to(tl.int64)
        else:
            target = rows.to(tl.int64)
        tl.store(out_ptr + target[:, None] * N + features[None, :], y, mask=valid[:, None] & live[None, :])


@triton.jit
def _sum_kernel(pairs_ptr, experts_ptr, out_ptr, features, A: tl.constexpr, BA: tl.constexpr, BLOCK: tl.constexpr):
    """Add up a token's pairs in the order of their experts."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < features
    index = tl.arange(0, BA)
    ids = tl.load(experts_ptr + token * A + index, mask=index < A, other=2147483647).to(tl.int64) * BA + index
    acc = tl.zeros((BLOCK,), tl.float32)
    for _ in range(A):
        lowest = tl.min(ids, 0)
        pair = token * A + lowest % BA
        acc += tl.load(pairs_ptr + pair * features + cols, mask=mask, other=0.0).to(tl.float32)
        ids = tl.where(ids == lowest, 9223372036854775807, ids)
    tl.store(out_ptr + token * features + cols, acc.to(out_ptr.dtype.element_ty), mask=mask)


def _product(
    x: torch.Tensor,
    w_ENK: torch.Tensor,
    bias_EN: torch.Tensor | None,
    weights_TA: torch.Tensor | None,
    order_P: torch.Tensor,
    starts_E1: torch.Tensor,
    active: int,
) -> torch.Tensor:
    experts, features, inputs = w_ENK.shape
    pairs = order_P.shape[0]
    per_expert = pairs / experts
    bm = 16 if per_expert <= 16 else 64 if per_expert <= 128 else 128
    bn, bk = {16: (64, 128), 64: (128, 64), 128: (256, 64)}[bm]
    tiles = min(pairs, pairs // bm + min(experts, pairs))
    out = torch.empty(pairs, features, dtype=x.dtype, device=x.device)
    _grouped_kernel[(tiles, blocks(features, bn))](
        x, w_ENK, x if bias_EN is None else bias_EN, x if weights_TA is None else weights_TA, order_P, starts_E1, out,
        active, w_ENK.stride(0), w_ENK.stride(1), E=experts, N=features, K=inputs, BE=padded(experts), BM=bm,
        BN=min(bn, max(16, padded(features))), BK=min(bk, max(16, padded(inputs))), BIAS=bias_EN is not None,
        LAST=weights_TA is not None, num_warps=8 if bm == 128 else 4, num_stages=4 if bm == 16 else 3,
    )  # fmt: skip
    return out


def moe_experts(
    x_TD: torch.Tensor,
    weights_TA: torch.Tensor,
    experts_TA: torch.Tensor,
    gate_up_E2ID: torch.Tensor,
    down_EDI: torch.Tensor,
    activation: Callable[[torch.Tensor], torch.Tensor],
    gate_up_bias_E2I: torch.Tensor | None = None,
    down_bias_ED: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ops/moe.py`."""
    tokens, active = experts_TA.shape
    out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    if not tokens:
        return out_TD
    if gate_up_E2ID.stride(2) != 1 or down_EDI.stride(2) != 1:
        raise ValueError("The experts' matrices must be dense in their input features.")
    x_TD, experts_TA, weights_TA = x_TD.contiguous(), experts_TA.contiguous(), weights_TA.contiguous()
    experts, pairs, device = gate_up_E2ID.shape[0], tokens * active, x_TD.device
    order_P = torch.empty(pairs, dtype=torch.int32, device=device)
    starts_E1 = torch.empty(experts + 1, dtype=torch.int32, device=device)
    _order_kernel[(experts,)](experts_TA, order_P, starts_E1, pairs, BLOCK=2048 if pairs > 256 else 256)
    gate_up_P2I = _product(x_TD, gate_up_E2ID, gate_up_bias_E2I, None, order_P, starts_E1, active)
    inner_PI = activation(gate_up_P2I)
    out_PD = _product(inner_PI, down_EDI, down_bias_ED, weights_TA, order_P, starts_E1, active)
    features = x_TD.shape[1]
    block = min(1024, padded(features))
    _sum_kernel[(tokens, blocks(features, block))](
        out_PD, experts_TA, out_TD, features, A=active, BA=padded(active), BLOCK=block
    )
    return out_TD
