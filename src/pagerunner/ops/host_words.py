"""Words of 4 bytes from page-locked host memory to the device, and back, by a kernel.

A copy engine takes copies one after another, of whatever stream. Behind a GB of pages, which takes 22 ms, a step would wait for its few KiB
as long. A kernel shares the bus with the engine instead.

Tensors are contiguous. They must live until the kernel has run, as torch knows nothing of its access to host memory.
"""

from __future__ import annotations

import torch

from pagerunner.ops.dispatch import gpu_kernel


@gpu_kernel("host_words")
def from_host(there: torch.Tensor, here: torch.Tensor) -> None:
    """Copy host memory to the device. Nobody writes `here` from this call on until it has been read."""
    there.copy_(here, non_blocking=True)


@gpu_kernel("host_words")
def to_host(there: torch.Tensor, here: torch.Tensor, *more: torch.Tensor) -> None:
    """Copy the device's memory to the host's. `more`: another two tensors, by the same launch."""
    here.copy_(there, non_blocking=True)
    if more:
        more[1].copy_(more[0], non_blocking=True)
