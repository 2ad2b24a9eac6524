"""Programs that tests fork see the environment that the test gives them, or the test hears that they wouldn't."""

from __future__ import annotations

import os

import pytest

from helpers.programs import run_python


def test_limits_that_were_read_before_the_fork_are_refused() -> None:
    with pytest.raises(ValueError, match="PAGERUNNER_LIMIT_MAX_N"):
        run_python("", (), {**os.environ, "PAGERUNNER_LIMIT_MAX_N": "8"})
