"""The arena and the host copy on a card: addresses that outlive their memory, graphs over them, and every byte accounted."""

from __future__ import annotations

import gc

import pytest
import torch

from helpers.device import free_memory as free
from pagerunner.engine.startup.shares import available_memory
from pagerunner.errors import CapacityError
from pagerunner.runner.cuda_arena import CudaArena
from pagerunner.runner.cuda_driver import CudaDriver
from pagerunner.runner.host_copy import CudaHostMemory, HostCopy
from pagerunner.runner.sleep import Sleeper, TorchCache, WeightsOnHost

MIB, GIB = 2**20, 2**30
CARD = torch.device("cuda", 0)
pytestmark = pytest.mark.alone


@pytest.fixture
def arena() -> CudaArena:
    gc.collect()
    torch.cuda.empty_cache()
    return CudaArena(CudaDriver())


def page_tables(num_bytes: int) -> int:
    """What the driver takes of the device to page-lock host memory: 8 bytes for every 4 KiB, 2 MiB for a GiB.

    It may take less, or nothing, of a process that has had such memory before.
    """
    return num_bytes // 4096 * 8


def test_a_graph_sees_memory_that_is_mapped_after_it_and_again_after_unmapping(arena: CudaArena) -> None:
    kv = arena.reserve("kv", 8 * GIB, mapped=2 * MIB)
    at = torch.zeros(3, dtype=torch.int64, device=CARD)
    out = torch.zeros(3, dtype=torch.uint8, device=CARD)
    kv[: 2 * MIB].fill_(1)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        out.copy_(kv[at])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(kv[at])
    arena.grow("kv", 8 * GIB)
    for value in (5, 6):
        kv[0], kv[3 * GIB], kv[8 * GIB - 1] = value, value + 1, value + 2
        at.copy_(torch.tensor([0, 3 * GIB, 8 * GIB - 1]))
        graph.replay()
        assert out.tolist() == [value, value + 1, value + 2]
        arena.unmap("kv")
        arena.map("kv")


def test_sleep_gives_back_every_byte_and_waking_takes_as_many(arena: CudaArena) -> None:
    weights = arena.reserve("weights", 3 * GIB + 12345)
    kv = arena.reserve("kv", 20 * GIB, mapped=2 * MIB)
    arena.grow("kv", 20 * GIB)
    weights.random_(0, 256)
    expected = weights.clone()
    kv[-1] = 3

    def make_copy() -> HostCopy:
        return HostCopy(weights, CudaHostMemory(CARD), available_memory)

    torch.equal(weights, expected)  # what a kernel takes when it is first used is not what is counted below
    torch.cuda.empty_cache()
    without_copy, tables = free(), page_tables(3 * GIB)
    sleeper = Sleeper(arena, WeightsOnHost(lambda: weights.copy_(expected), make_copy), TorchCache(CARD))
    assert 0 <= without_copy - free() <= tables + 2 * MIB  # `free` waits for the copy
    for level in (1, 2, 1):
        torch.cuda.empty_cache()
        scratch = torch.empty(GIB, dtype=torch.uint8, device=CARD)
        del scratch
        awake = free()
        held = sum(arena.mapped_bytes().values()) + GIB
        sleeper.sleep(level)
        more = free() - awake - held
        assert 0 <= more <= 4 * MIB + (tables if level == 2 else 0)  # torch's cache may have held another block
        sleeper.wake_up()
        assert abs(free() - awake) < MIB
        assert torch.equal(weights, expected)


def test_memory_that_another_allocation_took_is_missed_with_numbers_and_waking_works_later(arena: CudaArena) -> None:
    arena.reserve("kv", 30 * GIB)
    arena.unmap("kv")
    taken = torch.empty(free() - 10 * GIB, dtype=torch.uint8, device=CARD)
    before = free()
    with pytest.raises(CapacityError, match=r"30\.00 GiB of device memory are wanted for pages.* are free"):
        arena.map("kv")
    assert abs(free() - before) < MIB
    del taken
    torch.cuda.empty_cache()
    arena.map("kv")
    assert arena.mapped_bytes() == {"kv": 30 * GIB}


def test_a_region_is_given_back_when_its_last_tensor_is_gone() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    arena = CudaArena(CudaDriver())
    torch.empty(1, dtype=torch.float16, device=CARD).fill_(1)  # a process's first kernel takes memory, which stays
    before = free()
    view = arena.reserve("kv", 4 * GIB).view(torch.float16)[5:]
    del arena
    gc.collect()
    assert before - free() >= 4 * GIB
    view.fill_(1)
    del view
    gc.collect()
    assert abs(free() - before) < MIB
