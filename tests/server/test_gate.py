"""Keys, foreign pages and header sizes: the gate before every route."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import Route

from helpers.patience import LONG
from helpers.serving import RunningServer, running_server
from pagerunner import limits
from pagerunner.config import EngineArgs
from pagerunner.errors import ConfigError
from pagerunner.server.app import create_app
from pagerunner.server.gate import Access, Gate, Keys, access_of, marked, route_of
from pagerunner.server.metrics import Metrics
from pagerunner.server.page_routes import FILE_PATHS
from pagerunner.server.service import Service

BOTH = Keys(api=("client",), admin=("root",))
CONTROL = {"/memory", "/ui/live", "/sleep", "/wake_up", "/is_sleeping", "/reset_prefix_cache"}


PUBLIC = ("/health", "/ping", "/", "/docs", "/redoc", "/openapi.json")


class NoEngine:
    """Healthy, and nothing else: what gets as far as asking it for more is answered with 500."""

    lost: dict[int, str] = {}

    def check_health(self) -> None:
        pass


def application(keys: Keys) -> FastAPI:
    service = Service(NoEngine(), ["tiny"], "tiny")  # type: ignore[arg-type]
    return create_app(service, Metrics("tiny"), NoEngine(), keys)  # type: ignore[arg-type]


def status(app: Any, path: str, method: str = "GET", **headers: str) -> int:
    async def call() -> int:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            response = await client.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
        return response.status_code

    return asyncio.run(call())


@pytest.mark.parametrize("form", ["Authorization", "x-api-key"])
def test_clients_of_one_proxy_are_told_apart_by_their_keys(form: str) -> None:
    gate = Gate(None, None, Keys(api=("a", "b")))  # type: ignore[arg-type]
    names = [form.lower().encode(), b"host"]

    def source(key: str) -> str:
        value = f"Bearer {key}" if form == "Authorization" else key
        return gate._source({"client": ("10.0.0.1", 5), "headers": [*zip(names, [value.encode(), b"h"], strict=True)]})

    assert source("a") == source("a") != source("b")


def routes(app: FastAPI) -> list[tuple[str, str]]:
    """Every method and path that is served, with path parameters filled."""
    found = []
    for route in app.routes:
        path = re.sub(r"\{[^}]*\}", "x", route.path)  # type: ignore[attr-defined]
        found += [(method, path) for method in getattr(route, "methods", None) or ["GET"]]
    return found


def test_every_route_but_health_asks_for_a_key_and_control_routes_for_the_admin_key() -> None:
    app = application(BOTH)
    walked = routes(app)
    assert len(walked) > 9
    for method, path in walked:
        access = access_of(
            route_of(app, {"type": "http", "path": path, "method": method, "root_path": "", "headers": []})
        )
        assert (access is Access.PUBLIC) == (path in PUBLIC or path in FILE_PATHS), path
        if path in CONTROL:
            assert access is Access.ADMIN
        if access is Access.PUBLIC:
            continue
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic root"},
            {"Authorization": "root"},
        ):
            assert status(app, path, method, **headers) == 401, (path, headers)
        as_client = status(app, path, method, Authorization="Bearer client")
        assert (as_client == 401) == (access is Access.ADMIN), path
        assert status(app, path, method, Authorization="Bearer root") != 401, path
        assert status(app, path, "DELETE") == 401, path


def test_a_route_that_nobody_marked_is_a_control_route() -> None:
    async def endpoint(request: Any) -> None:
        raise NotImplementedError

    app = FastAPI(routes=[Route("/new", endpoint), Route("/open", marked(lambda request: None, Access.PUBLIC))])
    scope = {"type": "http", "method": "GET", "root_path": "", "headers": []}
    assert access_of(route_of(app, {**scope, "path": "/new"})) is Access.ADMIN
    assert access_of(route_of(app, {**scope, "path": "/open"})) is Access.PUBLIC
    assert access_of(route_of(app, {**scope, "path": "/nothing"})) is Access.CLIENT


@pytest.mark.parametrize(
    ("keys", "path", "key", "expected"),
    [
        (Keys(), "/memory", None, 500),  # this machine's own: through to the (absent) engine
        (Keys(loopback=False), "/memory", None, 403),
        (Keys(loopback=False), "/version", None, 200),
        (Keys(api=("client",)), "/memory", "client", 403),
        (Keys(api=("client",)), "/memory", "wrong", 401),
        (Keys(api=("client",)), "/memory", None, 401),
        (Keys(admin=("root",)), "/version", None, 200),
        (Keys(admin=("root",)), "/memory", None, 401),
        (Keys(admin=("root",)), "/memory", "root", 500),
        (BOTH, "/memory", "client", 401),
        (BOTH, "/memory", "root", 500),
        (BOTH, "/version", "root", 200),
    ],
)
def test_which_key_opens_what(keys: Keys, path: str, key: str | None, expected: int) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    assert status(application(keys), path, **headers) == expected


def test_only_pages_that_were_named_may_call() -> None:
    origin = "https://chat.example.com"
    closed, opened = application(Keys()), application(Keys(origins=(origin,)))
    assert status(closed, "/version", Origin=origin) == 403
    assert status(closed, "/version", Origin="null") == 403
    assert status(closed, "/health", Origin=origin) == 200
    assert status(closed, "/version", Origin="http://127.0.0.1") == 200  # the server's own page
    assert status(opened, "/version", Origin=origin) == 200
    assert status(opened, "/version", Origin="https://evil.example.com") == 403
    asked = {"Origin": origin, "Access_Control_Request_Method": "POST"}
    assert status(application(Keys(api=("k",), origins=(origin,))), "/v1/completions", "OPTIONS", **asked) == 200
    assert status(closed, "/v1/completions", "OPTIONS", **asked) == 403


@pytest.mark.parametrize("host", ["evil.example.com:8000", "127.0.0.1.evil.com", "localhost.evil.com"])
def test_a_server_without_keys_answers_to_this_machines_names_only(host: str) -> None:
    assert status(application(Keys()), "/version", Host=host) == 403
    assert status(application(Keys(api=("k",))), "/version", Host=host, Authorization="Bearer k") == 200
    for local in ("localhost:8000", "[::1]:8000", "127.0.0.1", "10.0.0.2:80", "my.localhost"):
        assert status(application(Keys()), "/version", Host=local) == 200


@pytest.mark.parametrize("bad", ["*", "null", "example.com", "https://a.com/path", "ftp://a.com"])
def test_origins_that_name_no_page_are_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-origin"):
        Keys(origins=(bad,))
    with pytest.raises(ConfigError, match="empty key"):
        Keys(api=("",))


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr("hmac.compare_digest", lambda given, key: compared.append((given, key)) or given == key)
    app = application(Keys(api=("one", "two", "three")))
    assert status(app, "/version", Authorization="Bearer one") == 200
    assert compared == [(b"one", b"one"), (b"one", b"two"), (b"one", b"three")]


@pytest.fixture(scope="module")
def admin_server(text_side: Path) -> Iterator[RunningServer]:
    with running_server(EngineArgs(model=str(text_side)), api_keys=["client"], admin_keys=["root"]) as server:
        yield server


def test_the_memory_endpoint_takes_the_admin_key_only(admin_server: RunningServer) -> None:
    assert admin_server.get("/memory", headers={"Authorization": "Bearer client"}).status_code == 401
    assert admin_server.get("/memory", headers={"Authorization": "Bearer root"}).status_code == 200


def test_a_thousand_headers_and_long_ones_are_refused(server: RunningServer) -> None:
    many = server.get("/version", headers={f"x-{number}": "a" for number in range(1000)})
    assert many.status_code == 431
    assert re.search(r"has 100\d headers; at most 128 .*PAGERUNNER_LIMIT_MAX_HEADERS", many.json()["error"]["message"])
    for size in (limits.MAX_HEADER_BYTES, 2_000_000):
        large = server.get("/version", headers={"x": "a" * size})
        assert large.status_code == 431, size
        assert "PAGERUNNER_LIMIT_MAX_HEADER_BYTES" in large.json()["error"]["message"]
    for more in (b"", b"x" * 70_000):  # what follows a head that can't be read isn't part of it
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=LONG) as client:
            with contextlib.suppress(OSError):  # it closes before all is sent
                client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n" + more)
            assert client.recv(100).startswith(b"HTTP/1.1 400 ")
    assert server.get("/version").status_code == 200
