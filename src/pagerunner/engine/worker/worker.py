"""A worker: one rank of an engine. It owns a device's memory, a model and a runner, and decides nothing.

A worker comes up in three phases:

1. `load_worker` reserves addresses for an upper bound of pages, fills the weights, and captures the graphs over the first page.
2. `LoadedWorker.facts` says what is free then.
3. `LoadedWorker.take_pages` maps the pages of the plan that the core has made from the facts of all workers.

The result is a `Worker`. It runs steps, sleeps and wakes. An engine of one rank has its worker as executor (engine/core/executors/base.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from pagerunner.dist.base import Comm, Stage, gathered_bytes
from pagerunner.dist.gloo import GlooComm, GlooStage
from pagerunner.dist.nccl import NcclComm, NcclStage
from pagerunner.dist.null import NullComm
from pagerunner.dist.peer import NoRoomsError, PeerComm
from pagerunner.dist.staged import StagedComm, StagedStage
from pagerunner.engine.core.executors.base import Pending, Started
from pagerunner.engine.startup.machine import device_of_rank, ranks_here, ranks_share_devices, visible_devices
from pagerunner.engine.startup.measure import MemoryFacts, StartMeter
from pagerunner.engine.startup.resolve import Resolved
from pagerunner.engine.worker.build import (
    Progress,
    kernels_name,
    load_model,
    make_adapters,
    make_runner,
    make_sleeper,
    make_transfers,
    reload,
)
from pagerunner.engine.worker.card import Card
from pagerunner.engine.worker.weights import WorkerWeights
from pagerunner.layers.shares import Share
from pagerunner.lora.loader import AdapterLoader
from pagerunner.models.checkpoint.digest import weights_digest
from pagerunner.models.checkpoint.loader import Model, stored_tensors
from pagerunner.ops.ahead import expect_kernels, load_libraries, rehearsing
from pagerunner.ops.peer_sums import PeerSums, limits_of, room_bytes
from pagerunner.runner.arena import Arena, CpuArena
from pagerunner.runner.cuda_arena import CudaArena
from pagerunner.runner.cuda_driver import CudaDriver
from pagerunner.runner.device_clock import DeviceClock
from pagerunner.runner.pending import PendingStep
from pagerunner.runner.runner import ModelRunner
from pagerunner.runner.sleep import Sleeper
from pagerunner.runner.transfers import Transfers
from pagerunner.types import StepPlan, StepResult, TransferEnd
from pagerunner.types.weights import RankChange

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class TimedStep:
    """A launched step whose result says how long the steps took that the device has finished since the result before."""

    pending: PendingStep
    clock: DeviceClock
    in_graph: bool

    def result(self) -> StepResult:
        """See Pending."""
        result = self.pending.result()
        return msgspec.structs.replace(result, timed=self.clock.take_timed())


class Worker:
    """Runs plans on one runner. See executors/base.py for the methods."""

    def __init__(
        self,
        runner: ModelRunner,
        sleeper: Sleeper,
        clock: DeviceClock,
        weights: WorkerWeights,
        stage: Stage | None = None,
        transfers: Transfers | None = None,
        *,
        times_steps: bool = False,
        adapters: AdapterLoader | None = None,
    ) -> None:
        """`times_steps`: results say how long steps took. `adapters` loads them, if requests may have some."""
        self.adapters = adapters
        self._runner, self._stage, self._times = runner, stage, times_steps
        self._transfers = transfers
        self._sleeper = sleeper
        self._clock = clock
        self._weights = weights

    def run(self, plan: StepPlan) -> Pending:
        """See Executor.run."""
        with self._clock.step(plan.step_id):
            pending: PendingStep = self._runner.run(plan)
        return TimedStep(pending, self._clock, pending.in_graph) if self._times else pending

    def ended_transfers(self, seconds: float = 0.0) -> list[TransferEnd]:
        """See Executor.ended_transfers. Another thread may call it."""
        return [] if self._transfers is None else self._transfers.ended(seconds)

    def drain_transfers(self) -> None:
        """See Executor.drain_transfers."""
        if self._transfers is not None:
            self._transfers.drain()

    @property
    def host_ready(self) -> int:
        """See Executor.host_ready."""
        return 0 if self._transfers is None else self._transfers.host.ready_bytes

    @property
    def host_views(self) -> list[memoryview]:
        """See Executor.host_views."""
        return [] if self._transfers is None else [memoryview(self._transfers.host.bytes.numpy())]

    @property
    def host_path(self) -> str:
        """Where another process finds the host memory for pages, if it is shared. See HostPages."""
        return "" if self._transfers is None else self._transfers.host.path

    def weights_digest(self) -> str:
        """See Executor.weights_digest."""
        return self._weights.digest()

    page_stores = ()
    """See Executor.page_stores."""

    @property
    def busy_seconds(self) -> float:
        """See Executor.busy_seconds."""
        return self._clock.busy_seconds

    @property
    def steps_done(self) -> int:
        """How many steps the device has finished. For any thread; it doesn't wait for the device."""
        return self._clock.steps_done

    def prepare_sleep(self, level: int) -> None:
        """See Executor.prepare_sleep."""
        self._sleeper.prepare(level)

    def sleep(self, level: int) -> None:
        """See Executor.sleep."""
        if level and self._stage is not None:
            self._stage.let_go()
        if level and self.adapters is not None:
            self.adapters.lose()
        if level == 2:
            self._weights.lost()
        self._sleeper.sleep(level)

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """See Executor.wake_up."""
        self._sleeper.wake_up(tags)

    def change_weights(self, change: RankChange) -> None:
        """See Executor.change_weights."""
        self._weights.change(change, self._sleeper)

    @property
    def sleep_level(self) -> int | None:
        """See Executor.sleep_level. A failed sleep or wake counts as asleep."""
        if self._sleeper.state == "running":
            return None
        return self._sleeper.level if self._sleeper.level is not None else 0

    def state_digest(self) -> str:
        """What this rank must have in common with the others of its engine, after the same plans; see ModelRunner."""
        return self._runner.state_digest()

    failure_fd = None  # there are no other processes

    def check_alive(self) -> None:
        """See Executor.check_alive."""

    def close(self) -> None:
        """See Executor.close."""
        if self._transfers is not None:
            self._transfers.host.stop()
        if self.adapters is not None:
            self.adapters.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWorker:
    """A worker with everything but its pages, of which only the first is mapped."""

    rank: int
    resolved: Resolved
    card: Card | None
    arena: Arena
    model: Model
    share: Share | None
    weights: torch.Tensor
    runner: ModelRunner
    reload: Callable[[], None]
    meter: StartMeter
    stage: Stage | None
    transfers: Transfers | None
    adapters: AdapterLoader | None

    @property
    def facts(self) -> tuple[MemoryFacts, ...]:
        """See LoadedRanks.facts."""
        return () if self.card is None else (self.meter.facts(self.rank),)

    def take_pages(self, num_bytes: int) -> Started:
        """See LoadedRanks.take_pages."""
        return Started(self.map_pages(num_bytes), self.meter.report())

    def weights_digest(self) -> str:
        """See Executor.weights_digest."""
        return weights_digest(stored_tensors(self.model))

    def map_pages(self, num_bytes: int) -> Worker:
        """The worker with as many bytes of pages. To be called once. Raises CapacityError."""
        with self.meter.phase("pages"):
            self.arena.grow("kv", num_bytes)
        kept_on = self.card if self.resolved.config.enable_sleep_mode else None
        ranks = ranks_here(self.resolved.config, self.resolved.config.device)
        sleeper = make_sleeper(self.arena, kept_on, self.weights, self.reload, ranks)
        clock = DeviceClock.of(torch.device(self.resolved.config.device))
        weights = WorkerWeights(self.model, self.share, self.rank, self.resolved)
        if self.transfers is not None:
            self.transfers.host.begin()
        times = self.resolved.config.prices_steps
        return Worker(
            self.runner, sleeper, clock, weights, self.stage, self.transfers, times_steps=times, adapters=self.adapters
        )

    def close(self) -> None:
        """See LoadedRanks.close."""


