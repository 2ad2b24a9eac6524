"""Whether pages can be had, and what is given up for them. This is the only place that decides it.

Pages are looked for in this order. Whoever asks says how far down the list it may go.

1. Pages that are free, or cached and unused for longest, those of idle adapters among them: the pool hands them out.
2. A shorter step, where a group forgets: `Growth` asks for less until it `fits`.
3. Pages that a transfer has brought for requests that wait are given up, and then snapshots in the making: for a new request not those of prompts.
4. Pages are moved together.
5. The request waits: for the next step, if that may move what is missing; or for a transfer or the fill of an adapter, if that gives back what is missing.
6. The scheduler preempts.

Example: a running request of 8,192 tokens a step doesn't fit. A step of 1,024 fits, so 3 to 6 don't happen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagerunner.memory.books import Books
from pagerunner.memory.grant import Grant
from pagerunner.memory.leases import Leases
from pagerunner.memory.moves import PageMoves
from pagerunner.memory.snapshots import Snapshots


class Room:
    """Pages for those who need them. `version` changes whenever pages were given back.

    `awaits_transfer`: in this step a running request waits for pages that a transfer gives back.
    """

    def __init__(self, books: Books, leases: Leases, snapshots: Snapshots, moves: PageMoves) -> None:
        self.version = 0
        self.awaits_transfer = False
        self._pool, self._promises, self._grants = books.pool, books.promises, books.grants
        self._leases, self._snapshots, self._moves = leases, snapshots, moves

    def fits(self, needs: Sequence[int], grant: Grant) -> bool:
        """Whether the grant can have `needs` without giving up anything and without breaking a promise to others."""
        return self._promises.kept(needs, grant)

    def reserve(self, wanted: Sequence[int]) -> bool:
        """Make sure that all can be had that was promised, with what a new request needs. It asks for nothing more then."""
        return self._pool.slack(wanted) >= 0 or self._make(
            wanted, [one for one in self._grants if not one.holds_snapshots]
        )

    def take(self, needs: Sequence[int]) -> list[list[int]] | None:
        """Hand out `needs` to a running request, or None. It goes before what others were promised."""
        fresh = self._pool.allocate(needs)
        if fresh is None and self._make(needs, self._grants):
            fresh = self._pool.allocate(needs)
        if fresh is None:
            self.awaits_transfer |= self._leases.would_fit(needs)
        return fresh

    def _make(self, needs: Sequence[int], snapshots: Iterable[Grant]) -> bool:
        """Give up what is kept for requests that wait, then snapshots in the making of these grants; then move pages together. Whether that was enough."""
        while self._leases.give_up_kept():
            if self._pool.slack(needs) >= 0:
                return True
        if self._snapshots.drop(snapshots) and self._pool.slack(needs) >= 0:
            return True
        return self._moves.make_room_for(needs)
