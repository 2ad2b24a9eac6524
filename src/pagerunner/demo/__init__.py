"""Small checkpoints that ship with the package."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).resolve().parent


def demo_names() -> list[str]:
    """Return the names of the demo checkpoints."""
    return sorted(path.parent.name for path in _ROOT.glob("*/config.json"))


def demo_path(name: str = "demo") -> Path:
    """Return the directory of a demo checkpoint."""
    names = demo_names()
    if name not in names:
        raise ValueError(f"unknown demo {name!r}; known demos: {', '.join(names)}")
    return _ROOT / name
