"""Prompts that siblings share to the last token: who holds one, and in whose pages.

The n siblings of one request differ from the first generated token on. Complete pages of their prompt are found in the
prefix index; the pages that the prompt's end leaves incomplete can't be, since every sibling fills them in its own way. They
are shared copy-on-write: a sibling borrows them, and gets copies in the step of its first write.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pagerunner.memory.grant import Grant
from pagerunner.memory.prefix import UNIT_TOKENS, PrefixChain

PromptKey = tuple[str, bytes, tuple[int, ...]]


def prompt_key(parent_id: str, chain: PrefixChain, prompt: Sequence[int]) -> PromptKey:
    """What identifies the prompt of siblings: the hash of its whole units, which `chain` covers, and the tokens after them."""
    units = len(prompt) // UNIT_TOKENS
    return parent_id, chain.hashes[units - 1] if units else chain.seed, tuple(prompt[units * UNIT_TOKENS :])


class Forks:
    """Which running requests have a whole prompt in their pages, and since which plan."""

    def __init__(self) -> None:
        self._holders: dict[PromptKey, dict[Grant, int]] = {}
        self._keys: dict[Grant, PromptKey] = {}

    def offer(self, key: PromptKey, grant: Grant, plan: int) -> None:
        """Plan number `plan` computes the last of the prompt in this request's pages."""
        self._holders.setdefault(key, {})[grant] = plan
        self._keys[grant] = key

    def withdraw(self, grant: Grant) -> None:
        """The request gives its pages back."""
        key = self._keys.pop(grant, None)
        if key is not None:
            holders = self._holders[key]
            del holders[grant]
            if not holders:
                del self._holders[key]

    def holders(self, key: PromptKey) -> Iterator[tuple[Grant, int]]:
        """Requests with this prompt and the plans that computed it, the latest first: a window moves past a prompt."""
        return reversed(self._holders.get(key, {}).items())

    def __len__(self) -> int:
        return len(self._keys)
