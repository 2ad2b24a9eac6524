"""What to say when the device fails under a step."""

from __future__ import annotations

import torch

from pagerunner.errors import EngineDeadError, described
from pagerunner.ops.device_errors import first_line, out_of_memory

_ACCELERATOR_ERROR = getattr(torch, "AcceleratorError", ())  # what torch raises for an error of the CUDA runtime


def step_fault(error: BaseException, failure: str | None = None) -> str:
    """A sentence for an exception that ended a step, with the device's own numbers or reason.

    `failure` is the device's error, if `device_failure` found one. The exception may be only its consequence.
    """
    if isinstance(error, EngineDeadError):  # of another rank, which has said it
        return str(error)
    first = first_line(error)
    if failure is None and out_of_memory(error):
        return (
            f"The device ran out of memory in a step ({first}), and the engine has ended: start it with a lower "
            "gpu_memory_utilization, which leaves more beside the pages, or with a lower max_num_batched_tokens."
        )
    if failure is not None or isinstance(error, _ACCELERATOR_ERROR):
        return f"The device failed in a step ({failure or first}), and the engine has ended: start it again."
    return f"A step failed ({described(error, first_line)}), and the engine has ended."
