"""Token embeddings, and their use as output weights.

Shape letters: T tokens, S sampled tokens, D features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pagerunner.layers.cuts import Features, by_outputs, tensor_cuts
from pagerunner.layers.module import CheckpointTensor, Module
from pagerunner.quant.base import Unquantized, WeightMethod


class Embedding(Module):
    """A table of one row per token id, stored as `method` says."""

    def __init__(self, vocab_size: int, features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.vocab_size, self.features, self.dtype = vocab_size, features, dtype
        self.store(Unquantized())

    def store(self, method: WeightMethod) -> None:
        """Store the table as `method` says. It has no memory afterwards."""
        self.method = method
        self.weights = method.create(self.vocab_size, self.features, self.dtype)

    @property
    def table_VD(self) -> torch.Tensor:
        """The rows of all token ids."""
        return self.method.dense(self.weights)

    def __call__(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """The rows of `token_ids`, [T, D]."""
        return self.method.rows(token_ids_T, self.weights)

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Scores of every token, [S, V], for models whose output weights are these."""
        return self.method.apply(hidden_SD, self.weights)

    def randomize(self, generator: torch.Generator) -> None:
        """See Module."""
        self.method.randomize(self.weights, generator)

    def checkpoint(self, prefix: str = "") -> Iterator[CheckpointTensor]:
        """What the form asks for; rows of token ids may be divided."""
        sinks = self.method.sinks(self.weights, slice(0, self.vocab_size))
        cuts = tensor_cuts(sinks, by_outputs(vocabulary(self.vocab_size)))
        for name, sink in sinks.items():
            yield CheckpointTensor(f"{prefix}{name}", sink, self, cut=cuts[name])


def vocabulary(size: int) -> Features:
    """The token ids of embeddings and of output weights: devices take parts of `size` ids, the last one the rest."""
    return Features("vocabulary", size)
