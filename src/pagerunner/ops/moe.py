"""Mixtures of experts: scoring them for every token, and running every token through those that it was sent to.

Shape letters: T tokens, D features, E experts, A active experts of a token, I an expert's inner features, P the T * A
pairs of a token and an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from pagerunner.ops.activation import SILU, GatedActivation
from pagerunner.ops.dispatch import gpu_kernel
from pagerunner.ops.linear import linear, linear_add_, norm_linear_silu
from pagerunner.ops.pair_sums import PairSums
from pagerunner.ops.routing import Routes
from pagerunner.ops.stored import RUN, Stored, Stored8, dense

STEP = 128
"""Columns that the GPU's kernels read at a time."""


def reads_groups(weights: Stored) -> bool:
    """Whether the GPU's kernels read experts whose scales belong to groups of so many columns. Others are unpacked at every call."""
    inputs, group = weights.shape[-1], weights.block[1] if isinstance(weights, Stored8) else weights.group
    if group >= inputs or group % STEP == 0:
        return True
    return not isinstance(weights, Stored8) and group in (RUN // 2, RUN, 2 * RUN)


class Shared(NamedTuple):
    """A feed-forward that every token passes beside its experts, with their activation: gates above ups [2 S, D], and [D, S]."""

    gate_up_2SD: torch.Tensor | Stored
    down_DS: torch.Tensor | Stored


class ExpertWeights(NamedTuple):
    """All experts of a mixture, whose matrices are gates above ups and what follows them, with their biases. `activation` is between both products.

    With `weigh_inputs` the experts' inputs are weighted instead of their outputs.
    """

    gate_up_E2ID: torch.Tensor | Stored
    down_EDI: torch.Tensor | Stored
    activation: GatedActivation
    gate_up_bias_E2I: torch.Tensor | None = None
    down_bias_ED: torch.Tensor | None = None
    weigh_inputs: bool = False


def add_shared_(x_TD: torch.Tensor, shared: Shared, activation: GatedActivation, residual_TD: torch.Tensor) -> None:
    """Add the output of `shared` to `residual` in place."""
    if activation == SILU:
        inner = norm_linear_silu(x_TD, None, shared.gate_up_2SD)
    else:
        inner = activation(linear(x_TD, shared.gate_up_2SD))
    linear_add_(inner, shared.down_DS, residual_TD)


@gpu_kernel("moe.moe")
def moe_experts(
    x_TD: torch.Tensor, routes: Routes, experts: ExpertWeights, residual_TD: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum over a token's experts of `weight * down(activation(gate_up(x)))`, [T, D]. It is added to `residual` in place if there is one.

    Tokens are grouped by expert: one pair of matrix products for each expert that any token chose, over all of its tokens. A token's
    experts are added up in the order of their numbers, whatever else is in the batch.
    """

    def run(x_PD: torch.Tensor, counts_E: list[int]) -> torch.Tensor:
        out_PD, first = torch.empty_like(x_PD), 0
        for expert, count in enumerate(counts_E):
            if count:
                chosen = slice(first, first + count)
                out_PD[chosen] = _one_expert(x_PD[chosen], experts, expert)
                first += count
        return out_PD

    count, weigh_inputs = experts.gate_up_E2ID.shape[0], experts.weigh_inputs
    out_TD = sum_of_pairs(x_TD, routes, count, run, weigh_inputs=weigh_inputs)
    return out_TD if residual_TD is None else residual_TD.add_(out_TD)


@gpu_kernel("moe.moe")
def moe_experts_then(
    x_TD: torch.Tensor,
    routes: Routes,
    experts: ExpertWeights,
    residual_TD: torch.Tensor,
    shared: Shared | None = None,
    *,
    add: bool = True,
) -> PairSums | None:
    """As `moe_experts`, added to `residual` in place; or what is still to be added to it, where a kernel behind this one can do that on its way.

    The output of `shared` is added in any case. Without `add` the experts' sums replace what the residual holds, or what is returned does, added up.
    """
    if not add:
        residual_TD.zero_()
    if shared is not None:
        add_shared_(x_TD, shared, experts.activation, residual_TD)
    moe_experts.twin(x_TD, routes, experts, residual_TD)
    return None


@gpu_kernel("moe.moe")
def fixed_pairs(x_TD: torch.Tensor, routes: Routes, experts: ExpertWeights) -> torch.Tensor:
    """Each pair's part of the sum that `moe_experts` computes, [P, D], in the tokens' order: each as if it were alone. A pair without an expert may get anything."""
    active = routes.experts_TA.shape[1]
    out_PD = x_TD.new_zeros(routes.experts_TA.numel(), x_TD.shape[1])
    for pair, expert in enumerate(routes.experts_TA.flatten().tolist()):
        if expert < 0:
            continue
        x_1D, weight = x_TD[pair // active][None], routes.weights_TA.flatten()[pair].to(x_TD.dtype)
        out_1D = _one_expert(x_1D * weight if experts.weigh_inputs else x_1D, experts, expert)
        out_PD[pair] = out_1D[0] if experts.weigh_inputs else out_1D[0] * weight
    return out_PD


@gpu_kernel("moe.moe")
def pair_routes(
    weights_TA: torch.Tensor,
    experts_TA: torch.Tensor,
    experts: int,
    ranks: int = 1,
    order_P: torch.Tensor | None = None,
    starts_E1: torch.Tensor | None = None,
) -> Routes:
    """Routes to so many experts as several `pair_products` take them, whose order kernels find once, unless it is given; then there are no tiles."""
    return Routes(weights_TA, experts_TA, order_P, starts_E1, ranks=ranks)


@gpu_kernel("moe.moe")
def pair_products(
    x: torch.Tensor, routes: Routes, weights_EOI: torch.Tensor | Stored, bias_EO: torch.Tensor | None = None
) -> torch.Tensor:
    """Each pair's row, or its token's, times its expert's matrix, [P, O], in the order of `routes.experts_TA`. What a pair without an expert gets may be anything.

    The routes are those of `pair_routes`.
    """
    tokens, active = routes.experts_TA.shape
    x_PI = x if len(x) == tokens * active else x.repeat_interleave(active, 0)
    out_PO = x_PI.new_zeros(x_PI.shape[0], weights_EOI.shape[1])
    experts_P = routes.experts_TA.flatten()
    for expert in experts_P.unique().tolist():
        if expert >= 0:
            own, bias_O = experts_P == expert, None if bias_EO is None else bias_EO[expert]
            out_PO[own] = F.linear(x_PI[own], _of_expert(weights_EOI, expert, x_PI.dtype), bias_O)
    return out_PO


def sum_of_pairs(
    x_TD: torch.Tensor,
    routes: Routes,
    experts: int,
    run: Callable[[torch.Tensor, list[int]], torch.Tensor],
    *,
    weigh_inputs: bool,
) -> torch.Tensor:
    """The weighted sum of the outputs of each token's experts, [T, D].

    `run(x_PD, counts)` are the outputs of pairs [P, D] for their inputs: first those of expert 0, `counts[0]` of them, then those of expert 1.
    """
    weights_TA, experts_TA = routes.weights_TA.to(x_TD.dtype), routes.experts_TA
    order_P = experts_TA.flatten().argsort(stable=True)
    order_P = order_P[int((experts_TA < 0).sum()) :]  # padding has no expert
    tokens_P = order_P // experts_TA.shape[1]
    weights_P1 = weights_TA.flatten().index_select(0, order_P).unsqueeze(-1)
    counts_E = torch.bincount(experts_TA.flatten()[order_P], minlength=experts).tolist()
    x_PD = x_TD.index_select(0, tokens_P)
    if weigh_inputs:
        x_PD = x_PD * weights_P1
    out_PD = run(x_PD, counts_E)
    if not weigh_inputs:
        out_PD.mul_(weights_P1)
    return torch.zeros_like(x_TD).index_add_(0, tokens_P, out_PD)


def _one_expert(x_ND: torch.Tensor, experts: ExpertWeights, expert: int) -> torch.Tensor:
    """The unweighted output of one expert."""
    up_bias, bias = (None if one is None else one[expert] for one in (experts.gate_up_bias_E2I, experts.down_bias_ED))
    inner = experts.activation(F.linear(x_ND, _of_expert(experts.gate_up_E2ID, expert, x_ND.dtype), up_bias))
    return F.linear(inner, _of_expert(experts.down_EDI, expert, x_ND.dtype), bias)


def _of_expert(matrices: torch.Tensor | Stored, expert: int, dtype: torch.dtype) -> torch.Tensor:
    """One expert's matrix, [O, I]."""
    if isinstance(matrices, torch.Tensor):
        return matrices[expert]
    own = {name: part[expert] for name, part in matrices._asdict().items() if isinstance(part, torch.Tensor)}
    return dense(matrices._replace(**own), dtype)
