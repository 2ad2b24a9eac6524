"""Forks of a process with an engine: they have a copy of its memory, and neither its threads nor its device."""

from __future__ import annotations

import os


class HomeProcess:
    """The process in which an engine was made, and which alone may call it. `engine` is what users call the engine."""

    def __init__(self, engine: str) -> None:
        self._engine, self._pid = engine, os.getpid()

    def check(self) -> None:
        """Raise RuntimeError in a fork of the process."""
        own = os.getpid()
        if own != self._pid:
            raise RuntimeError(
                f"This {self._engine} was made in process {self._pid}, of which process {own} is a fork. An engine's threads and its "
                f"device aren't there in a fork; make the {self._engine} in a process that multiprocessing's spawn method starts."
            )
