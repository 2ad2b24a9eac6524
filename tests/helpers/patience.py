"""Bounds of wall time that hold on busy machines too."""

from __future__ import annotations

import os
import time
from collections.abc import Callable


def patient(seconds: float) -> float:
    """`seconds` for an idle machine, and more by the number of programs that wait for each of its cores (at most tenfold).

    Example: with 6 programs at work on 2 cores, `patient(1.0)` is 4 s.
    """
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
    return seconds * min(1 + waiting, 10)


def until(holds: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until it holds.

    Raises:
        TimeoutError: it doesn't hold within `patient(seconds)`.
    """
    deadline = time.monotonic() + patient(seconds)
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds} seconds of an idle machine")
        time.sleep(0.02)
