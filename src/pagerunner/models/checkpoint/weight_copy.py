"""Copies of host tensors into weights: at once on a CPU, through page-locked buffers to a CUDA device."""

from __future__ import annotations

import threading

import torch

from pagerunner.life import LIFE

BUFFER_BYTES = 32 * 2**20


def copy_now(target: torch.Tensor, source: torch.Tensor) -> None:
    """The copy as torch makes it."""
    target.copy_(source)


class PinnedStager:
    """Fills device tensors from host tensors through two page-locked buffers: one is filled while the other is sent.

    Files are read into the buffers directly, and converted to the target's dtype on the way.
    """

    def __init__(self, device: torch.device, buffer_bytes: int = BUFFER_BYTES) -> None:
        pinned = device.type == "cuda"
        self._buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._next = 0

    def __call__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See CopyWeight of `quant/sinks.py`."""
        if not target.is_contiguous():
            whole = torch.empty(source.shape, dtype=target.dtype, device=target.device)
            self(whole, source)
            target.copy_(whole)
            return
        flat_target, flat_source = target.view(-1), source.reshape(-1)
        step = self._buffers[0].numel() // target.dtype.itemsize
        for start in range(0, flat_source.numel(), step):
            part = flat_source[start : start + step]
            self._send(flat_target[start : start + part.numel()], part)
            LIFE.moved()

    def _send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        index, self._next = self._next, 1 - self._next
        sent = self._sent[index]
        if sent is not None:
            sent.synchronize()
        staged = self._buffers[index].view(target.dtype)[: source.numel()]
        staged.copy_(source)
        target.copy_(staged, non_blocking=True)
        if target.is_cuda:
            event = torch.cuda.Event()
            event.record()
            self._sent[index] = event


class ThreadStagers:
    """A PinnedStager for each thread that copies, in the order of the stream that is current there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = threading.local()

    def __call__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See CopyWeight of `quant/sinks.py`."""
        if not hasattr(self._own, "stager"):
            self._own.stager = PinnedStager(self._device)
        self._own.stager(target, source)
