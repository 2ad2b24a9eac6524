"""Forks of a process with an engine: they have a copy of its memory, and neither its threads nor its device."""

from __future__ import annotations

import asyncio
import os


class HomeProcess:
    """The process in which an engine was made, and which alone may call it. `engine` is what users call the engine.

    With a `loop`, no other event loop may: it would wait for what is told to that one.
    """

    def __init__(self, engine: str, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._engine, self._pid, self._loop = engine, os.getpid(), loop

    def check(self) -> None:
        """Raise RuntimeError in a fork of the process, and in another event loop."""
        own = os.getpid()
        if own != self._pid:
            raise RuntimeError(
                f"This {self._engine} was made in process {self._pid}, of which process {own} is a fork. An engine's threads and its "
                f"device aren't there in a fork; make the {self._engine} in a process that multiprocessing's spawn method starts."
            )
        if self._loop is not None and asyncio._get_running_loop() not in (None, self._loop):
            raise RuntimeError(
                f"This {self._engine} was made in another event loop, which alone can use it: put all of its calls into one asyncio.run."
            )
