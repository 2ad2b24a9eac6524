"""Where the pages of a disk tier are."""

from __future__ import annotations

from collections.abc import Iterable

from pagerunner.tiers.segments import Segment

Name = tuple[int, bytes]
"""A group and a key."""


class Index(dict[Name, tuple[Segment, int]]):
    """Where pages are. With `touched` it notes the names whose pages come and go.

    There may be a million pages, so it knows what each segment has, and `lose` needn't go over all of them.
    """

    touched: set[Name] | None = None

    def __init__(self) -> None:
        super().__init__()
        self._of: dict[Segment, set[Name]] = {}  # some of these may be elsewhere by now

    def __setitem__(self, name: Name, entry: tuple[Segment, int]) -> None:
        super().__setitem__(name, entry)
        self._of.setdefault(entry[0], set()).add(name)
        self._touch([name])

    def __delitem__(self, name: Name) -> None:
        super().__delitem__(name)
        self._touch([name])

    def clear(self) -> None:
        """Have no pages."""
        self._touch(self)
        super().clear()
        self._of = {}

    def lose(self, segment: Segment) -> list[Name]:
        """A segment is gone. Returns which pages go with it."""
        lost = [name for name in self._of.pop(segment, ()) if self.get(name, (None,))[0] is segment]
        for name in lost:
            del self[name]
        return lost

    def take(self, other: Index) -> None:
        """Have what another one has, which has nothing then."""
        self.update(other)
        for segment, names in other._of.items():
            self._of[segment] = names | self._of.get(segment, set())
        other.clear()

    def _touch(self, names: Iterable[Name]) -> None:
        if self.touched is not None:
            self.touched.update(names)
