"""Host and device without waiting: what the host lists to the device, results back to the host behind a CUDA event."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pagerunner.ops.host_words import from_host, to_host

_held: deque[tuple[torch.cuda.Event, tuple[torch.Tensor, ...]]] = deque()
_holding = threading.Lock()


def _hold(*tensors: torch.Tensor) -> torch.cuda.Event:
    """Keep page-locked memory until the event has happened that is returned, which the caller records behind a kernel's launch.

    torch knows of copies from and to such memory, and of no kernels. It would hand out the memory again while one is under way. One thread calls, that of the steps: of two
    threads both could have an event that isn't recorded yet.
    """
    with _holding:
        # An event that an interrupt has kept from being recorded counts as happened. The next one happens later: all is on one stream.
        while len(_held) > 1 and _held[0][0].query() and _held[1][0].query():
            _held.popleft()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        _held.append((event, tensors))
    return event


def put(values: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """Copy a tensor of the host, which the caller may change afterwards, to one of equal dtype and shape on a device, and return that."""
    if there.device.type == "cpu":
        return there.copy_(values)
    pinned = values.pin_memory()
    event = _hold(pinned)
    from_host(there, pinned)
    event.record()
    return there


def to_device(values: Sequence[Any] | np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A list or array as a tensor on `device`; on CUDA through pinned memory, so that the stream isn't synchronised."""
    return _moved(torch.tensor(values, dtype=dtype), device)


def bits_to_device(masks: list[bytes], device: torch.device) -> torch.Tensor:
    """Bitmasks of equal length (a multiple of 4) as int32 [N, W] on `device`, without waiting."""
    size = len(masks[0])
    on_host = torch.empty(len(masks), size // 4, dtype=torch.int32, pin_memory=device.type == "cuda")
    there = memoryview(on_host.numpy()).cast("B")
    for number, mask in enumerate(masks):
        there[number * size : (number + 1) * size] = mask
    return _moved(on_host, device)


def _moved(on_host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return on_host if device.type == "cpu" else put(on_host, torch.empty_like(on_host, device=device))


class ToHost:
    """Tensors on their way to the host.

    The copies are queued at once, behind the step that made them and ahead of the next step; `lists` waits for these
    copies only. Reading a device tensor later would wait for everything launched since.
    """

    __slots__ = ("_event", "_tensors")

    def __init__(self, tensors: tuple[torch.Tensor, ...], device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cpu":
            self._tensors = tuple(tensor.clone() for tensor in tensors)
            return
        pinned = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        event = _hold(*pinned)
        pairs = [one for source, host in zip(tensors, pinned, strict=True) for one in (source.contiguous(), host)]
        for first in range(0, len(pairs), 4):
            to_host(*pairs[first : first + 4])
        self._tensors, self._event = tuple(pinned), event
        event.record()

    def lists(self) -> list[list[Any]]:
        """The tensors as nested Python lists; waits for the copies where they are not done yet."""
        if self._event is not None:
            self._event.synchronize()
        return [t.tolist() for t in self._tensors]


class BestCopies:
    """Copies of sampled tokens and their rows' largest logits to the host: `ToHost` for what every step
    sends. The host memory is used again, because allocating it and its event takes as long as the copies.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._max_rows = max_rows
        self._on_cuda = device.type == "cuda"
        self._free: list[_BestBuffers] = []

    def copy(self, tokens_S: torch.Tensor, best_S: torch.Tensor) -> BestCopy:
        """Queue the copies of tokens int64 [S] and logits float32 [S]."""
        buffers = self._free.pop() if self._free else _BestBuffers(self._max_rows, self._on_cuda)
        return BestCopy(buffers, tokens_S, best_S, self._free)


class _BestBuffers:
    """Host memory of one step, and the event that says that the copy into it is done."""

    __slots__ = ("__weakref__", "best", "event", "tokens")

    def __init__(self, max_rows: int, on_cuda: bool) -> None:
        with torch.inference_mode(False):
            self.tokens = torch.empty(max_rows, dtype=torch.int64, pin_memory=on_cuda)
            self.best = torch.empty(max_rows, dtype=torch.float32, pin_memory=on_cuda)
        self.event: torch.cuda.Event | None = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
        if self.event is not None:  # a step that nobody reads may still be under way
            weakref.finalize(self, _held.append, (self.event, (self.tokens, self.best))).atexit = False


class BestCopy:
    """One step's copies; see ToHost. Read them once: afterwards the memory is the next step's."""

    __slots__ = ("_buffers", "_count", "_free")

    def __init__(
        self, buffers: _BestBuffers, tokens_S: torch.Tensor, best_S: torch.Tensor, free: list[_BestBuffers]
    ) -> None:
        self._buffers = buffers
        self._free = free
        self._count = count = tokens_S.shape[0]
        to_host(tokens_S, buffers.tokens[:count], best_S, buffers.best[:count])
        if buffers.event is not None:
            buffers.event.record()

    def lists(self) -> list[list[Any]]:
        """Tokens and logits; waits for the copies where they are not done yet."""
        buffers = self._buffers
        if buffers.event is not None:
            buffers.event.synchronize()
        found = [buffers.tokens[: self._count].tolist(), buffers.best[: self._count].tolist()]
        self._free.append(buffers)
        return found
