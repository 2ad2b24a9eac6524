"""InlineExecutor: the runner lives in this process."""

from __future__ import annotations

from collections.abc import Sequence

from pagerunner.runner.device_clock import DeviceClock
from pagerunner.runner.runner import ModelRunner, PendingStep
from pagerunner.runner.sleep import Sleeper
from pagerunner.types import StepPlan


class InlineExecutor:
    """Runs plans on one runner. See executors/base.py for the methods."""

    def __init__(self, runner: ModelRunner, sleeper: Sleeper, clock: DeviceClock) -> None:
        self._runner = runner
        self._sleeper = sleeper
        self._clock = clock

    def run(self, plan: StepPlan) -> PendingStep:
        """See Executor.run."""
        with self._clock.step():
            pending: PendingStep = self._runner.run(plan)
        return pending

    @property
    def busy_seconds(self) -> float:
        """See Executor.busy_seconds."""
        return self._clock.busy_seconds

    def prepare_sleep(self, level: int) -> None:
        """See Executor.prepare_sleep."""
        self._sleeper.prepare(level)

    def sleep(self, level: int) -> None:
        """See Executor.sleep."""
        self._sleeper.sleep(level)

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """See Executor.wake_up."""
        self._sleeper.wake_up(tags)

    @property
    def sleep_level(self) -> int | None:
        """See Executor.sleep_level. A failed sleep or wake counts as asleep."""
        if self._sleeper.state == "running":
            return None
        return self._sleeper.level if self._sleeper.level is not None else 0
