"""Which experts a token goes to, with what weight. Shape letters: T tokens, E experts, G expert groups, K chosen experts.

All in float32, as in the models' own code.
"""

from __future__ import annotations

import torch


def softmax_top_k(
    logits_TE: torch.Tensor, top_k: int, *, groups: int, kept_groups: int, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek-V2's routing: the most probable experts of the `kept_groups` groups that hold the most probable ones.

    Weights [T, K], which are `factor` times the probabilities, and expert indices [T, K].
    """
    scores_TE = logits_TE.float().softmax(-1)
    best_TG = scores_TE.unflatten(-1, (groups, -1)).amax(-1)
    weights_TK, experts_TK = _of_kept_groups(scores_TE, best_TG, kept_groups, 0.0).topk(top_k, dim=-1)
    return weights_TK * factor, experts_TK


def sigmoid_top_k(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor,
    top_k: int,
    *,
    groups: int,
    kept_groups: int,
    normalise: bool,
    factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek-V3's routing: experts are chosen by biased scores and weighted by unbiased ones.

    A group counts with its two best experts. Weights [T, K] and expert indices [T, K]; with `normalise` a token's weights
    sum to `factor`.
    """
    scores_TE = logits_TE.float().sigmoid()
    biased_TE = scores_TE + bias_E
    best_TG = biased_TE.unflatten(-1, (groups, -1)).topk(2, dim=-1).values.sum(-1)
    experts_TK = _of_kept_groups(biased_TE, best_TG, kept_groups, float("-inf")).topk(top_k, dim=-1).indices
    weights_TK = scores_TE.gather(-1, experts_TK)
    if normalise:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return weights_TK * factor, experts_TK


def _of_kept_groups(scores_TE: torch.Tensor, best_TG: torch.Tensor, kept: int, other: float) -> torch.Tensor:
    """The scores, with `other` for experts outside each token's `kept` best groups."""
    groups = best_TG.shape[-1]
    if kept == groups:
        return scores_TE
    chosen_TG = torch.zeros_like(best_TG, dtype=torch.bool).scatter_(-1, best_TG.topk(kept, dim=-1).indices, True)
    return scores_TE.masked_fill(~chosen_TG.repeat_interleave(scores_TE.shape[-1] // groups, -1), other)
