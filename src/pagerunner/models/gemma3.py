"""Gemma-3, text: windowed layers with a full one now and then, each kind with rotary positions of its own base; norms
before and after both halves of a layer, with weights that count from 1; normed query and key heads; scaled embeddings.

Shape letters: T tokens of the step, S sampled tokens, D hidden features, N query and key/value heads together, H query
heads, K key/value heads, V vocabulary.
"""

from __future__ import annotations

import torch

from pagerunner.batch import ForwardBatch
from pagerunner.layers.attention import PagedAttention, head_projection
from pagerunner.layers.embedding import Embedding
from pagerunner.layers.linear import Linear
from pagerunner.layers.mlp import GatedMLP
from pagerunner.layers.module import Module
from pagerunner.layers.norm import OffsetRMSNorm
from pagerunner.models.configs.window import Gemma3Config
from pagerunner.models.decoder import CausalLM
from pagerunner.models.rotary import Rotary
from pagerunner.ops.activation import gelu_tanh_and_mul, softcap_
from pagerunner.ops.rope import RopeAngles, rope_


class Attention(Module):
    """Grouped-query attention with normed heads and rotary positions."""

    def __init__(self, config: Gemma3Config, layer_index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        sizes = (config.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim)
        self.qkv_proj = head_projection(*sizes, dtype, bias=config.qkv_bias)
        self.o_proj = Linear(self.num_heads * self.head_dim, config.hidden_size, dtype, bias=config.o_bias)
        self.q_norm = OffsetRMSNorm(self.head_dim, config.rms_norm_eps, dtype)
        self.k_norm = OffsetRMSNorm(self.head_dim, config.rms_norm_eps, dtype)
        self.attend = PagedAttention(layer_index, config.query_scalar**-0.5, config.attention_softcap)

    def __call__(self, x_TD: torch.Tensor, angles: RopeAngles, batch: ForwardBatch) -> torch.Tensor:
        """Attention of the normed hidden states."""
        qkv = self.qkv_proj(x_TD)
        qkv_TNd = qkv.view(qkv.shape[0], -1, self.head_dim)
        k_first, v_first = self.num_heads, self.num_heads + self.num_kv_heads
        q_THd, k_TKd = self.q_norm(qkv_TNd[:, :k_first]), self.k_norm(qkv_TNd[:, k_first:v_first])
        rope_(q_THd, angles)
        rope_(k_TKd, angles)
        return self.o_proj(self.attend(q_THd, k_TKd, qkv_TNd[:, v_first:], batch).reshape(qkv.shape[0], -1))


class DecoderLayer(Module):
    """Attention and feed-forward, each between two norms and added to the residual stream."""

    def __init__(self, config: Gemma3Config, layer_index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = OffsetRMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.is_local = config.local_layers[layer_index]
        self.self_attn = Attention(config, layer_index, dtype)
        self.post_attention_layernorm = OffsetRMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.pre_feedforward_layernorm = OffsetRMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, dtype, activation=gelu_tanh_and_mul)
        self.post_feedforward_layernorm = OffsetRMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    def __call__(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, angles: RopeAngles, batch: ForwardBatch
    ) -> torch.Tensor:
        """Add `x`, what the layer before produced, to the residual in place; return what is still to be added."""
        x_TD = self.self_attn(self.input_layernorm.add(x_TD, residual_TD), angles, batch)
        x_TD = self.post_attention_layernorm(x_TD)
        return self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm.add(x_TD, residual_TD)))


class Decoder(Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: Gemma3Config, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = tuple(DecoderLayer(config, i, dtype) for i in range(config.num_layers))
        self.norm = OffsetRMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.rotary = Rotary(config.rope, config.head_dim, dtype, device)
        self.local_rotary = Rotary(config.local_rope, config.head_dim, dtype, device)
        self.scale = float(torch.tensor(config.hidden_size**0.5).to(dtype))  # rounded as the reference rounds it

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """The normed hidden state of every token, [T, D]."""
        angles, local_angles = self.rotary(batch.positions), self.local_rotary(batch.positions)
        x_TD = self.embed_tokens(batch.token_ids) * self.scale
        residual_TD = torch.zeros_like(x_TD)
        for layer in self.layers:
            x_TD = layer(x_TD, residual_TD, local_angles if layer.is_local else angles, batch)
        return self.norm.add(x_TD, residual_TD)


class Gemma3ForCausalLM(CausalLM):
    """The decoder and its output weights, which may be the embedding's."""

    def __init__(self, config: Gemma3Config, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, Decoder(config, dtype, device), dtype)
        self.softcap = config.logits_softcap

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Scores of every vocabulary entry, [S, V] in the dtype of the weights."""
        logits_SV = super().compute_logits(hidden_SD)
        return softcap_(logits_SV, self.softcap) if self.softcap else logits_SV
