"""Penalties of tokens that a row's text has. Shape letters: S rows of logits, N rows of them, V vocabulary, K drafts of a slot."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagerunner.ops.dispatch import gpu_kernel


class Penalties(NamedTuple):
    """Of N rows: their slots int64 [N], coefficients float32 [N, 3], repetition, frequency and presence (1, 0, 0: none), and before which of its slot's drafts a row is, int64 [N]."""

    slots_N: torch.Tensor
    factors_N3: torch.Tensor
    places_N: torch.Tensor


@gpu_kernel("sampling.penalties")
def penalized(
    logits_SV: torch.Tensor,
    rows_N: torch.Tensor | None,
    penalties: Penalties,
    seen: torch.Tensor,
    drafts_NK: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows `rows_N` of the logits in float32, [N, V]: repetition penalty on prompt and output tokens, then frequency and presence penalties on output
    tokens. Without `rows_N` all rows, which are float32 and may be changed in place.

    `seen` int32 [slots, V] is twice a token's count in the output, plus 1 if it stands in the prompt. If rows have several places, `drafts_NK` are the
    slots' drafts, and those before a place count for it as output.
    """
    logits_NV = (logits_SV if rows_N is None else logits_SV.index_select(0, rows_N)).float()
    seen_NV = seen.index_select(0, penalties.slots_N)
    if drafts_NK is not None:
        own_NK = drafts_NK.index_select(0, penalties.slots_N)
        before_NK = torch.arange(own_NK.shape[1], device=own_NK.device) < penalties.places_N[:, None]
        seen_NV.scatter_add_(1, own_NK.clamp(min=0), 2 * (before_NK & (own_NK >= 0)).to(seen_NV.dtype))
    repetition_N1, frequency_N1, presence_N1 = penalties.factors_N3.split(1, 1)
    scaled_NV = torch.where(logits_NV > 0, logits_NV / repetition_N1, logits_NV * repetition_N1)
    logits_NV = torch.where(seen_NV > 0, scaled_NV, logits_NV)
    count_NV = seen_NV >> 1
    return logits_NV - frequency_N1 * count_NV - presence_N1 * (count_NV > 0)
