"""Chained hashes and the index."""

from __future__ import annotations

import tracemalloc
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagerunner.memory import prefix
from pagerunner.memory.prefix import UNIT_TOKENS, PrefixChain, PrefixIndex, RecentPrompts, chain_seed
from pagerunner.memory.rules import FullRule, joint_hit

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=100)


def hashes(tokens: list[int], seed: bytes = b"") -> list[bytes]:
    chain = PrefixChain(seed or chain_seed())
    chain.cover(tokens, len(tokens))
    return chain.hashes


@given(TOKENS, st.lists(st.integers(0, 100), max_size=5))
def test_hashing_in_pieces_is_hashing_at_once(tokens: list[int], cuts: list[int]) -> None:
    chain = PrefixChain(chain_seed())
    for cut in sorted(cuts):
        chain.cover(tokens, cut)
        assert len(chain.hashes) == min(cut, len(tokens)) // 16
    chain.cover(tokens, len(tokens))
    assert chain.hashes == hashes(tokens)
    assert all(len(entry) == 32 for entry in chain.hashes)


@given(TOKENS, TOKENS)
def test_hashes_are_equal_exactly_for_equal_prefixes(left: list[int], right: list[int]) -> None:
    for unit, (a, b) in enumerate(zip(hashes(left), hashes(right), strict=False)):
        assert (a == b) == (left[: unit * 16 + 16] == right[: unit * 16 + 16])


def test_an_early_difference_changes_every_later_hash() -> None:
    assert not set(hashes([0] * 64)) & set(hashes([1] + [0] * 63))
    assert len(set(hashes([0] * 64))) == 4, "equal units at different places differ"


def test_salt_and_parent_separate_and_do_not_run_into_each_other() -> None:
    seeds = [
        chain_seed(),
        chain_seed("a"),
        chain_seed("", "a"),
        chain_seed("a", "b"),
        chain_seed("ab"),
    ]
    assert len(set(seeds)) == len(seeds)
    assert chain_seed("a", "b") == chain_seed("a", "b")


def test_the_hash_is_pinned_across_machines_and_versions() -> None:
    pinned = "8c999b4b7ee8debe3e3e03279e892c18cdc2395b391b76a2339200bc6d37f9aa"
    assert hashes(list(range(32)))[-1].hex() == pinned


