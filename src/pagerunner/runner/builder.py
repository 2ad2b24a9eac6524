"""BatchBuilder: a staged step becomes the tensors of a ForwardBatch, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from pagerunner.attention.base import AttentionBackend, GraphShape, PlanInputs, Reach
from pagerunner.batch import ForwardBatch, GroupBatch, LayerMemory, StatePages, StepRows, WritePlaces
from pagerunner.lora.blocks import RowAdapters
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.ops.ahead import rehearsing
from pagerunner.ops.batch import SlotState, StepTensors, TableSet, build_rows
from pagerunner.ops.drafting import PassTensors
from pagerunner.runner.staging import StagedStep
from pagerunner.runner.tables import PageTables
from pagerunner.types import StateSave


class BatchBuilder:
    """Builds batches for one memory plan; reads tables and the slots' state, owns neither.

    Steps have at most `max_tokens` tokens. Every batch consists of the same `tensors`, in a graph or not. So a batch is valid
    until the next step is built. `layers` are the layers' views of their pages. `adapters`: which requests have some.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        tables: PageTables,
        state: SlotState,
        layers: tuple[LayerMemory, ...],
        backends: Sequence[AttentionBackend[Any]],
        max_tokens: int,
        adapters: RowAdapters | None = None,
    ) -> None:
        self.adapters = adapters
        self._groups = plan.groups
        self._reaches = [Reach.of(group.layers[0].spec) for group in plan.groups]
        self._tables = tables
        self._state = state
        self.layers = layers
        self._backends = backends
        device = state.tokens.device
        self._num_drafts = state.drafts.shape[1]
        self.tensors = StepTensors.empty(
            plan.max_num_seqs, max(max_tokens, plan.max_num_seqs), len(backends), device, self._num_drafts
        )
        self._journals = any(isinstance(layer, StatePages) and layer.journal for layer in layers)
        self._states = self.new_states(None)
        self._host_planners = [
            (index, backend) for index, backend in enumerate(backends) if backend.capabilities.plans_on_host
        ]
        self.max_tokens = max_tokens

    @property
    def max_rows(self) -> int:
        """The most rows of a step."""
        return self.tensors.slots_R.shape[0]

    @property
    def num_groups(self) -> int:
        """The number of memory groups."""
        return len(self._groups)

    @property
    def tables(self) -> TableSet:
        """The page tables of all groups."""
        return self._tables.all

    @property
    def graphs(self) -> bool:
        """Whether every group's backend may be captured, so that steps may run in graphs."""
        return all(backend.capabilities.graphs for backend in self._backends)

    @property
    def strided(self) -> bool:
        """Whether every group's backend serves rows with drafts at a stride."""
        return all(backend.capabilities.drafts for backend in self._backends)

    def replays(self, rows: int) -> bool:
        """Whether recurrent layers have drafts to run from their journals, in the step of so many rows that was built last. Reads the device."""
        return self._journals and bool((self.tensors.accepted_R[:rows] > 0).any())

    @property
    def min_sharing_rows(self) -> int:
        """Steps of fewer rows don't look for pages that all rows share; 0: no step does."""
        found = (backend.capabilities.min_sharing_rows for backend in self._backends)
        return min(filter(None, found), default=0)

    def may_share(self, slots: Sequence[int]) -> bool:
        """Whether the sequences of these slots may begin with the same pages, by what the tables were last told."""
        return self._tables.may_share(slots)

    def new_states(self, shape: GraphShape | None) -> list[Any]:
        """Fresh state of each group's backend: for one graph, or for eager steps."""
        return [backend.new_state(shape) for backend in self._backends]

    def clear(self) -> None:
        """Make every row and token of `tensors` padding."""
        own = self.tensors
        for tensor in (own.row_T, own.sample_slots, own.write_entry_GT):
            tensor.fill_(-1)
        others = (
            own.token_ids_T,
            own.positions_T,
            own.write_offset_GT,
            own.slots_R,
            own.query_start_R1,
            own.seq_lens_R,
            own.accepted_R,
        )
        for tensor in others:
            tensor.zero_()

    def sampled_slots(self, step: StagedStep) -> torch.Tensor:
        """int64 [S]: slots of the sampled rows, by place, in the step that was built last; -1 at places that a row doesn't have."""
        return self.tensors.sample_slots[: step.num_places] if step.where.stride else step.sampled_slots_S

    def sampled_positions(self, step: StagedStep) -> torch.Tensor:
        """int64 [S]: positions of the tokens at the sampled rows' places, in the step that was built last."""
        where = step.where
        if where.stride or (where.one_token and step.num_places == where.rows):
            return self.tensors.positions_T[: step.num_places]
        return self.tensors.positions_T.index_select(0, step.logits_index_S)

    def sampled_ends(self, step: StagedStep) -> torch.Tensor:
        """int32 [S / width]: lengths of the sampled rows with this step's tokens, in the step that was built last."""
        if len(step.sampled_rows) == step.where.rows:
            return self.tensors.seq_lens_R[: step.where.rows]
        rows = self.tensors.row_T.index_select(0, step.logits_index_S[:: step.width])
        return self.tensors.seq_lens_R.index_select(0, rows)

    def fill(self, step: StagedStep, rows: int, tokens: int) -> None:
        """Put the step into `tensors`, padded to `rows` rows and `tokens` tokens."""
        where = step.where._replace(padded_rows=rows, padded_tokens=tokens)
        build_rows(step.packed, where, self._tables.all, self._state, self.tensors)

    def eager(
        self, step: StagedStep, state_saves: Sequence[StateSave] = (), *, last_alone: bool = False, most_tokens: int = 0
    ) -> ForwardBatch:
        """The batch of a step outside graphs. The keywords are those of `ForwardBatch`. It has adapters if any of the rows has one."""
        self.fill(step, step.where.rows, step.where.tokens)
        if self._num_drafts and not self.graphs:  # some backends plan from lists, and the host knows bounds
            step.seq_lens = _lengths(self.tensors.seq_lens_R[: step.where.rows], step.seq_lens)
        rows = self._rows(
            step.where.rows,
            step.where.tokens,
            max_query_len=max(step.query_lens),
            max_seq_len=max(step.seq_lens),
            one_token=step.where.one_token,
        )
        groups = tuple(
            self._group(index, self._inputs(index, rows, step, state_saves), state)
            for index, state in enumerate(self._states)
        )
        batch = self._batch(rows, step.logits_index_S, groups, last_alone, most_tokens)
        if not self.has_adapters(step.slots):
            return batch
        return self.adapted(batch, experts=self.has_experts(step.slots))

    def has_adapters(self, slots: Sequence[int]) -> bool:
        """Whether any of the requests in these slots has an adapter."""
        return self.adapters is not None and self.adapters.any(slots)

    def has_experts(self, slots: Sequence[int]) -> bool:
        """Whether any of these requests has an adapter with products of experts."""
        return self.adapters is not None and self.adapters.of_experts(slots)

    def adapted(self, batch: ForwardBatch, *, experts: bool) -> ForwardBatch:
        """The batch with its rows' adapters, which is work for the device: a graph has it at its beginning. `experts`: they may have products of experts."""
        assert self.adapters is not None, "no request has an adapter"
        return replace(batch, adapters=self.adapters.of(batch, experts))

    def of_pass(
        self,
        made: PassTensors,
        token_ids_S: torch.Tensor,
        batch: ForwardBatch,
        more: int,
        first_layer: int,
        states: Sequence[Any] | None = None,
    ) -> ForwardBatch:
        """The batch of a drafter's pass over these tokens, whose rows are the first ones of `made`: one of up to `more` passes behind the step of `batch`.

        It is for layers from `first_layer` on; groups without such layers have the step's own batch. `states` are the backends' in a graph.
        """
        count = len(token_ids_S)
        rows = StepRows(
            slots_R=made.slots_S[:count],
            query_start_R1=made.query_start_S1[: count + 1],
            seq_lens_R=made.seq_lens_S[:count],
            row_T=made.row_S[:count],
            positions_T=made.positions_S[:count],
            max_query_len=1,
            max_seq_len=batch.rows.max_seq_len + more,
            one_token=True,
        )
        groups = list(batch.groups)
        for index in {memory.group for memory in self.layers[first_layer:]}:
            backend = self._backends[index]
            inputs = self._inputs(index, rows, None)
            if states is None:
                inputs = replace(inputs, query_lens=[1] * count)
            if not backend.capabilities.graphs:  # it plans from lists
                lens, slots = _lengths(rows.seq_lens_R, [batch.rows.max_seq_len] * count), rows.slots_R.tolist()
                inputs = replace(inputs, seq_lens=lens, slots=slots, unstored=True)
            groups[index] = GroupBatch(
                page_table=inputs.page_table,
                write=WritePlaces(made.write_entry_GS[index, :count], made.write_offset_GS[index, :count]),
                page_tokens=inputs.page_tokens,
                backend=backend,
                plan=backend.plan(inputs, (states or self._states)[index]),
            )
        return replace(batch, token_ids=token_ids_S, rows=rows, groups=tuple(groups), last_alone=False, adapters=None)

    def captured(
        self, shape: GraphShape, *, one_token: bool, states: Sequence[Any], most_tokens: int = 0, stride: int = 0
    ) -> ForwardBatch:
        """The batch that a graph of this shape works on: all rows and tokens are padding until `fill` says otherwise.

        Every group's backend must be able to be captured. `states` are the backends' states for this graph only. `most_tokens`: see `ForwardBatch`;
        `stride`: see `StepRows`.
        """
        rows = self._rows(
            shape.rows,
            shape.tokens,
            max_query_len=1 if one_token else stride or shape.tokens,
            max_seq_len=shape.max_seq_len,
            one_token=one_token,
            stride=stride,
        )
        groups = tuple(self._group(index, self._inputs(index, rows, None), state) for index, state in enumerate(states))
        nothing = self.tensors.sample_slots[:0]
        return self._batch(rows, nothing, groups, most_tokens=most_tokens)

    def plan_replay(
        self, batch: ForwardBatch, step: StagedStep, states: Sequence[Any], state_saves: Sequence[StateSave]
    ) -> None:
        """Let backends that plan on the host prepare a graph's state for this step."""
        for index, backend in self._host_planners:
            backend.plan(self._inputs(index, batch.rows, step, state_saves), states[index])

    def plan_empty(self, batch: ForwardBatch, states: Sequence[Any]) -> None:
        """As `plan_replay`, for a step without rows."""
        for index, backend in self._host_planners:
            backend.plan(self._inputs(index, batch.rows, None), states[index])

    def _rows(
        self, rows: int, tokens: int, *, max_query_len: int, max_seq_len: int, one_token: bool, stride: int = 0
    ) -> StepRows:
        own = self.tensors
        return StepRows(
            slots_R=own.slots_R[:rows],
            query_start_R1=own.query_start_R1[: rows + 1],
            seq_lens_R=own.seq_lens_R[:rows],
            row_T=own.row_T[:tokens],
            positions_T=own.positions_T[:tokens],
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            one_token=one_token,
            stride=stride,
            accepted_R=own.accepted_R[:rows],
        )

    def _batch(
        self,
        rows: StepRows,
        logits_index_S: torch.Tensor,
        groups: tuple[GroupBatch, ...],
        last_alone: bool = False,
        most_tokens: int = 0,
    ) -> ForwardBatch:
        token_ids_T = self.tensors.token_ids_T[: rows.num_tokens]
        return ForwardBatch(token_ids_T, rows, logits_index_S, groups, self.layers, last_alone, most_tokens)

    def _inputs(
        self, index: int, rows: StepRows, step: StagedStep | None, state_saves: Sequence[StateSave] = ()
    ) -> PlanInputs:
        return PlanInputs(
            rows=rows,
            query_lens=step.query_lens if step is not None else (),
            seq_lens=step.seq_lens if step is not None else (),
            slots=step.slots if step is not None else (),
            page_table=self._tables.of(index),
            page_tokens=self._groups[index].page_tokens,
            reach=self._reaches[index],
            state_saves=[save for save in state_saves if save.group == index],
        )

    def _group(self, index: int, inputs: PlanInputs, state: Any) -> GroupBatch:
        backend, rows, made = self._backends[index], inputs.rows, self.tensors
        return GroupBatch(
            page_table=inputs.page_table,
            write=WritePlaces(*(x[index, : rows.num_tokens] for x in (made.write_entry_GT, made.write_offset_GT))),
            page_tokens=inputs.page_tokens,
            backend=backend,
            plan=backend.plan(inputs, state),
        )


def _lengths(seq_lens_R: torch.Tensor, bounds: list[int]) -> list[int]:
    """Rows' lengths from the device, where no kernel has written them in a rehearsal: then the host's bounds."""
    return bounds if rehearsing() else seq_lens_R.tolist()
