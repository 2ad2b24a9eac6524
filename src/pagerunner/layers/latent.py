"""The step between projections and the latent attention backend.

Shape letters: T tokens, H heads, D query head size, L latent and rotary elements of a token, V value head size.
"""

from __future__ import annotations

import torch

from pagerunner.attention.calls import IndexerQueries, LatentCall, UpProjection
from pagerunner.batch import ForwardBatch, LatentPages
from pagerunner.ops.latent_heads import LatentPrep


class PagedLatentAttention:
    """Latent attention of one layer over its pages, by whatever backend the batch's memory group has planned."""

    def __init__(self, layer_index: int, scale: float) -> None:
        self.layer_index = layer_index
        self.scale = scale

    def __call__(
        self,
        q_THD: torch.Tensor,
        vectors_TL: torch.Tensor,
        prep: LatentPrep,
        up: UpProjection,
        batch: ForwardBatch,
        chooser: IndexerQueries | None = None,
        index_keys_TI: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Make queries and vectors of raw ones, in place; write the vectors into the layer's pages; return the attention, [T, H, V].

        With a `chooser` also write indexer keys, and attend to what it chooses.
        """
        pages = batch.kv[self.layer_index]
        assert isinstance(pages, LatentPages), "the layer's memory is not latents"
        group = batch.groups[pages.group]
        takes_it = group.backend.capabilities.projection
        if not takes_it:
            prep.apply_(q_THD, vectors_TL)
        raw = prep if takes_it else None
        call = LatentCall(q_THD, vectors_TL, up, pages, group, batch.rows, self.scale, raw, chooser, index_keys_TI)
        out: torch.Tensor = group.backend.run(call)
        return out
