"""Qwen3, dense: every query and key head has a norm before its rotary positions.

Shape letters: T tokens of the step, S sampled tokens, D hidden features, N query and key/value heads together, H query
heads, K key/value heads, V vocabulary.
"""

from __future__ import annotations

import torch

from pagerunner.batch import ForwardBatch
from pagerunner.layers.attention import PagedAttention, head_projection
from pagerunner.layers.linear import Linear
from pagerunner.layers.mlp import GatedMLP
from pagerunner.layers.module import Module
from pagerunner.layers.norm import RMSNorm
from pagerunner.models.decoder import CausalLM, Decoder, DecoderLayer
from pagerunner.models.decoder_config import DecoderConfig
from pagerunner.models.rotary import Rotary
from pagerunner.ops.paged_attention import HeadPrep
from pagerunner.ops.rope import RopeAngles


class Attention(Module):
    """Grouped-query attention with normed heads and rotary positions."""

    def __init__(self, config: DecoderConfig, layer_index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        sizes = (config.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim)
        self.qkv_proj = head_projection(*sizes, dtype, bias=config.qkv_bias)
        self.o_proj = Linear(self.num_heads * self.head_dim, config.hidden_size, dtype, bias=config.o_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype)
        self.attend = PagedAttention(layer_index, self.head_dim**-0.5)

    def add_(self, x_TD: torch.Tensor, norm: RMSNorm, angles: RopeAngles, batch: ForwardBatch) -> None:
        """Add the attention of `norm(x)` to x in place."""
        qkv = self.qkv_proj.of_norm(x_TD, norm)
        prep = HeadPrep(
            self.num_heads,
            self.num_kv_heads,
            angles,
            self.q_norm.weights["weight"],
            self.k_norm.weights["weight"],
            self.q_norm.eps,
        )
        out_THd = self.attend.from_projection(qkv.view(qkv.shape[0], -1, self.head_dim), prep, batch)
        self.o_proj.add_(out_THd.reshape(qkv.shape[0], -1), x_TD)


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
