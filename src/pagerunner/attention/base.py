"""What an attention backend must do."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from pagerunner.batch import ForwardBatch, GroupBatch, LayerKV
from pagerunner.memory.specs import Spec


class AttentionBackend(Protocol):
    """Attention over paged keys and values. Shape letters: T tokens of the step, R rows, P pages of a row, H query
    heads, K key/value heads, D head size.
    """

    name: str

    def unsupported(self, spec: Spec, device: str, dtype: torch.dtype) -> str | None:
        """Why this backend can't serve layers of `spec` with queries of `dtype` on `device`; None if it can."""
        ...

    def plan(
        self,
        query_lens: list[int],
        seq_lens: list[int],
        page_table_RP: torch.Tensor,
        page_tokens: int,
        query_start: torch.Tensor,
    ) -> Any:
        """Everything about a step that its layers share; becomes `GroupBatch.metadata`. Runs outside graphs."""
        ...

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        layer: LayerKV,
        group: GroupBatch,
        batch: ForwardBatch,
        scale: float,
    ) -> torch.Tensor:
        """Write k and v of all tokens into their pages, then attend causally; [T, H, D].

        All writes come before all reads, because rows may share pages that another row of the step writes.
        """
        ...
