"""Pages whose parts several ranks hold, each at the same place of its own host memory: what a store of parts looks like to who counts whole pages.

Another engine has each rank's part under a group of its own. Example: of two groups on two ranks, rank 1 has its parts of group 0 under number 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pagerunner.tiers.peers import PeerStore
from pagerunner.tiers.stores import Page


class Parts:
    """A store of pages, whose places are ranges of addresses, over what other engines lend. It has the `memories` of all ranks."""

    def __init__(self, store: PeerStore, memories: Sequence[memoryview], groups: int) -> None:
        self._store, self._memories, self._groups = store, memories, groups

    def of(self, pages: Sequence[tuple[int, bytes, range]]) -> list[Page]:
        """The parts of pages, of one page after the other: the first rank's is named like the page."""
        ranks = [(rank * self._groups, memory) for rank, memory in enumerate(self._memories)]
        return [
            (first + group, key, memory[place.start : place.stop])
            for group, key, place in pages
            for first, memory in ranks
        ]

    def read(self, number: int, pages: Sequence[tuple[int, bytes, range]]) -> None:
        """See PageStore."""
        self._store.read_later(number, len(pages) * len(self._memories), partial(self.of, pages))

    def ended(self) -> list[tuple[int, list[bool]]]:
        """See PageStore. A page went well if all its parts have."""
        ranks = len(self._memories)
        return [(number, _of_pages(outcomes, ranks)) for number, outcomes in self._store.ended()]

    def seconds(self, nbytes: int) -> float:
        """See PageStore."""
        return self._store.seconds(nbytes * len(self._memories))

    def close(self) -> None:
        """See PageStore."""
        self._store.close()


def _of_pages(outcomes: list[bool], ranks: int) -> list[bool]:
    if ranks == 1 or all(outcomes):
        return outcomes[::ranks]
    return [all(outcomes[at : at + ranks]) for at in range(0, len(outcomes), ranks)]
