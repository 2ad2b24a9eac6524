"""Rules of every kind against a model that says, position by position, what is read."""

from __future__ import annotations

import random
from collections import ChainMap
from collections.abc import Mapping

import pytest

from pagerunner.errors import ConfigError
from pagerunner.memory.prefix import PageKey, PrefixChain, chain_seed
from pagerunner.memory.rules import (
    ChunkedRule,
    FullRule,
    GroupRule,
    LatentRule,
    RecurrentRule,
    WindowRule,
    joint_hit,
    make_rule,
)
from pagerunner.memory.specs import ChunkedKV, FullKV, LatentKV, RecurrentState, WindowKV

SIZES = [1, 4, 16, 48]
REACHES = [1, 2, 15, 16, 17, 40, 100]


def reads(rule: GroupRule, position: int) -> int:
    """The first position that `position` reads."""
    if isinstance(rule, WindowRule):
        return max(position - rule.reach + 1, 0)
    return position // rule.reach * rule.reach if isinstance(rule, ChunkedRule) else 0


def rules() -> list[WindowRule | ChunkedRule | FullRule]:
    return [make(size, reach, 64) for make in (WindowRule, ChunkedRule) for size in SIZES for reach in REACHES] + [
        FullRule(size) for size in SIZES
    ]


def chain_of(tokens: int) -> PrefixChain:
    chain = PrefixChain(chain_seed())
    chain.cover(list(range(tokens)), tokens)
    return chain


