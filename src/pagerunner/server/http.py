"""Reading bodies with a limit, noticing clients that leave, and streams of server-sent events."""

from __future__ import annotations

import asyncio
import gc
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from pagerunner import limits
from pagerunner.errors import InvalidRequestError
from pagerunner.server.errors import ClientGoneError, HttpError, short

if TYPE_CHECKING:
    from pagerunner.server.client_link import ClientLink

Body = TypeVar("Body")
Result = TypeVar("Result")
_LARGE_BODY = 256 * 1024
_ORDINARY_BODY = 64 * 1024
"""A body up to this size is received even when many large ones fill the bound that they have together."""
_PATH = re.compile(r" - at `(?:key` in `)?\$\.?([^`]*)`$")
_FIELD = re.compile(r"field `([^`]*)`")
_HALVES = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
"""Escapes in JSON: a backslash, both halves of a character, or (the group) a half alone."""
_LONG_NAME = re.compile(r"`([^`]{97})[^`]{4,}`")
_decoders: dict[type[Any], msgspec.json.Decoder[Any]] = {}
"""By the type of a body: making one takes as long as using it."""


class _BodiesInFlight:
    """The bytes of all bodies that are being received."""

    def __init__(self) -> None:
        self.size = 0


_in_flight = _BodiesInFlight()


async def read_body(request: Request) -> bytes:
    """The request's body, once: the request does not keep it.

    Raises:
        HttpError: 413 as soon as it is longer than limits.MAX_BODY_BYTES, 408 when it stalls or takes too long, 503 when too
            many bodies are being received, 415 for one that is compressed.
        ClientGoneError: the client has left.
    """
    if (body := getattr(request.state, "body", None)) is not None:  # it was read before its endpoint was called
        del request.state.body
        return bytes(body)
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        raise HttpError(
            415, f"The request body is coded as {short(coding)!r}; send it as it is, without Content-Encoding."
        )
    limit = limits.MAX_BODY_BYTES
    too_long = HttpError(413, f"The request body is larger than {limit} bytes {limits.knob('MAX_BODY_BYTES')}.")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise too_long
    body = bytearray()
    end = time.monotonic() + limits.BODY_TOTAL_SECONDS
    try:
        while True:
            message = await _next_piece(request.receive, end, len(body))
            piece = message.get("body", b"")
            body += piece
            _in_flight.size += len(piece)
            if len(body) > limit:
                raise too_long
            if _in_flight.size > limits.MAX_BODIES_BYTES and len(body) > _ORDINARY_BODY:
                raise HttpError(
                    503,
                    f"More than {limits.MAX_BODIES_BYTES} bytes of request bodies are being received "
                    f"{limits.knob('MAX_BODIES_BYTES')}; try again later.",
                    retry=True,
                )
            if not message.get("more_body", False):
                return bytes(body)
    finally:
        _in_flight.size -= len(body)


async def _next_piece(receive: Receive, end: float, size: int) -> Message:
    stall = limits.BODY_SECONDS
    left = end - time.monotonic()
    try:
        async with asyncio.timeout(min(stall, left)):
            message = await receive()
    except TimeoutError:
        if left <= stall:
            total, knob = limits.BODY_TOTAL_SECONDS, limits.knob("BODY_TOTAL_SECONDS")
            raise HttpError(408, f"The request body was not complete after {total} seconds {knob}.") from None
        knob = limits.knob("BODY_SECONDS")
        raise HttpError(408, f"The request body stopped after {size} bytes, for {stall} seconds {knob}.") from None
    if message["type"] == "http.disconnect":
        raise ClientGoneError
    return message


async def read_as(request: Request, kind: type[Body]) -> Body:
    """The request's body as `kind`. Raises what `read_body` and `decode_body` raise."""
    if kind not in _decoders:
        _decoders[kind] = msgspec.json.Decoder(kind)
    decoder: msgspec.json.Decoder[Body] = _decoders[kind]
    return decode_body(await read_body(request), decoder)


