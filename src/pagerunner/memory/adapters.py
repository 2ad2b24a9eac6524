"""Adapters in pages of the page memory: beside keys and values, from the same pool.

An adapter's pages are ordinary pages of the group whose pages are largest. A request with an adapter is admitted with its own pages and those of its adapter
that aren't there, or not at all. Requests with one adapter hold its pages together, and the last to leave gives them back. They are cache then, as
prefixes are: found by the digest of the content, and evicted when they are the oldest. So no request that waits holds any page, and an adapter that
has lost two of its pages gets these two again.

Example: an adapter has 37 pages. Three requests run with it, which hold the 37 once. When they have ended, other requests need 10 pages, which evict its
last ones. The next request with it has 10 pages filled.

Pages are filled from host memory beside the steps. Until that has ended they can't be found, and don't move. If it fails, they are never found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from pagerunner.memory.grant import NO_PAGE
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.prefix import PageKey, PrefixIndex
from pagerunner.memory.slabs import SlabPool
from pagerunner.memory.step_work import StepWork
from pagerunner.types.lora import AdapterInfo


@lru_cache(maxsize=256)
def adapter_keys(digest: str, num_pages: int) -> tuple[PageKey, ...]:
    """The keys of an adapter's pages, which are unlike the hashes of tokens."""
    return tuple(b"adapter " + digest.encode() + number.to_bytes(4, "little") for number in range(num_pages))


class AdapterLease:
    """The pages of one adapter, in the order of its content, as `users` requests run with it or as they are being filled.

    `missing`: the numbers of those that a fill is to bring.
    """

    __slots__ = ("digest", "epoch", "filling", "missing", "pages", "users")

    def __init__(self, digest: str, pages: list[int], epoch: int) -> None:
        self.digest, self.pages, self.epoch = digest, pages, epoch
        self.missing: list[int] = []
        self.users = 0
        self.filling = False

    @property
    def num_lacking(self) -> int:
        """Pages that it has yet to be given."""
        return self.pages.count(NO_PAGE)


class AdapterPages:
    """The leases of all adapters. `group` has the pages."""

    def __init__(self, plan: MemoryPlan, pool: SlabPool, index: PrefixIndex, work: StepWork) -> None:
        self._plan, self._pool, self._index, self._work = plan, pool, index, work
        self.group = plan.largest_group
        self._leases: dict[AdapterLease, None] = {}
        self._by_digest: dict[str, AdapterLease] = {}
        self.moving: dict[AdapterLease, None] = {}
        """Leases whose pages lie elsewhere than the device's tables say."""

    def find(self, adapter: AdapterInfo) -> list[int]:
        """The adapter's pages, NO_PAGE for those that aren't there."""
        there = self._index.pages[self.group]
        return [there.get(key, NO_PAGE) for key in adapter_keys(adapter.digest, adapter.num_pages)]

    def is_leased(self, digest: str) -> bool:
        """Whether requests run with the adapter, or it is being filled."""
        return digest in self._by_digest

    def join(self, adapter: AdapterInfo) -> AdapterLease:
        """One more request is to run with the adapter. The pages that are there are held from now on."""
        lease = self._by_digest.get(adapter.digest)
        if lease is None:
            lease = AdapterLease(adapter.digest, self.find(adapter), self._index.epoch)
            self._pool.share(self.group, _held(lease))
            self._leases[lease] = None
            self._by_digest[adapter.digest] = lease
        lease.users += 1
        return lease

    def complete(self, lease: AdapterLease, promised: Sequence[int]) -> None:
        """Give the lease the pages that it lacks, which are there. What is `promised`, these pages too, can be had afterwards."""
        lacking = lease.num_lacking
        if not lacking:
            return
        needs = [lacking * (group == self.group) for group in range(len(self._plan.groups))]
        fresh = self._pool.allocate(needs, promised)
        assert fresh is not None, "admission has looked for these pages"
        lease.missing = [number for number, page in enumerate(lease.pages) if page == NO_PAGE]
        for number, page in zip(lease.missing, fresh[self.group], strict=True):
            lease.pages[number] = page
        self._work.keep(self.group, fresh[self.group])

    def fill(self, lease: AdapterLease) -> list[int]:
        """The pages are being filled, or a slot's table is, and stay where they are. Returns their offsets in bytes."""
        assert not lease.filling and not lease.num_lacking
        lease.filling = True
        self._pool.pin(self.group, lease.pages)
        return self.offsets(lease)

    def offsets(self, lease: AdapterLease) -> list[int]:
        """Where the pages lie in the page memory, in bytes."""
        return self._plan.page_offsets(self.group, lease.pages)

    def filled(self, lease: AdapterLease, *, well: bool) -> None:
        """The fill has ended. What it has brought `well` can be found; else nobody finds it, and no other request may join."""
        if lease not in self._leases:
            return  # it was lost
        lease.filling = False
        self._pool.unpin(self.group, lease.pages)
        if not well:
            del self._by_digest[lease.digest]
        elif lease.epoch == self._index.epoch and lease.missing:
            keys = adapter_keys(lease.digest, len(lease.pages))
            numbers, lease.missing = lease.missing, []
            found, pages = [keys[number] for number in numbers], [lease.pages[number] for number in numbers]
            self._index.publish_adapter(self.group, lease.digest, found, pages)
        lease.missing = []
        if not lease.users:
            self._end(lease)

    def leave(self, lease: AdapterLease) -> None:
        """A request doesn't run with the adapter any more. The last one's pages are cache, once they are filled."""
        lease.users -= 1
        if not lease.users and not lease.filling:
            self._end(lease)

    def lose(self) -> None:
        """The device's memory is to go, and nobody runs. What is being filled is nobody's."""
        for lease in list(self._leases):
            assert not lease.users, "a request runs"
            self._pool.unpin(self.group, lease.pages)
            self._end(lease)

    def _end(self, lease: AdapterLease) -> None:
        del self._leases[lease]
        if self._by_digest.get(lease.digest) is lease:
            del self._by_digest[lease.digest]
        self._pool.release(self.group, _held(lease)[::-1])

    def moved(self, group: int, source: int, target: int) -> None:
        """What was in page `source` is in `target` now."""
        if group != self.group:
            return
        for lease in self._leases:
            if source in lease.pages:
                lease.pages[lease.pages.index(source)] = target
                self.moving[lease] = None

    def take_moved(self) -> list[AdapterLease]:
        """Leases whose tables the plan in the making corrects."""
        moved, self.moving = self.moving, {}
        return [lease for lease in moved if lease in self._leases]

    # -- numbers

    def coming_back(self) -> int:
        """Pages that nobody runs with and that are given back when their fills have ended."""
        return sum(len(lease.pages) for lease in self._leases if not lease.users)

    @property
    def num_used(self) -> int:
        """Pages that requests run with, or that are being filled."""
        return sum(map(len, map(_held, self._leases)))

    @property
    def num_there(self) -> int:
        """Pages that hold adapters, or are to."""
        return sum(self.counts().values())

    def counts(self) -> Counter[str]:
        """By digest, as many pages."""
        there, found = self._index.adapters[self.group], self._index.num_of_adapter.copy()
        for lease in self._leases:
            found[lease.digest] += sum(page not in there for page in _held(lease))
        return found

    def holders(self, group: int) -> Counter[int]:
        """How many leases each page of the group is in."""
        if group != self.group:
            return Counter()
        return Counter(page for lease in self._leases for page in _held(lease))


def _held(lease: AdapterLease) -> list[int]:
    return [page for page in lease.pages if page != NO_PAGE]
