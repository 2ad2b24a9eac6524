"""The form of log lines, the same in the server's process and in the engine core's."""

from __future__ import annotations

import logging

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LOG_LEVELS = ("debug", "info", "warning", "error")


def set_up_logging(level: str | int) -> None:
    """Write this process's log to standard error, from `level` on: one of LOG_LEVELS, or logging's own number."""
    logging.basicConfig(level=level.upper() if isinstance(level, str) else level, format=LOG_FORMAT)
