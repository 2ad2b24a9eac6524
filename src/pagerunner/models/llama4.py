"""Llama-4 (text). Most layers attend in chunks, with rotary positions. Every few layers one attends to everything, without
rotary positions. Experts have weighted inputs instead of weighted outputs.

Shape letters: T tokens of the step, S sampled tokens, D hidden features, N query and key/value heads together, H query
heads, K key/value heads, d head size, V vocabulary.
"""

from __future__ import annotations

import torch

from pagerunner.layers.mlp import GatedMLP
from pagerunner.layers.moe import Experts, ExpertSizes, Router, SparseMLP
from pagerunner.layers.norm import RMSNorm
from pagerunner.layers.sublayer import FeedForward, ResidualStream, StepContext
from pagerunner.models.attention import GroupedQueryAttention
from pagerunner.models.configs.llama4 import Llama4Config
from pagerunner.models.decoder import CausalLM, Decoder, DecoderLayer
from pagerunner.models.rotary import Rotary
from pagerunner.ops.norm import rms_norm
from pagerunner.ops.rope import rope_pairs_, temper
from pagerunner.ops.routing import Routing


class Attention(GroupedQueryAttention):
    """Grouped-query attention, with rotary positions or with queries that grow with their position."""

    def __init__(self, config: Llama4Config, layer_index: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, layer_index, dtype, qkv_bias=config.qkv_bias, o_bias=config.o_bias)
        self.rotary, self.eps = config.rotary[layer_index], config.rms_norm_eps
        self.ones_d = torch.ones(self.head_dim, dtype=dtype, device=device)  # the heads' norm has no weight
        self.head_norm = config.head_norm and self.rotary
        self.floor, self.scale = config.temperature_floor, 0.0 if self.rotary else config.temperature_scale

    def mix(self, stream: ResidualStream, norm: RMSNorm, context: StepContext) -> torch.Tensor:
        """See Mixer."""
        angles, batch, wanted_S = context
        qk_TNd, v_TKd = self.rotated_and_values(self.project(stream, norm))
        if self.rotary:
            rope_pairs_(qk_TNd, angles)
        if self.head_norm:
            qk_TNd = rms_norm(qk_TNd, self.ones_d, self.eps)
        q_THd, k_TKd = qk_TNd[:, : self.num_heads], qk_TNd[:, self.num_heads :]
        if self.scale:
            q_THd = temper(q_THd, batch.positions, self.floor, self.scale)
        return self.attend(q_THd, k_TKd, v_TKd, batch, wanted=wanted_S).flatten(1)


def _sparse_mlp(config: Llama4Config, dtype: torch.dtype) -> SparseMLP:
    """The experts that a token's best logits name, their inputs weighted by the logits' sigmoids, plus the shared one."""
    sizes = ExpertSizes(config.num_experts, config.hidden_size, config.intermediate_size)
    routing = Routing(config.active_experts, scores="sigmoid")
    return SparseMLP(
        Router(config.hidden_size, config.num_experts, dtype, routing),
        Experts(sizes, dtype, transposed=True, weigh_inputs=True),
        shared=GatedMLP(config.hidden_size, config.intermediate_size, dtype),
        names={"shared": "shared_expert"},
    )


def _layer(config: Llama4Config, layer_index: int, dtype: torch.dtype, device: torch.device) -> DecoderLayer:
    feed_forward: FeedForward
    if layer_index in config.expert_layers:
        feed_forward = _sparse_mlp(config, dtype)
    else:
        feed_forward = GatedMLP(config.hidden_size, config.dense_size, dtype)
    names = {"feed_forward": "feed_forward"}
    return DecoderLayer(config, Attention(config, layer_index, dtype, device), feed_forward, dtype, names=names)


class Llama4ForCausalLM(CausalLM):
    """The decoder and its output weights, which may be the embedding's.

    A checkpoint with a vision part names the text model `language_model`.
    """

    unused_tensors = ("vision_model.", "multi_modal_projector.")

    def __init__(self, config: Llama4Config, dtype: torch.dtype, device: torch.device) -> None:
        layers = tuple(_layer(config, i, dtype, device) for i in range(config.num_layers))
        rotary = Rotary(config.rope, config.head_dim, dtype, device)
        super().__init__(config, Decoder(config, layers, rotary, dtype), dtype)
        if config.family == "llama4":
            self.names = {"model": "language_model.model", "lm_head": "language_model.lm_head"}
