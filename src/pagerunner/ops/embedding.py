"""Rows of a table of embeddings. Shape letters: T tokens, V vocabulary, D features."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagerunner.ops.dispatch import gpu_kernel
from pagerunner.ops.native import small


def embedding(ids_T: torch.Tensor, table_VD: torch.Tensor) -> torch.Tensor:
    """Rows `ids` of the table, [T, D]. On a CPU an id outside the table raises IndexError."""
    if small.serves(table_VD) and small.counts(ids_T):
        return small.table_rows(ids_T, table_VD, table_VD.shape[0], in_panels=False)
    return F.embedding(ids_T, table_VD)


def chosen_within(places_T: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of `count` rows, and which of them are none, [T, 1]: those are some other row's."""
    most = count - 1
    return places_T.clamp(0, most), ((places_T < 0) | (places_T > most)).unsqueeze(1)


@gpu_kernel("embedding")
def span_embedding(ids_T: torch.Tensor, table_VD: torch.Tensor, first: int) -> torch.Tensor:
    """Rows of ids from `first` on, of which the table has the first V, [T, D]. Zeros for other ids."""
    places_T, others_T1 = chosen_within(ids_T - first, table_VD.shape[0])
    return embedding(places_T, table_VD).masked_fill(others_T1, 0.0)


def scaled(x_TD: torch.Tensor, factor: float) -> torch.Tensor:
    """`x * factor`, [T, D]."""
    return small.scaled(x_TD, factor) if small.serves(x_TD) else x_TD * factor
