"""Log-probabilities of raw logits: a token's own, its rank, and the most likely alternatives.

Nothing here depends on which rows stand beside a row. Shape letters: S rows of logits, L rows that report, V vocabulary, K alternatives.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagerunner.ops.dispatch import gpu_kernel

_PIECE = 512
USUAL_TOP = 20
"""So many alternatives are looked for at least, if any are, and the first of them reported. Of equal logits torch's search for fewer may find others."""


@gpu_kernel("sampling.logprobs")
def gather_logprobs(
    logits_SV: torch.Tensor, rows_L: torch.Tensor | None, chosen_L: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows `rows_L` int64 (None: all): int32 [L, 1 + K], the rank of the chosen token and the ids of the `num_top` best; and float32 [L, 1 + K], the
    log-probabilities of all of these.

    The rank is 1 plus how many tokens are more likely, so tied tokens share a rank. Of equal alternatives the lower ids come first.
    """
    logits_LV = (logits_SV if rows_L is None else logits_SV.index_select(0, rows_L)).float()
    own_L1, total_L1 = logits_LV.gather(1, chosen_L[:, None]), _logsumexp(logits_LV).unsqueeze(-1)
    rank_L1 = (logits_LV > own_L1).sum(dim=-1, keepdim=True) + 1
    ids_LK, values_LK = _best(logits_LV, num_top)
    return torch.cat((rank_L1, ids_LK), 1).to(torch.int32), torch.cat((own_L1, values_LK), 1) - total_L1


def _logsumexp(x_LV: torch.Tensor) -> torch.Tensor:
    """Of float32 rows, [L]. torch sums a single long row in other pieces than several."""
    most_L1 = x_LV.amax(-1, keepdim=True)
    pieces_LNP = F.pad((x_LV - most_L1).exp_(), (0, -x_LV.shape[1] % _PIECE)).unflatten(-1, (-1, _PIECE))
    return most_L1.squeeze(-1) + pieces_LNP.sum(-1).sum(-1).log_()


def _best(logits_LV: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and values of the best of each row, [L, K]; torch's order of equal ones follows the number of rows."""
    count = max(num_top, USUAL_TOP) if num_top else 0
    found = logits_LV.topk(min(count, logits_LV.shape[-1]), dim=-1)
    ids_LK, order_LK = found.indices.sort(dim=-1)
    values_LK, order_LK = found.values.gather(1, order_LK).sort(dim=-1, descending=True, stable=True)
    return ids_LK.gather(1, order_LK)[:, :num_top], values_LK[:, :num_top]
