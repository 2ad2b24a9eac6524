"""Stores below host memory: pages come from there into places of the host tier, and go there from such places.

Reading (`Arrivals`) is the first half of a load, from a disk as from another engine. A request waits while its pages come into host memory.
There they are found as any others, and the second half is the usual load to the device.

`Below` writes too: what a store to host memory has just brought. It is written at once, and not when host memory gives it up: so it is there
after a crash too, and whoever needs a place never waits for a disk.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import itemgetter
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from pagerunner.logs import SparingLog
from pagerunner.memory.prefix import PageKey, PrefixChain
from pagerunner.memory.rules import GroupRule
from pagerunner.tiers.host import HostTier
from pagerunner.tiers.lookup import hit_keys, within, without
from pagerunner.tiers.stats import DiskStats, StoreStats
from pagerunner.tiers.stores import KeepingOf, StoreOf

logger = logging.getLogger(__name__)
Request = TypeVar("Request")
PlaceT = TypeVar("PlaceT")
PlaceT_co = TypeVar("PlaceT_co", covariant=True)
MOST_READ = 0.5
MOST_WRITTEN = 0.25
"""The shares of host memory that may be on its way from and to the store."""
PATIENCE = 10.0
LEAST_PATIENCE = 2.0
"""A request waits PATIENCE times as long as its pages should take, and at least so many seconds."""
_DRAIN_SECONDS = 30.0

Place = tuple[int, PageKey, int]
"""A group, a key, and the page of host memory."""


def lacking(
    rules: Sequence[GroupRule],
    chain: PrefixChain,
    hit: int,
    near: Sequence[Collection[PageKey]],
    held: Sequence[Collection[PageKey]],
) -> tuple[list[list[PageKey]], list[list[PageKey]]]:
    """Of a hit's pages, by group, those that aren't `near`, and those that host memory has: what to read, and what to keep beside."""
    wanted = hit_keys(rules, chain, hit)
    return list(map(without, wanted, near)), list(map(within, wanted, held))


def _front(places: list[Place], page_bytes: Sequence[int], room: float) -> list[Place]:
    """Of a prompt's pages, by group in the order of tokens, those of its front that have room: of each group about the same share."""
    if sum(page_bytes[group] for group, *_ in places) <= room:
        return places
    groups = [list(some) for _, some in itertools.groupby(places, itemgetter(0))]
    ordered = sorted((at / len(some), place) for some in groups for at, place in enumerate(some))
    ends = itertools.accumulate(page_bytes[group] for _, (group, *_) in ordered)
    return [place for (_, place), end in zip(ordered, ends, strict=True) if end <= room]


class Cut(Protocol[PlaceT_co]):
    """Host memory, whose slices are places: bytes, or the range of its addresses."""

    def __getitem__(self, places: slice, /) -> PlaceT_co: ...


class _Moving(Generic[Request]):
    """Pages under way. `kept` are others that nobody may evict meanwhile, by group. `request` waits for them."""

    __slots__ = ("epoch", "kept", "num_bytes", "places", "request", "until", "wrong")

    def __init__(self, places: list[Place], num_bytes: int, epoch: int) -> None:
        self.places, self.num_bytes, self.epoch = places, num_bytes, epoch
        self.kept: list[list[int]] = []
        self.request: Request | None = None
        self.until = 0.0
        self.wrong: set[tuple[int, PageKey]] = set()


class _Index(dict[PageKey, int]):
    """The store's pages of a group, as far as it knows: only asked for keys."""

    def __init__(self, store: KeepingOf[Any], group: int) -> None:
        self._store, self._group = store, group

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and self._store.find(self._group, [key])[0]

    def __bool__(self) -> bool:
        return True  # it isn't known to be empty


