"""What lies where in the host's memory: an index from content to places, cut into slabs and used like the device's page memory.

Only numbers are here. The bytes are the workers' (`runner/transfers.py`), at the same places on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pagerunner.errors import CapacityError
from pagerunner.memory.events import BlockLog, LoggedIndex
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.prefix import PageKey, PrefixIndex
from pagerunner.memory.slabs import SlabPool

_OS_PAGE = 4_096
_ONE_GROUP_SLAB = 32 * 2**20
"""Least bytes of a slab where all pages are of one size, and there are so many: long runs of pages that are adjacent in both memories are one copy."""


class HostCut(NamedTuple):
    """How host memory is cut: equal slabs, each of which holds so many pages of one group."""

    slab_bytes: int
    num_slabs: int
    per_slab: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs."""
        return self.slab_bytes * self.num_slabs


def cut_host(plan: MemoryPlan, num_bytes: int) -> HostCut:
    """Cut so many bytes of each rank's host memory. Slabs begin where the system's pages do, as these are locked. Those of one group divide the bytes:
    of 100 MB there are two of 50, and no third of 33.5 is lost.

    Raises:
        CapacityError: not one slab fits.
    """
    slab = plan.slab_bytes
    if len(plan.groups) == 1:
        page = plan.groups[0].page_bytes
        least = -(-max(min(_ONE_GROUP_SLAB, num_bytes) // page, 1) * page // _OS_PAGE) * _OS_PAGE
        most = num_bytes // max(num_bytes // least, 1) // _OS_PAGE * _OS_PAGE
        slab = max(most // page, 1) * page
    slab = -(-slab // _OS_PAGE) * _OS_PAGE
    if num_bytes < slab:
        raise CapacityError(
            f"Each rank has {num_bytes:,} bytes of host memory for pages, which is less than a slab of pages ({slab:,} bytes). Raise "
            f"kv_offloading_size to at least {math.ceil(slab / 2**30 * 1e6) / 1e6:g} (GiB) times the number of ranks, or cpu_bytes_to_use to {slab} "
            "(bytes) times that number."
        )
    return HostCut(slab, num_bytes // slab, tuple(slab // group.page_bytes for group in plan.groups))


class HostTier:
    """Pages of host memory. One is in use while a transfer reads or writes it, and else cached: kept until its bytes are needed, the one
    that was used longest ago goes first. With a `log`, readers of KV events are told.
    """

    def __init__(self, plan: MemoryPlan, num_bytes: int, log: BlockLog | None = None) -> None:
        cut = cut_host(plan, num_bytes)
        self._page_bytes = [group.page_bytes for group in plan.groups]
        self._slab_bytes, self._num_slabs, self.num_bytes = cut.slab_bytes, cut.num_slabs, cut.num_bytes
        groups = len(plan.groups)
        self.index = PrefixIndex(groups) if log is None else LoggedIndex(groups, log, "CPU")
        self.pool = SlabPool(0, cut.per_slab, self.index)

    @property
    def used_bytes(self) -> int:
        """Bytes of pages that hold something."""
        pool = self.pool
        counts = (used + len(cached) for used, cached in zip(pool.used, pool.cached, strict=True))
        return sum(size * count for size, count in zip(self._page_bytes, counts, strict=True))

    @property
    def in_use_bytes(self) -> int:
        """Bytes of pages that can't be given away."""
        return sum(size * used for size, used in zip(self._page_bytes, self.pool.used, strict=True))

    @property
    def ready_bytes(self) -> int:
        """Bytes of the slabs that can be used by now."""
        return self.pool.num_slabs * self._slab_bytes

    def grow(self, ready_bytes: int) -> None:
        """The first `ready_bytes` can be used now. Never fewer than before."""
        if self.pool.num_slabs < self._num_slabs:
            self.pool.grow(min(ready_bytes // self._slab_bytes, self._num_slabs))

    def places(self, group: int, pages: Sequence[int]) -> list[int]:
        """Byte offsets of pages."""
        size, per_slab, slab = self._page_bytes[group], self.pool.per_slab[group], self._slab_bytes
        return [page // per_slab * slab + page % per_slab * size for page in pages]

    def take(self, needs: Sequence[int]) -> list[list[int]] | None:
        """Pages that nobody knows, by group, in use. None if so many can't be had, since others are in use."""
        return self.pool.allocate(needs)

    def share(self, group: int, keys: Sequence[PageKey]) -> list[int]:
        """The pages that hold these keys, in use."""
        pages = list(map(self.index.pages[group].__getitem__, keys))
        self.pool.share(group, pages)
        return pages

    def held(self, keys: Sequence[Sequence[PageKey]]) -> list[list[int]]:
        """By group, the pages that hold these keys, as far as there are any."""
        return [[at[key] for key in some if key in at] for some, at in zip(keys, self.index.pages, strict=True)]

    def release(self, pages: Sequence[Sequence[int]]) -> None:
        """Pages by group are used no more. Those with a key are kept; of these the first of each group is needed most."""
        for group, some in enumerate(pages):
            self.pool.release(group, some[::-1])

    def touch(self, pages: Sequence[Sequence[int]]) -> None:
        """Pages by group were used, and are given away after all others, as if they were released now."""
        for group, some in enumerate(pages):
            self.pool.touch(group, some[::-1])

    def forget(self, group: int, key: PageKey) -> None:
        """What has this key is wrong, or gone."""
        page = self.index.find(group, key)
        if page is not None and not self.pool.evict(group, page):
            self.index.forget(group, page)

    def clear(self) -> None:
        """Forget everything. Pages in use stay with their transfers and come back empty."""
        self.pool.evict_all()
        self.index.clear()
