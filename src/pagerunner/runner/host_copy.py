"""A copy of the weights in page-locked host memory, so that sleep only unmaps and waking runs at the bus's speed.

Weights don't change, so the copy is made once, in the background. Pinning is slow, because the system must find and lock every
page. The copy is made in pieces, so that no piece keeps the driver's lock for long.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from pagerunner.errors import CapacityError
from pagerunner.life import LIFE
from pagerunner.memory.units import human_bytes

logger = logging.getLogger(__name__)
PIECE_BYTES = 256 * 2**20
_SPARE_BYTES = 2 * 2**30  # host memory that a copy leaves to the rest of the machine


class HostMemory(Protocol):
    """How a host buffer becomes page-locked, and how a thread copies beside the running engine."""

    def pin(self, buffer: torch.Tensor) -> None:
        """Lock a buffer's pages. Raises RuntimeError when the system refuses."""

    def unpin(self, buffer: torch.Tensor) -> None:
        """Unlock them again."""

    def fetch(self, buffer: torch.Tensor, source: torch.Tensor) -> None:
        """Copy from the device into the buffer, without waiting for the engine's own work; done when this returns."""

    def synchronize(self) -> None:
        """Wait for the copies to the device that were begun."""


class CudaHostMemory:
    """See HostMemory. Buffers are registered with CUDA; fetches run on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def pin(self, buffer: torch.Tensor) -> None:
        """See HostMemory.pin. Touched first, by several threads: locking pages that are there is quick."""
        buffer.zero_()
        with torch.cuda.device(self._stream.device):  # a thread begins with device 0, which another rank may have
            status = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)
        if int(status) != 0:
            raise RuntimeError(f"cudaHostRegister of {human_bytes(buffer.numel())} failed: {status}")

    def unpin(self, buffer: torch.Tensor) -> None:
        """See HostMemory.unpin."""
        with torch.cuda.device(self._stream.device):
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())

    def fetch(self, buffer: torch.Tensor, source: torch.Tensor) -> None:
        """See HostMemory.fetch."""
        with torch.cuda.stream(self._stream):
            buffer.copy_(source, non_blocking=True)
        self._stream.synchronize()

    def synchronize(self) -> None:
        """See HostMemory.synchronize."""
        torch.cuda.synchronize(self._stream.device)


class HostCopy:
    """A host copy of one device region, uint8 [num_bytes], which must not change until `drop`.

    `start` begins it in a thread, `finish` waits for it (and makes it, if it wasn't begun), `restore` copies it back.
    """

    def __init__(
        self, source: torch.Tensor, memory: HostMemory, available: Callable[[], int], piece_bytes: int = PIECE_BYTES
    ) -> None:
        """`available` says how many bytes of host memory may still be taken."""
        self._memory = memory
        self._available = available
        self._targets = list(source.split(piece_bytes))
        self._bytes = source.numel()
        self._pieces: list[torch.Tensor] = []
        self._pinned: list[torch.Tensor] = []
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    @property
    def complete(self) -> bool:
        """Whether the copy could be restored now."""
        return len(self._pieces) == len(self._targets)

    def start(self) -> None:
        """Begin to copy in the background. Idempotent."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pagerunner-host-copy", daemon=True)
            self._thread.start()
            weakref.finalize(self, halt, self._stop, self._thread)  # not in a CUDA call when the interpreter ends
            gone = weakref.finalize(self, unlock, self._stop, self._thread, self._memory, self._pinned)
            gone.atexit = False  # the system takes everything back by itself

    def finish(self) -> None:
        """Wait until the copy is complete.

        Raises CapacityError when the host has too little memory for it; it may then be tried again.
        """
        self.start()
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            error, self._error, self._thread = self._error, None, None
            raise error

    def restore(self) -> None:
        """Begin to copy back, on the current stream; `wait` waits for it."""
        for target, piece in zip(self._targets, self._pieces, strict=True):
            target.copy_(piece, non_blocking=True)

    def wait(self) -> None:
        """Wait for a `restore`."""
        self._memory.synchronize()

    def stop(self) -> None:
        """Stop reading the region, now; the copy is not completed."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def drop(self) -> None:
        """Stop, and give the host memory back in the background: unlocking takes the driver's lock, 0.1 s a GB.

        The interpreter waits for it: a thread that returns from the driver to an interpreter that is gone aborts.
        """
        self.stop()
        threading.Thread(target=self._free, name="pagerunner-host-copy-free").start()

    def _run(self) -> None:
        try:
            self._check_room()
            while not self.complete and not self._stop.is_set():
                source = self._targets[len(self._pieces)]
                piece = host_buffer(source.numel())
                try:
                    self._memory.pin(piece)
                    self._pinned.append(piece)
                except RuntimeError as error:
                    logger.warning(
                        "The host copy of the weights is not page-locked, and waking will be slow: %s", error
                    )
                self._memory.fetch(piece, source)
                self._pieces.append(piece)
                LIFE.moved()
        except Exception as error:  # whoever waits for the copy raises it
            self._error = error

    def _check_room(self) -> None:
        room = self._available() - _SPARE_BYTES
        missing = self._bytes - sum(piece.numel() for piece in self._pieces)
        if missing > room:
            raise CapacityError(
                f"Sleep level 1 keeps the weights in host memory: {human_bytes(missing)} are wanted, and "
                f"{human_bytes(max(room, 0))} can be had beside {human_bytes(_SPARE_BYTES)} for the rest of the machine; "
                "use level 2, which reads the checkpoint again, or free host memory."
            )

    def _free(self) -> None:
        _unpin(self._memory, self._pinned)
        self._pieces.clear()


def halt(stop: threading.Event, thread: threading.Thread) -> None:
    """Let a thread end, and wait for it."""
    stop.set()
    if thread is not threading.current_thread():
        thread.join()


def unlock(stop: threading.Event, thread: threading.Thread, memory: HostMemory, pinned: list[torch.Tensor]) -> None:
    """Unlock before the buffer is unmapped: locked memory that is unmapped stays lost to the system."""
    halt(stop, thread)
    _unpin(memory, pinned)


def _unpin(memory: HostMemory, pinned: list[torch.Tensor]) -> None:
    while pinned:
        memory.unpin(pinned.pop())


def host_buffer(size: int, file: int = -1) -> torch.Tensor:
    """Host memory of its own pages, large ones where the system has them. That of a `file` in memory is shared with who maps it, too."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if file < 0 else mmap.MAP_SHARED  # which rarely has large pages
    memory = mmap.mmap(file, size, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
