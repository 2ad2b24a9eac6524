"""Where the time of a decode step goes on the GPU: kernels by name, gaps between them, and the idle share.

    python scripts/profile_decode.py --shape qwen3-0.6b --rows 64 --context 128 --steps 64

Runs a dummy checkpoint of the shape through `LLM.generate`, traces one repetition with torch's profiler, and looks at the
stretch in which every request decodes: from the first kernel after the last prompt token to the last kernel. Idle is the
time in that stretch during which no kernel or copy runs.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from pagerunner import LLM, SamplingParams
from pagerunner.bench.workloads import write_model


@dataclass(frozen=True)
class Kernel:
    """One kernel or copy on the device, in microseconds."""

    name: str
    start: float
    end: float


def device_events(profiler: torch.profiler.profile) -> list[Kernel]:
    """Everything that ran on the device, by start."""
    found = []
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0:
            start = event.start_ns() / 1e3
            found.append(Kernel(event.name(), start, start + event.duration_ns() / 1e3))
    return sorted(found, key=lambda kernel: kernel.start)


def busy_time(kernels: Iterable[Kernel]) -> float:
    """Microseconds covered by at least one kernel; `kernels` are sorted by start."""
    busy, reached = 0.0, float("-inf")
    for kernel in kernels:
        busy += max(0.0, kernel.end - max(kernel.start, reached))
        reached = max(reached, kernel.end)
    return busy


def by_name(kernels: Iterable[Kernel]) -> list[tuple[str, int, float]]:
    """(name, calls, microseconds), the longest first."""
    calls: dict[str, int] = defaultdict(int)
    time: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        calls[kernel.name] += 1
        time[kernel.name] += kernel.end - kernel.start
    return sorted(((name, calls[name], time[name]) for name in calls), key=lambda row: -row[2])


def run(llm: LLM, rows: int, context: int, steps: int, seed: int) -> None:
    """Generate `steps` tokens for each of `rows` prompts of `context` fresh tokens."""
    ids = random.Random(seed)
    prompts = [{"prompt_token_ids": [ids.randrange(300, 10_000) for _ in range(context)]} for _ in range(rows)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=steps, detokenize=False)
    llm.generate(prompts, params, use_tqdm=False)


def main() -> None:
    """Trace, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--top", type=int, default=25)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(args.shape, Path(folder) / args.shape)
        llm = LLM(str(model), load_format="dummy", skip_tokenizer_init=True, max_num_seqs=max(args.rows, 8))
        run(llm, args.rows, args.context, args.steps, seed=1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            run(llm, args.rows, args.context, args.steps, seed=2)
            torch.cuda.synchronize()
    kernels = device_events(profiler)
    # The second half of the steps is decoding only, whatever the prompts took.
    middle = kernels[0].start + (kernels[-1].end - kernels[0].start) / 2
    kernels = [kernel for kernel in kernels if kernel.start >= middle]
    span = kernels[-1].end - kernels[0].start
    busy = busy_time(kernels)
    table = by_name(kernels)
    print(f"{args.shape}, {args.rows} rows: {span / 1e3:.2f} ms traced, GPU idle {1 - busy / span:.1%}")
    for name, calls, time in table[: args.top]:
        print(f"{time / span:7.2%} {calls:6d} x {time / calls:8.2f} us  {name[:100]}")
    if args.json:
        rows = [{"name": name, "calls": calls, "us": time} for name, calls, time in table]
        args.json.write_text(json.dumps({"span_us": span, "busy_us": busy, "kernels": rows}), encoding="utf-8")


if __name__ == "__main__":
    main()
