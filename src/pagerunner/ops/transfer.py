"""Host and device without waiting: what the host lists to the device, results back to the host behind a CUDA event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def to_device(values: Sequence[Any] | np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A list or array as a tensor on `device`; on CUDA through pinned memory, so that the stream isn't synchronised."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def bits_to_device(masks: list[bytes], device: torch.device) -> torch.Tensor:
    """Bitmasks of equal length (a multiple of 4) as int32 [N, W] on `device`, without waiting."""
    bits_NW = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.int32).view(len(masks), -1)
    return bits_NW if device.type == "cpu" else bits_NW.pin_memory().to(device, non_blocking=True)


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
        for host, source in zip(pinned, tensors, strict=True):
            host.copy_(source, non_blocking=True)
        self._tensors = tuple(pinned)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def lists(self) -> list[list[Any]]:
        """The tensors as nested Python lists; waits for the copies where they are not done yet."""
        if self._event is not None:
            self._event.synchronize()
        return [t.tolist() for t in self._tensors]
