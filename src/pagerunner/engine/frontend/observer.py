"""What an engine frontend tells whoever measures it."""

from __future__ import annotations

from dataclasses import dataclass

from pagerunner.engine.core.messages import SchedulerStats
from pagerunner.types import EngineRequest


@dataclass(slots=True, eq=False)
class FinishedSequence:
    """A sequence that has ended, and why. Times are monotonic seconds. A time that it didn't reach is 0."""

    request: EngineRequest
    reason: str = ""
    generation_tokens: int = 0
    cached_tokens: int = 0
    arrival: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    end: float = 0.0
    preemptions: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, cached ones included."""
        return len(self.request.prompt_token_ids)

    def times(self) -> dict[str, float]:
        """Seconds in the waiting line, to the first token, after it, and in all after the line; for a sequence with tokens."""
        return {
            "queue": self.admitted - self.arrival,
            "prefill": self.first_token - self.admitted,
            "decode": self.last_token - self.first_token,
            "inference": self.last_token - self.admitted,
        }

    @property
    def is_first(self) -> bool:
        """Whether this is the first of its request's n sequences."""
        return self.request.request_id in (self.request.parent_id, f"{self.request.parent_id}_0")


class EngineObserver:
    """Called on the frontend's event loop, so each call must be quick. This one ignores everything; times are in seconds."""

    def of_engine(self, index: int) -> EngineObserver:
        """What is told of engine `index`, where there are several. This one is told of all."""
        return self

    def on_started(self, request: EngineRequest) -> None:
        """A sequence is about to be sent to the core; the caller's context is that of its request."""

    def on_dropped(self, request: EngineRequest) -> None:
        """The core has refused the sequence, or is gone: it will not finish."""

    def on_stats(self, stats: SchedulerStats) -> None:
        """The core's latest gauges and running totals."""

    def on_step(self, prompt_tokens: int, cached_tokens: int, generation_tokens: int, external_tokens: int = 0) -> None:
        """One step's tokens; a prompt (and the part of it found in the cache) counts when its first token comes.

        Of the cached tokens' pages `external_tokens` came from another memory.
        """

    def on_first_token(self, seconds: float) -> None:
        """A sequence's first token, measured from its request's arrival."""

    def on_inter_token(self, seconds: float, count: int = 1) -> None:
        """Time between two tokens of one sequence, or of each of `count` sequences: those that run side by side have the same times."""

    def on_finished(self, sequence: FinishedSequence) -> None:
        """A sequence has ended."""

    def on_sleep(self, level: int | None) -> None:
        """The engine has gone to sleep at this level, or is awake again (None)."""

    def on_health(self, well: bool) -> None:
        """Whether the engine makes progress, or hangs. Told every few seconds while its core lives."""

    def on_death(self) -> None:
        """The engine's core has ended."""
