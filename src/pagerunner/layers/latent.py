"""The step between projections and the latent attention backend.

Shape letters: T tokens, H heads, D query head size, L latent and rotary elements of a token, V value head size.
"""

from __future__ import annotations

import torch

from pagerunner.attention.mla import UpProjection
from pagerunner.batch import ForwardBatch


class PagedLatentAttention:
    """Latent attention of one layer over its pages, by whatever backend the batch's memory group has planned."""

    def __init__(self, layer_index: int, scale: float) -> None:
        self.layer_index = layer_index
        self.scale = scale

    def __call__(
        self, q_THD: torch.Tensor, vectors_TL: torch.Tensor, up: UpProjection, batch: ForwardBatch
    ) -> torch.Tensor:
        """Write the tokens' vectors into the layer's pages, and return the attention of q, [T, H, V]."""
        layer = batch.kv[self.layer_index]
        group = batch.groups[layer.group]
        out: torch.Tensor = group.backend.forward(q_THD, vectors_TL, up, layer, group, batch, self.scale)
        return out
