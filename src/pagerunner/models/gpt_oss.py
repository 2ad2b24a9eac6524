"""gpt-oss: windowed and full layers in turn, attention with a learned sink per head, and experts in every layer.

Shape letters: T tokens of the step, S sampled tokens, D hidden features, N query and key/value heads together, H query
heads, K key/value heads, V vocabulary.
"""

from __future__ import annotations

import torch

from pagerunner.layers.attention import query_heads
from pagerunner.layers.cuts import Section, TensorCut
from pagerunner.layers.moe import Experts, ExpertSizes, Router, SparseMLP
from pagerunner.layers.norm import RMSNorm
from pagerunner.layers.sublayer import ResidualStream, StepContext
from pagerunner.models.attention import GroupedQueryAttention
from pagerunner.models.configs.window import GptOssConfig
from pagerunner.models.decoder import CausalLM, Decoder, DecoderLayer
from pagerunner.models.rotary import Rotary
from pagerunner.ops.activation import GatedActivation
from pagerunner.ops.paged_attention import HeadPrep
from pagerunner.ops.routing import Routing, few_tokens
from pagerunner.quant.fixed import FixedOrder


class Attention(GroupedQueryAttention):
    """Grouped-query attention with rotary positions; a sink takes a share of each head's weight."""

    def __init__(self, config: GptOssConfig, layer_index: int, dtype: torch.dtype) -> None:
        super().__init__(config, layer_index, dtype, qkv_bias=config.qkv_bias, o_bias=config.o_bias)
        self.weights = {"sinks": torch.empty(self.num_heads, dtype=dtype, device="meta")}
        self.cuts = {"sinks": TensorCut(0, (Section(query_heads(self.num_heads)),))}

    def adds(self, tokens: int) -> bool:
        """See Mixer. Kernels of few tokens add on their way. cuBLAS has a product with a bias that doesn't; then the norm's kernel adds."""
        return few_tokens(tokens) and not isinstance(self.o_proj.method, FixedOrder)

    def mix(self, stream: ResidualStream, norm: RMSNorm, context: StepContext) -> torch.Tensor:
        """See Mixer."""
        angles, batch, wanted_S = context
        prep = HeadPrep(self.num_heads, self.num_kv_heads, angles)
        qkv_TNd = self.project(stream, norm)
        return self.attend.from_projection(qkv_TNd, prep, batch, self.weights["sinks"], wanted_S).flatten(1)


def _sparse_mlp(config: GptOssConfig, dtype: torch.dtype) -> SparseMLP:
    """A router, and the experts it sends each token to; all with biases. An expert's gate and up features alternate."""
    sizes = ExpertSizes(config.num_experts, config.hidden_size, config.intermediate_size)
    activation = GatedActivation("clamped_swiglu", config.activation_limit)
    routing = Routing(config.active_experts, normalise=True)
    return SparseMLP(
        Router(config.hidden_size, config.num_experts, dtype, routing, bias="bias"),
        Experts(sizes, dtype, transposed=True, bias=True, activation=activation),
    )


class GptOssForCausalLM(CausalLM):
    """The decoder and its output weights, which may be the embedding's."""

    def __init__(self, config: GptOssConfig, dtype: torch.dtype, device: torch.device) -> None:
        layers = tuple(
            DecoderLayer(config, Attention(config, i, dtype), _sparse_mlp(config, dtype), dtype)
            for i in range(config.num_layers)
        )
        rotary = Rotary(config.rope, config.head_dim, dtype, device)
        super().__init__(config, Decoder(config, layers, rotary, dtype), dtype)
