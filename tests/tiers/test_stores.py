"""What every KeepingStore does, tried on each of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.memory_store import MemoryStore
from helpers.patience import until
from pagerunner.tiers.disk import DiskStore
from pagerunner.tiers.stores import KeepingStore

KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KeepingStore]:
    made: KeepingStore = MemoryStore()
    if request.param == "disk":
        made = DiskStore(tmp_path, b"f" * 32, max_bytes=1 << 20, largest_page=5000, rate=1e9)
    yield made
    made.close()


def wait(store: KeepingStore, number: int) -> list[bool]:
    """Its pages' outcomes. Numbers end one at a time here."""
    ended: list[tuple[int, list[bool]]] = []
    until(lambda: ended.extend(store.ended()) or ended)
    [(found, well)] = ended
    assert found == number
    return well


def page(byte: int, size: int = 5000) -> memoryview:
    return memoryview(bytearray([byte]) * size)


def test_what_was_written_is_found_and_read(store: KeepingStore) -> None:
    assert store.find(0, [KEY, OTHER]) == [False, False]
    store.write(1, [(0, KEY, page(7)), (1, KEY, page(8, 300))])
    assert wait(store, 1) == [True, True]
    assert store.find(0, [KEY, OTHER]) == [True, False]
    assert store.find(1, [OTHER, KEY]) == [False, True]
    places = [page(0), page(0, 300)]
    store.read(2, [(0, KEY, places[0]), (1, KEY, places[1])])
    assert wait(store, 2) == [True, True]
    assert places == [page(7), page(8, 300)]
    assert store.ended() == []


def test_a_page_that_is_not_there_or_has_another_size_is_a_miss_beside_others(store: KeepingStore) -> None:
    store.write(1, [(0, KEY, page(7)), (0, OTHER, page(9))])
    wait(store, 1)
    place = page(0)
    store.read(2, [(0, OTHER, page(0, 4999)), (0, b"n" * 32, page(0)), (0, KEY, place), (3, KEY, page(0))])
    assert wait(store, 2) == [False, False, True, False]
    assert place == page(7)


def test_nothing_is_begun_with_no_pages(store: KeepingStore) -> None:
    store.read(1, [])
    assert wait(store, 1) == []
    store.write(2, [])
    assert wait(store, 2) == []


def test_reading_takes_some_time_and_not_for_ever(store: KeepingStore) -> None:
    assert 0 <= store.seconds(1 << 20) < 60
