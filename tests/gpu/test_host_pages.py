"""Pages between the device and page-locked host memory: as they were, whether that memory is shared with another process or not."""

from __future__ import annotations

import mmap
import random
import time

import pytest
import torch

from helpers.device import MIB, needs_cuda
from helpers.patience import patient
from helpers.plans import transfer
from pagerunner.runner.host_copy import CudaHostMemory
from pagerunner.runner.transfers import HostPages, Transfers

PAGE = MIB // 4


@needs_cuda
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_pages_come_back_from_locked_memory_as_they_were(shared: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    kv_bytes = torch.randint(0, 256, (64 * MIB,), dtype=torch.uint8, device=device)
    before = kv_bytes.clone()
    host = HostPages(96 * MIB, PAGE, CudaHostMemory(device), shared=shared)
    host.begin()
    until = time.monotonic() + patient(30)
    while host.ready_bytes < host.bytes.numel():
        assert time.monotonic() < until, "host memory isn't locked"
        time.sleep(0.001)
    places = random.Random(0).sample(range(96 * 4), 64 * 4)
    pages = [(0, at * PAGE, place * PAGE) for at, place in enumerate(places)]
    moved = Transfers(kv_bytes, [PAGE], host)
    moved.store([transfer(1, False, pages)])
    assert [end.number for end in moved.ended(patient(30))] == [1]
    kv_bytes.zero_()
    if shared:  # the core sends what lies there, and writes what it pulled
        with open(host.path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            place = places[5] * PAGE
            assert mapped[place : place + PAGE] == bytes(before[5 * PAGE : 6 * PAGE].tolist())
            mapped[place : place + 3] = b"\1\2\3"
        before[5 * PAGE : 5 * PAGE + 3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    moved.load([transfer(2, True, pages)])
    assert [end.number for end in moved.ended(patient(30))] == [2]
    assert torch.equal(kv_bytes, before)