def _joined(host: GlooComm, device: torch.device, *, by_kernel: bool) -> Comm:
    """The ranks of `host` with ways between their devices: by our own kernel where all of them can write into each other's memory, else by NCCL."""

    def sums(rooms: list[int], rank: int) -> PeerSums:
        return PeerSums(torch.tensor(rooms, device=device), rank, limits)

    limits = limits_of(host.size)
    if ranks_share_devices():  # graphs can't record what goes through the host, so the kernels make all sums
        limits = limits._replace(most=2**31, gathered=2**31)
        return PeerComm(host, StagedComm(host, rehearsing), CudaDriver(device.index), room_bytes, sums)
    if by_kernel and len(set(gathered_bytes(host, visible_devices().encode()))) > 1:
        by_kernel = False
        if host.rank == 0:
            logger.info("NCCL makes all sums of ranks, as these are on several machines.")
    needs_nccl = host.size > 2 or not by_kernel  # of two ranks the kernel makes sums of any size, and large ones sooner
    nccl = NcclComm(host, device, rehearsing) if needs_nccl else None
    if nccl is not None and not by_kernel:
        return nccl
    try:
        return PeerComm(host, nccl or StagedComm(host, rehearsing), CudaDriver(device.index), room_bytes, sums)
    except NoRoomsError as error:
        if host.rank == 0:
            logger.warning("NCCL makes all sums of ranks, as with disable_custom_all_reduce=True: %s", error)
        return nccl or NcclComm(host, device, rehearsing)


