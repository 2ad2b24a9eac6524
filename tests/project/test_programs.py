"""Programs that tests fork see the environment that the test gives them, or the test hears that they wouldn't."""

from __future__ import annotations

import os

import pytest

from helpers.programs import run_python


@pytest.mark.parametrize("name", ["PAGERUNNER_LIMIT_MAX_N", "OMP_NUM_THREADS", "TRITON_INTERPRET", "PYTHONHASHSEED"])
def test_what_was_read_before_the_fork_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=name):
        run_python("", (), {**os.environ, name: "8"})
    monkeypatch.setenv(name, "8")
    with pytest.raises(ValueError, match=name):
        run_python("", (), {key: value for key, value in os.environ.items() if key != name})
