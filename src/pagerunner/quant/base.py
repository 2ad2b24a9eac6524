"""The seam between linear layers and the form their weights are stored in."""

from __future__ import annotations

from typing import Protocol

import torch

from pagerunner.ops.linear import linear


class WeightMethod(Protocol):
    """Stored form of a linear layer's weights. Dimension 0 of every tensor is the output features.

    Shape letters: T tokens, I input features, O output features.
    """

    def create(self, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The weights as meta tensors, by the last part of their names in a checkpoint."""
        ...

    def apply(self, x_TI: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """The layer's output [T, O]; `weights` may also hold a "bias"."""
        ...


class Unquantized:
    """One matrix in the model's dtype."""

    def create(self, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """A single "weight" of shape [O, I]."""
        return {"weight": torch.empty(out_features, in_features, dtype=dtype, device="meta")}

    def apply(self, x_TI: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """`x @ weight.T + bias`."""
        return linear(x_TI, weights["weight"], weights.get("bias"))
