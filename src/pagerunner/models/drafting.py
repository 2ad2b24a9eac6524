"""Models that draft tokens from what another model, the target, has computed: what they have in common.

A drafter works on the target's tokens, each with the token behind it. At position p it gets token p + 1 and what the target left of position p. It
stores keys and values of its own at p, and its logits are for token p + 2. Then it goes on alone, one token at a time: it gets the token that it has drafted and
its own hidden state.

Example: the target has computed tokens 0 to 9 and sampled token 10. The first pass is over positions 0 to 9, with tokens 1 to 10. Its last logits are
for token 11. The second pass is at position 10, with the drafted token 11.

Shape letters: T tokens of the step, S wanted tokens, D hidden features, X features that a pass takes of a token, V the drafter's vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import torch

from pagerunner.batch import ForwardBatch
from pagerunner.layers.embedding import Embedding
from pagerunner.layers.linear import Linear
from pagerunner.layers.module import Module
from pagerunner.layers.sublayer import ResidualStream

Takes = tuple[int, ...] | Literal["final", "streams", "nothing"]
"""What a drafter takes of each of the target's tokens. Numbers of layers: the residual stream after so many layers, with all outputs added to it
and before any norm, one beside another. "final": the hidden state behind the final norm. "streams": the parallel residual streams behind the last layer.
"nothing": [T, 0]."""


class Drafted(NamedTuple):
    """What a pass leaves of each wanted token: what `compute_logits` gets, [S, D], and what the next pass takes, [S, X]."""

    logit_input: torch.Tensor
    hidden: torch.Tensor


class SharedWeights:
    """The target's embedding and output weights, for a drafter that has none of its own. They stay the target's: no child of the drafter."""

    __slots__ = ("embed_tokens", "head")

    def __init__(self, embed_tokens: Embedding, head: Linear | Embedding) -> None:
        self.embed_tokens, self.head = embed_tokens, head

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Scores of every vocabulary entry, [S, V]; of one of several ranks, those of its token ids."""
        return self.head(hidden_SD) if isinstance(self.head, Linear) else self.head.logits(hidden_SD)


class DraftModel(Module, ABC):
    """Drafts tokens.

    `prefix` is what the names of its tensors begin with in the target's checkpoint; "": they are in files of its own.
    """

    takes: Takes
    taken_size: int
    """Features that the first pass takes of a token."""
    prefix: str = ""
    shifted = True
    """The first pass gets the token behind each, and guesses the one after that. False: it gets the tokens themselves, and guesses nothing new."""
    divided = True
    """Of several ranks, each computes the logits of its own token ids. False: each computes all."""

    def __init__(self, shared: SharedWeights) -> None:
        super().__init__()
        self.shared, self.taken_dtype = shared, shared.embed_tokens.dtype

    def first(self, taken_TX: torch.Tensor, batch: ForwardBatch) -> Drafted:
        """The pass over tokens of the target: what it left of each, and a batch with the token behind each."""
        return self.step(self.combined(taken_TX), batch)

    def combined(self, taken_TX: torch.Tensor) -> torch.Tensor:
        """What was taken of the target, as `step` gets it."""
        return taken_TX

    @abstractmethod
    def step(self, hidden_TX: torch.Tensor, batch: ForwardBatch) -> Drafted:
        """A pass. Keys and values of all the batch's tokens are stored. If it is `last_alone`, there are results of `logits_index`' tokens alone."""

    def embedded(self, batch: ForwardBatch) -> torch.Tensor:
        """The target's embeddings of the tokens, [T, D], but zeros at position 0, as DeepSeek's modules were trained with."""
        return self.shared.embed_tokens(batch.token_ids).masked_fill_((batch.positions == 0).unsqueeze(1), 0)

    def compute_logits(self, logit_input_SD: torch.Tensor) -> torch.Tensor:
        """Scores of every entry of the drafter's vocabulary, [S, V]."""
        return self.shared.logits(logit_input_SD)

    def to_target(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids of the drafter's vocabulary as those of the target's."""
        return ids


class TakenStates:
    """The residual streams after some numbers of layers, one beside another, [T, n * D]."""

    def __init__(self, layers: tuple[int, ...], stream: ResidualStream) -> None:
        self._layers = layers
        self._size = stream.x_TD.shape[-1]
        self.states_TX = stream.x_TD.new_empty(stream.x_TD.shape[0], len(layers) * self._size)

    def take(self, layers_done: int, stream: ResidualStream) -> None:
        """Copy the stream if it is wanted after so many layers."""
        if layers_done in self._layers:
            place = self._layers.index(layers_done)
            stream.copy_to(self.states_TX[:, place * self._size : (place + 1) * self._size])


def set_memory(model: Module, first: int) -> None:
    """Let the layers of a model, whose pieces of memory count from 0, have those from number `first` on."""
    for module in model.modules():
        for value in vars(module).values():
            if not isinstance(value, Module) and hasattr(value, "layer_index"):
                value.layer_index += first
