"""One client's connection: uvicorn's, with a time limit on headers and errors in the API's own form."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from pagerunner import limits
from pagerunner.server.errors import HttpError, error_body


class Connection(H11Protocol):
    """A connection that is closed when a request's headers don't come, whether nothing was sent or half of them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there; its first request is due."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Pass bytes on, and watch as long as they don't make up a request."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()

    def send_400_response(self, msg: str) -> None:
        """What can't be read as HTTP gets an error object, or nothing where an answer has begun already."""
        if self.conn.our_state is not h11.IDLE:
            self.transport.close()
            return
        error = HttpError(400, f"{msg.rstrip('.')}.")
        if len(self.conn.trailing_data[0]) > limits.MAX_HEADER_BYTES:
            knob = limits.knob("MAX_HEADER_BYTES")
            error = HttpError(431, f"The request's headers are larger than {limits.MAX_HEADER_BYTES} bytes {knob}.")
        body = msgspec.json.encode(error_body(error))
        headers = [("content-type", "application/json"), ("connection", "close"), ("content-length", str(len(body)))]
        for event in (h11.Response(status_code=error.status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch(self) -> None:
        waiting = self.conn.their_state is h11.IDLE and not self.transport.is_closing()
        if waiting and self._deadline is None:
            self._deadline = self.loop.call_later(limits.HEADER_SECONDS, self.transport.close)
        elif not waiting and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
