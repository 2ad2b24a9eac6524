"""Who may ask what: every HTTP request passes here before a route sees it."""

from __future__ import annotations

import enum
import hmac
import ipaddress
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from pagerunner import limits
from pagerunner.engine.frontend.source import SOURCE
from pagerunner.errors import ConfigError
from pagerunner.server.errors import HttpError, error_response, short

_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\-\[\]:]+")


ROUTE = "pagerunner.route"
"""Where a scope has its route's path, once the gate has looked."""


class Access(enum.Enum):
    """Who may call a route. A route that isn't marked with `marked` is ADMIN."""

    PUBLIC = "public"
    CLIENT = "client"
    ADMIN = "admin"


def marked(endpoint: Callable[..., Any], access: Access) -> Callable[..., Any]:
    """Mark a route's endpoint; returns it."""
    endpoint.access = access  # type: ignore[attr-defined]
    return endpoint


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """How the server is guarded.

    `api` keys open what clients call, `admin` keys that and the control routes. `origins` are the web pages that may call the
    server from a browser, besides its own. `loopback`: only this machine can reach it.

    Raises:
        ConfigError: an origin isn't a scheme and a host, or a key is empty.
    """

    api: tuple[str, ...] = ()
    admin: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    loopback: bool = True

    def __post_init__(self) -> None:
        for origin in self.origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--allowed-origin must be a scheme and a host such as https://chat.example.com, got {origin!r}; "
                    "every page that may call the server is named."
                )
        if "" in (*self.api, *self.admin):
            raise ConfigError("An empty key guards nothing; give --api-key and --admin-key a text.")


class Gate:
    """Refuses a request with too large headers, from a foreign web page, or without its route's key. Keys are compared in
    constant time.
    """

    def __init__(self, app: ASGIApp, routes: Starlette, keys: Keys) -> None:
        self._app = app
        self._routes = routes
        self._keys = keys
        self._api = [key.encode("utf-8") for key in (*keys.api, *keys.admin)]
        self._admin = [key.encode("utf-8") for key in keys.admin]
        self._open = not self._api  # the server has no keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is None:
            SOURCE.set(self._source(scope))
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await error_response(refusal, scope["path"])(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _refusal(self, scope: Scope) -> HttpError | None:
        headers = scope["headers"]
        if len(headers) > limits.MAX_HEADERS:
            most, knob = limits.MAX_HEADERS, limits.knob("MAX_HEADERS")
            return HttpError(431, f"The request has {len(headers)} headers; at most {most} are allowed {knob}.")
        size = sum(len(name) + len(value) + 4 for name, value in headers) + len(scope.get("raw_path") or b"")
        size += len(scope["query_string"])
        if size > limits.MAX_HEADER_BYTES:
            most, knob = limits.MAX_HEADER_BYTES, limits.knob("MAX_HEADER_BYTES")
            return HttpError(431, f"The request's headers have {size} bytes; at most {most} are allowed {knob}.")
        route = route_of(self._routes, scope)
        if route is not None:
            scope[ROUTE] = getattr(route, "path", "none")
        access = access_of(route)
        if access is Access.PUBLIC:
            return None
        return self._from_foreign_page(headers) or self._without_key(headers, access)

    def _source(self, scope: Scope) -> str:
        """The client's address and key. Behind a proxy all clients have one address, so the key tells them apart."""
        address = (scope.get("client") or ("",))[0]
        return address if self._open else f"{address}/{hash(_bearer(scope['headers']))}"

    def _from_foreign_page(self, headers: Sequence[tuple[bytes, bytes]]) -> HttpError | None:
        """A browser sends simple requests anywhere without asking, and a page's host name may be made to mean this machine."""
        origin = _header(headers, b"origin").decode("latin-1")
        host = _header(headers, b"host").decode("latin-1")
        if origin and origin not in self._keys.origins and origin.partition("://")[2] != host:
            return HttpError(
                403, f"The page {short(origin)!r} may not call this server (--allowed-origin names those that may)."
            )
        if self._open and self._keys.loopback and not _is_local_name(host):
            return HttpError(
                403,
                f"This server has no keys and answers to the names of this machine only, not to {short(host)!r} (--api-key).",
            )
        return None

    def _without_key(self, headers: Sequence[tuple[bytes, bytes]], access: Access) -> HttpError | None:
        admin = access is Access.ADMIN
        if self._open and (not admin or self._keys.loopback):
            return None
        if not admin and not self._keys.api:
            return None
        key = _bearer(headers)
        if admin and not self._admin and (self._open or _is_one(key, self._api)):
            return HttpError(403, "This is a control endpoint, and the server was started without --admin-key.")
        if _is_one(key, self._admin if admin else self._api):
            return None
        which = "the admin key" if admin and self._admin else "a valid API key"
        return HttpError(
            401, f"This endpoint asks for {which}: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
        )


def route_of(app: Starlette, scope: Scope) -> BaseRoute | None:
    """The route that this request is for, whatever its method; None when there is none (it will be a 404)."""
    return next((route for route in app.routes if route.matches(scope)[0] is not Match.NONE), None)


def access_of(route: BaseRoute | None) -> Access:
    """The mark of a route; CLIENT when there is none."""
    if route is None:
        return Access.CLIENT
    found: Access = getattr(getattr(route, "endpoint", None), "access", Access.ADMIN)
    return found


def _header(headers: Sequence[tuple[bytes, bytes]], wanted: bytes) -> bytes:
    return next((value for name, value in headers if name == wanted), b"")


def _bearer(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The key that a request brings. Empty if it brings none; no server's key is empty."""
    scheme, _, key = _header(headers, b"authorization").partition(b" ")
    return key if scheme.lower() == b"bearer" else _header(headers, b"x-api-key")  # Anthropic's clients send x-api-key


def _is_one(key: bytes, expected: Sequence[bytes]) -> bool:
    matches = [hmac.compare_digest(key.strip(), one) for one in expected]
    return any(matches)


def _is_local_name(host: str) -> bool:
    """Whether a Host header is safe: it can't be a foreign name whose DNS entry points to this machine."""
    name = host.rpartition(":")[0] if re.search(r":\d*$", host) else host
    name = name.strip("[]").lower().rstrip(".")
    if name in ("", "localhost") or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
