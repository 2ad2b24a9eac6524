"""The notebook for newcomers runs from its first cell to its last, and what it asserts holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "notebooks" / "first_steps.ipynb"


def test_the_notebook_runs_in_a_fresh_process() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(code) > 5 and not any(line.startswith(("%", "!")) for cell in code for line in cell.splitlines())
    done = subprocess.run(
        [sys.executable, "-"],
        input="\n".join(code),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "12 + 30 = 42" in done.stdout


def test_the_notebook_is_one_that_readers_of_the_format_take() -> None:
    """https://nbformat.readthedocs.io: version 4.5, unique ids, no outputs that would go stale."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = notebook["cells"]
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert {cell["cell_type"] for cell in cells} == {"markdown", "code"}
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")
