"""Rows of a table of embeddings. Shape letters: T tokens, V vocabulary, D features."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagerunner.ops.native import small


def embedding(ids_T: torch.Tensor, table_VD: torch.Tensor) -> torch.Tensor:
    """Rows `ids` of the table, [T, D]. On a CPU an id outside the table raises IndexError."""
    if small.serves(table_VD) and small.counts(ids_T):
        return small.table_rows(ids_T, table_VD, table_VD.shape[0], in_panels=False)
    return F.embedding(ids_T, table_VD)


def scaled(x_TD: torch.Tensor, factor: float) -> torch.Tensor:
    """`x * factor`, [T, D]."""
    return small.scaled(x_TD, factor) if small.serves(x_TD) else x_TD * factor
