"""The table of limits: documented row by row, changed by the environment, and read in both processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagerunner import limits

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "server.md"
SHOW = "from pagerunner import limits; print(limits.MAX_N, limits.MAX_HEADERS, limits.FAULTS)"


def show(**environment: str) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    return subprocess.run([sys.executable, "-c", SHOW], env=env, capture_output=True, text=True, check=True).stdout


def test_every_row_is_documented_and_has_its_constant() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for limit in limits.TABLE:
        assert f"| `{limit.name}` | {limit.default:,} | {limit.what} |" in text
        assert getattr(limits, limit.name) == limit.default, "the tests' environment changes a limit"
    constants = {
        name for name in vars(limits) if name.isupper() and name not in ("TABLE", "FAULTS", "PREFIX") and name[0] != "_"
    }
    assert constants == {limit.name for limit in limits.TABLE}


def test_the_environment_changes_a_limit() -> None:
    assert show(PAGERUNNER_LIMIT_MAX_N="8").strip() == "8 128 []"
    assert show(PAGERUNNER_LIMIT_MAX_N="").strip() == "128 128 []"
    assert "PAGERUNNER_LIMIT_MAX_M names no limit" in show(PAGERUNNER_LIMIT_MAX_M="8")


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5", "9" * 30, "٣"])
def test_a_value_that_is_none_is_reported(value: str) -> None:
    printed = show(PAGERUNNER_LIMIT_MAX_N=value)
    assert printed.startswith("128 128") and "PAGERUNNER_LIMIT_MAX_N must be an integer from 1" in printed


def test_an_engine_does_not_start_with_such_a_value(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PAGERUNNER_LIMIT_MAX_N": "x"}
    command = [sys.executable, "-m", "pagerunner", "generate", "--quiet"]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert ran.returncode == 2 and "PAGERUNNER_LIMIT_MAX_N must be an integer" in ran.stderr
