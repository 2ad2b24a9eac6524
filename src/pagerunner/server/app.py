"""The FastAPI application: routes, authentication, and one place where exceptions become answers."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from pagerunner import __version__
from pagerunner.errors import EngineDeadError, PagerunnerError
from pagerunner.server.endpoints.chat import ChatEndpoint
from pagerunner.server.endpoints.completions import CompletionsEndpoint
from pagerunner.server.endpoints.control import QUERIES, Control
from pagerunner.server.endpoints.embeddings import EmbeddingRequest, EmbeddingsEndpoint
from pagerunner.server.endpoints.messages import MessagesEndpoint
from pagerunner.server.endpoints.responses import ResponsesEndpoint
from pagerunner.server.endpoints.tokens import DetokenizeRequest, TokenizeRequest, Tokens
from pagerunner.server.errors import HttpError, error_response, one_line, short
from pagerunner.server.gate import Access, Gate, Keys, marked
from pagerunner.server.http import ClientGoneError
from pagerunner.server.live import LiveFeed
from pagerunner.server.metrics import CONTENT_TYPE, Metrics
from pagerunner.server.page_routes import FILE_PATHS, page_routes
from pagerunner.server.protocol.answers import ModelCard, ModelList
from pagerunner.server.protocol.messages import CountTokensRequest, MessagesRequest
from pagerunner.server.protocol.requests import ChatRequest, CompletionRequest
from pagerunner.server.protocol.responses import ResponsesRequest
from pagerunner.server.service import LABEL_HEADER, Service, json_response

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]
_CLIENT_CLOSED_REQUEST = 499


def create_app(service: Service, metrics: Metrics, feed: LiveFeed, keys: Keys) -> FastAPI:
    """The application behind its gate."""
    app = FastAPI(title="pagerunner", version=__version__, docs_url=None, redoc_url=None)
    schemas = _add_routes(app, service, metrics)
    for path, handler in page_routes(feed).items():
        access = Access.PUBLIC if path in FILE_PATHS else Access.ADMIN
        app.add_api_route(path, marked(_guarded(handler), access), include_in_schema=False, response_class=Response)
    app.openapi = lambda: _openapi(FastAPI.openapi(app), schemas)  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, _refuse)
    app.add_middleware(Gate, routes=app, keys=keys)
    if keys.origins:  # outside the gate: browsers ask without a key first
        app.add_middleware(
            CORSMiddleware, allow_origins=keys.origins, allow_methods=["GET", "POST"], allow_headers=["*"], max_age=600
        )
    return app


def _add_routes(app: FastAPI, service: Service, metrics: Metrics) -> dict[str, Any]:
    bodies: list[type] = []
    client = Access.CLIENT

    def route(
        path: str, handler: Handler, method: str, body: type | None = None, access: Access = Access.ADMIN
    ) -> None:
        guarded = _guarded(handler)
        guarded.__name__ = f"{method.lower()}_{path.strip('/').replace('/', '_')}"
        guarded.__doc__ = (handler if inspect.ismethod(handler) else type(handler).__call__).__doc__
        extra: dict[str, Any] | None = None
        if path in QUERIES:
            values = QUERIES[path].items()
            extra = {"parameters": [{"name": name, "in": "query", "schema": {"enum": [*one]}} for name, one in values]}
        if body is not None:
            bodies.append(body)
            schema = {"$ref": f"#/components/schemas/{body.__name__}"}
            extra = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
        app.add_api_route(path, marked(guarded, access), methods=[method], openapi_extra=extra, response_class=Response)

    route("/v1/completions", CompletionsEndpoint(service), "POST", CompletionRequest, client)
    route("/v1/chat/completions", ChatEndpoint(service), "POST", ChatRequest, client)
    route("/v1/responses", ResponsesEndpoint(service), "POST", ResponsesRequest, client)
    messages = MessagesEndpoint(service)
    route("/v1/messages", messages, "POST", MessagesRequest, client)
    route("/v1/messages/count_tokens", messages.count_tokens, "POST", CountTokensRequest, client)
    route("/v1/embeddings", EmbeddingsEndpoint(service), "POST", EmbeddingRequest, client)
    tokens = Tokens(service)
    route("/tokenize", tokens.tokenize, "POST", TokenizeRequest, client)
    route("/detokenize", tokens.detokenize, "POST", DetokenizeRequest, client)
    route("/tokenizer_info", tokens.info, "GET", access=client)
    control = Control(service)
    route("/sleep", control.sleep, "POST")
    route("/wake_up", control.wake_up, "POST")
    route("/is_sleeping", control.is_sleeping, "GET")
    route("/reset_prefix_cache", control.reset_prefix_cache, "POST")
    info = _Information(service, metrics)
    route("/v1/models", info.models, "GET", access=client)
    route("/v1/models/{model:path}", info.model, "GET", access=client)
    route("/health", info.health, "GET", access=Access.PUBLIC)
    for method in ("GET", "POST"):
        route("/ping", info.health, method, access=client)
    route("/version", info.version, "GET", access=client)
    route("/metrics", info.metrics, "GET", access=client)
    route("/memory", info.memory, "GET")
    for one in app.routes:
        if getattr(one, "path", None) == app.openapi_url:
            marked(one.endpoint, client)  # type: ignore[attr-defined]
    _, schemas = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    return schemas


def _openapi(document: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
    return document


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
    except (HttpError, PagerunnerError) as error:
        response = error_response(error, request.url.path)
        what = (request.method, short(one_line(request.url.path)), response.status_code, one_line(str(error)))
        logger.warning("%s %s is refused with status %d: %s", *what)
        return response
    except Exception as error:  # whatever it is, it must end this request only
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


class _Information:
    """The endpoints that run nothing."""

    def __init__(self, service: Service, metrics: Metrics) -> None:
        self._service = service
        self._metrics = metrics

    async def models(self, request: Request) -> Response:
        """The served names."""
        return json_response(ModelList(data=[self._card(name) for name in self._service.model_names]))

    async def model(self, request: Request) -> Response:
        """One served name."""
        name = request.path_params["model"]
        if name not in self._service.model_names:
            raise HttpError(404, f"The model {short(name)!r} is not served here.", "model")
        return json_response(self._card(name))

    async def health(self, request: Request) -> Response:
        """200 while the engine is alive and makes progress, else 503 with the reason."""
        try:
            self._service.engine.check_health()
        except EngineDeadError as error:
            return error_response(error)
        return Response()

    async def version(self, request: Request) -> Response:
        """The version of pagerunner."""
        return json_response({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        """Metrics in the Prometheus text format."""
        return Response(self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def memory(self, request: Request) -> Response:
        """The memory plan, and who holds which pages between two steps."""
        engine = self._service.engine
        return json_response({"plan": engine.memory_plan, "state": await engine.memory_state()})

    def _card(self, name: str) -> ModelCard:
        service = self._service
        return ModelCard(
            id=name, created=service.created, root=service.model_root, max_model_len=service.engine.max_model_len
        )
