"""One client's connection: uvicorn's, with limits on time and number, and errors in the API's own form."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import resource
import select
import sys
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from pagerunner import limits
from pagerunner.logs import SparingLog
from pagerunner.server.client_link import ClientLink
from pagerunner.server.errors import HttpError, error_body, one_line
from pagerunner.server.http import CLIENT_LINK, EVENT_STREAM
from pagerunner.server.lingering import LingeringTransport
from pagerunner.server.strict_http import StrictConnection

logger = logging.getLogger(__name__)

_OTHER_FILES = 64  # that the server has open beside connections: the model's, the helpers', the core's
_RETRY_SECONDS = 1
_URL_CHARS = 200
_HALF_CLOSED_SECONDS = 0.05, 1.6  # at first, at most


_refused = SparingLog(logger)
_not_accepted = SparingLog(logger)
_behind = SparingLog(logger)


def accepted_at_once() -> int:
    """How many new connections may be taken in one go: each has a file descriptor before it can be counted."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1_024 if soft == resource.RLIM_INFINITY else max(1, min(1_024, soft // 8))


def connections_allowed() -> int:
    """How many connections there may be: limits.MAX_CONNECTIONS, or what the limit on open files leaves room for."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return limits.MAX_CONNECTIONS
    return max(1, min(limits.MAX_CONNECTIONS, soft - _OTHER_FILES - 2 * accepted_at_once()))


def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An event loop's exception handler: a line now and then while connections can't be accepted, else the loop's own."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
        _not_accepted.warn(f"New connections can't be accepted: {error.strerror}. Those that are open go on.")
    else:
        loop.default_exception_handler(context)


class ShortUrls(logging.Filter):
    """Cuts long URLs in uvicorn's access log, whose arguments are client, method, URL, version and status."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Pass every record."""
        if isinstance(record.args, tuple) and len(record.args) == 5:
            client, method, url, *rest = record.args
            if len(str(url)) > _URL_CHARS:
                record.args = (client, method, f"{one_line(str(url))[:_URL_CHARS]}...", *rest)
        return True


