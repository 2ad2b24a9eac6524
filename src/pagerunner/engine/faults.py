"""What to say when the device fails under a step."""

from __future__ import annotations

import torch

_ACCELERATOR_ERROR = getattr(torch, "AcceleratorError", ())  # what torch raises for an error of the CUDA runtime


def step_fault(error: BaseException) -> str:
    """A sentence for an exception that ended a step, with the device's own numbers or reason."""
    first = (str(error).splitlines() or [""])[0].strip().rstrip(".")
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"The device ran out of memory in a step ({first}), and the engine has ended: start it with a lower "
            "gpu_memory_utilization, which leaves more beside the pages, or with a lower max_num_batched_tokens."
        )
    if isinstance(error, _ACCELERATOR_ERROR):
        return f"The device failed in a step ({first}), and the engine has ended: start it again."
    return f"A step failed ({type(error).__name__}: {first}), and the engine has ended."
