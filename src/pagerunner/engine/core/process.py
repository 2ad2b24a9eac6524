"""The engine core in its own process: `python -m pagerunner.engine.core.process`, started by engine/core/client.py.

One loop: take what has arrived (without waiting while there is work), run a step, send what it did in one message.
A request that the core refuses fails alone. A step that raises ends the process, after its reason has been sent. The
process also ends when its standard input closes, because then its parent is gone.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec
import zmq

from pagerunner.children import heed_parent_alone, kill_started, read_first_line, wait_for_parents_end
from pagerunner.config import EngineArgs
from pagerunner.engine.core import messages as wire
from pagerunner.engine.core.garbage import set_apart
from pagerunner.engine.core.watchdog import Watchdog
from pagerunner.errors import (
    ConfigError,
    EngineDeadError,
    EngineSleepingError,
    InvalidRequestError,
    PagerunnerError,
    RequestFailedError,
    described,
)
from pagerunner.logs import set_up_logging
from pagerunner.memory.report import plan_json
from pagerunner.types import AdapterInfo, EngineRequest, RequestUpdate

if TYPE_CHECKING:
    from pagerunner.engine.core.core import EngineCore

logger = logging.getLogger(__name__)

STATS_SECONDS = 0.1
"""Least time between two SchedulerStats, and most time between two signs of life while the core steps."""
INTAKE_SECONDS = 0.01
"""How long messages are taken before a step goes on: a hundred long prompts take 30 ms, and their frontends may send more meanwhile."""
_LINGER_MS = 2_000
_LOAD_MS = 10  # how often an engine that has nothing else to do asks what has become of adapters


class CoreLoop:
    """Runs one core for one or several frontends until it is told to stop or a step fails."""

    def __init__(self, core: EngineCore, sockets: Sequence[zmq.Socket[bytes]], stall_seconds: float) -> None:
        self._core = core
        self._watchdog = Watchdog(stall_seconds)
        self._sockets = sockets
        self._client = self._turn = 0  # whose message is being handled, and whose are taken first
        self._lives = [1] + [0] * (len(sockets) - 1)  # of each frontend: the number of its latest process
        self._ended = [0] * len(sockets)  # and of the latest one that is known to have ended
        self._owners: dict[str, int] = {}  # of unfinished sequences, where there are several frontends
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(wire.ToCore)
        self._requests = msgspec.msgpack.Decoder(list[EngineRequest])
        self._running = True
        # by number: the frontend, and its call; None if its process has ended
        self._loads: dict[int, tuple[int, int] | None] = {}
        self._read: dict[str, int] = {}  # adapters without a name so far, and the frontends that will give it
        self._adapters: list[AdapterInfo] = []
        self._stats_at = 0.0
        # A sleep that waits for the running requests, and the messages that came after it.
        self._after_work: list[tuple[int, wire.Call | wire.Add]] = []

    def run(self) -> None:
        """Serve until `Shutdown`. Raises what a step raises."""
        core = self._core
        poller = zmq.Poller()
        for source in (*self._sockets, core.failure_fd):
            if source is not None:
                poller.register(source, zmq.POLLIN)
        self._tell([], core.stats())  # so that metrics have every name before the first request
        while self._running:
            if not core.has_work:
                self._wait(poller)
            if self._loads:
                self._end_loads()
            until = time.monotonic() + INTAKE_SECONDS
            for client, message in self._receive():
                self._client = client
                if self._is_there(client) or isinstance(message, wire.Hello):  # not of a process that has ended
                    self._handle(message)
                if time.monotonic() >= until and core.has_work:
                    break
            if self._running and core.has_work:
                self._watchdog.begin()
                updates = core.step()
                self._watchdog.end()
                self._report(updates)
            if self._after_work and not core.has_work:
                put_off, self._after_work = self._after_work, []
                for client, message in put_off:
                    self._client = client
                    if isinstance(message, wire.Add):
                        self._disown(message)
                    self._handle(message)

    def _wait(self, poller: zmq.Poller) -> None:
        """Wait for a message. Where a trainer's next call is waited for, that has its end."""
        seconds = self._core.update_seconds
        if self._loads:
            poller.poll(_LOAD_MS)
            self._core.check_alive()
            return
        came = poller.poll(None if seconds is None else int(1000 * seconds) + 1)
        self._core.check_alive()
        if not came:
            self._core.end_late_update()
            self._tell([], self._core.stats())

    def send(self, message: wire.FromCore) -> None:
        """Send one message to the frontend whose message is being handled."""
        self._sockets[self._client].send(self._encoder.encode(message))

    def _tell(self, updates: list[RequestUpdate], stats: wire.SchedulerStats | None, level: int | None = None) -> None:
        """Tell each frontend of its own sequences, and all that are there the stats, with the core's level of sleep unless another one is given."""
        fault = self._core.weights_fault
        if stats is not None and level is None:
            level = self._core.sleep_level
        own: list[list[RequestUpdate]] = [[] for _ in self._sockets]
        if len(own) == 1:
            own = [updates]
        else:
            for update in updates:
                own[self._owners.get(update.request_id, 0)].append(update)
                if update.finish_reason is not None:
                    self._owners.pop(update.request_id, None)
        for client, some in enumerate(own):
            if self._is_there(client) and (some or stats is not None):
                told = wire.Updates(some, stats, -1 if level is None else level, fault)
                self._sockets[client].send(self._encoder.encode(told))

    def _end_loads(self) -> None:
        """Answer calls whose adapters have been read."""
        if not self._core.poll_adapters():
            return
        work = self._core.adapters
        for number, found in [(number, work.loaded.pop(number)) for number in list(work.loaded)]:
            asked = self._loads.pop(number)
            if asked is None:
                if isinstance(found, AdapterInfo):
                    work.drop(found.name)
                continue
            client, call_id = asked
            if isinstance(found, AdapterInfo):
                self._read[found.name], reply = client, wire.Reply(call_id, found.digest)
            else:
                reply = wire.Reply(call_id, error=wire.WireError.of(found))
            self._sockets[client].send(self._encoder.encode(reply))

    def _tell_adapters(self) -> None:
        self._adapters = list(self._core.adapters.infos())
        message = self._encoder.encode(wire.Adapters(self._adapters))
        for client, socket in enumerate(self._sockets):
            if self._is_there(client):
                socket.send(message)

    def _is_there(self, client: int) -> bool:
        return self._lives[client] > self._ended[client]

    def _end_life(self, client: int, life: int) -> None:
        """A frontend's process has ended, or another one has begun: end the sequences that it leaves."""
        self._ended[client] = max(self._ended[client], life)
        if not self._is_there(client):
            self._loads = {
                number: asked if asked and asked[0] != client else None for number, asked in self._loads.items()
            }
            for name in [name for name, of in self._read.items() if of == client]:
                del self._read[name]
                self._core.adapters.drop(name)
            theirs = [name for name, of in self._owners.items() if of == client]
            self._report(self._forget(theirs) + self._core.abort(theirs))

    def _receive(self) -> Iterator[tuple[int, wire.ToCore]]:
        """What has come. The next call begins with the frontend behind the one whose message was the last to be taken."""
        for client in (*range(self._turn, len(self._sockets)), *range(self._turn)):
            while True:
                try:
                    data = self._sockets[client].recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                try:
                    message = self._decoder.decode(data)
                except msgspec.DecodeError:  # a fault of the frontend, which must not end any request
                    logger.exception("A message of the frontend can't be understood and is passed over.")
                    continue
                self._turn = (client + 1) % len(self._sockets)
                yield client, message

    def _report(self, updates: list[RequestUpdate]) -> None:
        now = time.monotonic()
        if now - self._stats_at >= STATS_SECONDS or not self._core.has_work:
            self._stats_at = now
            self._tell(updates, self._core.stats())
        elif updates:
            self._tell(updates, None)

    def _handle(self, message: wire.ToCore) -> None:
        match message:
            case wire.Add():
                self._add(message)
            case wire.Abort(request_ids):
                self._report(self._forget(request_ids) + self._core.abort(request_ids))
            case wire.Hello(life):
                self._end_life(self._client, life - 1)
                self._lives[self._client] = life
                if self._adapters:
                    self.send(wire.Adapters(self._adapters))
                self._tell([], self._core.stats())
            case wire.Gone(client, life):
                self._end_life(client, life)
            case wire.Shutdown():
                self._running = False
            case wire.Sleep(mode="wait") | wire.WakeUp() | wire.ChangeWeights():
                self._after_running(message)
            case _:
                self._call(message)

    def _add(self, message: wire.Add) -> None:
        for name in message.request_ids:
            if name in self._owners:  # another one's, perhaps, which keeps it
                used = InvalidRequestError(f"request_id {name!r} is already in use.", "request_id")
                self.send(wire.Refused(message.request_ids, wire.WireError.of(used)))
                return
        added: list[str] = []
        if len(self._sockets) > 1:
            self._owners |= dict.fromkeys(message.request_ids, self._client)
        try:
            if self._after_work:
                if any(isinstance(one, wire.Sleep) and one.level for _, one in self._after_work):
                    raise EngineSleepingError(
                        "The engine finishes what it runs and then sleeps; call wake_up afterwards."
                    )
                # it is to wait for the end of the pause that is about to begin
                self._after_work.append((self._client, message))
                return
            requests = self._requests.decode(message.requests)
            if message.siblings:
                requests += requests[0].siblings(message.siblings)
            for request in requests:
                self._core.add(request)
                added.append(request.request_id)
        except Exception as error:  # whatever it is, it must end this request only
            self._core.abort(added)
            self._disown(message)
            self.send(wire.Refused(message.request_ids, _request_error(error)))
        else:
            if not self._core.has_work:  # the engine is paused: no step will tell how many wait
                self._report([])

    def _disown(self, message: wire.Add) -> None:
        for name in message.request_ids:
            self._owners.pop(name, None)

    def _forget(self, request_ids: list[str]) -> list[RequestUpdate]:
        """Drop requests that wait for a pause to begin; returns their last updates."""
        gone, kept, updates = set(request_ids), [], []
        for client, message in self._after_work:
            if isinstance(message, wire.Add) and gone.issuperset(message.request_ids):
                for name in message.request_ids:
                    updates.append(RequestUpdate(request_id=name, new_token_ids=[], finish_reason="abort"))
            else:
                kept.append((client, message))
        self._after_work = kept
        return updates

    def _after_running(self, message: wire.Sleep | wire.WakeUp | wire.ChangeWeights) -> None:
        """Sleep when the unfinished requests are done.

        Meanwhile their readers are served. What wakes the engine or changes its weights comes after this sleep, not before.
        """
        if isinstance(message, wire.Sleep):
            try:
                self._core.prepare_sleep(message.level, message.mode)
            except EngineDeadError:
                raise
            except Exception as error:
                self.send(wire.Reply(message.call_id, error=_call_error(message, error)))
                return
        waits = isinstance(message, wire.Sleep) and self._core.has_work
        if waits or self._after_work:
            self._after_work.append((self._client, message))
        else:
            self._call(message)

    def _call(self, message: wire.Call) -> None:
        value: wire.Answer = None
        updates: list[RequestUpdate] = []
        try:
            match message:
                case wire.Sleep(_, level, mode):
                    updates = self._core.sleep(level, mode)
                case wire.PrepareSleep(_, level, mode):
                    self._core.prepare_sleep(level, mode)
                case wire.WakeUp(_, tags):
                    self._core.wake_up(tags)
                case wire.ChangeWeights(_, change):  # it may wait for a trainer, and no step runs meanwhile
                    self._tell(self._core.drain(), self._core.stats(), level=self._core.sleep_level or 0)
                    self._core.change_weights(change)
                    updates = self._core.take_unreported()
                case wire.LoadAdapter(call_id, request):
                    self._loads[self._core.adapters.begin(request, named=False)] = (self._client, call_id)
                    return
                case wire.NameAdapter(_, name, drop):
                    self._read.pop(name, None)
                    (self._core.adapters.drop if drop else self._core.adapters.name)(name)
                    self._tell_adapters()
                case wire.UnloadAdapter(_, name):
                    self._core.adapters.remove(name)
                    self._tell_adapters()
                case wire.ReadSleepLevel():
                    value = self._core.sleep_level
                case wire.ResetPrefixCache():
                    value = self._core.reset_prefix_cache()
                case wire.ReadMemory(_, team):
                    value = self._core.memory_state(team)
                case wire.Watch(_, since, team):
                    self.send(wire.Reply(message.call_id, self._core.watch(since, team)))
                    return
        except EngineDeadError:  # a step that the call ran has failed
            raise
        except Exception as error:  # the call has failed and can be made again
            self._tell(self._core.take_unreported(), self._core.stats())
            self.send(wire.Reply(message.call_id, error=_call_error(message, error)))
        else:
            self._tell(updates, self._core.stats())
            self.send(wire.Reply(message.call_id, value))


