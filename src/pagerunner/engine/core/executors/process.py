"""ProcessExecutor: each rank runs in a process of its own (engine/rank.py), and none in the core's.

A plan is encoded once and sent to all ranks. The first rank of the last stage answers with what its device has computed. That is what every rank
of the stage has, because all of them choose tokens from the same gathered bytes. With several teams each team gets its own plan, and each
team's first rank answers.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import time
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
import zmq

from pagerunner import limits
from pagerunner.children import Process, private_directory, remove_directory, starting
from pagerunner.config import EngineConfig
from pagerunner.engine.core.executors.adapters import RanksLoader
from pagerunner.engine.core.executors.base import Pending, Started
from pagerunner.engine.core.executors.doors import Doors
from pagerunner.engine.core.executors.pages import RanksStore
from pagerunner.engine.core.executors.places import EarlyRanks, LocalPlaces
from pagerunner.engine.core.executors.ray import RayPlaces
from pagerunner.engine.core.executors.watch import RankWatch
from pagerunner.engine.rank import SHOWN, what_it_runs
from pagerunner.engine.startup.cluster import START_FACTOR
from pagerunner.engine.startup.measure import MemoryFacts
from pagerunner.engine.startup.resolve import Resolved
from pagerunner.engine.worker import orders
from pagerunner.engine.worker.build import Progress
from pagerunner.errors import ConfigError, PagerunnerError
from pagerunner.logs import name_of_part
from pagerunner.runner.sleep import checked_level, parse_tags
from pagerunner.tiers.disk import CLOSE_SECONDS
from pagerunner.types import StepPlan, StepResult, TeamsPlan, TeamsResult, TransferEnd
from pagerunner.types.weights import AbortUpdate, RankChange

LOADER = "pagerunner.engine.worker.worker:load_worker"
COMPARE_STEPS = 4_096
"""After so many steps tokens and page tables of all ranks are compared."""
_NOBODY_ASKS = -1  # the id of calls whose answers aren't waited for
_CLOSES = -2  # the id of the last call
_LOOK_SECONDS = 1.0
_GROUP_FACTOR = 4  # and a sum so many times, as the watch knows more than the group, and is to come first


class RankSockets:
    """The ways to the ranks, and the one by which results come."""

    def __init__(self, doors: Doors, ranks: int, teams: int) -> None:
        self.ranks, self._team_ranks, self._teams = ranks, ranks // teams, teams
        self._came: dict[int, dict[int, orders.Stepped]] = {}  # results by step and team
        self._encoder = msgspec.msgpack.Encoder()
        self._sockets: list[zmq.Socket[bytes]] = []
        for rank in range(ranks):
            socket = doors.context.socket(zmq.PUSH)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            doors.bind(socket, orders.ORDERS.format(rank))
            self._sockets.append(socket)
        self._results: zmq.Socket[bytes] = doors.context.socket(zmq.PULL)
        self._results.setsockopt(zmq.RCVHWM, 0)
        doors.bind(self._results, orders.RESULTS)
        self._decoder = msgspec.msgpack.Decoder(orders.Stepped)
        self._poller = zmq.Poller()
        self._poller.register(self._results, zmq.POLLIN)

    def connected(self, seconds: float) -> bool:
        """Wait until all ranks are connected, each for up to so many seconds."""
        return all(socket.poll(int(1000 * seconds), zmq.POLLOUT) for socket in self._sockets)

    def send(self, *orders_: orders.Order, team: int | None = None) -> bool:
        """Send an order to each rank, or to those of a `team`, or each team's to its ranks. It never waits. False if a rank isn't connected any more, as its process is gone."""
        data = [self._encoder.encode(order) for order in orders_]
        try:
            for rank, socket in enumerate(self._sockets):
                if team not in (None, rank // self._team_ranks):
                    continue
                socket.send(data[rank // self._team_ranks] if len(data) > 1 else data[0], zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def results(self, number: int, watch: RankWatch) -> list[orders.Stepped]:
        """Wait for the teams' results of step `number`. Results of earlier steps, which nobody has asked for, are passed over.

        Raises why the ranks are gone, if they are.
        """
        if watch.failure_fd not in self._poller:
            self._poller.register(watch.failure_fd, zmq.POLLIN)
        while len(self._came.get(number, ())) < self._teams:
            if self._results in dict(self._poller.poll()):
                stepped = self._decoder.decode(self._results.recv())
                if stepped.number >= number:  # a team may be ahead of another one
                    self._came.setdefault(stepped.number, {})[stepped.team] = stepped
            else:
                watch.check()
        came, self._came = self._came[number], {later: found for later, found in self._came.items() if later > number}
        return [came[team] for team in range(self._teams)]

    def close(self) -> None:
        """Send nothing more."""
        for socket in (*self._sockets, self._results):
            socket.close()


class RankRefusal(Exception):
    """A rank hasn't done what was asked of all. `error` says which one; `done` are the answers."""

    def __init__(self, error: PagerunnerError, done: Mapping[int, orders.Done]) -> None:
        super().__init__(str(error))
        self.error, self.done = error, done


