"""A device for tests of the CUDA arena: `runner.cuda_driver.Driver` over host memory, which counts and can fail."""

from __future__ import annotations

import itertools
import mmap
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pagerunner.engine.worker.card import Card
from pagerunner.runner.cuda_driver import DriverError, OutOfDeviceMemory
from pagerunner.runner.sleep import Scratch

LOST = 0xDB  # what unmapped memory reads as


class _Range(np.ndarray):
    """An array that can be watched."""


class FakeDriver:
    """Memory of `total` bytes. `fail_create`: the n-th create from now on (from 0) fails as if memory had run out.

    `others` bytes are held by another process. Every misuse that the real driver would refuse raises DriverError.
    """

    def __init__(self, total: int, granularity: int = 4096) -> None:
        self.granularity = granularity
        self.total = total
        self.others = 0
        self.fail_create: int | None = None
        self.calls: list[str] = []
        self.ranges: dict[int, tuple[int, mmap.mmap]] = {}
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self.accessible: set[int] = set()
        self._ids = itertools.count(1)

    @property
    def used(self) -> int:
        """Bytes behind handles."""
        return sum(self.handles.values())

    def _check(self, fine: bool, what: str) -> None:
        if not fine:
            raise DriverError(what)

    def _whole(self, *sizes: int) -> None:
        self._check(all(size > 0 and size % self.granularity == 0 for size in sizes), f"sizes {sizes}")

    def reserve(self, size: int) -> int:
        self._whole(size)
        buffer = mmap.mmap(-1, size)
        address = np.frombuffer(buffer, dtype=np.uint8).ctypes.data
        self.ranges[address] = (size, buffer)
        return address

    def free_addresses(self, address: int, size: int) -> None:
        self._check(self.ranges.get(address, (0,))[0] == size, "not a reserved range")
        self._check(not any(address <= at < address + size for at in self.mapped), "still mapped")
        del self.ranges[address]

    def create(self, size: int) -> Any:
        self._whole(size)
        if self.fail_create is not None:
            self.fail_create -= 1
            if self.fail_create < 0:
                raise OutOfDeviceMemory("cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY")
        if self.used + self.others + size > self.total:
            raise OutOfDeviceMemory("cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY")
        handle = next(self._ids)
        self.handles[handle] = size
        self.calls.append(f"create {size}")
        return handle

    def map(self, address: int, size: int, handle: Any) -> None:
        self._check(self.handles.get(handle) == size, "a handle is mapped whole")
        self._check(self._range(address, size) is not None, "not reserved")
        self._check(address not in self.mapped, "mapped already")
        self.mapped[address] = (size, handle)

    def allow_access(self, address: int, size: int) -> None:
        end = address + size
        while address < end:
            self._check(address in self.mapped, "access to what is not mapped")
            self.accessible.add(address)
            address += self.mapped[address][0]

    def unmap(self, address: int, size: int) -> None:
        self._check(self.mapped.get(address, (0,))[0] == size, "not mapped")
        del self.mapped[address]
        self.accessible.discard(address)
        base, buffer = self._range(address, size) or (0, mmap.mmap(-1, 1))
        buffer[address - base : address - base + size] = bytes([LOST]) * size

    def release(self, handle: Any) -> None:
        self._check(handle in self.handles, "no such handle")
        self._check(all(one != handle for _, one in self.mapped.values()), "still mapped")
        del self.handles[handle]

    def memory(self) -> tuple[int, int]:
        return self.total - self.used - self.others, self.total

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def tensor(self, address: int, size: int, on_free: Callable[[], None]) -> torch.Tensor:
        self._check(address in self.accessible, "the range's beginning must be mapped")
        array = np.frombuffer(self.ranges[address][1], dtype=np.uint8, count=size).view(_Range)
        weakref.finalize(array, on_free).atexit = False
        return torch.from_numpy(array)

    def _range(self, address: int, size: int) -> tuple[int, mmap.mmap] | None:
        for base, (reserved, buffer) in self.ranges.items():
            if base <= address and address + size <= base + reserved:
                return base, buffer
        return None


class FakeHost:
    """`runner.host_copy.HostMemory` without a device. `fail_pin`: the n-th pin from now on is refused. `begun`: work of the
    device that nobody has waited for yet.
    """

    def __init__(self) -> None:
        self.pinned: set[int] = set()
        self.fail_pin: int | None = None
        self.gate: threading.Event | None = None  # fetches wait for it
        self.begun: list[Callable[[], object]] = []

    def pin(self, buffer: torch.Tensor) -> None:
        if self.fail_pin is not None:
            self.fail_pin -= 1
            if self.fail_pin < 0:
                raise RuntimeError("cudaHostRegister failed")
        self.pinned.add(buffer.data_ptr())

    def unpin(self, buffer: torch.Tensor) -> None:
        self.pinned.remove(buffer.data_ptr())

    def fetch(self, buffer: torch.Tensor, source: torch.Tensor) -> None:
        if self.gate is not None:
            self.gate.wait()
        buffer.copy_(source)

    def synchronize(self) -> None:
        """Copies on the CPU are done when they return."""
        while self.begun:
            self.begun.pop(0)()


def fake_card(driver: FakeDriver) -> Card:
    """A card for `build_from`."""
    return Card(driver, FakeHost(), Scratch())
