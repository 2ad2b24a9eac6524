"""`--api-server-count`: several processes serve one port, in front of the same engines.

The supervisor starts the engine cores and the API processes, and serves nothing itself. An API process is a whole server: it reads
requests and texts, and has a socket of its own to each core. The kernel shares connections out among them (SO_REUSEPORT). Standard input is
an API process's leash: on its lines come the launch, and later the ends of cores. To its output it writes an empty line each second, and once
the two lines that say where it serves. One that is silent is killed and replaced, as the kernel goes on giving it connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import msgspec
import zmq
from prometheus_client import values
from prometheus_client.multiprocess import mark_process_dead

from pagerunner import limits
from pagerunner.children import exit_reason, private_directory, read_lines, remove_directory, start_async, starting
from pagerunner.config import EngineArgs
from pagerunner.engine.core import messages as wire
from pagerunner.engine.core.client import (
    DEFAULT_FACTORY,
    STALL_SECONDS,
    CoreAddress,
    CoreClient,
    LoadedCore,
    launch_cores,
)
from pagerunner.engine.frontend.frontend import check_options, check_tokenizer
from pagerunner.engine.startup.hub import fetch_checkpoint
from pagerunner.errors import EngineDeadError
from pagerunner.logs import set_up_logging
from pagerunner.memory.units import human_bytes
from pagerunner.server.launch import ServerOptions, serve
from pagerunner.server.listening import DRAIN_SECONDS, LAST_WORDS_SECONDS, StopSignals, bind
from pagerunner.server.metrics import SHARED_DIRECTORY

logger = logging.getLogger(__name__)

MODULE = "pagerunner.server.api_processes"
_AGAIN_SECONDS = 2.0
_LONGEST_PAUSE = 30.0  # a process that has lived for longer is no reason to wait
_END_SECONDS = 5.0
_ALIVE_SECONDS = 1.0
_START_FACTOR = 10  # one that doesn't serve yet, and imports perhaps, may be silent for so many times as long
_METRICS = ("counter", "gauge_livesum", "histogram", "summary")
_METRICS_BYTES = 512 * 1024  # of each file; one that needs more grows without a reserve


class ApiLaunch(msgspec.Struct, frozen=True):
    """How an API process starts. `client` is its number, from 1 on, as the cores' frontend; it is the `life`-th process with it."""

    args: EngineArgs
    options: ServerOptions
    host: str
    port: int
    cores: list[CoreAddress]
    client: int
    life: int
    log_level: int


class CoreEnd(msgspec.Struct, frozen=True):
    """A core's process has ended with this status."""

    core: int
    status: int


async def supervise(args: EngineArgs, listener: socket.socket, host: str, count: int, options: ServerOptions) -> int:
    """Start cores and `count` API processes, and keep them until a signal comes or all cores are dead. Returns the exit status.

    `listener` is bound to the port and doesn't listen. Raises as `run_server`.
    """
    factory, stall = options.get("core_factory", DEFAULT_FACTORY), options.get("stall_seconds", STALL_SECONDS)

    async def load() -> tuple[EngineArgs, list[LoadedCore]]:
        await asyncio.to_thread(check_options, args)
        fetched = check_tokenizer(await asyncio.to_thread(fetch_checkpoint, args))
        return fetched, await launch_cores(fetched, factory, stall, count)

    with StopSignals().installed() as stop:
        loading = asyncio.create_task(load())
        if not await stop.loaded(loading):
            return 0
        fetched, cores = loading.result()
        level = logging.getLogger("pagerunner").getEffectiveLevel()
        launch = ApiLaunch(fetched, options, host, listener.getsockname()[1], [], 0, 0, level)
        metrics = private_directory()
        try:
            return await Supervisor(cores, launch, str(metrics), stop).run(count)
        finally:
            remove_directory(metrics)


