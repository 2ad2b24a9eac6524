"""The stack that families share: embedding, layers of mixer and feed-forward, final norm, output weights.

Shape letters: T tokens of the step, S sampled tokens, D hidden features, X features that a drafter takes of a token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from pagerunner.batch import ForwardBatch
from pagerunner.dist.base import Stage
from pagerunner.layers.cuts import by_outputs
from pagerunner.layers.embedding import Embedding, vocabulary
from pagerunner.layers.linear import Linear
from pagerunner.layers.module import Module
from pagerunner.layers.norm import RMSNorm
from pagerunner.layers.sublayer import FeedForward, Mixer, ResidualStream, StepContext
from pagerunner.models.configs.base import ModelConfig
from pagerunner.models.drafting import DraftModel, SharedWeights, TakenStates, Takes
from pagerunner.models.rotary import Rotary

LAYER_NAMES = {
    "mixer_norm": "input_layernorm",
    "mixer": "self_attn",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward": "mlp",
}


class Layer(Protocol):
    """What a decoder asks of its layers. Layers with weights are also Modules."""

    def __call__(self, stream: ResidualStream, context: StepContext) -> None:
        """Add the layer's output to the stream; the last sublayer's may be pending afterwards. Only wanted tokens stay."""


def elsewhere(stream: ResidualStream, context: StepContext) -> None:
    """A layer that another stage runs."""


class DecoderLayer(Module):
    """Mixer (attention or a recurrence) and feed-forward, each behind a norm and added to the residual stream.

    `names` are the parts' names in the checkpoint where they differ from LAYER_NAMES, as `{"mixer": "linear_attn"}`.
    """

    def __init__(
        self,
        config: ModelConfig,
        mixer: Mixer,
        feed_forward: FeedForward,
        dtype: torch.dtype,
        *,
        norm: type[RMSNorm] = RMSNorm,
        names: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.names = LAYER_NAMES | dict(names or {})
        self.mixer_norm = norm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mixer = mixer
        self.feed_forward_norm = norm(config.hidden_size, config.rms_norm_eps, dtype)
        self.feed_forward = feed_forward

    def __call__(self, stream: ResidualStream, context: StepContext) -> None:
        """See Layer."""
        self.mixer.add_to(stream, self.mixer_norm, context)
        if stream.x_TD.shape[0]:
            self.feed_forward.add_to(stream, self.feed_forward_norm)
        elif stream.most_tokens:
            self.feed_forward.join(stream.most_tokens)


class Decoder(Module):
    """Embedding, layers, and final norm.

    `names` are the parts' names in the checkpoint where they differ from the attributes'. `stage` is None if all layers are here. `takes` is what a
    drafter takes of every token.
    """

    stage: Stage | None = None
    takes: Takes = ()

    def __init__(
        self,
        config: ModelConfig,
        layers: tuple[Layer, ...],
        rotary: Rotary,
        dtype: torch.dtype,
        *,
        norm: type[RMSNorm] = RMSNorm,
        names: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.names = dict(names or {})
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = layers
        self.stream_shape: tuple[int, ...] = (config.hidden_size,)
        self.dtype = dtype
        self.norm = norm(config.hidden_size, config.rms_norm_eps, dtype)
        self.rotary = rotary

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """The normed hidden states, [T, D]; [S, D] if the batch is `last_alone`. A stage that isn't the last returns what it has sent."""
        return self.run(batch)[0]

    def run(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The normed hidden states as of `__call__`, and what `takes` names, [T, X].

        If the last layer's outputs are taken of every token, hidden states are [T, D] even if the batch is `last_alone`.
        """
        context, stage = StepContext(self.angles(batch), batch), self.stage
        stream = self.embed(batch) if stage is None or stage.is_first else self._received(stage, batch)
        *others, last = self.layers
        taken = TakenStates(self.takes, stream) if self.takes and isinstance(self.takes, tuple) else None
        for done, layer in enumerate(others):
            if stage is not None:
                stage.begin_layer()
            if taken is not None:
                taken.take(done, stream)
            layer(stream, context)
        if stage is not None:
            stage.begin_layer()
        if stage is not None and not stage.is_last:
            last(stream, context)
            stage.send(stream.whole())
            return stream.x_TD, None
        if taken is not None:
            taken.take(len(others), stream)
        alone = batch.last_alone and not self._takes_last
        last(stream, context._replace(wanted_S=batch.logits_index) if alone else context)
        if taken is not None and not alone:
            taken.take(len(self.layers), stream)
        hidden = self.finish(stream) if stream.x_TD.shape[0] else stream.x_TD.new_empty(0, stream.x_TD.shape[-1])
        if taken is not None:
            return hidden, taken.states_TX
        if not self.takes:
            return hidden, None
        if self.takes == "nothing":
            return hidden, hidden.new_empty(batch.token_ids.shape[0], 0)
        return hidden, hidden if self.takes == "final" else stream.x_TD.flatten(1)

    @property
    def _takes_last(self) -> bool:
        """Whether a drafter takes what the last layer leaves."""
        return len(self.layers) in self.takes if isinstance(self.takes, tuple) else self.takes != "nothing"

    def _received(self, stage: Stage, batch: ForwardBatch) -> ResidualStream:
        """The stream behind the layers of the stage before."""
        tokens = batch.positions.shape[0]
        x_TD = torch.empty(tokens, *self.stream_shape, dtype=self.dtype, device=batch.positions.device)
        stage.receive(x_TD)
        return self.stream_of(x_TD, batch)

    def stream_of(self, x_TD: torch.Tensor, batch: ForwardBatch) -> ResidualStream:
        """The stream that a stage received."""
        return ResidualStream(x_TD, batch.rows.row_T, adapters=batch.adapters)

    def angles(self, batch: ForwardBatch) -> Any:
        """The rotary angles of the step's positions."""
        return self.rotary(batch.positions)

    def embed(self, batch: ForwardBatch) -> ResidualStream:
        """The stream before the first layer."""
        return ResidualStream(self.embed_tokens(batch.token_ids), batch.rows.row_T, batch.most_tokens, batch.adapters)

    def finish(self, stream: ResidualStream) -> torch.Tensor:
        """The hidden states that the output weights get, from the stream behind the last layer."""
        return stream.normed(self.norm)


class CausalLM(Module):
    """A decoder, whose embedding is its `embed_tokens`, and its output weights, which may be the embedding's; and a drafter, if it has one."""

    drafter: DraftModel | None = None

    def __init__(self, config: ModelConfig, model: Decoder, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.tied = config.tie_word_embeddings
        if not self.tied:
            cut = by_outputs(vocabulary(config.vocab_size))
            self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype, cut=cut, plain=True)

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """The final hidden states, [T, D]; [S, D] if the batch is `last_alone`."""
        return self.model(batch)

    def run(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The final hidden states as of `__call__`, and what the drafter takes of every token, [T, X].

        A drafter that takes what the last layer leaves needs all tokens: then hidden states are [T, D] even if the batch is `last_alone`.
        """
        return self.model.run(batch)

    @property
    def shared(self) -> SharedWeights:
        """What a drafter may use."""
        embedding = self.model.embed_tokens
        return SharedWeights(embedding, embedding if self.tied else self.lm_head)

    def draft_with(self, drafter: DraftModel) -> None:
        """Take a drafter, whose weights lie with the model's from then on.

        If its tensors are in the model's checkpoint, they are the model's there.
        """
        self.drafter, self.model.takes = drafter, drafter.takes
        if drafter.prefix:
            self.names = {**self.names, "drafter": drafter.prefix.removesuffix(".")}
            others = (name for name in self.unused_tensors if not drafter.prefix.startswith(name))
            self.unused_tensors = (*others, *(f"{drafter.prefix}{name}" for name in drafter.unused_tensors))

    def children(self) -> Iterator[tuple[str, Module]]:
        """See Module. A drafter that has files of its own is none."""
        for name, child in super().children():
            if child is not self.drafter or self.drafter.prefix:
                yield name, child

    def modules(self) -> Iterator[Module]:
        """See Module, a drafter's modules included."""
        yield from super().modules()
        if self.drafter is not None and not self.drafter.prefix:
            yield from self.drafter.modules()

    def keep(self, own: range) -> None:
        """Drop all layers but these, before they have memory: the embedding stays with the first one, norm and output weights with the last.

        Tied output weights are the embedding, which stays with both.
        """
        model = self.model
        first, last = own.start == 0, own.stop == len(model.layers)
        model.layers = tuple(layer if number in own else elsewhere for number, layer in enumerate(model.layers))
        for name, part in [*vars(model).items()]:
            if isinstance(part, Embedding):
                kept = first or (last and self.tied)
            else:
                kept = last or not isinstance(part, Module)
            if not kept:
                delattr(model, name)
        if not last and not self.tied:
            del self.lm_head

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Scores of every vocabulary entry, [S, V] in the dtype of the weights. To a stage's watch it is one more layer."""
        if self.model.stage is not None:
            self.model.stage.begin_layer()
        return self.model.embed_tokens.logits(hidden_SD) if self.tied else self.lm_head(hidden_SD)
