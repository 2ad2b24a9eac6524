"""EAGLE drafters: one or few of Llama's or Qwen3's layers, of which the first one also gets embeddings. This is what both versions share, and EAGLE-1.

EAGLE-1 joins embedding and hidden state by a product. Its first layer has no norm before attention.

Shape letters: T tokens of the step, S wanted tokens, D hidden features, I features of a layer's input, X features that a pass takes of a token, V the
drafter's vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from pagerunner.batch import ForwardBatch
from pagerunner.layers.embedding import Embedding
from pagerunner.layers.linear import Linear
from pagerunner.layers.mlp import GatedMLP
from pagerunner.layers.module import Module
from pagerunner.layers.norm import RMSNorm
from pagerunner.layers.sublayer import ResidualStream, StepContext
from pagerunner.models import llama, qwen3
from pagerunner.models.configs.drafter import EagleConfig
from pagerunner.models.decoder import DecoderLayer
from pagerunner.models.drafting import Drafted, DraftModel, SharedWeights
from pagerunner.models.rotary import Rotary
from pagerunner.quant.sinks import OffsetSink, Sink


class FirstLayer(Module):
    """Attention of an input of `features`, which has no norm, and a feed-forward."""

    def __init__(self, config: EagleConfig, features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn = attention_of(config)(config, 0, dtype, features)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, dtype, bias=config.mlp_bias)

    def attend(self, x_TI: torch.Tensor, stream: ResidualStream, context: StepContext) -> None:
        """Add attention of `x` to the stream, and then the feed-forward. Only wanted tokens stay in the stream."""
        attention = self.self_attn
        mixed_SI = attention.attention_of(attention.heads_of(x_TI), context)
        attention.add_mixed(stream, mixed_SI, context.wanted_S)
        if stream.x_TD.shape[0]:
            self.mlp.add_to(stream, self.post_attention_layernorm)


def attention_of(config: EagleConfig) -> type[llama.Attention]:
    """The attention of the drafter's layers."""
    return qwen3.Attention if config.qk_norm else llama.Attention


class EagleDrafter(DraftModel):
    """Layers, and embedding and output weights where they aren't the target's."""

    # the table the other way, and what training compares with
    unused_tensors: tuple[str, ...] = ("t2d", "verifier_norm.", "verifier_lm_head.")

    def __init__(
        self, config: EagleConfig, shared: SharedWeights, first: FirstLayer, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(shared)
        hidden, inner, bias, attention = (
            config.hidden_size,
            config.intermediate_size,
            config.mlp_bias,
            attention_of(config),
        )
        self.takes, self.taken_size = config.takes or "final", config.target_size * max(len(config.takes), 1)
        self.layers: tuple[Any, ...] = (
            first,
            *(
                DecoderLayer(config, attention(config, i, dtype), GatedMLP(hidden, inner, dtype, bias=bias), dtype)
                for i in range(1, config.num_layers)
            ),
        )
        self.rotary = Rotary(config.rope, config.head_dim, dtype, device)
        self.target_vocab_size = config.target_vocab_size
        if config.own_embedding:
            self.embed_tokens = Embedding(config.vocab_size, hidden, dtype)
        else:
            self.unused_tensors = (*self.unused_tensors, "embed_tokens.")
        if config.own_head:  # every rank has the whole of it: it is small, and its ids are not those that ranks divide
            self.lm_head = Linear(hidden, config.draft_vocab_size, dtype, plain=True)
        if config.maps_ids:
            self.weights["d2t"] = torch.empty(config.draft_vocab_size, dtype=torch.int64, device="meta")
        self.own_embedding, self.own_head = config.own_embedding, config.own_head
        self.divided = not config.own_head

    def step(self, hidden_TX: torch.Tensor, batch: ForwardBatch) -> Drafted:
        """See DraftModel."""
        embedding = self.embed_tokens if self.own_embedding else self.shared.embed_tokens
        context = StepContext(self.rotary(batch.positions), batch)
        first, *others = self.layers
        ends = context._replace(wanted_S=batch.wanted_S)
        stream = self.enter(first, embedding(batch.token_ids), hidden_TX, context if others else ends)
        for layer in others:
            layer(stream, ends if layer is others[-1] else context)
        return self.leave(stream)

    @abstractmethod
    def enter(
        self, first: FirstLayer, embedded_TD: torch.Tensor, hidden_TX: torch.Tensor, context: StepContext
    ) -> ResidualStream:
        """The stream behind the first layer. It may be in the place of `hidden`."""

    @abstractmethod
    def leave(self, stream: ResidualStream) -> Drafted:
        """What the stream behind the last layer is for the output weights and for the next pass."""

    def compute_logits(self, logit_input_SD: torch.Tensor) -> torch.Tensor:
        """See DraftModel."""
        return self.lm_head(logit_input_SD) if self.own_head else super().compute_logits(logit_input_SD)

    def to_target(self, ids: torch.Tensor) -> torch.Tensor:
        """See DraftModel."""
        table_V = self.weights.get("d2t")
        return ids if table_V is None else table_V[ids]

    def sink(self, name: str) -> Sink:
        """See Module. A checkpoint's table has offsets; in memory there are ids."""
        return OffsetSink(self.weights[name], self.target_vocab_size, "token id")

    def randomize(self, generator: torch.Generator) -> None:
        """See Module. Ids of the drafter's vocabulary are the target's lowest ones."""
        if (table_V := self.weights.get("d2t")) is not None:
            table_V.copy_(torch.arange(len(table_V), device=table_V.device))


class EagleForCausalLM(EagleDrafter):
    """EAGLE-1."""

    def __init__(self, config: EagleConfig, shared: SharedWeights, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, shared, FirstLayer(config, config.hidden_size, dtype), dtype, device)
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, dtype, bias=config.fc_bias)

    def enter(
        self, first: FirstLayer, embedded_TD: torch.Tensor, hidden_TX: torch.Tensor, context: StepContext
    ) -> ResidualStream:
        """See EagleDrafter."""
        x_TD = self.fc(torch.cat((embedded_TD, hidden_TX), 1))
        stream = ResidualStream(x_TD, context.batch.rows.row_T)
        first.attend(x_TD, stream, context)
        return stream

    def leave(self, stream: ResidualStream) -> Drafted:
        """See EagleDrafter."""
        return Drafted(stream.whole(), stream.x_TD)
