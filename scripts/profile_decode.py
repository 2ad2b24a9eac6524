"""Where the time of a decode step goes on the GPU: kernels by name, gaps between them, and the idle share.

    python scripts/profile_decode.py --shape qwen3-0.6b --rows 64 --context 128 --steps 64
    python scripts/profile_decode.py --shape qwen3-0.6b --workload mixed256 --stretches 8
    python scripts/profile_decode.py --shape gpt-oss-20b --quantization mxfp4 --rows 64

Runs a dummy checkpoint of the shape through `LLM.generate`, traces one repetition with torch's profiler, and looks at the
stretch in which every request decodes: from the first kernel after the last prompt token to the last kernel. Idle is the
time in that stretch during which no kernel or copy runs. With `--workload`, all of it is traced, and each of so many
equally long stretches has its own table.
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
from pagerunner.bench.shapes import QUANTIZED, SHAPES
from pagerunner.bench.workloads import workload, write_model


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


def longest_gaps(kernels: list[Kernel], count: int) -> list[tuple[float, float, str, str]]:
    """(microseconds without a kernel, when it began, the kernel before, the kernel behind), the longest first."""
    found, reached, last = [], kernels[0].end, kernels[0].name
    for kernel in kernels[1:]:
        if kernel.start > reached:
            found.append((kernel.start - reached, reached - kernels[0].start, last, kernel.name))
        if kernel.end > reached:
            reached, last = kernel.end, kernel.name
    return sorted(found, reverse=True)[:count]


def print_timeline(kernels: list[Kernel], count: int) -> None:
    """The `count` kernels in the middle, one behind the other."""
    some = kernels[len(kernels) // 2 :][:count]
    for kernel in some:
        print(f"{kernel.start - some[0].start:9.2f} us  {kernel.end - kernel.start:8.2f} us  {kernel.name[:100]}")


def run(llm: LLM, rows: int, context: int, steps: int, seed: int) -> None:
    """Generate `steps` tokens for each of `rows` prompts of `context` fresh tokens."""
    ids = random.Random(seed)
    prompts = [{"prompt_token_ids": [ids.randrange(300, 10_000) for _ in range(context)]} for _ in range(rows)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=steps, detokenize=False)
    llm.generate(prompts, params, use_tqdm=False)


def run_workload(llm: LLM, name: str, shape: str, salt: int) -> None:
    """One of the benchmark's workloads, with fresh tokens for each `salt`."""
    requests = workload(name, SHAPES[shape].get("vocab_size", 151_936), salt)
    params = [
        SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=request.output_len, detokenize=False)
        for request in requests
    ]
    llm.generate([{"prompt_token_ids": request.prompt_token_ids} for request in requests], params, use_tqdm=False)


def print_stretch(title: str, kernels: list[Kernel], top: int) -> None:
    """Idle share and the longest kernels of one stretch."""
    span = kernels[-1].end - kernels[0].start
    print(f"{title}: {span / 1e3:.2f} ms traced, GPU idle {1 - busy_time(kernels) / span:.1%}")
    for name, calls, time in by_name(kernels)[:top]:
        print(f"{time / span:7.2%} {calls:6d} x {time / calls:8.2f} us  {name[:100]}")


def stretches(kernels: list[Kernel], count: int) -> Iterable[list[Kernel]]:
    """The kernels of `count` equally long stretches of time, by their start."""
    first, span = kernels[0].start, kernels[-1].end - kernels[0].start
    for index in range(count):
        begin, end = first + span * index / count, first + span * (index + 1) / count
        yield [kernel for kernel in kernels if begin <= kernel.start < end]


def main() -> None:
    """Trace, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--top", type=int, default=25)
    parser.add_argument("--workload", help="a workload of the benchmarks, instead of rows, context and steps")
    parser.add_argument("--stretches", type=int, default=8)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument(
        "--quantization", help="fp8 rounds the random weights; compressed-tensors, mxfp4 ... are stored forms"
    )
    parser.add_argument("--timeline", type=int, default=0, help="also print so many consecutive kernels")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stored = args.quantization if args.quantization in QUANTIZED else None
        model = write_model(args.shape, Path(folder) / args.shape, stored)
        longest = json.loads((model / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
        most_rows = 512 if args.workload else max(args.rows, 8)
        llm = LLM(
            str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_num_seqs=most_rows,
            max_model_len=min(16384, longest),
            kv_cache_dtype=args.kv_cache_dtype,
            quantization=args.quantization,
        )

        def once(seed: int) -> None:
            if args.workload:
                run_workload(llm, args.workload, args.shape, seed)
            else:
                run(llm, args.rows, args.context, args.steps, seed)

        once(1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            once(2)
            torch.cuda.synchronize()
    kernels = device_events(profiler)
    if args.workload:
        print_stretch(f"{args.shape}, {args.workload}", kernels, args.top)
        for gap, at, before, behind in longest_gaps(kernels, args.top):
            print(
                f"idle for {gap / 1e3:.2f} ms, {at / 1e3:.0f} ms from the start, between {before[:40]} and {behind[:40]}"
            )
        for index, stretch in enumerate(stretches(kernels, args.stretches)):
            print_stretch(f"stretch {index}", stretch, args.top)
        return
    # The second half of the steps is decoding only, whatever the prompts took.
    middle = kernels[0].start + (kernels[-1].end - kernels[0].start) / 2
    kernels = [kernel for kernel in kernels if kernel.start >= middle]
    print_stretch(f"{args.shape}, {args.rows} rows", kernels, args.top)
    print_timeline(kernels, args.timeline)
    if args.json:
        span, busy, table = kernels[-1].end - kernels[0].start, busy_time(kernels), by_name(kernels)
        rows = [{"name": name, "calls": calls, "us": time} for name, calls, time in table]
        args.json.write_text(json.dumps({"span_us": span, "busy_us": busy, "kernels": rows}), encoding="utf-8")


if __name__ == "__main__":
    main()
