"""Triton 3.6's interpreter reads the bounds of a loop in a way that NumPy from 2.4 on refuses; read them as it means to."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("triton") is not None:
    from triton.runtime import interpreter

    _original = interpreter._patch_lang_tensor

    def _patch(tensor, scope):
        _original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch
