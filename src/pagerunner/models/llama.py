"""Llama 2 and 3.x; Mistral and Qwen2 differ from it in configuration only (which projections have biases).

Shape letters: T tokens of the step, S sampled tokens, D hidden features, N query and key/value heads together, H query
heads, K key/value heads, V vocabulary.
"""

from __future__ import annotations

import torch

from pagerunner.batch import ForwardBatch
from pagerunner.layers.attention import PagedAttention, head_projection
from pagerunner.layers.linear import Linear
from pagerunner.layers.mlp import GatedMLP
from pagerunner.layers.module import Module
from pagerunner.layers.norm import RMSNorm
from pagerunner.models.configs.decoder import DecoderConfig
from pagerunner.models.decoder import CausalLM, Decoder, DecoderLayer
from pagerunner.models.rotary import Rotary
from pagerunner.ops.paged_attention import HeadPrep
from pagerunner.ops.rope import RopeAngles


class Attention(Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: DecoderConfig, layer_index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        sizes = (config.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim)
        self.qkv_proj = head_projection(*sizes, dtype, bias=config.qkv_bias)
        self.o_proj = Linear(self.num_heads * self.head_dim, config.hidden_size, dtype, bias=config.o_bias)
        self.attend = PagedAttention(layer_index, self.head_dim**-0.5)

    def add_(self, x_TD: torch.Tensor, norm: RMSNorm, angles: RopeAngles, batch: ForwardBatch) -> None:
        """Add the attention of `norm(x)` to x in place."""
        out_THd = self.attend.from_projection(self._project(x_TD, norm), self.prep(angles), batch)
        self.o_proj.add_(out_THd.reshape(x_TD.shape[0], -1), x_TD)

    def of_sampled(self, x_TD: torch.Tensor, norm: RMSNorm, angles: RopeAngles, batch: ForwardBatch) -> torch.Tensor:
        """`x` with the attention of `norm(x)` added, of the sampled tokens alone, [S, D]; of all, keys and values are stored."""
        out_SHd = self.attend.from_projection(
            self._project(x_TD, norm), self.prep(angles), batch, wanted=batch.logits_index
        )
        x_SD = x_TD.index_select(0, batch.logits_index)
        if x_SD.shape[0]:
            self.o_proj.add_(out_SHd.reshape(x_SD.shape[0], -1), x_SD)
        return x_SD

    def prep(self, angles: RopeAngles) -> HeadPrep:
        """What is done to heads between projection and attention."""
        return HeadPrep(self.num_heads, self.num_kv_heads, angles)

    def _project(self, x_TD: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        return self.qkv_proj.of_norm(x_TD, norm).view(x_TD.shape[0], -1, self.head_dim)


class LlamaForCausalLM(CausalLM):
    """The decoder and its output weights, which may be the embedding's."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        layers = tuple(
            DecoderLayer(
                config,
                Attention(config, i, dtype),
                GatedMLP(config.hidden_size, config.intermediate_size, dtype, bias=config.mlp_bias),
                dtype,
            )
            for i in range(config.num_layers)
        )
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        rotary = Rotary(config.rope, config.head_dim, dtype, device)
        super().__init__(config, Decoder(config, layers, norm, rotary, dtype), dtype)
