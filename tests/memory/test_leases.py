"""Leases: pages of transfers stay where they are, with whom they are, and nobody reads them too early."""

from __future__ import annotations

import pytest

from helpers.memory_bench import Bench, tokens
from helpers.plans import one_group, two_groups
from helpers.recount import recount, recount_pool
from pagerunner.memory.grant import Grant
from pagerunner.memory.leases import Lease
from pagerunner.memory.manager import KVManager
from pagerunner.memory.prefix import PageKey

TOKENS = list(range(1000))
FULL = {"full": (16, 1)}


def run(manager: KVManager, prompt: list[int], slot: int = 0) -> Grant:
    """Admit a prompt and compute it."""
    grant = manager.admit(slot, manager.chain(), prompt, len(prompt) - 1)
    assert grant is not None and manager.grow(grant, grant.cached_tokens, len(prompt))
    manager.publish(grant, prompt, len(prompt))
    return grant


def keys_of(manager: KVManager, prompt: list[int]) -> list[list[PageKey]]:
    """By group, the keys of a prompt's complete pages."""
    chain = manager.chain()
    chain.cover(prompt, len(prompt))
    rules = [group.rule for group in manager.plan.groups]
    return [rule.keys(chain, 0, rule.complete(len(prompt))) for rule in rules]


def begin(manager: KVManager, what: str, prompt: list[int]) -> Lease | None:
    keys = keys_of(manager, prompt)
    return getattr(manager, what)(keys, [list(range(len(part))) for part in keys])


def begun(manager: KVManager, what: str, prompt: list[int]) -> Lease:
    lease = begin(manager, what, prompt)
    assert lease is not None
    recount(manager)
    return lease


def test_a_page_that_is_stored_outlives_its_request_and_is_cache_only_when_the_transfer_ends() -> None:
    manager = KVManager(one_group(6))
    grant = run(manager, TOKENS[:64])
    lease = begun(manager, "store", TOKENS[:64])
    assert lease.pages == grant.pages and lease.state == "held"
    manager.release(grant)
    assert manager.pool.used == [4] and manager.admit(1, manager.chain("x"), TOKENS[:48], 0) is None
    assert run(manager, TOKENS[:65]).pages[0][:4] == lease.pages[0], "a held page may be found and shared"
    version = manager.version
    assert manager.end_transfer(lease.number, well=True) == lease.keys
    assert manager.version != version and lease.state == "ended"
    recount(manager)


def test_the_plan_names_the_bytes_of_both_memories() -> None:
    plan = two_groups(40)
    manager = KVManager(plan)
    grant = run(manager, TOKENS[:16])
    keys = keys_of(manager, TOKENS[:16])
    assert [len(part) for part in keys] == [1, 4]
    lease = manager.store(keys, [[70], [80, 81, 82, 83]])
    assert lease is not None and manager.transfers_wait
    (transfer,) = manager.take_transfers()
    offsets = [(group, plan.page_offset(group, page)) for group in (0, 1) for page in grant.pages[group]]
    assert (transfer.number, transfer.loads) == (lease.number, False)
    assert list(transfer.pages) == [(*at, place) for at, place in zip(offsets, (70, 80, 81, 82, 83), strict=True)]
    assert not manager.transfers_wait and manager.take_transfers() == []


def test_a_transfer_that_ends_before_a_plan_was_made_is_in_none() -> None:
    manager = KVManager(one_group(6))
    run(manager, TOKENS[:64])
    lease = begun(manager, "store", TOKENS[:64])
    manager.end_transfer(lease.number, well=False)
    assert not manager.transfers_wait and manager.take_transfers() == []


def test_nothing_is_stored_that_cannot_be_found_nor_where_running_requests_were_promised_the_pages() -> None:
    manager = KVManager(one_group(6))
    assert begin(manager, "store", TOKENS[:64]) is None
    manager.release(run(manager, TOKENS[:64]))
    running = manager.admit(0, manager.chain("x"), TOKENS[:80], 0)
    assert running is not None
    assert begin(manager, "store", TOKENS[:64]) is None and begin(manager, "load", TOKENS[500:532]) is None
    assert begun(manager, "store", TOKENS[:16]).pages != [[]], "one page is left over"
    assert manager.grow(running, 0, 80) == 80
    recount(manager)


