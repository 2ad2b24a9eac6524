"""What a scheduler counts, beside what its memory does."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec

from pagerunner.memory.stats import MemoryStats
from pagerunner.sched.live import Wait
from pagerunner.tiers.stats import ExchangeStats, TierStats

STEP_PLACES = 16


class StepSizes(msgspec.Struct):
    """Steps by how many tokens they compute: in place i those of up to 2**i, and of more than 2**(i-1); in the last place all beyond."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * STEP_PLACES)
    total: int = 0

    def add(self, tokens: int) -> None:
        """Count a step."""
        self.counts[min((tokens - 1).bit_length(), STEP_PLACES - 1)] += 1
        self.total += tokens


class SchedulerStats(MemoryStats, frozen=True, kw_only=True):
    """Counts at one moment, as `LLM.stats()` returns them and the server's metrics read them.

    `waiting_for` says why the first waiting sequence waits. The engine fills in `busy_seconds` of the device. With several teams of ranks
    `teams` has each team's counts. `tier`: of the host's memory, if pages go there. `exchange`: with other engines.
    """

    running: int = 0
    waiting: int = 0
    waiting_for: Wait = ""
    preemptions_total: int = 0
    steps_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    last_step_tokens: int = 0
    busy_seconds: float = 0.0
    step_sizes: StepSizes = msgspec.field(default_factory=StepSizes)
    tier: TierStats | None = None
    exchange: ExchangeStats | None = None
    teams: list[SchedulerStats] = []


@dataclass(slots=True)
class SchedulerCounts:
    """What a scheduler has counted since it began. Only the last field counts a single step."""

    arrivals: int = 0
    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated: int = 0
    last_step_tokens: int = 0
    step_sizes: StepSizes = field(default_factory=StepSizes)

    def carried_on(self) -> SchedulerCounts:
        """The same counts for a scheduler that has not run a step yet."""
        return replace(self, last_step_tokens=0)
