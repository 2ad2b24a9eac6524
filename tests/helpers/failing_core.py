"""A real engine core over an executor without a model: every sampled token is 7, and some prompt tokens make it fail."""

from __future__ import annotations

import time
from functools import partial

import torch

from pagerunner.config import EngineArgs
from pagerunner.engine.core.core import EngineCore
from pagerunner.engine.startup.build import build_scheduler
from pagerunner.engine.startup.resolve import resolve
from pagerunner.errors import CapacityError
from pagerunner.types import StepPlan, StepResult

FACTORY = "helpers.failing_core:build"
STEP_SECONDS = 0.003  # so that long answers don't end before their readers look for the first token
IN_RUN, IN_RESULT, OUT_OF_MEMORY, HANG = 2001, 2002, 2003, 2004
"""Prompt tokens that make launching a step raise, reading it raise, launching it run out of device memory, reading it hang."""


class _Pending:
    in_graph = False

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan

    def result(self) -> StepResult:
        if _has(self._plan, IN_RESULT):
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")
        if _has(self._plan, HANG):
            _wait_for_a_device_that_never_answers()
        time.sleep(STEP_SECONDS)
        return StepResult(step_id=self._plan.step_id, token_ids=[[7] if row.samples else [] for row in self._plan.rows])


class FailingExecutor:
    """See Executor. Has no host memory for the weights, as level 1 wants it."""

    sleep_level = None
    busy_seconds = 0.0
    failure_fd = None

    def check_alive(self) -> None:
        pass

    def close(self) -> None:
        pass

    def run(self, plan: StepPlan) -> _Pending:
        if _has(plan, IN_RUN):
            raise RuntimeError("CUDA error: device-side assert triggered")
        if _has(plan, OUT_OF_MEMORY):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. 1.00 GiB is free.")
        return _Pending(plan)

    def prepare_sleep(self, level: int) -> None:
        if level == 1:
            raise CapacityError("Sleep level 1 keeps the weights in host memory.")

    def sleep(self, level: int) -> None:
        raise NotImplementedError

    def wake_up(self, tags: object) -> None:
        raise NotImplementedError


def _wait_for_a_device_that_never_answers() -> None:
    time.sleep(3600)


def _has(plan: StepPlan, token: int) -> bool:
    return any(token in row.tokens for row in plan.rows)


def build(args: EngineArgs, available: int | None = None, engine: int = 0) -> EngineCore:
    """A core for `args.model`, of which only config.json is read."""
    resolved = resolve(args, 256 * 2**20)
    return EngineCore(
        partial(build_scheduler, resolved.config, resolved.plan),
        FailingExecutor(),
        resolved.plan,
        vocab_size=resolved.model.vocab_size,
        max_in_flight=2,
        enable_sleep_mode=True,
    )
