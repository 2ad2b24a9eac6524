"""Llama 2 and 3.x; Mistral and Qwen2 differ from it in configuration only (which projections have biases).

Shape letters: T tokens of the step, S sampled tokens, D hidden features, N query and key/value heads together, H query
heads, K key/value heads, d head size, I features before an output projection, V vocabulary.
"""

from __future__ import annotations

import torch

from pagerunner.layers.mlp import GatedMLP
from pagerunner.layers.norm import RMSNorm
from pagerunner.layers.sublayer import FeedForward, ResidualStream, StepContext
from pagerunner.models.attention import GroupedQueryAttention
from pagerunner.models.configs.decoder import DecoderConfig
from pagerunner.models.decoder import CausalLM, Decoder, DecoderLayer
from pagerunner.models.rotary import Rotary
from pagerunner.ops.paged_attention import HeadPrep
from pagerunner.ops.rope import RopeAngles


class Attention(GroupedQueryAttention):
    """Grouped-query attention with rotary positions."""

    adds_itself = True

    def __init__(
        self,
        config: DecoderConfig,
        layer_index: int,
        dtype: torch.dtype,
        in_features: int = 0,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
    ) -> None:
        biases = {"qkv_bias": config.qkv_bias, "o_bias": config.o_bias}
        super().__init__(config, layer_index, dtype, **biases, scale=scale, softcap=softcap, in_features=in_features)

    def mix(self, stream: ResidualStream, norm: RMSNorm, context: StepContext) -> torch.Tensor:
        """See Mixer."""
        angles, batch, wanted_S = context
        in_parts = wanted_S is None and self.attend.takes_parts(self.prep(angles), batch)
        return self.attention_of(self.project(stream, norm, in_parts=in_parts), context)

    def attention_of(self, qkv_TNd: torch.Tensor, context: StepContext) -> torch.Tensor:
        """What the output projection gets for these heads, which may come in parts; see `mix`."""
        angles, batch, wanted_S = context
        return self.attend.from_projection(qkv_TNd, self.prep(angles), batch, wanted=wanted_S).flatten(1)

    def prep(self, angles: RopeAngles) -> HeadPrep:
        """What is done to heads between projection and attention."""
        return HeadPrep(self.num_heads, self.num_kv_heads, angles)


class LlamaForCausalLM(CausalLM):
    """The decoder and its output weights, which may be the embedding's. Families close to it change its parts."""

    attention: type[Attention] = Attention

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        layers = tuple(
            DecoderLayer(config, self.attention(config, i, dtype), self.feed_forward(config, i, dtype), dtype)
            for i in range(config.num_layers)
        )
        rotary = Rotary(config.rope, config.head_dim, dtype, device)
        super().__init__(config, Decoder(config, layers, rotary, dtype), dtype)

    @staticmethod
    def feed_forward(config: DecoderConfig, layer_index: int, dtype: torch.dtype) -> FeedForward:
        """A layer's feed-forward."""
        return GatedMLP(config.hidden_size, config.intermediate_size, dtype, bias=config.mlp_bias)
