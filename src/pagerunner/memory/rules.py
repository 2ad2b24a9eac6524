"""How a group's pages live: how many a request needs, which must be held for a step, which make a prefix hit.

One rule per kind of memory. Rules are pure: they hold sizes and no state. A new kind (window, chunk, latent, recurrent) is
one more class here and one more entry in `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pagerunner.memory.prefix import UNIT_TOKENS, PageKey, PrefixChain


class GroupRule(Protocol):
    """What the planner and the manager ask of a group. Pages are counted from 0 at a request's first token."""

    def pages_needed(self, tokens: int) -> int:
        """The most pages that one request holds at once on its way to `tokens` tokens."""

    def table_width(self, tokens: int) -> int:
        """Page table entries of a request of `tokens` tokens."""

    def span(self, start: int, end: int) -> tuple[int, int]:
        """First and one past last page that must be held while positions [start, end) are computed."""

    def capacity(self, pages: int) -> int:
        """Tokens that can be computed when pages [.., pages) are there."""

    def complete(self, tokens: int) -> int:
        """How many leading pages can be published when `tokens` tokens are known and computed."""

    def next_publish(self, published: int) -> int:
        """Token count at which a page beyond the first `published` ones can be published."""

    def key(self, chain: PrefixChain, page: int) -> PageKey:
        """What identifies the content of a complete page."""

    def longest_hit(self, index: Mapping[PageKey, int], chain: PrefixChain, limit: int) -> int:
        """The most leading tokens, at most `limit`, whose state can be taken from `index`."""


@dataclass(frozen=True, slots=True)
class FullRule:
    """Every token's page is held from its computation to the end of the request; a hit needs every page of the prefix.

    Pages are found in the index by cells of max(page_tokens, 16) tokens: a page of 16 tokens or more is its last unit's
    hash; smaller pages are their unit's hash plus their place in the unit.
    """

    page_tokens: int

    def pages_needed(self, tokens: int) -> int:
        """All of them."""
        return -(-tokens // self.page_tokens)

    def table_width(self, tokens: int) -> int:
        """One per page."""
        return -(-tokens // self.page_tokens)

    def span(self, start: int, end: int) -> tuple[int, int]:
        """From the first page on."""
        return 0, -(-end // self.page_tokens)

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

    def longest_hit(self, index: Mapping[PageKey, int], chain: PrefixChain, limit: int) -> int:
        """Leading pages until the first that is missing, in whole cells."""
        key = self.key
        most = self.complete(min(limit, len(chain.hashes) * UNIT_TOKENS))
        pages = 0
        while pages < most and key(chain, pages) in index:
            pages += 1
        cell = max(self.page_tokens, UNIT_TOKENS)
        return pages * self.page_tokens // cell * cell


# kind -> rule from (page_tokens, most tokens of one request that can be in flight)
RULES: dict[str, Callable[[int, int], GroupRule]] = {
    "full": lambda page_tokens, in_flight: FullRule(page_tokens),
}


def joint_hit(
    rules: Sequence[GroupRule], indexes: Sequence[Mapping[PageKey, int]], chain: PrefixChain, limit: int
) -> int:
    """The longest prefix of at most `limit` tokens that every group can supply."""
    while True:
        before = limit
        for rule, index in zip(rules, indexes, strict=True):
            limit = rule.longest_hit(index, chain, limit)
        if limit == before or len(rules) == 1:
            return limit
