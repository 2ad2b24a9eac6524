"""Copies pages between the device's memory and the host's, beside the steps.

The host memory is one range of addresses per rank. A place is a byte offset in it, and a page lies there as it lies on the device: one
contiguous range. Pages that are adjacent in both memories are one copy.

On a CUDA device loads and stores have a stream each. A plan's loads begin when the step has copied and zeroed pages, its stores when its
forward has run; both run beside later steps. Host memory must be page-locked for that. Locking takes a tenth of a second a GiB, so a thread does
it from the start on, piece by piece, and only what is locked is used. On a CPU the same copies are made at once.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch

from pagerunner.errors import CapacityError
from pagerunner.memory.units import human_bytes
from pagerunner.runner.cuda_driver import BatchedCopies
from pagerunner.runner.host_copy import HostMemory, halt, host_buffer, unlock
from pagerunner.types import PageTransfer, TransferEnd

logger = logging.getLogger(__name__)
PIECE_BYTES = 512 * 2**20
_LOOK_SECONDS = 0.0002

Run = tuple[int, int, int]
"""(offset on the device, offset in host memory, bytes)."""


def runs(transfer: PageTransfer, page_bytes: Sequence[int], piece_bytes: int) -> Iterator[Run]:
    """The transfer's pages, in their order, with those that follow each other in both memories joined. None reaches over the end of a piece."""
    source = target = size = 0
    for group, offset, place in transfer.pages:
        more = page_bytes[group]
        if size and offset == source + size and place == target + size and place % piece_bytes:
            size += more
            continue
        if size:
            yield source, target, size
        source, target, size = offset, place, more
    if size:
        yield source, target, size


