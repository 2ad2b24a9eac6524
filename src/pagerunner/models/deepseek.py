"""DeepSeek-V2, V2-Lite, V3 and V3.2: latent attention (to what an indexer chooses, in V3.2), and feed-forwards of routed and
shared experts.

Shape letters: T tokens of the step, S sampled tokens, D hidden features, H heads, d query head size, L latent and rotary
elements of a token, E experts, V vocabulary.
"""

from __future__ import annotations

import torch

from pagerunner.attention.calls import IndexerQueries, UpProjection
from pagerunner.batch import ForwardBatch, LatentPages
from pagerunner.layers.attention import query_heads
from pagerunner.layers.cuts import by_inputs, by_outputs
from pagerunner.layers.latent import PagedLatentAttention
from pagerunner.layers.linear import FusedLinear, Linear
from pagerunner.layers.mlp import GatedMLP
from pagerunner.layers.module import Module
from pagerunner.layers.moe import Experts, ExpertSizes, Router, SparseMLP
from pagerunner.layers.norm import LayerNorm, RMSNorm
from pagerunner.layers.sublayer import FeedForward, Mixer, ResidualStream, StepContext, only
from pagerunner.models.configs.deepseek import DeepseekConfig, IndexerConfig
from pagerunner.models.decoder import CausalLM, Decoder, DecoderLayer
from pagerunner.models.rotary import Rotary
from pagerunner.ops.indexer_heads import indexer_heads, is_mixed
from pagerunner.ops.latent_heads import LatentPrep
from pagerunner.ops.lora import Adapters
from pagerunner.ops.rope import RopeAngles
from pagerunner.ops.routing import Routing

RANK_NORM_EPS = 1e-6  # of the norms of compressed queries and latents, whatever the config's rms_norm_eps


