"""The CPU arena gives memory back and keeps its tensors valid."""

from __future__ import annotations

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
