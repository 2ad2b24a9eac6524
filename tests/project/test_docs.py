"""Documents name files that exist."""

from __future__ import annotations

import importlib.util
import re
import sys

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


def test_the_figure_can_be_drawn_and_agrees_with_the_scheduler():
    spec = importlib.util.spec_from_file_location("draw_figures", checks.ROOT / "scripts" / "draw_figures.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    figure = module.draw()  # raises if its page map and the scheduler's counts differ
    assert figure.count('class="cell">x4<') == 5
    assert len(re.findall("<rect", figure)) == 1 + 3 * module.COLUMNS * module.ROWS + 4
