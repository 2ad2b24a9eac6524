"""What to say, and what to leave alone, when the device fails under a step."""

from __future__ import annotations

import ctypes

import torch

_ACCELERATOR_ERROR = getattr(torch, "AcceleratorError", ())  # what torch raises for an error of the CUDA runtime


def device_failure() -> str | None:
    """The error that ended the CUDA context of this process, after which no call succeeds; None while there is none."""
    if not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return _first_line(error)
    return None


def never_free(*things: object) -> None:
    """Keep objects for as long as the process lives: freeing tensors of a context that has ended aborts the process."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def step_fault(error: BaseException, failure: str | None = None) -> str:
    """A sentence for an exception that ended a step, with the device's own numbers or reason. `failure`: as
    `device_failure` found it; the exception may be but its consequence.
    """
    first = _first_line(error)
    if failure is not None or isinstance(error, _ACCELERATOR_ERROR):
        return f"The device failed in a step ({failure or first}), and the engine has ended: start it again."
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"The device ran out of memory in a step ({first}), and the engine has ended: start it with a lower "
            "gpu_memory_utilization, which leaves more beside the pages, or with a lower max_num_batched_tokens."
        )
    return f"A step failed ({type(error).__name__}: {first}), and the engine has ended."


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0].strip().rstrip(".")
