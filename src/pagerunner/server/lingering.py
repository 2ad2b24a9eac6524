"""The end of a connection whose client is still sending."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

LINGER_SECONDS = 2.0


class LingeringTransport:
    """A connection's transport that reads and drops what still comes, for a moment, where `is_sending` says that more comes.

    A system resets a connection that is closed with unread bytes of the client. The client then gets an error from its next
    write and may never read the answer that says why, for example a 413. A server should close its own half first and go on
    reading (RFC 9112, section 9.6). Here it reads until the client closes its half, LINGER_SECONDS at most.
    """

    def __init__(self, transport: asyncio.Transport, is_sending: Callable[[], bool]) -> None:
        self._transport = transport
        self._is_sending = is_sending
        self._end: asyncio.TimerHandle | None = None
        self._held: list[bytes] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send, or keep it while the transport holds what is written."""
        if self._held is None:
            self._transport.write(data)
        else:
            self._held.append(data)

    def hold(self) -> None:
        """Keep what is written until `release` or the end."""
        self._held = self._held or []

    def release(self) -> None:
        """Send what was kept in one piece."""
        held, self._held = self._held, None
        if held:
            self._transport.write(b"".join(held))

    def is_closing(self) -> bool:
        """Whether nothing more is to be read or written."""
        return self._end is not None or bool(self._transport.is_closing())

    def close(self) -> None:
        """Send what is written and close: now, or once the client has stopped sending."""
        self.release()
        if self.is_closing():
            return
        if not (self._is_sending() and self._transport.can_write_eof()):
            return self._transport.close()
        try:
            self._transport.write_eof()
        except OSError:  # the client has reset the connection: nobody is left to read the answer
            return self._transport.close()
        self._end = asyncio.get_running_loop().call_later(LINGER_SECONDS, self._transport.close)
        self._transport.resume_reading()

    def close_now(self) -> None:
        """Close, whatever the client still sends."""
        if self._end is not None:
            self._end.cancel()
        self._transport.close()
