"""Files of scripts/ as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def script(name: str) -> Any:
    """The module of scripts/NAME.py."""
    path = Path(__file__).parents[2] / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
