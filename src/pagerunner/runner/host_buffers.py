"""Buffers in host memory for adapters, which come and go by the thousand.

They aren't malloc's. What threads free of a few MB stays in malloc's arenas between what others hold: 40 adapters of 5 MB, of which others
took the places, held 136 MB more than they had, and it grew. Nor are buffers given back to the system one by one. To lock a buffer's pages, or to unlock them,
may wait for the device, and who drops an adapter may be the thread that runs the steps. So a buffer is used again, for an adapter of about
the same size, and few are kept for that.

The driver has a lock of its own, which it holds while it locks or unlocks pages, 0.5 s a GB. A step's launches wait for it, and each may wait again. So an
adapter of 1.7 GB, all experts of a 30B, is locked in pieces of 4 MiB, and after each the lock is left alone for as long as the piece took. With pieces of
16 MiB and 0.2 ms between them a step of 13 ms took 695 ms: each of its launches waited for a piece.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref

import torch

from pagerunner.lora.blocks import LOCK_BYTES
from pagerunner.lora.pauses import pause
from pagerunner.runner.host_copy import HostMemory, host_buffer

logger = logging.getLogger(__name__)
MOST_SPARE = 4
"""Buffers that nobody uses. As many as are read at once, so that adapters of one size that take turns need no others."""
_PAGE = 4096


class _Holder:
    """Whoever keeps this uses a buffer."""


class HostBuffers:
    """Gives buffers, page-locked ones if there is a `memory` that locks them."""

    def __init__(self, memory: HostMemory | None = None) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # of locking pages: in one thread's pause no other one has the driver's lock
        self._spare: list[torch.Tensor] = []  # the one used last stands last; whoever takes one off holds the lock
        self._pinned: set[int] = set()  # addresses
        self.made = 0
        """Buffers that were asked of the system so far."""
        gone = weakref.finalize(self, _unlock, memory, self._pinned, self._spare)
        gone.atexit = False  # the system takes everything back by itself

    def take(self, elements: int, dtype: torch.dtype) -> tuple[torch.Tensor, object]:
        """A buffer of so many elements, which hold anything, and what must be kept with it."""
        size = -(-max(elements * dtype.itemsize, 1) // _PAGE) * _PAGE
        buffer = self._found(size)
        if buffer is None:
            buffer = self._make(size)
        holder = _Holder()
        # Without the lock, as the collector may call this in a thread that has it. It keeps `self`, which unlocks the last buffers when it goes.
        gone = weakref.finalize(holder, lambda: self._spare.append(buffer))
        gone.atexit = False
        return buffer[: elements * dtype.itemsize].view(dtype), holder

    def _found(self, size: int) -> torch.Tensor | None:
        """The smallest spare buffer that is large enough, and isn't larger by a quarter. Where there are too many others, the oldest go."""
        with self._lock:
            sizes = enumerate(map(torch.Tensor.numel, tuple(self._spare)))
            fitting = [(one, at) for at, one in sizes if size <= one <= size + size // 4]
            if fitting:
                return self._spare.pop(min(fitting)[1])
            old = self._spare[:-MOST_SPARE]
            del self._spare[: len(old)]
        _unlock(self._memory, self._pinned, old)
        return None

    def _make(self, size: int) -> torch.Tensor:
        buffer = host_buffer(size)
        self.made += 1
        if self._memory is not None:
            try:
                for piece in buffer.split(LOCK_BYTES):
                    with self._turn:
                        begun = time.perf_counter()
                        self._memory.pin(piece)
                        self._pinned.add(piece.data_ptr())
                        pause(time.perf_counter() - begun)
            except RuntimeError as error:
                logger.warning("%s An adapter is copied from ordinary memory, which is slower.", str(error))
        return buffer


def _unlock(memory: HostMemory | None, pinned: set[int], buffers: list[torch.Tensor]) -> None:
    """Unlock before buffers are unmapped: locked memory that is unmapped stays lost to the system."""
    while buffers:
        for piece in buffers.pop().split(LOCK_BYTES):
            if memory is not None and piece.data_ptr() in pinned:
                begun = time.perf_counter()
                pinned.discard(piece.data_ptr())
                memory.unpin(piece)
                pause(time.perf_counter() - begun)
