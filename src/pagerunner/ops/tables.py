"""Writing page tables. Shape letter: N entries."""

from __future__ import annotations

import torch

from pagerunner.ops.dispatch import gpu_kernel


@gpu_kernel("tables")
def write_entries(table: torch.Tensor, places_N: torch.Tensor, entries_N: torch.Tensor) -> None:
    """`table[places] = entries`, all int64 and flat. No place is listed twice."""
    table.index_copy_(0, places_N, entries_N)
