"""A rank in its own process: `python -m pagerunner.engine.rank`, started by engine/core/executors/process.py or, in a Ray actor, engine/rank_host.py.

It resolves the same arguments as the core, loads its share of the model, and carries out the core's plans in their order. It decides
nothing. The first rank of the last stage, or of each team, sends each step's result to the core. The process ends when a step raises, after its reason has been sent, and when its
standard input closes, because then the core is gone. It always leaves by `os._exit`: the ends of libraries may wait for other ranks.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import msgspec
import torch
import zmq
from torch.distributed import Store

from pagerunner.children import heed_parent_alone, host_ip, read_first_line, wait_for_parents_end
from pagerunner.config import EngineConfig
from pagerunner.dist.base import Comm, CommError, Stage
from pagerunner.dist.gloo import FOR_EVER_SECONDS, GlooComm, GlooStage, joined, listen
from pagerunner.dist.null import NullComm
from pagerunner.engine.core.executors.base import Pending
from pagerunner.engine.core.faults import step_fault
from pagerunner.engine.core.garbage import set_apart
from pagerunner.engine.core.messages import WireError
from pagerunner.engine.startup.cluster import version
from pagerunner.engine.startup.disk_tier import open_store
from pagerunner.engine.startup.machine import DeviceMemory, device_kind, device_memory, device_of_rank
from pagerunner.engine.startup.resolve import Resolved, resolve
from pagerunner.engine.worker import orders
from pagerunner.engine.worker.pages import RankPages
from pagerunner.engine.worker.ways import Ways
from pagerunner.engine.worker.worker import LoadedWorker, Worker
from pagerunner.errors import EngineDeadError, PagerunnerError, RequestFailedError, described
from pagerunner.life import LIFE
from pagerunner.logs import set_up_logging
from pagerunner.lora.loader import AdapterLoader
from pagerunner.ops.device_errors import out_of_memory

logger = logging.getLogger(__name__)

ALIVE_SECONDS = 0.1
_LINGER_MS = 2_000
_LAST_WORDS_SECONDS = 2.0  # for a report on its way; the core kills this process as soon as it has it
_OrderT = TypeVar("_OrderT")


SHOWN = ("version of pagerunner", "version of torch", "kind of device")


def what_it_runs(resolved: Resolved) -> dict[str, str]:
    """What must be the same on all ranks and in the core, by its name; a digest of what is long."""
    things = {
        "engine configuration": resolved.config,
        "model configuration": resolved.model,
        "memory plan": resolved.plan,
    }
    digests = {name: hashlib.sha256(repr(thing).encode()).hexdigest() for name, thing in things.items()}
    return {"version of pagerunner": version(), **digests}


def what_runs_it(device: str) -> dict[str, str]:
    """What must be the same on all ranks. The core may have none of it."""
    return {"version of torch": str(torch.__version__), "kind of device": device_kind(device)}


class Reports:
    """The rank's way to the core, for several threads."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], ways: Ways, rank: int) -> None:
        self._rank = rank
        self._socket: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        ways.connect(self._socket, orders.REPORTS)
        self._lock = threading.Lock()
        self.steps = 0
        self.comms: list[GlooComm] = []
        self.worker: Worker | None = None
        self.device: int | None = None

    def send(self, report: orders.Report) -> None:
        """Send one report."""
        with self._lock:
            if not self._socket.closed:
                self._socket.send(msgspec.msgpack.encode(report))

    def say_alive(self) -> None:
        """In a thread: tell for ever how far the rank has come."""
        on_device = False
        while True:
            if self.device is not None and not on_device:
                on_device = True
                torch.cuda.set_device(self.device)  # a thread begins with device 0, which is another rank's
            steps, begun = self.steps, self.steps + sum(comm.calls for comm in self.comms)
            waits = any(comm.waits for comm in self.comms)
            done, busy = (0, 0.0) if self.worker is None else (self.worker.steps_done, self.worker.busy_seconds)
            self.send(orders.Alive(self._rank, LIFE.moves + begun, begun, steps, done, busy, waits))
            time.sleep(ALIVE_SECONDS)

    def tell_transfers(self, worker: Worker) -> None:
        """In a thread: tell for ever which transfers of pages have ended."""
        if self.device is not None:
            torch.cuda.set_device(self.device)
        ready = -1
        while True:
            ended = worker.ended_transfers(ALIVE_SECONDS)
            if ended or worker.host_ready != ready:
                ready = worker.host_ready
                self.send(orders.Moved(self._rank, ended, ready))

    def fail(self, error: BaseException) -> None:
        """Tell what this process ends with."""
        if not isinstance(error, PagerunnerError):
            logger.error("The rank has failed.", exc_info=error)
            if self.worker is not None and out_of_memory(error):
                error = EngineDeadError(step_fault(error))  # with the knobs
        self.send(orders.Failed(self._rank, WireError.of(error), isinstance(error, CommError)))


