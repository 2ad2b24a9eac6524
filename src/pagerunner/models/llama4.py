"""Llama-4 (text). Most layers attend in chunks, with rotary positions. Every few layers one attends to everything, without
rotary positions. Experts have weighted inputs instead of weighted outputs.

Shape letters: T tokens of the step, S sampled tokens, D hidden features, N query and key/value heads together, H query
heads, K key/value heads, d head size, E experts, A active experts of a token, I an expert's inner features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pagerunner.batch import ForwardBatch
from pagerunner.layers.linear import Linear
from pagerunner.layers.mlp import GatedMLP
from pagerunner.layers.module import Module
from pagerunner.layers.norm import RMSNorm
from pagerunner.layers.sublayer import FeedForward, ResidualStream
from pagerunner.models.attention import GroupedQueryAttention
from pagerunner.models.configs.llama4 import Llama4Config
from pagerunner.models.decoder import CausalLM, Decoder, DecoderLayer
from pagerunner.models.rotary import Rotary
from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.moe import moe_experts
from pagerunner.ops.norm import rms_norm
from pagerunner.ops.rope import RopeAngles, rope_pairs_


class Attention(GroupedQueryAttention):
    """Grouped-query attention, with rotary positions or with queries that grow with their position."""

    def __init__(self, config: Llama4Config, layer_index: int, dtype: torch.dtype) -> None:
        super().__init__(config, layer_index, dtype, qkv_bias=config.qkv_bias, o_bias=config.o_bias)
        self.rotary, self.eps = config.rotary[layer_index], config.rms_norm_eps
        self.head_norm = config.head_norm and self.rotary
        self.floor, self.scale = config.temperature_floor, 0.0 if self.rotary else config.temperature_scale

    def mix(
        self,
        stream: ResidualStream,
        norm: RMSNorm,
        angles: RopeAngles,
        batch: ForwardBatch,
        wanted_S: torch.Tensor | None,
    ) -> torch.Tensor:
        """See Mixer."""
        qk_TNd, v_TKd = self.rotated_and_values(self.project(stream, norm))
        if self.rotary:
            rope_pairs_(qk_TNd, angles)
        if self.head_norm:
            qk_TNd = rms_norm(qk_TNd, torch.ones_like(qk_TNd[0, 0]), self.eps)
        q_THd, k_TKd = qk_TNd[:, : self.num_heads], qk_TNd[:, self.num_heads :]
        if self.scale:
            steps_T = torch.floor((batch.positions.float() + 1) / self.floor)
            q_THd = (q_THd * (torch.log1p(steps_T) * self.scale + 1)[:, None, None]).to(q_THd.dtype)
        return self.attend(q_THd, k_TKd, v_TKd, batch, wanted=wanted_S).flatten(1)


class Experts(Module):
    """Gated feed-forwards; the checkpoint holds each matrix for all experts together, with inputs before outputs."""

    def __init__(self, config: Llama4Config, dtype: torch.dtype) -> None:
        super().__init__()
        experts, features, inner = config.num_experts, config.hidden_size, config.intermediate_size
        self.weights = {
            "gate_up_proj": torch.empty(experts, 2 * inner, features, dtype=dtype, device="meta"),
            "down_proj": torch.empty(experts, features, inner, dtype=dtype, device="meta"),
        }

    def __call__(self, x_TD: torch.Tensor, weights_TA: torch.Tensor, experts_TA: torch.Tensor) -> torch.Tensor:
        """The sum of the outputs of each token's experts, [T, D]. An expert's input is multiplied by its weight."""
        tokens, active = experts_TA.shape
        x_ND = (x_TD.unsqueeze(1) * weights_TA.unsqueeze(-1)).flatten(0, 1)
        ones_N1 = x_ND.new_ones(tokens * active, 1)
        gate_up, down = self.weights["gate_up_proj"], self.weights["down_proj"]
        out_ND = moe_experts(x_ND, ones_N1, experts_TA.reshape(-1, 1), gate_up, down, silu_and_mul)
        return out_ND.view(tokens, active, -1).sum(1)

    def checkpoint(self, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
        """The matrices as the checkpoint has them."""
        for name, tensor in self.weights.items():
            yield f"{prefix}{name}", tensor.transpose(1, 2)


class ExpertMLP(FeedForward):
    """The experts that a token's best logits name, weighted by their sigmoids, plus the shared one."""

    def __init__(self, config: Llama4Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.router = Linear(config.hidden_size, config.num_experts, dtype)
        self.experts = Experts(config, dtype)
        self.shared_expert = GatedMLP(config.hidden_size, config.intermediate_size, dtype)
        self.active = config.active_experts

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        logits_TA, experts_TA = self.router(x_TD).topk(self.active, -1)
        weights_TA = logits_TA.float().sigmoid().to(x_TD.dtype)
        return self.experts(x_TD, weights_TA, experts_TA).add_(self.shared_expert(x_TD))


def _layer(config: Llama4Config, layer_index: int, dtype: torch.dtype) -> DecoderLayer:
    feed_forward: FeedForward
    if layer_index in config.expert_layers:
        feed_forward = ExpertMLP(config, dtype)
    else:
        feed_forward = GatedMLP(config.hidden_size, config.dense_size, dtype)
    names = {"feed_forward": "feed_forward"}
    return DecoderLayer(config, Attention(config, layer_index, dtype), feed_forward, dtype, names=names)


class Llama4ForCausalLM(CausalLM):
    """The decoder and its output weights, which may be the embedding's.

    A checkpoint with a vision part names the text model `language_model`.
    """

    unused_tensors = ("vision_model.", "multi_modal_projector.")

    def __init__(self, config: Llama4Config, dtype: torch.dtype, device: torch.device) -> None:
        layers = tuple(_layer(config, i, dtype) for i in range(config.num_layers))
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        rotary = Rotary(config.rope, config.head_dim, dtype, device)
        super().__init__(config, Decoder(config, layers, norm, rotary, dtype), dtype)
        self.outer_name = "language_model." if config.family == "llama4" else ""

    def checkpoint(self, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
        """See the class."""
        yield from super().checkpoint(f"{prefix}{self.outer_name}")
