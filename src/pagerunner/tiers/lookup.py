"""Which pages of a prompt a memory has. A prompt of 128,000 tokens has 8,000 pages, so sets are cut with each other and no loop asks for each page."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import filterfalse

from pagerunner.memory.prefix import UNIT_TOKENS, PageKey, PrefixChain
from pagerunner.memory.rules import GroupRule, joint_hit, missing_keys
from pagerunner.tiers import bounds


def prompt_keys(rules: Iterable[GroupRule], chain: PrefixChain, limit: int) -> list[set[PageKey]]:
    """By group, the keys of all pages that a hit of at most `limit` tokens may take."""
    limit = min(limit, len(chain.hashes) * UNIT_TOKENS)
    stops = [(rule, limit // UNIT_TOKENS if rule.snapshots else rule.complete(limit)) for rule in rules]
    return [set(rule.keys(chain, 0, stop)) for rule, stop in stops]


def hit_keys(rules: Iterable[GroupRule], chain: PrefixChain, hit: int) -> list[list[PageKey]]:
    """By group, the keys of the pages that a hit takes, in the order of tokens."""
    return [rule.keys(chain, *rule.hit_span(hit)) if hit else [] for rule in rules]


def hits_of(
    rules: Sequence[GroupRule], held: Sequence[Mapping[PageKey, int]], chain: PrefixChain, tokens: int
) -> list[int]:
    """Lengths of prefixes of so many tokens at most that a memory can supply, longest first: one, or those of the last snapshots."""
    hits: list[int] = []
    most = bounds.MOST_SNAPSHOTS if any(rule.snapshots for rule in rules) else 1
    while len(hits) < most and (hit := joint_hit(rules, held, chain, hits[-1] - 1 if hits else tokens)):
        hits.append(hit)
    return hits


def pages_beside(
    rules: Iterable[GroupRule], wanted: Iterable[Sequence[PageKey]], tokens: int, takes_snapshot: bool
) -> list[int]:
    """By group, how many pages a request of so many tokens needs beside those `wanted` of its hit. A state is a page of its own beside the snapshot that it
    is a copy of. A prompt that isn't found to its end takes a snapshot there.
    """
    return [
        max(rule.pages_needed(tokens) + (takes_snapshot if rule.snapshots else -len(some)), 0)
        for rule, some in zip(rules, wanted, strict=True)
    ]


def found(keys: Sequence[set[PageKey]], *held: Sequence[Mapping[PageKey, object]]) -> list[set[PageKey]]:
    """By group, those of `keys` that one of the memories has."""
    parts = [[memory[group].keys() & some for memory in held if memory[group]] for group, some in enumerate(keys)]
    return [some[0] if len(some) == 1 else set().union(*some) for some in parts]


def hold(
    held: Iterable[Sequence[Mapping[PageKey, object]]], rules: Sequence[GroupRule], chain: PrefixChain, hit: int
) -> bool:
    """Whether these memories have so many tokens together."""
    return joint_hit(rules, found(prompt_keys(rules, chain, hit), *held), chain, hit) == hit


def together(*held: Sequence[dict[PageKey, int]]) -> list[Mapping[PageKey, int]]:
    """By group, several memories as one. Nothing is copied."""
    groups = [[memory for memory in memories if memory] for memories in zip(*held, strict=True)]
    return [some[0] if len(some) == 1 else ChainMap(*some) for some in groups]


def split(
    keys: Sequence[Sequence[PageKey]], held: Iterable[Collection[PageKey]]
) -> tuple[list[list[PageKey]], list[list[PageKey]]]:
    """By group, those of the keys that are held, and the others, in their order."""
    lacking = list(map(missing_keys, keys, held))
    there = [
        without(some, set(gone)) if len(gone) < len(some) else [] for some, gone in zip(keys, lacking, strict=True)
    ]
    return there, lacking


def within(keys: Iterable[PageKey], held: Collection[PageKey]) -> list[PageKey]:
    """Those that are held, in their order."""
    return list(filter(held.__contains__, keys))


def without(keys: Iterable[PageKey], held: Collection[PageKey]) -> list[PageKey]:
    """The others, in their order."""
    return list(filterfalse(held.__contains__, keys))
