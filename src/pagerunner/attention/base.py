"""What an attention backend must do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, TypeVar

import torch

from pagerunner.batch import ForwardBatch, GroupBatch, LayerKV, StepRows
from pagerunner.memory.specs import Spec
from pagerunner.types import StateSave

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


@dataclass(frozen=True, slots=True)
class GraphShape:
    """What a captured graph is for: at most `rows` rows of `tokens` tokens in all, sequences up to `max_seq_len`.
    `sharing`: all rows may begin with the same pages; if not, nobody needs to look.
    """

    rows: int
    tokens: int
    max_seq_len: int
    sharing: bool = True


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """One step, one group, as `DeviceBackend.plan` sees it. The host lists hold the step's real rows, without padding.

    `page_table` is the group's table of all slots; see GroupBatch. `state_saves` are the step's in this group.
    """

    rows: StepRows
    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    slots: Sequence[int]
    page_table: torch.Tensor
    page_tokens: int
    reach: Reach | None
    state_saves: Sequence[StateSave] = ()


class DeviceBackend(Protocol):
    """An attention backend whose kernels read the page tables of all slots on the device, and may be captured in graphs.

    `plan` runs before every step, outside graphs. All state that kernels read through pointers and that outlives a launch
    (counters, plans made on the host) belongs to an object made by `new_state`: every captured graph has its own, made afresh for
    the capture, so that nothing which a warm-up initialised is missing from the graph; eager steps share one. Before a
    graph is replayed, `plan` is called with the graph's state and must leave in it whatever this step's host lists
    change; a backend whose plan depends on device tensors and bounds alone says `plans_on_host = False` and isn't called.
    State never lives in the arena, so sleep can't take it away.
    """

    name: str
    reads_tables: bool  # always True: what tells such a backend from those that are planned from gathered tables
    plans_on_host: bool
    min_sharing_rows: int  # steps of fewer rows don't look for pages that all rows share; 0: none does

    def unsupported(self, spec: Spec, device: str, dtype: torch.dtype) -> str | None:
        """Why this backend can't serve layers of `spec` with queries of `dtype` on `device`; None if it can."""
        ...

    def new_state(self, shape: GraphShape | None) -> Any:
        """State for one graph of this shape, or for eager steps (None)."""
        ...

    def plan(self, inputs: PlanInputs, state: Any) -> Any:
        """What the step's layers share; becomes `GroupBatch.metadata`."""
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
        """See AttentionBackend.forward. Tokens whose `rows.row_T` is -1 are padding: written nowhere, their output is
        undefined but finite.

        A backend may also have `from_projection(qkv_TND, prep, layer, group, batch, scale, sinks_H, softcap)`: `forward`
        of what `prep` makes of a projection's output, which it changes in place; and `sampled_from_projection`, which
        takes the same and returns the attention of `batch.logits_index` alone. See `layers.attention`.
        """
        ...


def reads_tables(backend: Any) -> TypeGuard[DeviceBackend]:
    """Whether a backend is a DeviceBackend, not one planned on the host from gathered tables."""
    return getattr(backend, "reads_tables", False)


class AttentionBackend(Protocol):
    """Attention over paged keys and values, planned on the host from gathered tables. Shape letters: T tokens of the step,
    R rows, P pages of a row, H query heads, K key/value heads, D head size.
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
