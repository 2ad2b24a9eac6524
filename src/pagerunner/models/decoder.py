"""What stands around the layers in most families: embedding before them, norm and output weights after them.

Shape letters: T tokens of the step, S sampled tokens, D hidden features, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from pagerunner.batch import ForwardBatch
from pagerunner.layers.embedding import Embedding
from pagerunner.layers.linear import Linear
from pagerunner.layers.module import Module
from pagerunner.layers.norm import RMSNorm
from pagerunner.models.configs.base import ModelConfig
from pagerunner.models.rotary import Rotary
from pagerunner.ops.rope import RopeAngles


class DecoderLayer(Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, self_attn: Any, mlp: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = mlp

    def add_(self, x_TD: torch.Tensor, angles: RopeAngles, batch: ForwardBatch) -> None:
        """Add the layer's output to the residual stream `x` in place."""
        self.self_attn.add_(x_TD, self.input_layernorm, angles, batch)
        self.mlp.add_(x_TD, self.post_attention_layernorm)

    def last(self, x_TD: torch.Tensor, angles: RopeAngles, batch: ForwardBatch) -> torch.Tensor:
        """The residual stream behind the last layer, of the tokens that are asked for: of the others, only the keys and
        values matter any more.
        """
        if not batch.last_alone:
            self.add_(x_TD, angles, batch)
            return x_TD
        x_SD: torch.Tensor = self.self_attn.of_sampled(x_TD, self.input_layernorm, angles, batch)
        if x_SD.shape[0]:
            self.mlp.add_(x_SD, self.post_attention_layernorm)
        return x_SD


class Decoder(Module):
    """Embedding, layers that add to the residual stream in place (`add_`), and final norm. All layers have one `rotary`."""

    def __init__(
        self, config: ModelConfig, layers: tuple[Any, ...], norm: RMSNorm, rotary: Rotary, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = layers
        self.norm = norm
        self.rotary = rotary

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """The normed hidden states, [T, D]; [S, D] if the batch says so and the last layer can."""
        angles = self.rotary(batch.positions)
        x_TD = self.embed_tokens(batch.token_ids)
        *others, last = self.layers
        for layer in others:
            layer.add_(x_TD, angles, batch)
        if isinstance(last, DecoderLayer):
            x_TD = last.last(x_TD, angles, batch)
        else:
            last.add_(x_TD, angles, batch)
        return self.norm(x_TD) if x_TD.shape[0] else x_TD


class LaggingDecoder(Decoder):
    """A decoder whose layers return what they still have to add to the residual stream: the next norm adds it."""

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """The normed hidden state of every token, [T, D]."""
        angles = self.rotary(batch.positions)
        x_TD = self.embed_tokens(batch.token_ids)
        residual_TD = torch.zeros_like(x_TD)
        for layer in self.layers:
            x_TD = layer(x_TD, residual_TD, angles, batch)
        return self.norm.add(x_TD, residual_TD)


class CausalLM(Module):
    """A decoder, whose embedding is its `embed_tokens`, and its output weights, which may be the embedding's."""

    def __init__(self, config: ModelConfig, model: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.tied = config.tie_word_embeddings
        if not self.tied:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype)

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """The final hidden states, [T, D] or, where the batch allows it, [S, D]."""
        hidden_TD: torch.Tensor = self.model(batch)
        return hidden_TD

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Scores of every vocabulary entry, [S, V] in the dtype of the weights."""
        logits_SV: torch.Tensor = self.model.embed_tokens.logits(hidden_SD) if self.tied else self.lm_head(hidden_SD)
        return logits_SV
