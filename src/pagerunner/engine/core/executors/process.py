"""ProcessExecutor: rank 0 runs in the core's process, and each other rank in one of its own (engine/rank.py).

A plan is encoded once and sent to all ranks, then rank 0 launches it. No rank answers. What rank 0's device has computed is what
every rank has, because all of them choose tokens from the same gathered logits.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import subprocess
import time
import weakref
from collections.abc import Callable, Container, Sequence
from pathlib import Path

import msgspec
import zmq

from pagerunner import limits
from pagerunner.children import engine_environment, private_directory, start, starting
from pagerunner.dist.base import CommError
from pagerunner.dist.gloo import GlooComm
from pagerunner.engine.core.executors.base import Pending, Started
from pagerunner.engine.core.executors.watch import RankWatch
from pagerunner.engine.rank import what_it_runs
from pagerunner.engine.startup.measure import MemoryFacts
from pagerunner.engine.startup.resolve import Resolved
from pagerunner.engine.worker import orders
from pagerunner.engine.worker.build import Progress
from pagerunner.engine.worker.worker import LoadedWorker, Worker, load_worker
from pagerunner.errors import ConfigError, EngineDeadError, PagerunnerError
from pagerunner.threads import thread_settings
from pagerunner.types import StepPlan

LOADER = "pagerunner.engine.worker.worker:load_worker"
COMPARE_STEPS = 4_096
"""After so many steps tokens and page tables of all ranks are compared."""
_CALLS = 10  # a start, or a call, may take so many times as long as a sum, or as rank 0 takes for it
_SUMS = 4  # the watch knows more than the group, so it comes first


class RankSockets:
    """The ways to the other ranks."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: Path, ranks: int) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._sockets: list[zmq.Socket[bytes]] = []
        for rank in range(1, ranks):
            socket = context.socket(zmq.PUSH)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.bind(f"ipc://{directory}/{orders.ORDERS.format(rank)}")
            self._sockets.append(socket)

    def connected(self, seconds: float) -> bool:
        """Wait until all ranks are connected, each for up to so many seconds."""
        return all(socket.poll(int(1000 * seconds), zmq.POLLOUT) for socket in self._sockets)

    def send(self, order: orders.Order) -> bool:
        """Send an order to each rank. It never waits. False if a rank isn't connected any more, as its process is gone."""
        data = self._encoder.encode(order)
        try:
            for socket in self._sockets:
                socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Send nothing more."""
        for socket in self._sockets:
            socket.close()


class RankRefusal(Exception):
    """A rank hasn't done what was asked of all. `error` says which one; `done` are the answers of ranks 1, 2, ..."""

    def __init__(self, error: Exception, done: dict[int, orders.Done]) -> None:
        super().__init__(str(error))
        self.error, self.done = error, done


