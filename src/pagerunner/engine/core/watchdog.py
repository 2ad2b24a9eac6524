"""A thread that says where a step hangs."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback

logger = logging.getLogger(__name__)


class Watchdog:
    """Logs the stacks of all threads, once a step, when the step takes longer than `seconds`.

    The thread ends with the process. It needs the interpreter's lock. If a step hangs and keeps the lock, the frontend makes
    `faulthandler` print the stacks instead (AsyncEngine).
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._begun: float | None = None
        self._reported: float | None = None
        threading.Thread(target=self._watch, name="pagerunner-watchdog", daemon=True).start()

    def begin(self) -> None:
        """A step begins."""
        self._begun = time.monotonic()

    def end(self) -> None:
        """It has ended."""
        self._begun = None

    def _watch(self) -> None:
        while True:
            time.sleep(min(self._seconds / 4, 1.0))
            begun = self._begun
            if begun is None or begun == self._reported or time.monotonic() - begun < self._seconds:
                continue
            self._reported = begun
            logger.error(
                "A step has taken more than %g seconds (PAGERUNNER_LIMIT_STALL_SECONDS). All threads:\n%s",
                self._seconds,
                stacks(),
            )


def stacks() -> str:
    """The stack of every thread of this process except the caller's."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )
