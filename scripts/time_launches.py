"""What Python does to launch a step's kernels, without a device: `python scripts/time_launches.py --shape qwen3-0.6b`.

Runs eager steps and decode steps of the GPU's code on CPU tensors, with Triton's own launching code in place, but nothing
compiled or launched, and products left out. Prints the processor time of one step and the number of Python calls in a
layer; with `--top`, where they are. A device adds some microseconds of C for each launch and each product.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import gc
import importlib
import io
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import pagerunner.engine.worker.build as build
from pagerunner import LLM, SamplingParams
from pagerunner.bench.shapes import SHAPES
from pagerunner.bench.workloads import write_model
from pagerunner.ops.dispatch import Op
from pagerunner.runner.runner import ModelRunner
from pagerunner.types import EngineRequest, SlotInit, StepPlan, StepRow
from time_host import NoGraphs, no_work

TOKENS = 272  # of an eager step: more than graphs are captured for


class NoDriver:
    """Triton's driver of a device that isn't there."""

    def get_current_device(self) -> int:
        """The first."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default one."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """A Hopper."""
        return GPUTarget("cuda", 90, 32)


def compile_nothing(function: Any, key: Any, signature: Any, device: int, *rest: Any) -> Any:
    """In the place of `JITFunction._do_compile`: a kernel whose launch does nothing."""
    kernel = SimpleNamespace(
        function=1, packed_metadata=(), metadata=None, launch_metadata=lambda *args: None, run=lambda *args: None
    )
    function.device_caches[device][0][key] = kernel
    return kernel


class Products:
    """Products of the right shapes, in memory that is used again."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], torch.Tensor] = {}

    def linear(self, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """In the place of torch's."""
        key = x_TI.shape[0], weight_OI.shape[0]
        if key not in self._made:
            self._made[key] = torch.zeros(key, dtype=x_TI.dtype)
        return self._made[key]

    def linear_add_(self, x_TI: torch.Tensor, weight_OI: torch.Tensor, residual_TO: Any, bias_O: Any = None) -> None:
        """In the place of the kernel's, which leaves so many tokens to torch."""
        weight_OI.t()


def _always(value: Any, device: torch.device) -> Any:
    return value


def pretend() -> None:
    """Make operations take their way on a Hopper, up to where something would be launched."""
    cast(Any, driver).set_active(NoDriver())
    cast(Any, JITFunction)._do_compile = compile_nothing
    for name in (
        "activation",
        "batch",
        "linear.linear",
        "norm",
        "paged.paged_attention",
        "paged.paged_store",
        "rope",
        "sampling.sample",
        "tables",
    ):
        module: Any = importlib.import_module(f"pagerunner.ops.kernels.{name}")
        for fact, value in (
            ("dependent", {"PDL": True, "launch_pdl": True}),
            ("_capability", (9, 0)),
            ("multiprocessors", 132),
        ):
            if hasattr(module, fact):
                setattr(module, fact, functools.partial(_always, value))
    linear: Any = importlib.import_module("pagerunner.ops.kernels.linear.linear")
    products = Products()
    linear.F = SimpleNamespace(linear=products.linear)
    linear.linear_add_ = products.linear_add_
    cast(Any, Op).__call__ = lambda op, *args, **kwargs: op.kernel(*args, **kwargs)


def make_runner(folder: Path, shape: str, rows: int) -> Any:
    """A runner with the layers and heads of a shape, and few features; graphs do nothing."""
    cast(Any, build).graph_engine = lambda device: NoGraphs()
    cast(Any, ModelRunner).warm_up = lambda self, progress=None, name="": None
    work = ModelRunner._work
    cast(Any, ModelRunner)._work = no_work
    SHAPES["narrow"] = {**SHAPES[shape], "hidden_size": 16, "intermediate_size": 16, "vocab_size": 10_240}
    llm = LLM(
        str(write_model("narrow", folder)),
        device="cpu",
        dtype="bfloat16",
        load_format="dummy",
        skip_tokenizer_init=True,
        attention_backend="triton",
        max_num_seqs=max(rows, 8),
        max_num_batched_tokens=512,
        max_model_len=2048,
        max_in_flight=2,
        num_gpu_blocks_override=1000,
        cudagraph_capture_sizes=[rows],
    )
    cast(Any, ModelRunner)._work = work
    return cast(Any, llm)._core._executor


def admit(executor: Any, rows: int) -> None:
    """Let greedy requests take slots."""
    params = SamplingParams(temperature=0.0)
    for slot in range(rows):
        request = EngineRequest(request_id=str(slot), prompt_token_ids=[5] * 16, params=params, seed=0, max_tokens=4)
        executor._runner._sampler.init_slot(SlotInit(slot, request, []))
    executor._runner._builder.tensors.row_T.zero_()  # of padding, until a kernel says otherwise


def measure(name: str, run: Callable[[StepPlan], Any], make: Callable[[int], StepPlan], layers: int, top: int) -> None:
    """Print one line, and with `top` a profile."""
    seconds = []
    for step in range(300):
        plan = make(step)
        started = time.thread_time()
        pending = run(plan)
        seconds.append(time.thread_time() - started)
        pending.result()
    profile = cProfile.Profile()
    profile.enable()
    for step in range(20):
        run(make(step)).result()
    profile.disable()
    text = io.StringIO()
    stats = pstats.Stats(profile, stream=text)
    calls = cast(Any, stats).total_calls / 20 / layers
    print(f"{name}: {statistics.median(seconds) * 1e6:.0f} us, {calls:.0f} calls{' a layer' if layers > 1 else ''}")
    if top:
        stats.sort_stats("tottime").print_stats(top)
        print(text.getvalue())


def main() -> None:
    """Print a line for eager steps, and one for each number of decode rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[name for name in SHAPES if name.startswith("qwen3")], default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--top", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        executor = make_runner(Path(folder), given.shape, given.rows)
    pretend()
    admit(executor, max(given.rows, 8))
    gc.disable()
    layers = SHAPES[given.shape]["num_hidden_layers"]

    def eager(step: int) -> StepPlan:
        rows = [StepRow(slot, 16 * (slot % 2), TOKENS // 8, [5] * (TOKENS // 8), True) for slot in range(8)]
        return StepPlan(step_id=step, rows=rows)

    def decode(rows: int) -> Callable[[int], StepPlan]:
        return lambda step: StepPlan(
            step_id=step, rows=[StepRow(slot, 50 + step % 100, 1, [], True) for slot in range(rows)]
        )

    measure("eager step", executor.run, eager, layers, given.top)
    for rows in sorted({1, given.rows}):
        measure(f"decode step, {rows} rows", executor.run, decode(rows), 1, given.top)


if __name__ == "__main__":
    main()