def test_admission_waits_for_pages_that_make_its_hit_longer_and_for_no_others() -> None:
    manager = KVManager(one_group(20))
    lease = begun(manager, "load", TOKENS[:64])
    assert begin(manager, "load", TOKENS[:64]) is None, "they are on their way"
    assert manager.admit(0, manager.chain(), TOKENS[:80], 79) is None and manager.awaits == "transfer"
    other = manager.admit(0, manager.chain(), TOKENS[300:380], 79)
    assert other is not None and manager.awaits == ""
    manager.end_transfer(lease.number, well=True)
    grant = manager.admit(1, manager.chain(), TOKENS[:80], 79)
    assert grant is not None and grant.cached_tokens == 64 and grant.pages == lease.pages
    recount(manager)


@pytest.mark.parametrize("doubtful", [False, True])
def test_of_a_failed_load_nothing_is_found_and_its_pages_come_back_when_it_can_write_no_more(doubtful: bool) -> None:
    manager = KVManager(one_group(8))
    lease = begun(manager, "load", TOKENS[:64])
    if doubtful:
        manager.quarantine(lease.number)
        recount(manager)
        grant = manager.admit(0, manager.chain(), TOKENS[:64], 63)
        assert grant is not None and grant.cached_tokens == 0, "nobody waits for it"
        assert manager.grow(grant, 0, 64) and not set(grant.pages[0]) & set(lease.pages[0])
        manager.release(grant)
        assert manager.admit(0, manager.chain("x"), TOKENS[:80], 0) is None, "4 of 8 pages are nobody's"
    manager.end_transfer(lease.number, well=False)
    assert manager.admit(0, manager.chain("x"), TOKENS[:128], 0) is not None
    recount(manager)


def test_pages_of_a_failed_store_are_found_and_nothing_is_vouched_for_of_what_was_quarantined() -> None:
    manager = KVManager(one_group(20))
    manager.release(run(manager, TOKENS[:64]))
    store, load = begun(manager, "store", TOKENS[:64]), begun(manager, "load", TOKENS[200:264])
    for lease in (store, load):
        manager.quarantine(lease.number)
    grant = manager.admit(0, manager.chain(), TOKENS[:80], 79)
    assert grant is not None and grant.cached_tokens == 64 and grant.pages[0][:4] == store.pages[0]
    for lease in (store, load):
        assert manager.end_transfer(lease.number, well=True) == [[]]
    assert not manager.index.pages[0].keys() & set(load.keys[0])
    recount(manager)


def test_what_arrives_after_a_reset_or_is_distrusted_is_not_published() -> None:
    manager = KVManager(one_group(20))
    first = begun(manager, "load", TOKENS[:64])
    assert manager.reset_prefix_cache() is False
    second = begin(manager, "load", TOKENS[200:264])
    assert second is not None
    chain = manager.chain()
    chain.cover(TOKENS[200:264], 64)
    manager.distrust(chain, 32)
    for lease in (first, second):
        manager.end_transfer(lease.number, well=True)
    assert not manager.index.pages[0] and manager.pool.free_slabs == manager.plan.num_slabs
    recount(manager)


def test_what_was_read_of_a_distrusted_page_is_not_vouched_for() -> None:
    manager = KVManager(one_group(20))
    grant = run(manager, TOKENS[:64])
    lease = begun(manager, "store", TOKENS[:64])
    manager.distrust(grant.chain, 32)
    assert manager.end_transfer(lease.number, well=True) == [lease.keys[0][:2]]


def test_a_page_that_a_load_fills_is_not_zeroed_though_it_was_fresh_a_moment_ago() -> None:
    manager = KVManager(one_group(4), list_fresh_pages=True)
    manager.release(run(manager, TOKENS[:7]))
    lease = begun(manager, "load", TOKENS[100:164])
    assert len(lease.pages[0]) == 4 and not any(manager.take_fresh())


