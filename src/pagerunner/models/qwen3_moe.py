"""Qwen3-MoE: Qwen3 with a mixture of experts in place of the feed-forward of most layers."""

from __future__ import annotations

import torch

from pagerunner.layers.mlp import GatedMLP
from pagerunner.layers.moe import Experts, ExpertSizes, Router, SparseMLP
from pagerunner.layers.sublayer import FeedForward
from pagerunner.models.configs.decoder import DecoderConfig
from pagerunner.models.configs.moe import Qwen3MoeConfig
from pagerunner.models.qwen3 import Qwen3ForCausalLM
from pagerunner.ops.routing import Routing


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """The decoder and its output weights, which may be the embedding's."""

    @staticmethod
    def feed_forward(config: DecoderConfig, layer_index: int, dtype: torch.dtype) -> FeedForward:
        """A layer's experts; a dense feed-forward in the layers that the config names."""
        assert isinstance(config, Qwen3MoeConfig), "the config is of another family"
        if layer_index in config.dense_layers:
            return GatedMLP(config.hidden_size, config.intermediate_size, dtype)
        sizes = ExpertSizes(config.num_experts, config.hidden_size, config.expert_size)
        routing = Routing(config.active_experts, normalise=config.normalise_weights)
        router = Router(config.hidden_size, config.num_experts, dtype, routing)
        return SparseMLP(router, Experts(sizes, dtype), names={"router": "gate"})
