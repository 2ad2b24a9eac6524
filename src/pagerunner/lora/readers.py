"""Threads that read directories, some of which may never answer: those of a network's disk that is gone."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from pagerunner.errors import ConfigError
from pagerunner.types.checks import show

logger = logging.getLogger(__name__)
READERS = 4
"""Directories that are read at once."""
SLOW_SECONDS = 30.0
"""Who reads for so long doesn't count among the readers any more."""
MOST_SLOW = 60
CLOSE_SECONDS = 5.0
"""How long the end of an engine waits for those who read."""


class _Reading:
    """One directory that is being read."""

    def __init__(self, path: str, work: Callable[[], None]) -> None:
        self.path, self.work, self.begun, self.slow = path, work, 0.0, False
        self.thread: threading.Thread | None = None


class Readers:
    """Reads directories on threads of their own, which the end of the program doesn't wait for.

    Example: four directories don't answer. After 30 seconds a line in the log names each of them, and the next four are read.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[_Reading] = deque()
        self._running: list[_Reading] = []
        self._manager: threading.Thread | None = None
        self._closed = False

    @property
    def idle(self) -> bool:
        """Whether nothing is being read, or is to be."""
        with self._changed:
            return not (self._queue or self._running)

    def begin(self, path: str, work: Callable[[], None]) -> None:
        """Do the work, which reads a directory, when its turn has come. Raises ConfigError if too many don't answer."""
        with self._changed:
            slow = [one for one in self._running if one.slow]
            if len(slow) >= MOST_SLOW:
                raise ConfigError(
                    f"{len(slow)} directories of adapters have been read for more than {SLOW_SECONDS:g} seconds, the first of them {show(slow[0].path)}, and at most "
                    f"{MOST_SLOW} are waited for; see to the disk, and start the engine again."
                )
            self._queue.append(_Reading(path, work))
            if self._manager is None:
                self._manager = threading.Thread(target=self._manage, name="pagerunner-adapter-turns", daemon=True)
                self._manager.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Begin nothing more, and wait a little for those who read."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
            threads = [one.thread for one in self._running if one.thread is not None and not one.slow]
        end = time.monotonic() + CLOSE_SECONDS
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0))

    def _manage(self) -> None:
        with self._changed:
            while (self._queue or self._running) and not self._closed:
                seconds = self._look()
                if self._queue and sum(not one.slow for one in self._running) < READERS:
                    self._start(self._queue.popleft())
                else:
                    self._changed.wait(seconds)
            self._manager = None

    def _look(self) -> float | None:
        """Find who is slow by now. How long until the next one may be."""
        now = time.monotonic()
        left: float | None = None
        for one in self._running:
            seconds = one.begun + SLOW_SECONDS - now
            if not one.slow and seconds <= 0:
                one.slow = True
                logger.warning(
                    "The adapter in %s has been read for more than %g seconds: its disk may not answer. Others are read beside it.",
                    one.path,
                    SLOW_SECONDS,
                )
            elif not one.slow:
                left = seconds if left is None else min(left, seconds)
        return left

    def _start(self, one: _Reading) -> None:
        one.begun = time.monotonic()
        one.thread = threading.Thread(target=self._run, args=(one,), name="pagerunner-adapter-files", daemon=True)
        self._running.append(one)
        one.thread.start()

    def _run(self, one: _Reading) -> None:
        try:
            one.work()
        finally:
            with self._changed:
                self._running.remove(one)
                self._changed.notify_all()
