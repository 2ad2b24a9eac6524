"""Moves pages together, so that scattered pages don't keep slabs from groups that need one.

Example: a slab has 10 pages. Group A has 3 pages in each of 4 slabs. Group B needs a page and no slab is free. The pages of
one of A's slabs move into holes of the other three, and B gets that slab.

Pages of transfers under way stay where they are (`memory/leases.py`).

A step moves at most `MOVES_PER_STEP` pages, and later steps move the rest. Moving a page costs the host some 10 microseconds, for which the step
waits. So 32 pages make it a third of a millisecond longer.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagerunner.memory.books import Books
from pagerunner.memory.grant import Grant
from pagerunner.memory.leases import Leases
from pagerunner.memory.slabs import Move

MOVES_PER_STEP = 32
UNTIDY = 0.04  # share of the slabs that may be lost to scattered pages
_SLOT = 1 << 32  # a page's place is slot * _SLOT + its number in the slot's sequence


class PageMoves:
    """Moves pages of the pool, and corrects the grants that hold them and what the step carries.

    `unfinished`: the wanted pages would fit if this step were allowed to move more pages.
    """

    def __init__(self, books: Books, leases: Leases) -> None:
        self._pool, self._grants, self._work = books.pool, books.grants, books.work
        self._leases = leases
        self._never = len(books.rules) == 1  # any free page will do
        self._left = MOVES_PER_STEP
        # By group and page, where it was last put. An entry stays when its page is given back: there are as many as pages.
        self._places: list[dict[int, int]] = [{} for _ in books.rules]
        self._by_slot: dict[int, Grant] = {}
        self.unfinished = False

    def begin_step(self) -> None:
        """Begin a step: it may move `MOVES_PER_STEP` pages."""
        self._left = MOVES_PER_STEP
        self.unfinished = False

    def placed(self, grant: Grant, group: int, first: int, pages: Sequence[int]) -> None:
        """`pages` are the grant's pages `first` .. now."""
        if not self._never:
            self._by_slot[grant.slot] = grant
            base = grant.slot * _SLOT + first
            self._places[group].update(zip(pages, range(base, base + len(pages)), strict=True))

    def tidy(self) -> bool:
        """Keep fragmentation low: when it is above `UNTIDY`, empty slabs until it is half of that.

        Returns whether any page moved.
        """
        if self._pool.fragmentation <= UNTIDY:
            return False
        moves, evicted = self._pool.tidy(UNTIDY / 2, self._left)
        self._apply(moves, evicted)
        return True

    def make_room_for(self, needs: Sequence[int]) -> bool:
        """Empty as many slabs as it takes to hand out `needs[group]` pages of every group.

        Returns whether these pages can be had now.
        """
        pool = self._pool
        if self._never or not pool.could_hold(needs):
            return False
        self._apply(pool.gather(needs, self._left))
        fits = pool.slack(needs) >= 0
        self.unfinished = self.unfinished or not fits and self._left == 0
        return fits

    def _apply(self, moves: Sequence[Move], more_work: int = 0) -> None:
        self._left = max(self._left - len(moves) - more_work, 0)
        for group, source, target, holders in moves:
            places = self._places[group]
            self._replace(group, source, target, holders)
            place = places.pop(source, None)
            if place is not None:
                places[target] = place
            self._work.move(group, source, target)

    def _replace(self, group: int, source: int, target: int, holders: int) -> None:
        """Put `target` where grants have `source`."""
        for grant, number in self.holders(group, source, holders):
            grant.pages[group][number] = target
            self._work.send_entry(grant, group, number)
        self._leases.moved(group, source, target)

    def holders(self, group: int, page: int, count: int) -> list[tuple[Grant, int]]:
        """The grants that have the page, which has so many holders in all, and the page's number in each of them.

        Requests that share a page have it at the same number, because they share everything before the page too.
        """
        place = self._places[group].get(page)
        if place is None:
            return []
        slot, number = divmod(place, _SLOT)
        last = self._by_slot[slot]
        if count == 1 and last in self._grants and _has(last, group, number, page):
            return [(last, number)]
        return [(grant, number) for grant in self._grants if _has(grant, group, number, page)]


def _has(grant: Grant, group: int, number: int, page: int) -> bool:
    pages = grant.pages[group]
    return number < len(pages) and pages[number] == page
