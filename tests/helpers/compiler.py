"""Tests of the CPU kernels, which need a C compiler. Where there is one, kernels that don't compile fail."""

from __future__ import annotations

import shutil

import pytest

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler (cc, gcc or clang)"
)
