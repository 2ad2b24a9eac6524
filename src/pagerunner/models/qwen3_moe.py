"""Qwen3-MoE: Qwen3 with a mixture of experts in place of the feed-forward of most layers.

Shape letters: T tokens of the step, S sampled tokens, D hidden features, V vocabulary.
"""

from __future__ import annotations

import torch

from pagerunner.layers.mlp import GatedMLP
from pagerunner.layers.moe import SparseMLP
from pagerunner.layers.norm import RMSNorm
from pagerunner.models.configs.moe import Qwen3MoeConfig
from pagerunner.models.decoder import CausalLM, Decoder, DecoderLayer
from pagerunner.models.qwen3 import Attention
from pagerunner.models.rotary import Rotary


def _feed_forward(config: Qwen3MoeConfig, layer_index: int, dtype: torch.dtype) -> SparseMLP | GatedMLP:
    if layer_index in config.dense_layers:
        return GatedMLP(config.hidden_size, config.intermediate_size, dtype)
    return SparseMLP(
        config.hidden_size,
        config.expert_size,
        config.num_experts,
        config.active_experts,
        dtype,
        normalise=config.normalise_weights,
    )


class Qwen3MoeForCausalLM(CausalLM):
    """The decoder and its output weights, which may be the embedding's."""

    def __init__(self, config: Qwen3MoeConfig, dtype: torch.dtype, device: torch.device) -> None:
        layers = tuple(
            DecoderLayer(config, Attention(config, i, dtype), _feed_forward(config, i, dtype), dtype)
            for i in range(config.num_layers)
        )
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        rotary = Rotary(config.rope, config.head_dim, dtype, device)
        super().__init__(config, Decoder(config, layers, norm, rotary, dtype), dtype)
