"""From processed logits to a drawn token: temperature, min-p, top-k, top-p and the inverse of the distribution.

Every filter is a threshold on the logit, so a token is kept or dropped by its logit alone: tokens that tie with the
last one kept are kept too, and the result doesn't depend on any sorting order. Order of application: temperature,
min-p, top-k, top-p on what is left (renormalised).

Shape letters: N random rows, M truncated rows among them, V vocabulary, K candidates.
"""

from __future__ import annotations

import torch

from pagerunner.runner.sampling.layout import RandomRows

# Most likely tokens looked at before a top-p row is sorted as a whole.
CANDIDATES = 256


def draw(logits_NV: torch.Tensor, random: RandomRows, uniform_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row from float32 logits; `uniform_N` is float64 in [0, 1).

    Returns token ids int64 [N] and the rows' largest logits [N]. Where the largest logit isn't finite there is no
    distribution: the token id is then in range but means nothing.
    """
    best_N1 = logits_NV.amax(dim=-1, keepdim=True)
    scaled_NV = logits_NV - best_N1
    if random.temperature is not None:
        scaled_NV /= random.temperature
    weights_NV = scaled_NV.exp()
    if random.min_p is not None:
        # The most likely token weighs exactly 1, so min_p is a bound on the weight itself.
        weights_NV.masked_fill_(weights_NV < random.min_p, 0.0)
    if random.truncated is not None:
        _truncate(scaled_NV, weights_NV, random)
    return invert(weights_NV, uniform_N), best_N1.squeeze(-1)


def invert(weights_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
    """The token whose span of the cumulative weights holds `uniform * total`; never a token of weight 0."""
    cumulative_NV = weights_NV.cumsum(dim=-1, dtype=torch.float64)
    total_N = cumulative_NV[:, -1]
    # u < 1, but u * total may round up to total, where no token is left.
    target_N = torch.minimum(uniform_N * total_N, torch.nextafter(total_N, torch.zeros_like(total_N)))
    # First index with cumulative > target: a weight of 0 doesn't raise the sum, so such a token is never first.
    tokens_N1 = torch.searchsorted(cumulative_NV, target_N[:, None], right=True)
    return tokens_N1.squeeze(-1).clamp_(max=weights_NV.shape[-1] - 1)


def _truncate(scaled_NV: torch.Tensor, weights_NV: torch.Tensor, random: RandomRows) -> None:
    """Zero, in place, the weights that top-k and top-p drop."""
    assert random.truncated is not None and random.top_k is not None and random.top_p is not None
    vocab_size = scaled_NV.shape[-1]
    every = len(random.params) == random.truncated.shape[0]
    scaled_MV = scaled_NV if every else scaled_NV.index_select(0, random.truncated)
    weights_MV = weights_NV if every else weights_NV.index_select(0, random.truncated)
    enough = random.max_top_k <= CANDIDATES
    if enough or (scaled_MV.device.type == "cpu" and vocab_size > CANDIDATES):
        size = random.max_top_k if enough else CANDIDATES
        candidates_MK = scaled_MV.topk(size, dim=-1).values
        bound_M1, settled_M = _threshold(candidates_MK, scaled_MV, weights_MV, random.top_k, random.top_p)
        if not enough:
            _settle_flat_rows(bound_M1, settled_M, scaled_MV, weights_MV, random.top_k, random.top_p)
    else:
        candidates_MV = scaled_MV.sort(dim=-1, descending=True).values
        bound_M1, _ = _threshold(candidates_MV, scaled_MV, weights_MV, random.top_k, random.top_p)
    weights_MV.masked_fill_(scaled_MV < bound_M1, 0.0)
    if not every:
        weights_NV.index_copy_(0, random.truncated, weights_MV)


def _settle_flat_rows(
    bound_M1: torch.Tensor,
    settled_M: torch.Tensor,
    scaled_MV: torch.Tensor,
    weights_MV: torch.Tensor,
    top_k_M: torch.Tensor,
    top_p_M: torch.Tensor,
) -> None:
    """Sort the rows whose threshold lies below the candidates. Reads `settled_M`, so only where that is free."""
    flat = (~settled_M).nonzero().squeeze(-1)
    if flat.numel() == 0:
        return
    scaled = scaled_MV[flat]
    ordered = scaled.sort(dim=-1, descending=True).values
    bound_M1[flat], _ = _threshold(ordered, scaled, weights_MV[flat], top_k_M[flat], top_p_M[flat])


def _threshold(
    candidates_MK: torch.Tensor,
    scaled_MV: torch.Tensor,
    weights_MV: torch.Tensor,
    top_k_M: torch.Tensor,
    top_p_M: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest scaled logit that is kept, [M, 1], and whether the candidates (descending) sufficed to find it.

    A candidate is kept while fewer than k stand before it and the ones before it weigh less than p of what top-k
    leaves.
    """
    num_candidates = candidates_MK.shape[-1]
    last_M1 = (top_k_M.clamp(max=num_candidates) - 1)[:, None]
    has_k_M1 = (top_k_M <= num_candidates)[:, None]
    kth_M1 = candidates_MK.gather(1, last_M1).masked_fill(~has_k_M1, float("-inf"))
    mass_M1 = weights_MV.masked_fill(scaled_MV < kth_M1, 0.0).sum(dim=-1, keepdim=True, dtype=torch.float64)
    # Candidates that min-p has dropped still count here, but the mass is used up before the first of them.
    inclusive_MK = candidates_MK.exp().cumsum(dim=-1, dtype=torch.float64)
    budget_M1 = top_p_M[:, None] * mass_M1
    kept_M1 = (inclusive_MK < budget_M1).sum(dim=-1, keepdim=True)  # candidates that leave room for one more
    settled_M = (has_k_M1 | (kept_M1 < num_candidates)).squeeze(-1)
    return candidates_MK.gather(1, torch.minimum(kept_M1, last_M1)), settled_M