class Ranks:
    """The ranks' processes, and what they say."""

    def __init__(self, resolved: Resolved, loader: str, early: EarlyRanks | None) -> None:
        """Start them, but for those that wait already."""
        ranks = resolved.config.num_ranks
        self.size, self.seconds = ranks, float(limits.RANK_SECONDS)
        self.directory = private_directory()
        with contextlib.ExitStack() as undo:
            undo.callback(remove_directory, self.directory)
            (self.directory / orders.MEETING).mkdir(mode=0o700)
            self._places, doors = self._find_places(resolved.config, early, undo)
            undo.callback(doors.close)
            self.of_team = ranks // resolved.config.teams
            self.watch = RankWatch(doors.context, self.directory, ranks, self.seconds, doors)
            undo.callback(self.watch.close)
            self.watch.team_ranks, self.watch.machines = self.of_team, self._places.machines
            self._sockets = RankSockets(doors, ranks, resolved.config.teams)
            if resolved.config.disk_tier is not None:  # the stores outlive this object: they must not hold it
                ways, teams = partial(_send, self._sockets, self.watch), range(resolved.config.teams)
                self.watch.page_stores = [RanksStore(self.of_team, partial(ways, team=team)) for team in teams]
            undo.pop_all()
        self._calls = itertools.count()
        self.halfway = False
        self._began = time.monotonic()
        self.start_seconds = 0.0
        """Until all of them were there."""
        self.weights: list[str] = []
        """See `orders.TakePages`, after `load`."""
        self._end = weakref.finalize(self, _end_unasked, os.getpid(), self.watch, self._sockets, self._places, doors)
        # what depends on who asked is settled already
        settled = resolved.config.device, resolved.config.max_num_batched_tokens
        args = msgspec.structs.replace(resolved.args, device=settled[0], max_num_batched_tokens=settled[1])
        processes: list[Process] = []
        try:
            for rank in range(ranks):
                launch = orders.RankLaunch(
                    args=args,
                    rank=rank,
                    ranks=ranks,
                    available=resolved.card or resolved.available,
                    directory=str(self.directory) if self._places.here else "",
                    ways=doors.ways(),
                    loader=loader,
                    log_level=logging.getLogger("pagerunner").getEffectiveLevel(),
                    log_name=name_of_part(f"rank {rank}"),
                    seconds=_GROUP_FACTOR * self.seconds,
                    threads=torch.get_num_threads(),
                )
                processes.append(self._places.start(launch))
        except BaseException:
            self.watch.begin(processes)
            self.close()
            raise
        self.watch.begin(processes)

    def _find_places(
        self, config: EngineConfig, early: EarlyRanks | None, undo: contextlib.ExitStack
    ) -> tuple[LocalPlaces | RayPlaces, Doors]:
        if config.distributed_executor_backend == "mp":
            return LocalPlaces(early), Doors(self.directory)
        places = RayPlaces(config, START_FACTOR * self.seconds)
        undo.callback(places.close)
        return places, Doors(self.directory, places.host, places.keys)

    def meet(self, resolved: Resolved) -> None:
        """Wait until all are there and would run the same, and let them load."""
        watch, own = self.watch, what_it_runs(resolved)
        watch.wait(
            lambda: len(watch.here) == self.size or None,
            lambda: (
                f"{self._first(watch.here)} hasn't started in {START_FACTOR * self.seconds:g} seconds {limits.knob('RANK_SECONDS')}."
            ),
            START_FACTOR * self.seconds,
        )
        self.start_seconds = time.monotonic() - self._began
        for rank in range(self.size):
            for name, thing in (watch.here[0] | own).items():
                if (found := watch.here[rank].get(name)) != thing:
                    other, shown = "the engine's core" if name in own else "rank 0", f" ({found}, and not {thing})"
                    raise ConfigError(
                        f"{watch.who(rank)} has another {name} than {other}{shown if name in SHOWN else ''}. All ranks must run the same: files of "
                        "the model or of the package have been changed during the start, or machines or devices differ."
                    )
        if not self._sockets.connected(self.seconds):  # a rank's report may come before the way to it is there
            raise watch.fail(
                f"A rank of {self.size} can't be sent orders {self.seconds:g} seconds after it has started."
            )
        self.send(orders.Join(watch.meeting))

    def send(self, *orders_: orders.Order, team: int | None = None) -> None:
        """Send an order to all, or to those of a `team`, or each team's to its ranks. Raises why the ranks are gone, if one of them is."""
        _send(self._sockets, self.watch, *orders_, team=team)

    def begin(self) -> None:
        """Begin to give something to all ranks that all must have: they are `halfway` until that has been given."""
        self.watch.check()
        if self.halfway:
            said = "An interrupt came while a step was given to the ranks, or an adapter. They don't agree any more."
            self.watch.fail(said)
            self.watch.check()
        self.halfway = True

    def give(self, order: orders.Order) -> None:
        """Give all ranks an order that all must have."""
        self.begin()
        self.send(order)
        self.halfway = False

    def load(self, progress: Progress | None) -> list[MemoryFacts]:
        """Wait until all ranks have loaded; rank 0's `progress` is told."""
        watch = self.watch
        told: list[orders.Read] = []

        def tell() -> None:
            if progress is not None and watch.read is not None and told[-1:] != [watch.read]:
                told[:] = [watch.read]
                progress(watch.read.num_bytes, watch.read.total)

        loaded = watch.from_all(lambda: watch.loaded, "loaded", told=tell)
        self.weights = [loaded[rank].weights for rank in range(self.size)]
        return [facts for rank in range(self.size) for facts in loaded[rank].facts]

    def _first(self, there: Container[int]) -> str:
        rank = next(rank for rank in range(self.size) if rank not in there)
        return self.watch.who(rank)

    def ask(self, make: Callable[[int], orders.Order], seconds: float = 0.0) -> Mapping[int, orders.Done]:
        """Make a call on all ranks, and wait for their answers. At least so many seconds may pass without a move of any of them.

        Raises RankRefusal with the error of the first rank that has one.
        """
        call_id = next(self._calls)
        self.watch.check()
        self.send(make(call_id))
        done = self.watch.from_all(lambda: self.watch.done.get(call_id, {}), "answered a call", seconds)
        del self.watch.done[call_id]
        for rank in range(self.size):
            if (refused := done[rank].error) is not None:
                raise RankRefusal(self.watch.named(rank, refused), done)
        return done

    def results(self, number: int) -> list[orders.Stepped]:
        """Wait for what each team has computed in step `number`. Raises why the ranks are gone, if they are."""
        return self._sockets.results(number, self.watch)

    def close(self) -> None:
        """End the processes."""
        if (unasked := self._end.detach()) is not None:
            _end(*unasked[2])


