"""The CPU arena gives memory back and keeps its tensors valid."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagerunner.runner.arena import CpuArena


def test_unmapped_memory_is_given_back_and_views_survive_remapping() -> None:
    arena = CpuArena()
    buffer = arena.reserve("kv", 1 << 20)
    view = buffer.view(torch.float32)[16:32]

    arena.unmap("kv")
    assert arena.mapped_bytes() == {"kv": 0}
    assert buffer.untyped_storage().size() == 0

    arena.map("kv")
    view.fill_(3.0)
    assert arena.mapped_bytes() == {"kv": 1 << 20}
    assert buffer.view(torch.float32)[16:32].tolist() == [3.0] * 16


def test_map_and_unmap_are_idempotent_and_keep_contents_while_mapped() -> None:
    arena = CpuArena()
    buffer = arena.reserve("weights", 64)
    buffer.fill_(7)
    arena.map("weights")
    assert buffer.tolist() == [7] * 64
    arena.unmap("weights")
    arena.unmap("weights")
    assert arena.mapped_bytes()["weights"] == 0


def test_a_region_is_reserved_once() -> None:
    arena = CpuArena()
    arena.reserve("kv", 64)
    with pytest.raises(RuntimeError, match="kv"):
        arena.reserve("kv", 64)


LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def flags_of(address: int) -> list[str]:
    """What the kernel says of the memory at an address, such as "hg" where large pages are wanted."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, dash, last = line.split(" ")[0].partition("-")
        if dash and not line[0].isupper():
            inside = int(first, 16) <= address < int(last, 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("no memory is there")


@pytest.mark.skipif(not LARGE_PAGES.exists(), reason="this kernel has pages of one size")
def test_large_pages_are_asked_for_again_after_sleep() -> None:
    arena = CpuArena()
    buffer = arena.reserve("weights", 16 << 20)
    assert "hg" in flags_of(buffer.data_ptr() + (8 << 20))
    arena.unmap("weights")
    arena.map("weights")
    assert "hg" in flags_of(buffer.data_ptr() + (8 << 20))
    CpuArena().reserve("kv", 100)  # less than a page: nothing to ask for
