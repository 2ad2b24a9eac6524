"""Pauses of threads that read adapters, so that the thread that runs the steps gets the interpreter's lock.

An adapter of experts has tensors by the ten thousand, and Python's work on each holds that lock. A thread that wants it waits for 5 ms before another one has
to give it up. A step wants it again after each call that gave it up, and there are dozens: beside a thread that only computes it takes a tenth of
a second longer. A thread that gives the lock up by itself, before those 5 ms, makes it wait for a fraction of a millisecond.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
MOST_AT_ONCE = 64
"""Items between two pauses: 0.3 ms of work at 5 us each."""
SECONDS = 0.0002
"""Of a pause."""


def pause(seconds: float = 0.0) -> None:
    """Let others have the lock: they have asked for it before this ends."""
    time.sleep(max(SECONDS, seconds))


def in_turns(items: Iterable[Item]) -> Iterator[Item]:
    """The items, with pauses between."""
    for number, item in enumerate(items, 1):
        yield item
        if number % MOST_AT_ONCE == 0:
            pause()