class Arrivals(Generic[Request]):
    """What is on its way from a store into the places of a host tier, whose bytes are `memory`, and what has come and is kept for requests.

    The counts only grow: reads of which every page came, or not every one; `given_up`, requests that waited for too long or found no room; and `released`, reads whose
    pages aren't kept any more.
    """

    def __init__(
        self,
        store: StoreOf[PlaceT],
        host: HostTier,
        memory: Cut[PlaceT],
        page_bytes: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.whole = self.broken = self.given_up = self.released = 0
        self._store: StoreOf[Any] = store
        self._memory: Cut[Any] = memory
        self._host, self._page_bytes, self._clock = host, page_bytes, clock
        self._reads: dict[int, _Moving[Request]] = {}
        self._arrived: list[_Moving[Request]] = []

    @property
    def busy(self) -> bool:
        """Whether something is under way, or kept for a request."""
        return bool(self._reads or self._arrived)

    @property
    def frees(self) -> bool:
        """Whether room is sure to come back: what requests wait for comes or is given up in time, and who has waited takes it."""
        return any(moving.request is not None for moving in (*self._reads.values(), *self._arrived))

    @property
    def num_reads(self) -> int:
        """Reads under way that a request waits for."""
        return sum(moving.request is not None for moving in self._reads.values())

    def seconds(self, keys: Sequence[Sequence[PageKey]]) -> float:
        """How long reading these pages, by group, would take now."""
        return self._store.seconds(self._bytes_of(keys))

    def too_large(self, keys: Sequence[Sequence[PageKey]]) -> bool:
        """Whether these pages, by group, have no room even if no others are read."""
        return self._bytes_of(keys) > MOST_READ * self._host.num_bytes

    def read(
        self, number: int, request: Request, keys: Sequence[Sequence[PageKey]], beside: Sequence[Sequence[PageKey]]
    ) -> bool:
        """Begin to read pages, by group, for a request. Those of host memory that it needs `beside` are kept. False if there is no room."""
        num_bytes = self._bytes_of(keys)
        taken = sum(moving.num_bytes for moving in (*self._reads.values(), *self._arrived))
        if taken + num_bytes > MOST_READ * self._host.num_bytes:
            return False
        kept = [self._host.share(group, some) for group, some in enumerate(beside)]
        pages = self._host.take([len(some) for some in keys])
        if pages is None:
            self._host.release(kept)
            return False
        places = [
            (group, key, page)
            for group, (some, new) in enumerate(zip(keys, pages, strict=True))
            for key, page in zip(some, new, strict=True)
        ]
        moving: _Moving[Request] = _Moving(places, num_bytes, self._host.index.epoch)
        moving.request, moving.kept = request, kept
        moving.until = self._clock() + max(LEAST_PATIENCE, PATIENCE * self._store.seconds(num_bytes))
        there = self.views(places)
        self._reads[number] = moving
        self._store.read(number, there)
        return True

    def leave(self, request: Request) -> None:
        """A request doesn't wait any more. Its pages are used until their read has ended, and found if they came well."""
        for moving in self._reads.values():
            if moving.request is request:
                moving.request = None

    def settle(self) -> None:
        """Take what has ended. What came for a request is found, and kept as `arrivals` says."""
        for number, outcomes in self._store.ended():
            self._end(number, outcomes)
        now = self._clock()
        for moving in self._reads.values():
            if moving.request is not None and now > moving.until:
                # its places stay in use until reading has ended, whenever that is
                self.given_up += 1
                late: _Moving[Request] = _Moving([], 0, moving.epoch)
                late.request, moving.request = moving.request, None
                self._arrived.append(late)

    def arrivals(self, served: Callable[[Request], bool]) -> None:
        """Ask `served` for each request whose pages have come, or won't. They are kept until it says that they needn't be."""
        arrived, self._arrived = self._arrived, []
        for moving in arrived:
            if moving.request is not None and not served(moving.request):
                self._arrived.append(moving)
            else:
                self._release(moving)

    def views(self, places: list[Place]) -> list[tuple[int, PageKey, Any]]:
        """Places with the bytes of each page, instead of its number. Of 8,000 pages one by one it took 30 ms."""
        views = []
        for group, some in itertools.groupby(places, itemgetter(0)):
            named, size = list(some), self._page_bytes[group]
            starts = self._host.places(group, [page for *_, page in named])
            views += [(*name, self._memory[at : at + size]) for (*name, _), at in zip(named, starts, strict=True)]
        return views

    def _bytes_of(self, keys: Sequence[Sequence[PageKey]]) -> int:
        return sum(size * len(some) for size, some in zip(self._page_bytes, keys, strict=True))

    def _end(self, number: int, outcomes: list[bool]) -> None:
        if number in self._reads:
            self.whole += all(outcomes)
            self.broken += not all(outcomes)
            self._end_read(self._reads.pop(number), outcomes)

    def _end_read(self, moving: _Moving[Request], outcomes: Iterable[bool]) -> None:
        index = self._host.index
        for (group, key, page), well in zip(moving.places, outcomes, strict=True):
            if well and (group, key) not in moving.wrong and moving.epoch == index.epoch:
                index.publish(group, key, page)
        if moving.request is None:
            self._release(moving)
        else:
            self._arrived.append(moving)

    def _release(self, moving: _Moving[Request]) -> None:
        pages: list[list[int]] = [list(some) for some in moving.kept] or [[] for _ in self._page_bytes]
        for group, _, page in moving.places:
            pages[group].append(page)
        self._host.release(pages)
        self.released += 1


class Below(Arrivals[Request]):
    """A store that is written to as well.

    Besides, `hits` are tokens whose pages were read, and `skipped` pages that weren't written.
    """

    def __init__(
        self,
        store: KeepingOf[PlaceT],
        host: HostTier,
        memory: Cut[PlaceT],
        page_bytes: Sequence[int],
        store_stats: Callable[[], StoreStats] = StoreStats,
        matches: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`matches`: whether the weights are those that the store's pages are of."""
        super().__init__(store, host, memory, page_bytes, clock)
        self._own_index: list[dict[PageKey, int]] = [_Index(store, group) for group in range(len(page_bytes))]
        self.index, self.detached, self._matches = self._own_index, False, matches
        self.skipped = self.hits = 0
        self._store: KeepingOf[Any] = store
        self._store_stats = store_stats
        self._refusals = SparingLog(logger, seconds=60)
        self._numbers = itertools.count()
        self._writes: dict[int, _Moving[Request]] = {}

    def fetch(self, request: Request, keys: Sequence[Sequence[PageKey]], beside: Sequence[Sequence[PageKey]]) -> bool:
        """`read` by a number of its own."""
        return self.read(next(self._numbers), request, keys, beside)

    def give_up(self) -> None:
        """A request's pages have no room in host memory, and won't."""
        self.given_up += 1
        self._refusals.warn(
            "A prompt's pages of the disk have no room in host memory and are computed; raise kv_offloading_size."
        )

    def keep(self, pages: Sequence[Sequence[int]]) -> None:
        """Begin to write those of these pages of host memory, by group in the order of tokens, that the store doesn't have. If not all fit, the first."""
        if self.detached:
            return
        coming = {place[:2] for moving in self._writes.values() for place in moving.places}
        places: list[Place] = []
        for group, (some, keys) in enumerate(zip(pages, self._host.index.keys, strict=True)):
            named = [(group, keys[page], page) for page in some if page in keys]
            there = self._store.find(group, [key for _, key, _ in named])
            places += [one for one, has in zip(named, there, strict=True) if not has and one[:2] not in coming]
        under_way = sum(moving.num_bytes for moving in self._writes.values())
        wanted, places = places, _front(places, self._page_bytes, MOST_WRITTEN * self._host.num_bytes - under_way)
        self.skipped += len(wanted) - len(places)
        if not places:
            return
        num_bytes = sum(self._page_bytes[group] for group, *_ in places)
        for group, of_group in itertools.groupby(places, itemgetter(0)):
            self._host.pool.share(group, [page for *_, page in of_group])
        number = next(self._numbers)
        self._writes[number] = _Moving(places, num_bytes, self._host.index.epoch)
        self._store.write(number, self.views(places))

    def distrust(self, group: int, key: PageKey) -> None:
        """What has this key is wrong."""
        self._store.forget(group, [key])
        for moving in (*self._reads.values(), *self._writes.values()):
            moving.wrong.add((group, key))

    def clear(self) -> None:
        """Find nothing that is there."""
        if not self.detached:
            self._store.clear()

    def detach(self) -> None:
        """The weights may be others from now on. Nothing is found or kept until `attach`."""
        self.detached, self.index = True, [{} for _ in self.index]

    def attach(self) -> None:
        """The weights are known again. The store is used if its pages are of these, and else when they are back."""
        if self.detached and self._matches():
            self.detached, self.index = False, self._own_index
        elif self.detached:
            logger.warning("The disk tier isn't used for now: its pages are of the weights of the start, not of these.")

    def stats(self) -> DiskStats:
        """The store's figures, and these."""
        found = msgspec.structs.asdict(self._store_stats())
        found["skipped"] += self.skipped
        return DiskStats(**found, hits=self.hits, given_up=self.given_up, waiting=self.num_reads)

    def count_on(self, earlier: Below[Request]) -> None:
        """Go on with the counts of an earlier one, which has drained."""
        self.hits, self.given_up, self.skipped = earlier.hits, earlier.given_up, earlier.skipped
        if earlier.detached:
            self.detach()

    def drain(self) -> None:
        """Wait until nothing is under way: what hasn't begun doesn't. Raises TimeoutError after half a minute: places may still be written to."""
        self._store.cancel()
        deadline = time.monotonic() + _DRAIN_SECONDS
        while self._reads or self._writes:
            self.settle()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the disk tier has not ended {len(self._reads)} reads and {len(self._writes)} writes within {_DRAIN_SECONDS} s"
                )
            time.sleep(0.001)

    def _end(self, number: int, outcomes: list[bool]) -> None:
        super()._end(number, outcomes)
        if (moving := self._writes.pop(number, None)) is not None:
            for group, key in moving.wrong:
                self._store.forget(group, [key])
            self._release(moving)
