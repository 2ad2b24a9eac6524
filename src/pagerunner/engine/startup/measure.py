"""What a start took: seconds by phase, and device memory by use, from which the pages' share follows."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pagerunner.engine.core.messages import StartUp
from pagerunner.engine.startup.machine import DeviceMemory
from pagerunner.errors import CapacityError
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.planner import refit
from pagerunner.memory.units import human_bytes
from pagerunner.ops.device_errors import full_device_said
from pagerunner.runner.cuda_driver import Driver


class StartMeter:
    """Times the phases of a start and, with a `driver`, measures the device memory that each one takes."""

    def __init__(self, driver: Driver | None, free_before: int | None = None) -> None:
        """`free_before`: free bytes of the device before the engine took any (default: those of now)."""
        self._driver = driver
        self._seconds: dict[str, float] = {}
        self._taken: dict[str, int] = {}
        self.loaded_bytes = 0
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
        return StartUp(dict(self._seconds), memory, self.loaded_bytes)

    def _out_of_memory(self, phase: str, reason: str) -> str:
        gc.collect()
        where = f"Out of device memory in the start-up phase {phase!r} ({reason})"
        if self._driver is None:
            return f"{where}; lower max_num_batched_tokens or max_num_seqs."
        free, total = self._driver.memory()
        taken = {
            name: size for name, size in self._taken.items() if size > 0
        }  # other processes may have given back more
        used = ", ".join(f"{name} {human_bytes(size)}" for name, size in taken.items()) or "nothing"
        return (
            f"{where}: {human_bytes(free)} of the device's {human_bytes(total)} are free, and this engine has taken "
            f"{used} before; free memory on the device, or lower max_num_batched_tokens or max_num_seqs."
        )


DRIVER_BYTES = 32 * 2**20
"""Of a device's free memory, what its driver keeps for itself (page tables of what it maps), and doesn't hand out."""


def final_plan(
    plan: MemoryPlan,
    taken: dict[str, int],
    card: DeviceMemory,
    free: int,
    utilization: float,
    *,
    fixed: bool,
    auto: bool,
) -> MemoryPlan:
    """The plan for what is really left, once everything but the pages has been allocated.

    Args:
        plan: made from an upper bound. Its bytes that are mapped already are in `taken`, as "pages".
        taken: device bytes by use, measured.
        card: the device before the engine took any of it.
        free: free bytes of the device now.
        utilization: share of the device that the engine may use in all.
        fixed: the pages were asked for by number or bytes, and `utilization` doesn't limit them.
        auto: max_model_len follows from the memory.

    Raises:
        CapacityError: with the numbers, when what is left can't hold what was asked for.
    """
    other = tuple((name, size) for name, size in taken.items() if name != "pages" and size > 0)
    free = max(free - DRIVER_BYTES, 0)
    mapped = taken.get("pages", 0)
    used = sum(size for _, size in other)
    room = free + mapped if fixed else min(free + mapped, int(card.total * utilization) - used)
    if fixed and plan.kv_bytes > room:
        raise CapacityError(
            f"The pages asked for take {human_bytes(plan.kv_bytes)}, but {human_bytes(max(room, 0))} of the device's "
            f"{human_bytes(card.total)} are left beside {_listed(other)}; lower num_gpu_blocks_override or "
            "kv_cache_memory_bytes."
        )
    if room < plan.first_bytes:
        raise CapacityError(
            f"gpu_memory_utilization={utilization} of the device's {human_bytes(card.total)} is "
            f"{human_bytes(int(card.total * utilization))}; with {_listed(other)} and {human_bytes(free + mapped)} left on "
            "the device, there is no room for pages; raise gpu_memory_utilization, free memory on the device, or lower "
            "max_num_batched_tokens or max_num_seqs."
        )
    return refit(plan, plan.kv_bytes if fixed else room, other, auto=auto)


def _listed(other: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{human_bytes(size)} of {name}" for name, size in other) or "nothing else"
