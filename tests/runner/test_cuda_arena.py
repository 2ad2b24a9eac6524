"""The CUDA arena's bookkeeping over a fake driver: pieces, growth, unmapping, and failures that leave no trace."""

from __future__ import annotations

import gc

import pytest

from helpers.fake_driver import LOST, FakeDriver
from pagerunner.errors import CapacityError
from pagerunner.runner.cuda_arena import CudaArena

K = 4096


def make(total: int = 64 * K, piece: int = 4 * K) -> tuple[FakeDriver, CudaArena]:
    driver = FakeDriver(total)
    return driver, CudaArena(driver, piece)


def test_memory_is_taken_in_pieces_with_a_tail_of_the_granularity() -> None:
    driver, arena = make()
    bytes_ = arena.reserve("kv", 9 * K + 1)
    assert bytes_.shape == (9 * K + 1,)
    assert driver.calls == [f"create {4 * K}", f"create {4 * K}", f"create {2 * K}"]
    assert arena.mapped_bytes() == {"kv": 10 * K}
    bytes_.fill_(7)
    assert int(bytes_[-1]) == 7


def test_a_region_grows_behind_what_is_mapped_and_keeps_its_contents_and_address() -> None:
    driver, arena = make()
    bytes_ = arena.reserve("kv", 32 * K, mapped=K)
    assert (arena.mapped_bytes(), driver.used) == ({"kv": K}, K)
    bytes_[:K] = 5
    arena.grow("kv", 20 * K)
    assert arena.mapped_bytes() == {"kv": 20 * K}
    assert set(bytes_[:K].tolist()) == {5}
    bytes_[K : 20 * K] = 6
    arena.grow("kv", 2 * K)
    assert arena.mapped_bytes() == {"kv": 20 * K}
    with pytest.raises(RuntimeError, match="addresses"):
        arena.grow("kv", 33 * K)


def test_unmapped_memory_is_free_again_and_comes_back_as_large_as_it_had_grown() -> None:
    driver, arena = make()
    bytes_ = arena.reserve("kv", 32 * K, mapped=K)
    weights = arena.reserve("weights", 3 * K)
    weights.fill_(9)
    arena.grow("kv", 16 * K)
    arena.unmap("kv")
    arena.unmap("kv")
    assert driver.calls.count("synchronize") == 1, "nothing may be in flight when memory is taken away"
    assert (arena.mapped_bytes(), driver.used) == ({"kv": 0, "weights": 3 * K}, 3 * K)
    assert int(bytes_[0]) == LOST
    arena.map("kv")
    arena.map("kv")
    assert arena.mapped_bytes() == {"kv": 16 * K, "weights": 3 * K}
    bytes_[: 16 * K] = 1
    assert set(weights.tolist()) == {9}


@pytest.mark.parametrize("nth", [0, 1, 2, 3])
def test_a_map_that_fails_at_any_piece_leaves_everything_as_it_was(nth: int) -> None:
    driver, arena = make()
    arena.reserve("weights", 2 * K)
    arena.reserve("kv", 16 * K, mapped=K)
    driver.fail_create = nth
    with pytest.raises(CapacityError) as caught:
        arena.grow("kv", 14 * K)
    for number in ("56.00 KiB", "52.00 KiB", "244.00 KiB", "256.00 KiB", "8.00 KiB of weights", "4.00 KiB of pages"):
        assert number in str(caught.value)
    assert (arena.mapped_bytes(), driver.used) == ({"weights": 2 * K, "kv": K}, 3 * K)
    driver.fail_create = None
    arena.unmap("kv")
    arena.map("kv")
    assert arena.mapped_bytes()["kv"] == K, "what couldn't be had is not wanted any more"
    arena.grow("kv", 14 * K)
    assert arena.mapped_bytes()["kv"] == 14 * K


def test_memory_that_another_process_took_is_named_and_waking_works_once_it_is_back() -> None:
    driver, arena = make(32 * K)
    arena.reserve("kv", 24 * K)
    arena.unmap("kv")
    driver.others = 20 * K
    for _ in range(2):
        with pytest.raises(
            CapacityError, match=r"96\.00 KiB .* wanted for pages.* 48\.00 KiB of .*128\.00 KiB are free"
        ):
            arena.map("kv")
        assert driver.used == 0
    driver.others = 0
    arena.map("kv")
    assert driver.used == 24 * K


def test_advice_is_what_helps_and_free_memory_that_the_driver_keeps_is_said() -> None:
    driver, arena = make(8 * K)
    knobs, kept = "or lower gpu_memory_utilization", "not all of which its driver hands out"
    for tag, advised in (("weights", False), ("kv", True)):
        for size, there in ((16 * K, False), (4 * K, True)):
            driver.fail_create = 0
            with pytest.raises(CapacityError, match="free memory on the device") as caught:
                arena.reserve(tag, size)
            assert (knobs in str(caught.value), kept in str(caught.value)) == (advised, there)


def test_a_failed_reservation_keeps_no_addresses_and_may_be_repeated() -> None:
    driver, arena = make(8 * K)
    with pytest.raises(CapacityError, match="weights"):
        arena.reserve("weights", 9 * K)
    assert (driver.ranges, driver.used, arena.mapped_bytes()) == ({}, 0, {})
    arena.reserve("weights", 8 * K)
    with pytest.raises(RuntimeError, match="weights"):
        arena.reserve("weights", K)


def test_memory_goes_back_when_the_last_view_is_gone_and_not_before() -> None:
    driver, arena = make()
    view = arena.reserve("kv", 8 * K)[K:].view(2, -1)
    del arena
    gc.collect()
    assert driver.used == 8 * K
    view.fill_(3)
    del view
    gc.collect()
    assert (driver.used, driver.ranges) == (0, {})
