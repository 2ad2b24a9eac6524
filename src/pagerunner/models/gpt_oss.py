"""gpt-oss: windowed and full layers in turn, attention with a learned sink per head, and experts in every layer.

Shape letters: T tokens of the step, S sampled tokens, D hidden features, N query and key/value heads together, H query
heads, K key/value heads, A active experts of a token, V vocabulary.
"""

from __future__ import annotations

import functools

import torch

from pagerunner.batch import ForwardBatch
from pagerunner.layers.linear import Linear
from pagerunner.layers.moe import Experts, ExpertSizes
from pagerunner.layers.norm import RMSNorm
from pagerunner.layers.sublayer import FeedForward, ResidualStream
from pagerunner.models.attention import GroupedQueryAttention
from pagerunner.models.configs.window import GptOssConfig
from pagerunner.models.decoder import CausalLM, Decoder, DecoderLayer
from pagerunner.models.rotary import Rotary
from pagerunner.ops.activation import clamped_swiglu
from pagerunner.ops.moe import route_topk_softmax
from pagerunner.ops.rope import RopeAngles, rope_


class Attention(GroupedQueryAttention):
    """Grouped-query attention with rotary positions; a sink takes a share of each head's weight."""

    cuts = {"sinks": 0}  # heads

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


class SparseMLP(FeedForward):
    """A router, and the experts it sends each token to; all with biases. An expert's gate and up features alternate."""

    def __init__(self, config: GptOssConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.router = Linear(config.hidden_size, config.num_experts, dtype, bias=True, plain=True)
        sizes = ExpertSizes(config.num_experts, config.hidden_size, config.intermediate_size)
        activation = functools.partial(clamped_swiglu, limit=config.activation_limit)
        self.experts = Experts(sizes, dtype, transposed=True, interleaved=True, bias=True, activation=activation)
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
        rotary = Rotary(config.rope, config.head_dim, dtype, device)
        super().__init__(config, Decoder(config, layers, rotary, dtype), dtype)
