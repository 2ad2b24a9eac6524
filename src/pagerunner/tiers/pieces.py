"""Cuts a long prompt into pieces that are stored one after another, so that none of them takes the core's thread for long.

A piece has the pages of some tokens, of groups that keep every page. The last piece has the rest and what a hit takes of other groups: the last
window, snapshots. Example: a prompt of 128,000 tokens has 8,000 pages of 16 tokens. Begun and ended at once these take 18 and 15 ms. In pieces of
1,024 pages no step waits more than 2 ms.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.prefix import PageKey, PrefixChain

PIECE_PAGES = 1_024
"""Pages that one plan begins to store."""


class Wish(NamedTuple):
    """The first `tokens` of a prompt are to be stored. Of these the device had `hit` when it was wished. Pieces have begun up to token `done`."""

    chain: PrefixChain
    tokens: int
    hit: int
    done: int = 0


class Pieces:
    """How prompts are cut for one plan of the memory. One plan begins to store at most about `most` pages."""

    def __init__(self, plan: MemoryPlan) -> None:
        self.most = PIECE_PAGES
        self._rules = [group.rule for group in plan.groups]
        self._cell = plan.hit_granularity
        self._cells = [0 if rule.forgets or rule.snapshots else rule.hit_span(self._cell)[1] for rule in self._rules]

    def end(self, wish: Wish, pages: int) -> int:
        """The token that the next piece of about so many pages ends at, 0 if it is the last one."""
        end = wish.done + max(pages // max(sum(self._cells), 1), 1) * self._cell
        return end if any(self._cells) and end < wish.hit else 0

    def tail(self, wish: Wish) -> list[list[PageKey]]:
        """Without these, which go first, the others are of no use."""
        return self.keys(wish._replace(done=max(wish.hit - self._cell, 0)), [wish.hit])

    def keys(self, wish: Wish, hits: Iterable[int], *, last: bool = True) -> list[list[PageKey]]:
        """By group, what these hits take beyond `wish.done`, the shortest hit first. Unless it is the `last` piece, only of groups that keep every page."""
        wanted: list[dict[PageKey, None]] = [{} for _ in self._rules]
        for hit in hits:
            for group, rule in enumerate(self._rules):
                start, stop = rule.hit_span(hit)
                start = rule.hit_span(wish.done)[1] if self._cells[group] else start
                if self._cells[group] or last:
                    wanted[group].update(dict.fromkeys(rule.keys(wish.chain, start, max(start, stop))))
        return list(map(list, wanted))
