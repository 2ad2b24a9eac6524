"""Qwen3-MoE: Qwen3 with a mixture of experts in place of the feed-forward of most layers.

Shape letters: T tokens of the step, S sampled tokens, D hidden features, V vocabulary.
"""

from __future__ import annotations

import torch

from pagerunner.batch import ForwardBatch
from pagerunner.layers.embedding import Embedding
from pagerunner.layers.linear import Linear
from pagerunner.layers.mlp import GatedMLP
from pagerunner.layers.module import Module
from pagerunner.layers.moe import SparseMLP
from pagerunner.layers.norm import RMSNorm
from pagerunner.models.moe_config import Qwen3MoeConfig
from pagerunner.models.qwen3 import Attention
from pagerunner.models.rotary import Rotary
from pagerunner.ops.rope import RopeAngles


class DecoderLayer(Module):
    """Attention and experts (or a dense feed-forward), each behind a norm and added to the residual stream."""

    def __init__(self, config: Qwen3MoeConfig, layer_index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = Attention(config, layer_index, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp: SparseMLP | GatedMLP
        if layer_index in config.dense_layers:
            self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, dtype)
        else:
            self.mlp = SparseMLP(
                config.hidden_size,
                config.expert_size,
                config.num_experts,
                config.active_experts,
                dtype,
                normalise=config.normalise_weights,
            )

    def add_(self, x_TD: torch.Tensor, angles: RopeAngles, batch: ForwardBatch) -> None:
        """Add the layer's output to the residual stream `x` in place."""
        self.self_attn.add_(x_TD, self.input_layernorm, angles, batch)
        self.mlp.add_(x_TD, self.post_attention_layernorm)


class Decoder(Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: Qwen3MoeConfig, dtype: torch.dtype, device: torch.device) -> None:
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


class Qwen3MoeForCausalLM(Module):
    """The decoder and its output weights, which may be the embedding's."""

    def __init__(self, config: Qwen3MoeConfig, dtype: torch.dtype, device: torch.device) -> None:
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
