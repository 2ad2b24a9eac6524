"""Qwen3, dense: every query and key head has a norm before its rotary positions."""

from __future__ import annotations

import torch

from pagerunner.layers.norm import RMSNorm
from pagerunner.models import llama
from pagerunner.models.configs.decoder import DecoderConfig
from pagerunner.ops.paged_attention import HeadPrep
from pagerunner.ops.rope import RopeAngles


class Attention(llama.Attention):
    """Grouped-query attention with normed heads and rotary positions."""

    def __init__(self, config: DecoderConfig, layer_index: int, dtype: torch.dtype, in_features: int = 0) -> None:
        super().__init__(config, layer_index, dtype, in_features)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype)

    def prep(self, angles: RopeAngles) -> HeadPrep:
        """What is done to heads between projection and attention."""
        q_norm, k_norm = self.q_norm, self.k_norm
        return HeadPrep(self.num_heads, self.num_kv_heads, angles, q_norm.weight_D, k_norm.weight_D, q_norm.eps)


class Qwen3ForCausalLM(llama.LlamaForCausalLM):
    """The decoder and its output weights, which may be the embedding's."""

    attention = Attention
