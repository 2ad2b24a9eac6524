"""What a CUDA device must have for Triton kernels of a certain size."""

from __future__ import annotations

import torch

from pagerunner.ops.dispatch import has_triton

OLDEST_DEVICE = (8, 0)


def lacks(device: str, shared_memory: int) -> str | None:
    """Why kernels whose programs take `shared_memory` bytes can't run there; None if they can, or run as torch twins."""
    if device != "cuda":
        return None
    if not has_triton():
        return "Triton is not installed"
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST_DEVICE:
        return f"its kernels need compute capability 8.0, this device has {capability[0]}.{capability[1]}"
    there = int(torch.cuda.get_device_properties().shared_memory_per_block_optin)
    if there < shared_memory:
        return f"its kernels need {shared_memory} bytes of shared memory a program, this device has {there}"
    return None
