"""Norm layers. Shape letters: T tokens, D features."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagerunner.dist.base import Comm, RankSums
from pagerunner.dist.null import NullComm
from pagerunner.layers.cuts import Section, TensorCut
from pagerunner.layers.module import Module
from pagerunner.ops.indexer_heads import MeanNorm
from pagerunner.ops.linear import Norm
from pagerunner.ops.norm import add_normed_rms_norm_, add_rms_norm_, gate_then_rms_norm, rms_norm
from pagerunner.ops.pair_sums import PairSums, add_pairs_norm_


class RMSNorm(Module):
    """Root-mean-square norm with a weight per feature."""

    offset = False

    def __init__(self, features: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
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
        return rms_norm(x_TD, self.weights["weight"], self.eps, self.offset)

    def add(self, x_TD: torch.Tensor, residual_TD: torch.Tensor) -> torch.Tensor:
        """Add `x` to `residual` in place and return the norm of the sum."""
        return add_rms_norm_(x_TD, residual_TD, self.weights["weight"], self.eps, self.offset)

    def add_normed(self, x_TD: torch.Tensor, before: RMSNorm, residual_TD: torch.Tensor) -> torch.Tensor:
        """Add the norm `before` of `x` to `residual` in place and return the norm of the sum."""
        if (before.eps, before.offset) != (self.eps, self.offset):
            return self.add(before(x_TD), residual_TD)
        return add_normed_rms_norm_(x_TD, before.weight_D, residual_TD, self.weight_D, self.eps, self.offset)

    def add_sums(self, sums: PairSums | RankSums, residual_TD: torch.Tensor) -> torch.Tensor:
        """Add the sums to `residual` in place and return the norm of that."""
        if isinstance(sums, RankSums):
            return sums.add_norm_(residual_TD, self.parameters)
        return add_pairs_norm_(residual_TD, sums, self.parameters)


class GatedRMSNorm(RMSNorm):
    """`norm(x * silu(gate))`, with features that ranks may divide, as `sections` say: equally many each. The mean is over those of all ranks."""

    def __init__(self, features: int, eps: float, dtype: torch.dtype, sections: tuple[Section, ...]) -> None:
        super().__init__(features, eps, dtype)
        self.cuts = {"weight": TensorCut(0, sections)}
        self.comm: Comm = NullComm()

    def of_gated(self, x_TD: torch.Tensor, gate_TD: torch.Tensor) -> torch.Tensor:
        """The norm of what passes the gate."""
        if self.comm.size == 1:
            return gate_then_rms_norm(x_TD, gate_TD, self.weight_D, self.eps)
        gated_TD = x_TD.float() * F.silu(gate_TD.float())
        squares_T1 = gated_TD.square().sum(-1, keepdim=True)
        self.comm.all_reduce_(squares_T1)
        squares_T1 /= self.comm.size * x_TD.shape[1]
        return gated_TD.mul_(torch.rsqrt(squares_T1 + self.eps)).to(x_TD.dtype).mul_(self.weight_D)


class LayerNorm(Module):
    """A norm of mean and variance, with a weight and a bias per feature, which is a part of other operations."""

    def __init__(self, features: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weights = {name: torch.empty(features, dtype=dtype, device="meta") for name in ("weight", "bias")}

    @property
    def parameters(self) -> MeanNorm:
        """What an operation that includes the norm needs to know of it."""
        return MeanNorm(self.weights["weight"], self.weights["bias"], self.eps)


class OffsetRMSNorm(RMSNorm):
    """A root-mean-square norm whose weights count from 1."""

    offset = True
