"""The control endpoints that the page's buttons call, for servers that have none of their own."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagerunner.server import app as server_app
from pagerunner.server import launch


def add_missing(patch: Any) -> None:
    """Make servers answer /sleep, /wake_up and /reset_prefix_cache, if they don't."""
    create = launch.create_app

    def with_controls(service: Any, *args: Any, **options: Any) -> Any:
        made = create(service, *args, **options)
        if any(getattr(route, "path", "") == "/sleep" for route in made.routes):
            return made

        async def sleep(request: Request) -> Response:
            await service.engine.sleep(int(request.query_params.get("level", "1")))
            return Response()

        async def wake_up(request: Request) -> Response:
            await service.engine.wake_up()
            return Response()

        async def reset(request: Request) -> Response:
            return JSONResponse({"success": await service.engine.reset_prefix_cache()})

        for path, handler in (("/sleep", sleep), ("/wake_up", wake_up), ("/reset_prefix_cache", reset)):
            made.add_api_route(path, server_app._guarded(handler), methods=["POST"], response_class=Response)
        return made

    patch.setattr(launch, "create_app", with_controls)
