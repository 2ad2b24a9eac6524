"""A device that no longer works, and what must be left alone then."""

from __future__ import annotations

import ctypes

import torch


def device_failure() -> str | None:
    """The error that ended the CUDA context of this process, after which no call succeeds; None while there is none."""
    if not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return first_line(error)
    return None


def never_free(*things: object) -> None:
    """Keep objects for as long as the process lives: freeing tensors of a context that has ended aborts the process."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def first_line(error: BaseException) -> str:
    """Of an error's text: torch appends what to do about it, and where in its sources it happened."""
    return (str(error).splitlines() or [""])[0].strip().rstrip(".")
