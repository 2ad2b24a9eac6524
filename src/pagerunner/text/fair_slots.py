"""Places that clients share. The next place goes to the client that holds the fewest."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter


class FairSlots:
    """At most `count` holders at once, for one event loop.

    Of the clients that wait, the one with the fewest places is next. A client's own callers are served in order."""

    def __init__(self, count: int) -> None:
        self.free = count
        self._held: Counter[str] = Counter()
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[str, asyncio.Future[None]]] = {}

    async def acquire(self, source: str) -> None:
        """Wait for a place."""
        if self.take(source):
            return
        number = next(self._numbers)
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (source, given)
        try:
            await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled():  # it came too late for a caller that has left
                self.release(source)
            raise
        finally:
            self._waiting.pop(number, None)

    def take(self, source: str) -> bool:
        """Take a place if one is free. If one is free, no caller waits."""
        if not self.free:
            return False
        self.free -= 1
        self._held[source] += 1
        return True

    def release(self, source: str) -> None:
        """Give a place back, to the next who waits."""
        self.free += 1
        self._held[source] -= 1
        if not self._held[source]:
            del self._held[source]
        there = [number for number, (_, given) in self._waiting.items() if not given.done()]  # others are leaving
        if there:
            number = min(there, key=lambda one: (self._held[self._waiting[one][0]], one))
            source, given = self._waiting.pop(number)
            self.free -= 1
            self._held[source] += 1
            given.set_result(None)
