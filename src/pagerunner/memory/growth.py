"""Growth: the pages that a step of a running request needs, and those that it needs no longer."""

from __future__ import annotations

from collections.abc import Sequence

from pagerunner.memory.books import Books
from pagerunner.memory.grant import Grant
from pagerunner.memory.holdings import Holdings
from pagerunner.memory.room import Room
from pagerunner.memory.rules import SHORT_CHUNK


class Growth:
    """Gives running requests the pages of their steps. `swollen` are grants, and from which position on some pages aren't read."""

    def __init__(self, books: Books, holdings: Holdings, room: Room) -> None:
        self._rules, self._promises, self._work = books.rules, books.promises, books.work
        self._holdings, self._room = holdings, room
        self._forgetting = [number for number, rule in enumerate(self._rules) if rule.forgets]
        self._shortens = all(rule.shortens for rule in self._rules)
        self.swollen: dict[Grant, int] = {}

    def grow(self, grant: Grant, start: int, end: int, low: int | None) -> int:
        """See KVManager."""
        certain = end if low is None else low + 1  # the next step begins no earlier
        if start >= grant.target and any(grant.reserve):  # what was reserved was for a prompt
            grant.reserve = [0] * len(grant.reserve)
            self._room.version += any(grant.promise)
        holdings = self._holdings
        for group in self._forgetting:
            holdings.trim(grant, group, self._rules[group].span(start if low is None else low, end)[0])
        copied = [holdings.borrowed_to_copy(grant, group) for group in range(len(grant.borrowed))]
        end, wanted, needs = self._fitting(grant, start, end, copied, low)
        fresh = self._room.take(needs)
        if fresh is None:
            return 0
        for group, numbers in enumerate(copied):
            own = fresh[group][: len(numbers)]
            del fresh[group][: len(numbers)]
            holdings.replace_borrowed(grant, group, numbers, own)
        grant.borrowed = []
        holdings.append(grant, fresh, [parts for _, parts in wanted])
        if self._forgetting:
            self.swollen[grant] = min(end, certain)
        self._work.send_table(grant)
        return end

    def _fitting(
        self, grant: Grant, start: int, end: int, copied: Sequence[Sequence[int]], low: int | None
    ) -> tuple[int, list[tuple[int, list[range]]], list[int]]:
        """How far the grant can grow at once: the end, and by group what `_wanted` says and how many pages are needed.

        When memory is short, steps of groups that forget are halved, down to `SHORT_CHUNK` tokens. If a step can't be halved,
        pages are given up that later requests would have liked to find.
        """
        positions = grant.snapshot_positions
        while True:
            wanted = [self._wanted(grant, group, end, positions, low) for group in range(len(self._rules))]
            needs = [count for count, _ in wanted]
            for group, numbers in enumerate(copied):
                needs[group] += len(numbers)
            least = end - start <= SHORT_CHUNK if self._shortens else not positions
            if not self._forgetting or least or self._room.fits(needs, grant):
                return end, wanted, needs
            if self._shortens:
                end = start + max((end - start) // 2, SHORT_CHUNK)
            else:
                positions = []

    def _wanted(
        self, grant: Grant, group: int, end: int, positions: Sequence[int], low: int | None
    ) -> tuple[int, list[range]]:
        """How many more pages the positions below `end` and hits at `positions` need. A step that may begin at `low` needs all from there on.

        Also the pages' numbers, if these aren't simply the next ones.
        """
        rule = self._rules[group]
        there = len(grant.pages[group])
        stop = rule.span(end, end)[1]
        if not rule.forgets or stop <= there:
            return max(stop - there, 0), []
        spans = [rule.hit_span(position) for position in positions if position <= end]
        spans.append((rule.tail(end) if low is None else rule.span(low, end)[0], stop))
        parts: list[range] = []
        for first, last in spans:
            first = max(first, there)
            if first < last:
                parts.append(range(first, last))
            there = max(there, last)
        return sum(map(len, parts)), [*parts, range(stop, stop)]

    def end_plan(self) -> None:
        """A plan has all its rows: pages that only its rows read are given back."""
        for grant, end in self.swollen.items():
            for group in self._forgetting:
                # Decoding with a window gives back one page and takes one, which makes no room for other requests.
                gone = self._holdings.trim(grant, group, self._rules[group].span(end, end + 1)[0])
                self._room.version += gone > 1
            self._promises.update(grant)
        self.swollen.clear()

    def release(self, grant: Grant) -> None:
        """The grant ends."""
        self.swollen.pop(grant, None)
