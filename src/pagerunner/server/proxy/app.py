"""The application: which routes are passed on, and the two ways in which a request is answered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Sequence

import msgspec
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pagerunner import limits
from pagerunner.errors import InvalidRequestError
from pagerunner.logs import SparingLog
from pagerunner.memory.prefix import RecentPrompts
from pagerunner.server.errors import ClientGoneError, HttpError, error_body, error_response, one_line, short
from pagerunner.server.gate import Access, Gate, Keys, marked
from pagerunner.server.http import read_body, unless_gone
from pagerunner.server.lingering import LINGER_SECONDS
from pagerunner.server.proxy import bodies
from pagerunner.server.proxy.connection import CUT
from pagerunner.server.proxy.metrics import ProxyMetrics
from pagerunner.server.proxy.options import ProxyOptions
from pagerunner.server.proxy.pool import Pool, Server
from pagerunner.server.proxy.upstream import Call, Link, UpstreamError
from pagerunner.server.standard_metrics import CountedRequests

logger = logging.getLogger(__name__)

_POST = """/v1/completions /v1/chat/completions /v1/responses /v1/messages /v1/messages/count_tokens /v1/embeddings
    /v1/audio/transcriptions /v1/audio/translations /v1/score /score /v1/rerank /v2/rerank /rerank /pooling /classify
    /invocations /tokenize /detokenize""".split()
_FORMS = ("/v1/audio/transcriptions", "/v1/audio/translations")
_GET = "/v1/models /v1/models/{model:path} /tokenizer_info /version".split()
_LABEL = b"x-request-id"
_DOUBTED = (400, 422, 500)
"""Statuses by which a decode server may mean the parameters: the prefill server has taken the same request without them."""
_EVENT_END = b"\n\n"


class Proxy:
    """An ASGI endpoint that passes requests on.

    `servers` answer. If there are `prefill` servers, one of them computes a prompt first, and the one that answers takes it from there.
    """

    def __init__(self, options: ProxyOptions, metrics: ProxyMetrics) -> None:
        def pool(kind: str, urls: Sequence[str]) -> Pool:
            named = [Server(f"{kind} {number}", url, options, metrics) for number, url in enumerate(urls)]
            return Pool(named, options.policy)

        self._servers = pool("decode server", options.decode) if options.decode else pool("server", options.worker_urls)
        self._prefill = pool("prefill server", options.prefill)
        self._options, self._metrics = options, metrics
        self._by_prefix = self._servers.chooses_by_prefix or self._prefill.chooses_by_prefix
        self._recent = RecentPrompts()
        self._fallbacks = SparingLog(logger, most=5)
        self._under_way: set[asyncio.Task[None]] = set()
        self._stopped = ""

    @property
    def servers(self) -> list[Server]:
        """All of them."""
        return [*self._servers.servers, *self._prefill.servers]

    @property
    def running(self) -> int:
        """How many requests are being answered."""
        return len(self._under_way)

    def stop(self, why: str) -> None:
        """End all requests."""
        self._stopped = why
        for task in self._under_way:
            task.cancel()

    async def health(self, request: Request) -> Response:
        """200 while a server can answer, else 503 with the reasons. The body names those that are lost."""
        lost = self._servers.faults
        if len(lost) == len(self._servers.servers):
            faults = "; ".join(f"the {name} {fault}" for name, fault in lost.items())
            return error_response(HttpError(503, f"No server takes requests: {faults}."))
        lost |= self._prefill.faults
        return Response(msgspec.json.encode({"lost": lost}) if lost else b"", media_type="application/json")

    async def show_metrics(self, request: Request) -> Response:
        """The proxy's own figures."""
        return Response(generate_latest(self._metrics.registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request with what a server answers."""
        request, reply = Request(scope, receive), _Reply(scope, receive, send)
        work: asyncio.Task[None] | None = None
        try:
            if ".." in scope["path"].split("/"):  # another server may take it for another path
                raise HttpError(404, f"{short(scope['path'])} is not passed on by the proxy, because of its '..'.")
            body = await read_body(request)
            work = asyncio.create_task(self._answer(scope, body, reply))
            self._under_way.add(work)
            await unless_gone(receive, work)
        except ClientGoneError:  # its answer's connection is closed, which ends the request there
            pass
        except (HttpError, InvalidRequestError) as error:
            await reply.fail(error)
        except asyncio.CancelledError:
            if not self._stopped:
                raise
            await reply.fail(HttpError(503, self._stopped))
        finally:
            if work is not None:
                self._under_way.discard(work)

    async def _answer(self, scope: Scope, body: bytes, reply: _Reply) -> None:
        seconds, path, post = self._options.request_timeout_secs, scope["path"], scope["method"] == "POST"
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        call = Call(scope["method"].encode(), target, scope["headers"], body if post else b"")
        try:
            async with asyncio.timeout(seconds):
                fields = self._fields(body) if post and path not in _FORMS else {}
                hashes = bodies.units(fields, self._recent) if self._by_prefix else []
                if self._prefill.servers and path in bodies.HANDED_OVER:
                    call, handed = await self._prefilled(call, fields, hashes)
                    if handed is not None:
                        async with self._servers.asked(call._replace(body=handed), hashes) as answer:
                            if answer.status not in _DOUBTED:
                                return await reply.pass_on(answer)
                        self._fall_back("refused by decode", f"the decode server answers with status {answer.status}")
                async with self._servers.asked(call, hashes) as answer:
                    await reply.pass_on(answer)
        except TimeoutError:
            why = f"The answer has not ended within {seconds:g} seconds (--request-timeout-secs)."
            raise HttpError(504, why) from None
        except UpstreamError as error:
            raise HttpError(502, f"The answer breaks off: {error}.") from error

    def _fields(self, body: bytes) -> bodies.Fields:
        """What is read of a body. Equal servers say themselves what is wrong with one.

        A decode server believes parameters that come from here. So what can't be read here is refused: another reader of JSON might find
        parameters in it, in UTF-16 or beside a NaN.
        """
        if not self._prefill.servers:
            try:
                return bodies.read_fields(body) if self._by_prefix else {}
            except (InvalidRequestError, HttpError):
                return {}
        fields = bodies.read_fields(body)
        if bodies.is_set(fields, bodies.PARAMS):
            why = f"{bodies.PARAMS} is what this proxy's prefill servers say; a client can't."
            raise HttpError(400, why, bodies.PARAMS)
        return fields

    async def _prefilled(self, call: Call, fields: bodies.Fields, hashes: list[bytes]) -> tuple[Call, bytes | None]:
        """The call with a name, and its body for a decode server that needn't compute the prompt; None if it must."""
        if not any(name == _LABEL for name, _ in call.headers):  # both servers' logs have it then
            call = call._replace(headers=[*call.headers, (_LABEL, uuid.uuid4().hex.encode())])
        if why := bodies.needs_no_prefill(fields, self._options.prefill_min_tokens):
            self._fall_back(why)
            return call, None
        headers = [(name, value) for name, value in call.headers if name != b"accept-encoding"]
        asked = call._replace(body=bodies.prefill_body(fields), headers=headers)
        seconds = self._options.prefill_timeout_secs
        try:
            async with asyncio.timeout(seconds), self._prefill.asked(asked, hashes) as answer:
                found = await answer.whole(limits.MAX_BODY_BYTES)
            if answer.status != 200:
                self._fall_back("refused", f"status {answer.status}: {short(found.decode(errors='replace'), 300)}")
            elif (params := bodies.params_in(found)) is not None:
                return call, bodies.with_params(fields, params)
            else:
                self._fall_back("nothing to hand over")
        except TimeoutError:
            self._fall_back("late", f"no answer within {seconds:g} seconds (--prefill-timeout-secs)")
        except (HttpError, UpstreamError) as error:
            self._fall_back("failed", str(error))
        except InvalidRequestError:
            self._fall_back("unreadable", "its answer is no JSON object")
        return call, None

    def _fall_back(self, reason: str, why: str = "") -> None:
        """A decode server computes a prompt itself. `why` it does if that is a fault."""
        self._metrics.fallbacks.labels(reason).inc()
        if why:
            self._fallbacks.warn(
                "A decode server computes a prompt itself, because no prefill server has: %s", one_line(why)
            )


class _Reply:
    """The way back to a client."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._begun = self._ended = self._events = False
        self._last = _EVENT_END

    async def pass_on(self, answer: Link) -> None:
        """Send an answer as it comes. A piece is read when the one before it has gone into the client's buffer."""
        said = {name.lower(): value for name, value in answer.headers}
        events = said.get(b"content-type", b"").startswith(b"text/event-stream") and b"content-encoding" not in said
        self._events = events and self._scope["path"] in bodies.HANDED_OVER
        self._begun = True
        await self._send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
        async for piece in answer.body():
            self._last = (self._last + piece[-2:])[-2:]
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        self._ended = True

    async def fail(self, error: Exception) -> None:
        """Say so: with a status, or in the stream, or by cutting it."""
        if not self._begun:
            return await error_response(error, self._scope["path"])(self._scope, self._receive, self._send)
        if self._ended:
            return
        if self._events and self._last == _EVENT_END:
            event = b"data: " + msgspec.json.encode(error_body(error)) + b"\n\ndata: [DONE]\n\n"
            with contextlib.suppress(TimeoutError):  # of a client that reads nothing
                async with asyncio.timeout(LINGER_SECONDS):
                    return await self._send({"type": "http.response.body", "body": event, "more_body": False})
        self._scope[CUT]()


def create_app(proxy: Proxy, metrics: ProxyMetrics, *, loopback: bool) -> ASGIApp:
    """The application behind its gate. It has no keys: those that clients send are the servers'."""
    marked(proxy, Access.CLIENT)
    routes = [Route(path, proxy, methods=["POST"]) for path in _POST]
    routes += [Route(path, proxy, methods=["GET"]) for path in _GET]
    for path, handler, access in (
        ("/health", proxy.health, Access.PUBLIC),
        ("/ping", proxy.health, Access.PUBLIC),
        ("/metrics", proxy.show_metrics, Access.CLIENT),
    ):
        marked(handler.__func__, access)  # type: ignore[attr-defined]
        routes.append(Route(path, handler, methods=["GET"]))
    app = Starlette(routes=routes, exception_handlers={HTTPException: _no_route})
    app.add_middleware(Gate, routes=app, keys=Keys(loopback=loopback))
    app.add_middleware(CountedRequests, metrics=metrics.http)
    return app


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = f"{short(request.method)} {short(request.url.path)}"
    why = (
        f"{path} is not passed on by the proxy ({error.detail}); what controls a server is asked of the server itself."
    )
    return error_response(HttpError(error.status_code, why), request.url.path)
