"""Token embeddings, and their use as output weights.

Shape letters: T tokens, S sampled tokens, D features, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagerunner.layers.module import Module
from pagerunner.ops.linear import linear


class Embedding(Module):
    """A table of one row per token id."""

    cuts = {"weight": 0}  # rows of token ids

    def __init__(self, vocab_size: int, features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = {"weight": torch.empty(vocab_size, features, dtype=dtype, device="meta")}

    @property
    def table_VD(self) -> torch.Tensor:
        """The rows of all token ids."""
        return self.weights["weight"]

    def __call__(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """The rows of `token_ids`, [T, D]."""
        return F.embedding(token_ids_T, self.weights["weight"])

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Scores of every token, [S, V], for models whose output weights are these."""
        return linear(hidden_SD, self.weights["weight"])
