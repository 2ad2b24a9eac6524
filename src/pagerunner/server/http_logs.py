"""What the HTTP server logs."""

from __future__ import annotations

import logging
from typing import NamedTuple


class HttpLogs(NamedTuple):
    """What uvicorn logs: records of at least `level`, and an access line for each request whose path isn't in `silent`."""

    access: bool = True
    silent: tuple[str, ...] = ()
    level: str | None = None

    def apply(self) -> None:
        """Let no access line of the silent paths through, in this process."""
        lines = logging.getLogger("uvicorn.access")
        for one in [one for one in lines.filters if isinstance(one, _Except)]:
            lines.removeFilter(one)
        if self.silent:
            lines.addFilter(_Except(frozenset(self.silent)))


class _Except(logging.Filter):
    """Lets no access line of some paths through."""

    def __init__(self, paths: frozenset[str]) -> None:
        super().__init__()
        self._paths = paths

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged; its arguments are client, method, path with query, version and status."""
        path = record.args[2] if isinstance(record.args, tuple) and len(record.args) > 2 else ""
        return str(path).partition("?")[0] not in self._paths
