"""How many OpenMP threads a CPU engine takes, and how they wait for each other; decided before torch is imported.

Left alone, torch takes a thread for each core that it sees and lets them spin for milliseconds. Beside one busy process, or
with fewer cores than it sees (a container's quota), every operator then waits for a thread that isn't running.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from pagerunner.cgroups import control_groups

_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_WAITS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def usable_cores() -> int:
    """The cores that this process may use: those it may run on, and no more than its control groups' quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _quota()))


def _quota() -> int:
    """Whole cores of the tightest quota (cgroup v2) over this process, rounded up.

    A very large number without a quota.
    """
    found = sys.maxsize
    for group in control_groups():
        try:
            quota, period = (group / "cpu.max").read_text().split()
            found = min(found, -(-int(quota) // int(period)))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return found


def thread_settings(environ: Mapping[str, str], *, reserved: int, engines: int = 1) -> dict[str, str]:
    """Environment variables for a process that will import torch, unless the user has set variables of that kind.

    `reserved` cores are left to other processes, as long as one core remains, and `engines` processes share the others equally.
    Waiting threads sleep instead of spinning.
    """
    found: dict[str, str] = {}
    if not any(name in environ for name in _COUNTS):
        found["OMP_NUM_THREADS"] = str(max((usable_cores() - reserved) // engines, 1))
    if not any(name in environ for name in _WAITS):
        found["OMP_WAIT_POLICY"] = "PASSIVE"
    return found


def settle_threads() -> None:
    """Set the variables of `thread_settings` for this process.

    Once torch is imported it is too late, and nothing is changed.
    """
    if "torch" not in sys.modules:
        os.environ.update(thread_settings(os.environ, reserved=0))
