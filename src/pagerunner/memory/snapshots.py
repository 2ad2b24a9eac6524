"""Snapshots of recurrent state: which are planned, taken and made findable.

A snapshot is a page of the recurrent group that holds the state after some tokens. It is copied out of a running request's
state inside the forward pass that computes its position. Once its tokens are known it is cache like any other page.
"""

from __future__ import annotations

from collections.abc import Iterable

from pagerunner.memory.grant import HOLE, Grant
from pagerunner.memory.planner import MemoryPlan
from pagerunner.memory.prefix import UNIT_TOKENS, PageKey, PrefixChain, PrefixIndex
from pagerunner.memory.rules import FOREVER
from pagerunner.memory.slabs import SlabPool
from pagerunner.types import StateSave

TURN_TOKENS = 64  # while text is generated, its latest snapshot is about that many tokens old at most


class Snapshots:
    """Decides about the snapshots of group `group`, in the manager's `pool` and `index`.

    `promised[g]` is the number of pages of group g that running requests were promised and don't hold yet. Snapshots take only pages
    beyond those. With `keep`, a snapshot stays cached when all requests that could use it have ended; without, it goes with them.
    """

    def __init__(
        self, group: int, plan: MemoryPlan, pool: SlabPool, index: PrefixIndex, promised: list[int], *, keep: bool
    ) -> None:
        self._group = group
        self._plan = plan
        self._pool = pool
        self._index = index
        self._promised = promised
        self._keep = keep
        self._planned: dict[tuple[int, PageKey], int] = {}  # what running requests will take
        self._one = [int(other == group) for other in range(len(plan.groups))]
        cell = plan.hit_granularity  # no hit ends elsewhere, whatever snapshots there are
        self._turn_tokens = -(-TURN_TOKENS // cell) * cell

    def find(self, chain: PrefixChain, tokens: int) -> int:
        """The page with the state after `tokens` tokens, or HOLE."""
        return self._index.pages[self._group].get(chain.hashes[tokens // UNIT_TOKENS - 1], HOLE)

    def plan(self, grant: Grant, hit: int) -> None:
        """A new request, which has the state after `hit` tokens, will take a snapshot at each of its marks."""
        for mark in grant.marks:
            key = (mark, grant.chain.hashes[mark // UNIT_TOKENS - 1])
            self._planned[key] = self._planned.get(key, 0) + 1
        self._set_next(grant, hit)

    def is_planned(self, chain: PrefixChain, hit: int, limit: int) -> bool:
        """Whether a running request is about to take a snapshot that is of more use to `chain` than the one after `hit` tokens."""
        hashes = chain.hashes
        return any(hit < mark <= limit and hashes[mark // UNIT_TOKENS - 1] == key for mark, key in self._planned)

    def unplan(self, grant: Grant, end: int) -> bool:
        """Snapshots up to position `end` are taken, or never will be; whether any had been planned."""
        before = len(grant.marks)
        for mark in grant.marks:
            if mark <= end:
                key = (mark, grant.chain.hashes[mark // UNIT_TOKENS - 1])
                self._planned[key] -= 1
                if not self._planned[key]:
                    del self._planned[key]
        grant.marks = [mark for mark in grant.marks if mark > end]
        return len(grant.marks) < before

    def take(self, saves: list[StateSave], row: int, grant: Grant, start: int, end: int, *, current: bool) -> bool:
        """Decide the snapshots of plan row `row` over [start, end): they take what nobody has and nobody was promised, or are
        left out. Not `current` grants began before the index was cleared and take none. Whether any were planned.
        """
        marks = [mark for mark in grant.marks if start < mark <= end]
        turns = end // self._turn_tokens * self._turn_tokens
        is_turn = not marks and turns >= grant.next_save > grant.target
        if current:
            for position in [turns] if is_turn else marks:
                self._save(saves, row, grant, position, is_turn)
        unplanned = self.unplan(grant, end)
        self._set_next(grant, end)
        self.publish(grant, current)
        return unplanned

    def _set_next(self, grant: Grant, end: int) -> None:
        step = self._turn_tokens
        turn = (max(end, grant.target) // step + 1) * step if self._keep else FOREVER
        grant.next_save = next((mark for mark in grant.marks if mark > end), turn)

    def _save(self, saves: list[StateSave], row: int, grant: Grant, position: int, is_turn: bool) -> None:
        group, pool = self._group, self._pool
        unit = position // UNIT_TOKENS
        hashes = grant.chain.hashes
        if unit <= len(hashes) and hashes[unit - 1] in self._index.pages[group]:
            return
        if is_turn:
            self._drop_turn(grant)
        if pool.slack([one + promised for one, promised in zip(self._one, self._promised, strict=True)]) < 0:
            return
        pages = pool.allocate(self._one)
        assert pages is not None
        (page,) = pages[group]
        grant.saves.append((position, page))
        if is_turn:
            grant.turn = (position, page)
            grant.next_publish = min(grant.next_publish, position)
        saves.append(StateSave(row, position, group, self._plan.page_offset(group, page)))

    def _drop_turn(self, grant: Grant) -> None:
        """The text went on: its last snapshot makes room for the next."""
        group, (position, page) = self._group, grant.turn
        unit = position // UNIT_TOKENS
        if page == HOLE or unit > len(grant.chain.hashes):
            return
        if self._index.pages[group].get(grant.chain.hashes[unit - 1]) == page:
            self._pool.evict(group, page)
        grant.turn = (0, HOLE)

    def publish(self, grant: Grant, current: bool) -> None:
        """Make the snapshots findable whose tokens are known; from then on they are cache like any other."""
        group, hashes = self._group, grant.chain.hashes
        kept: list[tuple[int, int]] = []
        for position, page in grant.saves:
            unit = position // UNIT_TOKENS
            known = unit <= len(hashes)
            if known and current:
                self._index.publish(group, hashes[unit - 1], page)
            if known and (self._keep or page not in self._index.keys[group]):
                self._pool.release(group, (page,))
            else:
                kept.append((position, page))
                if not known:
                    grant.next_publish = min(grant.next_publish, position)
        grant.saves = kept

    def drop(self, grants: Iterable[Grant]) -> bool:
        """Free the snapshots that requests hold themselves; whether there were any."""
        dropped = False
        for grant in grants:
            for _, page in grant.saves:
                self._index.forget(self._group, page)
                self._pool.release(self._group, (page,))
                dropped = True
            grant.saves = []
        return dropped

    def check(self, grants: Iterable[Grant]) -> None:
        """Recount. Raises AssertionError when what is planned isn't what `grants` will take."""
        planned: dict[tuple[int, PageKey], int] = {}
        for grant in grants:
            for mark in grant.marks:
                key = (mark, grant.chain.hashes[mark // UNIT_TOKENS - 1])
                planned[key] = planned.get(key, 0) + 1
        assert planned == self._planned, "planned snapshots"