def or_end(act: Callable[[], None], reports: Reports) -> None:
    """In a thread: `act` for ever. What it raises ends the process, after the core has been told."""
    try:
        act()
    except BaseException as error:
        reports.fail(error)
        time.sleep(_LAST_WORDS_SECONDS)
        os._exit(1)


class Results:
    """The way of a rank that answers to give the core the results of its steps, in a thread that waits for them."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], ways: Ways, reports: Reports, team: int) -> None:
        self._team = team
        self._socket: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        ways.connect(self._socket, orders.RESULTS)
        self._launched: SimpleQueue[tuple[int, Pending]] = SimpleQueue()
        threading.Thread(target=or_end, args=(self._tell, reports), daemon=True).start()

    def put(self, number: int, pending: Pending) -> None:
        """Tell what this step computes, as soon as it is known."""
        self._launched.put((number, pending))

    def _tell(self) -> None:
        while True:
            number, pending = self._launched.get()
            stepped = orders.Stepped(number, pending.in_graph, pending.result(), self._team)
            self._socket.send(msgspec.msgpack.encode(stepped))


class Rank:
    """Carries out the core's orders."""

    def __init__(
        self, launch: orders.RankLaunch, socket: zmq.Socket[bytes], reports: Reports, results: Results | None
    ) -> None:
        """`results` are those of a rank that answers."""
        self._launch = launch
        self._socket = socket
        self._reports, self._results = reports, results
        self._decoder = msgspec.msgpack.Decoder(orders.Order)
        self._pages: RankPages | None = None

    def load(self) -> Worker:
        """Come up together with the other ranks."""
        launch, send = self._launch, self._reports.send
        if isinstance(launch.available, DeviceMemory):
            self._reports.device = device = device_of_rank(launch.rank)
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(launch.threads)
        resolved = resolve(launch.args, available=launch.available)
        where: Path | Store | None = Path(launch.directory, orders.MEETING) if launch.directory else None
        address = ""
        if where is None and launch.rank == 0:
            address, where = listen(host_ip(), launch.seconds)
        runs = what_it_runs(resolved) | what_runs_it(resolved.config.device)
        send(orders.Here(launch.rank, runs, address))
        join = self._next(orders.Join)
        comm, stage, teams = self._meet(resolved.config, where or joined(join.meeting, launch.seconds))
        for group in self._reports.comms:
            group.seconds = FOR_EVER_SECONDS  # one may read its weights for an hour longer; the core sees who moves
        if resolved.card is not None:
            resolved = replace(resolved, card=device_memory())  # the plan is the core's, and the device this rank's own
        progress = (lambda *read: send(orders.Read(0, *read))) if launch.rank == 0 else None
        loaded = _loader(launch.loader)(resolved, progress, comm=comm, stage=stage, teams=teams)
        for group in self._reports.comms:
            group.seconds = launch.seconds
        weights = loaded.weights_digest() if resolved.config.disk_tier is not None else ""
        send(orders.Loaded(launch.rank, list(loaded.facts), weights))
        order = self._next(orders.TakePages)
        self._reports.worker = worker = loaded.map_pages(order.num_bytes)
        if worker.host_views:
            tell = partial(self._reports.tell_transfers, worker)
            threading.Thread(target=or_end, args=(tell, self._reports), daemon=True).start()
        if worker.adapters is not None:
            worker.adapters.tell = lambda end: send(orders.AdapterEnded(launch.rank, end))
        self._open_pages(resolved, worker, order.weights)
        send(orders.Done(launch.rank, order.call_id, startup=loaded.meter.report(), host_path=worker.host_path))
        return worker

    def _open_pages(self, resolved: Resolved, worker: Worker, weights: list[str]) -> None:
        """Open the rank's store of pages, if it is to have one, and tell what is there."""
        ended = threading.Event()
        store = open_store(resolved, resolved.plan, " ".join(weights), self._launch.rank, ended.set)
        if store is None or not worker.host_views:
            return
        page_bytes = [group.page_bytes for group in resolved.plan.groups]
        self._pages = pages = RankPages(self._launch.rank, store, worker.host_views[0], page_bytes, ended)

        if (news := pages.news()) is not None:
            self._reports.send(news)
        for act in (pages.run, pages.tell):
            told = partial(act, self._reports.send)
            threading.Thread(target=or_end, args=(told, self._reports), daemon=True).start()

    def _meet(self, config: EngineConfig, where: Path | Store) -> tuple[Comm, Stage | None, Comm | None]:
        """Meet the other ranks: those of the stage or team, those of other stages, and those of all teams if there are several."""
        launch, together = self._launch, config.tensor_parallel_size
        world = GlooComm(where, launch.rank, launch.ranks, launch.seconds)
        self._reports.comms.append(world)
        if together == launch.ranks:
            return world, None, None
        stage = GlooStage(world, together, config.max_in_flight) if config.teams == 1 else None
        teams = world if stage is None else None
        if together == 1:
            return NullComm(), stage, teams
        name = f"ranks {launch.rank // together}"
        comm = GlooComm(where, launch.rank % together, together, launch.seconds, name)
        self._reports.comms.append(comm)
        return comm, stage, teams

    def serve(self, worker: Worker) -> None:
        """Run steps and make calls, until the process is ended."""
        while True:
            order = self._decoder.decode(self._socket.recv())
            match order:
                case orders.Run(plan):
                    pending = worker.run(plan)
                    self._reports.steps += 1
                    if self._results is not None:
                        self._results.put(self._reports.steps, pending)
                case orders.Compare(call_id, of_weights):
                    digest = worker.weights_digest() if of_weights else worker.state_digest()
                    self._reports.send(orders.Done(self._launch.rank, call_id, digest=digest))
                case orders.PrepareSleep() | orders.Sleep() | orders.WakeUp() | orders.ChangeWeights():
                    error = self._call(worker, order)
                    self._reports.send(orders.Done(self._launch.rank, order.call_id, worker.sleep_level, error))
                case _ if isinstance(order, orders.OfAdapters) and worker.adapters is not None:
                    self._of_adapters(worker.adapters, order)
                case _ if isinstance(order, orders.OfPages) and self._pages is not None:
                    self._pages.put(order)
                case _:
                    raise RuntimeError(f"{type(order).__name__} is no order for a rank that runs")

    def _of_adapters(self, loader: AdapterLoader, order: orders.OfAdapters) -> None:
        match order:
            case orders.ReadAdapter(number, path):
                loader.read(number, path)
            case orders.FillAdapter(fill):
                loader.fill(fill)
            case orders.ForgetAdapter(digest, seen):
                loader.forget(digest, seen.get(self._launch.rank, 0))
            case orders.DrainAdapters():
                loader.drain()

    def _call(self, worker: Worker, call: orders.Call) -> WireError | None:
        try:
            match call:
                case orders.PrepareSleep(_, level):
                    worker.prepare_sleep(level)
                case orders.Sleep(_, level):
                    worker.sleep(level)
                case orders.WakeUp(_, tags):
                    worker.wake_up(tags)
                case orders.ChangeWeights(_, change):
                    worker.change_weights(change)
        except PagerunnerError as error:
            return WireError.of(error)
        except Exception as error:
            logger.exception("%s has failed.", type(call).__name__)
            said = f"{type(call).__name__} has failed ({described(error)}); it can be tried again."
            return WireError.of(RequestFailedError(said))
        return None

    def _next(self, kind: type[_OrderT]) -> _OrderT:
        order = self._decoder.decode(self._socket.recv())
        if not isinstance(order, kind):
            raise RuntimeError(f"{type(order).__name__} came where {kind.__name__} is next")
        return order


