"""Everything that is measured or checked on a GPU, in one command, which can be split over several:

    python scripts/gpu_check.py [--only tests,throughput-0.6b] [--budget 580] [--logs DIR] [--list]

Each step is a process of its own with a limit of its own; what it printed is in DIR (default: $OUT, or gpu_check), and the
line that matters most is in the table at the end. `--budget`: seconds for all steps; a step for which less than half its
limit is left is put off, and named in the last line. The exit status is 1 if a step failed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
KERNEL_TESTS = [
    f"tests/gpu/test_{name}.py"
    for name in (
        "dense_kernels",
        "sampling",
        "paged_attention",
        "latent",
        "recurrent",
        "step",
        "moe",
        "stored_linear",
        "linear_many",
        "linear_wide",
        "linear_dense",
        "linear_held",
    )
]
ENGINE = {"max_num_seqs": 512, "gpu_memory_utilization": 0.85}  # as other engines were measured
CEILINGS = 4.35e12, 790e12  # bytes and operations a second that an H200 reaches, for the floors of mixtures
WORKLOADS = ("decode1", "decode64", "prefill8k", "prefix2k", "mixed256")
COMPARED = ("decode1", "decode64", "prefill8k", "mixed256")
PUBLISHED = {  # bench shapes in the forms in which people run them
    "8b-fp8": ("qwen3-8b", "fp8"),
    "8b-int4": ("qwen3-8b", "compressed-tensors"),
    "gpt-oss": ("gpt-oss-20b", "mxfp4"),
    "30b": ("qwen3-30b-a3b", None),
    "30b-fp8": ("qwen3-30b-a3b", "fp8"),
    "v2-lite": ("deepseek-v2-lite", None),
}
RESULT = "RESULT "  # begins lines for the table


@dataclass(frozen=True)
class Step:
    """A command, its limit in seconds, and how many of its last lines go into the table."""

    command: tuple[str, ...]
    limit: int
    lines: int = 1


def script(name: str, *args: str) -> tuple[str, ...]:
    """The command that runs a script of this folder."""
    return (PYTHON, str(ROOT / "scripts" / name), *args)


def bench(what: str, shape: str) -> tuple[str, ...]:
    """The command of a `pagerunner bench`."""
    return (PYTHON, "-m", "pagerunner", "bench", what, "--shape", f"qwen3-{shape}", "--max-num-seqs", "512")


def steps() -> dict[str, Step]:
    """All steps, in the order in which they run."""
    # compiling kernels is most of the tests' time; under the checker, starting a process is
    alone = ("-m", "pytest", "-p", "no:cacheprovider", "--tb=short")
    pytest = (*alone, "-n", str(max(1, (os.cpu_count() or 1) // 2))) if find_spec("xdist") else alone
    # without torch's cache every tensor is an allocation of its own, which the checker knows the end of
    sanitizer = (
        "env",
        "PYTORCH_NO_CUDA_MEMORY_CACHING=1",
        "compute-sanitizer",
        "--tool",
        "memcheck",
        "--error-exitcode",
        "9",
        "--target-processes",
        "all",
    )
    found = {
        "tests": Step((PYTHON, *pytest, "tests/gpu"), 480, 30),
        "compiled": Step(script("check_compiled.py"), 120, 8),  # what the tests have left in Triton's cache
        "host-copy": Step(script("bench_host_copy.py", "--gib", "8"), 60, 4),
        "chain": Step(script("bench_kernels.py", "--sections", "chain"), 90, 12),
    }
    for shape in ("0.6b", "8b"):
        for kv in ("auto", "fp8"):
            name = f"throughput-{shape}" + ("" if kv == "auto" else f"-{kv}")
            found[name] = Step(script("gpu_check.py", "--throughput", f"qwen3-{shape}", "--kv-cache-dtype", kv), 180)
        found[f"startup-{shape}"] = Step((*bench("startup", shape), "--num-iters", "3"), 150, 5)
        found[f"sleep-{shape}"] = Step(bench("sleep", shape), 120, 7)
        found[f"profile-{shape}"] = Step(
            script("profile_decode.py", "--shape", f"qwen3-{shape}", "--rows", "64", "--top", "12"), 90, 13
        )
        found[f"mixed-{shape}"] = Step(
            script("profile_decode.py", "--shape", f"qwen3-{shape}", "--workload", "mixed256", "--stretches", "1"),
            90,
            26,
        )
    for name, (shape, quantization) in PUBLISHED.items():
        command = script("gpu_check.py", "--throughput", shape, "--workloads", ",".join(COMPARED), "--repetitions", "1")
        found[f"published-{name}"] = Step((*command, *(("--quantization", quantization) if quantization else ())), 150)
    found["sampling"] = Step(script("bench_sampling.py"), 240, 24)
    found["host"] = Step(script("time_steps.py", "--shape", "0.6B", "--batches", "1,64,256"), 60, 4)
    outside_graphs = ("-k", "not graph and not dependent_launches")  # where memory of torch's cache is needed
    found["memcheck"] = Step((*sanitizer, PYTHON, *alone, *outside_graphs, *KERNEL_TESTS), 560, 12)
    return found


@dataclass(frozen=True)
class Outcome:
    """How a step ended (`ok`, `failed N`, `over its limit`), in what time, and the lines it leaves for the table."""

    how: str
    seconds: float
    lines: list[str]


def run_step(step: Step, limit: float, log: Path) -> Outcome:
    """Run a step for at most `limit` seconds; all its processes end with it."""
    started = time.monotonic()
    if shutil.which(step.command[0]) is None:
        return Outcome(f"failed: {step.command[0]} is not installed", 0.0, [])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            step.command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(limit)
            how = "ok" if status == 0 else f"failed {status}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            how = f"over its limit of {limit:.0f} s"
    printed = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    results = [line.removeprefix(RESULT) for line in printed if line.startswith(RESULT)]
    return Outcome(how, time.monotonic() - started, results or printed[-step.lines :])


def run_steps(chosen: dict[str, Step], budget: float, logs: Path) -> int:
    """Run the steps and print the table; the exit status."""
    logs.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + budget
    outcomes: dict[str, Outcome] = {}
    for name, step in chosen.items():
        left = ends - time.monotonic()
        if left < step.limit / 2:
            continue
        print(f"{name} ...", flush=True)
        outcomes[name] = run_step(step, min(step.limit, left), logs / f"{name}.log")
        with (logs / "gpu_check.jsonl").open("a", encoding="utf-8") as table:
            table.write(json.dumps({"step": name, **vars(outcomes[name])}) + "\n")
    for name, outcome in outcomes.items():
        print(f"{name:22} {outcome.how}, {outcome.seconds:.0f} s")
        for line in outcome.lines:
            print(f"    {line[:240]}")
    put_off = [name for name in chosen if name not in outcomes]
    print(f"put off: --only {','.join(put_off)}" if put_off else "every step ran")
    return int(any(outcome.how != "ok" for outcome in outcomes.values()))


def throughput(
    shape: str, kv_cache_dtype: str, quantization: str | None, names: list[str], repetitions: int, ranks: int
) -> None:
    """All workloads through one engine of so many ranks, one line each: the best of `repetitions` after one that isn't counted."""
    from pagerunner import LLM, EngineArgs
    from pagerunner.bench import runner
    from pagerunner.bench.experts import experts_read
    from pagerunner.bench.floors import Ceilings
    from pagerunner.bench.shapes import QUANTIZED, SHAPES
    from pagerunner.bench.workloads import workload, write_model
    from pagerunner.engine.startup.step_weights import StepWeights, counting, touched_so_far

    # Experts are counted by graphs if they are captured in `counting`, and by other steps if they run in it.
    with tempfile.TemporaryDirectory() as directory, counting():
        stored = quantization if quantization in QUANTIZED else None
        model = write_model(shape, Path(directory), stored)
        longest = json.loads((model / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
        settings = {**ENGINE, "max_model_len": min(16384, longest), "kv_cache_dtype": kv_cache_dtype}
        settings["quantization"] = quantization
        settings["tensor_parallel_size"] = ranks
        llm = LLM(str(model), load_format="dummy", skip_tokenizer_init=True, **settings)
        mixture = StepWeights.read(EngineArgs(model=str(model), quantization=quantization), llm.dtype, llm.device)
        print(llm.startup.text(), flush=True)
        for name in names:
            make = functools.partial(workload, name, SHAPES[shape].get("vocab_size", 151_936))
            report = runner.throughput(
                llm,
                make,
                label=name,
                repetitions=repetitions,
                warmups=1,
                touched=functools.partial(touched_so_far, llm.device),
            )
            read = ""
            if mixture and ranks == 1:  # other ranks count in processes of their own
                specs = [part.spec for group in llm.memory_plan.groups for part in group.layers]
                own = specs, make(0), report.cached_tokens
                read = experts_read(mixture, *report.touched, Ceilings(*CEILINGS), *own).text().replace("\n", ";")
            print(
                f"{RESULT}{shape} {quantization or ''}, kv {kv_cache_dtype}, tp {ranks}, {name}: {report.best:.3f} s, "
                f"{report.best_output_tokens_per_second:,.0f} tok/s ({', '.join(f'{s:.3f}' for s in report.seconds)}){read}",
                flush=True,
            )


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", help="names of steps, with commas between them; a prefix stands for all that begin so"
    )
    parser.add_argument("--budget", type=float, default=580.0)
    parser.add_argument("--logs", type=Path, default=Path(os.environ.get("OUT", "gpu_check")))
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--throughput", metavar="SHAPE", help="one engine's workloads; what the steps of that name run")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    args = parser.parse_args()
    if args.throughput:
        names = args.workloads.split(",")
        ranks = args.tensor_parallel_size
        throughput(args.throughput, args.kv_cache_dtype, args.quantization, names, args.repetitions, ranks)
        return 0
    chosen = steps()
    if args.only:
        wanted = tuple(args.only.split(","))
        unknown = [name for name in wanted if not any(step.startswith(name) for step in chosen)]
        if unknown:
            parser.error(f"there is no step {', '.join(unknown)}; there are {', '.join(chosen)}")
        chosen = {name: step for name, step in chosen.items() if name.startswith(wanted)}
    if args.list:
        for name, step in chosen.items():
            print(f"{name:22} {step.limit:4} s  {' '.join(step.command)}")
        return 0
    return run_steps(chosen, args.budget, args.logs)


if __name__ == "__main__":
    sys.exit(main())
