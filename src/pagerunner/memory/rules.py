"""How a group's pages live: how many a request needs, which must be held for a step, which make a prefix hit.

One rule per kind of memory. Rules are pure: they hold sizes and no state. A new kind is one more class here and one more
entry in `RULES`.

A step computes positions [start, end) of a request: its chunk. While the step runs, the request holds two sets of pages. The
first, `span`, is what the step reads of earlier steps. The second, `tail`, is what later steps will read of this one.
Between them a window group has no pages at all. Example: a window of 1,024 tokens and a chunk of 8,192 hold pages for 2,048
tokens, not for 9,216.

`tail` is held in addition for one step only, and a shorter chunk has a shorter one. The manager shortens chunks when pages
are scarce, so `pages_needed` counts a chunk of at most `SHORT_CHUNK` tokens. Where a prompt has to run in one step
(`shortens` is false), chunks can't be shortened, and both windows are counted whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, filterfalse
from math import lcm
from typing import ClassVar, Protocol

from pagerunner.errors import ConfigError
from pagerunner.memory.prefix import UNIT_TOKENS, PageKey, PrefixChain
from pagerunner.memory.specs import Spec

SHORT_CHUNK = 256  # tokens; what every admitted request can run at once, however scarce pages are
FOREVER = 1 << 62


class GroupRule(Protocol):
    """What the planner and the manager ask of a group. Pages are counted from 0 at a request's first token."""

    __slots__ = ()

    forgets: ClassVar[bool] = False
    """Whether pages are given back while the request runs."""
    snapshots: ClassVar[bool] = False
    """Whether a page holds the state at one position, instead of tokens."""

    @property
    def shortens(self) -> bool:
        """Whether a long step may be shortened when its pages are scarce. Most rules need the same pages sooner or later."""
        return True

    @property
    def cell(self) -> int:
        """Prefix hits are at multiples of this many tokens."""

    def pages_needed(self, tokens: int) -> int:
        """The most pages that one request must hold at once on its way to `tokens` tokens."""

    def table_width(self, tokens: int) -> int:
        """Columns of a page table in which page n of a request of `tokens` tokens is in column n % width."""
        return self.pages_needed(tokens)

    def span(self, start: int, end: int) -> tuple[int, int]:
        """First and one past last page of all that is read or written while positions [start, end) are computed."""

    def tail(self, end: int) -> int:
        """The first page that steps after position `end` read, or that a prefix hit next to `end` needs."""

    def capacity(self, pages: int) -> int:
        """Tokens that can be computed when pages [.., pages) are there."""

    def complete(self, tokens: int) -> int:
        """How many leading pages can be published when `tokens` tokens are known and computed."""

    def next_publish(self, published: int) -> int:
        """Token count at which a page beyond the first `published` ones can be published."""

    def key(self, chain: PrefixChain, page: int) -> PageKey:
        """What identifies the content of a complete page."""

    def keys(self, chain: PrefixChain, start: int, stop: int) -> list[PageKey]:
        """Those of the pages [start, stop)."""
        return [self.key(chain, page) for page in range(start, stop)]

    def hit_span(self, tokens: int) -> tuple[int, int]:
        """First and one past last page that a prefix hit of `tokens` tokens takes from the index."""

    def longest_hit(self, index: Collection[PageKey], chain: PrefixChain, limit: int) -> int:
        """The most leading tokens, at most `limit`, whose state can be taken from `index`."""


