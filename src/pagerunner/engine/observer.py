"""What an engine frontend tells whoever measures it, and the observer that ignores it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from pagerunner.engine.messages import EngineStats


class FinishedSequence(NamedTuple):
    """One finished sequence: why it ended, its lengths in tokens, and seconds from arrival to its end."""

    reason: str
    prompt_tokens: int
    generation_tokens: int
    seconds: float


class EngineObserver(Protocol):
    """Called on the frontend's event loop, so each call must be quick. Times are in seconds."""

    def on_stats(self, stats: EngineStats) -> None:
        """The core's latest gauges and running totals."""

    def on_step(self, prompt_tokens: int, cached_tokens: int, generation_tokens: int) -> None:
        """One step's tokens; a prompt (and the part of it found in the cache) counts when its first token comes."""

    def on_first_token(self, seconds: float) -> None:
        """A sequence's first token, measured from its request's arrival."""

    def on_inter_token(self, seconds: float) -> None:
        """Time between two tokens of one sequence."""

    def on_finished(self, sequence: FinishedSequence) -> None:
        """A sequence has ended."""


class NullObserver:
    """Measures nothing."""

    def on_stats(self, stats: EngineStats) -> None:
        """Ignored."""

    def on_step(self, prompt_tokens: int, cached_tokens: int, generation_tokens: int) -> None:
        """Ignored."""

    def on_first_token(self, seconds: float) -> None:
        """Ignored."""

    def on_inter_token(self, seconds: float) -> None:
        """Ignored."""

    def on_finished(self, sequence: FinishedSequence) -> None:
        """Ignored."""
