"""From processed logits to a drawn token: temperature, min-p, top-k, top-p and the inverse of the distribution.

Every filter is a threshold on the logit, so a token is kept or dropped by its logit alone: tokens that tie with the
last one kept are kept too, and the result doesn't depend on any sorting order. Order of application: temperature,
min-p, top-k, top-p on what is left (renormalised).

Shape letters: N random rows, M truncated rows among them, V vocabulary, K candidates.
"""

from __future__ import annotations

import torch

from pagerunner.runner.sampling.layout import RandomRows

# How many of the most likely tokens are sorted before a row is sorted as a whole.
CANDIDATES = (256, 4096)
_BLOCK = 256


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
    """The token whose span of the cumulative weights (float64, vocabulary order) holds `uniform * total`.

    Never a token of weight 0. The sum is taken over blocks first, then inside the block that holds the target: a
    running sum over the whole vocabulary is an order of magnitude slower.
    """
    vocab_size = weights_NV.shape[-1]
    rows, whole = weights_NV.shape[0], vocab_size // _BLOCK
    masses_NB = weights_NV[:, : whole * _BLOCK].view(rows, whole, _BLOCK).sum(dim=-1, dtype=torch.float64)
    if vocab_size % _BLOCK:
        rest_N1 = weights_NV[:, whole * _BLOCK :].sum(dim=-1, keepdim=True, dtype=torch.float64)
        masses_NB = torch.cat((masses_NB, rest_N1), dim=1)
    blocks_NB = masses_NB.cumsum(dim=-1)
    block_N1, left_N1 = _first_above(blocks_NB, uniform_N[:, None] * blocks_NB[:, -1:])
    ids_NK = block_N1 * _BLOCK + torch.arange(_BLOCK, device=weights_NV.device)
    inside_NK = weights_NV.gather(1, ids_NK.clamp(max=vocab_size - 1)).to(torch.float64)
    inside_NK.masked_fill_(ids_NK >= vocab_size, 0.0)
    place_N1, _ = _first_above(inside_NK.cumsum(dim=-1), left_N1)
    return (block_N1 * _BLOCK + place_N1).squeeze(-1).clamp_(max=vocab_size - 1)


def _first_above(cumulative_NK: torch.Tensor, target_N1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first entry at which the running sum exceeds the target, and the part of the target that lies inside it.

    An entry of mass 0 doesn't raise the sum, so it is never the first one. A target that rounding has lifted to the
    total, where no entry would be left, is lowered by one ulp.
    """
    total_N1 = cumulative_NK[:, -1:]
    target_N1 = torch.minimum(target_N1, torch.nextafter(total_N1, torch.zeros_like(total_N1)))
    index_N1 = torch.searchsorted(cumulative_NK, target_N1, right=True).clamp_(max=cumulative_NK.shape[-1] - 1)
    before_N1 = cumulative_NK.gather(1, (index_N1 - 1).clamp(min=0)).masked_fill_(index_N1 == 0, 0.0)
    return index_N1, target_N1 - before_N1


def _truncate(scaled_NV: torch.Tensor, weights_NV: torch.Tensor, random: RandomRows) -> None:
    """Zero, in place, the weights that top-k and top-p drop."""
    assert random.truncated is not None and random.top_k is not None and random.top_p is not None
    every = len(random.params) == random.truncated.shape[0]
    scaled_MV = scaled_NV if every else scaled_NV.index_select(0, random.truncated)
    weights_MV = weights_NV if every else weights_NV.index_select(0, random.truncated)
    bound_M1 = _bounds(scaled_MV, weights_MV, random.top_k, random.top_p, random.max_top_k)
    weights_MV.masked_fill_(scaled_MV < bound_M1, 0.0)
    if not every:
        weights_NV.index_copy_(0, random.truncated, weights_MV)


def _bounds(
    scaled_MV: torch.Tensor, weights_MV: torch.Tensor, top_k_M: torch.Tensor, top_p_M: torch.Tensor, max_top_k: int
) -> torch.Tensor:
    """The smallest scaled logit that each row keeps, [M, 1].

    The threshold mostly lies among the first few hundred tokens, so partial sorts are tried first: where top-k promises
    that, and otherwise only on the CPU, because looking whether it did would stall a GPU.
    """
    vocab_size = scaled_MV.shape[-1]
    if max_top_k <= CANDIDATES[0]:
        candidates_MK = scaled_MV.topk(max_top_k, dim=-1).values
        return _threshold(candidates_MK, scaled_MV, weights_MV, top_k_M, top_p_M)[0]
    sizes = [size for size in CANDIDATES if size < vocab_size // 4] if scaled_MV.device.type == "cpu" else []
    bound_M1 = torch.empty_like(scaled_MV[:, :1])
    open_rows = torch.arange(scaled_MV.shape[0], device=scaled_MV.device)
    for size in sizes:
        candidates = scaled_MV.topk(size, dim=-1).values
        bound, settled = _threshold(candidates, scaled_MV, weights_MV, top_k_M, top_p_M)
        bound_M1[open_rows] = bound
        left = (~settled).nonzero().squeeze(-1)
        if left.numel() == 0:
            return bound_M1
        open_rows, scaled_MV, weights_MV = open_rows[left], scaled_MV[left], weights_MV[left]
        top_k_M, top_p_M = top_k_M[left], top_p_M[left]
    ordered = scaled_MV.sort(dim=-1, descending=True).values
    bound_M1[open_rows], _ = _threshold(ordered, scaled_MV, weights_MV, top_k_M, top_p_M)
    return bound_M1


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
