"""Leases: pages that are held by something else than a request's table, until that has ended.

A lease counts like a request that holds the page. So the page is neither handed out nor evicted, whoever else gives it back.

| State | Who uses the page | Findable | May be moved |
|---|---|---|---|
| saving | a step writes a snapshot into it | when the host knows the tokens up to it | yes: steps run in order |
| held | a transfer reads it | yes | no |
| arriving | a transfer writes it | when the transfer has ended well | no |
| kept | nobody yet: pages that a transfer has brought for a request that waits. Given up before anybody is preempted | yes | no |
| quarantined | a transfer that has failed, and may still use it; nobody waits for its end | of a load never; of a store yes, as it only reads | no |

Example: a prompt's 512 pages are copied to the host. Its request ends meanwhile. The pages become cache at the copy's end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import filterfalse
from typing import Literal

from pagerunner.memory.books import Books
from pagerunner.memory.prefix import PageKey

LeaseState = Literal["saving", "held", "arriving", "kept", "quarantined", "ended"]


class Lease:
    """Pages by group. Of a transfer also its `number`, what the pages hold (`keys`), and where else that lies (`places`).

    What a `distrusted` one brings is wrong.
    """

    __slots__ = ("distrusted", "epoch", "keys", "number", "pages", "places", "state")

    def __init__(self, state: LeaseState, pages: list[list[int]], epoch: int, number: int = -1) -> None:
        self.state = state
        self.pages = pages
        self.epoch = epoch
        self.distrusted = False
        self.number = number
        self.keys: list[list[PageKey]] = []
        self.places: list[list[int]] = []


class Leases:
    """All leases that haven't ended. `arriving` are, by group, the keys that transfers bring, and the pages."""

    def __init__(self, books: Books) -> None:
        self._books, self._pool, self._index = books, books.pool, books.index
        self._adapters = books.adapters
        self._saving: dict[Lease, None] = {}
        self._transfers: dict[int, Lease] = {}
        self._kept: dict[Lease, None] = {}
        self._made = 0
        self.arriving: list[dict[PageKey, int]] = [{} for _ in books.rules]

    def __len__(self) -> int:
        """Transfers that haven't ended, those in quarantine included."""
        return len(self._transfers)

    # -- snapshots

    def save(self, pages: list[list[int]]) -> Lease:
        """A step writes a snapshot into pages that were just handed out."""
        lease = Lease("saving", pages, self._index.epoch)
        self._saving[lease] = None
        return lease

    def saved(self, lease: Lease) -> None:
        """The snapshot is findable, or given up."""
        if lease.state == "saving":
            del self._saving[lease]
            self._release(lease)

    def moved(self, group: int, source: int, target: int) -> None:
        """What was in page `source` is in `target` now."""
        for lease in self._saving:
            if source in lease.pages[group]:
                lease.pages[group][:] = [target]
        self._adapters.moved(group, source, target)

    # -- transfers

    def hold(self, keys: Sequence[Sequence[PageKey]], places: Sequence[Sequence[int]]) -> Lease | None:
        """Keep the pages with these keys for a transfer that reads them.

        Keys that aren't findable are left out. None if none is, or if a promise would be broken by keeping cached pages.
        """
        there = self._index.pages
        chosen = [filter(held.__contains__, some) for some, held in zip(keys, there, strict=True)]
        lease = self._new("held", keys, places, chosen)
        lease.pages = [[there[group][key] for key in found] for group, found in enumerate(lease.keys)]
        for group, pages in enumerate(lease.pages):
            self._pool.share(group, pages)
        if not any(lease.keys) or not self._books.promises.kept([0] * len(lease.keys)):
            self._release(lease)
            return None
        return self._begin(lease)

    def expect(self, keys: Sequence[Sequence[PageKey]], places: Sequence[Sequence[int]]) -> Lease | None:
        """Hand out pages to a transfer that fills them with what has these keys.

        Keys that are findable or arriving are left out. None if none is left, or if the pages were promised to requests.
        """
        there, coming = self._index.pages, self.arriving
        chosen = [_lacking(some, held, more) for some, held, more in zip(keys, there, coming, strict=True)]
        lease = self._new("arriving", keys, places, chosen)
        needs = [len(group) for group in lease.keys]
        promises = self._books.promises
        pages = self._pool.allocate(needs, promises.by_group) if any(needs) and promises.kept(needs) else None
        if pages is None:
            return None
        lease.pages = pages
        for group, fresh in enumerate(pages):
            coming[group].update(zip(lease.keys[group], fresh, strict=True))
            self._books.work.keep(group, fresh)
        return self._begin(lease)

    def quarantine(self, number: int) -> None:
        """The transfer has failed, but may still use its pages: they aren't given back until it has ended, which nobody waits for.

        What a load writes to is found by nobody, then or later. Pages that are stored stay findable.
        """
        lease = self._transfers[number]
        self._forget(lease)
        lease.state = "quarantined"

    def end(self, number: int, *, well: bool, keep: bool = False) -> list[list[PageKey]]:
        """The transfer reads and writes no more. What has arrived `well` becomes cache, or is kept; what was quarantined hasn't ended well.

        Returns, by group, the keys that are found in these pages now. Of what a transfer has read, only these are right.
        """
        lease = self._transfers.pop(number)
        self._forget(lease)
        well = well and lease.state != "quarantined"
        if well and lease.state == "arriving" and not lease.distrusted and lease.epoch == self._index.epoch:
            for group, pages in enumerate(lease.pages):
                self._index.publish_all(group, lease.keys[group], pages)
        stood = [
            _found_in(keys, pages, there) if well else []
            for keys, pages, there in zip(lease.keys, lease.pages, self._index.pages, strict=True)
        ]
        if keep and well and lease.state == "arriving":
            lease.state = "kept"
            self._kept[lease] = None
        else:
            self._unpin(lease)
        return stood

    def keep(self, pages: list[list[int]]) -> Lease:
        """Keep pages, cached or in use, for a request that waits."""
        lease = Lease("kept", pages, self._index.epoch)
        for group, some in enumerate(pages):
            self._pool.share(group, some)
            self._pool.pin(group, some)
        self._kept[lease] = None
        return lease

    def let_go(self, lease: Lease) -> None:
        """The request has taken what was kept for it, or wants nothing any more."""
        if lease.state == "kept":
            del self._kept[lease]
            self._unpin(lease)

    def give_up_kept(self) -> bool:
        """Give up what was kept last. Whether there was anything."""
        if self._kept:
            self.let_go(next(reversed(self._kept)))
            return True
        return False

    def _unpin(self, lease: Lease) -> None:
        for group, pages in enumerate(lease.pages):
            self._pool.unpin(group, pages)
        self._release(lease)

    def distrust(self, group: int, key: PageKey) -> None:
        """What has this key is wrong: a transfer that brings it publishes nothing."""
        if (page := self.arriving[group].get(key)) is not None:
            for lease in self._transfers.values():
                lease.distrusted |= lease.state == "arriving" and page in lease.pages[group]

    def would_fit(self, needs: Sequence[int]) -> bool:
        """Whether `needs` could be had if all transfers ended now that haven't failed, and fills of adapters that nobody runs with."""
        back = [0] * len(needs)
        back[self._adapters.group] = self._adapters.coming_back()
        for lease in self._transfers.values():
            if lease.state != "quarantined":
                for group, pages in enumerate(lease.pages):
                    back[group] += sum(self._pool.num_holders(group, page) == 1 for page in pages)
        return any(back) and self._pool.could_hold([need - less for need, less in zip(needs, back, strict=True)])

    def _new(
        self,
        state: LeaseState,
        keys: Sequence[Sequence[PageKey]],
        places: Sequence[Sequence[int]],
        chosen: Iterable[Iterable[PageKey]],
    ) -> Lease:
        self._made += 1
        lease = Lease(state, [[] for _ in keys], self._index.epoch, self._made)
        for every, there, some in zip(keys, places, chosen, strict=True):
            found = list(dict.fromkeys(some))
            lease.keys.append(found)
            if len(found) == len(every):  # as almost always
                lease.places.append(list(there))
            else:
                lease.places.append(list(map(dict(zip(every, there, strict=True)).__getitem__, found)))
        return lease

    def _begin(self, lease: Lease) -> Lease:
        self._transfers[lease.number] = lease
        for group, pages in enumerate(lease.pages):
            self._pool.pin(group, pages)
        self._books.work.begin(lease)
        return lease

    def _forget(self, lease: Lease) -> None:
        if lease.state == "arriving":
            for coming, keys in zip(self.arriving, lease.keys, strict=True):
                for key in keys:
                    del coming[key]

    def _release(self, lease: Lease) -> None:
        lease.state = "ended"
        for group, pages in enumerate(lease.pages):
            self._pool.release(group, pages[::-1])

    def num_kept(self, group: int) -> int:
        """Pages of the group that are kept for requests that wait."""
        return sum(len(lease.pages[group]) for lease in self._kept)


def _lacking(keys: Sequence[PageKey], *held: dict[PageKey, int]) -> Iterable[PageKey]:
    """Those of the keys that nothing holds: almost always all of them, as they were looked for just before."""
    for one in held:
        keys = keys if one.keys().isdisjoint(keys) else list(filterfalse(one.__contains__, keys))
    return keys


def _found_in(keys: list[PageKey], pages: list[int], there: dict[PageKey, int]) -> list[PageKey]:
    """Those of the keys that are found in these very pages: almost always all of them."""
    now = list(map(there.get, keys))
    return keys if now == pages else [key for key, page, at in zip(keys, pages, now, strict=True) if at == page]