class Ranks:
    """The other ranks' processes, and what they say."""

    def __init__(self, resolved: Resolved, loader: str) -> None:
        """Start them."""
        ranks = resolved.config.tensor_parallel_size
        self.size, self.seconds = ranks, float(limits.RANK_SECONDS)
        self.directory = private_directory()
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, self.directory, ignore_errors=True)
            (self.directory / orders.MEETING).mkdir(mode=0o700)
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
            self.watch = RankWatch(context, self.directory, ranks, self.seconds)
            undo.callback(self.watch.close)
            self._sockets = RankSockets(context, self.directory, ranks)
            undo.pop_all()
        self._calls = itertools.count()
        self._end = weakref.finalize(self, _end, self.watch, self._sockets)
        environment = {**engine_environment(), **thread_settings(os.environ, reserved=0)}
        # what depends on who asked is settled already
        args = msgspec.structs.replace(resolved.args, max_num_batched_tokens=resolved.config.max_num_batched_tokens)
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, ranks):
                launch = orders.RankLaunch(
                    args=args,
                    rank=rank,
                    ranks=ranks,
                    available=resolved.available,
                    directory=str(self.directory),
                    loader=loader,
                    log_level=logging.getLogger("pagerunner").getEffectiveLevel(),
                    seconds=_SUMS * self.seconds,
                )
                line = msgspec.json.encode(launch) + b"\n"
                processes.append(start("pagerunner.engine.rank", environment, first_line=line, own_session=True))
        except BaseException:
            self.watch.begin(processes)
            self.close()
            raise
        self.watch.begin(processes)

    def meet(self, resolved: Resolved) -> GlooComm:
        """Wait until all are there and would run the same. The group of all ranks."""
        watch, own = self.watch, what_it_runs(resolved)
        others = range(1, self.size)
        watch.wait(
            lambda: len(watch.here) == len(others) or None,
            lambda: f"{self._first(watch.here)} hasn't started in {_CALLS * self.seconds:g} seconds.",
            _CALLS * self.seconds,
        )
        for rank in others:
            for name, digest in own.items():
                if watch.here[rank].get(name) != digest:
                    raise ConfigError(
                        f"Rank {rank} of {self.size} has another {name} than rank 0. All ranks must run the same: files of the model or of "
                        "the package have been changed during the start, or the machines differ."
                    )
        if not self._sockets.connected(self.seconds):  # a rank's report may come before the way to it is there
            raise watch.fail(
                f"A rank of {self.size} can't be sent orders {self.seconds:g} seconds after it has started."
            )
        self.send(orders.Join())
        return GlooComm(self.directory / orders.MEETING, 0, self.size, _SUMS * self.seconds)

    def send(self, order: orders.Order) -> None:
        """Send an order to all. Raises why the ranks are gone, if one of them is."""
        if not self._sockets.send(order):
            raise self.watch.cause() or self.watch.fail(f"A rank of {self.size} can't be sent orders any more.")

    def loaded(self, seconds: float) -> list[MemoryFacts]:
        """Wait until the other ranks have loaded, as rank 0 has in `seconds`."""
        watch, most = self.watch, _CALLS * max(self.seconds, seconds)
        watch.wait(
            lambda: len(watch.loaded) == self.size - 1 or None,
            lambda: (
                f"{self._first(watch.loaded)} hasn't loaded in {most:g} seconds after rank 0, which took {seconds:.1f}."
            ),
            most,
        )
        return [facts for rank in range(1, self.size) for facts in watch.loaded[rank].facts]

    def _first(self, there: Container[int]) -> str:
        rank = next(rank for rank in range(1, self.size) if rank not in there)
        return f"Rank {rank} of {self.size}"

    def ask(self, make: Callable[[int], orders.Order], own: Callable[[], object]) -> dict[int, orders.Done]:
        """Make a call on all ranks, `own` for rank 0, and wait for all of them. Returns the other ranks' answers.

        Raises RankRefusal with the error of the first rank that has one.
        """
        call_id = next(self._calls)
        self.watch.check()
        self.send(make(call_id))
        began = time.monotonic()
        error: Exception | None = None
        try:
            own()
        except PagerunnerError as raised:
            error = type(raised)(f"Rank 0 of {self.size}: {raised}")
        except Exception as raised:
            error = raised
        done = self.watch.done(call_id, _CALLS * max(self.seconds, time.monotonic() - began))
        errors = [self.watch.named(rank, refused) for rank in sorted(done) if (refused := done[rank].error) is not None]
        for one in (error, *errors):
            if one is not None:
                raise RankRefusal(one, done)
        return done

    def reason(self, error: Exception) -> Exception:
        """The reason for an error that rank 0 has met: another rank's, if it has lost one. All ranks have ended then."""
        if isinstance(error, CommError) and (cause := self.watch.cause()) is not None:
            return cause
        self.watch.fail(f"Rank 0 of {self.size}: {error}")
        return error

    def close(self) -> None:
        """End the processes."""
        self._end()


def _end(watch: RankWatch, sockets: RankSockets) -> None:
    sockets.close()
    watch.close()


class LoadedProcesses:
    """See LoadedRanks."""

    def __init__(self, ranks: Ranks, worker: LoadedWorker, others: Sequence[MemoryFacts]) -> None:
        self._ranks, self._worker = ranks, worker
        self.facts = (*worker.facts, *others)

    def take_pages(self, num_bytes: int) -> Started:
        """See LoadedRanks.take_pages."""
        mapped: list[Worker] = []
        try:
            self._ranks.ask(
                lambda call_id: orders.TakePages(call_id, num_bytes),
                lambda: mapped.append(self._worker.map_pages(num_bytes)),
            )
        except RankRefusal as refusal:
            raise refusal.error from None
        return Started(ProcessExecutor(self._ranks, mapped[0]), self._worker.meter.report())

    def close(self) -> None:
        """See LoadedRanks.close."""
        self._ranks.close()


