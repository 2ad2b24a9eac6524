"""Small checkpoints that ship with the package."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).resolve().parent


def demo_names() -> list[str]:
    """Return the names of the demo checkpoints. `demo-eagle3` beside them is none: it drafts tokens for `demo`."""
    return sorted(path.parent.name for path in _ROOT.glob("*/tokenizer.json"))


def demo_path(name: str = "demo") -> Path:
    """Return the directory of a demo checkpoint."""
    if not _is_demo(name):
        raise ValueError(f"unknown demo {name!r}; known demos: {', '.join(demo_names())}")
    return _ROOT / name


def find_model(model: str) -> tuple[str, str | None]:
    """The directory of the model that the user named, and the name if it is a demo's; a path that exists comes first."""
    if _is_demo(model) and not Path(model).exists():
        return str(demo_path(model)), model
    return model, None


def _is_demo(name: str) -> bool:
    return any(path.parent.name == name for path in _ROOT.glob("*/config.json"))
