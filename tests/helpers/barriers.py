"""What warps of a kernel in Gluon wait for, where its warps are threads of Python."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor
from types import SimpleNamespace
from typing import Any

from helpers.patience import LONG


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes have come."""

    def __init__(self, count: int, changed: threading.Condition) -> None:
        self.count, self.changed = count, changed
        self.missing, self.bytes, self.phase = count, 0, 0

    def came(self, arrived: int, tokens: int) -> None:
        """`tokens` bytes more are expected, or have come if negative."""
        with self.changed:
            self.missing -= arrived
            self.bytes += tokens
            assert self.missing >= 0, "more have arrived than are counted"
            if self.missing == 0 and self.bytes == 0:
                self.missing, self.phase = self.count, self.phase + 1
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase & 1 != parity, timeout=LONG), "a wait without an end"


class Room(list[Any]):
    """What lies in shared memory, by its first index."""

    index = list.__getitem__


def waits(copies: Executor, bring: Callable[..., None]) -> dict[str, Any]:
    """What a kernel's module knows of barriers and of the copy engine, whose copies `bring` is and `copies` begins."""
    barriers = SimpleNamespace(
        wait=lambda barrier, parity: barrier.wait(int(parity)), arrive=lambda barrier: barrier.came(1, 0),
        expect=lambda barrier, size: barrier.came(1, size),
    )  # fmt: skip
    copy = SimpleNamespace(async_copy_global_to_shared=lambda *given: copies.submit(bring, *given))
    return {"mbarrier": barriers, "tma": copy, "wait_turn": lambda PDL: None}
