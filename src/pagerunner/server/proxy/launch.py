"""Start the proxy, and take it down in good order."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from pagerunner.server import listening
from pagerunner.server.connection import on_loop_error
from pagerunner.server.http_logs import HttpLogs
from pagerunner.server.proxy.app import Proxy, create_app
from pagerunner.server.proxy.connection import CutConnection
from pagerunner.server.proxy.metrics import ProxyMetrics
from pagerunner.server.proxy.options import ProxyOptions

logger = logging.getLogger(__name__)


def run_proxy(
    options: ProxyOptions, *, host: str = "127.0.0.1", port: int = 30_000, logs: HttpLogs | None = None
) -> int:
    """Pass requests on until SIGINT or SIGTERM; returns the exit status.

    The first signal stops accepting, and running requests may finish for `options.shutdown_timeout` seconds. A second signal ends them.

    Raises ConfigError for a port that can't be had.
    """
    listening.allow_many_connections()
    listener = listening.bind(host, port)
    if not listening.is_loopback(listener):
        logger.warning(
            "The proxy listens on %s: whoever reaches it may use the servers, unless they ask for keys.", host
        )
    try:
        return asyncio.run(serve_proxy(options, listener, logs or HttpLogs()))
    finally:
        listener.close()


async def serve_proxy(
    options: ProxyOptions,
    listener: socket.socket,
    logs: HttpLogs,
    on_ready: Callable[[Proxy, listening.StopSignals], None] | None = None,
) -> int:
    """What `run_proxy` runs. `on_ready` is told when requests are taken."""
    metrics = ProxyMetrics()
    proxy = Proxy(options, metrics)
    config = listening.uvicorn_config(create_app(proxy, metrics, loopback=listening.is_loopback(listener)), logs)
    config.http = CutConnection
    server = listening.Server(config)
    asyncio.get_running_loop().set_exception_handler(on_loop_error)
    with listening.StopSignals().installed() as stop:
        first = asyncio.gather(*(one.check() for one in proxy.servers))
        await stop.wait(stop.asked, first)  # type: ignore[arg-type]
        watching = [asyncio.create_task(one.watch()) for one in proxy.servers]
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not (server.started or serving.done()):
            await asyncio.sleep(0.005)
        if on_ready is not None:
            on_ready(proxy, stop)
        else:
            _announce(proxy, listener)
        await stop.wait(stop.asked, serving)
        server.should_exit = True
        logger.info("Stopping: %d requests are unfinished.", proxy.running)
        await stop.wait(stop.insisted, serving, timeout=options.shutdown_timeout)
        if not serving.done():
            knob = (
                "" if stop.insisted.is_set() else f" within {options.shutdown_timeout:g} seconds (--shutdown-timeout)"
            )
            proxy.stop(f"The proxy is shutting down, and the request has not ended{knob}.")
            # clients still read their answers
            await stop.wait(stop.forced, serving, timeout=listening.LAST_WORDS_SECONDS)
            server.force_exit = True
        await serving
        for task in watching:
            task.cancel()
        for one in proxy.servers:
            one.upstream.close()
    return 0


def _announce(proxy: Proxy, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    servers = proxy.servers
    for one in servers:
        if one.fault:
            logger.warning("The %s (%s) %s.", one.name, one.upstream.url, one.fault)
    able = sum(not one.fault for one in servers)
    where = f"[{host}]" if ":" in host else host
    print(f"{able} of {len(servers)} servers take requests.\nThe proxy serves at http://{where}:{port}", flush=True)
