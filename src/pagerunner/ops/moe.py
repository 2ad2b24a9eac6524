"""Mixtures of experts: choosing them, and running every token through those it chose.

Shape letters: T tokens, D features, E experts, A active experts of a token, I an expert's inner features, N the T * A
pairs of a token and an expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from pagerunner.ops.dispatch import gpu_kernel


def route_softmax_topk(logits_TE: torch.Tensor, active: int, *, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [T, A] in the logits' dtype and experts [T, A]: the largest of a float32 softmax over all experts.

    `normalise` makes a token's weights add up to 1.
    """
    weights_TA, experts_TA = logits_TE.softmax(-1, dtype=torch.float32).topk(active, -1)
    if normalise:
        weights_TA = weights_TA / weights_TA.sum(-1, keepdim=True)
    return weights_TA.to(logits_TE.dtype), experts_TA


def route_topk_softmax(logits_TE: torch.Tensor, active: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [T, A] and experts [T, A]: a softmax over the largest logits alone."""
    top_TA, experts_TA = logits_TE.topk(active, -1)
    return top_TA.softmax(-1), experts_TA


@gpu_kernel("moe")
def moe_experts(
    x_TD: torch.Tensor,
    weights_TA: torch.Tensor,
    experts_TA: torch.Tensor,
    gate_up_E2ID: torch.Tensor,
    down_EDI: torch.Tensor,
    activation: Callable[[torch.Tensor], torch.Tensor],
    gate_up_bias_E2I: torch.Tensor | None = None,
    down_bias_ED: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum over a token's experts of `weight * down(activation(gate_up(x)))`, [T, D].

    `activation` maps [.., 2I] to [.., I]. Tokens are grouped by expert: one pair of matrix products for each expert that
    any token chose, over all of its tokens. A token's experts are added up in the order of their numbers, whatever else
    is in the batch.
    """
    order_N = experts_TA.flatten().argsort(stable=True)
    tokens_N = order_N // experts_TA.shape[1]
    counts_E = torch.bincount(experts_TA.flatten(), minlength=gate_up_E2ID.shape[0]).tolist()
    x_ND = x_TD.index_select(0, tokens_N)
    out_ND = torch.empty_like(x_ND)
    first = 0
    for expert, count in enumerate(counts_E):
        if not count:
            continue
        chosen = slice(first, first + count)
        gate_up_bias = None if gate_up_bias_E2I is None else gate_up_bias_E2I[expert]
        down_bias = None if down_bias_ED is None else down_bias_ED[expert]
        inner = activation(F.linear(x_ND[chosen], gate_up_E2ID[expert], gate_up_bias))
        out_ND[chosen] = F.linear(inner, down_EDI[expert], down_bias)
        first += count
    out_ND.mul_(weights_TA.flatten().index_select(0, order_N).unsqueeze(-1))
    return torch.zeros_like(x_TD).index_add_(0, tokens_N, out_ND)
