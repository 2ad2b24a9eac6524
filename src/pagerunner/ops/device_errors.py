"""What a device's errors mean: the device is full, or it no longer works. Then its tensors must not be freed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from pagerunner.errors import CapacityError


def device_failure() -> str | None:
    """The error that ended the CUDA context of this process; None while the context works.

    No call succeeds after such an error.
    """
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


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device's memory is used up.

    Only torch's allocator on CUDA devices has a type for such an error. The one for CPUs, the CUDA runtime (for a stream, or a context), Triton (for
    a kernel's code) and cuBLAS (for its workspace) say so in the text of a RuntimeError.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error).lower().replace("_", " ")
    said = ("out of memory", "cublas status alloc failed", "defaultcpuallocator: can't allocate memory")
    return isinstance(error, RuntimeError) and any(one in text for one in said)


@contextmanager
def full_device_said(sentence: Callable[[str], str]) -> Iterator[None]:
    """Raises CapacityError when the device's memory doesn't suffice for what runs inside; `sentence` gets the error's first line."""
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise CapacityError(sentence(first_line(error))) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text. torch appends advice and places in its own sources."""
    return (str(error).splitlines() or [""])[0].strip().rstrip(".")
