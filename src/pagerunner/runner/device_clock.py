"""How long the device works on steps, measured by the device's own clock."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

_KEPT = 64  # steps whose seconds nobody has taken


class Event(Protocol):
    """A moment in the device's work; torch.cuda.Event has these methods."""

    def record(self) -> None:
        """The moment is when everything launched so far has been done."""

    def query(self) -> bool:
        """Whether it has come."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this moment to a later one."""


class HostEvent:
    """The moment of `record` on a device that does everything at once: a CPU."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        """See Event."""
        self.at = time.perf_counter()

    def query(self) -> bool:
        """See Event."""
        return True

    def elapsed_time(self, end_event: HostEvent, /) -> float:
        """See Event."""
        return (end_event.at - self.at) * 1e3


class DeviceClock:
    """Adds up the time from each step's first work on the device to its last; the rest of the time it is idle.

    Costs two events a step and never waits. A step is counted when its second event is seen, at the latest two steps later. The seconds of the latest
    steps can be taken, each once.
    """

    def __init__(self, make_event: Callable[[], Event]) -> None:
        self._make_event = make_event
        self._running: deque[tuple[int, Event, Event]] = deque()
        self._timed: deque[tuple[int, float]] = deque(maxlen=_KEPT)
        self._spare: list[tuple[Event, Event]] = []
        self._busy = 0.0
        self._done = 0
        self._lock = threading.Lock()

    @classmethod
    def of(cls, device: torch.device) -> DeviceClock:
        """The clock of a device."""
        if device.type == "cuda":
            return cls(lambda: torch.cuda.Event(enable_timing=True))
        return cls(HostEvent)

    @property
    def busy_seconds(self) -> float:
        """Of all steps that are known to be done."""
        self._settle()
        return self._busy

    @property
    def steps_done(self) -> int:
        """How many steps the device has finished."""
        self._settle()
        return self._done

    def take_timed(self) -> list[tuple[int, float]]:
        """Numbers and seconds of the steps that are known to be done and haven't been taken."""
        self._settle()
        with self._lock:
            timed = list(self._timed)
            self._timed.clear()
        return timed

    @contextmanager
    def step(self, number: int = 0) -> Iterator[None]:
        """What is launched inside is one step."""
        self._settle()
        first, last = self._spare.pop() if self._spare else (self._make_event(), self._make_event())
        first.record()
        yield
        last.record()
        self._running.append((number, first, last))

    def _settle(self) -> None:
        with self._lock:  # another thread may look how far the device has come
            while self._running and self._running[0][2].query():
                number, first, last = self._running.popleft()
                seconds = first.elapsed_time(last) / 1e3
                self._timed.append((number, seconds))
                self._busy += seconds
                self._done += 1
                self._spare.append((first, last))
