"""Rows of a table that has some of the token ids: what any version of `span_embedding` has to find."""

from __future__ import annotations

from collections.abc import Callable

import torch


def check_span(
    version: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor], features: int, dtype: torch.dtype, device: str
) -> None:
    """Ids below the table's, its first and last one, one between them, those above, and no ids. Where there is no row nothing is read."""
    table = torch.randn(7, features).to(dtype)
    ids = torch.tensor([0, 99, 100, 103, 106, 107, 2**20])
    found = version(ids.to(device), table.to(device), 100).cpu()
    assert torch.equal(found[[2, 3, 4]], table[[0, 3, 6]])
    assert found.shape == (7, features) and not found[[0, 1, 5, 6]].any()
    assert version(ids[:0].to(device), table.to(device), 100).shape == (0, features)
