"""Per-sequence times and token counts on the frontend's side, reported to an EngineObserver."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from pagerunner.engine.frontend.observer import EngineObserver, FinishedSequence
from pagerunner.types import EngineRequest, RequestUpdate


@dataclass(slots=True, eq=False)
class _Progress(FinishedSequence):
    """What is known of a sequence before it has ended."""

    queued: bool = True


class ProgressMeter:
    """Knows every unfinished sequence and when the engine last gave a sign of life."""

    def __init__(self, observer: EngineObserver) -> None:
        self._observer = observer
        self._sequences: dict[str, _Progress] = {}
        self.queued = self.queued_tokens = 0  # sequences without a first token, and their prompts' tokens
        self._progress_at = time.monotonic()
        self._asked = False

    @property
    def unfinished(self) -> int:
        """How many sequences the core still owes tokens."""
        return len(self._sequences)

    def __contains__(self, sequence_id: str) -> bool:
        return sequence_id in self._sequences

    def touch(self) -> None:
        """The engine has just given a sign of life."""
        self._progress_at = time.monotonic()
        self._asked = False

    def ask(self) -> None:
        """The engine has been asked for a sign of life, whether it has something to do or not."""
        if not (self._sequences or self._asked):
            self._progress_at = time.monotonic()
        self._asked = True

    def is_unheard(self, seconds: float) -> bool:
        """Whether there was no sign of life for so many seconds, and none has been asked for."""
        return not self._asked and time.monotonic() - self._progress_at > seconds

    def stalled_seconds(self) -> float:
        """Seconds without a sign of life while one is due; 0 when the engine has nothing to do and wasn't asked."""
        return time.monotonic() - self._progress_at if self._sequences or self._asked else 0.0

    def started(self, requests: Iterable[EngineRequest], arrival: float) -> None:
        """Count sequences from now on. `arrival` is the monotonic time at which their request came."""
        if not (self._sequences or self._asked):
            self.touch()
        for request in requests:
            self._sequences[request.request_id] = _Progress(request, arrival=arrival)
            self.queued += 1
            self.queued_tokens += len(request.prompt_token_ids)
            self._observer.on_started(request)

    def dropped(self, sequence_ids: Iterable[str]) -> None:
        """The core refused these sequences, or is gone. They will not finish."""
        for sequence_id in sequence_ids:
            sequence = self._sequences.pop(sequence_id, None)
            if sequence is not None:
                self._leave_queue(sequence)
                self._observer.on_dropped(sequence.request)

    def stopped(self, sequence_id: str) -> None:
        """The frontend has ended this sequence itself, at a stop string; later updates of it don't count."""
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None:
            self._finish(sequence, "stop", time.monotonic())

    def clear(self) -> None:
        """The core is gone and owes nothing any more."""
        self.dropped(list(self._sequences))

    def advanced(self, updates: Iterable[RequestUpdate]) -> None:
        """Measure the updates of one step."""
        self.touch()
        now = self._progress_at
        prompt = cached = external = generated = 0
        gaps: dict[float, int] = {}
        for update in updates:
            sequence = self._sequences.get(update.request_id)
            if sequence is None:
                continue
            sequence.preemptions = update.num_preemptions
            count = len(update.new_token_ids)
            if count or update.pooled is not None:
                if sequence.generation_tokens == 0:
                    self._leave_queue(sequence)
                    sequence.first_token = now
                    sequence.admitted = update.admitted_time
                    sequence.cached_tokens = update.num_cached_tokens
                    prompt += len(sequence.request.prompt_token_ids)
                    cached += update.num_cached_tokens
                    external += update.num_external_computed_tokens
                    self._observer.on_first_token(now - sequence.arrival)
                else:
                    gap = (now - sequence.last_token) / count  # tokens of one step come together
                    gaps[gap] = gaps.get(gap, 0) + count
                generated += count
                sequence.last_token = now
                sequence.generation_tokens += count
            if update.finish_reason is not None:
                del self._sequences[update.request_id]
                self._finish(sequence, update.finish_reason, now)
        for gap, times in gaps.items():
            self._observer.on_inter_token(gap, times)
        if prompt or generated:
            self._observer.on_step(prompt, cached, generated, external)

    def _leave_queue(self, sequence: _Progress) -> None:
        if sequence.queued:
            sequence.queued = False
            self.queued -= 1
            self.queued_tokens -= len(sequence.request.prompt_token_ids)

    def _finish(self, sequence: _Progress, reason: str, now: float) -> None:
        self._leave_queue(sequence)
        sequence.reason, sequence.end = reason, now
        self._observer.on_finished(sequence)