def decode_body(body: bytes, decoder: msgspec.json.Decoder[Body]) -> Body:
    """The body as the decoder's type.

    Decoding can't be interrupted, whatever thread does it: it takes 0.1 seconds for a million values.

    Raises:
        InvalidRequestError: it names the field where there is one.
        HttpError: 413 for more than limits.MAX_BODY_VALUES.
    """
    if len(body) > limits.MAX_BODY_VALUES and (values := body.count(b",")) > limits.MAX_BODY_VALUES:
        most, knob = limits.MAX_BODY_VALUES, limits.knob("MAX_BODY_VALUES")
        raise HttpError(413, f"The request body has about {values} values; at most {most} are allowed {knob}.")
    collects = len(body) > _LARGE_BODY and gc.isenabled()
    try:
        if collects:  # millions of fresh values would make the collector walk all of the process's again and again
            gc.disable()
        body.decode("utf-8")
        return decoder.decode(body)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"The request body is not valid UTF-8 at byte {error.start}.") from error
    except msgspec.ValidationError as error:
        text = _LONG_NAME.sub(r"`\1...`", str(error))
        path, field = _PATH.search(text), _FIELD.search(text)
        param = ".".join(part for part in (path and path.group(1), field and field.group(1)) if part)
        raise InvalidRequestError(f"{text}.", param=param or None) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError(f"The request body is not valid JSON: {_why(body, error)}.") from error
    finally:
        if collects:
            gc.enable()


def _why(body: bytes, error: Exception) -> str:
    """What is wrong with JSON; of half a character the decoder says that the text was truncated."""
    if "truncated" in str(error) or "surrogate" in str(error):
        alone = next((found for found in _HALVES.finditer(body) if found[1] is not None), None)
        if alone is not None:
            return f"{alone[1].decode()} at byte {alone.start()} is a lone surrogate, half of a character"
    return str(error)


async def unless_gone(receive: Receive, work: Awaitable[Result], link: ClientLink | None = None) -> Result:
    """Run `work`; cancel it and raise ClientGoneError when the client disconnects. The body must have been read.

    `link` is the request's, if the work may run in this task.
    """
    if link is not None:
        return await link.unless_gone(work)
    running = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait([running, gone], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        raise ClientGoneError
    finally:
        for task in (running, gone):
            task.cancel()
        await asyncio.gather(running, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


EVENT_STREAM = "pagerunner.event_stream"
"""In a request's scope: its answer is a stream of events, each written whole."""
CLIENT_LINK = "pagerunner.client_link"
"""In a request's scope: the ClientLink of its connection."""


class LastEvents(bytes):
    """The events that end a stream. They and the answer's end are sent in one piece."""


class EventStream(Response):
    """A text/event-stream of ready-made events; the source is closed when the client leaves or the events end.

    If it has `begun`, the first event is there, and is sent in one piece with the answer's beginning.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], close_source: Callable[[], Awaitable[None]], *, begun: bool = False
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close_source, self._begun = close_source, begun

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[EVENT_STREAM] = True
        try:
            link = scope.get(CLIENT_LINK)
            await unless_gone(receive, self._send_all(send, link), link)
        except (ClientGoneError, OSError):
            pass  # a client may leave at any time; the source is closed below
        finally:
            await self._events.aclose()
            await self._close_source()  # the events may never have been started

    async def _ended_by(self, error: HttpError) -> bytes:
        """End the source. The events that tell it to the client, if they can."""
        try:
            return await self._events.athrow(error)
        except (HttpError, StopAsyncIteration):
            return b""
        finally:
            await self._close_source()

    async def _send_all(self, send: Send, link: ClientLink | None) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        if link is None or not link.fits:
            await send(start)
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            return await send({"type": "http.response.body", "body": b"", "more_body": False})
        try:
            if self._begun:
                link.hold()
            await send(start)
            async for event in self._events:
                last = isinstance(event, LastEvents)
                if last:
                    link.hold()
                try:
                    await link.write(event)
                except HttpError as error:  # the client doesn't read
                    await link.write(event if last else await self._ended_by(error))
                    break
                if not last:
                    link.release()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            link.release()
