"""Qwen3, dense: every query and key head has a norm before its rotary positions.

Shape letters: T tokens of the step, S sampled tokens, D hidden features, N query and key/value heads together, H query
heads, K key/value heads, V vocabulary.
"""

from __future__ import annotations

import torch

from pagerunner.layers.mlp import GatedMLP
from pagerunner.layers.norm import RMSNorm
from pagerunner.models import llama
from pagerunner.models.configs.decoder import DecoderConfig
from pagerunner.models.decoder import CausalLM, Decoder, DecoderLayer
from pagerunner.models.rotary import Rotary
from pagerunner.ops.paged_attention import HeadPrep
from pagerunner.ops.rope import RopeAngles


class Attention(llama.Attention):
    """Grouped-query attention with normed heads and rotary positions."""

    def __init__(self, config: DecoderConfig, layer_index: int, dtype: torch.dtype) -> None:
        super().__init__(config, layer_index, dtype)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype)

    def prep(self, angles: RopeAngles) -> HeadPrep:
        """What is done to heads between projection and attention."""
        weights = self.q_norm.weights["weight"], self.k_norm.weights["weight"]
        return HeadPrep(self.num_heads, self.num_kv_heads, angles, *weights, self.q_norm.eps)


class Qwen3ForCausalLM(CausalLM):
    """The decoder and its output weights, which may be the embedding's."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        layers = tuple(
            DecoderLayer(
                config,
                Attention(config, i, dtype),
                GatedMLP(config.hidden_size, config.intermediate_size, dtype, bias=config.mlp_bias),
                dtype,
            )
            for i in range(config.num_layers)
        )
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        rotary = Rotary(config.rope, config.head_dim, dtype, device)
        super().__init__(config, Decoder(config, layers, norm, rotary, dtype), dtype)
