"""The waiting line, in order of arrival or of priority."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from pagerunner.sched.request import Sequence


class WaitingQueue(Protocol):
    """Sequences that wait for admission. Every operation is O(log n) or better. So is each step of an iteration from the front, but for entries of sequences that have been removed."""

    def push(self, sequence: Sequence) -> None:
        """A new sequence joins."""

    def put_back(self, sequence: Sequence) -> None:
        """A preempted sequence returns to its old place: before all sequences that were behind it."""

    def peek(self) -> Sequence:
        """Who is next. The queue must not be empty."""

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...


class FcfsQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._line: OrderedDict[str, Sequence] = OrderedDict()

    def push(self, sequence: Sequence) -> None:
        """To the end."""
        self._line[sequence.request_id] = sequence

    def put_back(self, sequence: Sequence) -> None:
        """To the front."""
        self._line[sequence.request_id] = sequence
        self._line.move_to_end(sequence.request_id, last=False)

    def peek(self) -> Sequence:
        """The front."""
        return next(iter(self._line.values()))

    def remove(self, sequence: Sequence) -> None:
        """From anywhere."""
        del self._line[sequence.request_id]

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line.values())


class PriorityQueue:
    """Lowest priority value first, then earliest arrival. Removed entries leave the heap when they surface."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], Sequence]] = []
        self._members: dict[str, Sequence] = {}

    def push(self, sequence: Sequence) -> None:
        """To its place."""
        self._members[sequence.request_id] = sequence
        heapq.heappush(self._heap, (sequence.key, sequence))

    def put_back(self, sequence: Sequence) -> None:
        """To its place: the key hasn't changed."""
        self.push(sequence)

    def peek(self) -> Sequence:
        """The best."""
        while True:
            sequence = self._heap[0][1]
            if self._members.get(sequence.request_id) is sequence:
                return sequence
            heapq.heappop(self._heap)

    def remove(self, sequence: Sequence) -> None:
        """From anywhere."""
        del self._members[sequence.request_id]
        if self._heap[0][1] is sequence:
            heapq.heappop(self._heap)

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        """The first few take no longer where the line is long: entries come by the order of the heap, and those of one sequence one after another."""
        heap, latest = self._heap, None
        ahead = [(heap[0], 0)] if heap else []
        while ahead:
            (_, sequence), place = heapq.heappop(ahead)
            for child in range(2 * place + 1, min(2 * place + 3, len(heap))):
                heapq.heappush(ahead, (heap[child], child))
            if sequence is not latest and self._members.get(sequence.request_id) is sequence:
                yield (latest := sequence)