class Indexer(Module):
    """Chooses what queries see: queries and weights per head from the layer's compressed queries, one key per token."""

    def __init__(self, config: DeepseekConfig, own: IndexerConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.head_dim, self.top_k = own.heads, own.head_dim, own.top_k
        self.wq_b = Linear(config.query_rank or 0, own.heads * own.head_dim, dtype)
        self.wk = Linear(config.hidden_size, own.head_dim, dtype)
        self.k_norm = LayerNorm(own.head_dim, RANK_NORM_EPS, dtype)
        self.weights_proj = Linear(config.hidden_size, own.heads, dtype, plain=True)

    def __call__(
        self, x_TD: torch.Tensor, query_TR: torch.Tensor, angles: RopeAngles, mixed: bool
    ) -> tuple[IndexerQueries, torch.Tensor]:
        """The step's queries, and its tokens' keys [T, I]. Rotary parts come first, as halves. `mixed`: see `ops.indexer_heads`."""
        q_TJI = self.wq_b(query_TR).view(-1, self.heads, self.head_dim)
        scale = (self.heads * self.head_dim) ** -0.5
        q_TJI, keys_TI, weights_TJ = indexer_heads(
            q_TJI, self.wk(x_TD), self.weights_proj(x_TD), self.k_norm.parameters, angles, scale, mixed
        )
        return IndexerQueries(q_TJI, weights_TJ, self.top_k), keys_TI


class Attention(Mixer):
    """Latent attention: queries directly or through a compressed form, keys and values from a shared latent.

    What is projected from the stream is one matrix, `a_proj`: queries or their compressed form, then latents and rotary parts.
    The exception are direct queries beside latents with a bias, as queries have none.
    """

    adds_itself = True

    def __init__(self, config: DeepseekConfig, layer_index: int, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, heads, bias = config.hidden_size, config.num_heads, config.attention_bias
        self.num_heads, self.key_dim, self.value_dim = heads, config.key_dim, config.value_dim
        self.query_rank = config.query_rank
        self.pairs = config.rope_pairs
        head_dim = config.key_dim + config.rope_dim
        self.vector_dim = vector = config.latent_dim + config.rope_dim
        self.separate = config.query_rank is None and bias
        own = query_heads(heads)
        queries = by_outputs(own, head_dim)
        projections: tuple[Linear, ...]
        if config.query_rank is not None:
            parts = {"q_a_proj": config.query_rank, "kv_a_proj_with_mqa": vector}
            self.a_proj = FusedLinear(hidden, parts, dtype, bias=bias)
            self.q_a_layernorm = RMSNorm(config.query_rank, RANK_NORM_EPS, dtype)
            self.q_b_proj = Linear(config.query_rank, heads * head_dim, dtype, cut=queries)
            projections = self.a_proj, self.q_b_proj
        elif self.separate:
            self.q_proj = Linear(hidden, heads * head_dim, dtype, cut=queries)
            self.kv_a_proj_with_mqa = Linear(hidden, vector, dtype, bias=bias)
            projections = self.q_proj, self.kv_a_proj_with_mqa
        else:
            parts = {"q_proj": heads * head_dim, "kv_a_proj_with_mqa": vector}
            self.a_proj = FusedLinear(hidden, parts, dtype, cuts={"q_proj": queries})
            projections = (self.a_proj,)
        self.kv_a_layernorm = RMSNorm(config.latent_dim, RANK_NORM_EPS, dtype)
        expanded = config.key_dim + config.value_dim
        up = by_outputs(own, expanded)
        self.kv_b_proj = Linear(config.latent_dim, heads * expanded, dtype, cut=up, needs_dense=True)
        out = by_inputs(own, config.value_dim)
        self.o_proj = Linear(heads * config.value_dim, hidden, dtype, bias=bias, cut=out)
        for linear in (*projections, self.o_proj):
            linear.takes_adapters = True
        scale = head_dim**-0.5 * config.rope.softmax_scale
        self.attend = PagedLatentAttention(layer_index, scale)
        self.sparse = config.indexer is not None
        if config.indexer is not None:
            self.indexer = Indexer(config, config.indexer, dtype)

    def mix(self, stream: ResidualStream, norm: RMSNorm, context: StepContext) -> torch.Tensor:
        """See Mixer."""
        angles, batch, wanted_S = context
        prep = LatentPrep(self.kv_a_layernorm.parameters, angles, self.pairs)
        if self.sparse:
            return self._mix_chosen(stream.normed(norm), prep, batch, wanted_S, stream.adapters)
        q, vectors_TL = self._projected(stream, norm)
        return only(self.attend(self._heads(q), vectors_TL, prep, self._up, batch), wanted_S).flatten(1)

    def _projected(self, stream: ResidualStream, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [T, H * d] and vectors [T, L], raw."""
        if self.separate:
            x_TD = stream.normed(norm)
            return self.q_proj(x_TD, stream.adapters), self.kv_a_proj_with_mqa(x_TD, stream.adapters)
        both = stream.product(norm, self.a_proj)
        first, vectors_TL = both[:, : -self.vector_dim], both[:, -self.vector_dim :]
        if self.query_rank is None:
            return first, vectors_TL
        return self.q_b_proj.of_norm(first, self.q_a_layernorm, stream.adapters), vectors_TL

    def _mix_chosen(
        self,
        x_TD: torch.Tensor,
        prep: LatentPrep,
        batch: ForwardBatch,
        wanted_S: torch.Tensor | None,
        adapters: Adapters | None,
    ) -> torch.Tensor:
        """As `mix`, over what the indexer chooses. `x` is normed."""
        both = self.a_proj(x_TD, adapters)
        query_TR, vectors_TL = self.q_a_layernorm(both[:, : self.query_rank]), both[:, self.query_rank :]
        q_THd = self._heads(self.q_b_proj(query_TR, adapters))
        pages = batch.kv[self.attend.layer_index]
        chooser = self.indexer(x_TD, query_TR, prep.angles, isinstance(pages, LatentPages) and is_mixed(pages))
        return only(self.attend(q_THd, vectors_TL, prep, self._up, batch, *chooser), wanted_S).flatten(1)

    def _heads(self, q: torch.Tensor) -> torch.Tensor:
        return q.unflatten(-1, (self.num_heads, -1))

    @property
    def _up(self) -> UpProjection:
        return UpProjection(self.kv_b_proj.dense_OI, self.num_heads, self.key_dim, self.value_dim)


def _sparse_mlp(config: DeepseekConfig, dtype: torch.dtype) -> SparseMLP:
    """Each token's routed experts, weighted, plus the shared ones that every token passes."""
    own = config.routing
    routing = Routing(own.top_k, own.scores, own.normalise, own.factor, own.groups, own.kept_groups)
    choice_bias = "e_score_correction_bias" if own.scores == "sigmoid" else None
    sizes = ExpertSizes(own.experts, config.hidden_size, config.expert_size)
    return SparseMLP(
        Router(config.hidden_size, own.experts, dtype, routing, choice_bias=choice_bias),
        Experts(sizes, dtype),
        shared=GatedMLP(config.hidden_size, config.shared_size, dtype, bias=config.mlp_bias),
        names={"router": "gate", "shared": "shared_experts"},
    )


def decoder_layer(config: DeepseekConfig, layer_index: int, dtype: torch.dtype) -> DecoderLayer:
    """Latent attention, and a feed-forward, in later layers of experts."""
    feed_forward: FeedForward
    if layer_index < config.dense_layers:
        feed_forward = GatedMLP(config.hidden_size, config.intermediate_size, dtype, bias=config.mlp_bias)
    else:
        feed_forward = _sparse_mlp(config, dtype)
    return DecoderLayer(config, Attention(config, layer_index, dtype), feed_forward, dtype)


class DeepseekForCausalLM(CausalLM):
    """The decoder and its output weights, which may be the embedding's."""

    def __init__(self, config: DeepseekConfig, dtype: torch.dtype, device: torch.device) -> None:
        layers = tuple(decoder_layer(config, i, dtype) for i in range(config.num_layers))
        rotary = Rotary(config.rope, config.rope_dim, dtype, device)
        super().__init__(config, Decoder(config, layers, rotary, dtype), dtype)
        last = config.num_layers
        self.unused_tensors = tuple(f"model.layers.{last + i}." for i in range(config.extra_layers))