class Supervisor:
    """Keeps API processes."""

    def __init__(self, cores: Sequence[LoadedCore], launch: ApiLaunch, metrics: str, stop: StopSignals) -> None:
        self._cores, self._launch, self._metrics, self._stop = cores, launch, metrics, stop
        self._clients = [CoreClient(core, receive=lambda message: None, died=self._tell_ends) for core in cores]
        self._serving: dict[int, asyncio.subprocess.Process] = {}
        self._announced: set[int] = set()
        self._settled: set[int] = set()
        """Those that serve, or have ended once without. When all are, the server says where it serves."""
        self._words: bytes | None = None

    async def run(self, count: int) -> int:
        """Start `count` of them, and return when all have ended: the exit status."""
        signals = asyncio.create_task(self._pass_signals_on())
        keepers = [asyncio.create_task(self._keep(client + 1, count)) for client in range(count)]
        try:
            await asyncio.wait(keepers, return_when=asyncio.FIRST_COMPLETED)  # one that ends for good ends all
            asked = self._stop.asked.is_set()
            self._stop.asked.set()
            for failed in await asyncio.gather(*keepers, return_exceptions=True):  # after all have drained
                if failed is not None:
                    raise failed
            return 0 if asked else 1
        finally:
            signals.cancel()
            self._signal(signal.SIGKILL)
            await asyncio.gather(*(client.close() for client in self._clients))

    async def _keep(self, client: int, count: int) -> None:
        """Start an API process, and another one when it has ended. Returns when the server is to end."""
        who, pause = f"API process {client} of {count}", 0.0
        for life in itertools.count(1):
            began, served = time.monotonic(), False
            try:
                with starting(who):
                    process = await start_async(MODULE, {**os.environ, SHARED_DIRECTORY: self._metrics})
                served, reason = await self._until_its_end(process, client, life, count)
            except EngineDeadError as error:
                reason = str(error)
            if self._stop.asked.is_set() or all(core.death is not None for core in self._clients):
                return
            if not self._announced:
                logger.error("%s Neither it nor another one had begun to serve. The server ends.", reason)
                return
            if time.monotonic() - began > _LONGEST_PAUSE:
                pause = 0.0
            self._settle(client, count)
            pause = pause if served else max(pause, _AGAIN_SECONDS)
            if served and reason == exit_reason(who, 0):  # a signal to it alone
                logger.warning("%s It has ended its requests before. It is started again in %g seconds.", reason, pause)
            elif served:
                logger.error("%s Its requests are ended, and it is started again in %g seconds.", reason, pause)
            else:
                logger.error("%s It had not begun to serve; it is started again in %g seconds.", reason, pause)
            await self._stop.wait(self._stop.asked, timeout=pause)
            if self._stop.asked.is_set():
                return
            pause = min(max(2 * pause, _AGAIN_SECONDS), _LONGEST_PAUSE)

    async def _until_its_end(
        self, process: asyncio.subprocess.Process, client: int, life: int, count: int
    ) -> tuple[bool, str]:
        """Launch a process and wait for its end, of which cores and metrics are told. Whether it has served, and how it ended."""
        assert process.stdin is not None and process.stdout is not None
        cores = [CoreAddress.of(core) for core in self._cores]
        launch = msgspec.structs.replace(self._launch, client=client, life=life, cores=cores)
        process.stdin.write(msgspec.json.encode(launch) + b"\n")
        self._serving[client] = process
        if self._stop.asked.is_set():  # while it was started: the signal has been passed on to the others
            process.kill()
        who, said, reason = f"API process {client} of {count}", b"", ""
        try:
            while line := await _line(process.stdout, limits.RANK_SECONDS * (1 if said else _START_FACTOR)):
                said += line.lstrip()
                if said and client not in self._announced:
                    self._tell_ends()
                    self._announced.add(client)
                if said.count(b"\n") == 2 and client not in self._settled:
                    self._words = self._words or said
                    self._settle(client, count)
        except TimeoutError as error:
            reason = f"{who} has given no sign of life for {error} {limits.knob('RANK_SECONDS')} and was killed."
            process.kill()
        reason = reason or exit_reason(who, await process.wait())
        await process.wait()
        del self._serving[client]
        mark_process_dead(client, self._metrics)  # type: ignore[no-untyped-call]
        for core in self._clients:
            if core.death is None:
                core.send(wire.Gone(client, life))
        return bool(said), reason

    def _settle(self, client: int, count: int) -> None:
        """Note that it serves, or has ended. Once all do, print where, if one serves."""
        if len(self._settled) < count:
            self._settled.add(client)
            if len(self._settled) == count and self._words is not None:
                print(self._words.decode(), end="", flush=True)

    async def _pass_signals_on(self) -> None:
        """Pass on the first and the second signal. The third, and the end of the time that each has, kill what hangs."""
        patience = self._launch.options.get("drain_seconds", DRAIN_SECONDS) + LAST_WORDS_SECONDS + _END_SECONDS
        await self._stop.asked.wait()
        self._signal(signal.SIGTERM)
        await self._stop.wait(self._stop.insisted, timeout=patience)
        if self._stop.insisted.is_set():
            self._signal(signal.SIGTERM)
            await self._stop.wait(self._stop.forced, timeout=LAST_WORDS_SECONDS + _END_SECONDS)
        logger.warning("API processes that had not ended are killed: %s.", ", ".join(map(str, sorted(self._serving))))
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._serving.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def _tell_ends(self, _: object = None) -> None:
        """Say to all API processes which cores have ended. They may hear it twice."""
        ends = [CoreEnd(index, core.exited.result()) for index, core in enumerate(self._cores) if core.exited.done()]
        for process in self._serving.values():
            if process.stdin is not None and not process.stdin.is_closing():
                process.stdin.writelines([msgspec.json.encode(end) + b"\n" for end in ends])


