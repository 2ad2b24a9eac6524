"""Bounds of wall time that hold on busy machines too, and on those that stand still for some seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

LONG = 100.0
"""Seconds after which what a test waits for isn't coming. A test that passes waits for none of them."""


def patient(seconds: float) -> float:
    """The bound of what takes `seconds` on an idle machine: ten times as much.

    Example: what must come within a second may take `patient(1.0)`, 10 s. What a test would do wrong takes longer than that: a limit
    of the program that would end it too late is set to more.
    """
    return 10 * seconds


def stretched(seconds: float) -> float:
    """What a test has to let pass: `seconds` on an idle machine, and more by the number of programs that wait for each of its cores.

    At most tenfold. Example: with 6 programs at work on 2 cores, `stretched(1.0)` is 4 s.
    """
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
    return seconds * min(1 + waiting, 10)


def until(holds: Callable[[], object], seconds: float = LONG) -> None:
    """Wait until it holds.

    Raises:
        TimeoutError: it doesn't hold within so many seconds.
    """
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} seconds")
        time.sleep(0.02)