@dataclass(frozen=True, slots=True)
class FullRule(GroupRule):
    """Every token's page is held from its computation to the end of the request; a hit needs every page of the prefix.

    Pages are found in the index by cells of max(page_tokens, 16) tokens. The key of a page of 16 tokens or more is its last unit's
    hash. The key of a smaller page is its unit's hash and its place in the unit.
    """

    page_tokens: int

    @property
    def cell(self) -> int:
        """A page, at least a unit."""
        return max(self.page_tokens, UNIT_TOKENS)

    def pages_needed(self, tokens: int) -> int:
        """All of them."""
        return -(-tokens // self.page_tokens)

    def span(self, start: int, end: int) -> tuple[int, int]:
        """From the first page on."""
        return 0, -(-end // self.page_tokens)

    def tail(self, end: int) -> int:
        """All."""
        return 0

    def capacity(self, pages: int) -> int:
        """As many tokens as the pages have slots."""
        return pages * self.page_tokens

    def complete(self, tokens: int) -> int:
        """Pages of whole cells."""
        size = self.page_tokens
        return tokens // size if size >= UNIT_TOKENS else tokens // UNIT_TOKENS * (UNIT_TOKENS // size)

    def next_publish(self, published: int) -> int:
        """One more cell."""
        return published * self.page_tokens + max(self.page_tokens, UNIT_TOKENS)

    def key(self, chain: PrefixChain, page: int) -> PageKey:
        """The chained hash of everything up to the page's end."""
        size = self.page_tokens
        if size >= UNIT_TOKENS:
            return chain.hashes[(page + 1) * size // UNIT_TOKENS - 1]
        unit, place = divmod(page, UNIT_TOKENS // size)
        return chain.hashes[unit] + bytes((place,))

    def keys(self, chain: PrefixChain, start: int, stop: int) -> list[PageKey]:
        """Those of the pages [start, stop)."""
        units, rest = divmod(self.page_tokens, UNIT_TOKENS)
        if units and not rest:
            return chain.hashes[(start + 1) * units - 1 : stop * units : units]
        return GroupRule.keys(self, chain, start, stop)

    def hit_span(self, tokens: int) -> tuple[int, int]:
        """Every page of the prefix."""
        return 0, tokens // self.page_tokens

    def longest_hit(self, index: Collection[PageKey], chain: PrefixChain, limit: int) -> int:
        """Leading pages until the first that is missing, in whole cells."""
        most = self.complete(min(limit, len(chain.hashes) * UNIT_TOKENS))
        pages, count = 0, 32
        while pages < most:  # some at a time, and more of them if these are there: the first may be missing already
            keys = self.keys(chain, pages, min(pages + count, most))
            if missing := missing_keys(keys, index):
                pages += keys.index(missing[0])
                break
            pages, count = pages + len(keys), 4 * count
        cell = self.cell
        return pages * self.page_tokens // cell * cell


@dataclass(frozen=True, slots=True)
class LatentRule(FullRule):
    """As full, for pages that store one slot for every `compression` tokens.

    Raises:
        ConfigError: a page doesn't hold whole slots.
    """

    compression: int

    def __post_init__(self) -> None:
        if self.page_tokens % self.compression:
            raise ConfigError(
                f"A page of {self.page_tokens} tokens doesn't hold whole slots of {self.compression} tokens; take a "
                f"block_size of {lcm(self.page_tokens, self.compression)}."
            )


@dataclass(frozen=True, slots=True)
class ForgettingRule(FullRule, ABC):
    """What windows and chunks share: position p is read until `_oldest` has moved past it.

    `reach` is the size of window or chunk, `step_tokens` the most tokens of one request in one step; with `whole_steps` such a
    step is never shortened. So many `open_tokens` may lie between the first position that a step may begin at and the last one that it may reach:
    with drafts, nobody knows yet how many tokens the steps before it have accepted.
    """

    forgets: ClassVar[bool] = True
    reach: int
    step_tokens: int
    whole_steps: bool = False
    open_tokens: int = 1

    @property
    def shortens(self) -> bool:
        """Unless prompts run in one step."""
        return not self.whole_steps

    @abstractmethod
    def _oldest(self, position: int) -> int:
        """The first position that the token at `position` reads."""

    def pages_needed(self, tokens: int) -> int:
        """The window before a short chunk, and the chunk, wherever page boundaries fall.

        Of a whole step the window before it and its tail, which begins up to a cell before the last window.
        """
        alone, open_pages = -(-tokens // self.page_tokens), self._most_pages(self.open_tokens)
        if not self.whole_steps:
            return min(alone, max(self._most_pages(min(self.step_tokens, SHORT_CHUNK)), open_pages))
        both = self._touched(self.reach) + self._touched(self.reach + self.cell - 1)
        return min(alone, max(min(self._most_pages(self.step_tokens), both), open_pages))

    def _touched(self, tokens: int) -> int:
        """Pages that so many adjacent tokens may lie in."""
        return -(-(tokens - 1) // self.page_tokens) + 1

    def _most_pages(self, chunk: int) -> int:
        return -(-(self.reach + chunk - 2) // self.page_tokens) + 1

    def table_width(self, tokens: int) -> int:
        """One per page of a window and the longest chunk, so that no two pages of one step share a column."""
        return min(-(-tokens // self.page_tokens), self._most_pages(max(self.step_tokens, self.open_tokens)))

    def span(self, start: int, end: int) -> tuple[int, int]:
        """From the page of the oldest position that `start` reads."""
        return self._oldest(start) // self.page_tokens, -(-end // self.page_tokens)

    def tail(self, end: int) -> int:
        """The pages that position `end` or the last possible hit before it reads."""
        return self._oldest(end // self.cell * self.cell) // self.page_tokens

    def hit_span(self, tokens: int) -> tuple[int, int]:
        """What the position right after the hit reads."""
        return self._oldest(tokens) // self.page_tokens, tokens // self.page_tokens

    def longest_hit(self, index: Collection[PageKey], chain: PrefixChain, limit: int) -> int:
        """The last cell boundary before which everything that the next position reads is there."""
        cell, key = self.cell, self.key
        per_cell = cell // self.page_tokens
        hit = min(limit, len(chain.hashes) * UNIT_TOKENS) // cell * cell
        while hit > 0:
            first, stop = self.hit_span(hit)
            page = stop - 1
            while page >= first and key(chain, page) in index:
                page -= 1
            if page < first:
                return hit
            # Every later hit would need the missing page, until one that ends before it or begins after it.
            hit = page // per_cell * cell
        return 0


@dataclass(frozen=True, slots=True)
class WindowRule(ForgettingRule):
    """The last `reach` tokens are read: key j by query i when i - reach < j <= i. A hit needs only the pages before it."""

    def tail(self, end: int) -> int:
        """Also what position `end - 1` reads, which the siblings of a prompt that ends here compute again: a page at most."""
        return self._oldest(min(end // self.cell * self.cell, end - 1)) // self.page_tokens

    def _oldest(self, position: int) -> int:
        return max(position - self.reach + 1, 0)


@dataclass(frozen=True, slots=True)
class ChunkedRule(ForgettingRule):
    """The current chunk is read: key j by query i when i // reach * reach <= j <= i. A hit needs only its chunk's pages."""

    def _oldest(self, position: int) -> int:
        return position // self.reach * self.reach


@dataclass(frozen=True, slots=True)
class RecurrentRule(GroupRule):
    """One page holds the state of all tokens so far. A hit at t needs a snapshot: the state after t tokens, in a page of its own.

    The running request's own page is page 0 and is never published; snapshots are, under the chain's hash at their position.
    """

    snapshots: ClassVar[bool] = True

    @property
    def cell(self) -> int:
        """Any unit boundary."""
        return UNIT_TOKENS

    def pages_needed(self, tokens: int) -> int:
        """One."""
        return 1

    def span(self, start: int, end: int) -> tuple[int, int]:
        """The one page."""
        return 0, 1

    def tail(self, end: int) -> int:
        """The one page."""
        return 0

    def capacity(self, pages: int) -> int:
        """Any number of tokens, once the page is there."""
        return FOREVER if pages else 0

    def complete(self, tokens: int) -> int:
        """The running state is never published."""
        return 0

    def next_publish(self, published: int) -> int:
        """Never."""
        return FOREVER

    def key(self, chain: PrefixChain, page: int) -> PageKey:
        """Of a snapshot after `page + 1` units."""
        return chain.hashes[page]

    def keys(self, chain: PrefixChain, start: int, stop: int) -> list[PageKey]:
        """See `key`."""
        return chain.hashes[start:stop]

    def hit_span(self, tokens: int) -> tuple[int, int]:
        """The snapshot after that many tokens, counted in units."""
        unit = tokens // UNIT_TOKENS
        return unit - 1, unit

    def longest_hit(self, index: Collection[PageKey], chain: PrefixChain, limit: int) -> int:
        """The last snapshot."""
        hashes, last = chain.hashes, 0
        most = min(limit // UNIT_TOKENS, len(hashes))
        for held in _maps(index):
            keys = hashes[last:most][::-1] if held else []
            if (key := next(filter(held.__contains__, keys), None)) is not None:
                last = most - keys.index(key)
        return last * UNIT_TOKENS


# kind -> rule from (page_tokens, most tokens of one request in one step, *the sizes that a lifetime names after its kind)
RULES: dict[str, Callable[..., GroupRule]] = {
    "full": lambda page_tokens, step_tokens, *_: FullRule(page_tokens),
    "latent": lambda page_tokens, step_tokens, compression: LatentRule(page_tokens, compression),
    "window": lambda page_tokens, step_tokens, window: WindowRule(page_tokens, window, step_tokens),
    "chunked": lambda page_tokens, step_tokens, chunk: ChunkedRule(page_tokens, chunk, step_tokens),
    "recurrent": lambda page_tokens, step_tokens: RecurrentRule(),
}


def make_rule(
    spec: Spec, page_tokens: int, step_tokens: int, whole_steps: bool = False, open_tokens: int = 1
) -> GroupRule:
    """The rule of all layers that live as long as `spec`'s; `step_tokens` is the most tokens of one step.

    With `whole_steps` a step of that many tokens is never shortened. `open_tokens`: see `ForgettingRule`.
    """
    rule = RULES[spec.kind](page_tokens, step_tokens, *spec.lifetime[1:])
    if not isinstance(rule, ForgettingRule):
        return rule
    return replace(rule, whole_steps=whole_steps, open_tokens=open_tokens)


def _maps(index: Collection[PageKey]) -> Sequence[Collection[PageKey]]:
    return index.maps if isinstance(index, ChainMap) else (index,)


def missing_keys(keys: Sequence[PageKey], index: Collection[PageKey]) -> list[PageKey]:
    """Those that aren't in the index, in order. Of a ChainMap the maps are asked, which takes a tenth of the time."""
    missing = list(keys)
    for held in filter(None, _maps(index)):
        missing = list(filterfalse(held.__contains__, missing))
    return missing


def joint_hit(
    rules: Sequence[GroupRule], indexes: Sequence[Collection[PageKey]], chain: PrefixChain, limit: int, known: int = 0
) -> int:
    """The longest prefix of at most `limit` tokens that every group can supply. A group is asked again only when another has made it shorter.

    Once it is known to be at most `known`, nobody is asked any more, and it may be shorter than what is returned.
    """
    agree = 0  # groups that can supply `limit` tokens
    for rule, index in cycle(zip(rules, indexes, strict=True)):
        hit = rule.longest_hit(index, chain, limit)
        agree, limit = agree + 1 if hit == limit else 1, hit
        if agree >= len(rules) or limit <= known:
            return limit
    return limit
