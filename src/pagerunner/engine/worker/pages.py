"""A rank's own store of pages, which the core commands: pages of the rank's host memory go to it and come back, and the core is told what is there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from pagerunner.engine.worker import orders
from pagerunner.tiers.disk import DiskStore
from pagerunner.tiers.stats import StoreStats

TELL_SECONDS = 0.1


class RankPages:
    """Carries out orders for a store, whose pages are places in `memory`. What the store's threads end sets `ended`.

    A thread of its own carries them out: an order of 8,000 pages takes tens of milliseconds, and the rank's steps don't wait for it.

    `find` isn't an order. The core is told which pages come and go, so it needn't ask.
    """

    def __init__(
        self, rank: int, store: DiskStore, memory: memoryview, page_bytes: Sequence[int], ended: threading.Event
    ) -> None:
        self._rank = rank
        self._store, self._memory, self._page_bytes, self._ended = store, memory, page_bytes, ended
        self._clears = 0
        self._last: orders.MovePages | None = None
        self._lock = threading.Lock()  # what was there before a clear is told as such
        self._told: tuple[StoreStats, bool] | None = None
        self._orders: SimpleQueue[orders.OfPages] = SimpleQueue()

    def put(self, order: orders.OfPages) -> None:
        """Have an order carried out, behind those that came before. What the store has begun is cancelled at once, and what waits here in its turn."""
        if isinstance(order, orders.CancelPages):
            self._store.cancel()
        self._orders.put(order)

    def run(self, send: Callable[[orders.Done], None]) -> None:
        """In a thread: carry out orders, up to the one that closes the store, which is answered."""
        while not isinstance(order := self._orders.get(), orders.ClosePages):
            self.do(order)
        self._store.close()
        send(orders.Done(self._rank, order.call_id))

    def do(self, order: orders.OfPages) -> None:
        """Carry out an order. One thread calls, in the order in which they come."""
        match order:
            case orders.MovePages() if order == self._last:
                pass  # see RanksStore.cancel
            case orders.MovePages(number, reads, pages):
                self._last = order
                begin = self._store.read if reads else self._store.write
                begin(number, [(group, key, self._place(group, at)) for group, key, at in pages])
            case orders.ForgetPages(group, keys):
                self._store.forget(group, keys)
            case orders.CancelPages():
                self._last = None
                self._store.cancel()
            case orders.ClearPages(clears):
                with self._lock:
                    self._store.clear()
                    self._clears = clears

    def news(self) -> orders.Kept | None:
        """What has changed since the last call. None if nothing has."""
        with self._lock:
            ended = self._store.ended()  # first, so that what has ended well is there
            there, gone = self._store.changes()
            figures = self._store.stats(), self._store.seconds(0) < float("inf")
            if not (ended or there or gone) and figures == self._told:
                return None
            self._told = figures
            return orders.Kept(self._rank, ended, there, gone, *figures, self._clears)

    def tell(self, send: Callable[[orders.Kept], None]) -> None:
        """In a thread: tell news for ever."""
        while True:
            self._ended.wait(TELL_SECONDS)
            self._ended.clear()
            if (news := self.news()) is not None:
                send(news)

    def _place(self, group: int, at: int) -> memoryview:
        return self._memory[at : at + self._page_bytes[group]]