class ProcessExecutor:
    """Runs plans on all ranks. See executors/base.py for the methods."""

    def __init__(self, ranks: Ranks, worker: Worker) -> None:
        self._ranks, self._worker = ranks, worker
        self._levels: dict[int, int | None] = {}
        self._steps = 0
        self._halfway = False

    def run(self, plan: StepPlan) -> Pending:
        """See Executor.run."""
        self.check_alive()
        if self._halfway:
            self._ranks.watch.fail("An interrupt came while a step was given to the ranks, which don't agree any more.")
            self.check_alive()
        self._halfway = True
        self._ranks.send(orders.Run(plan))
        try:
            pending = self._worker.run(plan)
        except Exception as error:
            raise self._ranks.reason(error) from error
        self._halfway = False
        self._steps += 1
        if self._steps % COMPARE_STEPS == 0:
            self._compare()
        return pending

    def _compare(self) -> None:
        """End the engine if a rank has other tokens or page tables than rank 0: its sums would be wrong, and nobody would see it."""
        own: list[str] = []
        done = self._ranks.ask(orders.Compare, lambda: own.append(self._worker.state_digest()))
        for rank in sorted(done):
            if done[rank].digest != own[0]:
                self._ranks.watch.fail(
                    f"Rank {rank} of {self._ranks.size} has other tokens or page tables than rank 0 after step {self._steps:,}: ranks must "
                    "compute the same. This is a fault of the engine or of a device."
                )
                self.check_alive()

    @property
    def busy_seconds(self) -> float:
        """See Executor.busy_seconds. Rank 0's."""
        return self._worker.busy_seconds

    def prepare_sleep(self, level: int) -> None:
        """See Executor.prepare_sleep. All ranks prepare; one that can't refuses for all."""
        self._all(lambda call_id: orders.PrepareSleep(call_id, level), lambda: self._worker.prepare_sleep(level))

    def sleep(self, level: int) -> None:
        """See Executor.sleep."""
        self._all(lambda call_id: orders.Sleep(call_id, level), lambda: self._worker.sleep(level))

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """See Executor.wake_up."""
        names = None if tags is None else list(tags)
        self._all(lambda call_id: orders.WakeUp(call_id, names), lambda: self._worker.wake_up(tags))

    def _all(self, make: Callable[[int], orders.Order], own: Callable[[], object]) -> None:
        self._levels = dict.fromkeys(range(1, self._ranks.size), 0)  # as long as an answer is missing, they don't run
        done: dict[int, orders.Done] = {}
        try:
            done = self._ranks.ask(make, own)
        except RankRefusal as refusal:
            done = refusal.done
            raise refusal.error from None
        finally:
            self._levels |= {rank: one.sleep_level for rank, one in done.items()}

    @property
    def sleep_level(self) -> int | None:
        """See Executor.sleep_level. The engine sleeps as long as one rank does."""
        levels = [level for level in (self._worker.sleep_level, *self._levels.values()) if level is not None]
        return max(levels, default=None)

    @property
    def failure_fd(self) -> int:
        """See Executor.failure_fd."""
        return self._ranks.watch.failure_fd

    def check_alive(self) -> None:
        """See Executor.check_alive."""
        self._ranks.watch.check()

    def close(self) -> None:
        """See Executor.close."""
        self._ranks.close()


def load_ranks(resolved: Resolved, progress: Progress | None = None, loader: str = LOADER) -> LoadedProcesses:
    """Start the other ranks, and bring all of them up to the point where only their pages are missing.

    `loader` names the function that loads the other ranks' workers.

    Raises:
        CapacityError, CheckpointError, ConfigError: a rank can't load; it is named.
        EngineDeadError: a rank can't be started, has ended, or hangs.
    """
    with starting(f"The other ranks of tensor_parallel_size={resolved.config.tensor_parallel_size}"):
        ranks = Ranks(resolved, loader)
    watch = ranks.watch

    def progressed(done: int, total: int) -> None:
        watch.check()
        if progress is not None:
            progress(done, total)

    try:
        comm = ranks.meet(resolved)
        watch.own_sums = lambda: comm.calls
        began = time.monotonic()
        worker = load_worker(resolved, progressed, comm=comm)
        facts = ranks.loaded(time.monotonic() - began)
    except CommError as error:
        reason = ranks.reason(error)
        raise reason if isinstance(reason, PagerunnerError) else EngineDeadError(str(reason)) from error
    except BaseException:
        ranks.close()
        raise
    return LoadedProcesses(ranks, worker, facts)