def _send(sockets: RankSockets, watch: RankWatch, *orders_: orders.Order, team: int | None = None) -> None:
    if not sockets.send(*orders_, team=team):
        raise watch.cause() or watch.fail(f"A rank of {sockets.ranks} can't be sent orders any more.")


def _end(process: int, watch: RankWatch, sockets: RankSockets, places: LocalPlaces | RayPlaces, doors: Doors) -> None:
    with contextlib.ExitStack() as last:
        if os.getpid() == process:  # not a fork of it
            last.callback(doors.close)
            last.callback(places.close)
        last.callback(watch.close)
        last.callback(sockets.close)
        if os.getpid() == process:
            _close_stores(watch, sockets)


def _end_unasked(*parts: Any) -> None:
    """As `_end`, when the object is gone, or the program ends. A Ctrl-C then ends a wait, and nobody could catch it."""
    with contextlib.suppress(KeyboardInterrupt):
        _end(*parts)


def _close_stores(watch: RankWatch, sockets: RankSockets) -> None:
    """Let ranks that run write the pages that they were given, for a limited time."""
    if not watch.page_stores or not all(store.is_open for store in watch.page_stores) or watch.is_own_thread:
        return
    with contextlib.suppress(PagerunnerError):  # the ranks are gone, or one is late
        watch.check()
        sockets.send(orders.ClosePages(_CLOSES))
        closed = lambda: len(watch.done.get(_CLOSES, {})) == len(watch.here) or None  # noqa: E731
        watch.wait(closed, lambda: f"A rank hasn't closed its pages in {CLOSE_SECONDS:g} seconds.", CLOSE_SECONDS)


