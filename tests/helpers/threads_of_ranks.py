"""Ranks as threads of one process, for tests that need many of them: what they compute is what processes would."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagerunner.dist.gloo import GlooComm

SECONDS = 60.0


def in_threads(size: int, directory: Path, act: Callable[[GlooComm], Any], seconds: float = SECONDS) -> list[Any]:
    """What `act` returns or raises with each rank. `directory` is made for these.

    No rank is gone before all have ended: one that has met the others, and ends at once, would be lost to one that is slower to meet it.
    """
    directory.mkdir(mode=0o700)
    found: list[Any] = [None] * size
    met: list[GlooComm] = []

    def run(rank: int) -> None:
        try:
            met.append(comm := GlooComm(directory, rank, size, seconds))
            found[rank] = act(comm)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def in_ranks(size: int, directory: Path, act: Callable[[GlooComm], Any]) -> list[Any]:
    """What `act` returns with each rank. Raises the first error."""
    found = in_threads(size, directory, act)
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found
