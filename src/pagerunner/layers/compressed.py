"""The step between projections and attention over a window and compressed latents.

Shape letters: T tokens, H heads, D vector size, N slots that the step completes, I indexer key size.
"""

from __future__ import annotations

import torch

from pagerunner.attention.calls import (
    AttentionCall,
    CompletedSlots,
    CompressedCall,
    Heads,
    IndexerQueries,
    Result,
    SlotsInput,
    VectorsCall,
)
from pagerunner.batch import ForwardBatch, GroupBatch, KVPages, LatentPages
from pagerunner.ops.indexer_heads import is_mixed
from pagerunner.ops.linear import Norm
from pagerunner.ops.paged_attention import Scores
from pagerunner.ops.rope import RopeAngles


class PagedWindowVectors:
    """Attention of one layer over the vectors of the last tokens, which are keys and values of every head."""

    def __init__(self, layer_index: int, scale: float) -> None:
        self.layer_index = layer_index
        self.scale = scale

    def __call__(
        self, q_THD: torch.Tensor, vectors_TD: torch.Tensor, batch: ForwardBatch, sinks_H: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Write the tokens' vectors into the layer's pages, and attend; [T, H, D]."""
        return self._run(q_THD, vectors_TD, batch, sinks_H, None)

    def partial(self, q_THD: torch.Tensor, vectors_TD: torch.Tensor, batch: ForwardBatch) -> Result:
        """As `__call__`, for a caller that merges: also the log-sum-exp [T, H]."""
        lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
        return self._run(q_THD, vectors_TD, batch, None, lse_TH), lse_TH

    def merges(self, batch: ForwardBatch) -> bool:
        """Whether the batch's backend attends by `merged`."""
        return bool(self._memory(batch)[1].backend.capabilities.merged)

    def merged(
        self,
        q_THD: torch.Tensor,
        vectors_TD: torch.Tensor,
        norm: Norm,
        angles: RopeAngles,
        slots: SlotsInput | None,
        batch: ForwardBatch,
        sinks_H: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of raw queries to the window and `slots`, turned back by `angles`; [T, H, D]."""
        pages, group = self._memory(batch)
        call = VectorsCall(q_THD, vectors_TD, norm, angles, pages, group, slots, batch.rows, self.scale, sinks_H)
        out: torch.Tensor = group.backend.run(call)
        return out

    def _memory(self, batch: ForwardBatch) -> tuple[KVPages, GroupBatch]:
        pages = batch.kv[self.layer_index]
        assert isinstance(pages, KVPages), "the layer's memory is not a window's vectors"
        return pages, batch.groups[pages.group]

    def _run(
        self,
        q_THD: torch.Tensor,
        vectors_TD: torch.Tensor,
        batch: ForwardBatch,
        sinks_H: torch.Tensor | None,
        lse_TH: torch.Tensor | None,
    ) -> torch.Tensor:
        (pages, group), vectors_T1D = self._memory(batch), vectors_TD.unsqueeze(1)
        heads, scores = Heads(q_THD, vectors_T1D, vectors_T1D), Scores(self.scale, sinks_H=sinks_H)
        out: torch.Tensor = group.backend.run(AttentionCall(heads, pages, group, batch.rows, scores, lse_TH=lse_TH))
        return out


class PagedSlots:
    """Attention of one layer over its complete slots, by whatever backend the batch's memory group has planned."""

    def __init__(self, layer_index: int, scale: float) -> None:
        self.layer_index = layer_index
        self.scale = scale

    def made_of(
        self,
        pooled_TX: torch.Tensor,
        norms: tuple[Norm, ...],
        angles: RopeAngles,
        chooser: IndexerQueries | None,
        batch: ForwardBatch,
    ) -> SlotsInput:
        """The slots for `PagedWindowVectors.merged`."""
        return SlotsInput(pooled_TX, norms, angles, chooser, *self._memory(batch))

    def is_mixed(self, batch: ForwardBatch) -> bool:
        """Whether the layer's indexer queries and keys are to be mixed."""
        return is_mixed(self._memory(batch)[0])

    def completed(self, batch: ForwardBatch) -> torch.Tensor:
        """Indices of the step's tokens that complete a slot, [N]."""
        pages, group = self._memory(batch)
        plan: CompletedSlots = group.plan
        return plan.completed(group.page_tokens // pages.latent.shape[1])

    def __call__(
        self,
        q_THD: torch.Tensor,
        window: Result | None,
        vectors_ND: torch.Tensor,
        index_keys_NI: torch.Tensor | None,
        chooser: IndexerQueries | None,
        batch: ForwardBatch,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the completed slots, and attend to all complete slots.

        If there is a window, merge with the attention over it.
        """
        pages, group = self._memory(batch)
        scores = Scores(self.scale, sinks_H=sinks_H)
        out: torch.Tensor = group.backend.run(
            CompressedCall(q_THD, window, vectors_ND, index_keys_NI, chooser, pages, group, batch.rows, scores)
        )
        return out

    def _memory(self, batch: ForwardBatch) -> tuple[LatentPages, GroupBatch]:
        pages = batch.kv[self.layer_index]
        assert isinstance(pages, LatentPages), "the layer's memory is not latents"
        return pages, batch.groups[pages.group]
