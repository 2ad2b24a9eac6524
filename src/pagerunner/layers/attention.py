"""The step between projections and attention backend.

Shape letters: T tokens, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import torch

from pagerunner.batch import ForwardBatch
from pagerunner.layers.linear import FusedLinear
from pagerunner.ops.norm import qk_norm_
from pagerunner.ops.paged_attention import HeadPrep
from pagerunner.ops.rope import rope_


def head_projection(
    features: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, *, bias: bool
) -> FusedLinear:
    """Query, key and value heads of one input side by side, [T, (H + 2 K) D]."""
    parts = {"q_proj": num_heads * head_dim, "k_proj": num_kv_heads * head_dim, "v_proj": num_kv_heads * head_dim}
    return FusedLinear(features, parts, dtype, bias=bias)


class PagedAttention:
    """Attention of one layer over its pages, by whatever backend the batch's memory group has planned."""

    def __init__(self, layer_index: int, scale: float, softcap: float = 0.0) -> None:
        self.layer_index = layer_index
        self.scale = scale
        self.softcap = softcap

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        batch: ForwardBatch,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write k and v into the layer's pages, and return the attention of q over each token's sequence so far."""
        layer = batch.kv[self.layer_index]
        group = batch.groups[layer.group]
        out: torch.Tensor = group.backend.forward(
            q_THD, k_TKD, v_TKD, layer, group, batch, self.scale, sinks_H, self.softcap
        )
        return out

    def from_projection(
        self, qkv_TND: torch.Tensor, prep: HeadPrep, batch: ForwardBatch, sinks_H: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Prepare the heads of a projection's output [T, H + 2 K, D] in place, then as `__call__`."""
        layer = batch.kv[self.layer_index]
        group = batch.groups[layer.group]
        fused = getattr(group.backend, "from_projection", None)
        if fused is not None:
            out: torch.Tensor = fused(qkv_TND, prep, layer, group, batch, self.scale, sinks_H, self.softcap)
            return out
        qk_TND = qkv_TND[:, : prep.num_heads + prep.num_kv_heads]
        if prep.q_norm_D is not None and prep.k_norm_D is not None:
            qk_norm_(qk_TND, prep.q_norm_D, prep.k_norm_D, prep.num_heads, prep.eps)
        rope_(qk_TND, prep.angles)
        return self(*prep.split(qkv_TND), batch, sinks_H)

    def sampled_from_projection(self, qkv_TND: torch.Tensor, prep: HeadPrep, batch: ForwardBatch) -> torch.Tensor:
        """As `from_projection`, of the tokens of `batch.logits_index` alone, [S, H, D]; the others are stored."""
        layer = batch.kv[self.layer_index]
        group = batch.groups[layer.group]
        alone = getattr(group.backend, "sampled_from_projection", None)
        if alone is None:
            return self.from_projection(qkv_TND, prep, batch).index_select(0, batch.logits_index)
        out: torch.Tensor = alone(qkv_TND, prep, layer, group, batch, self.scale, None, self.softcap)
        return out
