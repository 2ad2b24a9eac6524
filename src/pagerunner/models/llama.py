"""Llama 2 and 3.x; Mistral and Qwen2 differ from it in configuration only (which projections have biases).

Shape letters: T tokens of the step, S sampled tokens, D hidden features, N query and key/value heads together, H query
heads, K key/value heads, V vocabulary.
"""

from __future__ import annotations

import torch

from pagerunner.attention.base import HeadPrep
from pagerunner.batch import ForwardBatch
from pagerunner.layers.attention import PagedAttention
from pagerunner.layers.embedding import Embedding
from pagerunner.layers.linear import FusedLinear, Linear
from pagerunner.layers.mlp import GatedMLP
from pagerunner.layers.module import Module
from pagerunner.layers.norm import RMSNorm
from pagerunner.models.decoder_config import DecoderConfig
from pagerunner.models.rotary import Rotary
from pagerunner.ops.rope import RopeAngles


class Attention(Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: DecoderConfig, layer_index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = FusedLinear(config.hidden_size, parts, dtype, bias=config.qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size, dtype, bias=config.o_bias)
        self.attend = PagedAttention(layer_index, self.head_dim**-0.5)

    def add_(self, x_TD: torch.Tensor, norm: RMSNorm, angles: RopeAngles, batch: ForwardBatch) -> None:
        """Add the attention of `norm(x)` to x in place."""
        qkv = self.qkv_proj.of_norm(x_TD, norm)
        prep = HeadPrep(self.num_heads, self.num_kv_heads, angles)
        out_THd = self.attend.from_projection(qkv.view(qkv.shape[0], -1, self.head_dim), prep, batch)
        self.o_proj.add_(out_THd.reshape(qkv.shape[0], -1), x_TD)


class DecoderLayer(Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, layer_index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = Attention(config, layer_index, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, dtype, bias=config.mlp_bias)

    def add_(self, x_TD: torch.Tensor, angles: RopeAngles, batch: ForwardBatch) -> None:
        """Add the layer's output to the residual stream `x` in place."""
        self.self_attn.add_(x_TD, self.input_layernorm, angles, batch)
        self.mlp.add_(x_TD, self.post_attention_layernorm)


class Decoder(Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = tuple(DecoderLayer(config, i, dtype) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.rotary = Rotary(config.rope, config.head_dim, dtype, device)

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """The normed hidden state of every token, [T, D]."""
        angles = self.rotary(batch.positions)
        x_TD = self.embed_tokens(batch.token_ids)
        for layer in self.layers:
            layer.add_(x_TD, angles, batch)
        return self.norm(x_TD)


class LlamaForCausalLM(Module):
    """The decoder and its output weights, which may be the embedding's."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.model = Decoder(config, dtype, device)
        self.tied = config.tie_word_embeddings
        if not self.tied:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype)

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """The final hidden state of every token of the step, [T, D]."""
        return self.model(batch)

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Scores of every vocabulary entry, [S, V] in the dtype of the weights."""
        logits_SV = self.model.embed_tokens.logits(hidden_SD) if self.tied else self.lm_head(hidden_SD)
        return logits_SV
