"""Where the time of decode steps goes on the host and on the device: `python scripts/time_steps.py --shape 0.6B`.

Runs dummy weights at several batch sizes, two steps in flight, and prints for each the wall time of a step and the
medians of its parts on the host. `wait` is what the host waits for the device: a step is bound by the device if it is large.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pagerunner.bench.workloads import write_config
from pagerunner.config import EngineArgs
from pagerunner.engine.core.core import EngineCore
from pagerunner.engine.startup.build import build_core
from pagerunner.runner.staging import Staging
from pagerunner.types import EngineRequest, SamplingParams, StepPlan

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    | {"intermediate_size": 128, "vocab_size": 1024, "tie_word_embeddings": True},
    "0.6B": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    | {"head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936, "tie_word_embeddings": False},
}


class Times:
    """Seconds of calls by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Time every call of a method from now on."""
        setattr(owner, method, self._timed(getattr(owner, method), name))

    def _timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = call(*args, **kwargs)
            self.seconds[name].append(time.perf_counter() - started)
            if name == "run":
                result = _Watched(result, self)
            return result

        return timed

    def median(self, name: str) -> float:
        """Microseconds."""
        found = self.seconds[name]
        return statistics.median(found) * 1e6 if found else 0.0


class _Watched:
    """A launched step whose result is timed."""

    def __init__(self, pending: Any, times: Times) -> None:
        self._pending = pending
        self._times = times
        self.in_graph = pending.in_graph

    def result(self) -> Any:
        """Wait for the step."""
        started = time.perf_counter()
        result = self._pending.result()
        self._times.seconds["wait"].append(time.perf_counter() - started)
        return result


def decode(core: EngineCore, batch: int, steps: int, times: Times) -> tuple[float, int]:
    """Run `batch` requests of 128 tokens; seconds and number of the steps that only decode."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=steps)
    for index in range(batch):
        ids = [3 + (index * 131 + at * 7) % 1000 for at in range(128)]
        core.add(
            EngineRequest(request_id=f"{batch}-{index}", prompt_token_ids=ids, params=params, seed=0, max_tokens=steps)
        )
    produced = 0
    while produced < batch * 2:
        produced += sum(len(update.new_token_ids) for update in core.step())
    times.seconds.clear()
    started, count = time.perf_counter(), 0
    while produced < batch * (steps - 2):
        produced += sum(len(update.new_token_ids) for update in core.step())
        count += 1
    seconds = time.perf_counter() - started
    while core.has_work:
        core.step()
    return seconds, count


def check_launches(core: EngineCore) -> None:
    """Raise an error if launching a decode step waits for the device."""
    if not torch.cuda.is_available():
        return
    run = core._executor.run

    def strict(plan: StepPlan) -> Any:
        decodes = not plan.admitted and all(row.num_tokens == 1 for row in plan.rows)
        torch.cuda.set_sync_debug_mode("error" if decodes else "default")
        try:
            return run(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    core._executor.run = strict  # type: ignore[method-assign]
    decode(core, 3, 40, Times())
    core._executor.run = run  # type: ignore[method-assign]
    print("launching decode steps never waits for the device")


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.6B")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        started = time.perf_counter()
        core = build_core(
            EngineArgs(
                model=str(write_config(Path(directory), max_position_embeddings=40960, **SHAPES[given.shape])),
                device=given.device,
                dtype=given.dtype,
                load_format="dummy",
                skip_tokenizer_init=True,
                max_model_len=4096,
                max_num_seqs=given.max_num_seqs,
                max_num_batched_tokens=8192,
                max_in_flight=2,
                enable_prefix_caching=False,
                enforce_eager=given.enforce_eager,
                gpu_memory_utilization=0.8,
            )
        )
        print(f"start {time.perf_counter() - started:.2f} s\n{core.startup.text()}")
    times = Times()
    runner = core._executor._runner
    check_launches(core)
    times.watch(core._scheduler, "schedule", "schedule")
    times.watch(core._scheduler, "commit", "commit")
    times.watch(core._executor, "run", "run")
    times.watch(runner._builder, "fill", "fill")
    times.watch(runner._graphs, "replay", "replay")
    times.watch(runner._sampler, "best", "results")
    stage = Staging.stage
    runner._staging.stage = times._timed(lambda *args: stage(runner._staging, *args), "stage")
    names = ("schedule", "run", "stage", "fill", "replay", "results", "wait", "commit")
    print(f"{'batch':>6}{'us/step':>10}{'tok/s':>10}" + "".join(f"{name:>10}" for name in names))
    for batch in map(int, given.batches.split(",")):
        decode(core, batch, 12, times)
        seconds, count = decode(core, batch, given.steps, times)
        row = "".join(f"{times.median(name):>10.0f}" for name in names)
        print(f"{batch:>6}{seconds / count * 1e6:>10.0f}{batch * count / seconds:>10.0f}{row}", flush=True)


if __name__ == "__main__":
    main()