class HostPages:
    """So many bytes of host memory. With a `memory` its pieces are locked one after another, by a thread; else all can be used at once.

    A piece is a multiple of `slab_bytes`, so no slab lies in two. `ready_bytes` can be used by now. What is `shared` can be mapped by another
    process of this user, under the name `path`, as long as this one lives.
    """

    def __init__(self, num_bytes: int, slab_bytes: int, memory: HostMemory | None, *, shared: bool = False) -> None:
        file, self.path = -1, ""
        try:
            if shared:
                file = os.memfd_create("pagerunner host pages")
                weakref.finalize(self, os.close, file)
                os.ftruncate(file, num_bytes)
                self.path = f"/proc/{os.getpid()}/fd/{file}"
            self.bytes = host_buffer(num_bytes, file)
        except OSError as error:
            raise CapacityError(
                f"{human_bytes(num_bytes)} of host memory can't be had for pages ({error.strerror}); lower kv_offloading_size."
            ) from None
        self.piece_bytes = max(PIECE_BYTES // slab_bytes, 1) * slab_bytes
        self.ready_bytes = 0 if memory is not None else num_bytes
        self._memory = memory
        self._stop = threading.Event()

    def begin(self) -> None:
        """Begin to lock pieces. To be called once, when no graphs are captured any more."""
        memory = self._memory
        if memory is None:
            return
        pinned: list[torch.Tensor] = []
        thread = threading.Thread(target=self._lock, args=(memory, pinned), name="pagerunner-host-pages", daemon=True)
        thread.start()
        weakref.finalize(self, halt, self._stop, thread)  # not in a CUDA call when the interpreter ends
        gone = weakref.finalize(self, unlock, self._stop, thread, memory, pinned)
        gone.atexit = False  # the system takes everything back by itself

    def stop(self) -> None:
        """Lock no more pieces."""
        self._stop.set()

    def _lock(self, memory: HostMemory, pinned: list[torch.Tensor]) -> None:
        for piece in self.bytes.split(self.piece_bytes):
            if self._stop.is_set():
                return
            try:
                memory.pin(piece)
            except RuntimeError as error:
                logger.warning(
                    "Pages go to %s of host memory and no more, as the next piece can't be page-locked: %s",
                    human_bytes(self.ready_bytes),
                    str(error),
                )
                return
            pinned.append(piece)
            self.ready_bytes += piece.numel()


class _Copies(Protocol):
    """The copies of a transfer, under way."""

    def done(self) -> bool: ...

    def seconds(self) -> float: ...


class _HostCopies:
    """Of a CPU: they are done when they are begun."""

    def __init__(self, device: torch.Tensor, host: torch.Tensor, copies: Iterable[Run], *, loads: bool) -> None:
        began = time.perf_counter()
        for offset, place, size in copies:
            there, here = device[offset : offset + size], host[place : place + size]
            (there if loads else here).copy_(here if loads else there)
        self._seconds = time.perf_counter() - began

    def done(self) -> bool:
        return True

    def seconds(self) -> float:
        return self._seconds


class _DeviceCopies:
    """On a stream of their own, behind what the engine has launched so far."""

    def __init__(
        self, copies: Sequence[tuple[int, int, int]], batched: BatchedCopies, stream: torch.cuda.Stream
    ) -> None:
        launched = torch.cuda.Event()  # type: ignore[no-untyped-call]
        launched.record()
        stream.wait_event(launched)
        self._first, self._last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            self._first.record()
            batched(copies, stream.cuda_stream)
            self._last.record()

    def done(self) -> bool:
        return bool(self._last.query())

    def seconds(self) -> float:
        return float(self._first.elapsed_time(self._last)) / 1e3


class Transfers:
    """Copies pages for plans. `load` and `store` are called where a step lets them begin, by the thread that runs steps."""

    def __init__(self, kv_bytes: torch.Tensor, page_bytes: Sequence[int], host: HostPages) -> None:
        self.host = host
        self._bytes, self._page_bytes = kv_bytes, page_bytes
        self._cuda = (
            (BatchedCopies(), [torch.cuda.Stream(kv_bytes.device) for _ in range(2)])
            if kv_bytes.device.type == "cuda"
            else None
        )
        self._under_way: dict[int, _Copies] = {}
        self._changed = threading.Condition()

    def load(self, transfers: Iterable[PageTransfer]) -> None:
        """Begin those that load: the step has copied and zeroed pages."""
        for transfer in transfers:
            if transfer.loads:
                self._begin(transfer)

    def store(self, transfers: Iterable[PageTransfer]) -> None:
        """Begin those that store: the step's forward has been launched."""
        for transfer in transfers:
            if not transfer.loads:
                self._begin(transfer)

    def _begin(self, transfer: PageTransfer) -> None:
        device, host, loads = self._bytes, self.host.bytes, transfer.loads
        found = runs(transfer, self._page_bytes, self.host.piece_bytes)
        begun: _Copies
        if self._cuda is None:
            begun = _HostCopies(device, host, found, loads=loads)
        else:
            batched, streams = self._cuda
            there, here = device.data_ptr(), host.data_ptr()
            copies = [
                (there + offset, here + place, size) if loads else (here + place, there + offset, size)
                for offset, place, size in found
            ]
            begun = _DeviceCopies(copies, batched, streams[loads])
        with self._changed:
            self._under_way[transfer.number] = begun
            self._changed.notify_all()

    def ended(self, seconds: float = 0.0) -> list[TransferEnd]:
        """Transfers that have ended since the last call. With none, wait for one under way, or for one to begin, for up to so many seconds."""
        until = time.monotonic() + seconds
        while True:
            with self._changed:
                done = {number: copies.seconds() for number, copies in self._under_way.items() if copies.done()}
                for number in done:
                    del self._under_way[number]
                left = until - time.monotonic()
                if done or left <= 0:
                    return [TransferEnd(number, True, took) for number, took in done.items()]
                if not self._under_way:
                    self._changed.wait(left)
                    continue
            time.sleep(min(_LOOK_SECONDS, left))

    def drain(self) -> None:
        """Wait until nothing is under way, and forget what has ended."""
        for stream in self._cuda[1] if self._cuda is not None else ():
            stream.synchronize()
        with self._changed:
            self._under_way.clear()
