"""The way from a request's endpoint to its connection, past ASGI: whether the client is there, and a stream's events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from pagerunner import limits
from pagerunner.server.errors import ClientGoneError, HttpError
from pagerunner.server.lingering import LingeringTransport

Result = TypeVar("Result")


class ClientLink:
    """A request's connection.

    `write` sends events of an answer that has begun, as chunks (RFC 9112, 7.1). As ASGI messages they would pass through the senders of all
    middleware and through h11, which changes nothing. `size` are their bytes so far. `unless_gone` needs no tasks that wait for a message of ASGI.
    """

    def __init__(self, cycle: RequestResponseCycle, transport: LingeringTransport) -> None:
        self._cycle, self._transport = cycle, transport
        self.size = 0
        self._working: asyncio.Task[Any] | None = None
        self._gone = self._waits = self._behind = False

    @property
    def fits(self) -> bool:
        """Whether the answer is made of chunks. Clients of HTTP/1.0 don't know any."""
        return self._cycle.conn.their_http_version == b"1.1" and self._cycle.scope["method"] != "HEAD"

    async def unless_gone(self, work: Awaitable[Result]) -> Result:
        """Do `work` in this task; cancel it and raise ClientGoneError when the client leaves. The request's body must have been read."""
        task = self._working = asyncio.current_task()
        assert task is not None
        cancelled = task.cancelling()
        if self._cycle.disconnected:
            self._gone = True
            task.cancel()
        else:
            self._cycle.flow.resume_reading()  # else it isn't seen that the client leaves
        try:
            result = await work
        except asyncio.CancelledError:
            if not self._gone or task.uncancel() > cancelled:
                raise
            raise ClientGoneError from None
        finally:
            self._working = None
        if self._gone:
            task.uncancel()
            raise ClientGoneError
        return result

    def tell_gone(self) -> None:
        """The client has left."""
        if self._working is not None and not self._gone:
            self._gone = True
            self._working.cancel()

    def fall_behind(self) -> bool:
        """The client hasn't read in time what was written. Whether that ends a stream that waits for it."""
        if self._waits:
            self._behind, self._cycle.keep_alive = True, False
            self._cycle.flow.resume_writing()
        return self._waits

    def hold(self) -> None:
        """Keep what is written from now on, to send it in one piece."""
        self._transport.hold()

    def release(self) -> None:
        """Send what was kept."""
        self._transport.release()

    async def write(self, events: bytes) -> None:
        """Write whole events, when the client has read enough of the earlier ones. Those of a client that is gone are dropped.

        Raises HttpError 408 if it doesn't read them in time. What is written after that waits for nobody, and the connection ends with the answer.
        """
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            self._waits = True
            try:
                await cycle.flow.drain()
            finally:
                self._waits = False
            if self._behind:
                seconds, knob = limits.UNREAD_SECONDS, limits.knob("UNREAD_SECONDS")
                raise HttpError(408, f"The stream was not read for {seconds:g} seconds {knob}. The request is ended.")
        if events and not cycle.disconnected:
            self.size += len(events)
            self._transport.write(b"%x\r\n%b\r\n" % (len(events), events))
