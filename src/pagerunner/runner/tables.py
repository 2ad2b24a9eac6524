"""Page tables: one fixed row per slot on the device, never compacted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.ops.batch import TableSet
from pagerunner.ops.tables import write_entries
from pagerunner.types import TableWrite


class PageTables:
    """One table per memory group: int64 [max_num_seqs, table_width] of page table entries.

    Page n of a request is in column n % table_width: groups that forget pages have tables of fewer columns than a
    sequence has pages. Other entries are leftovers of earlier pages; kernels read only what a sequence covers.
    """

    def __init__(self, plan: MemoryPlan, device: torch.device | str = "cpu") -> None:
        self._widths = [group.table_width for group in plan.groups]
        sizes = [plan.max_num_seqs * width for width in self._widths]
        self._firsts = [sum(sizes[:group]) for group in range(len(sizes))]
        flat = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._tables = [part.view(plan.max_num_seqs, -1) for part in flat.split(sizes)]
        shapes = [
            (first, width, group.page_tokens)
            for first, width, group in zip(self._firsts, self._widths, plan.groups, strict=True)
        ]
        self._heads = [[-1] * plan.max_num_seqs for _ in plan.groups]  # by group and slot, the entry of page 0
        self.all = TableSet(flat, torch.tensor(shapes, dtype=torch.int64, device=device))

    def of(self, group: int) -> torch.Tensor:
        """A group's table of all slots."""
        return self._tables[group]

    def places(self, writes: Sequence[TableWrite]) -> dict[int, int]:
        """Where in the flat tensor of all tables the plan's new entries go.

        Of two entries for one place the later one counts. The host keeps the first pages, which `may_share` compares.
        """
        found: dict[int, int] = {}
        for group, slot, first, entries in writes:
            width = self._widths[group]
            row = self._firsts[group] + slot * width
            if first == 0 and entries:
                self._heads[group][slot] = entries[0]
            column = first % width
            fits = min(width - column, len(entries))
            found.update(zip(range(row + column, row + column + fits), entries, strict=False))
            if fits < len(entries):
                found.update(zip(range(row, row + len(entries) - fits), entries[fits:], strict=True))
        return found

    def may_share(self, slots: Sequence[int]) -> bool:
        """Whether the sequences of these slots may begin with the same pages: they have the same first one."""
        for heads in self._heads:
            first = heads[slots[0]]
            for slot in slots:
                if heads[slot] != first:
                    break
            else:
                return True
        return False

    def write(self, places_N: torch.Tensor, entries_N: torch.Tensor) -> None:
        """Put entries where `places` says."""
        write_entries(self.all.entries, places_N, entries_N)

    @property
    def num_bytes(self) -> int:
        """Bytes held by all tables."""
        return self.all.entries.nbytes
