"""The two-level page pool: bytes -> slabs -> pages. Plain ints in lists and dicts; nothing here knows tokens or requests.

A slab belongs to one group at a time and is cut into that group's pages: page = slab * pages_per_slab + place. A page is
free, in use (reference count above 0), or cached (count 0, its content findable in the prefix index, kept until its
bytes are needed, least recently used first). A slab without a page in use can go to any group.

Pages are handed out ascending, from whole slabs where possible, so that reads stream. The pool keeps nothing about the pages of
a slab that no group owns. So a pool of a hundred million pages is made at once, and costs only what is in use.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import add

from pagerunner.memory.prefix import PrefixIndex

Move = tuple[int, int, int, int]
"""(group, source, target, holders): what page `source` of the group held is to be in page `target`, for that many holders."""

_LISTED = 4_096  # free slabs, and free pages of a huge slab, that are listed at a time


class SlabPool:
    """Reference-counted pages of several groups over one set of slabs.

    With `keep_cached` a published page whose last owner leaves stays findable until evicted; without, it is freed at once, unless it holds part of an adapter.
    """

    def __init__(
        self, num_slabs: int, pages_per_slab: Sequence[int], index: PrefixIndex, *, keep_cached: bool = True
    ) -> None:
        groups = range(len(pages_per_slab))
        self.num_slabs = num_slabs
        self.per_slab = tuple(pages_per_slab)
        self.index = index
        self.keep_cached = keep_cached
        self.refs: list[dict[int, int]] = [{} for _ in groups]  # page in use -> how many hold it
        self.cached: list[OrderedDict[int, int]] = [OrderedDict() for _ in groups]  # page -> when, oldest first
        self.used = [0 for _ in groups]  # pages in use
        self.evictions = [0 for _ in groups]
        self._unused_slabs = min(_LISTED, num_slabs)  # slabs from here on are free and not in `_free_slabs` yet
        self._free_slabs = list(range(self._unused_slabs - 1, -1, -1))  # a stack, lowest on top
        self.owner: dict[int, int] = {}  # slab -> group
        self._slab_free: dict[int, list[int]] = {}  # of owned slabs: stacks of free pages
        self._slab_used: dict[int, int] = {}  # of owned slabs: pages in use
        self._unlisted: dict[int, int] = {}  # of huge slabs: from this page on all are free and not in `_slab_free` yet
        self._open: list[dict[int, None]] = [{} for _ in groups]  # slabs with free pages
        self._idle: list[OrderedDict[int, int]] = [OrderedDict() for _ in groups]  # slab with cached pages only -> when
        self._busy = [0 for _ in groups]  # slabs with a page in use
        self._owned = [0 for _ in groups]  # slabs
        self._clock = 0
        self.pinned: list[Counter[int]] = [Counter() for _ in groups]  # pages that mustn't move -> how many say so

    # -- capacity

    @property
    def free_slabs(self) -> int:
        """Slabs that belong to no group."""
        return self.num_slabs - len(self.owner)

    def slack(self, needs: Sequence[int]) -> int:
        """Slabs left over if every group got `needs[group]` more pages; negative if they can't be had.

        A group first fills the slabs in which it has pages in use, then takes whole slabs.
        """
        left = self.num_slabs
        for count, busy, used, need in zip(self.per_slab, self._busy, self.used, needs, strict=True):
            beyond = need + used - busy * count
            left -= busy + (-(-beyond // count) if beyond > 0 else 0)
        return left

    def could_hold(self, needs: Sequence[int]) -> bool:
        """Whether `needs` could be had beside the pages in use, if these lay together."""
        rows = zip(self.used, needs, self.per_slab, strict=True)
        return sum(-(-(used + need) // count) for used, need, count in rows) <= self.num_slabs

    # -- taking pages

    def allocate(self, needs: Sequence[int], beside: Sequence[int] = ()) -> list[list[int]] | None:
        """`needs[group]` fresh pages for every group at once, each with one reference.

        None, and no change, if there are too few. If `beside` could be had as well, it still can be afterwards.
        """
        if self.slack(needs) < 0:
            return None
        left, beside = list(needs), beside or [0] * len(needs)
        taken: list[list[int]] = [[] for _ in needs]
        for group, pages in enumerate(taken):
            while left[group]:
                # A slab in which pages are taken costs at most itself of the slack. Without slack, only certain pages will do.
                spare = max(self.slack(list(map(add, left, beside))), 0) if len(left) > 1 else self.num_slabs
                pages += self._take(group, left[group], spare) if spare else self._take_thriftily(group, left[group])
                left[group] = needs[group] - len(pages)
            pages.sort()
        return taken

    def share(self, group: int, pages: Sequence[int]) -> None:
        """One more reference to each of pages that are in use or cached."""
        refs, cached = self.refs[group], self.cached[group]
        fresh = pages
        if not refs.keys().isdisjoint(pages):
            fresh = []
            for page in pages:
                if page in refs:
                    refs[page] += 1
                else:
                    refs[page] = 1
                    fresh.append(page)
        else:
            refs.update(dict.fromkeys(pages, 1))
        for page in fresh:
            del cached[page]
        self._mark_all_used(group, fresh)

    def touch(self, group: int, pages: Sequence[int]) -> None:
        """Pages were used. Those that are cached are now the last to be evicted; of these the first goes first."""
        self._clock += 1
        slabs = dict.fromkeys([page // self.per_slab[group] for page in pages])
        for used, among in ((pages, self.cached[group]), (slabs, self._idle[group])):
            for one in filter(among.__contains__, used):
                among[one] = self._clock
                among.move_to_end(one)

    def _take(self, group: int, need: int, slabs: int) -> list[int]:
        """Up to `need` pages, and at least one: those of up to so many `slabs` in which the group has no page in use."""
        taken: list[int] = []
        per_slab, alone, before = self.per_slab[group], len(self.per_slab) == 1, self._busy[group]
        while need > len(taken) and (spare := slabs - self._busy[group] + before) > 0:
            missing = need - len(taken)
            if missing >= per_slab and self._free_slabs and (alone or not self._open[group]):
                taken += self._take_slab(group)
                continue
            slab = self._pick(group)
            if slab >= 0:
                taken += self._take_free(group, slab, missing)
            elif alone:
                taken += self._reuse(group, list(islice(self.cached[group], missing)))
            elif own := self._oldest_own(group, missing, spare):
                taken += self._reuse(group, own)
            else:
                self._evict_slab(self._oldest_idle(other_than=group))
        return taken

    def _take_thriftily(self, group: int, need: int) -> list[int]:
        """Pages of slabs that the group occupies anyway, free ones first, then whole slabs."""
        taken: list[int] = []
        for slab in [slab for slab in self._open[group] if self._slab_used[slab]]:
            taken += self._take_free(group, slab, need - len(taken))
        per_slab, cached = self.per_slab[group], self.cached[group]
        if self._busy[group]:
            partial = (page for page in cached if self._slab_used[page // per_slab])
            taken += self._reuse(group, list(islice(partial, need - len(taken))))
        while need > len(taken):
            if not self._free_slabs:
                slab = self._oldest_idle()
                if self.owner[slab] == group:
                    taken += self._take_free(group, slab, need - len(taken))
                    kept = (page for page in range(slab * per_slab, (slab + 1) * per_slab) if page in cached)
                    taken += self._reuse(group, list(islice(kept, need - len(taken))))
                    continue
                self._evict_slab(slab)
            taken += self._take_free(group, self._open_slab(group), need - len(taken))
        return taken

    def _take_free(self, group: int, slab: int, most: int) -> list[int]:
        """Up to `most` free pages of a slab of the group, into use."""
        free = self._slab_free[slab]
        part = free[-most:] if most else []
        if not part:
            return part
        del free[-len(part) :]
        if not free and not (self._unlisted and self._list_more(group, slab)):
            del self._open[group][slab]
        self._mark_used(group, slab, len(part))
        refs = self.refs[group]
        for page in part:
            refs[page] = 1
        return part

    def free_in_slabs(self, group: int) -> int:
        """Free pages in slabs that the group occupies: other groups can't have them."""
        return self._owned[group] * self.per_slab[group] - self.used[group] - len(self.cached[group])

    def num_holders(self, group: int, page: int) -> int:
        """How many hold the page, 0 if nobody does."""
        return self.refs[group].get(page, 0)

    def shared(self, group: int) -> int:
        """Pages of the group that several hold."""
        return sum(count > 1 for count in self.refs[group].values())

    @property
    def fragmentation(self) -> float:
        """Share of the slabs that packing every group's pages together would give back, 0 to 1."""
        if not self.num_slabs or len(self.per_slab) == 1:
            return 0.0
        return sum(self.free_in_slabs(group) // count for group, count in enumerate(self.per_slab)) / self.num_slabs

    def group_fragmentation(self, group: int) -> float:
        """The group's part of `fragmentation`."""
        alone = not self.num_slabs or len(self.per_slab) == 1
        return 0.0 if alone else self.free_in_slabs(group) // self.per_slab[group] / self.num_slabs

    def _mark_used(self, group: int, slab: int, pages: int) -> None:
        if self._slab_used[slab] == 0:
            self._busy[group] += 1
            self._idle[group].pop(slab, None)
        self._slab_used[slab] += pages
        self.used[group] += pages

    def _mark_all_used(self, group: int, pages: Sequence[int]) -> None:
        per_slab = self.per_slab[group]
        for slab, count in Counter([page // per_slab for page in pages]).items():
            self._mark_used(group, slab, count)

    def _pick(self, group: int) -> int:
        """A slab of the group with a free page, or -1. Opens a free slab if there is no other."""
        if self._open[group]:
            return next(reversed(self._open[group]))
        return self._open_slab(group) if self._free_slabs else -1

    def _own_slab(self, group: int) -> int:
        slab = self._free_slabs.pop()
        self._list_slabs()
        self.owner[slab] = group
        self._owned[group] += 1
        return slab

    def _list_slabs(self) -> None:
        if not self._free_slabs and self._unused_slabs < self.num_slabs:
            first = self._unused_slabs
            self._unused_slabs = min(first + _LISTED, self.num_slabs)
            self._free_slabs = list(range(self._unused_slabs - 1, first - 1, -1))

    def grow(self, num_slabs: int) -> None:
        """There are at least so many slabs now."""
        self.num_slabs = max(self.num_slabs, num_slabs)
        self._list_slabs()

    def _take_slab(self, group: int) -> Sequence[int]:
        """All pages of a free slab, into use."""
        slab, per_slab = self._own_slab(group), self.per_slab[group]
        self._slab_free[slab] = []
        self._slab_used[slab] = per_slab
        self.used[group] += per_slab
        self._busy[group] += 1
        refs, pages = self.refs[group], range(slab * per_slab, (slab + 1) * per_slab)
        for page in pages:
            refs[page] = 1
        return pages

    def _open_slab(self, group: int) -> int:
        slab = self._own_slab(group)
        per_slab = self.per_slab[group]
        first, end = slab * per_slab, (slab + 1) * per_slab
        if per_slab > _LISTED and len(self.per_slab) == 1:
            self._unlisted[slab] = end = first + _LISTED
        self._slab_used[slab] = 0
        self._slab_free[slab] = list(range(end - 1, first - 1, -1))
        self._open[group][slab] = None
        return slab

    def _list_more(self, group: int, slab: int) -> bool:
        """List the next free pages of a huge slab; whether there were any."""
        first = self._unlisted.pop(slab, -1)
        if first < 0:
            return False
        last = (slab + 1) * self.per_slab[group]
        end = min(first + _LISTED, last)
        self._slab_free[slab] = list(range(end - 1, first - 1, -1))
        if end < last:
            self._unlisted[slab] = end
        return True

    def _num_free(self, group: int, slab: int) -> int:
        last = (slab + 1) * self.per_slab[group]
        return len(self._slab_free[slab]) + last - self._unlisted.get(slab, last)

    # -- giving pages back

    def release(self, group: int, pages: Sequence[int]) -> None:
        """Drop one reference of each page. Of pages that become cached, the first is evicted first."""
        refs, per_slab = self.refs[group], self.per_slab[group]
        keys = self.index.keys[group] if self.keep_cached else self.index.adapters[group]
        cached = self.cached[group]
        self._clock += 1
        clock, slab, idle = self._clock, -1, 0  # so many pages in a row that nobody holds any more lie in this slab
        for page in pages:
            if (count := refs[page]) > 1:
                refs[page] = count - 1
                continue
            del refs[page]
            if page // per_slab != slab:
                self._mark_unused(group, slab, idle)
                slab, idle = page // per_slab, 0
            idle += 1
            if page in keys:
                cached[page] = clock
            else:
                self.index.forget(group, page)
                self._slab_free[slab].append(page)
                self._open[group][slab] = None
        self._mark_unused(group, slab, idle)

    def _mark_unused(self, group: int, slab: int, pages: int) -> None:
        if not pages:
            return
        self.used[group] -= pages
        self._slab_used[slab] -= pages
        if not self._slab_used[slab]:
            self._busy[group] -= 1
            self._idle[group][slab] = self._clock
            self._close_if_free(group, slab)

    def _close_if_free(self, group: int, slab: int) -> None:
        """A slab of which every page is free belongs to nobody."""
        if (self._num_free(group, slab) if self._unlisted else len(self._slab_free[slab])) == self.per_slab[group]:
            self._unlisted.pop(slab, None)
            del self.owner[slab], self._slab_free[slab], self._slab_used[slab]
            self._owned[group] -= 1
            del self._open[group][slab]
            self._idle[group].pop(slab, None)
            self._free_slabs.append(slab)

    # -- eviction

    def _reuse(self, group: int, pages: list[int]) -> list[int]:
        """Put cached pages straight into use, as a full pool of one group does all the time."""
        cached, refs = self.cached[group], self.refs[group]
        self.index.forget_all(group, pages)
        for page in pages:
            del cached[page]
        refs.update(dict.fromkeys(pages, 1))
        self._mark_all_used(group, pages)
        self.evictions[group] += len(pages)
        return pages

    def _oldest_own(self, group: int, most: int, slabs: int) -> list[int]:
        """Up to `most` cached pages of the group that have been unused for longer than any slab of another group. They lie in up to
        so many `slabs` without a page in use.
        """
        slab = self._oldest_idle(other_than=group)
        limit = self._clock if slab < 0 else self._idle[self.owner[slab]][slab]
        cached = self.cached[group]
        pages = list(islice(cached, most))
        if pages and cached[pages[-1]] > limit:
            del pages[bisect_right(pages, limit, key=cached.__getitem__) :]
        per_slab, idle, opened = self.per_slab[group], self._idle[group], set[int]()
        if len(idle.keys() & {page // per_slab for page in pages}) <= slabs:
            return pages
        for at, page in enumerate(pages):
            if (slab := page // per_slab) in idle and slab not in opened:
                if len(opened) == slabs:
                    return pages[:at]
                opened.add(slab)
        return pages

    def _oldest_idle(self, other_than: int = -1) -> int:
        """The slab that has been without a page in use for longest, or -1."""
        candidates = [
            (when, slab)
            for group, idle in enumerate(self._idle)
            if group != other_than
            for slab, when in islice(idle.items(), 1)
        ]
        return min(candidates)[1] if candidates else -1

    def evict(self, group: int, page: int) -> bool:
        """Free a page if it is cached; whether it was. That makes no room for anybody, so it isn't counted."""
        if self.cached[group].pop(page, None) is None:
            return False
        self.index.forget(group, page)
        slab = page // self.per_slab[group]
        self._slab_free[slab].append(page)
        self._open[group][slab] = None
        self._close_if_free(group, slab)
        return True

    def _evict_slab(self, slab: int) -> list[int]:
        """Free the pages of a slab, which are cached. Returns them."""
        group = self.owner[slab]
        per_slab, cached = self.per_slab[group], self.cached[group]
        pages = list(filter(cached.__contains__, range(slab * per_slab, (slab + 1) * per_slab)))
        self.index.forget_all(group, pages)
        for page in pages:
            del cached[page]
        self.evictions[group] += len(pages)
        self._slab_free[slab] += pages
        self._open[group][slab] = None
        self._close_if_free(group, slab)
        return pages

    def evict_all(self) -> None:
        """Free every cached page."""
        for group, cached in enumerate(self.cached):
            for page in list(cached):
                self.evict(group, page)

    # -- moving

    def pin(self, group: int, pages: Sequence[int]) -> None:
        """These pages, which are in use, mustn't move until as many calls of `unpin`."""
        self.pinned[group].update(pages)

    def unpin(self, group: int, pages: Sequence[int]) -> None:
        """See `pin`."""
        pinned = self.pinned[group]
        left = pinned.pop
        for page in pages:
            if (count := left(page)) > 1:
                pinned[page] = count - 1

    def gather(self, needs: Sequence[int], most: int) -> list[Move]:
        """Empty slabs by moving pages in use, one slab after another, until `needs` can be had. Returns the moves in order.

        A group's slab may be emptied if the group's other slabs hold all pages that the group has and needs, and if none of its
        pages is pinned. Of these slabs, the one with the fewest pages in use comes first. At most `most` pages are moved, so a slab may be left half
        empty. Targets are free pages, or cached pages if none is free. The caller must copy the bytes and correct the
        holders of the page ids.
        """
        moves: list[Move] = []
        spreads: dict[int, _Spread] = {}
        while len(moves) < most and self.slack(needs) < 0:
            best: _Spread | None = None
            for group, (count, need) in enumerate(zip(self.per_slab, needs, strict=True)):
                if self.used[group] + need <= (self._busy[group] - 1) * count:
                    spread = spreads.get(group) or spreads.setdefault(group, self._spread(group))
                    if spread.source >= 0 and (
                        best is None or self._slab_used[spread.source] < self._slab_used[best.source]
                    ):
                        best = spread
            if best is None:
                break
            moves += self._empty(best, most - len(moves))
        return moves

    def tidy(self, target: float, most: int) -> tuple[list[Move], int]:
        """Empty the slabs that are used least until fragmentation is at most `target`.

        Returns moves as `gather` does, and the amount of other work, counted in moves. Only free pages are targets. Cached
        pages of an emptied slab are evicted.
        """
        moves: list[Move] = []
        spreads: dict[int, _Spread] = {}
        other_work = 0
        groups = list(range(len(self.per_slab)))
        while groups and len(moves) + other_work < most and self.fragmentation > target:
            group = max(groups, key=lambda group: self.free_in_slabs(group) // self.per_slab[group])
            if self.free_in_slabs(group) < self.per_slab[group]:
                break
            spread = spreads.get(group) or spreads.setdefault(group, self._spread(group, free_only=True))
            slab = spread.source
            if slab < 0:
                groups.remove(group)
                continue
            moves += self._empty(spread, most - len(moves) - other_work)
            if not self._slab_used.get(slab):
                other_work += 1 + self.per_slab[group] // 8
                if slab in self.owner:
                    self._evict_slab(slab)
        return moves, other_work

    def _spread(self, group: int, *, free_only: bool = False) -> _Spread:
        used, full = self._slab_used, self.per_slab[group]
        slabs = (
            self._open[group] if free_only else [s for s, g in self.owner.items() if g == group and 0 < used[s] < full]
        )
        pinned = {page // full for page in self.pinned[group]}
        order = sorted(slabs, key=lambda slab: (slab in pinned, used[slab]) if pinned else used[slab])
        spread = _Spread(group, order, sum(slab not in pinned for slab in order))
        spread.places = self._places(spread, free_only)
        return spread

    def _places(self, spread: _Spread, free_only: bool) -> Iterator[int]:
        """Pages that can take moved pages, from the fullest slabs first. Slabs that are being emptied have none."""
        for at in range(len(spread.order) - 1, -1, -1):
            if at <= spread.at:
                break
            free = self._slab_free[spread.order[at]]
            while free and at > spread.at:
                yield free[-1]
        if free_only:
            return
        cached, per_slab = self.cached[spread.group], self.per_slab[spread.group]
        for at in range(len(spread.order) - 1, -1, -1):
            if self._slab_used[spread.order[at]] == per_slab:
                continue
            first = spread.order[at] * per_slab
            for page in [page for page in range(first, first + per_slab) if page in cached]:
                if at <= spread.at:
                    return
                yield page

    def _empty(self, spread: _Spread, most: int) -> list[Move]:
        """Move up to `most` pages out of the next slab in order. When that slab is empty, the one after it is next."""
        group, slab = spread.group, spread.source
        refs, per_slab = self.refs[group], self.per_slab[group]
        moves: list[Move] = []
        for source in [page for page in range(slab * per_slab, (slab + 1) * per_slab) if page in refs][:most]:
            target = next(spread.places)
            self._move(group, source, target)
            moves.append((group, source, target, refs[target]))
        if not self._slab_used.get(slab):
            spread.at += 1
        return moves

    def _move(self, group: int, source: int, target: int) -> None:
        self.evictions[group] += self.evict(group, target)
        slab = target // self.per_slab[group]
        free = self._slab_free[slab]
        if free[-1] == target:
            free.pop()
        else:
            free.remove(target)
        if not free:
            del self._open[group][slab]
        self._mark_used(group, slab, 1)
        self.refs[group][target] = self.refs[group][source]
        self.refs[group][source] = 1
        self.index.move(group, source, target)
        self.release(group, (source,))


class _Spread:
    """One group's slabs while pages move: `order` from the emptiest to the fullest, emptied up to position `at`.

    Only the first `movable` of them may be emptied.
    """

    __slots__ = ("at", "group", "movable", "order", "places")

    def __init__(self, group: int, order: list[int], movable: int) -> None:
        self.group = group
        self.order = order
        self.movable = movable
        self.at = 0
        self.places: Iterator[int] = iter(())

    @property
    def source(self) -> int:
        """The slab that is emptied next, or -1."""
        return self.order[self.at] if self.at < self.movable else -1
