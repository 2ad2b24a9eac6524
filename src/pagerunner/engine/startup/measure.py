"""What a start took: seconds by phase, and device memory by use, from which the pages' share follows."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter

import msgspec

from pagerunner.engine.core.messages import StartUp
from pagerunner.errors import CapacityError
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.planner import refit
from pagerunner.memory.units import human_bytes
from pagerunner.ops.device_errors import full_device_said
from pagerunner.runner.cuda_driver import Driver
from pagerunner.types.steps import MeasuredSteps


class StartMeter:
    """Times the phases of a start and, with a `driver`, measures the device memory that each one takes."""

    def __init__(self, driver: Driver | None, free_before: int | None = None) -> None:
        """`free_before`: free bytes of the device before the engine took any (default: those of now)."""
        self._driver = driver
        self._seconds: dict[str, float] = {}
        self._taken: dict[str, int] = {}
        self.loaded_bytes = 0
        self.steps = MeasuredSteps()
        self._free = 0
        if driver is not None:
            self._free = driver.memory()[0] if free_before is None else free_before

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Count time that was measured elsewhere."""
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    @contextmanager
    def phase(self, name: str, memory: str | None = None) -> Iterator[None]:
        """Time what runs inside as phase `name`, and count the device memory it takes as `memory` (default: `name`).

        Raises CapacityError for a phase that ran out of device memory, with the numbers.
        """
        started = time.perf_counter()
        with full_device_said(lambda reason: self._out_of_memory(name, reason)):
            yield
        if self._driver is not None:
            self._driver.synchronize()
            free = self._driver.memory()[0]
            use = memory or name
            self._taken[use] = self._taken.get(use, 0) + self._free - free
            self._free = free
        self.add_seconds(name, time.perf_counter() - started)

    @property
    def taken(self) -> dict[str, int]:
        """Device bytes by use so far. They include memory that other processes took or gave back meanwhile."""
        return dict(self._taken)

    def report(self) -> StartUp:
        """What has been measured."""
        memory = dict(self._taken)
        if self._driver is not None:
            memory["free"] = self._driver.memory()[0]
        return StartUp(dict(self._seconds), memory, self.loaded_bytes, self.steps)

    def facts(self, rank: int) -> MemoryFacts:
        """What has been measured, for the plan of the pages. Only with a `driver`."""
        if self._driver is None:
            raise RuntimeError("a worker without a device of its own has measured nothing")
        free, total = self._driver.memory()
        return MemoryFacts(rank=rank, total=total, free=free, taken=self.taken)

    def _out_of_memory(self, phase: str, reason: str) -> str:
        gc.collect()
        where = f"Out of device memory in the start-up phase {phase!r} ({reason})"
        if self._driver is None:
            return f"{where}; lower max_num_batched_tokens or max_num_seqs."
        free, total = self._driver.memory()
        # other processes may have given back more
        taken = {name: size for name, size in self._taken.items() if size > 0}
        used = ", ".join(f"{name} {human_bytes(size)}" for name, size in taken.items()) or "nothing"
        return (
            f"{where}: {human_bytes(free)} of the device's {human_bytes(total)} are free, and this engine has taken "
            f"{used} before; free memory on the device, or lower max_num_batched_tokens or max_num_seqs."
        )


class MemoryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank has measured of its device when everything but the pages was allocated. All numbers are bytes.

    `total` is the whole device, `free` what is free now. `taken` is what the rank took, by use; "pages" are those that are mapped already.
    """

    rank: int
    total: int
    free: int
    taken: dict[str, int]

    @property
    def other(self) -> tuple[tuple[str, int], ...]:
        """What the rank took for other things than pages."""
        return tuple((name, size) for name, size in self.taken.items() if name != "pages" and size > 0)

    @property
    def left(self) -> int:
        """What pages can be had from: those that are mapped already, and what the driver hands out."""
        return max(self.free - DRIVER_BYTES, 0) + self.taken.get("pages", 0)

    def room(self, utilization: float) -> int:
        """What pages may take where the engine takes at most the share `utilization` of the device."""
        return min(self.left, int(self.total * utilization) - sum(size for _, size in self.other))


DRIVER_BYTES = 32 * 2**20
"""Of a device's free memory, what its driver keeps for itself (page tables of what it maps), and doesn't hand out."""


def final_plan(
    plan: MemoryPlan, ranks: Sequence[MemoryFacts], utilization: float, *, fixed: bool, auto: bool
) -> MemoryPlan:
    """The plan for what is really left on the fullest device, once everything but the pages has been allocated.

    All ranks have equally many pages, as they run the same steps. `plan` as it is if nothing was measured.

    Args:
        plan: made from an upper bound.
        ranks: what each rank has measured.
        utilization: share of each device that the engine may use in all.
        fixed: the pages were asked for by number or bytes, and `utilization` doesn't limit them.
        auto: max_model_len follows from the memory.

    Raises:
        CapacityError: with the numbers, when what is left can't hold what was asked for. Of several ranks it names the fullest.
    """
    if not ranks:
        return plan
    rooms = [facts.left if fixed else facts.room(utilization) for facts in ranks]
    room, facts = min(zip(rooms, ranks, strict=True), key=itemgetter(0))
    where = f"Rank {facts.rank} of {len(ranks)}: " if len(ranks) > 1 else ""
    total, other, left = facts.total, facts.other, facts.left
    if fixed and plan.kv_bytes > room:
        raise CapacityError(
            f"{where}The pages asked for take {human_bytes(plan.kv_bytes)}, but {human_bytes(max(room, 0))} of the device's "
            f"{human_bytes(total)} are left beside {_listed(other)}; lower num_gpu_blocks_override or "
            "kv_cache_memory_bytes."
        )
    if room < plan.first_bytes:
        raise CapacityError(
            f"{where}gpu_memory_utilization={utilization} of the device's {human_bytes(total)} is "
            f"{human_bytes(int(total * utilization))}; with {_listed(other)} and {human_bytes(left)} left on "
            "the device, there is no room for pages; raise gpu_memory_utilization, free memory on the device, or lower "
            "max_num_batched_tokens or max_num_seqs."
        )
    return refit(plan, plan.kv_bytes if fixed else room, other, auto=auto)


def _listed(other: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{human_bytes(size)} of {name}" for name, size in other) or "nothing else"
