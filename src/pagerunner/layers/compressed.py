"""The step between projections and attention over a window and compressed latents.

Shape letters: T tokens, H heads, D vector size, N slots that the step completes, I indexer key size.
"""

from __future__ import annotations

import torch

from pagerunner.attention.compressed import IndexerQueries
from pagerunner.attention.torch_ref import Result
from pagerunner.batch import ForwardBatch


class PagedWindowVectors:
    """Attention of one layer over the vectors of the last tokens, which are keys and values of every head."""

    def __init__(self, layer_index: int, scale: float) -> None:
        self.layer_index = layer_index
        self.scale = scale

    def __call__(self, q_THD: torch.Tensor, vectors_TD: torch.Tensor, batch: ForwardBatch) -> Result:
        """Write the tokens' vectors into the layer's pages, and attend: [T, H, D] and the log-sum-exp [T, H]."""
        layer = batch.kv[self.layer_index]
        group = batch.groups[layer.group]
        vectors_T1D = vectors_TD.unsqueeze(1)
        out: Result = group.backend.partial(q_THD, vectors_T1D, vectors_T1D, layer, group, self.scale, keep_lse=True)
        return out


class PagedSlots:
    """Attention of one layer over its complete slots, by whatever backend the batch's memory group has planned."""

    def __init__(self, layer_index: int, scale: float) -> None:
        self.layer_index = layer_index
        self.scale = scale

    def completed(self, batch: ForwardBatch) -> torch.Tensor:
        """Indices of the step's tokens that complete a slot, [N]."""
        layer = batch.kv[self.layer_index]
        group = batch.groups[layer.group]
        found: torch.Tensor = group.backend.completed(layer, group, batch)
        return found

    def __call__(
        self,
        q_THD: torch.Tensor,
        window: Result | None,
        vectors_ND: torch.Tensor,
        index_keys_NI: torch.Tensor | None,
        chooser: IndexerQueries | None,
        batch: ForwardBatch,
    ) -> Result:
        """Write the completed slots, and merge the attention over all complete ones with the window's, if there is one."""
        layer = batch.kv[self.layer_index]
        group = batch.groups[layer.group]
        out: Result = group.backend.forward(
            q_THD, window, vectors_ND, index_keys_NI, chooser, layer, group, batch, self.scale
        )
        return out
