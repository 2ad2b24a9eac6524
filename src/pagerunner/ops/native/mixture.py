"""Mixtures of experts for few tokens by the CPU kernels: float32, experts' matrices in panels.

Shape letters: T tokens, D features, E experts, A active experts of a token, I an expert's inner features, P panels of a matrix, N features
of a panel.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import torch

from pagerunner.ops.native import small
from pagerunner.ops.native.calls import EXPERTS, LOGITS, ROUTE, address, call, empty, empty_numbers, memory_of, sized

if TYPE_CHECKING:
    from pagerunner.ops.activation import GatedActivation
    from pagerunner.ops.routing import Routes, Routing

FEW_TOKENS = 64
"""Tokens up to which these kernels serve. With more, torch's products of routers are faster, and pairs need much memory."""

_LOGITS = struct.Struct("4P5q")  # Logits in native/mixture.h
_ROUTE = struct.Struct("5P5qf2i4x")  # Route
_EXPERTS = struct.Struct("8P7qf3i")  # Experts
_SCORES = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2}
_ACTIVATIONS = {"silu": 0, "clamped_swiglu": 1, "limited_silu": 2}
_F32, _I64 = torch.float32, torch.int64


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


def expert_logits(x_TD: torch.Tensor, weight_ED: torch.Tensor, bias_E: torch.Tensor | None) -> torch.Tensor:
    """See `ops.routing.expert_logits`."""
    (tokens, features), experts = x_TD.shape, weight_ED.shape[0]
    sized("the router's weight", weight_ED, experts, features)
    logits_TE = empty(tokens, experts)
    packed = _LOGITS.pack(
        address("x", x_TD, _F32, 1),
        address("the router's weight", weight_ED, _F32, 1),
        _row("the router's bias", bias_E, experts),
        logits_TE.data_ptr(),
        tokens,
        features,
        experts,
        x_TD.stride(0),
        weight_ED.stride(0),
    )
    call(LOGITS, packed, (x_TD, weight_ED, bias_E, logits_TE))
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
    packed = _ROUTE.pack(
        address("logits", logits_TE, _F32, 2),
        _row("the choice's bias", bias_E, experts),
        weights_TA.data_ptr(),
        experts_TA.data_ptr(),
        0 if touched is None else address("counts of experts", touched, _I64, 1),
        tokens,
        experts,
        routing.active,
        routing.groups,
        routing.kept_groups,
        routing.factor,
        _SCORES[routing.scores],
        routing.normalise,
    )
    call(ROUTE, packed, (logits_TE, bias_E, weights_TA, experts_TA, touched))
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
    sized("gates and ups", matrices.gate_up, count, 2 * -(-inner // width), features, width)
    sized("down projections", matrices.down, count, -(-features // width), inner, width)
    sized("the routes' weights", routes.weights_TA, tokens, active)
    sized("the routes' experts", routes.experts_TA, tokens, active)
    out_TD = empty(tokens, features) if residual_TD is None else residual_TD
    sized("the residual", out_TD, tokens, features)
    packed = _EXPERTS.pack(
        address("x", x_TD, _F32, 1),
        address("the routes' weights", routes.weights_TA, _F32, 2),
        address("the routes' experts", routes.experts_TA, _I64, 2),
        address("gates and ups", matrices.gate_up, _F32, 4),
        address("down projections", matrices.down, _F32, 4),
        _matrix("the bias of gates and ups", matrices.gate_up_bias, count, 2 * inner),
        _matrix("the bias of down projections", matrices.down_bias, count, features),
        address("the residual", out_TD, _F32, 1),
        tokens,
        active,
        count,
        features,
        inner,
        x_TD.stride(0),
        out_TD.stride(0),
        activation.limit,
        _ACTIVATIONS[activation.kind],
        residual_TD is not None,
        weigh_inputs,
    )
    call(EXPERTS, packed, (x_TD, routes.weights_TA, routes.experts_TA, *matrices, out_TD))
    return out_TD


def experts_memory(tokens: int, features: int, inner: int, experts: int, active: int) -> int:
    """Bytes that the experts of a step of so many tokens work in."""
    sizes = min(tokens, FEW_TOKENS), active, experts, features, inner, features, features
    return memory_of(EXPERTS, _EXPERTS.pack(*(0,) * 8, *sizes, 0.0, 0, 0, 0))


def _row(name: str, x: torch.Tensor | None, size: int) -> int:
    if x is None:
        return 0
    sized(name, x, size)
    return address(name, x, _F32, 1)


def _matrix(name: str, x: torch.Tensor | None, rows: int, columns: int) -> int:
    if x is None:
        return 0
    sized(name, x, rows, columns)
    return address(name, x, _F32, 2)
