"""Adapters' pages in the pool: cache when nobody runs with them, evicted from the last one on, and no KV events."""

from __future__ import annotations

from collections.abc import Iterator

from helpers.plans import one_group
from helpers.recount import recount
from pagerunner.memory.grant import NO_PAGE, Grant
from pagerunner.memory.manager import KVManager
from pagerunner.types.lora import AdapterInfo

THREE = AdapterInfo("a", "/", "0123", 4, num_pages=3)


def admitted(manager: KVManager, adapter: AdapterInfo | None, slot: int = 0, tokens: int = 16) -> Grant:
    grant = manager.admit(slot, manager.chain(adapter=adapter), list(range(tokens)), 0, shares=False)
    assert grant is not None and manager.grow(grant, 0, tokens)
    return grant


def filled(manager: KVManager, *, well: bool = True) -> list[int]:
    """The pages of an adapter that was brought to the device for a request, which has ended."""
    grant = admitted(manager, THREE)
    assert grant.adapter is not None and grant.adapter.missing == [0, 1, 2]
    manager.adapters.fill(grant.adapter)
    pages = list(grant.adapter.pages)
    manager.end_fill(grant.adapter, well=well)
    manager.release(grant)
    recount(manager)
    return pages


def test_an_idle_adapter_is_cache_also_without_prefix_caching() -> None:
    """What is evicted comes again, and the rest is found."""
    manager = KVManager(one_group(8), enable_prefix_caching=False)
    first, second, third = filled(manager)
    assert manager.adapters.find(THREE) == [first, second, third] and not manager.pool.used[0]
    other = admitted(manager, None, tokens=16 * 6)
    assert manager.adapters.find(THREE) == [first, second, NO_PAGE] and manager.pool.evictions == [1]
    manager.release(other)
    again = admitted(manager, THREE)
    assert again.adapter is not None and again.adapter.missing == [2] and again.adapter.pages[:2] == [first, second]


def test_what_a_failed_fill_has_left_is_not_found() -> None:
    manager = KVManager(one_group(8))
    filled(manager, well=False)
    assert manager.adapters.find(THREE) == [NO_PAGE] * 3 and manager.pool.free_slabs == manager.plan.num_slabs


def test_readers_of_kv_events_are_not_told() -> None:
    manager = KVManager(one_group(8), log_events=True)
    assert manager.events is not None
    manager.events.take()
    filled(manager)
    manager.release(admitted(manager, None, tokens=16 * 8))  # which evicts them
    assert manager.adapters.find(THREE) == [NO_PAGE] * 3 and manager.events.take() == [] and not manager.events.blocks


def test_statistics_go_over_adapters_and_not_over_their_pages() -> None:
    """They are made ten times in a second. With 42 pages, each of 1,000 idle adapters, they had taken 20 ms of a step's time."""

    class Uncountable(dict[int, str]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("each page is looked at")

        keys = values = items = __iter__  # type: ignore[assignment]

    manager = KVManager(one_group(8))
    filled(manager)
    index = manager.index
    index.adapters[0], index.keys[0] = Uncountable(index.adapters[0]), Uncountable(index.keys[0])  # type: ignore[assignment]
    running = admitted(manager, THREE)
    assert manager.adapters.counts() == {"0123": 3} and manager.adapters.num_there == manager.adapters.num_used == 3
    manager.release(running)
    other = admitted(manager, None, tokens=16 * 6)
    assert manager.adapters.counts() == {"0123": 2} and not manager.adapters.num_used
    manager.release(other)
    assert manager.reset_prefix_cache() and not manager.adapters.counts()