@pytest.mark.parametrize("rule", rules(), ids=str)
def test_span_and_tail_cover_exactly_what_is_read(rule: WindowRule | ChunkedRule | FullRule) -> None:
    size = rule.page_tokens
    for start in range(0, 200, 3):
        for length in (1, 2, 16, 50, 64):
            end = start + length
            assert rule.span(start, end) == (reads(rule, start) // size, -(-end // size))
            assert rule.tail(end) <= reads(rule, end) // size
            hit = end // rule.cell * rule.cell
            kept = min(hit, end - 1) if isinstance(rule, WindowRule) else hit  # a sibling computes end - 1 again
            assert rule.tail(end) == reads(rule, kept) // size
            assert rule.tail(end) * size <= end


@pytest.mark.parametrize("rule", rules(), ids=str)
def test_pages_needed_is_enough_for_every_short_chunk_and_reached(rule: WindowRule | ChunkedRule | FullRule) -> None:
    step, total = 64, 400
    most = 0
    for start in range(total):
        first, stop = rule.span(start, min(start + step, total))
        most = max(most, stop - first)
        assert stop - first <= rule.table_width(total)
    assert most <= rule.pages_needed(total) <= most + 1
    assert [rule.pages_needed(n) for n in range(1, 400)] == sorted(rule.pages_needed(n) for n in range(1, 400))
    assert rule.pages_needed(1) == 1


@pytest.mark.parametrize("kind", [WindowRule, ChunkedRule])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("reach", REACHES)
def test_a_whole_step_of_any_length_needs_what_was_promised(
    kind: type[WindowRule] | type[ChunkedRule], size: int, reach: int
) -> None:
    """The pages read before the step and its tail, all held while it runs."""
    step, total = 300, 400
    rule = kind(size, reach, step, whole_steps=True)
    assert rule.pages_needed(total) >= kind(size, reach, 1).pages_needed(total) and not rule.shortens
    for start in range(0, total, 3):
        for end in range(start + 1, min(start + step, total) + 1, 7):
            first, stop = rule.span(start, end)
            before = -(-start // size)
            held = (before - first) + stop - max(min(rule.tail(end), stop), before)
            assert held <= rule.pages_needed(total)
            assert held <= rule.pages_needed(end)


def test_a_long_chunk_needs_no_more_pages_than_a_short_one() -> None:
    assert WindowRule(16, 1024, 8192).pages_needed(131_072) == -(-(1024 + 254) // 16) + 1
    assert WindowRule(16, 1024, 8192).table_width(131_072) == (1024 + 8192) // 16 + 1
    assert WindowRule(16, 1024, 64).pages_needed(131_072) < WindowRule(16, 1024, 8192).pages_needed(131_072)


def longest_by_hand(rule: GroupRule, index: dict[PageKey, int], chain: PrefixChain, limit: int) -> int:
    for hit in range(limit // rule.cell * rule.cell, 0, -rule.cell):
        first, stop = reads(rule, hit) // rule.page_tokens, hit // rule.page_tokens  # type: ignore[attr-defined]
        if all(rule.key(chain, page) in index for page in range(first, stop)):
            return hit
    return 0


@pytest.mark.parametrize("rule", rules(), ids=str)
def test_longest_hit_of_random_indexes(rule: WindowRule | ChunkedRule | FullRule) -> None:
    generator = random.Random(str(rule))
    chain = chain_of(400)
    pages = rule.complete(400)
    for _ in range(60):
        missing = generator.choice([0, 1, 2, pages // 3])
        index = {rule.key(chain, page): page for page in range(pages)}
        for page in generator.sample(range(pages), missing):
            del index[rule.key(chain, page)]
        limit = generator.randrange(1, 401)
        hit = longest_by_hand(rule, index, chain, limit)
        assert rule.longest_hit(index, chain, limit) == hit
        assert rule.longest_hit(divided(generator, index), chain, limit) == hit


def test_a_recurrent_hit_is_the_last_snapshot() -> None:
    rule, chain = RecurrentRule(), chain_of(400)
    index = {chain.hashes[at // 16 - 1]: at for at in (16, 160, 320)}
    for limit, hit in ((399, 320), (320, 320), (319, 160), (100, 16), (15, 0)):
        assert rule.longest_hit(index, chain, limit) == hit
    assert rule.key(chain, rule.hit_span(160)[0]) == chain.hashes[9]


def divided(generator: random.Random, index: dict[PageKey, int]) -> ChainMap[PageKey, int]:
    """The same pages in three memories, some of them in two."""
    parts: list[dict[PageKey, int]] = [{}, {}, {}]
    for key, page in index.items():
        for part in generator.sample(parts, generator.choice([1, 1, 2])):
            part[key] = page
    return ChainMap(*parts)


def test_a_joint_hit_of_random_indexes_asks_every_group_once_more_at_most() -> None:
    class Counted(FullRule):
        asked = 0

        def longest_hit(self, index: Mapping[PageKey, int], chain: PrefixChain, limit: int) -> int:
            Counted.asked += 1
            return super().longest_hit(index, chain, limit)

    generator, chain = random.Random(4), chain_of(400)
    group = (RecurrentRule(), Counted(16), WindowRule(32, 40, 64))
    for _ in range(200):
        full = {group[1].key(chain, page): page for page in range(generator.randrange(26))}
        window = {group[2].key(chain, page): page for page in range(12) if generator.random() < 0.8}
        state = {key: 0 for key in chain.hashes if generator.random() < 0.4}
        indexes = [divided(generator, index) for index in (state, full, window)]
        limit = generator.randrange(401)
        fits = [
            hit
            for hit in range(0, limit + 1, 16)
            if all(rule.longest_hit(index, chain, hit) == hit for rule, index in zip(group, indexes, strict=True))
        ]
        assert joint_hit(group, indexes, chain, limit) == fits[-1]
        known = generator.randrange(401)
        least = joint_hit(group, indexes, chain, limit, known)
        assert least == fits[-1] or fits[-1] <= least <= known
    Counted.asked = 0
    pair = ({chain.hashes[19]: 0}, {group[1].key(chain, page): page for page in range(25)})
    assert joint_hit(group[:2], pair, chain, 399) == 320
    assert Counted.asked == 1


def test_a_joint_hit_is_the_longest_that_every_group_has() -> None:
    chain = chain_of(400)
    group = (FullRule(32), WindowRule(16, 40, 64), RecurrentRule())
    full = {group[0].key(chain, page): page for page in range(12)}
    window = {group[1].key(chain, page): page for page in range(25) if page != 15}
    state = {chain.hashes[at // 16 - 1]: at for at in (64, 192, 272, 336)}
    assert joint_hit(group, (full, window, state), chain, 399) == 192  # 336 is no page end of 32 tokens
    state[chain.hashes[352 // 16 - 1]] = 352
    assert joint_hit(group, (full, window, state), chain, 399) == 352
    assert joint_hit(group, (full, {}, state), chain, 399) == 0


def test_a_latent_page_holds_whole_slots() -> None:
    assert LatentRule(128, 4).pages_needed(1000) == 8
    with pytest.raises(
        ConfigError, match="A page of 48 tokens doesn't hold whole slots of 128 tokens.*block_size of 384"
    ):
        LatentRule(48, 128)


def test_every_spec_has_its_rule() -> None:
    kv = {"num_kv_heads": 1, "head_dim": 8, "dtype": "bfloat16"}
    assert make_rule(FullKV(**kv), 16, 64) == FullRule(16)
    assert make_rule(WindowKV(**kv, window=100), 16, 64) == WindowRule(16, 100, 64)
    assert make_rule(ChunkedKV(**kv, chunk=100), 16, 64) == ChunkedRule(16, 100, 64)
    assert make_rule(LatentKV(8, 8, "bfloat16", compression=4), 16, 64) == LatentRule(16, 4)
    assert make_rule(LatentKV(8, 8, "bfloat16", window=9), 16, 64) == WindowRule(16, 9, 64)
    assert make_rule(RecurrentState(((2, 2),), ("float32",)), 16, 64) == RecurrentRule()
