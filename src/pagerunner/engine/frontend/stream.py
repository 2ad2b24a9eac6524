"""The outputs of one request on their way to a reader that may be slower than the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pagerunner.types import RequestOutput


class OutputStream:
    """Wakes a reader when there is something new to read.

    An output is made when the reader asks for it. So one that comes late gets several steps' outputs as one, and nothing is
    kept for it twice.
    """

    def __init__(self, output: Callable[[], RequestOutput]) -> None:
        self._output = output
        self._pending = False
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    def advance(self) -> None:
        """There is something new to read."""
        self._pending = True
        self._ready.set()

    def fail(self, error: Exception) -> None:
        """End the stream with an error, after what is pending has been read."""
        self._error = error
        self._ready.set()

    async def get(self) -> RequestOutput:
        """The next output. Raises the error the stream ended with."""
        await self._ready.wait()
        if self._pending:
            self._pending = False
            if self._error is None:
                self._ready.clear()
            return self._output()
        if self._error is None:
            raise RuntimeError("an output stream woke up with nothing to read")
        raise self._error
