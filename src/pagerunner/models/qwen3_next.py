"""Qwen3-Next and Qwen3.5: gated delta rule layers with gated attention in between, dense or with experts.

Attention is full or windowed, as its layer's memory group is. Norms store their weight less one. A quarter of each head
is rotated. The query projection also computes a gate, through which attention's output passes.

Shape letters: T tokens
of the step, S sampled tokens, D hidden features, H query heads, K key/value heads, d head size, C convolution channels, V
vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from pagerunner.attention.recurrent import GatedDelta
from pagerunner.batch import ForwardBatch, StatePages
from pagerunner.layers.attention import PagedAttention, kv_heads, query_heads
from pagerunner.layers.cuts import Cut, Features, Section, TensorCut, by_inputs, by_outputs
from pagerunner.layers.linear import FusedLinear, Linear
from pagerunner.layers.mlp import GatedMLP
from pagerunner.layers.moe import Experts, ExpertSizes, Router, SparseMLP
from pagerunner.layers.norm import OffsetRMSNorm, RMSNorm
from pagerunner.layers.recurrent import CausalConv, PagedRecurrence
from pagerunner.layers.sublayer import FeedForward, Mixer, ResidualStream, StepContext, only
from pagerunner.models.configs.hybrid import ExpertsConfig, GatedDeltaConfig
from pagerunner.models.decoder import CausalLM, Decoder, DecoderLayer
from pagerunner.models.rotary import Rotary
from pagerunner.ops.activation import sigmoid_gated
from pagerunner.ops.lora import Adapters
from pagerunner.ops.norm import rms_norm_then_gate
from pagerunner.ops.rope import rope_
from pagerunner.ops.routing import Routing
from pagerunner.ops.side_by_side import by_groups, by_parts

Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Attention(Mixer):
    """Grouped-query attention with normed, partly rotated heads and gated outputs."""

    def __init__(self, config: GatedDeltaConfig, layer_index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.rotary_dim = config.num_heads, config.head_dim, config.rotary_dim
        q_size, kv_size = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.sizes = (2 * q_size, kv_size, kv_size)
        parts = dict(zip(("q_proj", "k_proj", "v_proj"), self.sizes, strict=True))
        bias, heads = config.attention_bias, query_heads(config.num_heads)
        shared = by_outputs(kv_heads(config.num_kv_heads), self.head_dim)
        cuts = {"q_proj": by_outputs(heads, 2 * self.head_dim), "k_proj": shared, "v_proj": shared}
        self.qkv_proj = FusedLinear(config.hidden_size, parts, dtype, bias=bias, cuts=cuts)
        self.o_proj = Linear(q_size, config.hidden_size, dtype, bias=bias, cut=by_inputs(heads, self.head_dim))
        self.qkv_proj.takes_adapters = self.o_proj.takes_adapters = True
        self.q_norm = OffsetRMSNorm(self.head_dim, config.rms_norm_eps, dtype)
        self.k_norm = OffsetRMSNorm(self.head_dim, config.rms_norm_eps, dtype)
        self.attend = PagedAttention(layer_index, self.head_dim**-0.5)

    def mix(self, stream: ResidualStream, norm: RMSNorm, context: StepContext) -> torch.Tensor:
        """See Mixer."""
        angles, batch, wanted_S = context
        q_gate, k, v = stream.product(norm, self.qkv_proj).split(self.sizes, -1)
        q_THd, gate_THd = q_gate.unflatten(-1, (-1, 2, self.head_dim)).unbind(2)
        q_THd, k_TKd = self.q_norm(q_THd), self.k_norm(k.unflatten(-1, (-1, self.head_dim)))
        rope_(q_THd[..., : self.rotary_dim], angles)
        rope_(k_TKd[..., : self.rotary_dim], angles)
        out_SHd = self.attend(q_THd, k_TKd, v.unflatten(-1, (-1, self.head_dim)), batch, wanted=wanted_S)
        return sigmoid_gated(out_SHd, only(gate_THd, wanted_S)).flatten(1)


class GatedDeltaNet(Mixer):
    """Everything of a gated delta rule layer but its input projections, which the two families store differently."""

    names = {"o_proj": "out_proj"}

    def __init__(self, config: GatedDeltaConfig, layer_index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        names, heads, head_dim = ("A_log", "dt_bias"), config.value_heads, config.value_head_dim
        self.weights = {name: torch.empty(heads, dtype=dtype, device="meta") for name in names}
        self.heads = Features("key_heads", config.key_heads, even=True)  # each with its value heads
        self.values = heads // config.key_heads * head_dim
        keys = Section(self.heads, config.key_head_dim)
        self.channels = (keys, keys, Section(self.heads, self.values))
        self.cuts = dict.fromkeys(names, TensorCut(0, (Section(self.heads, heads // config.key_heads),)))
        self.conv1d = CausalConv(config.conv_channels, config.conv_taps, dtype, self.channels)
        self.norm = RMSNorm(head_dim, config.rms_norm_eps, dtype)
        self.o_proj = Linear(heads * head_dim, config.hidden_size, dtype, cut=by_inputs(self.heads, self.values))
        self.o_proj.takes_adapters = True
        self.recur = PagedRecurrence(layer_index)

    def mix(self, stream: ResidualStream, norm: RMSNorm, context: StepContext) -> torch.Tensor:
        """See Mixer."""
        _, batch, wanted_S = context
        config = self.config
        grouped = self.takes_groups(batch)
        mixed_TC, gate_THd, rates_TH, decays_TH = self.project(stream.normed(norm), stream.adapters, grouped)
        recurrence = GatedDelta(
            conv_weight_CW=self.conv1d.weight_CW,
            decay_log_H=self.weights["A_log"],
            decay_bias_H=self.weights["dt_bias"],
            num_key_heads=config.key_heads,
            key_dim=config.key_head_dim,
            value_dim=config.value_head_dim,
            grouped=grouped,
        )
        out_THd = self.recur(recurrence, (mixed_TC, rates_TH, decays_TH), batch)
        normed = rms_norm_then_gate(out_THd.view(gate_THd.shape), gate_THd, self.norm.weight_D, self.norm.eps)
        return only(normed.reshape(out_THd.shape[0], -1), wanted_S)

    def takes_groups(self, batch: ForwardBatch) -> bool:
        """Whether the recurrence takes the projection as it is ordered."""
        return False

    @abstractmethod
    def project(self, x_TD: torch.Tensor, adapters: Adapters | None, grouped: bool) -> Projected:
        """Queries, keys and values [T, C], output gates [T, H, d], and the logits of rates and decays [T, H].

        If `grouped`, the first are what the projection gives, and gates are those of key heads, [T * G, H / G, d].
        """


class GroupedGatedDeltaNet(GatedDeltaNet):
    """Qwen3-Next: two projections, whose outputs are ordered by key head."""

    def __init__(self, config: GatedDeltaConfig, layer_index: int, dtype: torch.dtype) -> None:
        super().__init__(config, layer_index, dtype)
        hidden, heads = config.hidden_size, config.key_heads
        both = config.conv_channels + heads * self.values
        self.in_proj_qkvz = Linear(hidden, both, dtype, cut=by_outputs(self.heads, both // heads))
        rates = 2 * config.value_heads
        self.in_proj_ba = Linear(hidden, rates, dtype, cut=by_outputs(self.heads, rates // heads))
        self.in_proj_qkvz.takes_adapters = self.in_proj_ba.takes_adapters = True

    def takes_groups(self, batch: ForwardBatch) -> bool:
        """See GatedDeltaNet. To order prompts' 12,288 numbers a token takes as long as to read and write them."""
        pages, rows = batch.kv[self.recur.layer_index], batch.rows
        return rows.row_T.is_cuda and not rows.one_token and isinstance(pages, StatePages) and not pages.journal

    def project(self, x_TD: torch.Tensor, adapters: Adapters | None, grouped: bool) -> Projected:
        """See GatedDeltaNet."""
        config, groups = self.config, self.config.key_heads
        qkvz_TC, ba_TR = self.in_proj_qkvz(x_TD, adapters), self.in_proj_ba(x_TD, adapters)
        if grouped:
            gate = by_groups(qkvz_TC.view(-1, qkvz_TC.shape[1] // groups), 1, config.key_head_dim)[3]
            gate_Tnd = gate.view(gate.shape[0], -1, config.value_head_dim)
            rates_TH, decays_TH = ba_TR.unflatten(-1, (groups, 2, -1)).transpose(1, 2).flatten(2).unbind(1)
            return qkvz_TC, gate_Tnd, rates_TH, decays_TH
        parts_TC = by_parts(qkvz_TC, ba_TR, groups, config.key_head_dim)
        heads = config.value_heads
        sizes = config.conv_channels, heads * config.value_head_dim, heads, heads
        mixed_TC, gate, rates_TH, decays_TH = parts_TC.split(sizes, -1)
        return mixed_TC, gate.unflatten(-1, (heads, -1)), rates_TH, decays_TH


class PlainGatedDeltaNet(GatedDeltaNet):
    """Qwen3.5: one projection for each part, kept as one matrix."""

    def __init__(self, config: GatedDeltaConfig, layer_index: int, dtype: torch.dtype) -> None:
        super().__init__(config, layer_index, dtype)
        heads, values = config.value_heads, config.value_heads * config.value_head_dim
        self.sizes = (config.conv_channels, values, heads, heads)
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        parts = dict(zip(names, self.sizes, strict=True))
        cuts = {name: by_outputs(self.heads, size // config.key_heads) for name, size in parts.items()}
        cuts["in_proj_qkv"] = Cut("outputs", self.channels)
        self.in_proj = FusedLinear(config.hidden_size, parts, dtype, cuts=cuts)
        self.in_proj.takes_adapters = True

    def project(self, x_TD: torch.Tensor, adapters: Adapters | None, grouped: bool) -> Projected:
        """See GatedDeltaNet."""
        mixed_TC, gate, rates_TH, decays_TH = self.in_proj(x_TD, adapters).split(self.sizes, -1)
        return mixed_TC, gate.unflatten(-1, (-1, self.config.value_head_dim)), rates_TH, decays_TH


def _sparse_mlp(features: int, experts: ExpertsConfig, dtype: torch.dtype) -> SparseMLP:
    """A mixture of experts, and one expert that every token passes through, behind a gate of its own."""
    routing = Routing(experts.per_token, normalise=experts.normalise)
    return SparseMLP(
        Router(features, experts.count, dtype, routing),
        Experts(ExpertSizes(experts.count, features, experts.intermediate_size), dtype),
        shared=GatedMLP(features, experts.shared_intermediate_size, dtype),
        shared_gate=Linear(features, 1, dtype, plain=True),
        names={"router": "gate", "shared": "shared_expert", "shared_gate": "shared_expert_gate"},
    )


def _layer(
    config: GatedDeltaConfig, layer_index: int, dtype: torch.dtype, recurrent: type[GatedDeltaNet]
) -> DecoderLayer:
    attends = config.layer_kinds[layer_index] != "linear_attention"
    mixer = Attention(config, layer_index, dtype) if attends else recurrent(config, layer_index, dtype)
    names = {"mixer": "self_attn" if attends else "linear_attn"}
    feed_forward: FeedForward
    if config.experts is not None and config.expert_layers[layer_index]:
        feed_forward = _sparse_mlp(config.hidden_size, config.experts, dtype)
    else:
        feed_forward = GatedMLP(config.hidden_size, config.intermediate_size, dtype)
    return DecoderLayer(config, mixer, feed_forward, dtype, norm=OffsetRMSNorm, names=names)


def attention_layer(config: GatedDeltaConfig, dtype: torch.dtype) -> DecoderLayer:
    """The one layer of a config whose layer attends."""
    return _layer(config, 0, dtype, PlainGatedDeltaNet)


def _decoder(
    config: GatedDeltaConfig, recurrent: type[GatedDeltaNet], dtype: torch.dtype, device: torch.device
) -> Decoder:
    layers = tuple(_layer(config, i, dtype, recurrent) for i in range(config.num_layers))
    rotary = Rotary(config.rope, config.rotary_dim, dtype, device)
    return Decoder(config, layers, rotary, dtype, norm=OffsetRMSNorm)


class Qwen3NextForCausalLM(CausalLM):
    """The decoder and its output weights, which may be the embedding's."""

    unused_tensors = ("mtp.",)  # layers that guess more than one token

    def __init__(self, config: GatedDeltaConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, _decoder(config, GroupedGatedDeltaNet, dtype, device), dtype)


class Qwen35ForCausalLM(CausalLM):
    """Qwen3.5's text model, from a checkpoint of its own or from one that also has a vision part.

    A checkpoint with a vision part names the text model `model.language_model`.
    """

    unused_tensors = ("mtp.", "model.visual.")

    def __init__(self, config: GatedDeltaConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, _decoder(config, PlainGatedDeltaNet, dtype, device), dtype)
        if config.family in ("qwen3_5", "qwen3_5_moe"):
            self.names = {"model": "model.language_model"}
