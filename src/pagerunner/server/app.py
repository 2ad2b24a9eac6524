"""The FastAPI application: routes, and one place where exceptions become answers."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from pagerunner import __version__
from pagerunner.errors import PagerunnerError
from pagerunner.logs import SparingLog
from pagerunner.server.endpoints.adapters import AdapterControl, LoadAdapterRequest, UnloadAdapterRequest
from pagerunner.server.endpoints.chat import ChatEndpoint
from pagerunner.server.endpoints.completions import CompletionsEndpoint
from pagerunner.server.endpoints.control import QUERIES, Control
from pagerunner.server.endpoints.docs import Docs
from pagerunner.server.endpoints.embeddings import EmbeddingRequest, EmbeddingsEndpoint
from pagerunner.server.endpoints.information import Information
from pagerunner.server.endpoints.invocations import InvocationRequest, Invocations
from pagerunner.server.endpoints.messages import MessagesEndpoint
from pagerunner.server.endpoints.responses import ResponsesEndpoint
from pagerunner.server.endpoints.tokens import DetokenizeRequest, TokenizeAnswer, TokenizeRequest, Tokens
from pagerunner.server.errors import ClientGoneError, HttpError, error_response, one_line, short
from pagerunner.server.gate import Access, Gate, Keys, marked
from pagerunner.server.http import CLIENT_LINK, read_body, unless_gone
from pagerunner.server.live import LiveFeed
from pagerunner.server.metrics import Metrics
from pagerunner.server.openapi import operation, schemas_of
from pagerunner.server.page_routes import FILE_PATHS, page_routes
from pagerunner.server.protocol.answers import ChatCompletion, Completion, ModelCard, ModelList
from pagerunner.server.protocol.messages import CountTokensRequest, MessagesAnswer, MessagesRequest
from pagerunner.server.protocol.requests import ChatRequest, CompletionRequest
from pagerunner.server.protocol.responses import ResponseBody, ResponsesRequest
from pagerunner.server.service import LABEL_HEADER, Service
from pagerunner.server.standard_metrics import CountedRequests, HttpMetrics
from pagerunner.types.weights import WeightTransferInitRequest, WeightTransferUpdateRequest

logger = logging.getLogger(__name__)
_refusals = SparingLog(logger, most=20)

Handler = Callable[[Request], Awaitable[Response]]
_CLIENT_CLOSED_REQUEST = 499


def create_app(
    service: Service, metrics: Metrics, feeds: Sequence[LiveFeed], keys: Keys, *, docs: bool = True
) -> FastAPI:
    """The application behind its gate; without `docs` there is no /docs, /redoc and /openapi.json."""
    app = FastAPI(
        title="pagerunner",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json" if docs else None,
    )
    http = HttpMetrics(metrics.counted)
    routes = _Routes(app)
    _add_routes(routes, service, metrics, lambda: http.load(metrics.directory))
    for path, handler in page_routes(service, feeds).items():
        routes.hidden(path, handler, Access.PUBLIC if path in FILE_PATHS else Access.ADMIN)
    if docs:
        pages = Docs(app.openapi)
        routes.hidden("/docs", pages.page, Access.PUBLIC)
        routes.hidden("/redoc", pages.to_page, Access.PUBLIC)
    for one in app.routes:
        if getattr(one, "path", None) == "/openapi.json":
            marked(one.endpoint, Access.PUBLIC)  # type: ignore[attr-defined]
    app.add_exception_handler(HTTPException, _refuse)
    app.add_middleware(Gate, routes=app, keys=keys)
    if keys.origins:  # outside the gate: browsers ask without a key first
        app.add_middleware(
            CORSMiddleware, allow_origins=keys.origins, allow_methods=["GET", "POST"], allow_headers=["*"], max_age=600
        )
    app.add_middleware(CountedRequests, metrics=http)
    return app


class _Routes:
    """Adds routes to an application, and collects what its OpenAPI document says of them."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._types: list[type] = []
        app.openapi = self._document  # type: ignore[method-assign]

    def add(
        self,
        method: str,
        path: str,
        handler: Handler,
        access: Access,
        body: type | None = None,
        answer: type | None = None,
        *,
        streams: bool = False,
    ) -> None:
        """A route of the API."""
        watched = method == "POST" and access is Access.CLIENT
        guarded = _guarded(_while_there(handler) if watched else handler)
        guarded.__name__ = f"{method.lower()}_{path.strip('/').replace('/', '_')}"
        guarded.__doc__ = (handler if inspect.ismethod(handler) else type(handler).__call__).__doc__
        self._types += [kind for kind in (body, answer) if kind is not None and kind not in self._types]
        extra = operation(path, body, answer, QUERIES.get(path, {}), streams=streams)
        self._app.add_api_route(
            path, marked(guarded, access), methods=[method], openapi_extra=extra, response_class=Response
        )
        self._call_directly(guarded)

    def hidden(self, path: str, handler: Handler, access: Access) -> None:
        """A page for people, which the document leaves out."""
        guarded = marked(_guarded(handler), access)
        self._app.add_api_route(path, guarded, include_in_schema=False, response_class=Response)
        self._call_directly(guarded)

    def _call_directly(self, handler: Handler) -> None:
        """Have the latest route call its handler itself: there is nothing to read from the request for it, and every exception is handled there."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            response = await handler(Request(scope, receive, send))
            await response(scope, receive, send)

        route = self._app.routes[-1]
        assert isinstance(route, APIRoute)
        route.app = app

    def _document(self) -> dict[str, Any]:
        document = FastAPI.openapi(self._app)
        document.setdefault("components", {})["schemas"] = schemas_of(self._types)
        return document


def _add_routes(routes: _Routes, service: Service, metrics: Metrics, load: Callable[[], int]) -> None:
    client, admin, public = Access.CLIENT, Access.ADMIN, Access.PUBLIC
    add = routes.add
    completions, chat, embeddings = CompletionsEndpoint(service), ChatEndpoint(service), EmbeddingsEndpoint(service)
    messages, responses = MessagesEndpoint(service), ResponsesEndpoint(service)
    add("POST", "/v1/completions", completions, client, CompletionRequest, Completion, streams=True)
    add("POST", "/v1/chat/completions", chat, client, ChatRequest, ChatCompletion, streams=True)
    add("POST", "/v1/responses", responses, client, ResponsesRequest, ResponseBody, streams=True)
    add("POST", "/v1/messages", messages, client, MessagesRequest, MessagesAnswer, streams=True)
    add("POST", "/v1/messages/count_tokens", messages.count_tokens, client, CountTokensRequest)
    add("POST", "/v1/embeddings", embeddings, client, EmbeddingRequest)
    add("POST", "/invocations", Invocations(chat, completions, embeddings), client, InvocationRequest)
    tokens = Tokens(service)
    add("POST", "/tokenize", tokens.tokenize, client, TokenizeRequest, TokenizeAnswer)
    add("POST", "/detokenize", tokens.detokenize, client, DetokenizeRequest)
    add("GET", "/tokenizer_info", tokens.info, client)
    control = Control(service)
    add("POST", "/sleep", control.sleep, admin)
    add("POST", "/wake_up", control.wake_up, admin)
    add("GET", "/is_sleeping", control.is_sleeping, admin)
    add("POST", "/pause", control.pause, admin)
    add("POST", "/resume", control.resume, admin)
    add("GET", "/is_paused", control.is_paused, admin)
    add("POST", "/reset_prefix_cache", control.reset_prefix_cache, admin)
    add("POST", "/init_weight_transfer_engine", control.init_weight_transfer_engine, admin, WeightTransferInitRequest)
    add("POST", "/start_weight_update", control.start_weight_update, admin)
    add("POST", "/update_weights", control.update_weights, admin, WeightTransferUpdateRequest)
    add("POST", "/finish_weight_update", control.finish_weight_update, admin)
    adapters = AdapterControl(service)
    add("POST", "/v1/load_lora_adapter", adapters.load, admin, LoadAdapterRequest)
    add("POST", "/v1/unload_lora_adapter", adapters.unload, admin, UnloadAdapterRequest)
    add("GET", "/get_world_size", control.get_world_size, admin)
    add("POST", "/collective_rpc", control.collective_rpc, admin)
    info = Information(service, metrics, load)
    add("GET", "/v1/models", info.models, client, answer=ModelList)
    add("GET", "/v1/models/{model:path}", info.model, client, answer=ModelCard)
    add("GET", "/health", info.health, public)
    for method in ("GET", "POST"):
        add(method, "/ping", info.health, public)
    add("GET", "/version", info.version, client)
    add("GET", "/load", info.load, client)
    add("GET", "/metrics", info.metrics, client)
    add("GET", "/memory", info.memory, admin)
    routes.hidden("/", info.to_page, public)


def _while_there(handler: Handler) -> Handler:
    """The handler, which is cancelled when its client leaves before the response begins.

    A client can leave while a template renders, a text is tokenised, a grammar is compiled or the engine works. The body is
    read here: only after the body can a disconnect be seen.
    """

    async def watched(request: Request) -> Response:
        request.state.body = await read_body(request)
        return await unless_gone(request.receive, handler(request), request.scope.get(CLIENT_LINK))

    return watched


def _guarded(handler: Handler) -> Handler:
    async def guarded(request: Request) -> Response:
        response = await _answer(handler, request)
        # The client's name for its call comes back as it is; inside, a call has an id of our own.
        if (label := request.headers.get(LABEL_HEADER)) is not None:
            response.headers[LABEL_HEADER] = label
        return response

    return guarded


async def _answer(handler: Handler, request: Request) -> Response:
    try:
        return await handler(request)
    except ClientGoneError:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    except asyncio.CancelledError:  # the event loop ends, and the task returns right after this answer
        return error_response(HttpError(503, "The server has stopped before the answer was ready."), request.url.path)
    except (HttpError, PagerunnerError) as error:
        response = error_response(error, request.url.path)
        what = (request.method, short(one_line(request.url.path)), response.status_code, one_line(str(error)))
        _refusals.warn("%s %s is refused with status %d: %s", *what)
        return response
    except Exception as error:  # any exception must end this request only
        label = request.headers.get(LABEL_HEADER, "none")
        logger.exception("%s %s failed (X-Request-Id: %.80r).", request.method, short(request.url.path), label)
        failure = HttpError(500, f"The server failed to answer: {type(error).__name__}.")
        return error_response(failure, request.url.path)


async def _refuse(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    message = f"{short(request.method)} {short(request.url.path)}: {error.detail}."
    response = error_response(HttpError(error.status_code, message), request.url.path)
    response.headers.update(error.headers or {})
    return response