def _loader(path: str) -> Callable[..., LoadedWorker]:
    module, _, name = path.partition(":")
    found: Callable[..., LoadedWorker] = getattr(importlib.import_module(module), name)
    return found


def _exit_with_parent(parent: int, directory: str) -> None:
    """Thread: end this process when the core is gone."""
    wait_for_parents_end(parent)
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def main() -> None:
    """Entry point of a rank's process. It doesn't return."""
    parent = heed_parent_alone()
    launch = msgspec.json.decode(read_first_line("pagerunner.engine.rank"), type=orders.RankLaunch)
    level = launch.log_level if launch.rank == 0 else max(launch.log_level, logging.WARNING)
    set_up_logging(level, launch.log_name)
    threading.Thread(target=_exit_with_parent, args=(parent, launch.directory), daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    reports = Reports(context, launch.ways, launch.rank)
    team, place = divmod(launch.rank, launch.args.tensor_parallel_size)
    answers = place == 0 and (launch.args.teams > 1 or launch.rank == launch.ranks - launch.args.tensor_parallel_size)
    results = Results(context, launch.ways, reports, team if launch.args.teams > 1 else 0) if answers else None
    threading.Thread(target=or_end, args=(reports.say_alive, reports), daemon=True).start()
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    launch.ways.connect(socket, orders.ORDERS.format(launch.rank))
    rank = Rank(launch, socket, reports, results)
    try:
        worker = rank.load()
        with set_apart():
            rank.serve(worker)
    except BaseException as error:
        reports.fail(error)
    logging.shutdown()
    sys.stderr.flush()
    time.sleep(_LAST_WORDS_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
