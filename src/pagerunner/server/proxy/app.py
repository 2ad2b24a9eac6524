"""The application: which routes are passed on, and the two ways in which a request is answered."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence

import msgspec
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pagerunner import limits
from pagerunner.logs import SparingLog
from pagerunner.memory.prefix import RecentPrompts
from pagerunner.server.errors import HttpError, error_body, error_response, one_line, short
from pagerunner.server.gate import Access, Gate, Keys, marked
from pagerunner.server.http import ClientGoneError, read_body, unless_gone
from pagerunner.server.proxy.bodies import (
    HANDED_OVER,
    PARAMS,
    Fields,
    decode_body,
    is_set,
    needs_whole_prompt,
    params_in,
    prefill_body,
    read_fields,
    units,
)
from pagerunner.server.proxy.connection import CUT
from pagerunner.server.proxy.metrics import ProxyMetrics
from pagerunner.server.proxy.options import ProxyOptions
from pagerunner.server.proxy.pool import Pool, Server
from pagerunner.server.proxy.upstream import Answer, Call, UpstreamError
from pagerunner.server.standard_metrics import CountedRequests

logger = logging.getLogger(__name__)

_POST = """/v1/completions /v1/chat/completions /v1/responses /v1/messages /v1/messages/count_tokens /v1/embeddings
    /v1/audio/transcriptions /v1/audio/translations /v1/score /score /v1/rerank /v2/rerank /rerank /pooling /classify
    /invocations /tokenize /detokenize""".split()
_GET = "/v1/models /v1/models/{model:path} /tokenizer_info /version".split()
_LABEL = b"x-request-id"
_DOUBTED = (400, 422, 500)
"""Statuses by which a decode server may mean the parameters: the prefill server has taken the same request without them."""
_EVENT_STREAMS = ("/v1/completions", "/v1/chat/completions")
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
            body = await read_body(request)
            work = asyncio.create_task(self._answer(scope, body, reply))
            self._under_way.add(work)
            await unless_gone(receive, work)
        except ClientGoneError:  # its answer's connection is closed, which ends the request there
            pass
        except HttpError as error:
            await reply.fail(error)
        except asyncio.CancelledError:
            if not self._stopped:
                raise
            await reply.fail(HttpError(503, self._stopped))
        finally:
            if work is not None:
                self._under_way.discard(work)

    async def _answer(self, scope: Scope, body: bytes, reply: _Reply) -> None:
        seconds = self._options.request_timeout_secs
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        call = Call(scope["method"].encode(), target, scope["headers"], body)
        try:
            async with asyncio.timeout(seconds):
                fields = read_fields(body)
                hashes = units(fields, self._recent)
                if self._prefill.servers and scope["raw_path"] in HANDED_OVER:
                    call, handed = await self._prefilled(call, fields, hashes)
                    if handed is not None:
                        async with self._servers.asked(call._replace(body=handed), hashes) as answer:
                            if answer.status not in _DOUBTED:
                                return await reply.pass_on(answer)
                        self._recompute("refused by decode", f"the decode server answers with status {answer.status}")
                async with self._servers.asked(call, hashes) as answer:
                    await reply.pass_on(answer)
        except TimeoutError:
            why = f"The answer has not ended within {seconds:g} seconds (--request-timeout-secs)."
            raise HttpError(504, why) from None
        except UpstreamError as error:
            raise HttpError(502, f"The answer breaks off: {error}.") from error

    async def _prefilled(self, call: Call, fields: Fields, hashes: list[bytes]) -> tuple[Call, bytes | None]:
        """The call with a name, and its body for a decode server that needn't compute the prompt; None if it must."""
        if is_set(fields, PARAMS):
            raise HttpError(400, f"{PARAMS} is what this proxy's prefill servers say; a client can't.", PARAMS)
        if not any(name == _LABEL for name, _ in call.headers):  # both servers' logs have it then
            call = call._replace(headers=[*call.headers, (_LABEL, uuid.uuid4().hex.encode())])
        if not fields:
            return call, None
        if why := needs_whole_prompt(fields):
            self._metrics.recomputed.labels(why).inc()
            return call, None
        headers = [(name, value) for name, value in call.headers if name != b"accept-encoding"]
        seconds = self._options.prefill_timeout_secs
        try:
            async with (
                asyncio.timeout(seconds),
                self._prefill.asked(call._replace(body=prefill_body(fields), headers=headers), hashes) as answer,
            ):
                found = await answer.whole(limits.MAX_BODY_BYTES)
            if answer.status != 200:
                self._recompute("refused", f"status {answer.status}: {short(one_line(found.decode(errors='replace')))}")
            elif (params := params_in(found)) is not None:
                return call, decode_body(fields, params)
            else:
                self._metrics.recomputed.labels("nothing to hand over").inc()
        except TimeoutError:
            self._recompute("late", f"no answer within {seconds:g} seconds (--prefill-timeout-secs)")
        except (HttpError, UpstreamError) as error:
            self._recompute("failed", str(error))
        except (ValueError, RecursionError) as error:
            self._recompute("unreadable", f"no JSON: {error}")
        return call, None

    def _recompute(self, reason: str, why: str) -> None:
        self._metrics.recomputed.labels(reason).inc()
        self._fallbacks.warn(
            "A decode server computes a prompt itself, because no prefill server has: %s", one_line(why)
        )


class _Reply:
    """The way back to a client."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._begun = self._ended = self._events = False
        self._last = _EVENT_END

    async def pass_on(self, answer: Answer) -> None:
        """Send an answer as it comes. A piece is read when the one before it has gone into the client's buffer."""
        coded = any(name == b"content-encoding" for name, _ in answer.headers)
        kind = next((value for name, value in answer.headers if name.lower() == b"content-type"), b"")
        self._events = kind.startswith(b"text/event-stream") and self._scope["path"] in _EVENT_STREAMS and not coded
        self._begun = True
        await self._send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
        async for piece in answer.body():
            self._last = (self._last + piece[-2:])[-2:]
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        self._ended = True

    async def fail(self, error: HttpError) -> None:
        """Say so: with a status, or in the stream, or by cutting it."""
        if not self._begun:
            return await error_response(error, self._scope["path"])(self._scope, self._receive, self._send)
        if self._ended:
            return
        if not (self._events and self._last == _EVENT_END):
            return self._scope[CUT]()  # type: ignore[no-any-return]
        event = b"data: " + msgspec.json.encode(error_body(error)) + b"\n\ndata: [DONE]\n\n"
        await self._send({"type": "http.response.body", "body": event, "more_body": False})


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
    app = Starlette(routes=routes)
    app.add_middleware(Gate, routes=app, keys=Keys(loopback=loopback))
    app.add_middleware(CountedRequests, metrics=metrics.http)
    return app
