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


def find_model(model: str) -> tuple[str, str | None]:
    """The directory of the model that the user named, and the name if it is a demo's; a path that exists comes first."""
    if model in demo_names() and not Path(model).exists():
        return str(demo_path(model)), model
    return model, None
