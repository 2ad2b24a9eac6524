"""What goes from host memory to a store below it, and how much of that at once."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.memory_store import MemoryStore
from pagerunner.memory.planner import plan_memory
from pagerunner.memory.specs import FullKV, RecurrentState
from pagerunner.tiers.below import MOST_WRITTEN, Below
from pagerunner.tiers.host import HostTier

PAGES = 60
STATES = 2


@pytest.fixture
def host() -> HostTier:
    """Host memory for about 120 prompt pages of full attention. States have the size of 5 of them."""
    plan = plan_memory(
        [FullKV(1, 32, "bfloat16"), RecurrentState(((64, 80),), ("bfloat16",))],
        page_tokens=16,
        budget_bytes=2**20,
        model_max_len=400,
        max_num_seqs=3,
        max_num_batched_tokens=64,
    )
    made = HostTier(plan, 120 * 2_048)
    made.grow(made.num_bytes)
    return made


def stored(host: HostTier) -> list[list[int]]:
    """The pages of a prompt that is longer than may be written at once, in the order of its tokens."""
    pages = host.take([PAGES, STATES])
    assert pages is not None
    for group, some in enumerate(pages):
        for number, page in enumerate(some):
            host.index.publish(group, bytes([group, number]), page)
    return pages


def test_of_a_prompt_that_is_longer_than_may_be_written_the_front_is_and_the_rest_when_it_comes_again(
    host: HostTier,
) -> None:
    store, sizes = MemoryStore(), [2_048, 10_240]
    store.held = True
    below: Below[Any] = Below(store, host, memoryview(bytearray(host.num_bytes)), sizes)
    pages = stored(host)
    below.keep(pages)
    assert below.stats().skipped, "a quarter of host memory is less than the prompt"
    below.keep(pages)  # nothing more has room
    assert len(store.begun) == 1
    store.go()
    below.settle()
    kept = set(store.pages)
    most = MOST_WRITTEN * host.num_bytes
    assert most - max(sizes) < sum(sizes[group] for group, _ in kept) <= most
    full = [number for number in range(PAGES) if (0, bytes([0, number])) in kept]
    assert full == list(range(len(full))) and (1, bytes([1, 0])) in kept and (1, bytes([1, 1])) not in kept
    for _ in range(3):
        below.keep(pages)
        store.go()
        below.settle()
    assert len(store.pages) == PAGES + STATES
    host.release(pages)
    assert not any(host.pool.used)


def test_a_page_that_turns_out_wrong_while_it_is_written_is_not_there_afterwards(host: HostTier) -> None:
    store = MemoryStore()
    store.held = True
    below: Below[Any] = Below(store, host, memoryview(bytearray(host.num_bytes)), [2_048, 10_240])
    pages = host.take([3, 0])
    assert pages is not None
    for number, page in enumerate(pages[0]):
        host.index.publish(0, bytes([0, number]), page)
    below.keep(pages)
    below.distrust(0, bytes([0, 1]))  # nothing is there that could be forgotten
    store.go()
    below.settle()
    assert set(store.pages) == {(0, bytes([0, 0])), (0, bytes([0, 2]))}
    host.release(pages)
    assert not any(host.pool.used)
