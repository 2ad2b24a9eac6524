"""Triton 3.6's interpreter reads the bounds of a loop in a way that NumPy from 2.4 on refuses; read them as it means to.

It also replaces Triton's functions by its own in each call of a function that a kernel calls, a quarter of all its time: here
once in a launch.

On the CPU every test here runs under a memory checker.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

import pytest
import torch

if importlib.util.find_spec("triton") is not None:
    from triton.runtime import interpreter

    _original = interpreter._patch_lang_tensor

    def _patch(tensor, scope):
        _original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch
    _patch_lang = interpreter._patch_lang
    _patched: set[int] = set()  # the modules whose view of Triton is replaced in this launch

    def _patch_lang_once(fn):
        module, is_launch = id(fn.__globals__), not _patched
        if module in _patched:
            return None  # only a launch uses what is returned, and it comes first
        scope = _patch_lang(fn)
        _patched.add(module)
        if is_launch:
            restore = scope.restore
            scope.restore = lambda: (_patched.clear(), restore())
        return scope

    interpreter._patch_lang = _patch_lang_once


@pytest.fixture(autouse=True)
def memory_checker() -> Iterator[None]:
    """See helpers.kernel_bounds."""
    with contextlib.ExitStack() as stack:
        if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
            from helpers.kernel_bounds import checked

            stack.enter_context(checked())
        yield
