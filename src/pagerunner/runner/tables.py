"""Page tables and slots: the per-request device state, one fixed row per slot, never compacted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pagerunner.memory.planner import MemoryPlan
from pagerunner.types import TableWrite


class PageTables:
    """One table per memory group: int64 [max_num_seqs, table_width] of page table entries.

    Entries beyond a request's pages are leftovers of earlier requests; batches gather only what a sequence covers.
    """

    def __init__(self, plan: MemoryPlan) -> None:
        shapes = [(plan.max_num_seqs, group.table_width) for group in plan.groups]
        self._tables = [np.zeros(shape, dtype=np.int64) for shape in shapes]

    def apply(self, writes: Sequence[TableWrite]) -> None:
        """Put the plan's new entries into the tables."""
        for write in writes:
            self._tables[write.group][write.slot, write.first : write.first + len(write.entries)] = write.entries

    def gather(self, group: int, slots: np.ndarray, width: int) -> np.ndarray:
        """The first `width` entries of each slot's row: [len(slots), width]."""
        return self._tables[group][slots, :width]

    def lookup(self, group: int, slots: np.ndarray, pages: np.ndarray) -> np.ndarray:
        """The entry of page number `pages[i]` of slot `slots[i]`, for every i."""
        return self._tables[group][slots, pages]

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
