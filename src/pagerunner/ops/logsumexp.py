"""The logarithm of a row's sum of exponentials, in an order of sums that doesn't depend on how many rows there are.

Shape letters: L rows, V numbers of a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagerunner.ops.dispatch import gpu_kernel

_PIECE = 512


@gpu_kernel("logsumexp")
def row_logsumexp(x_LV: torch.Tensor) -> torch.Tensor:
    """Of float32 rows, [L]. torch sums a single long row in other pieces than several."""
    most_L1 = x_LV.amax(-1, keepdim=True)
    pieces_LNP = F.pad((x_LV - most_L1).exp_(), (0, -x_LV.shape[1] % _PIECE)).unflatten(-1, (-1, _PIECE))
    return most_L1.squeeze(-1) + pieces_LNP.sum(-1).sum(-1).log_()
