"""What each step of an engine costs the host, counted rather than timed: graphs, launches, copies, waits.

Works with the recorded graphs of helpers/graphs.py. A launch is an operation of torch, or one of `pagerunner.ops` that has
a kernel, outside graphs; a replay is none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.graphs import RecordedGraph
from pagerunner.ops import async_copy
from pagerunner.ops.dispatch import Op
from pagerunner.runner.runner import ModelRunner
from pagerunner.runner.staging import _Buffers

_VIEWS = {"view", "_unsafe_view", "slice", "select", "expand", "unsqueeze", "squeeze", "t", "transpose", "split",
          "split_with_sizes", "as_strided", "detach", "alias", "permute", "unbind", "_reshape_alias"}  # fmt: skip
_READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")


@dataclass
class StepCost:
    """One step: rows, whether it ran in a graph and sampled every row of one token, or of one and its drafts, launches, copies to the device and to
    the host, and how often the launch looked at a tensor's value, which on a device waits for it."""

    rows: int
    in_graph: bool
    decode: bool
    launches: int = 0
    to_device: int = 0
    to_host: int = 0
    waits: int = 0


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.step: StepCost | None = None
        self.hidden = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and switching the compiler off is half of a call's time

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if self.step is not None and not self.hidden and func.overloadpacket.__name__ not in _VIEWS:
            self.step.launches += 1
        return func(*args, **(kwargs or {}))

    def add(self, field: str) -> None:
        if self.step is not None and not self.hidden:
            setattr(self.step, field, getattr(self.step, field) + 1)

    @contextmanager
    def one(self, field: str | None) -> Iterator[None]:
        """Whatever happens inside counts as one of `field`."""
        if field is not None:
            self.add(field)
        self.hidden += 1
        try:
            yield
        finally:
            self.hidden -= 1

    def wrapped(self, function: Callable[..., Any], field: str | None) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.one(field):
                return function(*args, **kwargs)

        return call

    def noted(self, function: Callable[..., Any], field: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.add(field)
            return function(*args, **kwargs)

        return call


@contextmanager
def counted_steps() -> Iterator[list[StepCost]]:
    """The costs of all steps that engines run inside."""
    counter, steps, run = _Counter(), [], ModelRunner.run
    to_device, bits, put = async_copy.to_device, async_copy.bits_to_device, async_copy.put

    def counted_run(self: ModelRunner, plan: Any) -> Any:
        alone = all((row.num_tokens == 1 or not row.tokens) and row.samples for row in plan.rows)
        counter.step = StepCost(len(plan.rows), False, alone)
        with counter:
            pending = run(self, plan)
        counter.step.in_graph = pending.in_graph
        steps.append(counter.step)
        counter.step = None
        return pending

    patches: list[Any] = [
        patch.object(ModelRunner, "run", counted_run),
        patch.object(RecordedGraph, "replay", counter.wrapped(RecordedGraph.replay, None)),
        patch.object(Op, "__call__", counter.wrapped(Op.__call__, "launches")),
        patch.object(_Buffers, "send", counter.wrapped(_Buffers.send, "to_device")),
        patch.object(async_copy.ToHost, "__init__", counter.wrapped(async_copy.ToHost.__init__, "to_host")),
        patch.object(async_copy.BestCopies, "copy", counter.wrapped(async_copy.BestCopies.copy, "to_host")),
    ]
    patches += [
        patch.object(module, name, counter.wrapped(function, "to_device"))
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith("pagerunner")
        for name, function in (("to_device", to_device), ("bits_to_device", bits), ("put", put))
        if getattr(module, name, None) is function
    ]
    patches += [
        patch.object(torch.Tensor, name, counter.noted(getattr(torch.Tensor, name), "waits")) for name in _READS
    ]
    for each in patches:
        each.start()
    try:
        yield steps
    finally:
        for each in reversed(patches):
            each.stop()