def load_worker(
    resolved: Resolved,
    progress: Progress | None = None,
    card: Card | None = None,
    comm: Comm | None = None,
    stage: Stage | None = None,
    teams: Comm | None = None,
) -> LoadedWorker:
    """Bring a worker up to the point where only its pages are missing.

    `card` is the CUDA device for which the configuration was resolved, if there is one. `progress` is called as by `build_core`.
    `comm` joins it to the other ranks of its engine, all of which load at the same time. If there are several stages, those of its own, and
    `stage` joins it to the others. If there are several teams, `comm` joins those of its own, and `teams` the ranks of all.

    Raises:
        CapacityError, CheckpointError: the sentence says what to change.
    """
    config, plan, memory = resolved.config, resolved.plan, resolved.card
    comm = comm or NullComm()
    rank = teams.rank if teams is not None else comm.rank if stage is None else stage.world.rank
    device = torch.device("cuda", device_of_rank(rank)) if config.device == "cuda" else torch.device(config.device)
    if memory is None:
        card = None
    elif card is None:
        card = Card.of(device_of_rank(rank), memory)
    meter = StartMeter(card.driver if card is not None else None, memory.free if memory is not None else None)
    meter.add_seconds("config", resolved.seconds)
    kernels = kernels_name(resolved, stage.number if stage is not None else 0)
    loading = load_libraries(device, kernels, ranks_here(config, config.device))
    arena: Arena = CudaArena(card.driver) if card is not None else CpuArena()
    by_kernel = not config.disable_custom_all_reduce
    if device.type == "cuda" and isinstance(comm, GlooComm):
        with meter.phase("ranks", "communicators"):
            comm = _joined(comm, device, by_kernel=by_kernel)
    if device.type == "cuda" and isinstance(teams, GlooComm):
        with meter.phase("ranks", "communicators"):
            teams = _joined(teams, device, by_kernel=by_kernel)
    if device.type == "cuda" and isinstance(stage, GlooStage):
        with meter.phase("ranks", "communicators"):
            staged = ranks_share_devices()
            stage = StagedStage(stage, rehearsing) if staged else NcclStage(stage, device, rehearsing)
    loaded = load_model(resolved, device, arena, meter, progress, comm, stage, teams)
    model, share, weights, fill_weights, backends = loaded
    with meter.phase("pages"):
        kv_bytes = arena.reserve("kv", plan.kv_bytes, mapped=plan.first_bytes)
    with meter.phase("adapters"):
        adapters = make_adapters(resolved, model, share, kv_bytes, card)
    with meter.phase("tables", "tables and sampling state"):
        transfers = make_transfers(resolved, kv_bytes, card)
        table = None if adapters is None else adapters.table
        runner = make_runner(resolved, device, model, share, kv_bytes, comm, stage, teams, transfers, table, backends)
    expect_kernels(device, True)
    if card is not None or runner.num_graphs:
        with meter.phase("warm-up", "activations and kernels"):
            runner.warm_up(name=kernels)
        for thread in loading:
            thread.join()  # no thread may use the device while graphs are captured
        with meter.phase("capture", "graphs"):
            runner.capture()
        if config.prices_steps:
            with meter.phase("step costs"):
                meter.steps = runner.measure(weights if device.type == "cuda" else None)
    expect_kernels(device, False)
    return LoadedWorker(
        rank=rank,
        resolved=resolved,
        card=card,
        arena=arena,
        model=model,
        share=share,
        weights=weights,
        runner=runner,
        reload=partial(reload, resolved, fill_weights, runner),
        meter=meter,
        stage=stage,
        transfers=transfers,
        adapters=adapters,
    )
