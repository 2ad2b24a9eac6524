"""The arena of a CUDA device: ranges of virtual addresses with physical memory mapped under their beginnings.

Addresses are reserved once. So tensors over a region, and CUDA graphs captured over it, stay valid while memory is taken away
and brought back. They also see memory that is mapped after they were made.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch

from pagerunner.errors import CapacityError
from pagerunner.memory.units import human_bytes
from pagerunner.runner.arena import NAMES, Tag
from pagerunner.runner.cuda_driver import Driver, OutOfDeviceMemory

PIECE_BYTES = 512 * 2**20  # one handle; on an H200 100 GiB map in 0.04 s in pieces of this size, in 0.11 s in 64 MiB


@dataclass(slots=True)
class _Region:
    """`pieces` are (bytes, handle), one behind the other from `address` on; `wanted` is how much `map` backs."""

    address: int
    reserved: int
    wanted: int
    pieces: list[tuple[int, Any]] = field(default_factory=list)

    @property
    def mapped(self) -> int:
        return sum(size for size, _ in self.pieces)


class CudaArena:
    """See Arena. Memory is taken in pieces of `piece_bytes`; the last one is as small as the granularity allows.

    A region's memory goes back when the arena and every tensor over the region are gone.
    """

    def __init__(self, driver: Driver, piece_bytes: int = PIECE_BYTES) -> None:
        self._driver = driver
        self._piece_bytes = self._rounded(piece_bytes)
        self._regions: dict[Tag, _Region] = {}
        self._bytes: dict[Tag, torch.Tensor] = {}

    def reserve(self, tag: Tag, num_bytes: int, mapped: int | None = None) -> torch.Tensor:
        """See Arena.reserve. At least one piece is mapped at once."""
        if tag in self._regions:
            raise RuntimeError(f"region {tag!r} is reserved already")
        size = self._rounded(num_bytes)
        first = num_bytes if mapped is None else mapped
        region = _Region(self._driver.reserve(size), size, max(first, 1))
        try:
            self._extend(tag, region)
        except BaseException:
            self._driver.free_addresses(region.address, size)
            raise
        self._regions[tag] = region
        driver = self._driver

        def gone() -> None:
            driver.synchronize()
            _take_away(driver, region)
            driver.free_addresses(region.address, region.reserved)

        self._bytes[tag] = driver.tensor(region.address, num_bytes, gone)
        return self._bytes[tag]

    def grow(self, tag: Tag, num_bytes: int) -> None:
        """See Arena.grow."""
        region = self._regions[tag]
        if num_bytes > region.reserved:
            raise RuntimeError(f"region {tag!r} has {region.reserved} bytes of addresses, not {num_bytes}")
        before = region.wanted
        region.wanted = max(before, num_bytes)
        try:
            self._extend(tag, region)
        except BaseException:
            region.wanted = before
            raise

    def map(self, tag: Tag) -> None:
        """See Arena.map."""
        self._extend(tag, self._regions[tag])

    def unmap(self, tag: Tag) -> None:
        """See Arena.unmap. Waits for work that may still use the region."""
        region = self._regions[tag]
        if region.pieces:
            self._driver.synchronize()
            _take_away(self._driver, region)

    def mapped_bytes(self) -> dict[Tag, int]:
        """See Arena.mapped_bytes."""
        return {tag: region.mapped for tag, region in self._regions.items()}

    def _rounded(self, size: int) -> int:
        return -(-max(size, 1) // self._driver.granularity) * self._driver.granularity

    def _extend(self, tag: Tag, region: _Region) -> None:
        """Map pieces behind the last one until the region has what it wants; if one fails, none of them stays."""
        start = end = region.mapped
        target = self._rounded(region.wanted)
        before = len(region.pieces)
        try:
            while end < target:
                size = min(self._piece_bytes, target - end)
                handle = self._driver.create(size)
                try:
                    self._driver.map(region.address + end, size, handle)
                except BaseException:
                    self._driver.release(handle)
                    raise
                region.pieces.append((size, handle))
                end += size
            if end > start:
                self._driver.allow_access(region.address + start, end - start)
        except BaseException as error:
            with contextlib.suppress(Exception):  # tell the first error, not one of the clean-up
                _take_away(self._driver, region, before)
            if isinstance(error, OutOfDeviceMemory):
                raise self._out_of_memory(tag, target, target - start) from error
            raise

    def _out_of_memory(self, tag: Tag, target: int, missing: int) -> CapacityError:
        free, total = self._driver.memory()
        held = [f"{human_bytes(size)} of {NAMES[other]}" for other, size in self.mapped_bytes().items() if size]
        return CapacityError(
            f"{human_bytes(target)} of device memory are wanted for {NAMES[tag]}, of which {human_bytes(missing)} are "
            f"still to be mapped, but {human_bytes(free)} of the device's {human_bytes(total)} are free"
            f"{', not all of which its driver hands out' if free >= missing else ''}"
            f"{' (this engine holds ' + ' and '.join(held) + ')' if held else ''}: free memory on the device"
            f"{', or lower gpu_memory_utilization, kv_cache_memory_bytes or num_gpu_blocks_override' if tag == 'kv' else ''}."
        )


def _take_away(driver: Driver, region: _Region, keep: int = 0) -> None:
    """Unmap and release all pieces but the first `keep`, from the last backwards, so that an error leaves whole pieces."""
    end = region.mapped
    while len(region.pieces) > keep:
        size, handle = region.pieces[-1]
        driver.unmap(region.address + end - size, size)
        region.pieces.pop()
        end -= size
        driver.release(handle)
