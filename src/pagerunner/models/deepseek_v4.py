"""DeepSeek-V4: one vector per token that is key and value of every head, kept in a window and, compressed, of everything.

The formulas are those of the technical report's sections 2.1 (experts by token id in the first layers), 2.2
(manifold-constrained hyper-connections) and 2.3 (compressed sparse and heavily compressed attention).

Shape letters: T tokens of the step, S sampled tokens, D hidden features, M residual streams, H heads, d head size, N slots
that the step completes, E experts, A active experts of a token, I an expert's inner features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from pagerunner.attention.calls import IndexerQueries
from pagerunner.attention.compressed import SlotPooling
from pagerunner.batch import ForwardBatch
from pagerunner.layers.compressed import PagedSlots, PagedWindowVectors
from pagerunner.layers.cuts import Features, Section, TensorCut, by_inputs, by_outputs
from pagerunner.layers.linear import FusedLinear, GroupedLinear, Linear
from pagerunner.layers.mlp import inner_features
from pagerunner.layers.module import CheckpointTensor, Module
from pagerunner.layers.moe import ExpertNames, Experts, ExpertSizes, Router
from pagerunner.layers.norm import RMSNorm
from pagerunner.layers.recurrent import PagedRecurrence
from pagerunner.layers.streams import Streams
from pagerunner.layers.sublayer import ResidualStream, StepContext
from pagerunner.models.configs.deepseek_v4 import DeepseekV4Config, LayerConfig
from pagerunner.models.decoder import CausalLM, Decoder
from pagerunner.models.rotary import Rotary
from pagerunner.ops.activation import GatedActivation, limited_silu_and_mul
from pagerunner.ops.indexer_heads import hadamard, indexer_queries
from pagerunner.ops.norm import rms_norm
from pagerunner.ops.rope import RopeAngles, rope_pairs_
from pagerunner.ops.routing import Routing
from pagerunner.ops.slot_pooling import finish_slots
from pagerunner.ops.streams import StreamWeights
from pagerunner.quant.sinks import IndexSink, Sink


def _float32(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.float32, device="meta")


class Pooling(Module):
    """What a slot's vector is made of: its tokens' projections to values and gates, a bias per place, and a norm."""

    def __init__(
        self, hidden: int, head_dim: int, ratio: int, eps: float, dtype: torch.dtype, *, overlap: bool
    ) -> None:
        super().__init__()
        size = 2 * head_dim if overlap else head_dim
        self.weights = {"ape": _float32(ratio, size)}
        self.proj = FusedLinear(hidden, {"wkv": size, "wgate": size}, dtype, plain=True)
        self.norm = RMSNorm(head_dim, eps, dtype)

    @property
    def place_bias(self) -> torch.Tensor:
        """What a slot's tokens' gates get by their place in the slot, [ratio, features]."""
        return self.weights["ape"]

    def project(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Values and gates of every token, side by side."""
        return self.proj(x_TD)


class Indexer(Module):
    """Chooses slots: queries and weights per head, and keys pooled as slots are."""

    def __init__(self, config: DeepseekV4Config, ratio: int, dtype: torch.dtype) -> None:
        super().__init__()
        own, hidden = config.indexer, config.hidden_size
        self.heads, self.head_dim, self.top_k = own.heads, own.head_dim, own.top_k
        self.compressor = Pooling(hidden, own.head_dim, ratio, config.rms_norm_eps, dtype, overlap=True)
        self.wq_b = Linear(config.query_rank, own.heads * own.head_dim, dtype)
        self.weights_proj = Linear(hidden, own.heads, dtype, plain=True)

    def __call__(self, x_TD: torch.Tensor, query_TR: torch.Tensor, angles: RopeAngles, mixed: bool) -> IndexerQueries:
        """The step's queries. `mixed`: as keys are."""
        q_TJI = self.wq_b(query_TR).view(-1, self.heads, self.head_dim)
        scale = (self.heads * self.head_dim) ** -0.5
        return IndexerQueries(*indexer_queries(q_TJI, self.weights_proj(x_TD), angles, scale, mixed), self.top_k)


