"""Documents name files that exist."""

from __future__ import annotations

from project import checks


def documents():
    return [checks.ROOT / "README.md", *sorted((checks.ROOT / "docs").glob("*.md"))]


def test_path_rule_catches():
    assert checks.missing_paths("see `memory/nowhere.py` and [this](docs/nothing.md)") == [
        "docs/nothing.md",
        "memory/nowhere.py",
    ]
    assert not checks.missing_paths("see `memory/planner.py`, `max_model_len` and `pyproject.toml`")


def test_documents_name_existing_files():
    missing = {path.name: checks.missing_paths(path.read_text(encoding="utf-8")) for path in documents()}
    assert not any(missing.values()), missing
