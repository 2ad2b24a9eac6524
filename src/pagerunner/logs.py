"""The form of log lines, the same in the server's process and in the engine core's."""

from __future__ import annotations

import logging
import time

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LOG_LEVELS = ("debug", "info", "warning", "error")


_own_name = ""


def set_up_logging(level: str | int, process: str = "") -> None:
    """Write this process's log to standard error, from `level` on: one of LOG_LEVELS, or logging's own number.

    Lines begin with the name of the `process`, if it has one: "[engine 1 rank 0]".
    """
    global _own_name
    _own_name = process
    form = f"[{process}] {LOG_FORMAT}" if process else LOG_FORMAT
    logging.basicConfig(level=level.upper() if isinstance(level, str) else level, format=form)


def name_of_part(part: str) -> str:
    """The name of a process that this one starts: "engine 1 rank 0" for "rank 0" of engine 1."""
    return f"{_own_name} {part}".strip()


class SparingLog:
    """Warnings that clients can cause: at most `most` lines in `seconds`, and how many were left out before."""

    def __init__(self, logger: logging.Logger, most: int = 1, seconds: float = 10.0) -> None:
        self._logger = logger
        self._most = most
        self._seconds = seconds
        self._begin = -seconds
        self._lines = self._left_out = 0

    def warn(self, text: str, *values: object) -> None:
        """Log the line, or count it."""
        now = time.monotonic()
        if now >= self._begin + self._seconds:
            self._begin, self._lines = now, 0
        if self._lines >= self._most:
            self._left_out += 1
            return
        self._lines += 1
        if self._left_out:
            text, values = f"{text} (%d lines of this kind were left out before.)", (*values, self._left_out)
            self._left_out = 0
        self._logger.warning(text, *values)
