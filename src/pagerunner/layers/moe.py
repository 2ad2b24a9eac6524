"""Mixtures of experts. Shape letters: T tokens, D features, E experts, I an expert's inner features."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pagerunner.layers.linear import Linear
from pagerunner.layers.module import Module
from pagerunner.layers.sublayer import FeedForward
from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.moe import moe_experts, route_softmax_topk


class GatedExperts(Module):
    """Gated SiLU feed-forwards, all experts' matrices in two tensors.

    A checkpoint holds either three matrices per expert (`E.gate_proj`, `E.up_proj`, `E.down_proj`) or the two tensors.
    """

    def __init__(self, experts: int, features: int, inner: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = {
            "gate_up_proj": torch.empty(experts, 2 * inner, features, dtype=dtype, device="meta"),
            "down_proj": torch.empty(experts, features, inner, dtype=dtype, device="meta"),
        }

    def __call__(self, x_TD: torch.Tensor, weights_TA: torch.Tensor, experts_TA: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the outputs of each token's experts, [T, D]."""
        gate_up, down = self.weights["gate_up_proj"], self.weights["down_proj"]
        return moe_experts(x_TD, weights_TA, experts_TA, gate_up, down, silu_and_mul)

    def checkpoint(self, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
        """One slice per expert and matrix."""
        gate_up_E2ID, down_EDI = self.weights["gate_up_proj"], self.weights["down_proj"]
        inner = down_EDI.shape[-1]
        for expert in range(down_EDI.shape[0]):
            yield f"{prefix}{expert}.gate_proj.weight", gate_up_E2ID[expert, :inner]
            yield f"{prefix}{expert}.up_proj.weight", gate_up_E2ID[expert, inner:]
            yield f"{prefix}{expert}.down_proj.weight", down_EDI[expert]

    def stacked(self, prefix: str = "") -> Iterator[tuple[str, torch.Tensor, tuple[str, ...]]]:
        """Both tensors as they are here."""
        names = [name for name, _ in self.checkpoint(prefix)]
        down = tuple(name for name in names if name.endswith(".down_proj.weight"))
        yield f"{prefix}gate_up_proj", self.weights["gate_up_proj"], tuple(name for name in names if name not in down)
        yield f"{prefix}down_proj", self.weights["down_proj"], down


class SparseMLP(FeedForward):
    """A router, and the experts to which it sends each token. The router's softmax gives the experts' weights."""

    def __init__(
        self, features: int, inner: int, experts: int, active: int, dtype: torch.dtype, *, normalise: bool
    ) -> None:
        super().__init__()
        self.gate = Linear(features, experts, dtype)
        self.experts = GatedExperts(experts, features, inner, dtype)
        self.active = active
        self.normalise = normalise

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        weights_TA, experts_TA = route_softmax_topk(self.gate(x_TD), self.active, normalise=self.normalise)
        return self.experts(x_TD, weights_TA, experts_TA)