class LoadedProcesses:
    """See LoadedRanks."""

    def __init__(self, ranks: Ranks, facts: Sequence[MemoryFacts]) -> None:
        self._ranks, self.facts = ranks, facts

    def take_pages(self, num_bytes: int) -> Started:
        """See LoadedRanks.take_pages."""
        try:
            done = self._ranks.ask(lambda call_id: orders.TakePages(call_id, num_bytes, self._ranks.weights))
        except RankRefusal as refusal:
            raise refusal.error from None
        startup = done[0].startup
        seconds = {"ranks' processes and imports": self._ranks.start_seconds, **startup.seconds}
        with starting("The engine's core, which maps the host memory of its ranks,"):
            views = [_mapped(path) for rank in range(self._ranks.size) if (path := done[rank].host_path)]
        return Started(ProcessExecutor(self._ranks, views), msgspec.structs.replace(startup, seconds=seconds))

    def close(self) -> None:
        """See LoadedRanks.close."""
        self._ranks.close()


def _mapped(path: str) -> memoryview:
    with open(path, "r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0))


class RanksStep:
    """See Pending. `in_graph` is known with the result."""

    in_graph = False

    def __init__(self, ranks: Ranks, number: int) -> None:
        self._ranks, self._number = ranks, number

    def result(self) -> StepResult:
        """See Pending.result. To be called once, and of later steps later."""
        of_teams = self._ranks.results(self._number)
        self.in_graph = all(stepped.in_graph for stepped in of_teams)
        if len(of_teams) == 1:
            return of_teams[0].result
        return TeamsResult(step_id=of_teams[0].result.step_id, token_ids=[], teams=[one.result for one in of_teams])


class ProcessExecutor:
    """Runs plans on all ranks. See executors/base.py for the methods."""

    def __init__(self, ranks: Ranks, host_views: Sequence[memoryview] = ()) -> None:
        self._ranks, self.host_views = ranks, host_views
        """Host memory: see Executor.host_views."""
        self._weights: list[str] | None = ranks.weights if all(ranks.weights) else None  # until they may be others
        self._levels: dict[int, int | None] = {}
        self._steps = 0
        self._under_way: set[tuple[int, int]] = set()  # transfers, by team and number
        self.adapters = RanksLoader(ranks.give, ranks.watch.ended_adapters, ranks.watch.who)
        """See Executor.adapters."""

    def run(self, plan: StepPlan) -> Pending:
        """See Executor.run."""
        self._ranks.begin()
        plans = plan.teams if isinstance(plan, TeamsPlan) else [plan]
        self._under_way |= {(team, one.number) for team, own in enumerate(plans) for one in own.transfers}
        self._ranks.send(*map(orders.Run, plans))
        self._steps += 1
        self._ranks.watch.given = self._steps
        self._ranks.halfway = False
        step = RanksStep(self._ranks, self._steps)
        if self._steps % COMPARE_STEPS == 0:
            self._compare()
        return step

    def _compare(self) -> None:
        """End the engine if a rank has other tokens or page tables than its team's first rank: its sums would be wrong, and nobody would see it."""
        done = self._ranks.ask(orders.Compare)
        for rank in range(self._ranks.size):
            first = rank - rank % self._ranks.of_team
            if done[rank].digest != done[first].digest:
                self._ranks.watch.fail(
                    f"Rank {rank} of {self._ranks.size} has other tokens or page tables than rank {first} after step {self._steps:,}: ranks must "
                    "compute the same. This is a fault of the engine or of a device."
                )
                self.check_alive()

    def ended_transfers(self, seconds: float) -> list[TransferEnd]:
        """See Executor.ended_transfers."""
        if not self._under_way and not seconds:  # reads of page stores are waited for, too
            return []
        ended = self._ranks.watch.ended_transfers(seconds)
        self._under_way -= {(end.team, end.number) for end in ended}
        return ended

    def drain_transfers(self) -> None:
        """See Executor.drain_transfers."""
        while self._under_way:
            self.ended_transfers(_LOOK_SECONDS)

    @property
    def host_ready(self) -> int:
        """See Executor.host_ready."""
        return self._ranks.watch.host_ready

    def weights_digest(self) -> str:
        """See Executor.weights_digest."""
        if self._weights is None:
            done = self._ranks.ask(lambda call_id: orders.Compare(call_id, of_weights=True))
            self._weights = [done[rank].digest for rank in range(self._ranks.size)]
        return " ".join(self._weights)

    @property
    def page_stores(self) -> Sequence[RanksStore]:
        """See Executor.page_stores."""
        return self._ranks.watch.page_stores

    @property
    def busy_seconds(self) -> float:
        """See Executor.busy_seconds. Rank 0's."""
        return self._ranks.watch.busy_seconds

    def prepare_sleep(self, level: int) -> None:
        """See Executor.prepare_sleep. All ranks prepare; one that can't refuses for all."""
        known = checked_level(level)  # ranks end with an order that they can't read
        self._all(lambda call_id: orders.PrepareSleep(call_id, known))

    def sleep(self, level: int) -> None:
        """See Executor.sleep."""
        known = checked_level(level)
        self._weights = None if known > 1 else self._weights
        self._all(lambda call_id: orders.Sleep(call_id, known))

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """See Executor.wake_up."""
        parse_tags(tags)  # ranks end with an order that they can't read
        names = None if tags is None else list(tags)
        self._all(lambda call_id: orders.WakeUp(call_id, names))

    def change_weights(self, change: RankChange) -> None:
        """See Executor.change_weights."""
        self._weights = None
        if isinstance(change, AbortUpdate):
            self._ranks.send(orders.ChangeWeights(_NOBODY_ASKS, change))
            return
        # a rank may wait for the trainer after another one has given up
        seconds = limits.TRANSFER_SECONDS + self._ranks.seconds
        try:
            self._ranks.ask(lambda call_id: orders.ChangeWeights(call_id, change), seconds)
        except RankRefusal as refusal:
            raise refusal.error from None

    def _all(self, make: Callable[[int], orders.Order]) -> None:
        self._levels = dict.fromkeys(range(self._ranks.size), 0)  # as long as an answer is missing, they don't run
        done: Mapping[int, orders.Done] = {}
        try:
            done = self._ranks.ask(make)
        except RankRefusal as refusal:
            done = refusal.done
            raise refusal.error from None
        finally:
            self._levels |= {rank: one.sleep_level for rank, one in done.items()}

    @property
    def sleep_level(self) -> int | None:
        """See Executor.sleep_level. The engine sleeps as long as one rank does."""
        return max((level for level in self._levels.values() if level is not None), default=None)

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


def load_ranks(
    resolved: Resolved, progress: Progress | None = None, loader: str = LOADER, early: EarlyRanks | None = None
) -> LoadedProcesses:
    """Start the ranks, and bring all of them up to the point where only their pages are missing.

    `loader` names the function that loads their workers. Processes that were started `early` are taken for them.

    Raises:
        CapacityError, CheckpointError, ConfigError: a rank can't load; it is named.
        EngineDeadError: a rank can't be started, has ended, or hangs.
    """
    config = resolved.config
    stages = f", pipeline_parallel_size={config.pipeline_parallel_size}" if config.pipeline_parallel_size > 1 else ""
    teams = f", data_parallel_size={config.data_parallel_size}" if config.teams > 1 else ""
    with starting(f"The ranks of tensor_parallel_size={config.tensor_parallel_size}{stages}{teams}"):
        ranks = Ranks(resolved, loader, early)
    try:
        ranks.meet(resolved)
        return LoadedProcesses(ranks, ranks.load(progress))
    except BaseException:
        ranks.close()
        raise
