"""Gluon is a part of Triton that may be another one in another version, or none."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys
sys.modules["triton.experimental"] = None  # importing it, or what is inside, is an error
from pagerunner.ops import kernels
names = [module.name for module in pkgutil.iter_modules(kernels.__path__)]
assert len(names) > 40
for name in names:
    if not name.endswith("_gluon"):
        importlib.import_module(f"pagerunner.ops.kernels.{name}")
"""


def test_kernels_are_imported_without_gluon():
    """With an unmeasured version of Triton other kernels serve, so nothing of Gluon may be needed for them."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=300)
