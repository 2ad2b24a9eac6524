"""Which tokens may be sampled. Shape letters: S rows of logits, N rows that have a mask, V vocabulary, W words of 32 bits."""

from __future__ import annotations

import torch

from pagerunner.ops.dispatch import gpu_kernel


@gpu_kernel("sampling.mask")
def allow_bits(logits_SV: torch.Tensor, rows_N: torch.Tensor, bits_NW: torch.Tensor) -> None:
    """Set the logits of every token whose bit is 0 to minus infinity, in place.

    Row `rows_N[n]` (int64, distinct) of the logits has the mask `bits_NW[n]` (int32, W >= V / 32): token v is bit v % 32
    (bit 0 is the lowest) of word v // 32. Rows without a mask are not changed.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=logits_SV.device)
    blocked_NV = ((bits_NW.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, : logits_SV.shape[1]] == 0
    logits_SV[rows_N] = logits_SV.index_select(0, rows_N).masked_fill_(blocked_NV, float("-inf"))
