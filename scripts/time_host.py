"""What the host does for a workload, without a device: `python scripts/time_host.py --workload mixed256`.

`LLM.generate` runs a benchmark's workload on the CPU with a model that computes nothing and graphs that do nothing: the
scheduler, the memory manager, staging, the builder, the sampler and the output processor are those of a GPU's engine.
Prints the processor time of each part of a step: median, 99th percentile, the largest with the step where it was, and the
sum; and what garbage collections took. `device` are the CPU's twins of what a GPU does in one launch each. With `--coarse`
nothing is watched but the whole run and the collections.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

import pagerunner.engine.worker.build as build
import pagerunner.runner.builder as builder
from pagerunner import LLM, SamplingParams
from pagerunner.batch import ForwardBatch
from pagerunner.bench.workloads import WORKLOADS, workload, write_config
from pagerunner.engine.core.core import EngineCore
from pagerunner.engine.frontend.output_processor import OutputProcessor
from pagerunner.engine.worker.worker import Worker
from pagerunner.memory.manager import KVManager
from pagerunner.ops.batch import SlotState
from pagerunner.runner.graphs import StepGraphs, Tensors
from pagerunner.runner.pending import PendingStep
from pagerunner.runner.runner import ModelRunner
from pagerunner.runner.staging import Staging
from pagerunner.runner.tables import PageTables
from pagerunner.sched.scheduler import Scheduler

VOCAB = 10_240
HIDDEN = 64
TWINS = "device"  # what is a kernel on a GPU
INSIDE = {"process": "submit", "add": "submit", "stage": "run", "fill": "run", TWINS: "run"}


class NoGraph:
    """A graph of a decode or mixed step that does nothing when it is replayed."""

    def __init__(self, outputs: Tensors) -> None:
        self.outputs = outputs

    def replay(self) -> None:
        """Nothing."""


class NoGraphs:
    """See GraphEngine of runner/graphs.py."""

    def capture(self, run: Callable[[], Tensors]) -> NoGraph:
        """Outputs of the right shapes."""
        return NoGraph(run())


def no_work(self: ModelRunner, batch: ForwardBatch, decode: bool) -> Tensors:
    """`ModelRunner._work` without work."""
    if not decode:
        return (torch.zeros(batch.token_ids.shape[0], HIDDEN),)
    places = batch.rows.num_tokens
    tokens = torch.full((places,), 7)
    return torch.zeros(1, 1).expand(places, VOCAB), tokens, torch.zeros(places), tokens


class NoModel:
    """Hidden states and logits of zeros."""

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """[T, D]."""
        return torch.zeros(1, 1).expand(batch.token_ids.shape[0], HIDDEN)

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """[S, V]; a token's score is the same for all."""
        return torch.zeros(hidden_SD.shape[0], 8)


class Times:
    """Processor seconds of calls by part, and of the collections that interrupt them, with the step they belong to."""

    def __init__(self) -> None:
        self.calls: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self.pauses: list[tuple[float, int, int]] = []  # seconds, generation, step
        self.step = 0
        self._began = 0.0

    def clear(self) -> None:
        """Forget everything."""
        self.calls.clear()
        self.pauses.clear()
        self.step = 0

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Time every call of a function or method from now on."""
        call = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            result = call(*args, **kwargs)
            self.calls[part].append((time.thread_time() - started, self.step))
            self.step += part == "step"
            return result

        setattr(owner, name, timed)

    def note_collection(self, phase: str, info: dict[str, int]) -> None:
        """For `gc.callbacks`."""
        if phase == "start":
            self._began = time.thread_time()
        else:
            self.pauses.append((time.thread_time() - self._began, info["generation"], self.step))

    def table(self) -> str:
        """One line for each part: calls, median, 99th percentile, largest, where, sum."""
        lines = [f"{'':>16}{'calls':>8}{'median us':>11}{'p99 us':>10}{'largest':>10}{'at step':>9}{'sum ms':>9}"]
        for part, calls in self.calls.items():
            seconds = sorted(second for second, _ in calls)
            worst, step = max(calls)
            p99 = seconds[int(len(seconds) * 0.99)]
            name = f"  {part}" if part in INSIDE else part
            lines.append(
                f"{name:>16}{len(calls):>8}{statistics.median(seconds) * 1e6:>11.0f}{p99 * 1e6:>10.0f}{worst * 1e6:>10.0f}"
                f"{step:>9}{sum(seconds) * 1e3:>9.1f}"
            )
        for generation in range(3):
            found = [pause for pause in self.pauses if pause[1] == generation]
            if found:
                worst, _, step = max(found)
                lines.append(
                    f"collections of generation {generation}: {len(found)}, {sum(p[0] for p in found) * 1e3:.1f} ms, "
                    f"the longest {worst * 1e3:.2f} ms at step {step}"
                )
        return "\n".join(lines)


def watch_parts(times: Times) -> None:
    """Time the parts of a step. On a GPU, twins are launches, and results are waited for."""
    times.watch(LLM, "_submit", "submit")
    times.watch(EngineCore, "add", "add")
    times.watch(EngineCore, "step", "step")
    times.watch(Scheduler, "schedule", "schedule")
    times.watch(Scheduler, "commit", "commit")
    times.watch(Worker, "run", "run")
    times.watch(Staging, "stage", "stage")
    times.watch(PendingStep, "result", "result")
    times.watch(OutputProcessor, "take", "outputs")
    times.watch(builder, "build_rows", TWINS)
    times.watch(SlotState, "store", TWINS)
    times.watch(PageTables, "write", TWINS)
    times.watch(KVManager, "grow", "grow")
    times.watch(StepGraphs, "find", "find")


def make_llm(folder: Path, max_num_seqs: int) -> LLM:
    """An engine of the real parts around nothing."""
    write_config(
        folder,
        max_position_embeddings=40960,
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        vocab_size=VOCAB,
    )
    cast(Any, build).graph_engine = lambda device: NoGraphs()
    cast(Any, ModelRunner).warm_up = lambda self, progress=None, name="": None
    cast(Any, ModelRunner)._work = no_work
    llm = LLM(
        str(folder),
        device="cpu",
        dtype="float32",
        load_format="dummy",
        skip_tokenizer_init=True,
        attention_backend="triton",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
        max_model_len=16384,
        max_in_flight=2,
        num_gpu_blocks_override=40_000,
    )
    cast(Any, llm)._core._executor._runner._model = NoModel()
    return llm


def main() -> None:
    """Print one table for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="mixed256")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--coarse", action="store_true", help="time whole runs only")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    import triton.runtime.jit  # as in a GPU's process: what collections look through  # noqa: F401

    times = Times()
    if not given.coarse:
        watch_parts(times)
    gc.callbacks.append(times.note_collection)
    with tempfile.TemporaryDirectory() as folder:
        llm = make_llm(Path(folder), given.max_num_seqs)
    print(f"{len(gc.get_objects()):,} objects are known to the collector, {gc.get_freeze_count():,} frozen")
    for run in range(given.runs):
        requests = workload(given.workload, VOCAB, run + 1)
        params = [
            SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=request.output_len, detokenize=False)
            for request in requests
        ]
        prompts: list[Any] = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
        times.clear()
        started = time.thread_time()
        llm.generate(prompts, params, use_tqdm=False)
        print(f"run {run}: {time.thread_time() - started:.3f} s of processor time, {times.step} steps")
        print(times.table(), flush=True)


if __name__ == "__main__":
    main()
