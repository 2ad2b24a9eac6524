"""The two-level pool on its own."""

from __future__ import annotations

import random
import time
import tracemalloc

import pytest

from helpers.recount import recount_pool
from pagerunner.memory import slabs
from pagerunner.memory.prefix import PrefixIndex
from pagerunner.memory.slabs import SlabPool


def make(slabs: int, *per_slab: int, keep: bool = True) -> SlabPool:
    return SlabPool(slabs, per_slab, PrefixIndex(len(per_slab)), keep_cached=keep)


def take(pool: SlabPool, *needs: int) -> list[list[int]]:
    pages = pool.allocate(needs)
    assert pages is not None
    return pages


def publish(pool: SlabPool, group: int, pages: list[int]) -> None:
    for page in pages:
        pool.index.publish(group, f"{group}/{page}".encode(), page)


def test_pages_are_adjacent_and_ascending_in_a_fresh_pool() -> None:
    pool = make(4, 8)
    assert take(pool, 20) == [list(range(20))]
    assert take(pool, 3) == [[20, 21, 22]]
    assert pool.allocate([10]) is None
    assert take(pool, 9) == [list(range(23, 32))]
    recount_pool(pool)


def test_a_long_request_gets_whole_slabs_even_when_others_have_holes() -> None:
    pool = make(8, 8)
    (first,) = take(pool, 64)
    pool.release(0, [page for page in first if page % 8 == 3 or page >= 32])
    (run,) = take(pool, 16)
    assert run[7] - run[0] == 7 and run[15] - run[8] == 7
    recount_pool(pool)


def test_failure_changes_nothing() -> None:
    pool = make(2, 4, 2)
    take(pool, 4, 0)
    assert pool.allocate([1, 3]) is None
    assert pool.used == [4, 0]
    assert take(pool, 0, 2) == [[], [2, 3]]
    recount_pool(pool)


def test_released_pages_are_cached_only_if_published_and_evicted_oldest_first() -> None:
    pool = make(1, 8)
    (pages,) = take(pool, 8)
    publish(pool, 0, pages[:6])
    pool.release(0, pages[::-1])
    assert list(pool.cached[0]) == [5, 4, 3, 2, 1, 0]
    assert take(pool, 2) == [[6, 7]], "free pages go first"
    assert take(pool, 2) == [[4, 5]], "then the tail of what was released"
    assert set(pool.index.keys[0]) == {0, 1, 2, 3}
    pool.share(0, [0])
    assert take(pool, 3) == [[1, 2, 3]] and pool.allocate([1]) is None
    recount_pool(pool)


def test_pages_that_were_touched_are_evicted_last_and_the_first_of_them_first() -> None:
    pool = make(4, 4, 1)
    (pages, _) = take(pool, 12, 1)
    publish(pool, 0, pages)
    pool.release(0, pages)
    pool.share(0, [7])
    pool.touch(0, [1, 0, 7])  # a page in use and two of slab 0
    assert list(pool.cached[0]) == [2, 3, 4, 5, 6, 8, 9, 10, 11, 1, 0]
    assert take(pool, 0, 1)[1] and pool.owner[0] == 0, "slab 0 goes after slab 2, which nobody touched"
    recount_pool(pool)


def test_without_caching_pages_leave_the_index_with_their_last_owner() -> None:
    pool = make(1, 4, keep=False)
    (pages,) = take(pool, 2)
    publish(pool, 0, pages)
    pool.share(0, [0])
    pool.release(0, [1, 0])
    assert pool.index.keys[0] == {0: b"0/0"}
    pool.release(0, [0])
    assert pool.index.keys[0] == {} and pool.free_slabs == 1


def test_a_slab_moves_between_groups_only_when_no_page_of_it_is_in_use() -> None:
    pool = make(2, 4, 1)
    (pages, _) = take(pool, 8, 0)
    publish(pool, 0, pages)
    pool.release(0, pages[:4])
    assert pool.slack([0, 1]) == 0 and pool.slack([0, 2]) == -1 and pool.slack([4, 0]) == 0 and pool.slack([1, 1]) == -1
    assert take(pool, 0, 1) == [[], [0]]
    assert pool.evictions == [4, 0] and pool.owner == {0: 1, 1: 0}
    recount_pool(pool)


