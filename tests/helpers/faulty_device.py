"""A real engine on a device in which some prompt tokens make a step fail as devices do: for good, or for want of memory.

On a CPU, which survives its faults, the same tokens raise errors of the same kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pagerunner.config import EngineArgs
from pagerunner.engine.core.core import EngineCore
from pagerunner.engine.startup.build import build_core
from pagerunner.engine.worker.worker import Worker
from pagerunner.types import StepPlan

FACTORY = "helpers.faulty_device:build"
ASSERT, ILLEGAL, OUT_OF_MEMORY = 501, 502, 503
LONG = 300  # tokens of a prompt whose step is too large for a graph
"""Prompt tokens that make a kernel's assertion fail, unmap the pages under the kernels, leave no memory beside what is used."""


class FaultyExecutor:
    """An executor whose steps fail where a prompt has one of the tokens above."""

    def __init__(self, executor: Worker, device: str) -> None:
        self._executor = executor
        self._device = torch.device(device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def run(self, plan: StepPlan) -> Any:
        """See Executor.run."""
        faults: dict[int, Callable[[], None]] = {
            ASSERT: lambda: failing_assertion(self._device),
            ILLEGAL: self._take_pages_away,
            OUT_OF_MEMORY: self._ask_for_too_much,
        }
        for row in plan.rows:
            for token in faults.keys() & set(row.tokens):
                faults[token]()
        return self._executor.run(plan)

    def _ask_for_too_much(self) -> None:
        leave_no_memory(self._device)
        torch.empty(2**28, dtype=torch.uint8, device=self._device)

    def _take_pages_away(self) -> None:
        if self._device.type == "cpu":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        arena = self._executor._sleeper._arena
        arena.unmap("kv")
        arena._bytes["kv"][:1024].sum()  # Triton asks for a pointer's device before it launches; torch doesn't


def failing_assertion(device: torch.device) -> None:
    """Launch a kernel that reads beyond its tensor's end, which torch's kernels check."""
    values = torch.zeros(4, device=device)
    values[torch.full((1,), 10**6, device=device)]


def leave_no_memory(device: torch.device) -> None:
    """Nothing more can be allocated by torch in this process."""
    if device.type == "cpu":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.0, device.index or 0)


@contextmanager
def no_memory(device: torch.device) -> Iterator[None]:
    """Inside, torch can't allocate."""
    try:
        leave_no_memory(device)
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, device.index or 0)


def build(args: EngineArgs, available: int | None = None, engine: int = 0) -> EngineCore:
    """The engine's core, with its executor replaced."""
    core = build_core(args)
    core._executor = FaultyExecutor(core._executor, args.device)  # type: ignore[assignment, arg-type]
    return core
