"""Manager: reservations for all groups at once, hits, what a step must carry."""

from __future__ import annotations

import pytest

from helpers.plans import one_group, two_groups
from helpers.recount import recount
from pagerunner.memory.grant import Grant
from pagerunner.memory.manager import KVManager
from pagerunner.memory.stats import memory_stats
from pagerunner.types import TableWrite

TOKENS = list(range(1000))


def admit(manager: KVManager, tokens: list[int], slot: int = 0, *, grow: int | None = None, salt: str = "") -> Grant:
    grant = manager.admit(slot, manager.chain(salt), tokens, len(tokens) - 1)
    assert grant is not None
    end = len(tokens) if grow is None else grow
    assert manager.grow(grant, grant.cached_tokens, end)
    manager.publish(grant, tokens, end)
    return grant


def test_a_refusal_has_the_numbers_and_the_knobs() -> None:
    manager = KVManager(one_group(49))
    assert manager.refusal(784) is None and manager.refusal(785) is not None
    text = str(manager.refusal(1000))
    assert text.startswith("needs 63 pages for 1,000 tokens; the pool has 49.")
    assert "max_tokens" in text and "kv_cache_memory_bytes" in text and "num_gpu_blocks_override" in text
    plan = two_groups(12)
    text = str(KVManager(plan).refusal(4000))
    assert f"needs {plan.slabs_needed(4000)} slabs for 4,000 tokens; the pool has {plan.num_slabs}." in text


def test_a_hit_takes_the_pages_that_are_there_and_leaves_one_token_to_compute() -> None:
    manager = KVManager(one_group(20))
    first = admit(manager, TOKENS[:64])
    second = admit(manager, TOKENS[:64], 1)
    assert second.cached_tokens == 48
    assert second.pages[0][:3] == first.pages[0][:3] and second.pages[0][3] != first.pages[0][3]
    third = admit(manager, TOKENS[:65], 2)
    assert third.cached_tokens == 64 and third.pages[0][:4] == first.pages[0]
    recount(manager)
    for grant in (first, second, third):
        manager.release(grant)
    recount(manager)
    assert manager.pool.used == [0] and len(manager.pool.cached[0]) == 4, (
        "the duplicate of page 3 and the open page are free"
    )
    assert admit(manager, TOKENS[:65]).pages[0][:4] == third.pages[0][:4], "cached pages are found"


def test_admission_counts_what_running_prefills_were_promised() -> None:
    manager = KVManager(one_group(10))
    first = admit(manager, TOKENS[:128], grow=16)
    assert manager.pool.used == [1]
    assert manager.admit(1, manager.chain("x"), TOKENS[:48], 47) is None
    recount(manager)
    second = admit(manager, TOKENS[100:130], 1)
    assert manager.grow(first, 16, 128) and not manager.grow(first, 128, 129)
    manager.release(second)
    assert manager.grow(first, 128, 129)


def test_a_failed_admission_changes_nothing_and_costs_no_version() -> None:
    manager = KVManager(one_group(6))
    admit(manager, TOKENS[:64])
    version = manager.version
    assert manager.admit(1, manager.chain(), TOKENS[:64] + TOKENS[:64], 127) is None
    assert manager.version == version
    recount(manager)
    assert len(manager.take_table_writes()) == 1


def test_without_caching_only_a_family_shares_and_only_while_one_of_it_runs() -> None:
    manager = KVManager(one_group(20), enable_prefix_caching=False)
    tokens = TOKENS[:40]
    grants = []
    for slot, parent in enumerate(("a", "a", "b")):
        grant = manager.admit(slot, manager.chain(parent_id=parent), tokens, 39)
        assert grant is not None and manager.grow(grant, grant.cached_tokens, 40)
        manager.publish(grant, tokens, 40)
        grants.append(grant)
    assert [grant.cached_tokens for grant in grants] == [0, 32, 0]
    manager.release(grants[0])
    recount(manager)
    late = manager.admit(0, manager.chain(parent_id="a"), tokens, 39)
    assert late is not None and late.cached_tokens == 32
    for grant in (grants[1], grants[2], late):
        manager.release(grant)
    assert not manager.index.pages[0] and manager.pool.used == [0] and not manager.pool.cached[0]


def test_generated_pages_are_published_when_their_tokens_are_known() -> None:
    manager = KVManager(one_group(20))
    tokens = TOKENS[:20]
    grant = admit(manager, tokens)
    assert grant.next_publish == 32
    tokens += TOKENS[500:512]
    assert manager.grow(grant, 20, 32)
    manager.publish(grant, tokens, 31)
    assert len(manager.index.pages[0]) == 1
    manager.publish(grant, tokens, 32)
    assert admit(manager, tokens + [7], 1).cached_tokens == 32


