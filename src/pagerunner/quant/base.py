"""The seam between linear layers and the form their weights are stored in."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.linear import Norm, linear, linear_add_, norm_linear, norm_linear_silu


class WeightMethod(ABC):
    """Stored form of a linear layer's weights. Dimension 0 of every tensor is the output features.

    `weights` are those of the layer by name; they may also hold a "bias". A method that has operations which join the
    product with what stands before or behind it overrides the last three. Shape letters: T tokens, I input features, O
    output features.
    """

    @abstractmethod
    def create(self, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The weights as meta tensors, by the last part of their names in a checkpoint."""

    @abstractmethod
    def apply(self, x_TI: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """The layer's output [T, O]."""

    def apply_add_(self, x_TI: torch.Tensor, weights: dict[str, torch.Tensor], residual_TO: torch.Tensor) -> None:
        """Add the layer's output to `residual` in place."""
        residual_TO.add_(self.apply(x_TI, weights))

    def apply_to_norm(self, x_TI: torch.Tensor, norm: Norm, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """The layer's output for `norm(x)`, [T, O]."""
        return self.apply(norm(x_TI), weights)

    def apply_to_norm_silu(self, x_TI: torch.Tensor, norm: Norm, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """`silu(gate) * up`, [T, O / 2], of the layer's output for `norm(x)`, which is the gate's features, then up's."""
        return silu_and_mul(self.apply_to_norm(x_TI, norm, weights))


class Unquantized(WeightMethod):
    """One matrix in the model's dtype."""

    def create(self, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """A single "weight" of shape [O, I]."""
        return {"weight": torch.empty(out_features, in_features, dtype=dtype, device="meta")}

    def apply(self, x_TI: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """`x @ weight.T + bias`."""
        return linear(x_TI, weights["weight"], weights.get("bias"))

    def apply_add_(self, x_TI: torch.Tensor, weights: dict[str, torch.Tensor], residual_TO: torch.Tensor) -> None:
        """See WeightMethod."""
        linear_add_(x_TI, weights["weight"], residual_TO, weights.get("bias"))

    def apply_to_norm(self, x_TI: torch.Tensor, norm: Norm, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """See WeightMethod."""
        return norm_linear(x_TI, norm, weights["weight"], weights.get("bias"))

    def apply_to_norm_silu(self, x_TI: torch.Tensor, norm: Norm, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """See WeightMethod."""
        return norm_linear_silu(x_TI, norm, weights["weight"], weights.get("bias"))
