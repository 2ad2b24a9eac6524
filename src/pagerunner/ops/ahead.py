"""Compiles the kernels of a start beforehand and side by side.

Compiled one by one at their first launch, they take most of a start.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable
from contextvars import ContextVar

import torch

from pagerunner.ops.dispatch import has_triton

logger = logging.getLogger(__name__)
_COMPILER_THREAD = "load-compiler"
_rehearsing = ContextVar("rehearsing", default=False)


def load_libraries(device: torch.device, name: str, ranks: int = 1) -> list[threading.Thread]:
    """Begin to load what a device's steps need beside torch, in threads: Triton and cuDNN take a second each.

    If kernels of this `name` aren't compiled, the process that will compile them starts too, with its part of the cores, which so many `ranks` divide.
    """
    if device.type != "cuda":
        return []
    threads = [threading.Thread(target=_load_cudnn_attention, args=(device,), name="load-libraries", daemon=True)]
    if has_triton():
        threads.append(threading.Thread(target=_load_compiler, args=(name, ranks), name=_COMPILER_THREAD, daemon=True))
    for thread in threads:
        thread.start()
    return threads


def _load_compiler(name: str, ranks: int) -> None:
    with contextlib.suppress(Exception):  # the launch of a kernel meets the same error again and reports it
        ahead = importlib.import_module("pagerunner.ops.kernels.ahead")
        ahead.load_driver()
        ahead.start_compilers(name, ranks)


def _load_cudnn_attention(device: torch.device) -> None:
    """Call cuDNN once: a process's first call takes a second, whatever its size."""
    with contextlib.suppress(Exception), torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream(device)):
        x_1HTD = torch.zeros(1, 1, 128, 128, dtype=torch.bfloat16, device=device)
        torch.ops.aten._scaled_dot_product_cudnn_attention(x_1HTD, x_1HTD, x_1HTD, None, False, 0.0, True)
        torch.cuda.current_stream().synchronize()


def rehearsing() -> bool:
    """Whether this thread only looks which kernels are to be compiled."""
    return _rehearsing.get()


def compile_ahead(device: torch.device, name: str, rehearse: Callable[[], object]) -> int:
    """Compile the kernels that `rehearse` launches, several at a time, without running them; returns how many.

    `rehearse` does what the caller will do next. It is called only on a CUDA device with Triton, and only if no earlier start of
    this `name` has left its kernels in Triton's cache. Whatever goes wrong here is logged: a kernel that is missing afterwards
    is compiled when it is launched.
    """
    if device.type != "cuda" or not has_triton():
        return 0
    for thread in threading.enumerate():
        if thread.name == _COMPILER_THREAD:  # it may be starting the process that compiles
            thread.join()
    try:
        kernels = importlib.import_module("pagerunner.ops.kernels.ahead")
        if kernels.is_compiled(name):
            return 0
        _rehearsing.set(True)
        count = int(kernels.compile_launched(rehearse))
        kernels.set_compiled(name)
    except Exception as error:
        logger.warning("kernels are compiled one by one, as compiling them beforehand failed: %s", error)
        return 0
    finally:
        _rehearsing.set(False)
    return count


def expect_kernels(device: torch.device, expected: bool) -> None:
    """Say whether kernels may be compiled from now on, as in a start. Others are named in the log: a step has waited for each."""
    if device.type == "cuda" and has_triton():
        importlib.import_module("pagerunner.ops.kernels.ahead").expect_kernels(expected)
