"""The way to one of the servers behind the proxy: HTTP/1.1 by h11, over connections that are kept.

A server may be any program, and may say anything. Its headers are bounded, and what isn't HTTP ends the connection. An answer is read as fast
as its client reads it: a connection holds at most 128 KiB that nobody has taken.
"""

from __future__ import annotations

import asyncio
import errno
import re
import socket
from collections.abc import AsyncIterator
from typing import NamedTuple

import h11

from pagerunner import limits
from pagerunner.errors import ConfigError
from pagerunner.server.errors import HttpError, one_line, short

CONNECT_SECONDS = 5.0
_MOST_UNREAD = 64 * 1024
_MINE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""A machine that has lost its power says nothing; after a minute of such silence the connection is lost."""
_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding upgrade".split()
)
_OURS = _HOP | {b"host", b"content-length", b"expect", b"origin"}  # whose page may call is checked here
_URL = re.compile(r"(https?)://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?(/[A-Za-z0-9._~/-]*)?")
Headers = list[tuple[bytes, bytes]]


class Call(NamedTuple):
    """A request as it is sent to a server. `headers` are the client's."""

    method: bytes
    target: bytes
    headers: Headers
    body: bytes


class UpstreamError(Exception):
    """A server has not answered as it should.

    `sent`: it may have begun to work on the request. `stale`: it has closed a connection that was kept, and said nothing. `refused`: nobody
    listens there.
    """

    def __init__(self, message: str, *, sent: bool = True, stale: bool = False, refused: bool = False) -> None:
        super().__init__(message)
        self.sent, self.stale, self.refused = sent, stale, refused


def end_to_end(headers: Headers, dropped: frozenset[bytes] = _HOP) -> Headers:
    """The headers that a proxy passes on (RFC 9110, section 7.6.1)."""
    named = {
        one.strip().lower() for name, value in headers if name.lower() == b"connection" for one in value.split(b",")
    }
    return [(name, value) for name, value in headers if name.lower() not in dropped and name.lower() not in named]


