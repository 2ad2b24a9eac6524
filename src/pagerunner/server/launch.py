"""Start the server, and take it down in good order."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypedDict, Unpack

import msgspec
import uvicorn

from pagerunner import limits
from pagerunner.config import EngineArgs
from pagerunner.engine.core.client import DEFAULT_FACTORY, STALL_SECONDS, LoadedCore
from pagerunner.engine.core.garbage import set_apart
from pagerunner.engine.frontend.async_engine import AsyncEngine
from pagerunner.engine.frontend.replicas import Replica
from pagerunner.errors import ConfigError, EngineDeadError, InvalidRequestError
from pagerunner.server.app import create_app
from pagerunner.server.chat.options import ChatOptions
from pagerunner.server.connection import Connection, on_loop_error
from pagerunner.server.errors import HttpError
from pagerunner.server.gate import Keys
from pagerunner.server.http_logs import HttpLogs
from pagerunner.server.listening import (
    DRAIN_SECONDS,
    LAST_WORDS_SECONDS,
    Server,
    StopSignals,
    allow_many_connections,
    bind,
    bind_error,
    claim,
    is_loopback,
    uvicorn_config,
)
from pagerunner.server.live import LiveFeed
from pagerunner.server.metrics import SHARED_DIRECTORY, Metrics, Registered
from pagerunner.server.service import Service
from pagerunner.server.standard_metrics import NO_PROCESS, add_process_metrics
from pagerunner.server.stats_log import logged_stats
from pagerunner.server.tracing import TraceHeaders, sent_spans
from pagerunner.types.lora import LoRARequest

logger = logging.getLogger(__name__)

_START_CHECK_SECONDS = 0.005
_PARKED_CHECK_SECONDS = 0.1
_MODULE_SECONDS = 0.05
DEATH_SECONDS = 3.0
"""How long a server whose core has died answers 503, with the reason, before it ends."""


class ServerOptions(TypedDict, total=False):
    """What a server takes beside its engine's arguments and its address. The defaults are those of `serve`."""

    api_keys: Sequence[str]
    admin_keys: Sequence[str]
    allowed_origins: Sequence[str]
    served_model_name: str | Sequence[str] | None
    drain_seconds: float
    stall_seconds: float
    logs: HttpLogs | None
    docs: bool
    otlp_traces_endpoint: str | None
    core_factory: str
    chat: ChatOptions | None
    lora_modules: Sequence[LoRARequest]


def run_server(
    args: EngineArgs,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_server_count: int = 1,
    **options: Unpack[ServerOptions],
) -> int:
    """Load the model and serve it until SIGINT or SIGTERM; returns the exit status: 0, or 1 when the engine core has died.

    With `api_keys` every route that isn't public asks for one of these keys. With `admin_keys` the control endpoints ask
    for one of those. See gate.Keys. Only loopback is served unless `host` says otherwise. `chat` says how the model writes
    tool calls and reasoning.

    With `api_server_count` so many processes serve the port, see server/api_processes.py.

    The first signal stops accepting, and running requests may finish for `drain_seconds`. Then they end with an error. While
    the engine is paused or sleeps they end with an error at once. A second signal ends running requests at once, and clients
    have 10 seconds to read what there is. A third signal ends that wait.

    When the core dies, every request and /health are answered 503 for a moment. Then the server ends, so that a service manager
    can start it again.

    Raises:
        ConfigError, CheckpointError, CapacityError: before anything is served. A port in use is found before the
            model loads.
    """
    if not 1 <= api_server_count <= limits.MAX_API_SERVERS:
        raise ConfigError(
            f"api_server_count must be in [1, {limits.MAX_API_SERVERS}], got {api_server_count} {limits.knob('MAX_API_SERVERS')}."
        )
    check_modules(args, options)
    allow_many_connections()
    listener = bind(host, port)
    try:
        claimed = claim(listener)
    except ConfigError:
        listener.close()
        raise
    if api_server_count > 1:  # the port was free; now others may take it too
        host, port = listener.getsockname()[:2]
        listener.close()
        listener = bind(host, port, shared=True)
    if not options.get("api_keys") and not is_loopback(listener):
        logger.warning("The server listens on %s without an API key: whoever reaches it may use it.", host)
    try:
        if api_server_count > 1:
            from pagerunner.server.api_processes import supervise

            return asyncio.run(supervise(args, listener, host, api_server_count, options))
        return asyncio.run(serve(args, listener, **options))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise bind_error(host, port, error) from error  # another program has begun to listen while the model was loaded
    finally:
        listener.close()
        claimed.close()


