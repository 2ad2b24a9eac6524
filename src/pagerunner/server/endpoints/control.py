"""The endpoints that act on the engine itself: sleep and wake, forgetting the prefix cache, new weights. Parameters and bodies are vLLM's."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pagerunner.errors import InvalidRequestError
from pagerunner.server.http import read_as, read_body
from pagerunner.server.service import Service, json_response
from pagerunner.types.weights import (
    NO_RPC,
    FinishUpdate,
    StartUpdate,
    WeightChange,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)

QUERIES: dict[str, dict[str, tuple[str, ...]]] = {
    "/sleep": {"level": ("0", "1", "2"), "mode": ("abort", "wait", "keep")},
    "/wake_up": {"tags": ("weights", "kv_cache")},
    "/pause": {
        "mode": ("abort", "wait", "keep"),
        "wait_for_inflight_requests": ("true", "false"),
        "clear_cache": ("true", "false"),
    },
    "/get_world_size": {"include_dp": ("true", "false")},
    "/reset_prefix_cache": {"reset_running_requests": ("false",), "reset_external": ("false",)},
}
"""The parameters of each path, and the values that they take."""
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class Control:
    """Handlers; the parameters come in the query string, and an unknown one is an error."""

    def __init__(self, service: Service) -> None:
        self._engine = service.engine

    async def sleep(self, request: Request) -> Response:
        """Free memory until /wake_up. `level` 1 keeps the weights on the host, 2 reads them again; `mode` says what
        becomes of unfinished requests: abort (the default), wait or keep."""
        _only(request, "level", "mode", "tags")
        if request.query_params.getlist("tags"):
            raise InvalidRequestError("sleep takes no tags: it frees everything. /wake_up takes them.", param="tags")
        level, mode = request.query_params.get("level", "1"), request.query_params.get("mode", "abort")
        for name, value in (("level", level), ("mode", mode)):
            _check("/sleep", name, value)
        await self._engine.sleep(int(level), mode)
        return Response()

    async def wake_up(self, request: Request) -> Response:
        """Take memory back. `tags`, repeatable: weights, kv_cache; all without."""
        _only(request, "tags")
        tags = [tag for given in request.query_params.getlist("tags") for tag in given.split(",")]
        for tag in tags:
            _check("/wake_up", "tags", tag)
        await self._engine.wake_up(tags or None)
        return Response()

    async def pause(self, request: Request) -> Response:
        """Stop generating until /resume, and keep all memory. `mode` says what becomes of unfinished requests: abort (the
        default), wait for them, or keep them where they are. `clear_cache` forgets cached prompts, unless mode is keep.
        Requests that come meanwhile wait for /resume, as many as the queue takes."""
        _only(request, *QUERIES["/pause"])
        query = request.query_params
        values = {name: query.get(name, allowed[0]).lower() for name, allowed in QUERIES["/pause"].items()}
        for name, value in values.items():
            _check("/pause", name, value)
        waits = "wait_for_inflight_requests" in query and values["wait_for_inflight_requests"] == "true"
        mode = "wait" if waits else values["mode"]  # its older name
        await self._engine.sleep(0, mode)
        if mode != "keep" and values["clear_cache"] == "true":
            await self._engine.reset_prefix_cache()
        return json_response({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        """Go on after /pause. An engine that sleeps is woken by /wake_up."""
        _only(request)
        if self._engine.sleep_level > 0:
            raise InvalidRequestError("The engine sleeps, which /resume doesn't end; use /wake_up.")
        await self._engine.wake_up()
        return json_response({"status": "resumed"})

    async def init_weight_transfer_engine(self, request: Request) -> Response:
        """Join a trainer's group, which has to come meanwhile. The trainer is rank 0."""
        return await self._changed(
            (await read_as(request, WeightTransferInitRequest)).init_info, "Weight transfer initialized"
        )

    async def start_weight_update(self, request: Request) -> Response:
        """Begin an update of the weights. Requests wait until its finish."""
        return await self._changed(await _empty(request, StartUpdate()), "Weight update started")

    async def update_weights(self, request: Request) -> Response:
        """Take tensors, which the trainer broadcasts meanwhile. If that fails, the engine stays paused until all weights are new or old."""
        return await self._changed((await read_as(request, WeightTransferUpdateRequest)).update_info, "Weights updated")

    async def finish_weight_update(self, request: Request) -> Response:
        """End the update. Cached prompts are forgotten, and requests go on."""
        return await self._changed(await _empty(request, FinishUpdate()), "Weight update finished")

    async def _changed(self, change: WeightChange, said: str) -> Response:
        await self._engine.change_weights(change)
        return json_response({"message": said})

    async def get_world_size(self, request: Request) -> Response:
        """How many processes the engine has in a trainer's group; with `include_dp` false, those of one of several engines or teams."""
        _only(request, "include_dp")
        _check("/get_world_size", "include_dp", included := request.query_params.get("include_dp", "true").lower())
        return json_response({"world_size": self._engine.world_size if included == "true" else self._engine.place_size})

    async def collective_rpc(self, request: Request) -> Response:
        """Refused: no code that is sent is run."""
        raise InvalidRequestError(NO_RPC)

    async def is_paused(self, request: Request) -> Response:
        """Whether the engine is paused, or sleeps."""
        _only(request)
        return json_response({"is_paused": await self._engine.is_sleeping()})

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


def _check(path: str, name: str, value: str) -> None:
    allowed = QUERIES[path][name]
    if value not in allowed:
        raise InvalidRequestError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.", param=name)


async def _empty(request: Request, change: WeightChange) -> WeightChange:
    if await read_body(request) not in (b"", b"{}"):
        raise InvalidRequestError(f"{request.url.path} takes no body.")
    return change


def _only(request: Request, *allowed: str) -> None:
    for name in request.query_params:
        if name not in allowed:
            known = f"there is {', '.join(allowed)}" if allowed else "it takes none"
            raise InvalidRequestError(f"{request.url.path} has no parameter {name!r}; {known}.", param=name)
