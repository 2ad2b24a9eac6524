"""Ranks of which the last one's worker fails where a prompt has one of these tokens, or as PAGERUNNER_TEST_FAULT says."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

from pagerunner.config import EngineArgs
from pagerunner.dist.base import Comm, Stage, union
from pagerunner.engine.core.core import EngineCore
from pagerunner.engine.core.executors.process import load_ranks
from pagerunner.engine.startup.build import build_core, build_on
from pagerunner.engine.startup.resolve import Resolved, resolve
from pagerunner.engine.worker.worker import load_worker
from pagerunner.errors import CapacityError
from pagerunner.life import LIFE
from pagerunner.lora import loader
from pagerunner.tiers import rates
from pagerunner.tiers.disk import DiskStore
from pagerunner.types import StepPlan
from pagerunner.types.weights import RankChange, UpdateWeights

LOADER, FACTORY = "helpers.faulty_ranks:load", "helpers.faulty_ranks:build"
READS = "helpers.faulty_ranks:reads"
FAULTS = RAISE, HANG, NO_MEMORY, EXIT, OTHER_TABLE, LOSE = 501, 502, 503, 504, 505, 506
VARIABLE = "PAGERUNNER_TEST_FAULT"
"""One of "load raises", "load ends", "load hangs", "pages", "sleep", "wake once", "update once"; "first": rank 0's worker is the one that fails.
"all" fail, or "all load hangs". With "load slow" the last rank reads for 5 seconds longer than the others, which wait for it. "sleep hangs" is of all.
"disk slow" and "disk hangs" are of its store of pages, which takes 0.3 s for a page, or for ever. With "adapters" the last rank reads the folder "last" of an
adapter's directory, if there is one. "killed in load": the last rank is ended by SIGKILL in that phase, one of KILLED_IN."""
KILLED_IN = (
    "load", "loaded", "map_pages", "prepare_sleep", "sleep", "wake_up", "change_weights", "state_digest", "read_adapter", "fill_adapter",
)  # fmt: skip


def _may_die(phase: str) -> None:
    if os.environ.get(VARIABLE) == f"killed in {phase}":
        os.kill(os.getpid(), signal.SIGKILL)


def _dying(phase: str, act: Any) -> Any:
    return lambda *given: _may_die(phase) or act(*given)


class Never:
    """A step whose result doesn't come."""

    in_graph = False

    def result(self) -> Any:
        time.sleep(3600)


class FaultyWorker:
    """The worker that fails."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._wakes = self._updates = 0
        self._most_done: int | None = None

    @property
    def steps_done(self) -> int:
        """A device that waits for ever does none of the steps behind that one."""
        return int(self._worker.steps_done) if self._most_done is None else self._most_done

    def __getattribute__(self, name: str) -> Any:
        _may_die(name)
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def run(self, plan: StepPlan) -> Any:
        tokens = {token for row in plan.rows for token in row.tokens}
        if RAISE in tokens:
            raise ValueError("a planted error")
        if HANG in tokens:
            time.sleep(3600)
        if NO_MEMORY in tokens:
            torch.empty(2**60, dtype=torch.uint8)
        if EXIT in tokens:
            os._exit(3)
        if LOSE in tokens:  # hosts go on, and devices wait for ever for what this rank doesn't send
            if not torch.cuda.is_available():
                self._most_done = int(self._worker.steps_done)
                self._worker.run(plan)
            return Never()
        pending = self._worker.run(plan)
        if OTHER_TABLE in tokens:
            self._worker._runner._tables.all.entries[-1] += 1
        return pending

    def prepare_sleep(self, level: int) -> None:
        if os.environ.get(VARIABLE) == "sleep hangs":
            time.sleep(3600)
        if os.environ.get(VARIABLE) == "sleep":
            raise CapacityError("there is no host memory for the weights.")
        self._worker.prepare_sleep(level)

    def wake_up(self, tags: Any) -> None:
        self._wakes += 1
        if os.environ.get(VARIABLE) == "wake once" and self._wakes == 1:
            raise CapacityError("another process has taken the memory.")
        self._worker.wake_up(tags)

    def change_weights(self, change: RankChange) -> None:
        self._updates += isinstance(change, UpdateWeights)
        if os.environ.get(VARIABLE) == "update once" and isinstance(change, UpdateWeights) and self._updates == 1:
            raise CapacityError("there is no memory for a piece.")
        self._worker.change_weights(change)


class FaultyLoaded:
    """The same before it has pages."""

    facts = ()

    def __init__(self, loaded: Any) -> None:
        self._loaded, self.meter = loaded, loaded.meter

    def map_pages(self, num_bytes: int) -> Any:
        _may_die("map_pages")
        if os.environ.get(VARIABLE) == "pages":
            raise CapacityError("no room for pages.")
        return FaultyWorker(self._loaded.map_pages(num_bytes))


def load(resolved: Resolved, progress: Any, *, comm: Comm, stage: Stage | None, teams: Comm | None) -> Any:
    """As `load_worker`."""
    last = (comm.rank if stage is None else stage.world.rank) == resolved.config.num_ranks - 1
    if last:
        _may_die("load")
        loader.read_adapter = _dying("read_adapter", loader.read_adapter)
        loader.AdapterLoader.fill = _dying("fill_adapter", loader.AdapterLoader.fill)  # type: ignore[method-assign]
    loaded = load_worker(resolved, progress, comm=comm, stage=stage, teams=teams)
    if last:
        _may_die("loaded")
    fault = os.environ.get(VARIABLE, "")
    if fault == "all load hangs":
        time.sleep(3600)
    if fault == "load slow":
        for _ in range(10 if loaded.rank == resolved.config.num_ranks - 1 else 0):
            time.sleep(0.5)
            LIFE.moved()
        union(comm if stage is None else stage.world, [1])
    if fault in ("all", "sleep hangs"):
        return FaultyLoaded(loaded)
    faulty = 0 if os.environ.get(VARIABLE) == "first" else resolved.config.num_ranks - 1
    if loaded.rank != faulty:
        return loaded
    match os.environ.get(VARIABLE):
        case "load raises":
            raise CapacityError("the weights don't fit.")
        case "load ends":
            os._exit(7)
        case "load hangs":
            time.sleep(3600)
        case "disk slow" | "disk hangs" as fault:
            write = DiskStore._write_page
            late = 0.3 if fault == "disk slow" else 3600
            DiskStore._write_page = lambda *given: time.sleep(late) or write(*given)  # type: ignore[method-assign]
            return loaded
        case "adapters":
            read = loader.read_adapter
            inner = lambda path: path / "last" if (path / "last").exists() else path  # noqa: E731
            loader.read_adapter = lambda path, *given: read(inner(path), *given)
            return loaded
    return FaultyLoaded(loaded)


def build(args: EngineArgs, available: int | None = None, engine: int = 0) -> EngineCore:
    """A core over ranks of which the last one is faulty."""
    resolved = resolve(args)
    return build_on(resolved, load_ranks(resolved, loader=LOADER))


def reads(args: EngineArgs, available: int | None = None, engine: int = 0) -> EngineCore:
    """A core over ranks without faults. It reads what a disk has, however soon it would be computed."""
    rates._LEAST_TOKENS = 1 << 30
    return build_core(args, None, available, engine)
