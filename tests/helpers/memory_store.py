"""A KeepingStore in memory, whose faults a test plants: it holds everything back until it is told to go on, fails, lies, or writes late."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagerunner.tiers.stores import Page


class MemoryStore:
    """Pages in a dict that several stores may share, as engines share a directory.

    With `held` what begins waits for `go`. `failing` are the keys whose reads and writes fail. `wrong` are keys that `find` finds, and whose
    bytes differ when they are read: the place is scribbled over, and the page is forgotten. `begun` are the numbers in their order.
    """

    def __init__(
        self, pages: dict[tuple[int, bytes], bytes] | None = None, on_end: Callable[[], None] = lambda: None
    ) -> None:
        self.pages = {} if pages is None else pages
        self.held = False
        self.failing: set[bytes] = set()
        self.wrong: set[bytes] = set()
        self.seconds_each = 0.0
        self.begun: list[int] = []
        self.closed = False
        self._on_end = on_end
        self._waiting: list[tuple[int, bool, Sequence[Page]]] = []
        self._ended: list[tuple[int, list[bool]]] = []

    def find(self, group: int, keys: Sequence[bytes]) -> list[bool]:
        """See PageStore."""
        return [(group, key) in self.pages for key in keys]

    def read(self, number: int, pages: Sequence[Page]) -> None:
        """See PageStore."""
        self._begin(number, True, pages)

    def write(self, number: int, pages: Sequence[Page]) -> None:
        """See PageStore."""
        self._begin(number, False, pages)

    def ended(self) -> list[tuple[int, list[bool]]]:
        """See PageStore."""
        ended, self._ended = self._ended, []
        return ended

    def seconds(self, nbytes: int) -> float:
        """See PageStore: `seconds_each` for every number that waits, and one more."""
        return self.seconds_each * (len(self._waiting) + 1)

    def forget(self, group: int, keys: Sequence[bytes]) -> None:
        """See KeepingStore."""
        for key in keys:
            self.pages.pop((group, key), None)

    def clear(self) -> None:
        """See KeepingStore."""
        self.pages.clear()

    def cancel(self) -> None:
        """See KeepingStore."""
        for number, _, pages in self._waiting:
            self._ended.append((number, [False] * len(pages)))
        self._waiting.clear()

    def close(self) -> None:
        """See PageStore. What is held back has failed."""
        self.closed = True
        self.cancel()

    def go(self, number: int | None = None) -> None:
        """End what is held back: this number, or all. Their bytes move now and not before."""
        going = [item for item in self._waiting if number in (None, item[0])]
        self._waiting = [item for item in self._waiting if item not in going]
        for number, reads, pages in going:
            self._ended.append((number, [self._read(*page) if reads else self._write(*page) for page in pages]))
        if going:
            self._on_end()

    def _begin(self, number: int, reads: bool, pages: Sequence[Page]) -> None:
        assert not self.closed, "the store is closed"
        assert number not in self.begun, f"number {number} was begun before"
        self.begun.append(number)
        self._waiting.append((number, reads, pages))
        if not self.held:
            self.go(number)

    def _read(self, group: int, key: bytes, place: memoryview) -> bool:
        if key in self.failing:
            return False
        if key in self.wrong:
            self.pages.pop((group, key), None)
        found = self.pages.get((group, key))
        if found is None or len(found) != len(place):
            place[:] = b"\xa5" * len(place)
            return False
        place[:] = found
        return True

    def _write(self, group: int, key: bytes, place: memoryview) -> bool:
        if key in self.failing:
            return False
        self.pages[group, key] = bytes(place)
        return True
