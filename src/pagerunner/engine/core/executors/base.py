"""The seam between the engine core and whatever runs its plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pagerunner.types import StepPlan, StepResult


class Pending(Protocol):
    """A launched step, and whether it ran as a graph."""

    in_graph: bool

    def result(self) -> StepResult:
        """Wait for the step and read its tokens."""
        ...


class Executor(Protocol):
    """Runs plans in the order they come, on one device or many."""

    def run(self, plan: StepPlan) -> Pending:
        """Launch a step without waiting for it."""
        ...

    @property
    def busy_seconds(self) -> float:
        """How long the device has worked on steps that are done."""
        ...

    def prepare_sleep(self, level: int) -> None:
        """Do the part of `sleep` that may be refused. Raises CapacityError, and then nothing has changed."""
        ...

    def sleep(self, level: int) -> None:
        """Free memory; see runner/sleep.py."""
        ...

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """Take memory back; see runner/sleep.py."""
        ...

    @property
    def sleep_level(self) -> int | None:
        """The level the device sleeps at, None while it can run steps."""
        ...
