"""The step between projections and the latent attention backend.

Shape letters: T tokens, H heads, D query head size, L latent and rotary elements of a token, V value head size.
"""

from __future__ import annotations

import torch

from pagerunner.attention.calls import LatentCall, UpProjection
from pagerunner.batch import ForwardBatch, LatentPages


class PagedLatentAttention:
    """Latent attention of one layer over its pages, by whatever backend the batch's memory group has planned."""

    def __init__(self, layer_index: int, scale: float) -> None:
        self.layer_index = layer_index
        self.scale = scale

    def __call__(
        self, q_THD: torch.Tensor, vectors_TL: torch.Tensor, up: UpProjection, batch: ForwardBatch
    ) -> torch.Tensor:
        """Write the tokens' vectors into the layer's pages, and return the attention of q, [T, H, V]."""
        pages = batch.kv[self.layer_index]
        assert isinstance(pages, LatentPages), "the layer's memory is not latents"
        group = batch.groups[pages.group]
        out: torch.Tensor = group.backend.run(LatentCall(q_THD, vectors_TL, up, pages, group, batch.rows, self.scale))
        return out
