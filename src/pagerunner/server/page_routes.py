"""GET /ui: the page, whose files lie in page/, and /ui/live, what it shows.

The files hold no data of the engine, so they need no key. The user types a key into the page, and the page sends it with
its calls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from pagerunner.server.http import EventStream
from pagerunner.server.live import LiveFeed
from pagerunner.server.service import Service

Handler = Callable[[Request], Awaitable[Response]]

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FILES = {
    "/ui" if path.name == "index.html" else f"/ui/{path.name}": path
    for path in sorted((Path(__file__).parent / "page").iterdir())
}
FILE_PATHS = frozenset(_FILES)
"""The paths of the page's own files."""

_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_routes(service: Service, feeds: Sequence[LiveFeed]) -> dict[str, Handler]:
    """The handler of each path."""

    async def live(request: Request) -> Response:
        """The engine's state, five times a second, as server-sent events. `engine` is the number of one of several."""
        events = feeds[service.engine_number(request)].view()
        return EventStream(events, events.aclose)

    return {"/ui/live": live} | {path: _file(file) for path, file in _FILES.items()}


def _file(path: Path) -> Handler:
    content = path.read_bytes()
    media_type = _TYPES[path.suffix]

    async def handler(request: Request) -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return handler