def test_a_reset_makes_everything_unfindable_even_what_running_requests_publish_later() -> None:
    manager = KVManager(one_group(20))
    grant = admit(manager, TOKENS[:64], grow=32)
    manager.release(admit(manager, TOKENS[200:240], 1))
    assert manager.reset_prefix_cache() is False
    assert manager.grow(grant, 32, 64)
    manager.publish(grant, TOKENS, 64)
    assert not manager.index.pages[0] and not manager.pool.cached[0]
    manager.release(grant)
    recount(manager)
    assert manager.reset_prefix_cache() is True
    assert manager.pool.free_slabs == manager.plan.num_slabs


def test_distrusted_pages_cannot_be_found_whether_cached_or_in_use() -> None:
    manager = KVManager(one_group(20))
    first = admit(manager, TOKENS[:64])
    manager.distrust(first.chain, 20)
    assert admit(manager, TOKENS[:64], 1).cached_tokens == 16
    other = admit(manager, TOKENS[300:364], 2)
    manager.release(other)
    manager.distrust(other.chain, 0)
    assert admit(manager, TOKENS[300:364], 2).cached_tokens == 0
    recount(manager)


def test_table_writes_carry_only_what_is_new_and_entries_are_addresses() -> None:
    plan = two_groups(40)
    manager = KVManager(plan)
    grant = admit(manager, TOKENS[:20], 5)
    writes = manager.take_table_writes()
    assert [(write.group, write.slot, write.first) for write in writes] == [(0, 5, 0), (1, 5, 0)]
    for group, slot, _, entries in writes:
        assert slot == 5
        offsets = [plan.page_offset(group, page) for page in grant.pages[group]]
        assert [entry * plan.groups[group].unit for entry in entries] == offsets
    assert manager.take_table_writes() == []
    assert manager.grow(grant, 20, 21) and manager.grow(grant, 21, 22)
    (write,) = manager.take_table_writes()
    assert write == TableWrite(1, 5, 5, plan.table_entries(1, grant.pages[1][5:]))


@pytest.mark.parametrize("wanted", [False, True])
def test_fresh_pages_are_listed_once_when_asked_for(wanted: bool) -> None:
    manager = KVManager(one_group(20), list_fresh_pages=wanted)
    first = admit(manager, TOKENS[:40])
    expected = [[manager.plan.page_offset(0, page) for page in first.pages[0]]]
    assert manager.take_fresh() == (expected if wanted else [])
    assert manager.take_fresh() == []
    second = admit(manager, TOKENS[:40], 1)
    assert manager.take_fresh() == ([[manager.plan.page_offset(0, second.pages[0][2])]] if wanted else [])


def test_scattered_pages_are_moved_together_when_another_group_needs_their_slab() -> None:
    plan = two_groups(4, (16, 16), (1, 3), slab_bytes=4096)
    manager = KVManager(plan, enable_prefix_caching=False)
    per_slab = plan.groups[0].pages_per_slab
    grant = manager.admit(3, manager.chain(), TOKENS[:4], 0)
    assert grant is not None
    pages = manager.pool.allocate([3 * per_slab, 0])
    assert pages is not None
    keep = [pages[0][0], pages[0][per_slab], pages[0][2 * per_slab]]
    grant.pages[0] = list(keep)
    manager._moves.placed(grant, 0, 0, keep)
    grant.promise, grant.reserve, grant.num_pages = [0, 0], [0, 0], [3, 0]
    manager._promises.by_group = [0, 0]
    manager.pool.release(0, [page for page in pages[0] if page not in keep])
    assert manager.pool.slack([0, 2 * plan.groups[1].pages_per_slab]) < 0
    assert manager.grow(grant, 0, 16 * 2 * plan.groups[1].pages_per_slab)
    copies = manager.take_copies()
    assert len(copies) == 1 and copies[0].group == 0, "one slab was needed"
    moved = {copy.source: copy.target for copy in copies}
    now = [plan.page_offset(0, page) for page in grant.pages[0][:3]]
    assert now == [moved.get(plan.page_offset(0, page), plan.page_offset(0, page)) for page in keep]
    writes = [write for write in manager.take_table_writes() if write.group == 0]
    assert writes[0].first == 0 and writes[0].entries == plan.table_entries(0, grant.pages[0])
    recount(manager)


def test_integrity_check_sees_lost_and_doubly_owned_pages() -> None:
    manager = KVManager(one_group(20))
    grant = admit(manager, TOKENS[:64])
    recount(manager)
    lost = grant.pages[0].pop()
    with pytest.raises(AssertionError):
        recount(manager)
    grant.pages[0].append(grant.pages[0][0])
    with pytest.raises(AssertionError):
        recount(manager)
    grant.pages[0][-1] = lost
    recount(manager)


def test_usage_is_the_share_of_bytes_in_use() -> None:
    manager = KVManager(one_group(20))
    assert manager.usage == 0
    grant = admit(manager, TOKENS[:80])
    assert manager.usage == 5 / 20
    (group,) = memory_stats(manager).groups
    assert (group.name, group.pages_in_use, group.pages_cached, group.evictions) == ("full", 5, 0, 0)
    manager.release(grant)
    assert manager.usage == 0 and memory_stats(manager).groups[0].pages_cached == 5
