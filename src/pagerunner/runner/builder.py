"""BatchBuilder: a staged step becomes the tensors of a ForwardBatch, on the device.

Backends that read page tables on the device get the tables of all slots; for the others, tables are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from pagerunner.attention.base import AttentionBackend, DeviceBackend, GraphShape, PlanInputs, Reach, reads_tables
from pagerunner.attention.recurrent import RecurrentBackend
from pagerunner.batch import ForwardBatch, GroupBatch, LayerMemory, StepRows
from pagerunner.memory.planner import MemoryPlan
from pagerunner.ops.batch import StepTensors, build_rows
from pagerunner.ops.transfer import to_device
from pagerunner.runner.staging import StagedStep
from pagerunner.runner.tables import LastTokens, PageTables
from pagerunner.types import StateSave

GroupBackend = AttentionBackend | RecurrentBackend | DeviceBackend


class BatchBuilder:
    """Builds batches for one memory plan; reads tables and last tokens, owns neither.

    Steps have at most `max_tokens` tokens. `tensors` are what batches consist of: every step, in a graph or not, uses
    the same ones, so a batch is valid until the next step is built. `layers` is their memory.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        tables: PageTables,
        last_tokens: LastTokens,
        layers: tuple[LayerMemory, ...],
        backends: Sequence[GroupBackend],
        max_tokens: int,
    ) -> None:
        self._groups = plan.groups
        self._reaches = [Reach.of(group.layers[0].spec) for group in plan.groups]
        self._tables = tables
        self._last_tokens = last_tokens
        self.layers = layers
        self._backends = backends
        device = last_tokens.tokens.device
        self.tensors = StepTensors.empty(plan.max_num_seqs, max(max_tokens, plan.max_num_seqs), len(backends), device)
        self._no_page_R = torch.zeros(plan.max_num_seqs, dtype=torch.int64, device=device)
        self._states = self.new_states(None)
        self._host_planners = [
            (index, backend)
            for index, backend in enumerate(backends)
            if reads_tables(backend) and backend.plans_on_host
        ]
        self.max_tokens = max_tokens

    @property
    def max_rows(self) -> int:
        """The most rows of a step."""
        return self.tensors.slots_R.shape[0]

    @property
    def reads_tables(self) -> bool:
        """Whether every group's backend reads tables on the device, so that steps may run in graphs."""
        return all(reads_tables(backend) for backend in self._backends)

    @property
    def min_sharing_rows(self) -> int:
        """Steps of fewer rows don't look for pages that all rows share; 0: no step does."""
        return min((b.min_sharing_rows for b in self._backends if reads_tables(b) and b.min_sharing_rows), default=0)

    def may_share(self, slots: Sequence[int]) -> bool:
        """Whether the sequences of these slots may begin with the same pages, by what the tables were last told."""
        return self._tables.may_share(slots)

    def new_states(self, shape: GraphShape | None) -> list[Any]:
        """Fresh state of each group's backend: for one graph, or for eager steps."""
        return [backend.new_state(shape) if reads_tables(backend) else None for backend in self._backends]

    def clear(self) -> None:
        """Make every row and token of `tensors` padding."""
        own = self.tensors
        for tensor in (own.row_T, own.sample_slots_R, own.write_entry_GT):
            tensor.fill_(-1)
        others = (
            own.token_ids_T,
            own.positions_T,
            own.write_offset_GT,
            own.slots_R,
            own.query_start_R1,
            own.seq_lens_R,
        )
        for tensor in others:
            tensor.zero_()

    def fill(self, step: StagedStep, rows: int, tokens: int) -> None:
        """Put the step into `tensors`, padded to `rows` rows and `tokens` tokens."""
        where = step.where._replace(padded_rows=rows, padded_tokens=tokens)
        build_rows(step.packed, where, self._tables.all, self._last_tokens.tokens, self.tensors)

    def eager(
        self, step: StagedStep, state_saves: Sequence[StateSave] = (), *, last_alone: bool = False
    ) -> ForwardBatch:
        """The batch of a step outside graphs."""
        self.fill(step, step.where.rows, step.where.tokens)
        rows = self._rows(
            step.where.rows,
            step.where.tokens,
            max_query_len=max(step.query_lens),
            max_seq_len=max(step.seq_lens),
            one_token=step.where.one_token,
        )
        groups = tuple(
            self._group(index, self._inputs(index, rows, step, state_saves), self._states[index])
            if reads_tables(backend)
            else self._gathered_group(index, step)
            for index, backend in enumerate(self._backends)
        )
        batch = self._batch(
            rows, step.query_lens, step.seq_lens, groups, step.query_start_R1, step.logits_index_S, state_saves
        )
        return replace(batch, last_alone=last_alone)

    def captured(self, shape: GraphShape, *, one_token: bool, states: Sequence[Any]) -> ForwardBatch:
        """The batch that a graph of this shape works on: all rows and tokens are padding until `fill` says otherwise.

        Every backend must read tables on the device; `states` are theirs, for this graph only.
        """
        rows = self._rows(
            shape.rows,
            shape.tokens,
            max_query_len=1 if one_token else shape.tokens,
            max_seq_len=shape.max_seq_len,
            one_token=one_token,
        )
        groups = tuple(self._group(index, self._inputs(index, rows, None), state) for index, state in enumerate(states))
        query_start = self.tensors.query_start_R1[: shape.rows + 1]
        return self._batch(rows, [], [], groups, query_start, query_start[:0], ())

    def plan_replay(
        self, batch: ForwardBatch, step: StagedStep, states: Sequence[Any], state_saves: Sequence[StateSave]
    ) -> None:
        """Let backends that plan on the host prepare a graph's state for this step."""
        for index, backend in self._host_planners:
            backend.plan(self._inputs(index, batch.rows, step, state_saves), states[index])

    def _rows(self, rows: int, tokens: int, *, max_query_len: int, max_seq_len: int, one_token: bool) -> StepRows:
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
        )

    def _batch(
        self,
        rows: StepRows,
        query_lens: list[int],
        seq_lens: list[int],
        groups: tuple[GroupBatch, ...],
        query_start: torch.Tensor,
        logits_index_S: torch.Tensor,
        state_saves: Sequence[StateSave],
    ) -> ForwardBatch:
        return ForwardBatch(
            token_ids=self.tensors.token_ids_T[: rows.num_tokens],
            positions=rows.positions_T,
            query_start=query_start,
            logits_index=logits_index_S,
            query_lens=query_lens,
            seq_lens=seq_lens,
            groups=groups,
            kv=self.layers,
            state_saves=tuple(state_saves),
            rows=rows,
        )

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
        backend, rows = self._backends[index], inputs.rows
        return GroupBatch(
            page_table=inputs.page_table,
            first_page=self._no_page_R[: rows.num_rows],
            write_entry=self.tensors.write_entry_GT[index, : rows.num_tokens],
            write_offset=self.tensors.write_offset_GT[index, : rows.num_tokens],
            page_tokens=inputs.page_tokens,
            backend=backend,
            metadata=backend.plan(inputs, state),
        )

    def _gathered_group(self, index: int, step: StagedStep) -> GroupBatch:
        """Tables from the first page that a row reads on. A page that no later step reads may be missing (entry -1)."""
        group, reach, backend = self._groups[index], self._reaches[index], self._backends[index]
        num_rows, num_tokens = step.where.rows, step.where.tokens
        first_page = self._no_page_R[:num_rows]
        extra: tuple[Any, ...] = ()
        if reach is None:
            width = 1 if group.kind == "recurrent" else -(-max(step.seq_lens) // group.page_tokens)
            page_table = self._tables.of(index)[:, :width].index_select(0, step.slots_R)
        else:
            spans = [
                group.rule.span(end - queries, end) for end, queries in zip(step.seq_lens, step.query_lens, strict=True)
            ]
            first_pages = [first for first, _ in spans]
            first_page = to_device(first_pages, torch.int64, first_page.device)
            columns = torch.arange(max(stop - first for first, stop in spans), device=first_page.device)
            page_table = self._tables.lookup(index, step.slots_R[:, None], first_page[:, None] + columns)
            extra = (reach, first_pages)
        return GroupBatch(
            page_table=page_table,
            first_page=first_page,
            write_entry=self.tensors.write_entry_GT[index, :num_tokens],
            write_offset=self.tensors.write_offset_GT[index, :num_tokens],
            page_tokens=group.page_tokens,
            backend=backend,
            metadata=backend.plan(
                step.query_lens, step.seq_lens, page_table, group.page_tokens, step.query_start_R1, *extra
            ),
        )
