"""A client of HTTP/1.1 that does little, so that the server is measured: connections that are kept, and answers read as they come."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from urllib.parse import urlsplit

import msgspec

from pagerunner.errors import ConfigError

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection:[ \t]*close", re.IGNORECASE)
_IN_CHUNKS, _TO_THE_END = -1, -2
Reader = Callable[[int, bytes, float], None]
"""Takes an answer's status, a piece of its body, and when that came (time.perf_counter)."""


class Timeouts(msgspec.Struct, frozen=True):
    """Seconds that a request may take: to get a connection, then to the first byte of its answer, and to the last."""

    connect: float = 60.0
    first_byte: float = 3_600.0
    whole: float = 21_600.0


class HttpFaultError(Exception):
    """The answer has not come whole, or isn't HTTP."""


class _NotTakenError(HttpFaultError):
    """The server has closed a connection that had idled, and sent no byte of an answer: it has not taken the request."""


class _Connection(asyncio.BufferedProtocol):
    """One request at a time.

    Bytes are received into one buffer that all connections share. asyncio would make room for 256 KiB at each receipt, which takes five times
    as long as receiving a token.
    """

    _BUFFER = memoryview(bytearray(1 << 16))

    def __init__(self) -> None:
        self.usable = True
        self._idled = False
        self._ended: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def ask(self, request: bytes, reader: Reader) -> asyncio.Future[None]:
        """Send a request. The future is done when `reader` has the whole answer, or has what went wrong."""
        self._reader, self._rest, self._status = reader, b"", 0
        self._left = 0  # bytes of the body, or _IN_CHUNKS, or _TO_THE_END
        self._ended = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._ended

    def expire(self, seconds: float, *, whole: bool) -> None:
        """So many seconds are over: the request fails, unless it has ended or, with `whole` unset, an answer has begun."""
        if self._ended is None or self._ended.done() or not whole and (self._status or self._rest):
            return
        self._give_up()
        late = "The answer has not ended" if whole else "The server has not begun to answer"
        knob = "--request-timeout" if whole else "--first-byte-timeout"
        self._ended.set_exception(HttpFaultError(f"{late} within {seconds:g} seconds ({knob})."))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self._BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        """Time what has come before anything else, and hand it on."""
        now = time.perf_counter()
        if self._ended is None or self._ended.done():
            return self._give_up()
        try:
            if self._read(self._rest + bytes(self._BUFFER[:nbytes]), now):
                self._idled = True
                self._ended.set_result(None)
        except Exception as error:  # the reader's too; it ends this request, and no other
            self._give_up()
            self._ended.set_exception(HttpFaultError(f"No HTTP: {error}.") if type(error) is ValueError else error)

    def connection_lost(self, exc: Exception | None) -> None:
        """An answer that is due doesn't come, or is cut."""
        self.usable = False
        if self._ended is not None and not self._ended.done():
            if self._left == _TO_THE_END and exc is None:
                return self._ended.set_result(None)
            not_taken = self._idled and not self._status and not self._rest
            kind = _NotTakenError if not_taken else HttpFaultError
            self._ended.set_exception(kind(f"The server has closed the connection ({exc or 'no error'})."))

    def _give_up(self) -> None:
        self.usable = False
        self.transport.abort()

    def _read(self, data: bytes, now: float) -> bool:
        """Hand on what is whole, and keep the rest. Whether the answer has ended."""
        if not self._status:
            head, found, body = data.partition(b"\r\n\r\n")
            if not found:
                self._rest = data
                return False
            if (status := int(head[9:12])) < 200:  # the answer comes after it
                return self._read(body, now)
            self._status, self._left = status, _length(status, head)
            self.usable = self._left != _TO_THE_END and not _CLOSES.search(head)
            data = body
        if self._left == _IN_CHUNKS:
            body, self._rest, ended = _unchunked(data)
        elif self._left == _TO_THE_END:
            body, self._rest, ended = data, b"", False
        else:
            body, self._rest = data, b""
            self._left = max(0, self._left - len(data))
            ended = self._left == 0
        self._reader(self._status, body, now)
        return ended


def _length(status: int, head: bytes) -> int:
    """How many bytes the body has, or which other end (RFC 9112, section 6.3)."""
    if status in (204, 304):
        return 0
    if _CHUNKED.search(head):
        return _IN_CHUNKS
    length = _LENGTH.search(head)
    return int(length[1]) if length else _TO_THE_END


def _unchunked(data: bytes) -> tuple[bytes, bytes, bool]:
    """The chunks that are whole, what comes after them, and whether the last one is there."""
    pieces: list[bytes] = []
    at = 0
    while (line := data.find(b"\r\n", at)) >= 0:
        size = int(data[at:line].partition(b";")[0], 16)
        if size == 0:  # fields may follow
            return b"".join(pieces), data[at:], data.find(b"\r\n\r\n", line) >= 0
        end = line + 2 + size
        if len(data) < end + 2:
            break
        pieces.append(data[line + 2 : end])
        at = end + 2
    return b"".join(pieces), data[at:], False


class HttpClient:
    """Sends POSTs to one URL over as many connections as there are requests at once; the one used last is used next."""

    def __init__(self, url: str, headers: Mapping[str, str], timeouts: Timeouts | None = None) -> None:
        self._timeouts = timeouts or Timeouts()
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"The URL must begin with http:// or https:// and a host, got {url!r}.")
        self._host, self._tls = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        fields = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json", **headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._head = f"POST {path} HTTP/1.1\r\n{lines}Content-Length: ".encode()
        self._idle: list[_Connection] = []

    async def post(self, body: bytes, reader: Reader) -> int:
        """Send a body and read its answer; how often it was sent again.

        A server may close an idle connection while the request is on its way. Then not a byte of an answer comes, and the request is
        sent once more, on a new connection. No other failure is tried again.

        Raises HttpFaultError, OSError, and what the reader raises.
        """
        request = b"%b%d\r\n\r\n%b" % (self._head, len(body), body)
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                try:
                    await self._answered(connection, request, reader)
                    return 0
                except _NotTakenError:
                    await self._answered(None, request, reader)
                    return 1
        await self._answered(None, request, reader)
        return 0

    async def _answered(self, connection: _Connection | None, request: bytes, reader: Reader) -> None:
        loop, timeouts = asyncio.get_running_loop(), self._timeouts
        if connection is None:
            try:
                async with asyncio.timeout(timeouts.connect):
                    _, connection = await loop.create_connection(
                        _Connection, self._host, self._port, ssl=self._tls or None
                    )
            except TimeoutError:
                raise HttpFaultError(
                    f"The server has accepted no connection in {timeouts.connect:g} seconds."
                ) from None
        ended = connection.ask(request, reader)
        timers = [
            loop.call_later(seconds, partial(connection.expire, seconds, whole=whole))
            for seconds, whole in ((timeouts.first_byte, False), (timeouts.whole, True))
        ]
        try:
            await ended
        except asyncio.CancelledError:
            connection.transport.abort()
            raise
        finally:
            for timer in timers:
                timer.cancel()
        if connection.usable:
            self._idle.append(connection)

    def close(self) -> None:
        """Close what is idle."""
        for connection in self._idle:
            connection.transport.abort()
