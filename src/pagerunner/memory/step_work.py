"""What the next plan must carry for the page memory: page table entries, fresh pages, copies of pages, and transfers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pagerunner.memory.grant import Grant
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.types import PageCopy, PageTransfer, TableWrite

if TYPE_CHECKING:
    from pagerunner.memory.leases import Lease


class StepWork:
    """Collects what was decided since the last plan. `take_...` hands it to the plan in the making and forgets it.

    `list_fresh_pages` puts the fresh pages of every group into the zero lists, not only of those that need it.
    """

    def __init__(self, plan: MemoryPlan, *, list_fresh_pages: bool = False) -> None:
        self._plan = plan
        self._lists_fresh = [group.zero_fresh or list_fresh_pages for group in plan.groups]
        self._fresh: list[dict[int, None]] = [{} for _ in plan.groups]
        self._copies: list[PageCopy] = []
        self._unsent: dict[Grant, None] = {}  # grants with table entries that the device doesn't have
        self._transfers: list[Lease] = []  # that no plan has begun
        self._moved: list[tuple[Grant, int, int]] = []  # single entries to be sent again: grant, group, page number

    def send_table(self, grant: Grant) -> None:
        """The grant has table entries beyond `grant.sent`."""
        self._unsent[grant] = None

    def drop(self, grant: Grant) -> None:
        """The grant's tables are of no use any more."""
        self._unsent.pop(grant, None)
        if self._moved:
            self._moved = [entry for entry in self._moved if entry[0] is not grant]

    def add_fresh(self, group: int, pages: Iterable[int]) -> None:
        """Pages of the group were handed out that may hold another request's bytes."""
        if self._lists_fresh[group]:
            self._fresh[group].update(dict.fromkeys(pages))

    def copy(self, group: int, source: int, target: int) -> None:
        """Page `target`, just handed out, is to hold what `source` holds."""
        offset = self._plan.page_offset
        self._copies.append(PageCopy(group, offset(group, source), offset(group, target)))
        self.keep(group, (target,))

    def keep(self, group: int, pages: Iterable[int]) -> None:
        """The pages' bytes are wanted: they are not fresh."""
        if fresh := self._fresh[group]:
            for page in pages:
                fresh.pop(page, None)

    def move(self, group: int, source: int, target: int) -> None:
        """What `source` held is held by `target` from now on."""
        fresh = self._fresh[group]
        if source in fresh:  # nothing was written to it yet
            del fresh[source]
            fresh[target] = None
        else:
            self.copy(group, source, target)

    def begin(self, lease: Lease) -> None:
        """A transfer of the lease's pages begins with the next plan."""
        self._transfers.append(lease)

    def send_entry(self, grant: Grant, group: int, number: int) -> None:
        """The grant's page `number` has another place now."""
        if number < grant.sent[group]:
            self._moved.append((grant, group, number))

    def take_table_writes(self) -> list[TableWrite]:
        """Page table entries that the device doesn't have yet."""
        writes: list[TableWrite] = []
        for grant, group, number in self._moved:
            if grant.first[group] <= number < grant.sent[group]:
                entries = self._plan.table_entries(group, grant.pages[group][number : number + 1])
                writes.append(TableWrite(group, grant.slot, number, entries))
        self._moved.clear()
        for grant in self._unsent:
            for group, pages in enumerate(grant.pages):
                first = max(grant.sent[group], grant.first[group])
                if first < len(pages):
                    entries = self._plan.table_entries(group, pages[first:])
                    writes.append(TableWrite(group, grant.slot, first, entries))
                    grant.sent[group] = len(pages)
        self._unsent.clear()
        return writes

    def take_fresh(self) -> list[list[int]]:
        """Byte offsets, per group, of the pages handed out since the last call, for groups that list them."""
        if not any(self._fresh):
            return []
        fresh = [self._plan.page_offsets(group, pages) for group, pages in enumerate(self._fresh)]
        self._fresh = [{} for _ in fresh]
        return fresh

    def take_copies(self) -> list[PageCopy]:
        """Copies decided since the last call; they must run in this order, before anything else touches pages."""
        copies, self._copies = self._copies, []
        return copies

    @property
    def transfers_wait(self) -> bool:
        """Whether a transfer is to begin that hasn't ended already."""
        return any(lease.state != "ended" for lease in self._transfers)

    def take_transfers(self) -> list[PageTransfer]:
        """Transfers decided since the last call."""
        if not self._transfers:
            return []
        leases, self._transfers = self._transfers, []
        return [self._transfer(lease) for lease in leases if lease.state != "ended"]

    def _transfer(self, lease: Lease) -> PageTransfer:
        offsets = [self._plan.page_offsets(group, pages) for group, pages in enumerate(lease.pages)]
        return PageTransfer(lease.number, lease.state == "arriving", offsets, lease.places)
