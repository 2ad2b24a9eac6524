"""The way of a stream's events to their connection."""

from __future__ import annotations

from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from pagerunner.server.lingering import LingeringTransport


class EventWriter:
    """Writes the events of an answer that has begun, as chunks (RFC 9112, 7.1).

    As ASGI messages they would pass through the senders of all middleware and through h11, which changes nothing and takes as long as making them.
    `size` are the bytes of events so far.
    """

    def __init__(self, cycle: RequestResponseCycle, transport: LingeringTransport) -> None:
        self._cycle, self._transport = cycle, transport
        self.size = 0

    @property
    def fits(self) -> bool:
        """Whether the answer is made of chunks. Clients of HTTP/1.0 don't know any."""
        return self._cycle.conn.their_http_version == b"1.1" and self._cycle.scope["method"] != "HEAD"

    def hold(self) -> None:
        """Keep what is written from now on, to send it in one piece."""
        self._transport.hold()

    def release(self) -> None:
        """Send what was kept."""
        self._transport.release()

    async def write(self, events: bytes) -> None:
        """Write whole events, when the client has read enough of the earlier ones. Those of a client that is gone are dropped."""
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if events and not cycle.disconnected:
            self.size += len(events)
            self._transport.write(b"%x\r\n%b\r\n" % (len(events), events))