def test_the_first_of_two_equal_pages_stays_and_the_second_is_not_indexed() -> None:
    index = PrefixIndex(1)
    index.publish(0, b"k", 3)
    index.publish(0, b"k", 4)
    assert index.pages[0] == {b"k": 3} and index.keys[0] == {3: b"k"}
    index.forget(0, 4)
    assert index.pages[0] == {b"k": 3}
    index.move(0, 3, 9)
    assert index.pages[0] == {b"k": 9} and index.keys[0] == {9: b"k"}
    index.forget(0, 9)
    assert index.pages[0] == {} and index.keys[0] == {}


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32, 48])
def test_a_hit_is_whole_cells_up_to_the_first_missing_page(size: int) -> None:
    rule, tokens = FullRule(size), list(range(200))
    chain = PrefixChain(chain_seed())
    chain.cover(tokens, 200)
    cell = max(size, 16)
    keys = [rule.key(chain, page) for page in range(rule.complete(200))]
    assert len(set(keys)) == len(keys) == 200 // cell * cell // size
    index = {key: page for page, key in enumerate(keys)}
    assert rule.longest_hit(index, chain, 199) == 199 // cell * cell
    assert rule.longest_hit(index, chain, cell) == cell
    assert rule.longest_hit(index, chain, cell - 1) == 0
    del index[keys[-1]]
    assert rule.longest_hit(index, chain, 199) == (200 // cell - 1) * cell
    del index[keys[0]]
    assert rule.longest_hit(index, chain, 199) == 0


def test_groups_agree_on_the_longest_common_hit() -> None:
    rules = [FullRule(16), FullRule(48), FullRule(32)]
    chain = PrefixChain(chain_seed())
    chain.cover(list(range(200)), 200)
    full = [{rule.key(chain, page): page for page in range(rule.complete(200))} for rule in rules]
    assert joint_hit(rules, full, chain, 199) == 192
    assert joint_hit(rules, full, chain, 190) == 96
    assert joint_hit(rules, [full[0], full[1], {}], chain, 199) == 0
    assert joint_hit(rules[:1], full[:1], chain, 199) == 192


@given(
    st.lists(
        st.tuples(st.sampled_from(["", "tenant"]), st.lists(st.integers(0, 2), max_size=12), st.integers(0, 40)),
        min_size=1,
        max_size=30,
    )
)
def test_what_other_prompts_have_hashed_changes_no_hash(prompts: list[tuple[str, list[int], int]]) -> None:
    """Prompts are made of units that come again, cut anywhere, and may go on after that."""
    recent = RecentPrompts()
    recent.KEPT_TOKENS = 250
    for salt, units, cut in prompts:
        tokens = [unit * 100 + place for unit in units for place in range(UNIT_TOKENS)]
        tokens = tokens[: max(len(tokens) - cut, 0)]
        chain, alone = PrefixChain(chain_seed(salt), recent), PrefixChain(chain_seed(salt))
        for some in (chain, alone):
            some.cover(tokens, len(tokens))
        assert chain.hashes == alone.hashes
        for some in (chain, alone):
            some.cover([*tokens, *range(50)], len(tokens) + 50)
        assert chain.hashes == alone.hashes


def test_a_prompt_that_begins_as_another_hashes_only_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    recent, seed = RecentPrompts(), chain_seed()
    PrefixChain(seed, recent).cover(list(range(800)), 800)
    hashed: list[bytes] = []
    monkeypatch.setattr(prefix, "blake2b", lambda data, **options: hashed.append(data) or blake2b(data, **options))
    PrefixChain(seed, recent).cover([*range(400), *range(100)], 500)
    assert len(hashed) == 500 // UNIT_TOKENS - 400 // UNIT_TOKENS


def test_conversations_that_begin_alike_hash_only_what_they_go_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred of them have 512 tokens in common, and come a second time."""
    recent, seed = RecentPrompts(), chain_seed()
    talks = [[*range(512), *range(1_000 * one, 1_000 * one + 688)] for one in range(1, 101)]
    for talk in talks:
        PrefixChain(seed, recent).cover(talk, len(talk))
    hashed: list[bytes] = []
    monkeypatch.setattr(prefix, "blake2b", lambda data, **options: hashed.append(data) or blake2b(data, **options))
    for talk in talks:
        PrefixChain(seed, recent).cover([*talk, *range(160)], 1_360)
    assert len(hashed) == 100 * 10


def test_no_more_prompts_are_remembered_than_have_so_many_tokens() -> None:
    recent, seed = RecentPrompts(), chain_seed()
    recent.KEPT_TOKENS = 10_000
    for number in range(50):
        PrefixChain(seed, recent).cover([number] * 1_600, 1_600)
    kept = recent._prompts.values()
    assert sum(len(data) // 4 + recent.OWN_TOKENS for data, _ in kept) == recent._tokens == 6 * 1_636
    assert {data[0] for data, _ in kept} == {47, 48, 49}, "those that came last"


@pytest.mark.parametrize("tokens", [16, 48, 1_008])
def test_remembered_prompts_take_9_bytes_a_token_however_short_they_are(tokens: int) -> None:
    recent, seed = RecentPrompts(), chain_seed()
    recent.KEPT_TOKENS = 2**16
    tracemalloc.start()
    try:
        for number in range(2**16 // tokens):
            PrefixChain(seed, recent).cover([number] * tokens, tokens)
        assert 0.5 < tracemalloc.get_traced_memory()[0] / (9 * 2**16) < 1.15
    finally:
        tracemalloc.stop()