def _request_error(error: Exception) -> wire.WireError:
    if isinstance(error, PagerunnerError):
        return wire.WireError.of(error)
    if isinstance(error, msgspec.ValidationError):
        param = getattr(error.__cause__, "param", None)  # of a check that decoding ran
        return wire.WireError("InvalidRequestError", str(error), param)
    logger.error("A request could not be added to the engine.", exc_info=error)
    return wire.WireError.of(RequestFailedError(f"The engine could not add the request: {error!r}."))


def _call_error(call: wire.Call, error: Exception) -> wire.WireError:
    if isinstance(error, PagerunnerError):
        return wire.WireError.of(error)
    name = type(call).__name__
    logger.error("%s has failed.", name, exc_info=error)
    return wire.WireError.of(RequestFailedError(f"{name} has failed ({described(error)}); it can be tried again."))


def load_factory(path: str) -> Callable[[EngineArgs, int | None, int], EngineCore]:
    """The function that `module:function` names. Raises ConfigError when there is none."""
    module, _, name = path.partition(":")
    try:
        factory: Callable[[EngineArgs, int | None, int], EngineCore] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"The engine core {path!r} cannot be imported: {error}.") from error
    return factory


def _exit_with_parent(parent: int, addresses: list[str]) -> None:
    """Thread: end this process when the parent closes our standard input or is replaced by another parent."""
    wait_for_parents_end(parent)
    kill_started()
    paths = [Path(address.removeprefix("ipc://")) for address in addresses]
    try:
        for path in paths:
            path.unlink(missing_ok=True)
        paths[0].parent.rmdir()
    except OSError:
        pass  # the parent has removed it first, as it does when it ends regularly
    os._exit(0)


