"""Norm layers. Shape letters: T tokens, D features."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagerunner.layers.cuts import Section, TensorCut
from pagerunner.layers.module import Module
from pagerunner.ops.linear import Norm
from pagerunner.ops.norm import add_offset_rms_norm_, add_rms_norm_, offset_rms_norm, rms_norm
from pagerunner.ops.pair_sums import PairSums, add_pairs_norm_


class RMSNorm(Module):
    """Root-mean-square norm with a weight per feature.

    `sections` say whose the features are if devices may divide them. Then the mean is over the features of all devices.
    """

    offset = False

    def __init__(
        self, features: int, eps: float, dtype: torch.dtype, sections: tuple[Section, ...] | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        if sections is not None:
            self.cuts = {"weight": TensorCut(0, sections)}
        self.weights = {"weight": torch.empty(features, dtype=dtype, device="meta")}

    @property
    def weight_D(self) -> torch.Tensor:
        """The weight of each feature."""
        return self.weights["weight"]

    @property
    def parameters(self) -> Norm:
        """What an operation that includes the norm needs to know of it."""
        return Norm(self.weights["weight"], self.eps, self.offset)

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        """The norm of `x`."""
        return rms_norm(x_TD, self.weights["weight"], self.eps)

    def add(self, x_TD: torch.Tensor, residual_TD: torch.Tensor) -> torch.Tensor:
        """Add `x` to `residual` in place and return the norm of the sum."""
        return add_rms_norm_(x_TD, residual_TD, self.weights["weight"], self.eps)

    def add_pairs(self, pairs: PairSums, residual_TD: torch.Tensor) -> torch.Tensor:
        """Add the pairs' sums to `residual` in place and return the norm of that."""
        return add_pairs_norm_(residual_TD, pairs, self.parameters)


class LayerNorm(Module):
    """A norm of mean and variance, with a weight and a bias per feature."""

    def __init__(self, features: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weights = {name: torch.empty(features, dtype=dtype, device="meta") for name in ("weight", "bias")}

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        """The norm of `x`."""
        return F.layer_norm(x_TD, x_TD.shape[-1:], self.weights["weight"], self.weights["bias"], self.eps)


class OffsetRMSNorm(RMSNorm):
    """A root-mean-square norm whose weights count from 1."""

    offset = True

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        """The norm of `x`."""
        return offset_rms_norm(x_TD, self.weights["weight"], self.eps)

    def add(self, x_TD: torch.Tensor, residual_TD: torch.Tensor) -> torch.Tensor:
        """Add `x` to `residual` in place and return the norm of the sum."""
        return add_offset_rms_norm_(x_TD, residual_TD, self.weights["weight"], self.eps)
