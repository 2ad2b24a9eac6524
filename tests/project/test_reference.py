"""The reference can be made from the docstrings, and its pages ask nobody on the network."""

from __future__ import annotations

import importlib.util
import re

from project import checks


def test_the_reference_of_two_modules(tmp_path):
    spec = importlib.util.spec_from_file_location("reference", checks.ROOT / "scripts" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.make(tmp_path, ["pagerunner.errors", "pagerunner.memory.memory_plan"])
    page = (tmp_path / "pagerunner" / "memory" / "memory_plan.html").read_text(encoding="utf-8")
    assert "MemoryPlan" in page and "slabs_needed" in page
    assert not re.findall(r'(?:src|href)="https?://(?!pdoc\.dev")[^"]*"', page), "something is loaded from elsewhere"
