"""The seam between the engine core and whatever runs its plans: one worker in this process, or one in each of several.

An engine comes up in two halves. First all ranks load. Then the core makes one plan from the facts of all of them, and all ranks take it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pagerunner.engine.core.adapters import Loader
from pagerunner.engine.core.executors.pages import RanksStore
from pagerunner.engine.core.messages import StartUp
from pagerunner.engine.startup.measure import MemoryFacts
from pagerunner.types import StepPlan, StepResult, TransferEnd
from pagerunner.types.weights import RankChange


class Pending(Protocol):
    """A launched step, and whether it ran as a graph."""

    in_graph: bool

    def result(self) -> StepResult:
        """Wait for the step and read its tokens."""


class Executor(Protocol):
    """Runs plans in the order they come, on one device or many."""

    def run(self, plan: StepPlan) -> Pending:
        """Launch a step without waiting for it. Raises EngineDeadError if another rank has failed."""

    def ended_transfers(self, seconds: float) -> list[TransferEnd]:
        """Transfers of pages that have ended on all ranks since the last call. With none, wait for one for up to so many seconds."""

    def drain_transfers(self) -> None:
        """Wait until no transfer that a plan has begun is under way, and forget what has ended."""

    @property
    def host_ready(self) -> int:
        """How many bytes of host memory all ranks can use for pages by now."""

    @property
    def host_views(self) -> Sequence[memoryview]:
        """The host memory for pages of each rank: what is in this process, or shared with it."""

    def weights_digest(self) -> str:
        """What tells the weights of all ranks from all others; see `models/checkpoint/digest.py`. It is kept until they may have changed."""

    @property
    def page_stores(self) -> Sequence[RanksStore]:
        """The stores of pages that several ranks have, by team. None if there is one rank: its store is the core's."""

    @property
    def adapters(self) -> Loader | None:
        """What loads adapters, if requests may have some."""

    @property
    def busy_seconds(self) -> float:
        """How long the device has worked on steps that are done."""

    def prepare_sleep(self, level: int) -> None:
        """Do the part of `sleep` that may be refused. Raises CapacityError, and then nothing has changed."""

    def sleep(self, level: int) -> None:
        """Free memory; see runner/sleep.py."""

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """Take memory back; see runner/sleep.py."""

    def change_weights(self, change: RankChange) -> None:
        """Do a part of an update of the weights; see `types/weights.py`. Only ReceiveWeights changes them. Raises what is wrong.

        UpdateWeights is looked at, and memory for it taken. AbortUpdate never waits for another process.
        """

    @property
    def sleep_level(self) -> int | None:
        """The level the device sleeps at, None while it can run steps."""

    @property
    def failure_fd(self) -> int | None:
        """A file descriptor that can be read once another process of the engine has failed; None if there is none."""

    def check_alive(self) -> None:
        """Raise EngineDeadError with the reason if another process of the engine has failed."""

    def close(self) -> None:
        """End the other processes of the engine. Nothing can be run afterwards."""


class Started(NamedTuple):
    """An executor that can run steps, and what its start took."""

    executor: Executor
    startup: StartUp


class LoadedRanks(Protocol):
    """All ranks of an engine, each with everything but its pages. `take_pages` is called once."""

    @property
    def facts(self) -> Sequence[MemoryFacts]:
        """What was measured on each rank's device. Empty on CPUs, whose plan is made before the start."""

    def take_pages(self, num_bytes: int) -> Started:
        """Map the pages of the plan, equally many bytes on each rank. Raises CapacityError."""

    def close(self) -> None:
        """End the ranks' processes, as the engine can't be built."""