class Link(asyncio.BufferedProtocol):
    """A connection, with one request at a time: its answer's `status` and `headers`. `close` must be called after `ask`."""

    def __init__(self, idle: dict[Link, None], buffer: memoryview) -> None:
        """`idle` are the server's connections that wait. All share the `buffer`, as bytes are taken out of it at once."""
        self.conn = h11.Connection(h11.CLIENT, limits.MAX_HEADER_BYTES)
        self._idle, self._buffer = idle, buffer
        self._waiter: asyncio.Future[None] | None = None
        self._unread, self._paused = 0, False
        self._heard = self._ended = self._lost = self._kept = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if (own := transport.get_extra_info("socket")) is not None:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEP_ALIVE.items():
                if hasattr(socket, name):
                    own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have come; of too many that nobody has taken, no more are read."""
        if self in self._idle:  # nobody has asked
            return self.abort()
        self._heard = True
        self.conn.receive_data(bytes(self._buffer[:nbytes]))
        self._unread += nbytes
        if self._unread > _MOST_UNREAD and not self._paused:
            self._paused = True
            self.transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        """The server sends no more."""
        if self in self._idle:
            return self.abort()
        self._ended = True
        self.conn.receive_data(b"")
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed."""
        self._lost = True
        self._idle.pop(self, None)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def abort(self) -> None:
        """Close it, whatever is under way."""
        self._idle.pop(self, None)
        self.transport.abort()

    async def ask(self, call: Call, host: bytes) -> None:
        """Send a request, and wait for the head of its answer. Raises UpstreamError."""
        self._heard = False
        headers = [(b"Host", host), *end_to_end(call.headers, _OURS)]
        if call.method == b"POST":
            headers.append((b"Content-Length", str(len(call.body)).encode()))
        request = h11.Request(method=call.method, target=call.target, headers=headers)
        parts = [self.conn.send(request), self.conn.send(h11.Data(data=call.body)), self.conn.send(h11.EndOfMessage())]
        self.transport.write(b"".join(part or b"" for part in parts))
        while True:
            event = self._next()
            if event is h11.NEED_DATA:
                await self._more()
            elif isinstance(event, h11.Response):
                return self._begin(event)
            elif not isinstance(event, h11.InformationalResponse):
                raise UpstreamError("has ended its answer before it began")

    def _begin(self, head: h11.Response) -> None:
        if head.status_code >= 600:
            raise UpstreamError(f"has answered with status {head.status_code}")
        headers = head.headers.raw_items()
        chunked = any(name.lower() == b"transfer-encoding" for name, _ in headers)
        dropped = _HOP | {b"date"} | ({b"content-length"} if chunked else set())
        self.status, self.headers = head.status_code, end_to_end(headers, dropped)

    async def body(self) -> AsyncIterator[bytes]:
        """The answer's body, as it comes. Raises UpstreamError."""
        while True:
            piece = bytearray()
            fault: UpstreamError | None = None
            event: h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED] = h11.PAUSED
            try:
                while isinstance(event := self._next(), h11.Data):
                    piece += event.data
            except UpstreamError as error:
                fault = error
            if piece:
                yield bytes(piece)
            if fault is not None:
                raise fault
            if isinstance(event, h11.EndOfMessage):
                return
            await self._more()

    def _next(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        try:
            return self.conn.next_event()
        except h11.RemoteProtocolError as error:
            if self._ended:
                raise self._closed() from error
            raise UpstreamError(f"has sent no valid HTTP ({short(one_line(str(error)))})") from error

    def _closed(self) -> UpstreamError:
        when = "in its answer" if self._heard else "before it answered"
        return UpstreamError(f"has closed the connection {when}", stale=self._kept and not self._heard)

    async def _more(self) -> None:
        """Wait for bytes, once all that have come are taken."""
        if self._lost:
            raise self._closed()
        self._unread = 0
        if self._paused:
            self._paused = False
            self.transport.resume_reading()
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    async def whole(self, most: int) -> bytes:
        """The body. Raises UpstreamError, also when it is longer than `most` bytes."""
        found = bytearray()
        async for piece in self.body():
            found += piece
            if len(found) > most:
                raise UpstreamError(f"has answered with more than {most} bytes {limits.knob('MAX_BODY_BYTES')}")
        return bytes(found)

    def close(self) -> None:
        """Nobody reads on. A connection whose answer is whole is kept. By the end of another one its server sees that its client has left."""
        done = self.conn.our_state is h11.DONE and self.conn.their_state is h11.DONE
        if not done or self.conn.trailing_data != (b"", False) or self._lost or self.transport.is_closing():
            return self.abort()
        self.conn.start_next_cycle()
        self._kept, self._unread = True, 0
        self._idle[self] = None


class Upstream:
    """A server's address, and the connections to it that nobody uses now."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError for what is no server's URL."""
        found = _URL.fullmatch(url)
        if found is None or not 0 < (port := int((found[3] or ":80")[1:])) < 65_536:
            raise ConfigError(f"A server's URL must be like http://127.0.0.1:8000, got {url!r}.")
        self.url = url.rstrip("/")
        self._host, self._tls = found[2].strip("[]"), found[1] == "https"
        self._port = port if found[3] or not self._tls else 443
        self._netloc, self._base = (found[2] + (found[3] or "")).encode(), (found[4] or "").rstrip("/").encode()
        self._idle: dict[Link, None] = {}  # the one used last is last
        self._buffer = memoryview(bytearray(1 << 16))

    async def ask(self, call: Call) -> Link:
        """Send a request; its answer has begun when this returns.

        Raises:
            UpstreamError: the server can't be reached, has closed the connection, or speaks no HTTP.
            HttpError: this process has no room for another connection.
        """
        link = self._idle.popitem()[0] if self._idle else await self._connect()
        try:
            await link.ask(call._replace(target=self._base + call.target), self._netloc)
        except BaseException as error:
            link.abort()
            if isinstance(error, UpstreamError) and error.stale:
                self.close()  # the others have waited for longer
            raise
        return link

    async def _connect(self) -> Link:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, link = await loop.create_connection(
                    lambda: Link(self._idle, self._buffer), self._host, self._port, ssl=self._tls or None
                )
        except TimeoutError:
            raise UpstreamError(f"has accepted no connection in {CONNECT_SECONDS:g} seconds", sent=False) from None
        except (OSError, UnicodeError) as error:  # the second one is about names
            if isinstance(error, OSError) and error.errno in _MINE:
                raise HttpError(
                    503, f"The proxy can open no more connections: {error.strerror} (ulimit -n).", retry=True
                ) from error
            refused = isinstance(error, ConnectionRefusedError)
            raise UpstreamError(f"can't be reached: {one_line(str(error))}", sent=False, refused=refused) from error
        return link

    def close(self) -> None:
        """Close what is idle."""
        for link in list(self._idle):
            link.abort()
