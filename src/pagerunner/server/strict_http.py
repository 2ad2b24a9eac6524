"""h11's reader of HTTP, with two more refusals, and one less.

Without the refusals a proxy and this server might understand the same bytes differently. What is accepted: empty lines before a request.
"""

from __future__ import annotations

import re

import h11

_FOLDED = re.compile(rb"\n[ \t]")
_EMPTY_LINES = re.compile(rb"(?:\r\n)+")
_HEADERS_END = re.compile(rb"\r?\n\r?\n")


class StrictConnection(h11.Connection):
    """A server's side. `fault` says why the last request was refused; "" where h11's own rules did it.

    RFC 9112 lets a server refuse a request with Content-Length and Transfer-Encoding (6.3), and folded header lines (5.2). A server should
    ignore an empty line before a request (2.2): some clients end a body with one.
    """

    fault = ""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next event. Raises h11.RemoteProtocolError for what isn't HTTP, or not plainly so."""
        if self.their_state is h11.IDLE:
            data = self.trailing_data[0]
            if (empty := _EMPTY_LINES.match(data)) is not None:
                self._receive_buffer.maybe_extract_at_most(empty.end())
                data = data[empty.end() :]
            if data == b"\r":  # of an empty line, perhaps
                return h11.NEED_DATA
            self._refuse_folded(data)
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if b"content-length" in names and b"transfer-encoding" in names:
                self._refuse("The request has both Content-Length and Transfer-Encoding.")
        return event

    def _refuse_folded(self, data: bytes) -> None:
        end = _HEADERS_END.search(data)
        if end is not None and _FOLDED.search(data, 0, end.start()):
            self._refuse("The request has a folded header line, one that begins with white space.")

    def _refuse(self, fault: str) -> None:
        self.fault = fault
        raise h11.RemoteProtocolError(fault)
