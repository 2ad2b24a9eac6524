"""gpt-oss: windowed and full layers in turn, attention with a learned sink per head, and experts in every layer.

Shape letters: T tokens of the step, S sampled tokens, D hidden features, N query and key/value heads together, H query
heads, K key/value heads, E experts, I an expert's inner features, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from pagerunner.batch import ForwardBatch
from pagerunner.layers.linear import Linear
from pagerunner.layers.module import Module
from pagerunner.layers.norm import RMSNorm
from pagerunner.layers.sublayer import FeedForward, ResidualStream
from pagerunner.models.attention import GroupedQueryAttention
from pagerunner.models.configs.window import GptOssConfig
from pagerunner.models.decoder import CausalLM, Decoder, DecoderLayer
from pagerunner.models.rotary import Rotary
from pagerunner.ops.activation import clamped_swiglu
from pagerunner.ops.moe import moe_experts, route_topk_softmax
from pagerunner.ops.rope import RopeAngles, rope_


class Attention(GroupedQueryAttention):
    """Grouped-query attention with rotary positions; a sink takes a share of each head's weight."""

    def __init__(self, config: GptOssConfig, layer_index: int, dtype: torch.dtype) -> None:
        super().__init__(config, layer_index, dtype, qkv_bias=config.qkv_bias, o_bias=config.o_bias)
        self.weights = {"sinks": torch.empty(self.num_heads, dtype=dtype, device="meta")}

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
        rope_(qk_TNd, angles)
        q_THd, k_TKd = qk_TNd[:, : self.num_heads], qk_TNd[:, self.num_heads :]
        return self.attend(q_THd, k_TKd, v_TKd, batch, self.weights["sinks"], wanted_S).flatten(1)


class Experts(Module):
    """Feed-forwards with biases, whose gate and up features alternate.

    The checkpoint holds each of the four for all experts together, its matrices with inputs before outputs.
    """

    def __init__(self, config: GptOssConfig, dtype: torch.dtype) -> None:
        super().__init__()
        experts, features, inner = config.num_experts, config.hidden_size, config.intermediate_size
        sizes = {
            "gate_up_proj": (experts, 2 * inner, features),
            "gate_up_proj_bias": (experts, 2 * inner),
            "down_proj": (experts, features, inner),
            "down_proj_bias": (experts, features),
        }
        self.weights = {name: torch.empty(size, dtype=dtype, device="meta") for name, size in sizes.items()}
        self.activation = functools.partial(clamped_swiglu, limit=config.activation_limit)

    def __call__(self, x_TD: torch.Tensor, weights_TA: torch.Tensor, experts_TA: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the outputs of each token's experts, [T, D]."""
        return moe_experts(
            x_TD,
            weights_TA,
            experts_TA,
            self.weights["gate_up_proj"],
            self.weights["down_proj"],
            self.activation,
            self.weights["gate_up_proj_bias"],
            self.weights["down_proj_bias"],
        )

    def checkpoint(self, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
        """The matrices as the checkpoint has them."""
        for name, tensor in self.weights.items():
            yield f"{prefix}{name}", tensor.transpose(1, 2) if tensor.dim() == 3 else tensor


class SparseMLP(FeedForward):
    """A router with biases, and the experts it sends each token to."""

    def __init__(self, config: GptOssConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.router = Linear(config.hidden_size, config.num_experts, dtype, bias=True)
        self.experts = Experts(config, dtype)
        self.active = config.active_experts

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        weights_TA, experts_TA = route_topk_softmax(self.router(x_TD), self.active)
        return self.experts(x_TD, weights_TA, experts_TA)


class GptOssForCausalLM(CausalLM):
    """The decoder and its output weights, which may be the embedding's."""

    def __init__(self, config: GptOssConfig, dtype: torch.dtype, device: torch.device) -> None:
        layers = tuple(
            DecoderLayer(config, Attention(config, i, dtype), SparseMLP(config, dtype), dtype)
            for i in range(config.num_layers)
        )
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        rotary = Rotary(config.rope, config.head_dim, dtype, device)
        super().__init__(config, Decoder(config, layers, norm, rotary, dtype), dtype)
