"""Bamba: Mamba-2 layers with full attention in between, each followed by a gated feed-forward.

Shape letters: T tokens of the step, S sampled tokens, D hidden features, H query heads, K key/value heads, d head size, C
convolution channels, V vocabulary.
"""

from __future__ import annotations

import torch

from pagerunner.attention.recurrent import Mamba2
from pagerunner.batch import ForwardBatch
from pagerunner.layers.attention import PagedAttention, head_projection
from pagerunner.layers.embedding import Embedding
from pagerunner.layers.linear import Linear
from pagerunner.layers.mlp import GatedMLP
from pagerunner.layers.module import Module
from pagerunner.layers.norm import RMSNorm
from pagerunner.layers.recurrent import CausalConv, PagedRecurrence
from pagerunner.models.configs.hybrid import BambaConfig
from pagerunner.models.decoder import CausalLM
from pagerunner.models.rotary import Rotary
from pagerunner.ops.norm import gate_then_rms_norm
from pagerunner.ops.rope import RopeAngles, rope_


class Attention(Module):
    """Grouped-query attention with partly rotated heads."""

    def __init__(self, config: BambaConfig, layer_index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim, self.rotary_dim = config.head_dim, config.rotary_dim
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        sizes = (config.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim)
        self.qkv_proj = head_projection(*sizes, dtype, bias=config.attention_bias)
        self.o_proj = Linear(self.num_heads * self.head_dim, config.hidden_size, dtype, bias=config.attention_bias)
        self.attend = PagedAttention(layer_index, self.head_dim**-0.5)

    def __call__(self, x_TD: torch.Tensor, angles: RopeAngles, batch: ForwardBatch) -> torch.Tensor:
        """Attention of the normed hidden states."""
        qkv_TNd = self.qkv_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        k_first, v_first = self.num_heads, self.num_heads + self.num_kv_heads
        rope_(qkv_TNd[:, :v_first, : self.rotary_dim], angles)
        out_THd = self.attend(qkv_TNd[:, :k_first], qkv_TNd[:, k_first:v_first], qkv_TNd[:, v_first:], batch)
        return self.o_proj(out_THd.flatten(1))


class Mamba2Mixer(Module):
    """Mamba-2 with its output gated and normed."""

    def __init__(self, config: BambaConfig, layer_index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        heads, inner = config.mamba_heads, config.inner_size
        self.weights = {name: torch.empty(heads, dtype=dtype, device="meta") for name in ("A_log", "D", "dt_bias")}
        self.sizes = (inner, config.conv_channels, heads)
        self.in_proj = Linear(config.hidden_size, sum(self.sizes), dtype, bias=config.proj_bias)
        self.conv1d = CausalConv(config.conv_channels, config.conv_taps, dtype, bias=config.conv_bias)
        self.norm = RMSNorm(inner, config.rms_norm_eps, dtype)
        self.out_proj = Linear(inner, config.hidden_size, dtype, bias=config.proj_bias)
        self.recur = PagedRecurrence(layer_index)

    def __call__(self, x_TD: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """The recurrence over the normed hidden states."""
        config = self.config
        gate_TI, mixed_TC, steps_TH = self.in_proj(x_TD).split(self.sizes, -1)
        recurrence = Mamba2(
            conv_weight_CW=self.conv1d.weight_CW,
            conv_bias_C=self.conv1d.weights.get("bias"),
            decay_log_H=self.weights["A_log"],
            step_bias_H=self.weights["dt_bias"],
            skip_H=self.weights["D"],
            head_dim=config.mamba_head_dim,
            num_groups=config.mamba_groups,
            state_size=config.state_size,
        )
        out_TI = self.recur(recurrence, (mixed_TC, steps_TH), batch).flatten(1)
        return self.out_proj(gate_then_rms_norm(out_TI, gate_TI, self.norm.weights["weight"], self.norm.eps))


class DecoderLayer(Module):
    """Attention or recurrence, then feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: BambaConfig, layer_index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attends = config.layer_kinds[layer_index] == "full_attention"
        if self.attends:
            self.self_attn = Attention(config, layer_index, dtype)
        else:
            self.mamba = Mamba2Mixer(config, layer_index, dtype)
        self.pre_ff_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.feed_forward = GatedMLP(config.hidden_size, config.intermediate_size, dtype, bias=config.mlp_bias)

    def __call__(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, angles: RopeAngles, batch: ForwardBatch
    ) -> torch.Tensor:
        """Add `x`, what the layer before produced, to the residual in place; return what is still to be added."""
        x_TD = self.input_layernorm.add(x_TD, residual_TD)
        x_TD = self.self_attn(x_TD, angles, batch) if self.attends else self.mamba(x_TD, batch)
        return self.feed_forward(self.pre_ff_layernorm.add(x_TD, residual_TD))


class Decoder(Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: BambaConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = tuple(DecoderLayer(config, i, dtype) for i in range(config.num_layers))
        self.final_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.rotary = Rotary(config.rope, config.rotary_dim, dtype, device)

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """The normed hidden state of every token, [T, D]."""
        angles = self.rotary(batch.positions)
        x_TD = self.embed_tokens(batch.token_ids)
        residual_TD = torch.zeros_like(x_TD)
        for layer in self.layers:
            x_TD = layer(x_TD, residual_TD, angles, batch)
        return self.final_layernorm.add(x_TD, residual_TD)


class BambaForCausalLM(CausalLM):
    """The decoder and its output weights, which may be the embedding's."""

    def __init__(self, config: BambaConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, Decoder(config, dtype, device), dtype)
