"""The arena: the one owner of the memory that holds weights and pages, in tagged regions that can be unmapped.

Nothing else lives here. Tables, sampling state and constants are ordinary tensors, so a sleeping engine cannot lose
them. On the CPU a region is one buffer whose storage is really given back while it is unmapped; tensors that view the
buffer stay valid across unmap and map, but their contents do not. On a GPU a region is a range of addresses
(runner/cuda_arena.py).
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Literal, Protocol

import torch

from pagerunner.errors import CapacityError
from pagerunner.memory.units import human_bytes

Tag = Literal["weights", "kv"]
TAGS: tuple[Tag, ...] = ("weights", "kv")
NAMES: dict[Tag, str] = {"weights": "weights", "kv": "pages"}


class Arena(Protocol):
    """Memory regions by tag. A region is reserved once, then mapped and unmapped any number of times.

    The beginning of a region is mapped, as many bytes as `reserve` and `grow` asked for. `map` brings the same bytes back.
    """

    def reserve(self, tag: Tag, num_bytes: int, mapped: int | None = None) -> torch.Tensor:
        """Reserve a region and map its first `mapped` bytes (None: all of it).

        Returns all its bytes, uint8 of shape [num_bytes]; only those that are mapped may be touched.

        Raises:
            RuntimeError: the tag is reserved already.
            CapacityError: memory can't back it; nothing is reserved then.
        """

    def grow(self, tag: Tag, num_bytes: int) -> None:
        """Map at least the first `num_bytes` bytes of a reserved region, now and by every later `map`.

        Raises CapacityError when the device has too little memory; the region is then as it was.
        """

    def map(self, tag: Tag) -> None:
        """Back the region with memory. Contents are undefined. Idempotent.

        Raises CapacityError when the device has too little memory; the region is then as it was.
        """

    def unmap(self, tag: Tag) -> None:
        """Give the region's memory back. Idempotent."""

    def mapped_bytes(self) -> dict[Tag, int]:
        """Bytes of memory behind each reserved region now."""


def ask_for_large_pages(buffer: torch.Tensor) -> None:
    """Ask the kernel for pages of 2 MiB behind host memory that nobody has touched yet; what it says doesn't matter.

    Weights are read from beginning to end in every step. With pages of 4 KiB each of them costs a look into the page tables.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    first = -(-buffer.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    count = (buffer.data_ptr() + buffer.untyped_storage().size() - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if count > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(count), mmap.MADV_HUGEPAGE)


class CpuArena:
    """An arena of plain host buffers. A reserved region is mapped whole: untouched host memory costs nothing."""

    def __init__(self) -> None:
        self._regions: dict[Tag, tuple[torch.Tensor, int]] = {}

    def reserve(self, tag: Tag, num_bytes: int, mapped: int | None = None) -> torch.Tensor:
        """See Arena.reserve."""
        if tag in self._regions:
            raise RuntimeError(f"region {tag!r} is reserved already")
        try:
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise CapacityError(
                f"The {human_bytes(num_bytes)} of host memory that are wanted for {NAMES[tag]} can't be had: free memory, or "
                "lower kv_cache_memory_bytes or num_gpu_blocks_override."
            ) from error
        ask_for_large_pages(buffer)
        self._regions[tag] = (buffer, num_bytes)
        return buffer

    def grow(self, tag: Tag, num_bytes: int) -> None:
        """See Arena.grow."""
        if num_bytes > self._regions[tag][1]:
            raise RuntimeError(f"region {tag!r} has {self._regions[tag][1]} bytes, not {num_bytes}")
        self.map(tag)

    def map(self, tag: Tag) -> None:
        """See Arena.map."""
        buffer, num_bytes = self._regions[tag]
        if buffer.untyped_storage().size() != num_bytes:
            buffer.untyped_storage().resize_(num_bytes)
            ask_for_large_pages(buffer)

    def unmap(self, tag: Tag) -> None:
        """See Arena.unmap."""
        self._regions[tag][0].untyped_storage().resize_(0)

    def mapped_bytes(self) -> dict[Tag, int]:
        """See Arena.mapped_bytes."""
        return {tag: buffer.untyped_storage().size() for tag, (buffer, _) in self._regions.items()}