async def _line(reader: asyncio.StreamReader, seconds: float) -> bytes:
    """The next line, b"" at the end. Raises TimeoutError with its words for the time, after so many seconds without one."""
    for _ in range(2):  # the first half may be over at once, after this process itself has been stopped
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(reader.readline(), seconds / 2)
    raise TimeoutError(f"{seconds:g} seconds")


async def _say_alive() -> None:
    """Write an empty line each second, as long as the event loop runs."""
    out = sys.stdout.fileno()
    os.set_blocking(out, False)  # a supervisor that was stopped for a day reads nothing, and is no reason to stop, too
    while True:
        with contextlib.suppress(OSError):
            os.write(out, b"\n")
        await asyncio.sleep(_ALIVE_SECONDS)


async def _serve(launch: ApiLaunch, ends: Iterator[bytes], listener: socket.socket) -> int:
    alive = asyncio.create_task(_say_alive(), name="pagerunner-alive")
    try:
        cores = [address.connect(launch.client, launch.life) for address in launch.cores]
    except zmq.ZMQError as error:
        raise SystemExit(f"API process {launch.client}: the server, or its engine, is gone ({error}).") from None
    loop = asyncio.get_running_loop()

    def settle(end: CoreEnd) -> None:
        if not (exited := cores[end.core].exited).done():
            exited.set_result(end.status)

    def listen() -> None:
        for line in ends:
            loop.call_soon_threadsafe(settle, msgspec.json.decode(line, type=CoreEnd))
        # the supervisor is gone, and with it the cores; each removes what another one may have added meanwhile
        shutil.rmtree(os.environ[SHARED_DIRECTORY], ignore_errors=True)
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    try:
        return await serve(launch.args, listener, cores=cores, **launch.options)
    finally:
        alive.cancel()


def reserve_metrics(client: int, directory: str) -> None:
    """Take the room of this process's files of metrics. Where there is none, the process ends with a sentence.

    prometheus_client maps files that are longer than what the disk has given them. At a page that it has no room for, a process ends by SIGBUS.
    Files have the number of the client, and not of the process: the next process with that number goes on counting in them.
    """
    values.ValueClass = values.MultiProcessValue(lambda: client)  # type: ignore[no-untyped-call]
    who = f"API process {client}"
    files = [os.path.join(directory, f"{kind}_{client}.db") for kind in _METRICS]
    made = [name for name in files if not os.path.exists(name)]
    try:
        for name in files:
            with open(name, "ab") as file:
                os.posix_fallocate(file.fileno(), 0, _METRICS_BYTES)
    except OSError as error:
        for name in made:
            with contextlib.suppress(OSError):
                os.unlink(name)
        needed = human_bytes(len(files) * _METRICS_BYTES)
        raise SystemExit(
            f"{who} needs {needed} for its metrics in {directory}, and can't have them ({error.strerror}): free some, or set TMPDIR to a "
            "directory with more room."
        ) from None


def main() -> int:
    """Entry point of an API process."""
    lines = read_lines(MODULE)
    launch = msgspec.json.decode(next(lines), type=ApiLaunch)
    set_up_logging(launch.log_level, f"API process {launch.client}")
    reserve_metrics(launch.client, os.environ[SHARED_DIRECTORY])
    with bind(launch.host, launch.port, shared=True) as listener:
        return asyncio.run(_serve(launch, lines, listener))


if __name__ == "__main__":
    sys.exit(main())
