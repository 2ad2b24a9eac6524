"""What the families with grouped-query attention share: projections, and the split of their output into heads.

Shape letters: T tokens of the step, S wanted tokens, N query and key/value heads together, H query heads, K key/value
heads, d head size.
"""

from __future__ import annotations

import torch

from pagerunner.layers.attention import PagedAttention, head_projection, query_heads
from pagerunner.layers.cuts import by_inputs
from pagerunner.layers.linear import Linear
from pagerunner.layers.norm import RMSNorm
from pagerunner.layers.sublayer import Mixer, ResidualStream
from pagerunner.models.configs.base import HeadsConfig


class GroupedQueryAttention(Mixer):
    """Query, key and value heads of one projection, paged attention, and an output projection."""

    def __init__(
        self,
        config: HeadsConfig,
        layer_index: int,
        dtype: torch.dtype,
        *,
        qkv_bias: bool,
        o_bias: bool,
        scale: float | None = None,
        softcap: float = 0.0,
        in_features: int = 0,
    ) -> None:
        """`in_features`: those of the projections' inputs; 0: the hidden features."""
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        sizes = (in_features or config.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim)
        self.qkv_proj = head_projection(*sizes, dtype, bias=qkv_bias)
        cut = by_inputs(query_heads(self.num_heads), self.head_dim)
        self.o_proj = Linear(self.num_heads * self.head_dim, config.hidden_size, dtype, bias=o_bias, cut=cut)
        self.qkv_proj.takes_adapters = self.o_proj.takes_adapters = True
        scale = self.head_dim**-0.5 if scale is None else scale
        self.attend = PagedAttention(layer_index, scale, softcap)

    def heads_of(self, x_TI: torch.Tensor) -> torch.Tensor:
        """All heads of an input as it is, [T, N, d]: queries, then keys, then values."""
        return self.qkv_proj(x_TI).unflatten(-1, (-1, self.head_dim))

    def project(self, stream: ResidualStream, norm: RMSNorm, *, in_parts: bool = False) -> torch.Tensor:
        """All heads of the normed stream, [T, N, d]: queries, then keys, then values. `in_parts`: they may come as sums, see `Linear.in_parts`."""
        heads = stream.product(norm, self.qkv_proj, in_parts=in_parts)
        return heads.view(*heads.shape[:-1], -1, self.head_dim)

    def rotated_and_values(self, qkv_TNd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a projection's heads: queries with keys, [T, H + K, d], and values [T, K, d]."""
        v_first = self.num_heads + self.num_kv_heads
        return qkv_TNd[:, :v_first], qkv_TNd[:, v_first:]