def check_modules(args: EngineArgs, options: ServerOptions) -> None:
    """Raise ConfigError for adapters to be loaded at the start that can't be."""
    modules = [one.lora_name for one in options.get("lora_modules", ())]
    if modules and not args.enable_lora:
        raise ConfigError("--lora-modules names adapters, which an engine serves with --enable-lora; add it.")
    given = options.get("served_model_name") or args.served_model_name or args.model
    taken = [given] if isinstance(given, str) else list(given)
    for place, name in enumerate(modules):
        if name in (*taken, *modules[:place]):
            raise ConfigError(
                f"--lora-modules: the name {name!r} is there twice; each adapter needs a name of its own."
            )


async def load_modules(engine: AsyncEngine, modules: Sequence[LoRARequest]) -> None:
    """Load adapters unless another process of the server does. Raises ConfigError."""
    for module in modules:
        while engine.adapters.get(module.lora_name) is None:
            try:
                number = engine.adapters.number(module.lora_name)
                await engine.adapters.load(msgspec.structs.replace(module, lora_int_id=number))
            except InvalidRequestError:  # another process loads it, or just has
                await asyncio.sleep(_MODULE_SECONDS)


async def serve(
    args: EngineArgs,
    listener: socket.socket,
    *,
    api_keys: Sequence[str] = (),
    admin_keys: Sequence[str] = (),
    allowed_origins: Sequence[str] = (),
    served_model_name: str | Sequence[str] | None = None,
    drain_seconds: float = DRAIN_SECONDS,
    logs: HttpLogs | None = None,
    docs: bool = True,
    otlp_traces_endpoint: str | None = None,
    core_factory: str = DEFAULT_FACTORY,
    chat: ChatOptions | None = None,
    lora_modules: Sequence[LoRARequest] = (),
    stall_seconds: float = STALL_SECONDS,
    death_seconds: float = DEATH_SECONDS,
    cores: Sequence[LoadedCore] | None = None,
    on_ready: Callable[[AsyncEngine, StopSignals], None] | None = None,
) -> int:
    """What `run_server` runs: load, serve on `listener`, drain. `on_ready` is told when requests are taken. `cores` are those of the server
    of which this process is one of several."""
    given = served_model_name or args.served_model_name or args.model
    names = [given] if isinstance(given, str) else list(given)
    keys = Keys(
        api=tuple(api_keys), admin=tuple(admin_keys), origins=tuple(allowed_origins), loopback=is_loopback(listener)
    )
    with sent_spans(otlp_traces_endpoint) as spans, StopSignals().installed() as stop:
        directory = None if cores is None else os.environ[SHARED_DIRECTORY]
        metrics = Metrics(names[0], spans, shared=Registered(names[0], directory))
        loading = asyncio.create_task(
            AsyncEngine.from_args(
                args, observer=metrics, core_factory=core_factory, stall_seconds=stall_seconds, cores=cores
            )
        )
        if not await stop.loaded(loading):
            return 0
        engine = loading.result()
        try:
            await load_modules(engine, lora_modules)
            engines = [metrics.of_engine(index) for index in range(len(engine.places))]
            for own, (replica, _) in zip(engines, engine.places, strict=True):
                describe_cache(own, args, replica.memory_plan, engine.max_model_len)
                if args.kv_cache_metrics_sample:
                    own.show_residency()
                own.describe_start(replica.client.ready.startup)
            add_process_metrics(
                metrics.registry, [partial(_live_pid, one) for one in engine.replicas], alone=cores is None
            )
            ranks, sleeps = args.num_ranks // args.teams, args.enable_sleep_mode
            feeds = [
                LiveFeed(engine, own.latencies, stop.asked, can_sleep=sleeps, number=own.engine, ranks=ranks)
                for own in engines
            ]
            app = create_app(Service(engine, names, args.model, chat), metrics, feeds, keys, docs=docs)
            server = Server(uvicorn_config(app if spans is None else TraceHeaders(app), logs or HttpLogs()))
            if on_ready is not None:
                on_ready(engine, stop)
            with set_apart():
                async with logged_stats(engines[:: args.teams], quiet=args.disable_log_stats):
                    dying = asyncio.create_task(_outlive(engine, death_seconds), name="pagerunner-last-answers")
                    try:
                        await _run(server, listener, engine, stop, drain_seconds, dying, announce=on_ready is None)
                    finally:
                        dying.cancel()  # before the engine is shut down
            return int(dying.done() and not stop.asked.is_set())
        finally:
            await engine.shutdown()