def test_pages_of_a_transfer_stay_where_they_are_and_other_slabs_are_emptied() -> None:
    plan = two_groups(6, (16, 16), (1, 3), slab_bytes=4096)
    manager = KVManager(plan)
    pool, per_slab = manager.pool, plan.groups[0].pages_per_slab
    pages = pool.allocate([6 * per_slab, 0])
    assert pages is not None
    kept = [slab * per_slab for slab in range(6)]
    pool.release(0, [page for page in pages[0] if page not in kept])
    for slab in (0, 1, 2):
        pool.pin(0, [kept[slab]])
    made = pool.gather([0, 4 * plan.groups[1].pages_per_slab], most=1000)
    assert sorted(move[1] for move in made) == kept[3:] and pool.slack([0, 3 * plan.groups[1].pages_per_slab]) == 0
    assert pool.tidy(0.0, 1000) == ([], 0), "the rest is pinned"
    pool.unpin(0, kept[:3])
    assert pool.tidy(0.0, 1000)[0]
    recount_pool(pool)


def test_a_running_request_waits_for_a_transfer_and_nobody_is_preempted_for_its_pages() -> None:
    bench = Bench(FULL, megabytes=0.25)
    pages = bench.plan.num_pages(0)
    prompt = tokens(16 * (pages // 2) - 3)
    manager, scheduler = bench.manager, bench.scheduler
    bench.run("done", tokens(16 * (pages // 2), 10_000))
    lease = begin(manager, "store", tokens(16 * (pages // 2), 10_000))
    assert lease is not None
    bench.add("a", prompt, 30)
    for _ in range(4):  # up to the end of the last page that is free
        bench.step()
    while (plan := scheduler.schedule()) is not None:
        scheduler.commit(plan, bench.checker.run(plan))
    assert manager.waits and scheduler.stats().running == 1 and scheduler.stats().preemptions_total == 0
    manager.quarantine(lease.number)
    scheduler.schedule()
    assert scheduler.stats().preemptions_total == 1, "what has failed is waited for no longer"
    bench.checker.end_transfer(lease.number, well=True)
    manager.end_transfer(lease.number, well=False)
    bench.drain()


def test_a_hybrids_snapshot_and_pages_are_one_hit_when_both_have_arrived() -> None:
    bench = Bench({"full": (16, 1), "recurrent": (16, 2)})
    manager = bench.manager
    bench.run("first", tokens(85))
    index = manager.index
    keys = [list(pages) for pages in index.pages]
    stored = manager.store(keys, [[1 + number for number in range(len(part))] for part in keys[:1]] + [[90]])
    assert stored is not None and len(stored.keys[1]) == 1
    bench.add("other", tokens(20, 5000))
    bench.step()
    bench.checker.end_transfer(stored.number, well=True)
    assert manager.end_transfer(stored.number, well=True) == stored.keys
    bench.scheduler.reset_prefix_cache()
    lease = manager.load(stored.keys, stored.places)
    assert lease is not None
    bench.add("again", tokens(85))
    empty = bench.scheduler.schedule()
    assert empty is not None and empty.rows == [] and empty.transfers[0].loads
    bench.scheduler.commit(empty, bench.checker.run(empty))
    assert bench.scheduler.stats().waiting_for == "transfer" and bench.scheduler.schedule() is None
    bench.checker.end_transfer(lease.number, well=True)
    manager.end_transfer(lease.number, well=True)
    bench.drain()
    assert bench.cached["again"] == 80


def test_sleep_is_for_pages_that_no_transfer_uses() -> None:
    bench = Bench(FULL)
    bench.run("a", tokens(40))
    lease = begun(bench.manager, "store", tokens(40))
    with pytest.raises(AssertionError, match="transfers are under way"):
        bench.scheduler.preempt_all()
    bench.manager.end_transfer(lease.number, well=False)
    bench.scheduler.preempt_all()
    assert bench.manager.pool.free_slabs == bench.plan.num_slabs
