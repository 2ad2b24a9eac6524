"""How long sampled pages stay: what is counted, and that following pages changes nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from helpers.effort import by_days
from helpers.memory_bench import Bench
from helpers.plans import one_group
from helpers.recount import recount
from pagerunner.memory.grant import Grant
from pagerunner.memory.manager import KVManager
from pagerunner.memory.residency import BOUNDS, PageSampler, SecondsCount, TimedPool
from pagerunner.memory.slabs import SlabPool

TOKENS = list(range(1000))


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Iterator[Clock]:
    yield Clock()


def run(manager: KVManager, tokens: list[int], hit_limit: int | None = None) -> Grant:
    """Compute a prompt, and give its pages back."""
    grant = manager.admit(0, manager.chain(), tokens, len(tokens) - 1 if hit_limit is None else hit_limit)
    assert grant is not None and manager.grow(grant, grant.cached_tokens, len(tokens))
    manager.publish(grant, tokens, len(tokens))
    manager.release(grant)
    return grant


def counted(times: SecondsCount) -> dict[float, int]:
    """Non-zero counts by their upper bound."""
    return {bound: count for bound, count in zip((*BOUNDS, float("inf")), times.counts, strict=True) if count}


def test_an_eviction_counts_the_pages_life_its_idle_time_and_the_gaps_between_its_uses(clock: Clock) -> None:
    manager = KVManager(one_group(2), sampler=PageSampler(1.0, clock))
    run(manager, TOKENS[:17])  # one page becomes cache
    for gap in (3.0, 8.0, 40.0):
        clock.now += gap
        assert run(manager, TOKENS[:17]).cached_tokens == 16
    clock.now += 500.0
    assert manager.sampler is not None
    assert not any(manager.sampler.residency().lifetime.counts), "nothing was evicted"
    run(manager, TOKENS[500:532])
    found = manager.sampler.residency()
    assert counted(found.lifetime) == {600: 1} and found.lifetime.total == 551
    assert counted(found.idle_before_evict) == {600: 1} and found.idle_before_evict.total == 500
    assert counted(found.reuse_gap) == {10: 1, 60: 1} and found.reuse_gap.total == 48


def test_an_admission_that_fails_is_no_use(clock: Clock) -> None:
    manager = KVManager(one_group(5), sampler=PageSampler(1.0, clock))
    run(manager, TOKENS[:33])
    runs = manager.admit(0, manager.chain("other"), TOKENS[:32], 0)
    assert runs is not None and manager.grow(runs, 0, 32)
    clock.now += 7
    assert manager.admit(1, manager.chain(), TOKENS[:80], 79) is None
    clock.now += 7
    manager.release(runs)
    run(manager, TOKENS[500:580])
    assert manager.sampler is not None
    assert manager.sampler.residency().idle_before_evict.total == 2 * 14


def test_counts_go_on_with_a_new_manager(clock: Clock) -> None:
    earlier, manager = (KVManager(one_group(2), sampler=PageSampler(1.0, clock)) for _ in range(2))
    run(earlier, TOKENS[:17])
    clock.now += 5.0
    run(earlier, TOKENS[500:532])
    manager.count_on(earlier)
    assert manager.sampler is not None
    assert manager.sampler.residency().lifetime.total == 5
    run(manager, TOKENS[:17])
    clock.now += 7.0
    run(manager, TOKENS[500:532])
    assert manager.sampler.residency().lifetime.total == 12


def test_resetting_the_cache_is_no_eviction(clock: Clock) -> None:
    manager = KVManager(one_group(4), sampler=PageSampler(1.0, clock))
    run(manager, TOKENS[:64])
    manager.reset_prefix_cache()
    assert manager.pool.evictions == [0]
    run(manager, TOKENS[500:564])
    assert manager.sampler is not None and not any(manager.sampler.residency().lifetime.counts)


def test_a_snapshot_that_a_later_one_replaces_is_no_eviction() -> None:
    """Nobody lacked room. A request counted one every 64 tokens, as if memory were short."""
    sampler = PageSampler(1.0)
    bench = Bench({"full": (16, 1), "recurrent": (16, 1)}, megabytes=1, batched=64, sampler=sampler)
    bench.add("a", TOKENS[:20], 300)
    replaced = 0
    while bench.scheduler.has_work:
        before = set(bench.manager.index.pages[1])
        bench.step()
        replaced += len(before - set(bench.manager.index.pages[1]))
    assert replaced >= 3 and bench.manager.pool.evictions == [0, 0]
    assert not any(sampler.residency().lifetime.counts)


def test_a_snapshot_of_the_counts_does_not_change(clock: Clock) -> None:
    manager = KVManager(one_group(4), sampler=PageSampler(1.0, clock))
    assert manager.sampler is not None
    before = manager.sampler.residency()
    for start in (0, 100, 200):
        run(manager, TOKENS[start : start + 64])
    assert not any(before.lifetime.counts) and sum(manager.sampler.residency().lifetime.counts) == 8


@pytest.mark.parametrize("share", [0.01, 0.3])
def test_the_share_is_kept_to(share: float) -> None:
    sampler = PageSampler(share)
    for first in range(0, 200_000, 7):
        sampler.allocated(0, range(first, first + 7))
    expected = 200_000 * share
    assert abs(len(sampler.stays[0]) - expected) < 6 * expected**0.5


def test_without_a_sampler_the_pool_is_the_plain_one() -> None:
    assert type(KVManager(one_group(4)).pool) is SlabPool
    assert type(KVManager(one_group(4), sampler=PageSampler(0.5)).pool) is TimedPool


@pytest.mark.parametrize(
    ("kinds", "caching"),
    by_days(
        [
            {"full": (16, 1)},
            {"full": (16, 2), "window-40": (16, 1)},
            {"full": (16, 1), "recurrent": (16, 4)},
            {"window-5": (4, 1), "latent-4": (16, 1), "recurrent": (16, 2)},
        ],
        [True, False],
    ),
)
def test_every_page_is_followed_until_its_eviction_or_its_end(kinds: dict[str, tuple[int, int]], caching: bool) -> None:
    sampler = PageSampler(1.0)
    bench = Bench(kinds, megabytes=0.06, batched=64, enable_prefix_caching=caching, sampler=sampler)
    pool = bench.manager.pool
    source = random.Random(3)
    for number in range(120):
        length = source.randrange(1, min(300, bench.plan.max_model_len - 40))
        text = [source.randrange(2) + 5] * length
        bench.add(str(number), text, source.randrange(1, 40), parent_id="f" if number % 5 == 0 else "", seed=number)
        for _ in range(source.randrange(4)):
            if bench.scheduler.has_work:
                bench.step()
                for group, (refs, cached) in enumerate(zip(pool.refs, pool.cached, strict=True)):
                    assert sampler.stays[group].keys() == refs.keys() | cached.keys()
    while bench.scheduler.has_work:
        bench.step()
    found = sampler.residency()
    assert sum(found.lifetime.counts) == sum(found.idle_before_evict.counts) == sum(pool.evictions)
    assert not caching or sum(pool.evictions) > 20
    recount(bench.manager)


def test_queries_of_a_group_are_what_it_was_looked_up_for() -> None:
    bench = Bench({"full": (16, 1), "window-40": (16, 1)}, megabytes=0.5, batched=512)
    prompt = [number % 7 for number in range(200)]
    for name, text in (("a", prompt), ("b", prompt), ("c", [*prompt[:100], *[9] * 60])):
        bench.add(name, text)
        while bench.scheduler.has_work:
            bench.step()
    stats = bench.scheduler.stats()
    full, window = sorted(stats.groups, key=lambda group: group.name)
    assert (full.name, window.name) == ("full", "window-40")
    assert full.queries_total == stats.prefix_queries_total == 200 + 200 + 160
    assert full.hits_total == window.queries_total == 0 + 192 + 96
    assert 0 < window.hits_total < window.queries_total, "nobody keeps the window before token 96"
