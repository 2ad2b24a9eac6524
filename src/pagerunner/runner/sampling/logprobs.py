"""Log-probabilities of the raw logits: a token's own, its rank, and the most likely alternatives.

Shape letters: L rows that report, V vocabulary, K alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pagerunner.ops.logsumexp import row_logsumexp
from pagerunner.types import TokenLogprobs

NUM_REPORTED = 4  # tensors that `gather_logprobs` returns
USUAL_TOP = 20
"""So many alternatives are looked for at least, if any are, and the first of them reported. Of equal logits a search for fewer may find others."""


def gather_logprobs(logits_LV: torch.Tensor, chosen_L: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
    """For float32 logits: the chosen tokens' log-probabilities [L] and ranks [L], the `num_top` best ids [L, K] and their
    log-probabilities [L, K]. The rank is 1 plus how many tokens are more likely, so tied tokens share a rank.
    """
    total_L1 = row_logsumexp(logits_LV).unsqueeze(-1)
    own_L1 = logits_LV.gather(1, chosen_L[:, None])
    rank_L = (logits_LV > own_L1).sum(dim=-1) + 1
    ids_LK, values_LK = _best(logits_LV, num_top)
    return (own_L1 - total_L1).squeeze(-1), rank_L, ids_LK, values_LK - total_L1


def _best(logits_LV: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and values of the best of each row, [L, K]; of equal ones the lower ids come first, as torch's order of them follows the number of rows."""
    count = max(num_top, USUAL_TOP) if num_top else 0
    found = logits_LV.topk(min(count, logits_LV.shape[-1]), dim=-1)
    ids_LK, order_LK = found.indices.sort(dim=-1)
    values_LK, order_LK = found.values.gather(1, order_LK).sort(dim=-1, descending=True, stable=True)
    return ids_LK.gather(1, order_LK)[:, :num_top], values_LK[:, :num_top]


def to_token_logprobs(tokens: Sequence[int], lists: Sequence[list[Any]], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """`gather_logprobs` as read on the host, one value per row; row i keeps `num_top[i]` alternatives."""
    found = []
    for token, logprob, rank, ids, values, count in zip(tokens, *lists, num_top, strict=True):
        ids, values = ids[:count], values[:count]
        if rank == 1 and ids and ids[0] != token:
            # Tokens tie for the first place, and top-k chose another one than the sampler: show the chosen token first.
            place = ids.index(token) if token in ids else len(ids) - 1
            ids.insert(0, ids.pop(place))
            ids[0] = token
            values.insert(0, values.pop(place))
            values[0] = logprob
        found.append(TokenLogprobs(token, logprob, rank, ids, values))
    return found