class Connection(H11Protocol):
    """A connection that is closed when a request's headers don't come in time, whether the client sent nothing or half of them.

    So is one whose request was answered, and its body is still not complete.

    A connection beyond the limit gets a 503 and is closed.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._strict = self.conn = StrictConnection(h11.SERVER, limits.MAX_HEADER_BYTES)
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._unreadable = self._half_closed = False
        self.timeout_keep_alive = limits.KEEP_ALIVE_SECONDS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there; its first request is due."""
        self._lingering = LingeringTransport(transport, self._more_comes)
        super().connection_made(self._lingering)  # type: ignore[arg-type]
        most = connections_allowed()
        if len(self.connections) > most:
            _refused.warn(
                f"A connection is refused: {most} are open, as many as there may be {limits.knob('MAX_CONNECTIONS')}, "
                "which the limit on open files (ulimit -n) lowers."
            )
            error = HttpError(503, f"The server has {most} connections, as many as it may have; try again later.")
            self._answer(error, retry_after=_RETRY_SECONDS)
            return
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Pass bytes on, and keep the time limit running until they make up a request's headers."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._watch()

    def handle_events(self) -> None:
        """Begin requests that have come, whose streams write their events past h11."""
        super().handle_events()
        if self.cycle is not None and CLIENT_LINK not in self.cycle.scope:
            self.cycle.scope[CLIENT_LINK] = ClientLink(self.cycle, self._lingering)  # type: ignore[literal-required]

    def on_response_complete(self) -> None:
        """An answer is given; the next request is due, or the rest of this one."""
        super().on_response_complete()
        if self._half_closed and self.cycle.response_complete:
            self.transport.close()
        self._watch()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. Its last request is answered if it is whole and the client is there.

        A client that has gone looks the same, but its system answers the next bytes with a reset. So it is sent some: an interim answer, which
        clients of HTTP/1.1 pass over, or a comment, which readers of event streams pass over. Other answers that have begun are whole soon.
        """
        whole = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE) and self.conn.their_http_version == b"1.1"
        if self._lingering.is_closing() or not whole or self.cycle.response_complete:
            return False
        if not self.cycle.response_started:
            interim = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
            self.transport.write(self.conn.send(interim) or b"")
        elif EVENT_STREAM in self.cycle.scope:
            self.transport.write(self.conn.send(h11.Data(data=b":\n\n")) or b"")
        self._half_closed = True
        self.loop.call_later(_HALF_CLOSED_SECONDS[0], self._end_if_reset, _HALF_CLOSED_SECONDS[0])
        return True

    def _end_if_reset(self, waited: float) -> None:
        if self.transport.is_closing():
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket"), 0)  # errors alone
        if poll.poll(0):
            self.transport.abort()
        else:
            later = min(2 * waited, _HALF_CLOSED_SECONDS[1])
            self.loop.call_later(later, self._end_if_reset, later)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, unless bytes have come since the loop looked: with many streams that is long ago."""
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket"), select.POLLIN)
        if not poll.poll(0):  # else they are read next
            super().timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn doesn't after an error
        if self.cycle is not None and self.cycle.disconnected:
            self.cycle.scope[CLIENT_LINK].tell_gone()  # type: ignore[literal-required]
        self._lingering.close_now()
        for timer in (self._deadline, self._unread):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        """Much is written that the client hasn't read."""
        super().pause_writing()
        self._unread = self.loop.call_later(limits.UNREAD_SECONDS, self._fall_behind, math.inf)

    def resume_writing(self) -> None:
        """The client has read on."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def _fall_behind(self, before: float) -> None:
        """The client hasn't read enough. `before`: the bytes that waited for it when that was last so; none was written since."""
        link, left = self.cycle.scope[CLIENT_LINK], self._lingering.get_write_buffer_size()  # type: ignore[literal-required]
        told = link.fall_behind()
        if not told and (left >= before or EVENT_STREAM in self.cycle.scope and not link.fits):
            self._lingering.abort()
        else:
            self._unread = self.loop.call_later(limits.UNREAD_SECONDS, self._fall_behind, math.inf if told else left)
        if told or self._lingering.is_closing():
            _behind.warn(
                f"An answer is given up: its client has not read it for {limits.UNREAD_SECONDS:g} seconds {limits.knob('UNREAD_SECONDS')}."
            )

    def shutdown(self) -> None:
        """The server ends: an answer under way is sent, a client that only sends is not waited for."""
        if self._lingering.is_closing() or self._more_comes():
            self._lingering.close_now()
        else:
            super().shutdown()

    def give_up(self, error: HttpError) -> None:
        """Answer a request whose body has not come whole, and which has no answer yet, with the error. Others are left alone."""
        if self.conn.their_state is h11.SEND_BODY and self._ends_unanswered():
            self._refuse(error)

    def _ends_unanswered(self) -> bool:
        """Tell the endpoint, which waits for the rest of the body, that its client is gone; False if an answer has begun."""
        if self.cycle is None or self.cycle.response_started:
            return False
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        return True

    def _more_comes(self) -> bool:
        """Whether the last answer is given and its request is not read to its end."""
        answered = self.cycle is None or self.cycle.response_complete
        return self._unreadable or answered and self.conn.their_state is h11.SEND_BODY

    def send_400_response(self, msg: str) -> None:
        """What can't be read as HTTP gets an error object, or nothing where an answer has begun already."""
        if self._strict.fault:  # the request has not reached an endpoint
            return self._refuse(HttpError(400, self._strict.fault))
        if self.conn.our_state is h11.SEND_RESPONSE and self._ends_unanswered():
            return self._refuse(HttpError(400, "The request's body is not valid HTTP (its chunks can't be read)."))
        if self.conn.our_state is not h11.IDLE:
            return self.transport.close()
        error = HttpError(400, f"{msg.rstrip('.')}.")
        # uvicorn calls this where it has met h11's error
        if getattr(sys.exc_info()[1], "error_status_hint", 400) == 431:
            knob = limits.knob("MAX_HEADER_BYTES")
            error = HttpError(431, f"The request's headers are larger than {limits.MAX_HEADER_BYTES} bytes {knob}.")
        self._refuse(error)

    def _refuse(self, error: HttpError) -> None:
        """Answer what can't be read; more of it may come."""
        self._unreadable = True
        self._answer(error)

    def _answer(self, error: HttpError, retry_after: int | None = None) -> None:
        """Send the error and close."""
        body = msgspec.json.encode(error_body(error))
        headers = [("content-type", "application/json"), ("connection", "close"), ("content-length", str(len(body)))]
        if retry_after is not None:
            headers.append(("retry-after", str(retry_after)))
        for event in (h11.Response(status_code=error.status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch(self) -> None:
        # which has a timer of its own
        idle = self.timeout_keep_alive_task is not None and not self.conn.trailing_data[0]
        due = self.conn.their_state is h11.IDLE and not idle or self._more_comes()
        waiting = due and not self.transport.is_closing()
        if waiting and self._deadline is None:
            self._deadline = self.loop.call_later(limits.HEADER_SECONDS, self.transport.close)
        elif not waiting and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
