"""The frontend's end of the engine core process: starts it, talks to it, notices its death, takes it down."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from pagerunner import limits
from pagerunner.children import (
    end,
    engine_environment,
    exit_reason,
    private_directory,
    remove_directory,
    start,
    starting,
)
from pagerunner.config import EngineArgs
from pagerunner.engine.core import messages as wire
from pagerunner.engine.core.live import LiveState
from pagerunner.engine.startup.shares import EngineShare, shares
from pagerunner.errors import EngineDeadError, PagerunnerError

logger = logging.getLogger(__name__)

DEFAULT_FACTORY = "pagerunner.engine.core.factory:build_with_progress"
STALL_SECONDS = float(limits.STALL_SECONDS)
"""How long the core may be silent, with requests to run, before it counts as unhealthy."""
CLOSE_SECONDS = 15.0
"""How long a core may take to end: a store of pages writes what it was given, for up to tiers.disk.CLOSE_SECONDS."""
_LEASH_SECONDS = 1.0
_LAST_WORDS_SECONDS = 0.2


@dataclass(frozen=True)
class LoadedCore:
    """A core process that has said `Ready`, and the socket to it. `who` names the process.

    `process` is None where another process has started it. This one is its frontend number `client` then.
    """

    who: str
    pid: int
    process: subprocess.Popen[bytes] | None
    socket: zmq.asyncio.Socket
    directory: Path
    exited: asyncio.Future[int]
    ready: wire.Ready
    client: int = 0

    def kill(self) -> None:
        """End the process at once and remove what it used, if this process has started it."""
        if self.process is not None:
            _clean_up(self.process, self.socket, self.directory)
        else:
            self.socket.close()


class CoreAddress(msgspec.Struct, frozen=True):
    """A loaded core, for another process of the server. `exited` is the status with which it has ended, if it has."""

    who: str
    pid: int
    directory: str
    ready: wire.Ready
    exited: int | None

    @classmethod
    def of(cls, core: LoadedCore) -> CoreAddress:
        """That of a core that this process has started."""
        exited = core.exited.result() if core.exited.done() else None
        return cls(core.who, core.pid, str(core.directory), core.ready, exited)

    def connect(self, client: int, life: int) -> LoadedCore:
        """The core, of which this process is frontend number `client`, the `life`-th one. Who knows of its end sets `exited`."""
        exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if self.exited is not None:
            exited.set_result(self.exited)
        directory = Path(self.directory)
        socket = _bound(_address(directory, client))
        socket.send(msgspec.msgpack.encode(wire.Hello(life)))
        return LoadedCore(self.who, self.pid, None, socket, directory, exited, self.ready, client)


def _address(directory: Path, client: int) -> str:
    return f"ipc://{directory}/core{client}"


def _bound(address: str) -> zmq.asyncio.Socket:
    socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
    for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
        socket.setsockopt(option, value)
    try:
        socket.bind(address)
    except BaseException:
        socket.close()
        raise
    return socket


def _who(share: EngineShare) -> str:
    return "The engine core process" if share.count == 1 else f"The process of engine {share.index} of {share.count}"


async def launch_core(
    args: EngineArgs,
    factory: str = DEFAULT_FACTORY,
    stall_seconds: float = STALL_SECONDS,
    share: EngineShare | None = None,
    clients: int = 0,
) -> LoadedCore:
    """Start the process and wait until it is loaded. Its standard error passes through, so loading is seen.

    The core logs its stacks when a step takes longer than `stall_seconds`. It takes its `share` of the machine (default: all there is). So
    many `clients`, beside this process, can connect to it.

    Raises:
        ConfigError, CheckpointError, CapacityError: as the core raised it.
        EngineDeadError: the process ended, or failed in another way, before it was ready.
    """
    share = share or shares(args)[0]
    who = _who(share)
    with starting(who):
        directory = private_directory()
    process: subprocess.Popen[bytes] | None = None
    socket: zmq.asyncio.Socket | None = None
    try:
        with starting(who):
            socket = _bound(_address(directory, 0))
        level = logging.getLogger("pagerunner").getEffectiveLevel()
        started = time.perf_counter()
        launch = wire.Launch(
            args=args,
            addresses=[_address(directory, client) for client in range(clients + 1)],
            factory=factory,
            available=share.available,
            engine=share.index,
            log_level=level,
            log_name=f"engine {share.index}" if share.count > 1 else "",
            stall_seconds=stall_seconds,
        )
        with starting(who):
            process = _spawn(launch, share)
        exited = _watch_exit(process)
        ready = await _first_message(who, socket, exited)
        loaded = ready.startup
        seconds = {"process and imports": time.perf_counter() - started - loaded.total, **loaded.seconds}
        ready = msgspec.structs.replace(ready, startup=msgspec.structs.replace(loaded, seconds=seconds))
        return LoadedCore(who, process.pid, process, socket, directory, exited, ready)
    except BaseException:
        _clean_up(process, socket, directory)
        raise


async def launch_cores(args: EngineArgs, factory: str, stall_seconds: float, clients: int = 0) -> list[LoadedCore]:
    """All cores that `args` ask for, which load at the same time. Raises the first error of `launch_core`, and none runs then."""
    starts = [asyncio.create_task(launch_core(args, factory, stall_seconds, share, clients)) for share in shares(args)]
    try:
        return await asyncio.gather(*starts)
    except BaseException:
        for start_ in starts:
            start_.cancel()
        for loaded in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(loaded, LoadedCore):
                loaded.kill()
        raise


class CoreClient:
    """Talks to a loaded core. Every method is for the event loop that launched it.

    `ready` is what the core said when it was loaded, `death` why it is gone: None while it lives.
    """

    def __init__(
        self, core: LoadedCore, *, receive: Callable[[wire.FromCore], None], died: Callable[[EngineDeadError], None]
    ) -> None:
        """`receive` gets every message but replies to calls; `died` is called once, when the core ends."""
        self._core = core
        self._receive = receive
        self._died = died
        self.ready, self.pid, self.who = core.ready, core.pid, core.who
        self.death: EngineDeadError | None = None
        self._closing = False
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(wire.FromCore)
        self._call_ids = itertools.count(time.monotonic_ns())  # not those of a process that had the socket before
        self._calls: dict[int, asyncio.Future[wire.Answer]] = {}
        self._reader = asyncio.create_task(self._read(), name="pagerunner-core-reader")
        self._reader.add_done_callback(self._reader_done)
        self._watcher = asyncio.create_task(self._watch(), name="pagerunner-core-watcher")

    def send(self, message: wire.ToCore) -> None:
        """Send a message; never blocks. Raises EngineDeadError when the core is gone."""
        if self.death is not None:
            raise EngineDeadError(str(self.death))
        self._core.socket.send(self._encoder.encode(message))

    async def call(self, make: Callable[[int], wire.Call]) -> wire.Answer:
        """Send the call that `make(call_id)` builds; returns the core's answer or raises its error."""
        call_id = next(self._call_ids)
        future: asyncio.Future[wire.Answer] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self.send(make(call_id))
            return await future
        finally:
            del self._calls[call_id]

    async def watch(self, since: int, team: int = 0) -> LiveState:
        """What a team of the core runs and holds, with the steps after `since`. Raises the core's error."""
        state = await self.call(lambda call_id: wire.Watch(call_id, since, team))
        if not isinstance(state, LiveState):
            raise TypeError(f"the core answers Watch with {type(state).__name__}")
        return state

    async def sleep_level(self) -> int | None:
        """The level that the core sleeps at, None while it is awake. Raises the core's error."""
        level = await self.call(wire.ReadSleepLevel)
        if level is not None and not isinstance(level, int):
            raise TypeError(f"the core answers ReadSleepLevel with {type(level).__name__}")
        return level

    def dump_stacks(self) -> None:
        """Make the core print its threads' stacks on standard error."""
        if not self._core.exited.done():
            os.kill(self.pid, signal.SIGUSR1)

    async def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """End the process, if it is this one's: asked first, killed after `timeout` seconds. Idempotent."""
        if self._closing:
            return
        self._closing = True
        if self.death is None:
            if self._core.process is not None:
                self._core.socket.send(self._encoder.encode(wire.Shutdown()))
            self._die(EngineDeadError("The engine has been shut down."))
        if self._core.process is not None:
            await asyncio.wait([self._core.exited], timeout=timeout)
        for task in (self._reader, self._watcher):
            task.cancel()
        await asyncio.gather(self._reader, self._watcher, return_exceptions=True)
        self._core.kill()

    async def _read(self) -> None:
        while True:
            message = self._decoder.decode(await self._core.socket.recv())
            match message:
                case wire.Reply(call_id, value, error):
                    future = self._calls.get(call_id)
                    if future is None or future.done():
                        continue
                    if error is None:
                        future.set_result(value)
                    else:
                        future.set_exception(error.exception())
                case wire.Dead(error):
                    self._die(EngineDeadError(f"{self._core.who} failed: {error.message}"))
                case _:
                    self._receive(message)

    def _reader_done(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled() and (error := reader.exception()) is not None:
            logger.error("The engine's messages can no longer be handled.", exc_info=error)
            self._die(EngineDeadError(f"The engine's messages can no longer be handled: {error!r}."))

    async def _watch(self) -> None:
        status = await asyncio.shield(self._core.exited)
        await asyncio.sleep(_LAST_WORDS_SECONDS)  # the reader may still find the reason in the socket
        self._die(EngineDeadError(exit_reason(self._core.who, status)))

    def _die(self, error: EngineDeadError) -> None:
        if self.death is not None:
            return
        self.death = error
        if not self._closing:
            logger.error("%s Its requests get this as their error.", error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(str(error)))
        self._died(error)


def _spawn(launch: wire.Launch, share: EngineShare) -> subprocess.Popen[bytes]:
    environment = {**engine_environment(), **share.environment}
    return start("pagerunner.engine.core.process", environment, first_line=msgspec.json.encode(launch) + b"\n")


def _clean_up(process: subprocess.Popen[bytes] | None, socket: zmq.asyncio.Socket | None, directory: Path) -> None:
    if process is not None:
        if process.stdin is not None:  # the end of its leash, at which it kills its ranks
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                process.stdin.close()
                process.wait(_LEASH_SECONDS)
        if stuck := end({"the engine core": process}):
            logger.error(stuck.strip())
    if socket is not None:
        socket.close()
    with contextlib.suppress(OSError):  # without a file descriptor, which rmtree wants and may not get
        (directory / "core0").unlink(missing_ok=True)
        directory.rmdir()
    remove_directory(directory)


def _watch_exit(process: subprocess.Popen[bytes]) -> asyncio.Future[int]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[int] = loop.create_future()

    def settle(status: int) -> None:
        if not future.done():
            future.set_result(status)

    def wait() -> None:
        status = process.wait()
        try:
            loop.call_soon_threadsafe(settle, status)
        except RuntimeError:
            pass  # the loop has been closed: nobody is left to tell

    threading.Thread(target=wait, name="pagerunner-core-exit", daemon=True).start()
    return future


async def _first_message(who: str, socket: zmq.asyncio.Socket, exited: asyncio.Future[int]) -> wire.Ready:
    received: asyncio.Future[bytes] = asyncio.ensure_future(socket.recv())
    try:
        either: list[asyncio.Future[Any]] = [received, exited]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not received.done():
            await asyncio.wait([received], timeout=_LAST_WORDS_SECONDS)
        if not received.done():
            raise EngineDeadError(f"{exit_reason(who, exited.result())} It had not finished loading.")
        message = msgspec.msgpack.decode(received.result(), type=wire.Ready | wire.StartFailed)
    finally:
        received.cancel()
    if isinstance(message, wire.StartFailed):
        error: PagerunnerError = message.error.exception()
        raise error
    return message
