"""What an attention backend must do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from pagerunner.batch import ForwardBatch, GroupBatch, LayerKV
from pagerunner.memory.specs import Spec

Positions = TypeVar("Positions", int, torch.Tensor)


@dataclass(frozen=True, slots=True)
class Reach:
    """How far back a query looks: `size` tokens including itself, or to the beginning of its own chunk of `size` tokens."""

    size: int
    chunked: bool = False

    @classmethod
    def of(cls, spec: Spec) -> Reach | None:
        """That of a layer's memory; None where queries see everything before them."""
        if spec.kind == "window":
            return cls(spec.window)  # type: ignore[attr-defined]
        return cls(spec.chunk, chunked=True) if spec.kind == "chunked" else None  # type: ignore[attr-defined]

    def oldest(self, position: Positions) -> Positions:
        """The first position that the query at `position` sees; of a window it may be negative."""
        return position // self.size * self.size if self.chunked else position - self.size + 1


class AttentionBackend(Protocol):
    """Attention over paged keys and values. Shape letters: T tokens of the step, R rows, P pages of a row, H query
    heads, K key/value heads, D head size. A backend that takes pages of certain sizes only also has `page_sizes`, in tokens:
    it is given larger pages as several of those (`GroupPlan.for_kernels`).
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
        reach: Reach | None = None,
        first_pages: Sequence[int] = (),
    ) -> Any:
        """Everything about a step that its layers share; becomes `GroupBatch.metadata`. Runs outside graphs.

        In groups that forget, `reach` says what queries see, and column 0 of row r's table is page `first_pages[r]`.
        """
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
        sinks_H: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """Write k and v of the tokens that have a page into it, then attend causally; [T, H, size of a value head].

        All writes come before all reads, because rows may share pages that another row of the step writes. A token
        whose `write_entry` is -1 is read by its own step's queries only. `sinks_H` are one more score per head that
        takes part in the softmax and stands for no value. With a `softcap` c, scores are `c * tanh(score / c)`.
        """
        ...
