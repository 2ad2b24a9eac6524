"""Triton 3.6's interpreter reads the bounds of a loop in a way that NumPy from 2.4 on refuses; read them as it means to.

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


@pytest.fixture(autouse=True)
def memory_checker() -> Iterator[None]:
    """See helpers.kernel_bounds."""
    with contextlib.ExitStack() as stack:
        if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
            from helpers.kernel_bounds import checked

            stack.enter_context(checked())
        yield
