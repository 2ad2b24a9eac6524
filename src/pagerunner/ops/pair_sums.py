"""Outputs of a mixture's experts that are still to be added up. The kernel that adds them may compute the norm behind them, too.

Shape letters: T tokens, A experts of a token, P the T * A pairs of a token and an expert, D features, O output features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagerunner.ops.dispatch import gpu_kernel
from pagerunner.ops.linear import Norm, linear
from pagerunner.ops.stored import Stored


class PairSums(NamedTuple):
    """What a mixture's layer adds to the residual stream: for each token the sum of its pairs' outputs, which are weighted already.

    `out` [P, D] has pair `t * A + a` for token t's a-th expert. `experts` [T, A] are the experts' numbers; -1 is no expert, and its output is not
    read. A token's outputs are added up in float32, in the order of the experts' numbers.
    """

    out_PD: torch.Tensor
    experts_TA: torch.Tensor

    def total(self) -> torch.Tensor:
        """The sums, [T, D] in the outputs' dtype."""
        out_TAD = self.out_PD.unflatten(0, self.experts_TA.shape)
        out_TAD = out_TAD.float().masked_fill((self.experts_TA < 0).unsqueeze(-1), 0.0)
        order_TA1 = self.experts_TA.long().argsort(stable=True, dim=-1).unsqueeze(-1)
        total_TD = torch.zeros_like(out_TAD[:, 0])
        for one_TD in out_TAD.gather(1, order_TA1.expand_as(out_TAD)).unbind(1):
            total_TD += one_TD
        return total_TD.to(self.out_PD.dtype)


@gpu_kernel("moe.pair_sums")
def add_pairs_(residual_TD: torch.Tensor, pairs: PairSums) -> None:
    """Add the sums to `residual` in place."""
    residual_TD.add_(pairs.total())


@gpu_kernel("moe.pair_sums")
def add_pairs_norm_(residual_TD: torch.Tensor, pairs: PairSums, norm: Norm) -> torch.Tensor:
    """Add the sums to `residual` in place and return the norm of that, [T, D]."""
    add_pairs_.twin(residual_TD, pairs)
    return norm(residual_TD)


@gpu_kernel("moe.pair_sums")
def add_pairs_norm_linear_(
    residual_TD: torch.Tensor,
    pairs: PairSums,
    norm: Norm,
    weight_OD: torch.Tensor | Stored,
    bias_O: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add the sums to `residual` in place and return `linear(norm(residual))`, [T, O]."""
    return linear(add_pairs_norm_.twin(residual_TD, pairs, norm), weight_OD, bias_O)
