"""What keeps Python's garbage collector from stopping a running engine.

A collection of the oldest generation looks through every container of the process. With torch and Triton these are half a
million, and a collection takes a tenth of a second. A step of many requests makes many short-lived lists. So such a collection
happens every few hundred steps, though reference counts free all of these lists.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 10_000
"""Containers made and not freed before the youngest generation is looked through: more than steps in flight have."""
OLD = 100
"""Collections of the middle generation before one of the oldest."""


class _Seldom:
    """Raises the thresholds of the whole process, and sets apart what was made before, as long as at least one user wants that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = 0
        self._before = (0, 0, 0)
        self._set = (0, 0, 0)
        self._froze = self._others_froze = False

    def begin(self) -> None:
        with self._lock:
            self._wanted += 1
            if self._wanted == 1:
                young, middle, old = self._before = gc.get_threshold()
                if young:  # 0 switches collections off
                    gc.set_threshold(max(young, YOUNG), middle, max(old, OLD))
                self._set = gc.get_threshold()
                # Else other code has, and wants it to stay so. Of a process with torch, counting that takes 0.1 s: it isn't counted again.
                self._froze = not self._others_froze and not gc.get_freeze_count()
                self._others_froze = not self._froze
                if self._froze:
                    gc.freeze()  # moves lists as a whole: it costs nothing, and neither does `unfreeze`

    def end(self) -> None:
        with self._lock:
            self._wanted -= 1
            if not self._wanted and self._froze:
                gc.unfreeze()
            if not self._wanted and gc.get_threshold() == self._set:  # or other code has set thresholds meanwhile
                gc.set_threshold(*self._before)


_seldom = _Seldom()


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Inside, collections are rarer and pass over all objects made before: of a process with torch, a full one takes 0.1 s without that.

    Afterwards all is as it was, so what the user's program drops can be collected again, engines too.
    """
    _seldom.begin()
    try:
        yield
    finally:
        _seldom.end()


@contextmanager
def set_apart() -> Iterator[None]:
    """For a process of the engine's own, once it is ready. Inside, collections are rarer and pass over all objects made before.

    Not for a user's process, whose older objects may have to be collected.
    """
    gc.collect()
    gc.freeze()
    try:
        with seldom_collected():
            yield
    finally:
        gc.unfreeze()
