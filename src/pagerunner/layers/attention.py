"""The step between projections and attention backend.

Shape letters: T tokens, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import torch

from pagerunner.batch import ForwardBatch


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