def _serve(launch: wire.Launch, sockets: Sequence[zmq.Socket[bytes]], kept: list[EngineCore]) -> int:
    encode, socket = msgspec.msgpack.encode, sockets[0]
    try:
        core = load_factory(launch.factory)(launch.args, launch.available, launch.engine)
        kept.append(core)
        plan = core.memory_plan
        socket.send(encode(wire.Ready(plan.max_model_len, msgspec.json.encode(plan_json(plan)), core.startup)))
    except Exception as error:  # the parent raises it
        if not isinstance(error, PagerunnerError):
            logger.exception("The engine core can't be built.")
        socket.send(encode(wire.StartFailed(wire.WireError.of(error))))
        return 1
    try:
        with set_apart():
            CoreLoop(core, sockets, launch.stall_seconds).run()
    except Exception as error:  # the parent tells every client
        # a rank has said it, or its watch
        known = isinstance(error, EngineDeadError) and isinstance(error.__cause__, EngineDeadError | None)
        logger.error("The engine core has failed.", exc_info=None if known else error)
        for socket in sockets:
            socket.send(encode(wire.Dead(wire.WireError.of(error))))
        return 1
    return 0


def main() -> NoReturn:
    """Entry point of the core process; the exit status is 0 only after `Shutdown`.

    It leaves by `os._exit`, with the core as it is. To free tensors aborts where the device has failed, and to free a group waits for its other processes.
    """
    parent = heed_parent_alone()
    launch = msgspec.json.decode(read_first_line("pagerunner.engine.core.process"), type=wire.Launch)
    set_up_logging(launch.log_level, launch.log_name)
    watcher = threading.Thread(target=_exit_with_parent, args=(parent, launch.addresses), daemon=True)
    watcher.start()
    context = zmq.Context(io_threads=1)
    sockets: list[zmq.Socket[bytes]] = []
    for address in launch.addresses:
        socket = context.socket(zmq.PAIR)
        for option, value in ((zmq.LINGER, _LINGER_MS), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
            socket.setsockopt(option, value)
        socket.connect(address)
        sockets.append(socket)
    kept: list[EngineCore] = []
    try:
        status = _serve(launch, sockets, kept)
    finally:
        for socket in sockets:
            socket.close()
        context.term()
    if not status:
        atexit._run_exitfuncs()  # pages go to the disk, and ranks end
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
