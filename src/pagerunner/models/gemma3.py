"""Gemma-3, text. Most layers are windowed, some are full, and each kind has rotary positions of its own base. Norms stand
before and after both halves of a layer, and their weights count from 1. Query and key heads are normed. Embeddings are
scaled.

Shape letters: T tokens of the step, S sampled tokens, D hidden features, N query and key/value heads together, H query
heads, K key/value heads, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagerunner.batch import ForwardBatch
from pagerunner.layers.mlp import GatedMLP
from pagerunner.layers.norm import OffsetRMSNorm, RMSNorm
from pagerunner.layers.sublayer import ResidualStream, StepContext
from pagerunner.models import llama
from pagerunner.models.configs.window import Gemma3Config
from pagerunner.models.decoder import CausalLM, Decoder, DecoderLayer
from pagerunner.models.rotary import Rotary
from pagerunner.ops.activation import gelu_tanh_and_mul, softcap_
from pagerunner.ops.embedding import scaled
from pagerunner.ops.paged_attention import HeadPrep
from pagerunner.ops.rope import RopeAngles


class Angles(NamedTuple):
    """A step's angles in layers that see everything, and in those that see a window."""

    full: RopeAngles
    local: RopeAngles


class Attention(llama.Attention):
    """Grouped-query attention with normed heads and rotary positions."""

    adds_itself = False

    def __init__(self, config: Gemma3Config, layer_index: int, dtype: torch.dtype) -> None:
        scale, softcap = config.query_scalar**-0.5, config.attention_softcap
        super().__init__(config, layer_index, dtype, scale=scale, softcap=softcap)
        self.q_norm = OffsetRMSNorm(self.head_dim, config.rms_norm_eps, dtype)
        self.k_norm = OffsetRMSNorm(self.head_dim, config.rms_norm_eps, dtype)
        self.is_local = config.local_layers[layer_index]

    def mix(self, stream: ResidualStream, norm: RMSNorm, context: StepContext) -> torch.Tensor:
        """See Mixer."""
        own = context.angles.local if self.is_local else context.angles.full
        return super().mix(stream, norm, context._replace(angles=own))

    def prep(self, angles: RopeAngles) -> HeadPrep:
        """What is done to heads between projection and attention."""
        norms = self.q_norm.weight_D, self.k_norm.weight_D, self.q_norm.eps
        return HeadPrep(self.num_heads, self.num_kv_heads, angles, *norms, offset=True)


class NormedLayer(DecoderLayer):
    """A decoder layer that also has a norm behind each of its halves, before the addition to the stream."""

    def __init__(self, config: Gemma3Config, layer_index: int, dtype: torch.dtype) -> None:
        names = {"feed_forward_norm": "pre_feedforward_layernorm"}
        feed_forward = GatedMLP(config.hidden_size, config.intermediate_size, dtype, activation=gelu_tanh_and_mul)
        attention = Attention(config, layer_index, dtype)
        super().__init__(config, attention, feed_forward, dtype, norm=OffsetRMSNorm, names=names)
        self.post_attention_layernorm = OffsetRMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.post_feedforward_layernorm = OffsetRMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    def __call__(self, stream: ResidualStream, context: StepContext) -> None:
        """See Layer."""
        self.mixer.add_to(stream, self.mixer_norm, context)
        if stream.pending_TD is not None:
            stream.pending_norm = self.post_attention_layernorm
            stream.pending_TD = self.feed_forward(stream.normed(self.feed_forward_norm), stream.adapters)
            stream.pending_norm = self.post_feedforward_layernorm


class Gemma3Decoder(Decoder):
    """A stack with scaled embeddings and two kinds of angles."""

    def __init__(self, config: Gemma3Config, dtype: torch.dtype, device: torch.device) -> None:
        layers = tuple(NormedLayer(config, i, dtype) for i in range(config.num_layers))
        rotary = Rotary(config.rope, config.head_dim, dtype, device)
        super().__init__(config, layers, rotary, dtype, norm=OffsetRMSNorm)
        self.local_rotary = Rotary(config.local_rope, config.head_dim, dtype, device)
        self.scale = float(torch.tensor(config.hidden_size**0.5).to(dtype))  # rounded as the reference rounds it

    def angles(self, batch: ForwardBatch) -> Angles:
        """See Decoder."""
        return Angles(self.rotary(batch.positions), self.local_rotary(batch.positions))

    def embed(self, batch: ForwardBatch) -> ResidualStream:
        """See Decoder."""
        return ResidualStream(scaled(self.embed_tokens(batch.token_ids), self.scale), adapters=batch.adapters)


class Gemma3ForCausalLM(CausalLM):
    """The decoder and its output weights, which may be the embedding's."""

    def __init__(self, config: Gemma3Config, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, Gemma3Decoder(config, dtype, device), dtype)
        self.softcap = config.logits_softcap

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Scores of every vocabulary entry, [S, V] in the dtype of the weights."""
        logits_SV = super().compute_logits(hidden_SD)
        return softcap_(logits_SV, self.softcap) if self.softcap else logits_SV
