"""Prompts that siblings share to the last token: who holds one, and in whose pages.

The n siblings of one request differ from the first generated token on. Complete pages of their prompt are found in the
prefix index. The prompt's last page is mostly incomplete. It can't be in the index, since every sibling fills it in its own
way. So incomplete pages are shared copy-on-write: a sibling borrows them, and gets copies in the step of its first write.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pagerunner.memory.grant import NO_PAGE, Grant
from pagerunner.memory.prefix import UNIT_TOKENS, PrefixChain, PrefixIndex
from pagerunner.memory.rules import GroupRule

PromptKey = tuple[str, bytes, tuple[int, ...]]


def prompt_key(parent_id: str, chain: PrefixChain, prompt: Sequence[int]) -> PromptKey:
    """What identifies the prompt of siblings: the hash of its whole units, which `chain` covers, and its last few tokens."""
    units = len(prompt) // UNIT_TOKENS
    return parent_id, chain.hashes[units - 1] if units else chain.seed, tuple(prompt[units * UNIT_TOKENS :])


class Forks:
    """Which running requests have a whole prompt in their pages, and since which plan. `plans` were ended so far."""

    def __init__(self) -> None:
        self.plans = 0
        self._holders: dict[PromptKey, dict[Grant, int]] = {}
        self._keys: dict[Grant, PromptKey] = {}

    def offer(self, key: PromptKey, grant: Grant) -> None:
        """The plan in the making computes the last of the prompt in this request's pages."""
        self._holders.setdefault(key, {})[grant] = self.plans
        self._keys[grant] = key

    def withdraw(self, grant: Grant) -> None:
        """The request gives its pages back."""
        key = self._keys.pop(grant, None)
        if key is not None:
            holders = self._holders[key]
            del holders[grant]
            if not holders:
                del self._holders[key]

    def find(
        self, key: PromptKey, tokens: int, rules: Sequence[GroupRule], index: PrefixIndex, epoch: int
    ) -> tuple[list[tuple[int, list[int]]], int] | None:
        """The pages that position `tokens` of this prompt reads, if one running request has them all; else None.

        Returns, by group, the first page's number and the pages; and the plan that computes the last of these pages.
        """
        for holder, plan in self.holders(key):
            if holder.epoch != epoch:
                continue
            found = [_pages_of(holder, group, rule, index, tokens) for group, rule in enumerate(rules)]
            whole = [pages for pages in found if pages is not None]
            if len(whole) == len(rules):
                return whole, plan
        return None

    def holders(self, key: PromptKey) -> Iterator[tuple[Grant, int]]:
        """Requests with this prompt and the plans that computed it.

        The latest comes first, as its window has moved least far past the prompt.
        """
        return reversed(self._holders.get(key, {}).items())

    def __len__(self) -> int:
        return len(self._keys)


def _pages_of(
    holder: Grant, group: int, rule: GroupRule, index: PrefixIndex, tokens: int
) -> tuple[int, list[int]] | None:
    """The holder's pages that position `tokens` reads, and the first page's number; None if one of them is gone.

    A complete page that the holder has given back may still be in the index.
    """
    first, stop = rule.span(tokens, tokens)
    pages = holder.pages[group][first:stop]
    if NO_PAGE in pages:
        for number in range(first, min(stop, rule.complete(tokens))):
            if pages[number - first] == NO_PAGE:
                page = index.find(group, rule.key(holder.chain, number))
                pages[number - first] = NO_PAGE if page is None else page
    return (first, pages) if len(pages) == stop - first and NO_PAGE not in pages else None
