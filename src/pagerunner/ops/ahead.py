"""Compiling a start's kernels beforehand: one after another, where they are first launched, they take most of a start."""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable

import torch

from pagerunner.ops.dispatch import has_triton

logger = logging.getLogger(__name__)


def load_compiler(device: torch.device) -> threading.Thread | None:
    """Begin to load Triton in the background, where the device needs it: that takes a second which others can use."""
    if device.type != "cuda" or not has_triton():
        return None

    def load() -> None:
        with contextlib.suppress(Exception):  # it is met again, and reported, where a kernel is launched
            importlib.import_module("pagerunner.ops.kernels.ahead").load_driver()

    thread = threading.Thread(target=load, name="load-compiler", daemon=True)
    thread.start()
    return thread


def compile_ahead(device: torch.device, name: str, rehearse: Callable[[], object]) -> int:
    """Compile the kernels that `rehearse` launches, several at a time, without running them; returns how many.

    `rehearse` is what the caller will do for the first time afterwards. It is called only if no earlier start of this
    `name` has left its kernels in Triton's cache, and on a CUDA device with Triton. Whatever goes wrong here is logged:
    a kernel that is missing afterwards is compiled when it is launched.
    """
    if device.type != "cuda" or not has_triton():
        return 0
    try:
        kernels = importlib.import_module("pagerunner.ops.kernels.ahead")
        if kernels.is_compiled(name):
            return 0
        count = int(kernels.compile_launched(rehearse))
        kernels.set_compiled(name)
    except Exception as error:
        logger.warning("kernels are compiled one by one, as compiling them beforehand failed: %s", error)
        return 0
    return count
