"""What goes on in the core at one moment, and the latest steps. Steps are kept only while a reader asks for them."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import msgspec

from pagerunner.sched.live import LiveRequest
from pagerunner.sched.stats import SchedulerStats
from pagerunner.types import StepPlan

_KEPT_STEPS = 512
_ATTENTION_SECONDS = 3.0


class LiveStep(msgspec.Struct, frozen=True, array_like=True):
    """A step that has been committed: when, how long it kept the device from the next one (seconds), its rows and tokens."""

    number: int
    at: float
    seconds: float
    rows: int
    tokens: int
    graph: bool


class LiveState(NamedTuple):
    """The engine between two steps. `cost` are the seconds that looking took.

    `slabs`, `owners` and `cached` are those of `page_books`. `sleep_level` is -1 while the engine is awake.
    """

    clock: float
    cost: float
    sleep_level: int
    stats: SchedulerStats
    slabs: bytes
    owners: bytes
    cached: list[bytes]
    requests: list[LiveRequest]
    steps: list[LiveStep]


class StepLog:
    """The latest committed steps.

    `watched` says whether a reader has called `after` during the last seconds; only then call `note`.
    """

    def __init__(self) -> None:
        self.watched = False
        self._until = 0.0
        self._last = 0.0
        self._count = 0
        self._steps: deque[LiveStep] = deque(maxlen=_KEPT_STEPS)

    def after(self, number: int) -> list[LiveStep]:
        """The steps that are kept with a higher number; the first one has number 1."""
        self.watched = True
        self._until = time.monotonic() + _ATTENTION_SECONDS
        return [step for step in self._steps if step.number > number]

    def note(self, plan: StepPlan, launched: float, graph: bool) -> None:
        """A step's tokens have arrived; it was launched at `launched`, on the monotonic clock."""
        now = time.monotonic()
        self._count += 1
        # With two steps in flight, a step began when the step before it ended.
        seconds = now - max(launched, self._last)
        self._steps.append(LiveStep(self._count, now, seconds, len(plan.rows), plan.num_tokens, graph))
        self._last = now
        if now > self._until:
            self.watched = False
            self._steps.clear()
