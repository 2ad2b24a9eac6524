"""The script of the device's checks: each step within its limit, what it says in the table, and the rest put off."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType

import pytest

from project import checks


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", checks.ROOT / "scripts" / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def python(script, source, limit=20, lines=1):
    return script.Step((sys.executable, "-S", "-c", source), limit, lines)


def test_one_step_that_fails_or_hangs_leaves_the_others_alone(script, tmp_path, capsys):
    steps = {
        "good": python(script, "print('first\\n\\nlast\\n')"),
        "marked": python(script, "print('RESULT one\\nnoise\\nRESULT two\\nmore noise')"),
        "wrong": python(script, "print('before'); raise SystemExit(3)"),
        "hangs": python(script, "import time; print('so far', flush=True); time.sleep(60)", 1),
        "absent": script.Step(("no-such-program",), 5),
    }
    assert script.run_steps(steps, 100, tmp_path) == 1
    printed = capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "gpu_check.jsonl").read_text().splitlines()]
    assert {row["step"]: (row["how"], row["lines"]) for row in rows} == {
        "good": ("ok", ["last"]),
        "marked": ("ok", ["one", "two"]),
        "wrong": ("failed 3", ["before"]),
        "hangs": ("over its limit of 1 s", ["so far"]),
        "absent": ("failed: no-such-program is not installed", []),
    }
    assert printed.endswith("every step ran\n") and "    two\n" in printed
    assert "noise" in (tmp_path / "marked.log").read_text()


def test_steps_that_would_not_fit_the_budget_are_put_off_by_name(script, tmp_path, capsys):
    steps = {
        "long": python(script, "print(1)", 500),
        "short": python(script, "print(2)"),
        "longer": python(script, "", 900),
    }
    assert script.run_steps(steps, 100, tmp_path) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "put off: --only long,longer"


def test_every_step_names_a_script_or_test_that_exists(script):
    for step in script.steps().values():
        for part in step.command:
            if part.endswith(".py"):
                assert (checks.ROOT / part).exists(), part