class Angles:
    """A step's angles: of its tokens in layers with a window only, of its tokens in other layers, and of slots by their ratio."""

    def __init__(self, window: Rotary, slots: Rotary, batch: ForwardBatch) -> None:
        self.window = window(batch.positions)
        self.tokens = slots(batch.positions)
        self._rotary, self._positions = slots, batch.positions
        self._slots: dict[int, RopeAngles] = {}

    def slots(self, ratio: int, done_N: torch.Tensor) -> RopeAngles:
        """Of the slots that the tokens `done` complete: a slot's position is its first token's."""
        if ratio not in self._slots:
            self._slots[ratio] = self._rotary(self._positions[done_N] + 1 - ratio)
        return self._slots[ratio]

    def slots_of_all(self, ratio: int) -> RopeAngles:
        """Of the slots that tokens would complete, whether they do or not."""
        if ratio not in self._slots:
            self._slots[ratio] = self._rotary(self._positions + (1 - ratio))
        return self._slots[ratio]


class Attention(Module):
    """Attention over the window's vectors and, where the layer compresses, over slots; a sink takes a share of each head."""

    def __init__(self, config: DeepseekV4Config, layer: LayerConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, heads, head_dim = config.hidden_size, config.num_heads, config.head_dim
        self.num_heads, self.head_dim, self.rope_dim = heads, head_dim, config.rope_dim
        self.rank, self.groups, self.ratio, self.eps = (
            config.query_rank,
            config.output_groups,
            layer.ratio,
            config.rms_norm_eps,
        )
        own = Features("output_groups", self.groups, even=True)  # a group's heads are the inputs of one product
        self.weights = {"attn_sink": _float32(heads)}
        self.cuts = {"attn_sink": TensorCut(0, (Section(own, heads // self.groups),))}
        self.a_proj = FusedLinear(hidden, {"wq_a": config.query_rank, "wkv": head_dim}, dtype)
        self.q_norm = RMSNorm(config.query_rank, self.eps, dtype)
        group_dim, rank = heads * head_dim // self.groups, config.output_rank
        self.wq_b = Linear(config.query_rank, heads * head_dim, dtype, cut=by_outputs(own, group_dim))
        self.norm = RMSNorm(head_dim, self.eps, dtype)
        self.wo_a = GroupedLinear(self.groups, group_dim, rank, dtype, cut=by_outputs(own, rank))
        self.wo_b = Linear(self.groups * rank, hidden, dtype, cut=by_inputs(own, rank))
        index, scale = layer.memory_index, head_dim**-0.5
        self.attend_window = PagedWindowVectors(index, scale)
        if layer.ratio > 1:
            self.attend_slots = PagedSlots(index + 1, scale)
            self.pool = PagedRecurrence(index + 2)
            self.compressor = Pooling(hidden, head_dim, layer.ratio, self.eps, dtype, overlap=layer.sparse)
        if layer.sparse:
            self.indexer = Indexer(config, layer.ratio, dtype)
        self.sparse = layer.sparse

    def __call__(self, x_TD: torch.Tensor, angles: Angles, batch: ForwardBatch) -> torch.Tensor:
        """Attention of the normed hidden states."""
        rope = angles.window if self.ratio == 1 else angles.tokens
        both = self.a_proj(x_TD)
        query_TR = self.q_norm(both[:, : self.rank])
        q_THd = self.wq_b(query_TR).view(-1, self.num_heads, self.head_dim)
        vectors_Td = both[:, self.rank :]
        pooled_TX = self._pooled(x_TD, batch) if self.ratio > 1 else None
        chooser = self.indexer(x_TD, query_TR, rope, self.attend_slots.is_mixed(batch)) if self.sparse else None
        attend = self._merged if self.attend_window.merges(batch) else self._apart
        out_TGI = attend(q_THd, vectors_Td, pooled_TX, chooser, angles, batch).reshape(x_TD.shape[0], self.groups, -1)
        return self.wo_b(self.wo_a(out_TGI).flatten(1))

    @property
    def _poolings(self) -> tuple[Pooling, ...]:
        return (self.compressor, self.indexer.compressor) if self.sparse else (self.compressor,)

    def _pooled(self, x_TD: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """What the slots that the step completes are made of, by token."""
        poolings = self._poolings
        recurrence = SlotPooling(tuple(pooling.place_bias for pooling in poolings), overlap=self.sparse)
        return self.pool(recurrence, tuple(pooling.project(x_TD) for pooling in poolings), batch)

    def _merged(
        self,
        q_THd: torch.Tensor,
        vectors_Td: torch.Tensor,
        pooled_TX: torch.Tensor | None,
        chooser: IndexerQueries | None,
        angles: Angles,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Attention of raw queries and vectors by a backend that does the rest."""
        rope, slots = angles.window, None
        if pooled_TX is not None:
            rope, norms = angles.tokens, tuple(pooling.norm.parameters for pooling in self._poolings)
            slots = self.attend_slots.made_of(pooled_TX, norms, angles.slots_of_all(self.ratio), chooser, batch)
        sinks_H = self.weights["attn_sink"]
        return self.attend_window.merged(q_THd, vectors_Td, self.norm.parameters, rope, slots, batch, sinks_H)

    def _apart(
        self,
        q_THd: torch.Tensor,
        vectors_Td: torch.Tensor,
        pooled_TX: torch.Tensor | None,
        chooser: IndexerQueries | None,
        angles: Angles,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """The same step by step."""
        rope, sinks_H = angles.window if pooled_TX is None else angles.tokens, self.weights["attn_sink"]
        q_THd, vectors_Td = rms_norm(q_THd, torch.ones_like(q_THd[0, 0]), self.eps), self.norm(vectors_Td)
        rope_pairs_(q_THd[..., -self.rope_dim :], rope)
        rope_pairs_(vectors_Td[:, None, -self.rope_dim :], rope)
        if pooled_TX is None:
            out_THd = self.attend_window(q_THd, vectors_Td, batch, sinks_H)
        else:
            window = self.attend_window.partial(q_THd, vectors_Td, batch)
            done_N = self.attend_slots.completed(batch)
            pooled_NX, slot_rope = pooled_TX.index_select(0, done_N), angles.slots(self.ratio, done_N)
            norms = tuple(pooling.norm.parameters for pooling in self._poolings)
            vectors_Nd = finish_slots(pooled_NX[:, : self.head_dim], norms[0], slot_rope)
            keys_NI = finish_slots(pooled_NX[:, self.head_dim :], norms[1], slot_rope) if self.sparse else None
            if keys_NI is not None and self.attend_slots.is_mixed(batch):
                keys_NI = hadamard(keys_NI)
            out_THd = self.attend_slots(q_THd, window, vectors_Nd, keys_NI, chooser, batch, sinks_H)
        rope_pairs_(out_THd[..., -self.rope_dim :], RopeAngles(rope.cos_T1D, -rope.sin_T1D))  # values were rotated too
        return out_THd


class HashRouter(Router):
    """A router whose tokens' ids name their experts; the scores are the experts' weights."""

    def __init__(self, config: DeepseekV4Config, dtype: torch.dtype, routing: Routing) -> None:
        super().__init__(config.hidden_size, config.experts, dtype, routing)
        shape = (config.hash_size, routing.active)
        self.weights["tid2eid"] = torch.empty(shape, dtype=torch.int64, device="meta")

    def randomize(self, generator: torch.Generator) -> None:
        """See Module. Token ids name different experts, all of them alike often."""
        super().randomize(generator)
        table_VA = self.weights["tid2eid"]
        first_V = torch.arange(table_VA.shape[0], device=table_VA.device).mul_(self.routing.active)
        next_A = torch.arange(self.routing.active, device=table_VA.device)
        table_VA.copy_((first_V.unsqueeze(-1) + next_A) % self.experts)

    def sink(self, name: str) -> Sink:
        """See Module."""
        if name == "tid2eid":
            return IndexSink(self.weights[name], self.experts, "expert")
        return super().sink(name)

    def experts_of(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """The experts of tokens with these ids, [T, A]."""
        return self.weights["tid2eid"][token_ids_T]


class SharedExpert(Module):
    """The expert that every token passes."""

    def __init__(self, config: DeepseekV4Config, dtype: torch.dtype) -> None:
        super().__init__()
        inner = config.expert_size
        own = inner_features(inner)
        cuts = dict.fromkeys(("w1", "w3"), by_outputs(own))
        self.w13 = FusedLinear(config.hidden_size, {"w1": inner, "w3": inner}, dtype, cuts=cuts)
        self.w2 = Linear(inner, config.hidden_size, dtype, cut=by_inputs(own))
        self.limit = config.activation_limit

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        return self.w2(limited_silu_and_mul(self.w13(x_TD), self.limit))


class ExpertMLP(Module):
    """Each token's routed experts, weighted, plus the shared one."""

    def __init__(self, config: DeepseekV4Config, *, hashed: bool, dtype: torch.dtype) -> None:
        super().__init__()
        routing = Routing(config.active_experts, config.routing, normalise=True, factor=config.routing_factor)
        if hashed:
            self.gate: Router = HashRouter(config, dtype, routing)
        else:
            self.gate = Router(config.hidden_size, config.experts, dtype, routing, choice_bias="bias")
        sizes = ExpertSizes(config.experts, config.hidden_size, config.expert_size)
        activation = GatedActivation("limited_silu", config.activation_limit)
        self.experts = Experts(sizes, dtype, names=ExpertNames("w1", "w3", "w2"), activation=activation)
        self.shared_experts = SharedExpert(config, dtype)

    def __call__(
        self, x_TD: torch.Tensor, token_ids_T: torch.Tensor, row_T: torch.Tensor | None = None, most_tokens: int = 0
    ) -> torch.Tensor:
        """Apply the layer. Padding (a negative row) goes to no routed expert. `most_tokens`: see `ForwardBatch`."""
        chosen_TA = self.gate.experts_of(token_ids_T) if isinstance(self.gate, HashRouter) else None
        routes = self.gate(x_TD, chosen_TA, most_tokens, row_T)
        return self.experts(x_TD, routes).add_(self.shared_experts(x_TD))

    def join(self, most_tokens: int) -> None:
        """See Module."""
        self.experts.run_for_others(self.gate.routing.active, most_tokens)


class HyperConnectedLayer(Module):
    """Attention and experts. Each reads a mixture of the residual streams and is added to all of them; the streams are
    mixed among each other by a matrix whose rows and columns sum to one.
    """

    def __init__(self, config: DeepseekV4Config, layer: LayerConfig, dtype: torch.dtype) -> None:
        super().__init__()
        streams = config.streams
        self.iterations = config.stream_iterations
        self.stream_eps, self.eps = config.stream_eps, config.rms_norm_eps
        mixes = (2 + streams) * streams
        for place in ("attn", "ffn"):
            self.weights[f"hc_{place}_fn"] = _float32(mixes, streams * config.hidden_size)
            self.weights[f"hc_{place}_base"] = _float32(mixes)
            self.weights[f"hc_{place}_scale"] = _float32(3)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attn = Attention(config, layer, dtype)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.ffn = ExpertMLP(config, hashed=layer.hashed, dtype=dtype)

    def __call__(self, stream: ResidualStream, context: StepContext) -> None:
        """Lead the streams through the layer, [T, M, D]; of the wanted tokens, [S, M, D]. What the experts leave is still to be added."""
        assert isinstance(stream, Streams)
        angles, batch, wanted_S = context
        x_TD, gates = stream.enter(self._weights("attn"), self.iterations, self.attn_norm.parameters)
        stream.leave(self.attn(x_TD, angles, batch), gates)
        token_ids = batch.token_ids
        if wanted_S is not None:
            stream.keep(wanted_S)
            token_ids = token_ids.index_select(0, wanted_S)
        if stream.x_TD.shape[0]:
            x_TD, gates = stream.enter(self._weights("ffn"), self.iterations, self.ffn_norm.parameters)
            stream.leave(self.ffn(x_TD, token_ids, stream.row_T, batch.most_tokens), gates)
        elif batch.most_tokens:
            self.ffn.join(batch.most_tokens)

    def _weights(self, place: str) -> StreamWeights:
        fn, base, scale = (self.weights[f"hc_{place}_{part}"] for part in ("fn", "base", "scale"))
        return StreamWeights(fn, base, scale, self.stream_eps, self.eps)


class Collapse(Module):
    """The streams become one, weighted by what is in them."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__()
        streams = config.streams
        self.eps, self.stream_eps = config.rms_norm_eps, config.stream_eps
        self.weights = {
            "hc_fn": _float32(streams, streams * config.hidden_size),
            "hc_base": _float32(streams),
            "hc_scale": _float32(1),
        }

    def __call__(self, stream: Streams, norm: RMSNorm) -> torch.Tensor:
        """Normed, [T, D]."""
        fn, base, scale = (self.weights[f"hc_{part}"] for part in ("fn", "base", "scale"))
        return stream.end(StreamWeights(fn, base, scale, self.stream_eps, self.eps), norm.parameters)


class StreamsDecoder(Decoder):
    """A stack with several residual streams, which are one again before the final norm."""

    def __init__(self, config: DeepseekV4Config, dtype: torch.dtype, device: torch.device) -> None:
        layers = tuple(HyperConnectedLayer(config, layer, dtype) for layer in config.layers)
        super().__init__(config, layers, Rotary(config.slot_rope, config.rope_dim, dtype, device), dtype)
        self.streams = config.streams
        self.stream_shape = (config.streams, config.hidden_size)
        self.hc_head = Collapse(config)
        self.window_rotary = Rotary(config.window_rope, config.rope_dim, dtype, device)

    def angles(self, batch: ForwardBatch) -> Angles:
        """See Decoder."""
        return Angles(self.window_rotary, self.rotary, batch)

    def embed(self, batch: ForwardBatch) -> Streams:
        """The embedding in each of the streams, [T, M, D]."""
        return self.stream_of(self.embed_tokens(batch.token_ids).unsqueeze(1).repeat(1, self.streams, 1), batch)

    def stream_of(self, x_TD: torch.Tensor, batch: ForwardBatch) -> Streams:
        """See Decoder."""
        return Streams(x_TD, batch.rows.row_T, batch.most_tokens)

    def finish(self, stream: ResidualStream) -> torch.Tensor:
        """See Decoder."""
        assert isinstance(stream, Streams)
        return self.hc_head(stream, self.norm)


class DeepseekV4ForCausalLM(CausalLM):
    """The decoder and its output weights."""

    unused_tensors = ("mtp.",)  # layers for multi-token prediction
    names = {"lm_head": "head"}

    def __init__(self, config: DeepseekV4Config, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, StreamsDecoder(config, dtype, device), dtype)

    def checkpoint(self, prefix: str = "") -> Iterator[CheckpointTensor]:
        """Also under the names of the published files, which differ from those that transformers writes."""
        for tensor in super().checkpoint(prefix):
            yield tensor
            required = () if tensor.sink.optional else (tensor.name,)
            name, instead_of = _published(tensor.name), tensor.instead_of or required
            if name != tensor.name:
                yield replace(tensor, name=name, instead_of=instead_of, beside=tuple(map(_published, tensor.beside)))


def _published(name: str) -> str:
    """A tensor's name in the published files."""
    for saved, published in (
        ("embed_tokens.", "embed."),
        ("hc_head.hc_", "hc_head_"),
        (".attn.norm.", ".attn.kv_norm."),
    ):
        name = name.replace(saved, published)
    return name.removeprefix("model.")
