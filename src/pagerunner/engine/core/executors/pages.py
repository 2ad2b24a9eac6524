"""RanksStore: the stores of pages of several ranks, as one. A page is there if all ranks have their part of it.

Each rank has its own part of a page, at the same place of its own host memory, and its own store (`engine/worker/pages.py`). The core has no bytes. So
a place is the range of its addresses here. Reads and writes are orders to all ranks, and have gone well if they have on all of them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from pagerunner.engine.worker import orders
from pagerunner.tiers.index import Name
from pagerunner.tiers.stats import StoreStats

_PAUSE_SECONDS = 30.0
"""So long nothing is written after one rank hasn't written what another has: that would push out whole pages for parts that nobody finds."""


class _Begun:
    """What the ranks were ordered to move, how many of them haven't ended, the outcomes so far, and the pages that some rank has moved.

    `compared`: whether ranks are to have the same outcomes. A write that was cancelled or cleared needn't.
    """

    __slots__ = ("compared", "left", "nbytes", "outcomes", "some")

    def __init__(self, ranks: int, pages: int, nbytes: int, *, compared: bool) -> None:
        self.left, self.outcomes, self.some = ranks, [True] * pages, [False] * pages
        self.nbytes, self.compared = nbytes, compared


class RanksStore:
    """A KeepingStore of places that are ranges of addresses. `send` gives an order to each of `ranks` ranks. Reports come by another thread."""

    def __init__(self, ranks: int, send: Callable[[orders.OfPages], None]) -> None:
        self._send, self._all = send, (1 << ranks) - 1
        self._there: dict[Name, int] = {}  # a bit for each rank that has it
        self._begun: dict[int, _Begun] = {}
        self._ended: list[tuple[int, list[bool]]] = []
        self._stats, self._reads = [StoreStats()] * ranks, [False] * ranks
        self._clears = self._skipped = 0
        self._heard = 0  # a bit for each rank that has told of its store
        self._whole, self._figures = 0, StoreStats()  # pages that all have, and figures for who asks in each step
        self._queued = 0  # bytes of a rank to read
        self._pause_until = 0.0
        self._half: orders.MovePages | None = None  # it is being given to the ranks
        self._lock = threading.Lock()

    def find(self, group: int, keys: Sequence[bytes]) -> list[bool]:
        """See PageStore."""
        return [self._there.get((group, key)) == self._all for key in keys]

    def read(self, number: int, pages: Sequence[tuple[int, bytes, range]]) -> None:
        """See PageStore."""
        self._begin(number, pages, reads=True)

    def write(self, number: int, pages: Sequence[tuple[int, bytes, range]]) -> None:
        """See PageStore. As long as one rank can't write, others needn't."""
        if time.monotonic() < self._pause_until or any(stats.read_only for stats in self._stats):
            with self._lock:
                self._skipped += len(pages)
                self._sum_up()
                self._ended.append((number, [False] * len(pages)))
        else:
            self._begin(number, pages, reads=False)

    def _begin(self, number: int, pages: Sequence[tuple[int, bytes, range]], *, reads: bool) -> None:
        nbytes = sum(len(place) for *_, place in pages) if reads else 0
        order = orders.MovePages(number, reads, [(group, key, place.start) for group, key, place in pages])
        self._half = order
        with self._lock:
            self._begun[number] = _Begun(len(self._stats), len(pages), nbytes, compared=not reads)
            self._queued += nbytes
        self._send(order)
        self._half = None

    def ended(self) -> list[tuple[int, list[bool]]]:
        """See PageStore."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def seconds(self, nbytes: int) -> float:
        """See PageStore. All wait for the slowest rank."""
        rate = min(stats.read_rate for stats in self._stats)
        return (self._queued + nbytes) / rate if rate and all(self._reads) else math.inf

    @property
    def is_open(self) -> bool:
        """Whether all ranks have opened their stores."""
        return self._heard == self._all

    def close(self) -> None:
        """See PageStore. Nothing is left to do: the stores end with the ranks."""

    def forget(self, group: int, keys: Sequence[bytes]) -> None:
        """See KeepingStore."""
        with self._lock:
            self._change([(group, key) for key in keys], 0)
        self._send(orders.ForgetPages(group, list(keys)))

    def clear(self) -> None:
        """See KeepingStore. What ranks say until they have done so too counts for nothing."""
        with self._lock:
            self._clears += 1
            self._there, self._whole = {}, 0
            self._compare_no_more()
        self._send(orders.ClearPages(self._clears))

    def cancel(self) -> None:
        """See KeepingStore. An interrupt may have left an order halfway: ranks that have it already pass over it."""
        order = self._half
        with self._lock:
            self._compare_no_more()
            if order is not None and order.number in {number for number, _ in self._ended}:
                order = None
            elif order is not None and order.number not in self._begun:
                self._ended.append((order.number, [False] * len(order.pages)))
                order = None
        if order is not None:
            self._send(order)
        self._half = None
        self._send(orders.CancelPages())

    def _compare_no_more(self) -> None:
        for begun in self._begun.values():
            begun.compared = False

    def stats(self) -> StoreStats:
        """Bytes of all ranks, pages that all or only some of them have, and the first rank's reason not to write."""
        with self._lock:
            return msgspec.structs.replace(
                self._figures, pages=self._whole, pages_of_some=len(self._there) - self._whole
            )

    def _sum_up(self) -> None:
        known = {name: [getattr(one, name) for one in self._stats] for name in StoreStats.__struct_fields__}
        reason = next((f"rank {rank}: {said}" for rank, said in enumerate(known.pop("read_only")) if said), "")
        sums = {name: sum(of_ranks) for name, of_ranks in known.items()}
        skipped = sums.pop("skipped") + self._skipped
        self._figures = StoreStats(**sums, skipped=skipped, read_only=reason)

    def _change(self, names: Iterable[Name], left: int, more: int = 0) -> None:
        """Of the ranks that have these pages, these are left, and these are more."""
        for name in names:
            before = self._there.pop(name, 0)
            if after := before & left | more:
                self._there[name] = after
            self._whole += (after == self._all) - (before == self._all)

    def take(self, rank: int, news: orders.Kept) -> None:
        """What a rank reports."""
        bit = 1 << rank
        with self._lock:
            self._heard |= bit
            self._stats[rank], self._reads[rank] = news.stats, news.reads
            if news.clears == self._clears:
                self._change(news.there, ~0, bit)
                self._change(news.gone, ~bit)
            self._sum_up()
            for number, outcomes in news.ended:
                begun = self._begun[number]
                begun.outcomes = [so_far and well for so_far, well in zip(begun.outcomes, outcomes, strict=True)]
                begun.some = [before or well for before, well in zip(begun.some, outcomes, strict=True)]
                begun.left -= 1
                if not begun.left:
                    if begun.compared and begun.some != begun.outcomes:
                        self._pause_until = time.monotonic() + _PAUSE_SECONDS
                    del self._begun[number]
                    self._queued -= begun.nbytes
                    self._ended.append((number, begun.outcomes))
