"""Ranks' processes on this machine.

A rank imports torch and the models before it reads the line that says which rank it is. So does its core before it can write that line. Both
at the same time take about 2 s less of a start than one after the other (docs/performance/start.md). So this module needs no torch.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from pagerunner.children import Process, end, engine_environment, start, tell
from pagerunner.config import EngineArgs
from pagerunner.dist.settings import nccl_settings
from pagerunner.threads import thread_settings, usable_cores

if TYPE_CHECKING:
    from pagerunner.engine.worker.orders import RankLaunch


class EarlyRanks:
    """Processes for the ranks of an engine whose core isn't there yet. Those that nobody has taken end with this context."""

    def __init__(self, args: EngineArgs) -> None:
        """Start them. There are none for a single rank, for ranks on Ray's machines, and with fewer cores than ranks, which gain nothing."""
        self._waiting: list[subprocess.Popen[bytes]] = []
        if args.distributed_executor_backend == "mp" and 1 < args.num_ranks <= usable_cores():
            # what can't be started now is started when it is needed, and says why then
            with contextlib.suppress(OSError):
                for _ in range(args.num_ranks):
                    self._waiting.append(_begin())

    def take(self) -> subprocess.Popen[bytes] | None:
        """One of them, if one is left."""
        return self._waiting.pop(0) if self._waiting else None

    def __enter__(self) -> EarlyRanks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        left, self._waiting = self._waiting, []
        end({f"a rank that hasn't begun ({number})": process for number, process in enumerate(left)})


def _begin() -> subprocess.Popen[bytes]:
    environment = {**nccl_settings(), **engine_environment(), **thread_settings(os.environ, reserved=0)}
    return start("pagerunner.engine.rank", environment, first_line=b" ", own_session=True)


class LocalPlaces:
    """Processes of this machine."""

    here = True
    machines = ()
    """Where each rank is, if they are on several machines."""

    def __init__(self, early: EarlyRanks | None = None) -> None:
        """Those that have been started early are taken first."""
        self._early = early

    def start(self, launch: RankLaunch) -> Process:
        """Start a rank. Raises OSError."""
        process = (self._early and self._early.take()) or _begin()
        tell(process, msgspec.json.encode(launch) + b"\n")
        return process

    def close(self) -> None:
        """Nothing is left: the processes were ended."""
