"""Which pages of a prompt a memory has. A prompt of 128,000 tokens has 8,000 pages, so sets are cut with each other and no loop asks for each page."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import filterfalse

from pagerunner.memory.prefix import UNIT_TOKENS, PageKey, PrefixChain
from pagerunner.memory.rules import GroupRule


def prompt_keys(rules: Iterable[GroupRule], chain: PrefixChain, limit: int) -> list[set[PageKey]]:
    """By group, the keys of all pages that a hit of at most `limit` tokens may take."""
    limit = min(limit, len(chain.hashes) * UNIT_TOKENS)
    stops = [(rule, limit // UNIT_TOKENS if rule.snapshots else rule.complete(limit)) for rule in rules]
    return [set(rule.keys(chain, 0, stop)) for rule, stop in stops]


def hit_keys(rules: Iterable[GroupRule], chain: PrefixChain, hit: int) -> list[list[PageKey]]:
    """By group, the keys of the pages that a hit takes, in the order of tokens."""
    return [rule.keys(chain, *rule.hit_span(hit)) if hit else [] for rule in rules]


def found(keys: Sequence[set[PageKey]], *held: Sequence[Mapping[PageKey, object]]) -> list[set[PageKey]]:
    """By group, those of `keys` that one of the memories has."""
    parts = [[memory[group].keys() & some for memory in held if memory[group]] for group, some in enumerate(keys)]
    return [some[0] if len(some) == 1 else set().union(*some) for some in parts]


def within(keys: Iterable[PageKey], held: Collection[PageKey]) -> list[PageKey]:
    """Those that are held, in their order."""
    return list(filter(held.__contains__, keys))


def without(keys: Iterable[PageKey], held: Collection[PageKey]) -> list[PageKey]:
    """The others, in their order."""
    return list(filterfalse(held.__contains__, keys))
