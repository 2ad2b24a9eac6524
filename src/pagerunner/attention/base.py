"""The attention seam: what a backend is given and what it must do. The calls it runs are in `attention.calls`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from pagerunner.attention.capability import Capabilities
from pagerunner.batch import StepRows
from pagerunner.memory.specs import Spec
from pagerunner.types import StateSave

Positions = TypeVar("Positions", int, torch.Tensor)
Call = TypeVar("Call", contravariant=True)


@dataclass(frozen=True, slots=True)
class Reach:
    """How far back a query looks: `size` tokens including itself, or to the beginning of its own chunk of `size` tokens."""

    size: int
    chunked: bool = False

    @classmethod
    def of(cls, spec: Spec) -> Reach | None:
        """The reach of a layer's memory. None if queries see everything before them."""
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
    """One step, one group, as `AttentionBackend.plan` sees it. The host lists hold the step's real rows, without padding;
    for the capture of a graph they are empty.

    `unstored` says that some tokens may have no page although nothing is forgotten: a drafter may be further than its row's pages. `page_table` is the group's table of all slots; see GroupBatch. `state_saves` are the step's in this group.
    """

    rows: StepRows
    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    slots: Sequence[int]
    page_table: torch.Tensor
    page_tokens: int
    reach: Reach | None
    state_saves: Sequence[StateSave] = ()
    unstored: bool = False


class AttentionBackend(Protocol[Call]):
    """Serves the layers of one memory group: plans each step once, then runs each layer's call.

    `Call` is the type of `attention.calls` that the backend runs. `plan` runs outside graphs and before the model: before every
    eager step, at the capture of a graph, and, if `capabilities.plans_on_host`, before each replay. Each `plan` returns a new
    value, which becomes `GroupBatch.plan`. What a first layer computes for the other layers belongs into that value.

    Some state outlives a step, and kernels read it through pointers: counters, or plans made on the host. It belongs to an
    object made by `new_state`. Eager steps share one such object. Every captured graph has its own, made for the capture
    after the warm-up, so that the graph misses nothing which a warm-up initialised. Before a replay, `plan` is called with
    the graph's state and must write into it whatever this step's host lists change. State never lives in the arena, so
    sleep can't take it away.
    """

    @property
    def name(self) -> str:
        """As the log and `attention_backend` name it."""

    @property
    def capabilities(self) -> Capabilities:
        """What the backend serves and how it is fed."""

    def new_state(self, shape: GraphShape | None) -> Any:
        """State for one graph of this shape, or for eager steps (None)."""

    def plan(self, inputs: PlanInputs, state: Any) -> Any:
        """What the step's layers share; becomes `GroupBatch.plan`."""

    def run(self, call: Call) -> torch.Tensor:
        """Write what the call's tokens bring into pages, then compute what the call's type says; by token, [T, ..].

        All writes of a call come before all of its reads, because rows may share pages that another row of the step writes.
        Tokens whose `rows.row_T` is -1 are padding: written nowhere, their output is undefined but finite.
        """
