"""Mixtures of experts for few tokens by the CPU kernels: float32, experts' matrices in panels.

Shape letters: T tokens, D features, E experts, A active experts of a token, I an expert's inner features, P panels of a matrix, N features
of a panel.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import torch

from pagerunner.ops.native import small
from pagerunner.ops.native.calls import EXPERTS, LOGITS, ROUTE, call, empty, empty_numbers, made, memory_of, operand

if TYPE_CHECKING:
    from pagerunner.ops.activation import GatedActivation
    from pagerunner.ops.routing import Routes, Routing

FEW_TOKENS = 64
"""Tokens up to which these kernels serve, but for `route`. With more, torch's products of routers are faster, and pairs need much memory."""

_LOGITS = struct.Struct("4P5q")  # Logits in native/mixture.h
_ROUTE = struct.Struct("5P5qf2i4x")  # Route
_EXPERTS = struct.Struct("8P7qf3i")  # Experts
_SCORES = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2}
_ACTIVATIONS = {"silu": 0, "clamped_swiglu": 1, "limited_silu": 2}
_I64 = torch.int64


class Matrices(NamedTuple):
    """Both matrices of all experts in panels, [E, P, D, N] and [E, P, I, N], and their biases [E, 2 I] and [E, D] if they have some."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


def serves(x_TD: torch.Tensor, routes: Routes, residual_TD: torch.Tensor | None) -> bool:
    """Whether `experts` takes a step's tensors."""
    dense = routes.weights_TA.is_contiguous() and routes.experts_TA.is_contiguous()
    floats = (x_TD, routes.weights_TA) if residual_TD is None else (x_TD, routes.weights_TA, residual_TD)
    few = x_TD.dim() == 2 and x_TD.shape[0] <= FEW_TOKENS
    return few and dense and routes.experts_TA.dtype == _I64 and small.serves(*floats)


def expert_logits(
    x_TD: torch.Tensor, weight_ED: torch.Tensor, bias_E: torch.Tensor | None = None, *, fixed: bool = False
) -> torch.Tensor:
    """See `ops.routing.expert_logits`."""
    floats = (x_TD, weight_ED) if bias_E is None else (x_TD, weight_ED, bias_E)
    if x_TD.dim() != 2 or x_TD.shape[0] > FEW_TOKENS or not small.serves(*floats):
        return NotImplemented
    (tokens, features), experts = x_TD.shape, weight_ED.shape[0]
    logits_TE = empty(tokens, experts)
    operands = (
        operand("x", x_TD),
        operand("the router's weight", weight_ED, experts, features),
        operand("the router's bias", bias_E, experts),
        made(logits_TE),
    )
    call(LOGITS, _LOGITS, operands, tokens, features, experts, x_TD.stride(0), weight_ED.stride(0))
    return logits_TE


def route(
    logits_TE: torch.Tensor, routing: Routing, bias_E: torch.Tensor | None, touched: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts of `ops.routing.route`, float32 and int64 [T, A].

    To `touched` [2], int64, the number of experts that any token chose is added, and 1.
    """
    tokens, experts = logits_TE.shape
    kept = routing.kept_groups * (experts // routing.groups)  # experts to choose from
    if experts % routing.groups or not 0 < routing.kept_groups <= routing.groups or not 0 < routing.active <= kept:
        raise ValueError(f"{routing} doesn't fit {experts} experts")
    weights_TA, experts_TA = empty(tokens, routing.active), empty_numbers(tokens, routing.active)
    operands = (
        operand("logits", logits_TE, dense=2),
        operand("the choice's bias", bias_E, experts),
        made(weights_TA),
        made(experts_TA),
        operand("counts of experts", touched, dtype=_I64),
    )
    sizes = tokens, experts, routing.active, routing.groups, routing.kept_groups
    call(ROUTE, _ROUTE, operands, *sizes, routing.factor, _SCORES[routing.scores], routing.normalise)
    return weights_TA, experts_TA


def experts(
    x_TD: torch.Tensor,
    routes: Routes,
    matrices: Matrices,
    inner: int,
    activation: GatedActivation,
    *,
    weigh_inputs: bool,
    residual_TD: torch.Tensor | None,
) -> torch.Tensor:
    """See `ops.moe.moe_experts`. Raises IndexError for a number that names no expert and isn't padding's -1; the sum is zero then."""
    (tokens, features), (count, _, _, width) = x_TD.shape, matrices.gate_up.shape
    active = routes.experts_TA.shape[1]
    out_TD = empty(tokens, features) if residual_TD is None else residual_TD
    operands = (
        operand("x", x_TD),
        operand("the routes' weights", routes.weights_TA, tokens, active, dense=2),
        operand("the routes' experts", routes.experts_TA, tokens, active, dense=2, dtype=_I64),
        operand("gates and ups", matrices.gate_up, count, 2 * -(-inner // width), features, width, dense=4),
        operand("down projections", matrices.down, count, -(-features // width), inner, width, dense=4),
        operand("the bias of gates and ups", matrices.gate_up_bias, count, 2 * inner, dense=2),
        operand("the bias of down projections", matrices.down_bias, count, features, dense=2),
        operand("the residual", out_TD, tokens, features),
    )
    sizes = tokens, active, count, features, inner, x_TD.stride(0), out_TD.stride(0)
    flags = _ACTIVATIONS[activation.kind], residual_TD is not None, weigh_inputs
    call(EXPERTS, _EXPERTS, operands, *sizes, activation.limit, *flags)
    return out_TD


def experts_memory(tokens: int, features: int, inner: int, experts: int, active: int) -> int:
    """Bytes that the experts of a step of so many tokens work in."""
    sizes = min(tokens, FEW_TOKENS), active, experts, features, inner, features, features
    return memory_of(EXPERTS, _EXPERTS.pack(*(0,) * 8, *sizes, 0.0, 0, 0, 0))
