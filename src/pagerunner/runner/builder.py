"""BatchBuilder: a StepPlan becomes the tensors of a ForwardBatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagerunner.attention.base import AttentionBackend, Reach
from pagerunner.attention.recurrent import RecurrentBackend
from pagerunner.batch import ForwardBatch, GroupBatch, LayerMemory, StepRows
from pagerunner.memory.planner import MemoryPlan
from pagerunner.runner.tables import LastTokens, PageTables
from pagerunner.types import StateSave, StepRow


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a plan as arrays: slots, query starts [R + 1], and per token its row's slot and its position."""

    slots: np.ndarray
    query_start: np.ndarray
    token_slots: np.ndarray
    positions: np.ndarray
    query_lens: list[int]
    seq_lens: list[int]


def _arrays(rows: Sequence[StepRow]) -> _Rows:
    slots = np.array([row.slot for row in rows], dtype=np.int64)
    starts = np.array([row.start for row in rows], dtype=np.int64)
    query_lens = [row.num_tokens for row in rows]
    query_start = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(query_lens, out=query_start[1:])
    total = int(query_start[-1])
    if total == len(rows):  # one token a row: a pure decode step
        token_slots, positions = slots, starts
    else:
        token_slots = np.repeat(slots, query_lens)
        positions = np.arange(total, dtype=np.int64) + np.repeat(starts - query_start[:-1], query_lens)
    seq_lens = [row.start + row.num_tokens for row in rows]
    return _Rows(slots, query_start, token_slots, positions, query_lens, seq_lens)


class BatchBuilder:
    """Builds batches for one memory plan; reads tables and last tokens, owns neither."""

    def __init__(
        self,
        plan: MemoryPlan,
        tables: PageTables,
        last_tokens: LastTokens,
        layers: tuple[LayerMemory, ...],
        backends: Sequence[AttentionBackend | RecurrentBackend],
    ) -> None:
        self._groups = plan.groups
        self._reaches = [Reach.of(group.layers[0].spec) for group in plan.groups]
        self._tables = tables
        self._last_tokens = last_tokens
        self._layers = layers
        self._backends = backends

    def build(
        self, rows: Sequence[StepRow], logits_index: np.ndarray, state_saves: Sequence[StateSave] = ()
    ) -> ForwardBatch:
        """The batch of `rows`; logits are wanted at the token indices `logits_index`."""
        arrays = _arrays(rows)
        return ForwardBatch(
            token_ids=self._token_ids(rows, arrays),
            positions=torch.from_numpy(arrays.positions),
            query_start=torch.from_numpy(arrays.query_start),
            logits_index=torch.from_numpy(logits_index),
            query_lens=arrays.query_lens,
            seq_lens=arrays.seq_lens,
            groups=tuple(
                self._recurrent_group(index, arrays) if group.kind == "recurrent" else self._group(index, arrays)
                for index, group in enumerate(self._groups)
            ),
            kv=self._layers,
            state_saves=tuple(state_saves),
            rows=StepRows.of(arrays.query_lens, arrays.seq_lens, arrays.slots.tolist()),
        )

    def _token_ids(self, rows: Sequence[StepRow], arrays: _Rows) -> torch.Tensor:
        known: list[int] = []
        unknown_slots: list[int] = []
        unknown_at: list[int] = []
        for row in rows:
            known += row.tokens
            if len(row.tokens) < row.num_tokens:
                unknown_at.append(len(known))
                unknown_slots.append(row.slot)
                known.append(0)
        token_ids = torch.tensor(known, dtype=torch.int64)
        if unknown_slots:
            sampled = self._last_tokens.load(torch.tensor(unknown_slots))
            if len(unknown_slots) == len(known):
                return sampled
            token_ids[torch.tensor(unknown_at)] = sampled
        return token_ids

    def _group(self, index: int, arrays: _Rows) -> GroupBatch:
        reach = self._reaches[index]
        if reach is not None:
            return self._forgetting_group(index, arrays, reach)
        page_tokens = self._groups[index].page_tokens
        backend = self._backends[index]
        width = -(-max(arrays.seq_lens) // page_tokens)
        page_table = torch.from_numpy(self._tables.gather(index, arrays.slots, width))
        entries = self._tables.lookup(index, arrays.token_slots, arrays.positions // page_tokens)
        metadata = backend.plan(
            arrays.query_lens, arrays.seq_lens, page_table, page_tokens, torch.from_numpy(arrays.query_start)
        )
        return GroupBatch(
            page_table=page_table,
            first_page=torch.zeros(len(arrays.slots), dtype=torch.int64),
            write_entry=torch.from_numpy(entries),
            write_offset=torch.from_numpy(arrays.positions % page_tokens),
            page_tokens=page_tokens,
            backend=backend,
            metadata=metadata,
        )

    def _forgetting_group(self, index: int, arrays: _Rows, reach: Reach) -> GroupBatch:
        """Tables from the first page that a row reads on. A page that no later step reads may be missing (entry -1)."""
        page_tokens, rule = self._groups[index].page_tokens, self._groups[index].rule
        backend = self._backends[index]
        ends = arrays.seq_lens
        starts = [end - queries for end, queries in zip(ends, arrays.query_lens, strict=True)]
        spans = [rule.span(start, end) for start, end in zip(starts, ends, strict=True)]
        first_pages = [first for first, _ in spans]
        first = np.array(first_pages, dtype=np.int64)
        columns = np.arange(max(stop - first for first, stop in spans), dtype=np.int64)
        page_table = torch.from_numpy(
            self._tables.lookup(index, arrays.slots[:, None], first[:, None] + columns[None, :])
        )
        pages = arrays.positions // page_tokens
        entries = self._tables.lookup(index, arrays.token_slots, pages)
        metadata = backend.plan(
            arrays.query_lens,
            ends,
            page_table,
            page_tokens,
            torch.from_numpy(arrays.query_start),
            reach,
            first_pages,
        )
        return GroupBatch(
            page_table=page_table,
            first_page=torch.from_numpy(first),
            write_entry=torch.from_numpy(entries),
            write_offset=torch.from_numpy(arrays.positions % page_tokens),
            page_tokens=page_tokens,
            backend=backend,
            metadata=metadata,
        )

    def _recurrent_group(self, index: int, arrays: _Rows) -> GroupBatch:
        """One page per row, which its tokens go through rather than to: there is nothing to write token by token."""
        page_tokens = self._groups[index].page_tokens
        backend = self._backends[index]
        page_table = torch.from_numpy(self._tables.gather(index, arrays.slots, 1))
        none_R = torch.zeros(len(arrays.slots), dtype=torch.int64)
        none_T = torch.zeros(len(arrays.positions), dtype=torch.int64)
        metadata = backend.plan(
            arrays.query_lens, arrays.seq_lens, page_table, page_tokens, torch.from_numpy(arrays.query_start)
        )
        return GroupBatch(
            page_table=page_table,
            first_page=none_R,
            write_entry=none_T,
            write_offset=none_T,
            page_tokens=page_tokens,
            backend=backend,
            metadata=metadata,
        )
