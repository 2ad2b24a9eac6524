"""Copies of pages between two memories: what is joined, what is right, and when it has ended."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch

from helpers.patience import LONG, patient, until
from helpers.plans import transfer
from pagerunner.errors import CapacityError
from pagerunner.runner import transfers
from pagerunner.runner.cuda_driver import BatchedCopies, DriverError
from pagerunner.runner.transfers import HostPages, Transfers, runs


def test_pages_that_follow_each_other_in_both_memories_are_one_copy_but_not_over_the_end_of_a_piece() -> None:
    pages = [(0, 0, 640), (0, 64, 704), (0, 192, 768), (0, 256, 832), (1, 320, 896), (1, 352, 928), (2, 384, 1024)]
    found = list(runs(transfer(1, True, pages), [64, 32, 64], 1024))
    assert found == [(0, 640, 128), (192, 768, 192), (384, 1024, 64)]
    assert list(runs(transfer(1, True, pages), [64, 32, 64], 832)) == [
        (0, 640, 128),
        (192, 768, 64),
        (256, 832, 128),
        (384, 1024, 64),
    ]
    assert list(runs(transfer(1, True, []), [64], 64)) == []


def test_any_pages_come_back_as_they_were() -> None:
    chance = random.Random(0)
    device, sizes = torch.randint(0, 256, (4096,), dtype=torch.uint8), [64, 160]
    before = device.clone()
    moved = Transfers(device, sizes, HostPages(8192, 2048, None))
    pages = [(group, at * sizes[group], place * 512) for place, (group, at) in enumerate((i % 2, i) for i in range(12))]
    chance.shuffle(pages)
    moved.store([transfer(7, False, pages), transfer(8, True, pages)])
    (end,) = moved.ended()
    assert (end.number, end.well) == (7, True) and end.seconds > 0 and moved.ended() == []
    device.zero_()
    moved.load([transfer(9, True, pages), transfer(10, False, pages)])
    assert [end.number for end in moved.ended()] == [9]
    for group, offset, _ in pages:
        part = slice(offset, offset + sizes[group])
        assert torch.equal(device[part], before[part])


def test_who_waits_for_an_end_is_told_of_one_that_begins_meanwhile() -> None:
    moved = Transfers(torch.zeros(64, dtype=torch.uint8), [64], HostPages(4096, 4096, None))
    began = time.monotonic()
    assert moved.ended(0.01) == [] and time.monotonic() - began >= 0.01
    threading.Timer(0.05, moved.load, args=([transfer(3, True, [(0, 0, 0)])],)).start()
    assert [end.number for end in moved.ended(patient(20))] == [3]
    moved.load([transfer(4, True, [(0, 0, 0)])])
    moved.drain()
    assert moved.ended() == []


class _Memory:
    """Locks pieces, one at a time, when the test says so."""

    def __init__(self, most: int = 100) -> None:
        self.pinned: list[int] = []
        self.more, self.most = threading.Semaphore(0), most

    def pin(self, buffer: torch.Tensor) -> None:
        self.more.acquire(timeout=LONG)
        if len(self.pinned) == self.most:
            raise RuntimeError("cudaHostRegister failed")
        self.pinned.append(buffer.numel())

    def unpin(self, buffer: torch.Tensor) -> None:
        self.pinned.remove(buffer.numel())


def _is_ready(pages: HostPages, num_bytes: int) -> bool:
    return pages.ready_bytes == num_bytes


def test_host_memory_grows_as_pieces_are_locked_and_is_unlocked_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "PIECE_BYTES", 10_000)
    memory: Any = _Memory(most=2)
    pages = HostPages(5 * 8192, 4096, memory)
    assert pages.piece_bytes == 8192 and pages.ready_bytes == 0
    pages.begin()
    for ready in (1, 2):
        memory.more.release()
        until(partial(_is_ready, pages, ready * 8192))
    memory.more.release()  # the third is refused: the tier stays as large as it is
    del pages
    until(lambda: not memory.pinned)


def test_host_memory_that_cannot_be_had_is_a_sentence() -> None:
    with pytest.raises(CapacityError, match=r"host memory can't be had for pages .*; lower kv_offloading_size"):
        HostPages(2**60, 4096, None)


class _Library:
    """A driver whose copies happen at once."""

    def __init__(self, *, refuses: bool = False, broken: bool = False) -> None:
        self.calls: list[str] = []
        self.refuses, self.broken = refuses, broken

    def cuMemcpyAsync(self, target: Any, source: Any, size: Any, stream: Any) -> int:  # noqa: N802 - the driver's name
        self.calls.append("single")
        if not self.broken:
            ctypes.memmove(target.value, source.value, size.value)
        return 700 * self.broken

    def batch(
        self, targets: Any, sources: Any, sizes: Any, count: Any, attributes: Any, first: Any, kinds: Any, stream: Any
    ) -> int:
        self.calls.append("batch")
        if self.refuses:
            return 1
        assert attributes._obj.order == 1 and (first._obj.value, kinds.value, stream.value) == (0, 1, 5)
        lists = [ctypes.cast(at, ctypes.POINTER(ctypes.c_uint64))[: count.value] for at in (targets, sources, sizes)]
        for target, source, size in zip(*lists, strict=True):
            ctypes.memmove(target, source, size)
        return 0


class _Newer(_Library):
    def __init__(self, **options: bool) -> None:
        super().__init__(**options)
        self.cuMemcpyBatchAsync_v2 = self.batch


class _Older(_Library):
    def __init__(self) -> None:
        super().__init__()
        self.cuMemcpyBatchAsync = lambda *args: self.batch(*args[:7], args[8])


@pytest.mark.parametrize(
    ("library", "calls"),
    [
        (_Newer(), ["batch"]),
        (_Older(), ["batch"]),
        (_Library(), ["single", "single"]),
        (_Newer(refuses=True), ["batch", "single", "single"]),
    ],
)
def test_a_batch_is_one_call_where_the_driver_takes_it(library: _Library, calls: list[str]) -> None:
    source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    batched = BatchedCopies(library)
    batched([], 5)
    batched([(target.data_ptr() + 7, source.data_ptr() + 20, 30), (target.data_ptr() + 60, source.data_ptr(), 5)], 5)
    assert (
        torch.equal(target[7:37], source[20:50])
        and torch.equal(target[60:65], source[:5])
        and target.count_nonzero() == 34
    )
    assert library.calls == calls


def test_a_copy_that_the_driver_refuses_is_an_error_of_the_step() -> None:
    with pytest.raises(DriverError, match="64 bytes between device and host failed: error 700"):
        BatchedCopies(_Newer(refuses=True, broken=True))([(1, 2, 64)], 5)


def test_shared_host_memory_is_that_of_another_process_too() -> None:
    pages = HostPages(8192, 4096, None, shared=True)
    program = f"""
import mmap
with open({pages.path!r}, "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
assert len(memory) == 8192 and memory[:2] == bytes([7, 0])
memory[8191] = 5
"""
    pages.bytes[0] = 7
    subprocess.run([sys.executable, "-c", program], check=True)
    assert pages.bytes[8191] == 5
    assert HostPages(8192, 4096, None).path == ""
