"""The FastAPI application: routes, authentication, and one place where exceptions become answers."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from pagerunner import __version__
from pagerunner.errors import EngineDeadError, PagerunnerError
from pagerunner.server.chat import ChatEndpoint
from pagerunner.server.completions import CompletionsEndpoint
from pagerunner.server.errors import HttpError, error_response
from pagerunner.server.http import ClientGoneError
from pagerunner.server.live import LiveFeed
from pagerunner.server.metrics import CONTENT_TYPE, Metrics
from pagerunner.server.page_routes import FILE_PATHS, page_routes
from pagerunner.server.protocol import ChatRequest, CompletionRequest, ModelCard, ModelList
from pagerunner.server.service import Service, json_response

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]
PUBLIC_PATHS = frozenset(("/health",)) | FILE_PATHS
"""What an API key does not guard. Everything else is guarded, whatever routes come later."""
_CLIENT_CLOSED_REQUEST = 499


class ApiKeyGuard:
    """Refuses HTTP requests without `Authorization: Bearer KEY`, in constant time, on all but PUBLIC_PATHS."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode("utf-8") for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "lifespan" or scope["path"] in PUBLIC_PATHS or self._authorized(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            refusal = HttpError(401, "A valid API key is needed: send it as 'Authorization: Bearer KEY'.")
            await error_response(refusal)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _authorized(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        matches = [hmac.compare_digest(key.strip(), expected) for expected in self._keys]
        return any(matches) and scheme.lower() == b"bearer"


def create_app(service: Service, metrics: Metrics, feed: LiveFeed, api_keys: Sequence[str] = ()) -> FastAPI:
    """The application. With `api_keys` every path but /health and the page's files asks for one of them."""
    app = FastAPI(title="pagerunner", version=__version__, docs_url=None, redoc_url=None)
    schemas = _add_routes(app, service, metrics)
    for path, handler in page_routes(feed).items():
        app.add_api_route(path, _guarded(handler), include_in_schema=False, response_class=Response)
    app.openapi = lambda: _openapi(FastAPI.openapi(app), schemas)  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, _refuse)
    if api_keys:
        app.add_middleware(ApiKeyGuard, api_keys=api_keys)
    return app


def _add_routes(app: FastAPI, service: Service, metrics: Metrics) -> dict[str, Any]:
    def route(path: str, handler: Handler, method: str, body: type | None = None) -> None:
        guarded = _guarded(handler)
        guarded.__name__ = f"{method.lower()}_{path.strip('/').replace('/', '_')}"
        guarded.__doc__ = (type(handler).__call__ if body else handler).__doc__
        extra = None
        if body is not None:
            schema = {"$ref": f"#/components/schemas/{body.__name__}"}
            extra = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
        app.add_api_route(path, guarded, methods=[method], openapi_extra=extra, response_class=Response)

    route("/v1/completions", CompletionsEndpoint(service), "POST", CompletionRequest)
    route("/v1/chat/completions", ChatEndpoint(service), "POST", ChatRequest)
    info = _Information(service, metrics)
    route("/v1/models", info.models, "GET")
    route("/v1/models/{model:path}", info.model, "GET")
    route("/health", info.health, "GET")
    for method in ("GET", "POST"):
        route("/ping", info.health, method)
    route("/version", info.version, "GET")
    route("/metrics", info.metrics, "GET")
    route("/memory", info.memory, "GET")
    _, schemas = msgspec.json.schema_components(
        (CompletionRequest, ChatRequest), ref_template="#/components/schemas/{name}"
    )
    return schemas


def _openapi(document: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
    return document


def _guarded(handler: Handler) -> Handler:
    async def guarded(request: Request) -> Response:
        return await _answer(handler, request)

    return guarded


async def _answer(handler: Handler, request: Request) -> Response:
    try:
        return await handler(request)
    except ClientGoneError:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    except (HttpError, PagerunnerError) as error:
        return error_response(error)
    except Exception as error:  # whatever it is, it must end this request only
        logger.exception("%s %s failed.", request.method, request.url.path)
        return error_response(HttpError(500, f"The server failed to answer: {type(error).__name__}."))


async def _refuse(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    message = f"{request.method} {request.url.path}: {error.detail}."
    response = error_response(HttpError(error.status_code, message))
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
            raise HttpError(404, f"The model {name!r} is not served here.", "model")
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
