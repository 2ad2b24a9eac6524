"""From logits to tokens: the most likely one, or one drawn behind temperature, min-p, top-k and top-p.

Every filter is a threshold on the logit, so a token is kept or dropped by its logit alone: tokens that tie with the
last one kept are kept too, and the result doesn't depend on any sorting order. Order of application: temperature,
min-p, top-k, top-p on what is left (renormalised).

Shape letters: S rows, N rows that draw, M truncated rows among them, V vocabulary, K candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagerunner.ops.dispatch import gpu_kernel

# How many of the most likely tokens are sorted before a row is sorted as a whole.
CANDIDATES = (256, 4096)
_BLOCK = 256


class Filters(NamedTuple):
    """What the rows that draw ask for. A None is a filter that no row uses.

    `truncated` lists the rows with top-k or top-p; None means all of them, or none where `top_k_N` is None. `max_top_k` is the
    largest top-k of those, V if one of them has none.
    """

    temperature_N: torch.Tensor | None = None  # float32
    min_p_N: torch.Tensor | None = None  # float32
    top_k_N: torch.Tensor | None = None  # int64, V where off
    top_p_N: torch.Tensor | None = None  # float64, infinity where off
    truncated: torch.Tensor | None = None  # [M] int64
    max_top_k: int = 0


@gpu_kernel("sample")
def greedy(logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely token of each row, int64 [S], and its logit, float32 [S].

    The lowest id wins a tie. In a row with NaN the first NaN is taken, so that the logit tells.
    """
    tokens_S1 = logits_SV.argmax(dim=-1, keepdim=True)
    return tokens_S1.squeeze(-1), logits_SV.gather(1, tokens_S1).squeeze(-1).float()


@gpu_kernel("sample")
def draw(logits_NV: torch.Tensor, filters: Filters, uniform_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row from float32 logits; `uniform_N` is float64 in [0, 1).

    Returns token ids int64 [N] and the rows' largest logits [N]. Where the largest logit isn't finite there is no
    distribution: the token id is then in range but means nothing.
    """
    best_N1 = logits_NV.amax(dim=-1, keepdim=True)
    scaled_NV = logits_NV - best_N1
    if filters.temperature_N is not None:
        scaled_NV /= filters.temperature_N.unsqueeze(-1)
    weights_NV = scaled_NV.exp()
    if filters.min_p_N is not None:
        # The most likely token weighs exactly 1, so min_p is a bound on the weight itself.
        weights_NV.masked_fill_(weights_NV < filters.min_p_N.unsqueeze(-1), 0.0)
    if filters.top_k_N is not None and filters.top_p_N is not None:
        _truncate(scaled_NV, weights_NV, filters.top_k_N, filters.top_p_N, filters)
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


def _truncate(
    scaled_NV: torch.Tensor,
    weights_NV: torch.Tensor,
    top_k_N: torch.Tensor,
    top_p_N: torch.Tensor,
    filters: Filters,
) -> None:
    """Zero, in place, the weights that top-k and top-p drop."""
    rows = filters.truncated
    if rows is None:
        bound_N1 = _bounds(scaled_NV, weights_NV, top_k_N, top_p_N, filters.max_top_k)
        weights_NV.masked_fill_(scaled_NV < bound_N1, 0.0)
        return
    scaled_MV, weights_MV = scaled_NV.index_select(0, rows), weights_NV.index_select(0, rows)
    top_k_M, top_p_M = top_k_N.index_select(0, rows), top_p_N.index_select(0, rows)
    bound_M1 = _bounds(scaled_MV, weights_MV, top_k_M, top_p_M, filters.max_top_k)
    weights_NV.index_copy_(0, rows, weights_MV.masked_fill_(scaled_MV < bound_M1, 0.0))


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
