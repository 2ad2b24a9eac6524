"""Divides a step's copies of pages into launches: within one launch, the order of copies doesn't matter.

Free of torch. A copy of a whole step's moves costs a few microseconds of the host, whatever their number.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

Copy = tuple[int, int, int]
"""(source, target, bytes): copy that many bytes from one byte offset to another."""


class _Ranges:
    """A set of bytes, as disjoint ranges in ascending order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def meets(self, start: int, end: int) -> bool:
        """Whether any byte of [start, end) is in the set."""
        at = bisect_right(self._ends, start)
        return at < len(self._starts) and self._starts[at] < end

    def add(self, start: int, end: int) -> None:
        """Put the bytes of [start, end) into the set."""
        first, stop = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < stop:
            start, end = min(start, self._starts[first]), max(end, self._ends[stop - 1])
        self._starts[first:stop] = [start]
        self._ends[first:stop] = [end]


def copy_launches(copies: Iterable[Copy]) -> list[list[Copy]]:
    """The copies in their order, divided into launches.

    A copy begins a new launch if it depends on a copy of the current launch: it writes what that copy reads or writes, or it
    reads what that copy writes. Takes O(n log n) comparisons for n copies.
    """
    launches: list[list[Copy]] = []
    read, written = _Ranges(), _Ranges()
    for source, target, size in copies:
        depends = (
            written.meets(source, source + size)
            or written.meets(target, target + size)
            or read.meets(target, target + size)
        )
        if depends or not launches:
            launches.append([])
            read, written = _Ranges(), _Ranges()
        launches[-1].append((source, target, size))
        read.add(source, source + size)
        written.add(target, target + size)
    return launches
