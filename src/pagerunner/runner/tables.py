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

    def __init__(self, plan: MemoryPlan, device: torch.device | str = "cpu", *, keep_ends: bool = False) -> None:
        """`keep_ends`: the tables also say where each slot's pages end, for tokens that the host has not planned."""
        self._keeps_ends = keep_ends
        self._widths = [group.table_width for group in plan.groups]
        sizes = [plan.max_num_seqs * width for width in self._widths]
        self._firsts = [sum(sizes[:group]) for group in range(len(sizes))]
        self._page_tokens = [group.page_tokens for group in plan.groups]
        self._first_end = sum(sizes)
        slots = plan.max_num_seqs if keep_ends else 0
        ends = len(sizes) * slots
        flat = torch.zeros(self._first_end + ends, dtype=torch.int64, device=device)
        *tables, ends_X = flat.split([*sizes, ends])
        self._tables = [part.view(plan.max_num_seqs, -1) for part in tables]
        shapes = [
            (first, width, group.page_tokens)
            for first, width, group in zip(self._firsts, self._widths, plan.groups, strict=True)
        ]
        self._heads = [[-1] * plan.max_num_seqs for _ in plan.groups]  # by group and slot, the entry of page 0
        self.all = TableSet(
            flat, torch.tensor(shapes, dtype=torch.int64, device=device), ends_X.view(len(sizes), slots)
        )

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
            if self._keeps_ends:
                end = self._first_end + group * len(self._heads[group]) + slot
                found[end] = (first + len(entries)) * self._page_tokens[group]
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
