"""The pages of running requests: how they come into grants, and how they leave them.

Tables, promises and the places that moves look up follow from what is done here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress

from pagerunner.memory.books import Books
from pagerunner.memory.grant import NO_PAGE, Grant, fill
from pagerunner.memory.moves import PageMoves
from pagerunner.memory.rules import FOREVER, GroupRule


class Holdings:
    """Puts pages into the grants of running requests, and takes them out."""

    def __init__(self, books: Books, moves: PageMoves) -> None:
        self._pool, self._index, self._work = books.pool, books.index, books.work
        self._promises, self._rules, self._grants = books.promises, books.rules, books.grants
        self._moves, self._adapters = moves, books.adapters
        keeps_all = any(not rule.forgets and not rule.snapshots for rule in self._rules)
        self._hits_at_states = keeps_all and any(rule.snapshots for rule in self._rules)

    def share(self, grant: Grant, group: int, first: int, pages: list[int]) -> None:
        """Put pages that are in use or cached into a new grant, as its pages `first` .. ."""
        self._pool.share(group, pages)
        grant.pages[group] = [NO_PAGE] * first + pages
        grant.first[group] = first
        grant.num_pages[group] = len(pages)
        self._moves.placed(grant, group, first, pages)

    def append(self, grant: Grant, fresh: Sequence[list[int]], parts: Sequence[list[range]]) -> None:
        """Put fresh pages behind the grant's pages. Where a group has `parts`, they say the fresh pages' numbers."""
        capacity = FOREVER
        for group, pages in enumerate(fresh):
            held = grant.pages[group]
            if parts[group]:
                taken = 0
                for part in parts[group]:
                    self._moves.placed(grant, group, part.start, pages[taken : taken + len(part)])
                    taken += len(part)
                fill(held, pages, parts[group])
            else:
                self._moves.placed(grant, group, len(held), pages)
                held += pages
            grant.num_pages[group] += len(pages)
            self._work.add_fresh(group, pages)
            capacity = min(capacity, self._rules[group].capacity(len(held)))
        self._promises.update(grant)
        grant.capacity = capacity

    def trim(self, grant: Grant, group: int, first: int) -> int:
        """Give back the pages before `first`, which no later position reads. Returns how many pages that were."""
        old, pages = grant.first[group], grant.pages[group]
        if first <= old:
            return 0
        stop = min(first, len(pages))
        gone = [page for page in pages[old:stop] if page != NO_PAGE]
        pages[old:stop] = [NO_PAGE] * (stop - old)
        pages += [NO_PAGE] * (first - len(pages))
        grant.first[group] = first
        grant.num_pages[group] -= len(gone)
        self._pool.release(group, gone[::-1])
        return len(gone)

    def borrowed_to_copy(self, grant: Grant, group: int) -> list[int]:
        """Numbers of the borrowed pages that the grant must copy before it writes to them: others hold or may find these.

        All other borrowed pages are the grant's own by now.
        """
        pages = grant.pages[group]
        return [
            number
            for number in grant.borrowed[group]
            if self._pool.num_holders(group, pages[number]) > 1 or self._index.holds(group, pages[number])
        ]

    def replace_borrowed(self, grant: Grant, group: int, numbers: Sequence[int], fresh: Sequence[int]) -> None:
        """Copy borrowed pages into `fresh` ones: the grant is about to write to them."""
        pages = grant.pages[group]
        for number, page in zip(numbers, fresh, strict=True):
            self._work.copy(group, pages[number], page)
            self._pool.release(group, (pages[number],))
            pages[number] = page
            self._moves.placed(grant, group, number, (page,))
        if numbers:
            grant.sent[group] = min(grant.sent[group], numbers[0])
        grant.reserve[group] -= len(grant.borrowed[group])

    def publish(self, grant: Grant, end: int) -> None:
        """Make the complete pages of positions [0, end) findable. The grant's chain must cover them.

        Where hits are at states alone, windows that no snapshot needs aren't: they would be cached, and no hit could use them. If no group
        keeps all, they are, since they say where texts branch.
        """
        chain = grant.chain
        for group, rule in enumerate(self._rules):
            complete = rule.complete(end)
            start = max(grant.published[group], grant.first[group])
            if start < complete:
                pages, keys = grant.pages[group][start:complete], rule.keys(chain, start, complete)
                if NO_PAGE in pages or (rule.forgets and self._hits_at_states):
                    spans = list(self._findable(grant, rule))
                    among = [any(first <= at < stop for first, stop in spans) for at in range(start, complete)]
                    some = [page != NO_PAGE and own for page, own in zip(pages, among, strict=True)]
                    keys, pages = list(compress(keys, some)), list(compress(pages, some))
                self._index.publish_all(group, keys, pages)
            grant.published[group] = complete
        self.set_next_publish(grant)

    def _findable(self, grant: Grant, rule: GroupRule) -> Iterator[tuple[int, int]]:
        """Which pages hits may need: first and one past last."""
        if rule.forgets and self._hits_at_states:
            yield from map(rule.hit_span, grant.snapshot_positions)
            yield rule.hit_span(grant.target)[0], FOREVER  # generated text has snapshots anywhere
        else:
            yield 0, FOREVER

    def set_next_publish(self, grant: Grant) -> None:
        """When the first page of a grant is complete that isn't findable yet."""
        grant.next_publish = min(map(lambda rule, count: rule.next_publish(count), self._rules, grant.published))

    def release(self, grant: Grant) -> None:
        """Take all pages out of a grant, which ends. Published ones become cache; the last page is evicted first."""
        for group, pages in enumerate(grant.pages):
            held = [page for page in pages[grant.first[group] :] if page != NO_PAGE]
            self._pool.release(group, held[::-1])
        if grant.adapter is not None:
            self._adapters.leave(grant.adapter)
        self._promises.withdraw(grant)
        del self._grants[grant]
        self._work.drop(grant)
