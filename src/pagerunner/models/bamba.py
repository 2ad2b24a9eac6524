"""Bamba: Mamba-2 layers with full attention in between, each followed by a gated feed-forward.

Shape letters: T tokens of the step, S sampled tokens, D hidden features, H query heads, K key/value heads, d head size, C
convolution channels, V vocabulary.
"""

from __future__ import annotations

import torch

from pagerunner.attention.recurrent import Mamba2
from pagerunner.layers.cuts import Cut, Features, Section, TensorCut, by_inputs
from pagerunner.layers.linear import Linear
from pagerunner.layers.mlp import GatedMLP
from pagerunner.layers.norm import GatedRMSNorm, RMSNorm
from pagerunner.layers.recurrent import CausalConv, PagedRecurrence
from pagerunner.layers.sublayer import Mixer, ResidualStream, StepContext, only
from pagerunner.models.attention import GroupedQueryAttention
from pagerunner.models.configs.hybrid import BambaConfig
from pagerunner.models.decoder import CausalLM, Decoder, DecoderLayer
from pagerunner.models.rotary import Rotary
from pagerunner.ops.rope import rope_


class Attention(GroupedQueryAttention):
    """Grouped-query attention with partly rotated heads."""

    def __init__(self, config: BambaConfig, layer_index: int, dtype: torch.dtype) -> None:
        bias = config.attention_bias
        super().__init__(config, layer_index, dtype, qkv_bias=bias, o_bias=bias)
        self.rotary_dim = config.rotary_dim

    def mix(self, stream: ResidualStream, norm: RMSNorm, context: StepContext) -> torch.Tensor:
        """See Mixer."""
        angles, batch, wanted_S = context
        qk_TNd, v_TKd = self.rotated_and_values(self.project(stream, norm))
        rope_(qk_TNd[..., : self.rotary_dim], angles)
        q_THd, k_TKd = qk_TNd[:, : self.num_heads], qk_TNd[:, self.num_heads :]
        return self.attend(q_THd, k_TKd, v_TKd, batch, wanted=wanted_S).flatten(1)


class Mamba2Mixer(Mixer):
    """Mamba-2 with its output gated and normed."""

    names = {"o_proj": "out_proj"}

    def __init__(self, config: BambaConfig, layer_index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        heads, inner = config.mamba_heads, config.inner_size
        names, bias = ("A_log", "D", "dt_bias"), config.proj_bias
        self.weights = {name: torch.empty(heads, dtype=dtype, device="meta") for name in names}
        self.sizes = (inner, config.conv_channels, heads)
        own = Features("mamba_heads", heads, even=True)
        shared = Features("mamba_groups", config.mamba_groups, even=True, repeated=True)
        each, all_inner = Section(own), Section(own, config.mamba_head_dim)
        channels = (all_inner, Section(shared, config.state_size), Section(shared, config.state_size))
        self.cuts = dict.fromkeys(names, TensorCut(0, (each,)))
        cut = Cut("outputs", (all_inner, *channels, each))
        self.in_proj = Linear(config.hidden_size, sum(self.sizes), dtype, bias=bias, cut=cut)
        self.conv1d = CausalConv(config.conv_channels, config.conv_taps, dtype, channels, bias=config.conv_bias)
        self.norm = GatedRMSNorm(inner, config.rms_norm_eps, dtype, (all_inner,))
        self.o_proj = Linear(inner, config.hidden_size, dtype, bias=bias, cut=by_inputs(own, config.mamba_head_dim))
        self.in_proj.takes_adapters = self.o_proj.takes_adapters = True
        self.recur = PagedRecurrence(layer_index)

    def mix(self, stream: ResidualStream, norm: RMSNorm, context: StepContext) -> torch.Tensor:
        """See Mixer."""
        _, batch, wanted_S = context
        config = self.config
        gate_TI, mixed_TC, steps_TH = stream.product(norm, self.in_proj).split(self.sizes, -1)
        recurrence = Mamba2(
            conv_weight_CW=self.conv1d.weight_CW,
            conv_bias_C=self.conv1d.bias_C,
            decay_log_H=self.weights["A_log"],
            step_bias_H=self.weights["dt_bias"],
            skip_H=self.weights["D"],
            head_dim=config.mamba_head_dim,
            num_groups=config.mamba_groups,
            state_size=config.state_size,
        )
        out_TI = self.recur(recurrence, (mixed_TC, steps_TH), batch).flatten(1)
        return only(self.norm.of_gated(out_TI, gate_TI), wanted_S)


def _layer(config: BambaConfig, layer_index: int, dtype: torch.dtype) -> DecoderLayer:
    mixer: Mixer
    names = {"feed_forward_norm": "pre_ff_layernorm", "feed_forward": "feed_forward"}
    if config.layer_kinds[layer_index] == "full_attention":
        mixer = Attention(config, layer_index, dtype)
    else:
        mixer = Mamba2Mixer(config, layer_index, dtype)
        names["mixer"] = "mamba"
    feed_forward = GatedMLP(config.hidden_size, config.intermediate_size, dtype, bias=config.mlp_bias)
    return DecoderLayer(config, mixer, feed_forward, dtype, names=names)


class BambaForCausalLM(CausalLM):
    """The decoder and its output weights, which may be the embedding's."""

    def __init__(self, config: BambaConfig, dtype: torch.dtype, device: torch.device) -> None:
        layers = tuple(_layer(config, i, dtype) for i in range(config.num_layers))
        rotary = Rotary(config.rope, config.rotary_dim, dtype, device)
        names = {"norm": "final_layernorm"}
        super().__init__(config, Decoder(config, layers, rotary, dtype, names=names), dtype)
