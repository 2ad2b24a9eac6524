"""Linear layers. Shape letters: T tokens, I input features, O output features."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pagerunner.layers.module import Module
from pagerunner.layers.norm import RMSNorm
from pagerunner.quant.base import Unquantized, WeightMethod


class Linear(Module):
    """`y_TO = x_TI @ weight.T + bias`, with weights stored as `method` says."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        *,
        bias: bool = False,
        method: WeightMethod | None = None,
    ) -> None:
        super().__init__()
        self.method: WeightMethod = method or Unquantized()
        self.weights = self.method.create(out_features, in_features, dtype)
        if bias:
            self.weights["bias"] = torch.empty(out_features, dtype=dtype, device="meta")

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        return self.method.apply(x_TI, self.weights)

    def add_(self, x_TI: torch.Tensor, residual_TO: torch.Tensor) -> None:
        """Add the layer's output to `residual` in place."""
        self.method.apply_add_(x_TI, self.weights, residual_TO)

    def of_norm(self, x_TI: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """Apply the layer to `norm(x)`."""
        return self.method.apply_to_norm(x_TI, norm.parameters, self.weights)


class FusedLinear(Linear):
    """Several linears of one input as one matrix: their outputs stand beside each other in `parts` order.

    `parts` maps each one's name in the checkpoint, a sibling of this layer, to its output features.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        dtype: torch.dtype,
        *,
        bias: bool = False,
        method: WeightMethod | None = None,
    ) -> None:
        super().__init__(in_features, sum(parts.values()), dtype, bias=bias, method=method)
        self.parts = parts

    def checkpoint(self, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
        """One slice of each weight per part."""
        parent = prefix.removesuffix(".").rpartition(".")[0]
        first = 0
        for part, size in self.parts.items():
            for name, tensor in self.weights.items():
                yield f"{parent}.{part}.{name}" if parent else f"{part}.{name}", tensor[first : first + size]
            first += size
