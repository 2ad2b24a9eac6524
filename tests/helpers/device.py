"""Where the tests of tests/gpu run: on a CUDA device, or with PAGERUNNER_TEST_DEVICE=cpu the same code on a CPU.

On a CPU, steps read page tables by the kernels' twins, and graphs are records of what torch was asked to do.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch

from helpers.graphs import RecordedGraphs
from pagerunner import LLM
from pagerunner.attention import select
from pagerunner.engine.worker import build
from pagerunner.runner.cuda_driver import CudaDriver, OutOfDeviceMemory
from pagerunner.runner.graphs import CudaGraphs, StepGraphs

DEVICE = os.environ.get("PAGERUNNER_TEST_DEVICE", "cuda")
ON_CUDA = DEVICE == "cuda"
MIB = 2**20
needs_cuda = pytest.mark.skipif(not ON_CUDA, reason="is about memory that only a CUDA device has")


class GraphCount:
    """How many graphs were captured and how many steps replayed one."""

    def __init__(self) -> None:
        self.captures = 0
        self.replays: list[Any] = []


@contextmanager
def counted_graphs() -> Iterator[GraphCount]:
    """Count while engines are made and run inside."""
    count = GraphCount()
    engine = CudaGraphs if ON_CUDA else RecordedGraphs
    capture, replay = engine.capture, StepGraphs.replay

    def counted_capture(self: Any, run: Any) -> Any:
        count.captures += 1
        return capture(self, run)

    def counted_replay(self: Any, captured: Any, *args: Any) -> Any:
        count.replays.append(captured.key)
        return replay(self, captured, *args)

    with patch.object(engine, "capture", counted_capture), patch.object(StepGraphs, "replay", counted_replay):
        yield count


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Engines made inside on a CPU choose backends and capture graphs as they would on a CUDA device."""
    of = build.graph_engine
    engine = lambda device: RecordedGraphs() if device.type == "cpu" else of(device)  # noqa: E731
    with patch.object(build, "graph_engine", engine), patch.dict(select.AUTO, {"cpu": select.AUTO["cuda"]}):
        yield


def device_llm(path: Any, **options: Any) -> LLM:
    """An engine on the device, with 256 MiB of pages on a CUDA device unless `options` say otherwise."""
    fixed = "kv_cache_memory_bytes" in options or "num_gpu_blocks_override" in options
    pages = {} if fixed else {"kv_cache_memory_bytes": 2**28 if ON_CUDA else 2**25}
    with as_on_cuda():
        return LLM(str(path), use_tqdm=False, **({"device": DEVICE} | pages | options))


def collect() -> None:
    """Give back what engines that are gone held: pages, weights and torch's cache."""
    gc.collect()
    if ON_CUDA:
        torch.cuda.empty_cache()


def wait_for_host_copies() -> None:
    """Wait until no thread makes or unlocks a host copy of weights."""
    for thread in threading.enumerate():
        if thread.name.startswith("pagerunner-host-copy"):
            thread.join()


def free_memory() -> int:
    """Bytes of the device that nobody holds."""
    wait_for_host_copies()
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


@contextmanager
def all_taken_but(left: int) -> Iterator[None]:
    """Inside, `left` bytes of the device are free; fewer, if the driver hands out no more of what it counts as free."""
    collect()
    driver = CudaDriver()  # torch would round up, and keep some for itself
    taken: list[Any] = []
    try:
        for piece in (2**30, driver.granularity):  # the last bytes can't be had in one piece: there are page tables too
            with suppress(OutOfDeviceMemory):
                while free_memory() - left >= piece:
                    taken.append(driver.create(piece))
        assert left - 4 * MIB <= free_memory(), "nobody else may use the device meanwhile"
        yield
    finally:
        for handle in taken:
            driver.release(handle)
        collect()