def _live_pid(engine: Replica) -> int:
    return engine.client.pid if engine.client.death is None else NO_PROCESS  # the number may be another process's later


async def _outlive(engine: AsyncEngine, seconds: float) -> None:
    """Return `seconds` after the last engine core has died. In that time every client is told."""
    await engine.dead.wait()
    logger.error("The server ends in %g seconds, with exit status 1: its engine core is dead.", seconds)
    await asyncio.sleep(seconds)


def describe_cache(metrics: Metrics, args: EngineArgs, plan: Mapping[str, Any], max_model_len: int) -> None:
    """Publish how an engine's KV cache was configured, and the size that it got."""
    metrics.describe_cache(
        block_size=args.block_size,
        cache_dtype=args.kv_cache_dtype,
        enable_prefix_caching=args.enable_prefix_caching,
        gpu_memory_utilization=args.gpu_memory_utilization,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        num_gpu_blocks_override=args.num_gpu_blocks_override,
        num_gpu_blocks=plan["num_gpu_blocks"],
        max_model_len=max_model_len,
    )


def _give_up_bodies(server: uvicorn.Server) -> None:
    """End the requests that the engine knows nothing of yet, because their bodies have not come whole."""
    error = HttpError(503, "The server is shutting down, and the request's body is not complete.")
    for connection in list(server.server_state.connections):
        assert isinstance(connection, Connection)
        connection.give_up(error)


async def _parked_with_work(engine: AsyncEngine) -> None:
    """Return once the engine is paused or asleep and has unfinished requests: they can't end then."""
    try:
        while not (await engine.is_sleeping() and engine.num_unfinished):
            await asyncio.sleep(_PARKED_CHECK_SECONDS)
    except EngineDeadError:  # all requests have ended, and clients read why
        await asyncio.Event().wait()


async def _run(
    server: uvicorn.Server,
    listener: socket.socket,
    engine: AsyncEngine,
    stop: StopSignals,
    drain_seconds: float,
    dying: asyncio.Task[None],
    *,
    announce: bool,
) -> None:
    """Serve until a signal asks the server to stop, or `dying` is done."""
    host, port = listener.getsockname()[:2]
    asyncio.get_running_loop().set_exception_handler(on_loop_error)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not (server.started or serving.done()):
        await asyncio.sleep(_START_CHECK_SECONDS)  # who reads the line may connect at once
    if announce and server.started:
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        print(f"pagerunner serves at {url}\nIts page is {url}/ui, and its API is described at {url}/docs", flush=True)
    await stop.wait(stop.asked, serving, dying)
    if not serving.done():
        logger.info("Stopping: %d sequences are unfinished.", engine.num_unfinished)
        server.should_exit = True
        if dying.done():  # no request can be answered
            _give_up_bodies(server)
        parked = asyncio.create_task(_parked_with_work(engine))
        await stop.wait(stop.insisted, serving, parked, timeout=drain_seconds)
        late = None
        if not stop.insisted.is_set():
            why = f"has not ended within {drain_seconds:g} seconds (--shutdown-timeout)"
            if parked.done():
                why = "can't end, because the engine is paused or sleeps"
            late = EngineDeadError(f"The server is shutting down, and the request {why}.")
        parked.cancel()
    if not serving.done():
        logger.warning("Ending %d unfinished sequences.", engine.num_unfinished)
        engine.stop(late)
        _give_up_bodies(server)
        await stop.wait(stop.forced, serving, timeout=LAST_WORDS_SECONDS)  # clients still read their answers
        server.force_exit = True
    await serving
