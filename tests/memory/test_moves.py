"""Moves of pages: no more than are needed, no more in a step than allowed, and nobody is preempted for want of them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from helpers.memory_bench import Bench, tokens
from helpers.plans import mixed, two_groups
from helpers.recount import recount, recount_pool
from pagerunner.memory import moves
from pagerunner.memory.grant import Grant
from pagerunner.memory.manager import KVManager

KINDS = {"full": (16, 1), "window-40": (16, 3), "chunked-64": (16, 2)}


def test_one_slab_is_emptied_where_one_is_needed() -> None:
    plan = two_groups(12, (16, 16), (1, 3), slab_bytes=4096)
    manager = KVManager(plan, enable_prefix_caching=False)
    per_slab = plan.groups[0].pages_per_slab
    pages = manager.pool.allocate([12 * per_slab, 0])
    assert pages is not None
    for slab in range(12):  # slab n keeps n + 1 pages, at most all but one
        first = slab * per_slab
        manager.pool.release(0, pages[0][first + min(slab + 1, per_slab - 1) : first + per_slab])
    assert manager.pool.slack([0, 1]) == -1
    made = manager.pool.gather([0, 1], most=1000)
    assert len(made) == 1 and made[0][1] == 0, "the only page of slab 0"
    recount_pool(manager.pool)


@pytest.mark.parametrize("limit", [1, 3, moves.MOVES_PER_STEP])
def test_no_step_moves_more_than_it_may_and_all_is_moved_in_the_end(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "MOVES_PER_STEP", limit)
    generator = random.Random(limit)
    manager = KVManager(mixed(KINDS, 1 << 18, batched=256, model_max_len=400))
    running: list[Grant] = []
    most = 0
    for step in range(1_500):
        manager.begin_step()
        prompt = tokens(generator.randrange(1, 400), generator.randrange(6) * 1000)
        grant = manager.admit(step, manager.chain(), prompt, len(prompt) - 1)
        if grant is not None:
            assert manager.grow(grant, grant.cached_tokens, len(prompt))
            manager.publish(grant, prompt, len(prompt))
            running.append(grant)
        elif not manager.moves_unfinished and running:
            manager.release(running.pop(generator.randrange(len(running))))
        manager.take_table_writes()
        manager.end_plan([])
        manager.take_fresh()
        most = max(most, len(manager.take_copies()))
        if step % 50 == 0:
            recount(manager)
    assert 0 < most <= limit
    for _ in range(2_000):
        manager.begin_step()
    assert manager.pool.fragmentation <= moves.UNTIDY


def test_a_request_waits_for_moves_and_nobody_is_preempted_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same pool and requests, with all moves at once and with two a step: more steps, but not more preemptions."""
    preemptions = []
    reasons = set()
    for limit in (1_000, 2):
        monkeypatch.setattr(moves, "MOVES_PER_STEP", limit)
        bench = Bench(KINDS, 0.25, 256)
        generator = random.Random(3)
        for number in range(40):
            bench.add(str(number), tokens(generator.randrange(20, 300), number * 500), generator.randrange(1, 60))
        while bench.scheduler.has_work:
            bench.step()
            reasons.add((limit, bench.scheduler.stats().waiting_for))
        assert all(len(plan.copies) <= limit for plan in bench.plans)
        preemptions.append(bench.scheduler.stats().preemptions_total)
        recount(bench.manager)
    assert preemptions[1] <= preemptions[0] + 2
    assert (2, "moves") in reasons and (1_000, "moves") not in reasons


def test_a_page_that_no_table_has_is_moved_without_a_look_through_tables() -> None:
    """An adapter's page, or a snapshot. Of 256 requests of 32,768 tokens there are half a million pages in tables, which took 10 ms for each page moved."""

    class Unread(list[int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("each page is looked at")

    manager = KVManager(two_groups(12, (16, 16), (1, 3), slab_bytes=4096))
    grant = manager.admit(0, manager.chain(), list(range(64)), 0)
    assert grant is not None and manager.grow(grant, 0, 64)
    grant.pages = list(map(Unread, grant.pages))
    pages = manager.pool.allocate([1, 1])
    assert pages is not None
    for group, (page,) in enumerate(pages):
        assert manager._moves.holders(group, page, 1) == []
        assert manager._moves.holders(group, grant.pages[group][1], 1) == [(grant, 1)]
