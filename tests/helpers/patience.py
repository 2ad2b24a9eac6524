"""Bounds of wall time that hold on busy machines too."""

from __future__ import annotations

import os


def patient(seconds: float) -> float:
    """`seconds` for an idle machine, and more by the number of programs that wait for each of its cores (at most tenfold).

    Example: with 6 programs at work on 2 cores, `patient(1.0)` is 4 s.
    """
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
    return seconds * min(1 + waiting, 10)
