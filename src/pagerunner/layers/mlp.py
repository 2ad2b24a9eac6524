"""Feed-forward layers. Shape letters: T tokens, D features."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagerunner.layers.linear import FusedLinear, Linear
from pagerunner.layers.module import Module
from pagerunner.ops.activation import silu_and_mul


class GatedMLP(Module):
    """`down(silu(gate(x)) * up(x))`, with gate and up as one matrix; or another gated `activation`."""

    def __init__(
        self,
        features: int,
        inner: int,
        dtype: torch.dtype,
        *,
        bias: bool = False,
        activation: Callable[[torch.Tensor], torch.Tensor] = silu_and_mul,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_up_proj = FusedLinear(features, {"gate_proj": inner, "up_proj": inner}, dtype, bias=bias)
        self.down_proj = Linear(inner, features, dtype, bias=bias)

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        return self.down_proj(self.activation(self.gate_up_proj(x_TD)))
