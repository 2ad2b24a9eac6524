"""The script that computes the memory table, as a module."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from project import checks


@pytest.fixture(scope="session")
def table() -> ModuleType:
    """scripts/memory_table.py"""
    spec = importlib.util.spec_from_file_location("memory_table", checks.ROOT / "scripts" / "memory_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
