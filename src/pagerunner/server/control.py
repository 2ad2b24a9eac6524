"""The endpoints that act on the engine itself: sleep and wake, and forgetting the prefix cache. Parameters are vLLM's."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pagerunner.errors import InvalidRequestError
from pagerunner.server.service import Service, json_response

CONTROL_PATHS = frozenset(("/sleep", "/wake_up", "/reset_prefix_cache"))
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_TAGS = ("weights", "kv_cache")


class Control:
    """Handlers; the parameters come in the query string, and an unknown one is an error."""

    def __init__(self, service: Service) -> None:
        self._engine = service.engine

    async def sleep(self, request: Request) -> Response:
        """Free memory until /wake_up. `level` 1 keeps the weights on the host, 2 reads them again; `mode` says what
        becomes of unfinished requests: abort (the default), wait or keep."""
        _only(request, "level", "mode", "tags")
        level = request.query_params.get("level", "1")
        if level not in ("0", "1", "2"):
            raise InvalidRequestError(f"level must be 0, 1 or 2, got {level!r}.", param="level")
        if request.query_params.getlist("tags"):
            raise InvalidRequestError("sleep takes no tags: it frees everything. /wake_up takes them.", param="tags")
        mode = request.query_params.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            raise InvalidRequestError(f"mode must be abort, wait or keep, got {mode!r}.", param="mode")
        await self._engine.sleep(int(level), mode)
        return Response()

    async def wake_up(self, request: Request) -> Response:
        """Take memory back. `tags`, repeatable: weights, kv_cache; all without."""
        _only(request, "tags")
        tags = [tag for given in request.query_params.getlist("tags") for tag in given.split(",")]
        if unknown := [tag for tag in tags if tag not in _TAGS]:
            raise InvalidRequestError(f"tags must be of {', '.join(_TAGS)}, got {unknown[0]!r}.", param="tags")
        await self._engine.wake_up(tags or None)
        return Response()

    async def is_sleeping(self, request: Request) -> Response:
        """Whether the engine is parked."""
        _only(request)
        return json_response({"is_sleeping": await self._engine.is_sleeping()})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget all cached prompt pages. `success` is false where running requests hold some; they can't be hit any
        more either."""
        _only(request, "reset_running_requests", "reset_external")
        for name, why in (
            ("reset_running_requests", "running requests keep their pages; end them, or use /sleep with mode=keep"),
            ("reset_external", "there is no cache outside this engine"),
        ):
            value = request.query_params.get(name, "false").lower()
            if value not in _BOOLEANS:
                raise InvalidRequestError(f"{name} must be true or false, got {value!r}.", param=name)
            if _BOOLEANS[value]:
                raise InvalidRequestError(f"{name}=true is not supported: {why}.", param=name)
        return json_response({"success": await self._engine.reset_prefix_cache()})


def _only(request: Request, *allowed: str) -> None:
    for name in request.query_params:
        if name not in allowed:
            known = f"there is {', '.join(allowed)}" if allowed else "it takes none"
            raise InvalidRequestError(f"{request.url.path} has no parameter {name!r}; {known}.", param=name)
