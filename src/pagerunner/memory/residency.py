"""How long pages stay: of a sample of them, the time from their allocation to their eviction, and between uses.

With sampling the manager's pool is a `TimedPool`; without, a plain `SlabPool`, which knows nothing of this. A page that is given
back without having become cache leaves the sample: it has no eviction.
"""

from __future__ import annotations

import copy
import math
import random
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import msgspec

from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.prefix import PrefixIndex
from pagerunner.memory.slabs import SlabPool

# Seconds; vLLM's buckets.
BOUNDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800,
)  # fmt: skip
_USES = 4  # latest ones that a page's gaps are taken from


class SecondsCount(msgspec.Struct):
    """Times counted since the start: by the first of `BOUNDS` that each doesn't exceed, in the last place those beyond."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one time."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds


class Residency(msgspec.Struct):
    """Of sampled pages that were evicted: allocation to eviction, last use to eviction, and use to use before."""

    lifetime: SecondsCount = msgspec.field(default_factory=SecondsCount)
    idle_before_evict: SecondsCount = msgspec.field(default_factory=SecondsCount)
    reuse_gap: SecondsCount = msgspec.field(default_factory=SecondsCount)


class Stay:
    """One sampled page's times."""

    __slots__ = ("born", "used", "uses")

    def __init__(self, now: float) -> None:
        self.born = self.used = now
        self.uses: deque[float] = deque(maxlen=_USES)


class PageSampler:
    """Follows a share `sample`, more than 0 and at most 1, of all pages that are handed out. `clock` gives seconds."""

    def __init__(self, sample: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._found = Residency()
        self._clock = clock
        self._log_miss = math.log1p(-sample) if sample < 1 else -math.inf
        self._random = random.Random()
        self._skip = self._draw()  # pages to pass over before the next one of the sample
        self.stays: defaultdict[int, dict[int, Stay]] = defaultdict(dict)  # by group, then by page

    def residency(self) -> Residency:
        """What was counted so far, as a copy."""
        return copy.deepcopy(self._found)

    def count_on(self, earlier: PageSampler) -> None:
        """Go on with the counts of an earlier sampler. The pages that it followed are forgotten: their pool is gone."""
        self._found = earlier._found

    def _draw(self) -> int:
        return int(math.log(1 - self._random.random()) / self._log_miss)

    def allocated(self, group: int, pages: Sequence[int]) -> None:
        """The pages begin a new life; some of them are followed."""
        at = self._skip
        while at < len(pages):
            self.stays[group][pages[at]] = Stay(self._clock())
            at += 1 + self._draw()
        self._skip = at - len(pages)

    def used(self, pages: Iterable[Sequence[int]]) -> None:
        """A request goes on from these pages, by group."""
        now = self._clock()
        for group, numbers in enumerate(pages):
            stays = self.stays[group]
            for page in [page for page in numbers if page in stays]:
                stays[page].used = now
                stays[page].uses.append(now)

    def evicted(self, group: int, pages: Sequence[int]) -> None:
        """Cached pages make room."""
        stays, found = self.stays[group], self._found
        for page in [page for page in pages if page in stays]:
            stay, now = stays.pop(page), self._clock()
            found.lifetime.add(now - stay.born)
            found.idle_before_evict.add(now - stay.used)
            for before, after in pairwise(stay.uses):
                found.reuse_gap.add(after - before)


class TimedPool(SlabPool):
    """A pool that tells a `PageSampler` what becomes of its pages. Which ones an admitted request found, the manager tells."""

    def __init__(
        self,
        num_slabs: int,
        pages_per_slab: Sequence[int],
        index: PrefixIndex,
        sampler: PageSampler,
        *,
        keep_cached: bool,
    ) -> None:
        super().__init__(num_slabs, pages_per_slab, index, keep_cached=keep_cached)
        self._sampler = sampler

    def allocate(self, needs: Sequence[int], beside: Sequence[int] = ()) -> list[list[int]] | None:
        """See SlabPool."""
        taken = super().allocate(needs, beside)
        for group, pages in enumerate(taken or ()):
            self._sampler.allocated(group, pages)
        return taken

    def touch(self, group: int, pages: Sequence[int]) -> None:
        """See SlabPool."""
        super().touch(group, pages)
        self._sampler.used([pages if number == group else () for number in range(len(self.per_slab))])

    def release(self, group: int, pages: Sequence[int]) -> None:
        """See SlabPool."""
        super().release(group, pages)
        stays, refs, cached = self._sampler.stays[group], self.refs[group], self.cached[group]
        for page in [page for page in pages if page in stays]:
            if page not in refs and page not in cached:
                del stays[page]

    def evict(self, group: int, page: int) -> bool:
        """See SlabPool."""
        was_cached = super().evict(group, page)
        if was_cached:
            self._sampler.stays[group].pop(page, None)
        return was_cached

    def _evict_slab(self, slab: int) -> list[int]:
        group = self.owner[slab]
        pages = super()._evict_slab(slab)
        self._sampler.evicted(group, pages)
        return pages

    def _reuse(self, group: int, pages: list[int]) -> list[int]:
        self._sampler.evicted(group, pages)
        return super()._reuse(group, pages)

    def _move(self, group: int, source: int, target: int) -> None:
        stays = self._sampler.stays[group]
        stay = stays.pop(source, None)
        self._sampler.evicted(group, [page for page in (target,) if page in self.cached[group]])
        super()._move(group, source, target)
        if stay is not None:
            stays[target] = stay


def make_pool(plan: MemoryPlan, index: PrefixIndex, *, keep_cached: bool, sampler: PageSampler | None) -> SlabPool:
    """The plan's slabs, followed by `sampler` if there is one."""
    per_slab = [group.pages_per_slab for group in plan.groups]
    if sampler is None:
        return SlabPool(plan.num_slabs, per_slab, index, keep_cached=keep_cached)
    return TimedPool(plan.num_slabs, per_slab, index, sampler, keep_cached=keep_cached)
