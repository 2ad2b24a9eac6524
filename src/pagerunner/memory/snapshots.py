"""Snapshots of recurrent state: which are planned, taken and made findable.

A snapshot is a page of the recurrent group that holds the state after some tokens. It is copied out of a running request's
state inside the forward pass that computes its position. Its page is leased until its tokens are known, those of a prompt until its first token is. Then it
is cache like any other page. A prompt's other pages are in use meanwhile: were its snapshot not, it would be evicted before them, and they are of no use without it.

With drafts a plan doesn't know where a generating row's state will be, only bounds. A snapshot is asked for in every plan that may pass its
position, until a plan must have passed it; the step whose row does pass it writes the page, no other does. Example: a step begins at 60 to 63. Its
state is at 61 to 64 then. A snapshot at 64 is asked for, and again in the next plan, which begins at 61 to 67, and in the one after that unless it
begins at 63 at least. It is found when a plan was made after which the state is at 64 at least, and the tokens up to 64 are known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from pagerunner.memory.books import Books
from pagerunner.memory.grant import NO_PAGE, Grant
from pagerunner.memory.leases import Lease, Leases
from pagerunner.memory.moves import PageMoves
from pagerunner.memory.prefix import UNIT_TOKENS, PageKey, PrefixChain
from pagerunner.memory.rules import FOREVER
from pagerunner.types import StateSave

LATEST_EVERY = 64  # tokens: a request's latest snapshot of generated text is at most about this old
MOST_ASKED = 2  # snapshots of generated text that a plan asks a row for, because graphs have room for so many


class Snapshots:
    """The snapshots of a plan with recurrent state. Those of prompts are promised their pages. Those of generated text take what nobody was promised.

    Where no layer has such state, nothing is planned, taken or lost. With `keep` a snapshot stays in the prefix index when the
    requests that may use it now have ended.
    """

    def __init__(self, books: Books, leases: Leases, moves: PageMoves, *, keep: bool) -> None:
        states = [number for number, rule in enumerate(books.rules) if rule.snapshots]
        assert len(states) <= 1, "all recurrent layers share one group"
        self.has_state = bool(states)
        self._group = states[0] if states else -1
        self._plan, self._pool, self._index = books.plan, books.pool, books.index
        self._promises, self._work = books.promises, books.work
        self._leases, self._moves, self._keep = leases, moves, keep
        self._planned: Counter[tuple[int, PageKey]] = Counter()  # snapshots that running requests will take
        self._one = [int(number in states) for number in range(len(books.rules))]
        cell = books.plan.hit_granularity  # every hit ends at a multiple of this
        self._latest_every = -(-LATEST_EVERY // cell) * cell

    def find(self, chain: PrefixChain, tokens: int) -> int:
        """The page with the state after `tokens` tokens, or NO_PAGE."""
        page = self._index.find(self._group, chain.hashes[tokens // UNIT_TOKENS - 1])
        return NO_PAGE if page is None else page

    def is_lost(self, chain: PrefixChain, tokens: int) -> bool:
        """Whether the snapshot after `tokens` tokens is gone, from which a request was to continue."""
        return self.has_state and self.find(chain, tokens) == NO_PAGE

    def restore(self, grant: Grant, hit: int, promised: Sequence[int]) -> None:
        """Hand out the request's state page, filled with the snapshot after `hit` tokens. What is `promised`, this page too, can be had afterwards.

        In a full pool the snapshot's own page may become the state, and the snapshot is gone.
        """
        if not self.has_state:
            return
        group = self._group
        source = self.find(grant.chain, hit)
        self._pool.touch(group, (source,))
        fresh = self._pool.allocate(self._one, promised)
        assert fresh is not None, "admission made sure of this page"
        (page,) = fresh[group]
        if page == source:
            self._work.keep(group, (page,))
        else:
            self._work.copy(group, source, page)
        grant.pages[group] = [page]
        grant.num_pages[group] = 1
        self._moves.placed(grant, group, 0, (page,))

    def plan(self, grant: Grant, hit: int, prompt_len: int) -> None:
        """A new request, which has the state after `hit` tokens, will take a snapshot at each of its `snapshot_positions`."""
        if self.has_state:
            planned = _planned(grant)
            self._planned += planned
            self._promises.by_group[self._group] += planned.total()
            self._set_next(grant, hit)
            grant.passed, grant.holds_snapshots = hit, self._keep and grant.target <= prompt_len

    def pages_beside(self, needs: Sequence[int], snapshots: int) -> list[int]:
        """`needs` and the pages of so many snapshots."""
        return [need + one * snapshots for need, one in zip(needs, self._one, strict=True)]

    def come_back(self, grants: Iterable[Grant]) -> bool:
        """Whether one of these has snapshots of its prompt to let go of, or is about to take some."""
        return any(grant.holds_snapshots or grant.snapshot_positions for grant in grants)

    def is_planned(self, chain: PrefixChain, hit: int, limit: int) -> bool:
        """Whether a running request is about to take a snapshot that is of more use to `chain` than the one after `hit` tokens."""
        hashes = chain.hashes
        return any(
            hit < position <= limit and hashes[position // UNIT_TOKENS - 1] == key for position, key in self._planned
        )

    def unplan(self, grant: Grant, end: int) -> bool:
        """Forget planned snapshots up to position `end`, as they are taken or never will be. Whether there were any."""
        passed = _planned(grant, end)
        self._planned -= passed
        if self.has_state:
            self._promises.by_group[self._group] -= passed.total()
        grant.snapshot_positions = [position for position in grant.snapshot_positions if position > end]
        return bool(passed)

    def take_all(self, rows: Iterable[tuple[Grant, int, int]], epoch: int) -> tuple[list[StateSave], int]:
        """The snapshots of a plan's rows (grant, start, end), and how many rows have now passed snapshots that were planned.

        A row that generates begins at `start` or later, and its state is at `end` or before when it has run.
        """
        saves: list[StateSave] = []
        unplanned = 0
        for number, (grant, start, end) in enumerate(rows):
            passed = end if start < grant.target else start + 1
            if end >= grant.next_save or grant.asks_again:
                current = grant.epoch == epoch
                unplanned += self._take(saves, number, grant, start, end, passed, current=current)
            grant.passed = passed
        return saves, unplanned

    def _take(
        self, saves: list[StateSave], row: int, grant: Grant, start: int, end: int, passed: int, *, current: bool
    ) -> bool:
        """Decide the snapshots of plan row `row` over [start, end), whose state is at `passed` at least. Returns whether any were planned.

        A snapshot takes a page that nobody holds, and that was promised to it or to nobody. Without such a page it is left out. A grant
        that isn't `current` began before the index was cleared, and takes none.
        """
        unplanned = False
        positions = [position for position in grant.snapshot_positions if start < position <= end]
        latest = end // self._latest_every * self._latest_every
        again = [self._asked(row, *save) for save in grant.saves if save[0] > grant.passed]
        is_latest = not positions and latest >= grant.next_save > grant.target and len(again) < MOST_ASKED
        saves += again
        if current:
            for position in [latest] if is_latest else positions:
                unplanned |= self.unplan(grant, position)  # what it was promised is free for it now
                if self._save(grant, position, is_latest, sure=position <= passed):
                    saves.append(self._asked(row, *grant.saves[-1]))
        grant.passed = passed
        grant.asks_again = any(position > passed for position, _ in grant.saves)
        unplanned |= self.unplan(grant, end)
        self._set_next(grant, end)
        self.publish(grant, current)
        return unplanned

    def _asked(self, row: int, position: int, lease: Lease) -> StateSave:
        return StateSave(row, position, self._group, self._plan.page_offset(self._group, lease.pages[self._group][0]))

    def _set_next(self, grant: Grant, end: int) -> None:
        step = self._latest_every
        latest = (max(end, grant.target) // step + 1) * step if self._keep else FOREVER
        grant.next_save = next((position for position in grant.snapshot_positions if position > end), latest)

    def _save(self, grant: Grant, position: int, is_latest: bool, *, sure: bool) -> bool:
        """Lease a page for a snapshot, unless there is one or no page can be had. Generated text has one snapshot; the one before
        goes when the new one is `sure`, or to make room.
        """
        group = self._group
        unit = position // UNIT_TOKENS
        hashes = grant.chain.hashes
        if unit <= len(hashes) and self._index.find(group, hashes[unit - 1]) is not None:
            return False
        if is_latest and (sure or not self._promises.kept(self._one)):
            self._drop(grant, grant.latest_snapshot)
            grant.latest_snapshot = (0, None)
        if not self._promises.kept(self._one):
            return False
        pages = self._pool.allocate(self._one, self._promises.by_group)
        assert pages is not None
        lease = self._leases.save(pages)
        grant.saves.append((position, lease))
        if is_latest:
            self._drop(grant, grant.superseded)  # with many drafts a second one is begun before the first is sure
            grant.superseded, grant.latest_snapshot = grant.latest_snapshot, (position, lease)
            grant.next_publish = min(grant.next_publish, position)
        return True

    def _drop(self, grant: Grant, snapshot: tuple[int, Lease | None]) -> None:
        """Drop a snapshot of the generated text that a later one replaces."""
        group, (position, lease) = self._group, snapshot
        unit = position // UNIT_TOKENS
        if lease is None or unit > len(grant.chain.hashes):
            return
        (page,) = lease.pages[group]
        if self._index.find(group, grant.chain.hashes[unit - 1]) == page:
            self._pool.evict(group, page)

    def publish(self, grant: Grant, current: bool) -> None:
        """Make the snapshots findable whose tokens are known, and that plans have passed. From then on these are cached pages like
        any other.
        """
        group, hashes = self._group, grant.chain.hashes
        kept: list[tuple[int, Lease]] = []
        for position, lease in grant.saves:
            (page,) = lease.pages[group]
            unit = position // UNIT_TOKENS
            known = unit <= len(hashes) and position <= grant.passed
            if known and current:
                self._index.publish(group, hashes[unit - 1], page)
            if known and lease is grant.latest_snapshot[1]:
                self._drop(grant, grant.superseded)
                grant.superseded = (0, None)
            if known and not grant.holds_snapshots and (self._keep or not self._index.holds(group, page)):
                self._leases.saved(lease)
            else:
                kept.append((position, lease))
                if not known:
                    grant.next_publish = min(grant.next_publish, position)
        grant.saves = kept

    def let_go(self, grant: Grant) -> bool:
        """The first token is known, and who wants the prompt's snapshots has asked for them: they are cached pages from now on. Whether it may have held any."""
        held, grant.holds_snapshots = grant.holds_snapshots, False
        if held and grant.saves:
            self.publish(grant, grant.epoch == self._index.epoch)
        return held

    def drop(self, grants: Iterable[Grant]) -> bool:
        """Free the snapshots that running requests hold. Returns whether there were any."""
        dropped = False
        for grant in grants:
            for _, lease in grant.saves:
                self._index.forget(self._group, lease.pages[self._group][0])
                self._leases.saved(lease)
                dropped = True
            grant.saves, grant.asks_again = [], False
        return dropped

    def release(self, grant: Grant) -> None:
        """The request ends: give back the snapshots that it holds, and forget those that it planned."""
        for _, lease in grant.saves:
            self._leases.saved(lease)
        self.unplan(grant, FOREVER)


def _planned(grant: Grant, end: int = FOREVER) -> Counter[tuple[int, PageKey]]:
    """The snapshots up to position `end` that a grant is to take."""
    hashes = grant.chain.hashes
    return Counter(
        (position, hashes[position // UNIT_TOKENS - 1]) for position in grant.snapshot_positions if position <= end
    )
