"""Host memory for adapters that come and go: it is used again, and what isn't in use is little."""

from __future__ import annotations

import gc
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from helpers.patience import patient
from pagerunner.runner import host_buffers
from pagerunner.runner.host_buffers import MOST_SPARE, HostBuffers

MIB = 2**20


class Locks:
    """Says which buffers are locked, and which thread has unlocked one."""

    def __init__(self, most: int = 2**30) -> None:
        self.locked: set[int] = set()
        self.largest = 0
        self.unlocked_by: list[str] = []
        self.most = most

    def pin(self, buffer: torch.Tensor) -> None:
        if buffer.numel() > self.most:
            raise RuntimeError("no more pages can be locked.")
        self.locked.add(buffer.data_ptr())
        self.largest = max(self.largest, buffer.numel())

    def unpin(self, buffer: torch.Tensor) -> None:
        self.locked.remove(buffer.data_ptr())
        self.unlocked_by.append(threading.current_thread().name)

    def fetch(self, buffer: torch.Tensor, source: torch.Tensor) -> None:
        raise AssertionError

    def synchronize(self) -> None:
        raise AssertionError


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_buffer_comes_back_while_its_thread_has_the_lock() -> None:
    """The collector may drop an adapter wherever something is made, in `take` too."""
    buffers = HostBuffers()
    cycle = [buffers.take(1000, torch.float32)[1]]
    cycle.append(cycle)  # type: ignore[arg-type]
    del cycle

    def collect() -> None:
        with buffers._lock:
            gc.collect()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(patient(20))
    assert not thread.is_alive() and len(buffers._spare) == 1


def test_a_buffer_is_used_again_and_locked_once() -> None:
    memory = Locks()
    buffers = HostBuffers(memory)
    first, holder = buffers.take(1000, torch.bfloat16)
    assert first.shape == (1000,) and first.dtype == torch.bfloat16
    other, other_holder = buffers.take(1000, torch.bfloat16)
    assert first.data_ptr() != other.data_ptr() and len(memory.locked) == buffers.made == 2
    where = first.data_ptr()
    del first, holder
    again, holder = buffers.take(900, torch.float32)
    assert again.data_ptr() == where and buffers.made == 2 and not memory.unlocked_by
    del other, other_holder, again, holder
    assert buffers.take(50_000, torch.float32)[0].data_ptr() not in (where, 0) and buffers.made == 3
    with_none = HostBuffers(Locks(most=0))
    assert with_none.take(10, torch.float32)[0].numel() == 10, "it goes on without"


def test_no_piece_holds_the_driver_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer of five pages is locked and unlocked two pages at a time, also if the system refuses the last one. After each piece the driver is left alone
    for as long as the piece took: here as many seconds as bytes.
    """
    clock, pauses = [0.0], []
    monkeypatch.setattr(host_buffers.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(host_buffers, "pause", pauses.append)
    monkeypatch.setattr(host_buffers, "LOCK_BYTES", 2 * 4096)
    memory = Locks()
    lock = memory.pin
    memory.pin = lambda piece: (clock.append(clock.pop() + len(piece)), lock(piece))[1]  # type: ignore[method-assign]
    buffers = HostBuffers(memory)
    whole, holder = buffers.take(5 * 4096, torch.uint8)
    assert pauses == [8192, 8192, 4096]
    assert memory.locked == {whole.data_ptr() + at * 2 * 4096 for at in range(3)} and memory.largest == 2 * 4096
    del holder, buffers
    assert not memory.locked and len(memory.unlocked_by) == 3
    pin, memory.pin = memory.pin, lambda piece: pin(piece) if len(memory.locked) < 2 else Locks(0).pin(piece)  # type: ignore[method-assign]
    buffers = HostBuffers(memory)
    whole, holder = buffers.take(5 * 4096, torch.uint8)
    assert len(memory.locked) == 2 and whole.fill_(1).all()
    del holder, buffers
    assert not memory.locked


def test_few_are_spare_and_who_gives_one_back_unlocks_none() -> None:
    memory = Locks()
    buffers = HostBuffers(memory)
    held = [buffers.take(2_000 * (number + 1), torch.float32) for number in range(10)]
    assert len(memory.locked) == 10
    held.clear()
    assert len(memory.locked) == 10, "nobody waits for the device"
    with ThreadPoolExecutor(1, thread_name_prefix="reader") as pool:
        one = pool.submit(buffers.take, 10**6, torch.float32).result()
    assert len(memory.locked) == MOST_SPARE + 1 and {name[:6] for name in memory.unlocked_by} == {"reader"}
    del one, buffers
    assert not memory.locked, "all that were given back, and so are those of an engine that is gone"


def test_what_is_in_use_when_its_engine_goes_is_unlocked_when_it_is_let_go() -> None:
    """Locked memory that is unmapped stays lost to the system."""
    memory = Locks()
    buffers = HostBuffers(memory)
    whole, holder = buffers.take(1000, torch.float32)
    del buffers
    assert len(memory.locked) == 1 and whole.fill_(1).all()
    del whole, holder
    assert not memory.locked


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux for the memory of this process")
def test_hundreds_in_turn_take_no_more_than_those_in_use() -> None:
    """40 of 5 MB are in use. Threads put others in their places."""
    buffers, rng, size = HostBuffers(), random.Random(1), 5 * MIB
    in_use = []

    def one() -> tuple[torch.Tensor, object]:
        buffer, holder = buffers.take(size - rng.randrange(MIB), torch.uint8)
        buffer.zero_()
        return buffer, holder

    gc.collect()
    before = resident()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(100):
            in_use += [work.result() for work in [pool.submit(one) for _ in range(4)]]
            while len(in_use) > 40:
                del in_use[rng.randrange(21)]
    assert resident() - before < (40 + MOST_SPARE) * size + 32 * MIB