def test_a_group_takes_what_was_unused_longest_its_own_page_or_anothers_slab() -> None:
    pool = make(12, 2, 2)
    (a, b) = take(pool, 12, 12)
    publish(pool, 0, a)
    publish(pool, 1, b)
    pool.release(1, b[:4])
    pool.release(0, a)
    take(pool, 1, 0)
    assert pool.evictions == [0, 2], "the other group's slab was older"
    recount_pool(pool)


def test_tight_eviction_leaves_the_slab_that_the_other_group_needs() -> None:
    pool = make(3, 4, 1)
    (pages, _) = take(pool, 12, 0)
    publish(pool, 0, pages)
    pool.release(0, pages[:5])  # slab 0 wholly, then one page of slab 1
    pool.release(0, pages[8:])  # slab 2 wholly
    # Least recently used would take a page of slab 0; only page 4 leaves two slabs for the other group.
    first, second = take(pool, 1, 2)
    assert first == [4] and len(second) == 2
    recount_pool(pool)


def test_compaction_empties_slabs_and_carries_counts_and_content_along() -> None:
    pool = make(4, 4, 1)
    (pages, _) = take(pool, 16, 0)
    publish(pool, 0, pages)
    pool.share(0, [13])
    pool.release(0, [page for page in pages if page not in (0, 5, 6, 9, 13)] + [])
    assert pool.slack([0, 1]) == -1
    moves = pool.gather([0, 2], most=100)
    assert len(moves) == 2, "one page of each of two slabs"
    assert pool.slack([0, 2]) == 0 and pool.gather([0, 2], most=100) == []
    for group, source, target, holders in moves:
        assert group == 0 and source not in pool.refs[0]
        assert holders == pool.refs[0][target] == (2 if source == 13 else 1)
        assert pool.index.keys[0][target] == f"0/{source}".encode()
    recount_pool(pool)
    assert take(pool, 0, 2)[1]
    recount_pool(pool)


@pytest.mark.parametrize("seed", range(6))
def test_the_slack_is_exact_over_random_operations(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits by the formula can be had, what doesn't is refused, and nothing is lost."""
    generator = random.Random(seed)
    monkeypatch.setattr(slabs, "_LISTED", generator.choice([4, 7, 4096]))
    pool = make(20, *generator.choice([(6,), (1,), (6, 1), (4, 7), (5, 1, 3), (31,)]))
    groups = len(pool.per_slab)
    held: list[list[list[int]]] = []
    for _ in range(3000):
        if held and generator.random() < 0.5:
            for group, pages in enumerate(held.pop(generator.randrange(len(held)))):
                if generator.random() < 0.5:
                    publish(pool, group, [page for page in pages if page not in pool.index.keys[group]])
                pool.release(group, pages[::-1])
        else:
            needs = [generator.choice([0, 1, 1, 3, 17]) for _ in range(groups)]
            slack = pool.slack(needs)
            pages = pool.allocate(needs)
            assert (pages is None) == (slack < 0)
            if pages is not None:
                assert [len(part) for part in pages] == needs and all(part == sorted(set(part)) for part in pages)
                held.append(pages)
        if generator.random() < 0.05:
            recount_pool(pool)
    for lists in held:
        for group, pages in enumerate(lists):
            pool.release(group, pages)
    pool.evict_all()
    recount_pool(pool)
    assert pool.free_slabs == 20


@pytest.mark.parametrize("shape", [(10**9, 1), (10**9, 1, 5), (3, 10**9 + 7)])
def test_a_pool_is_made_at_once_however_many_pages_it_has(shape: tuple[int, ...]) -> None:
    """Free pages cost neither time nor memory: only what is in use is written down."""
    tracemalloc.start()
    start = time.thread_time()
    pool = make(*shape)
    pages = pool.allocate([10_000] * (len(shape) - 1))
    spent = time.thread_time() - start
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert pages is not None and pages[0] == list(range(10_000))
    assert spent < 2.0 and peak < 20_000_000
    for group, taken in enumerate(pages):
        pool.release(group, taken)
    assert pool.free_slabs == pool.num_slabs
