"""Page tables and slots: the per-request device state, one fixed row per slot, never compacted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pagerunner.memory.planner import MemoryPlan
from pagerunner.types import TableWrite


class PageTables:
    """One table per memory group: int64 [max_num_seqs, table_width] of page table entries.

    Page n of a request is in column n % table_width: groups that forget pages have tables of fewer columns than a
    sequence has pages. Other entries are leftovers of earlier pages; batches gather only what a sequence covers.
    """

    def __init__(self, plan: MemoryPlan) -> None:
        shapes = [(plan.max_num_seqs, group.table_width) for group in plan.groups]
        self._tables = [np.zeros(shape, dtype=np.int64) for shape in shapes]

    def apply(self, writes: Sequence[TableWrite]) -> None:
        """Put the plan's new entries into the tables."""
        for write in writes:
            table, entries = self._tables[write.group], write.entries
            first = write.first % table.shape[1]
            fits = table.shape[1] - first
            table[write.slot, first : first + len(entries)] = entries[:fits]
            if len(entries) > fits:
                table[write.slot, : len(entries) - fits] = entries[fits:]

    def gather(self, group: int, slots: np.ndarray, width: int) -> np.ndarray:
        """The first `width` entries of each slot's row: [len(slots), width]."""
        return self._tables[group][slots, :width]

    def lookup(self, group: int, slots: np.ndarray, pages: np.ndarray) -> np.ndarray:
        """The entry of page number `pages[i]` of slot `slots[i]`, for every i; shapes broadcast."""
        table = self._tables[group]
        return table[slots, pages % table.shape[1]]

    @property
    def num_bytes(self) -> int:
        """Bytes held by all tables."""
        return sum(table.nbytes for table in self._tables)


class LastTokens:
    """The token each slot sampled last, on the device: a decode step reads its input here, not from the host."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def store(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """tokens[slots] = token_ids"""
        self._tokens[slots] = token_ids

    def load(self, slots: torch.Tensor) -> torch.Tensor:
        """tokens[slots]"""
        return self._tokens[slots]
