"""What a scheduler counts, beside what its memory does."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagerunner.memory.stats import MemoryStats
from pagerunner.sched.live import Wait


class SchedulerStats(MemoryStats, frozen=True, kw_only=True):
    """Counts at one moment, as `LLM.stats()` returns them and the server's metrics read them.

    `waiting_for` says why the first waiting sequence waits. The engine fills in `busy_seconds` of the device. With several teams of ranks
    `teams` has each team's counts.
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

    def carried_on(self) -> SchedulerCounts:
        """The same counts for a scheduler that has not run a step yet."""
        return replace(self, last_step_tokens=0)
