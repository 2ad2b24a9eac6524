"""What a server of HTTP needs beside its application: a socket, signals that stop it, and uvicorn. Knows no engine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from pagerunner import limits
from pagerunner.errors import ConfigError
from pagerunner.server.connection import Connection, ShortUrls, accepted_at_once, connections_allowed
from pagerunner.server.http_logs import HttpLogs

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 30.0
LAST_WORDS_SECONDS = 10.0
_OPEN_FILES = 65_536
_FEW_CONNECTIONS = 64
_LATE_SECONDS = 0.05  # the loop has made a connection of whatever it had accepted
_SHORT_URLS = ShortUrls()


def allow_many_connections() -> None:
    """Raise the soft limit on open files.

    Many systems start programs with 1,024, enough for 1,024 clients, and allow more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if (most := connections_allowed()) < min(_FEW_CONNECTIONS, limits.MAX_CONNECTIONS):
        what = "Only %d open files are allowed (ulimit -n). Connections that have room at a time: %d."
        logger.warning(what, wanted, most)


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound socket that does not listen yet. If it is `shared`, other processes of this user can listen there too.

    Raises ConfigError when the address cannot be had."""
    if not 0 <= port <= 65_535:
        raise ConfigError(f"port must be in [0, 65535], got {port}.")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"The address {host!r}, port {port}, cannot be used: {error}.") from error
    first_error: ConfigError | None = None
    for family, kind, protocol, _, address in found:
        try:
            return _bind_one(family, kind, protocol, address, shared)
        except OSError as error:
            first_error = first_error or bind_error(host, port, error)
    raise first_error or ConfigError(f"The address {host!r} has no TCP port.")


def _bind_one(family: int, kind: int, protocol: int, address: tuple[Any, ...], shared: bool) -> socket.socket:
    listener = socket.socket(family, kind, protocol)
    try:
        # connections of an earlier server may still be in TIME_WAIT
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


def claim(listener: socket.socket) -> socket.socket:
    """Keep a bound socket's port from another server of this machine, until the claim is closed. Raises ConfigError if it is kept already.

    A port at which nobody listens yet can be bound again (SO_REUSEADDR), and at one that API processes share anybody of this user can listen
    (SO_REUSEPORT). Two servers would load their models, and then share the port. A name in Linux's abstract namespace goes with its process.
    """
    host, port = listener.getsockname()[:2]
    kept = socket.socket(socket.AF_UNIX)
    try:
        kept.bind(f"\0pagerunner {host} {port}")
    except OSError as error:
        kept.close()
        raise bind_error(host, port, error) from None
    return kept


def bind_error(host: str, port: int, error: OSError) -> ConfigError:
    """Why an address can't be had, as a sentence."""
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"Port {port} on {host} is in use; stop what listens there or choose another one with --port."
        )
    return ConfigError(f"Port {port} on {host} cannot be opened: {error}; choose another one with --host or --port.")


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can reach it."""
    return ipaddress.ip_address(str(listener.getsockname()[0]).partition("%")[0]).is_loopback


class StopSignals:
    """SIGINT and SIGTERM as events: `asked` at the first, `insisted` at the second, `forced` at the third."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()
        self.forced = asyncio.Event()

    def ask(self) -> None:
        """What a signal does; also callable without one."""
        events = (self.asked, self.insisted, self.forced)
        next((event for event in events if not event.is_set()), self.forced).set()

    @contextlib.contextmanager
    def installed(self) -> Iterator[StopSignals]:
        """Handle the signals meanwhile. Off the main thread Python delivers none, and nothing is installed."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.ask)
        try:
            yield self
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def loaded(self, loading: asyncio.Task[Any]) -> bool:
        """Whether the task is done, or has been cancelled because of a signal."""
        await self.wait(self.asked, loading)
        if not loading.done():
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            logger.warning("Stopped while the model was loading.")
        return not loading.cancelled()

    async def wait(self, event: asyncio.Event, *tasks: asyncio.Task[Any], timeout: float | None = None) -> None:
        """Wait until the event is set, a task is done, or time is up."""
        waiting = asyncio.create_task(event.wait())
        try:
            await asyncio.wait([waiting, *tasks], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()


class Server(uvicorn.Server):
    """uvicorn without its own signal handling, which would end streams that we drain.

    What was accepted just before the end is told of it, too. Such a connection would be served until its client leaves.
    """

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, and end each connection when its answer is given."""
        late = asyncio.create_task(self._end_late_connections())
        await super().shutdown(sockets)
        await late

    async def _end_late_connections(self) -> None:
        await asyncio.sleep(_LATE_SECONDS)
        for connection in list(self.server_state.connections):
            connection.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def uvicorn_config(app: ASGIApp, logs: HttpLogs) -> uvicorn.Config:
    """The settings of every server here: connections with limits, and no header that names the server."""
    logging.getLogger("uvicorn.access").addFilter(_SHORT_URLS)  # a filter that is there is not added again
    logs.apply()
    return uvicorn.Config(
        app,
        http=Connection,
        backlog=accepted_at_once(),
        h11_max_incomplete_event_size=limits.MAX_HEADER_BYTES,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=logs.access,
        log_level=logs.level,
        server_header=False,
        proxy_headers=False,  # the client's address is that of the connection, whatever a header claims
    )
