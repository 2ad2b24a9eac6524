"""What a busy neighbour costs an engine on a CPU, by how its OpenMP threads are counted and how they wait for each other.

    python scripts/bench_neighbour.py --rounds 20

Each variant is an engine in a process of its own, loaded once. They take turns: in a round every variant generates for about
`--seconds` alone, and then beside a process of nice 10 that keeps one core busy. Medians over the rounds are printed, and the
median of each round's ratio to the first variant. Other work on the machine makes "alone" something else than idle; therefore the
load average is printed too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

SOURCE = str(Path(__file__).resolve().parents[1] / "src")
CORES = str(os.cpu_count() or 1)
VARIANTS: dict[str, dict[str, str]] = {
    "torch's own": {"GOMP_SPINCOUNT": "300000", "OMP_NUM_THREADS": CORES},
    "pagerunner's": {},
    **{
        f"spin {count:,}": {"GOMP_SPINCOUNT": str(count), "OMP_NUM_THREADS": CORES}
        for count in (1000, 3000, 10_000, 30_000)
    },
    "passive": {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": CORES},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


@contextmanager
def neighbours(count: int, nice: int) -> Iterator[None]:
    """Processes that compute all the time, meanwhile."""
    command = ["nice", "-n", str(nice), sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


class Engine:
    """An engine in a process whose environment is that of a variant."""

    def __init__(self, variant: str, requests: int, shape: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "MKL_"))}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", str(requests), "--shape", shape],
            env={**kept, "PYTHONPATH": SOURCE, **VARIANTS[variant]},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.tokens_per_second(0.0)

    def tokens_per_second(self, seconds: float) -> float:
        """Generate for that long, at least once."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def work(requests: int, shape: str) -> None:
    """The engine's process: for each line of seconds, a line of tokens per second."""
    from pagerunner import LLM, SamplingParams
    from pagerunner.bench.workloads import write_model

    model, options = "demo", {}
    if shape != "demo":
        model, options = (
            str(write_model(shape, Path(tempfile.mkdtemp()))),
            {"load_format": "dummy", "skip_tokenizer_init": True},
        )

    llm = LLM(model, max_model_len=1024, use_tqdm=False, max_num_seqs=64, kv_cache_memory_bytes=2**28, **options)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    prompts = [
        {"prompt_token_ids": [5 + (number * 31 + place) % 200 for place in range(32)]} for number in range(requests)
    ]
    for line in sys.stdin:
        started, tokens = time.perf_counter(), 0
        while not tokens or time.perf_counter() - started < float(line):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        print(tokens / (time.perf_counter() - started), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--requests", type=int, default=13)
    parser.add_argument("--shape", default="demo", help="demo, or a shape of `pagerunner bench` with random weights")
    parser.add_argument("--neighbours", type=int, default=1)
    parser.add_argument("--nice", type=int, default=10, help="of the neighbours")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--worker", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.shape)
        return
    rates: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    loads = []
    with ExitStack() as stack:
        engines = {variant: Engine(variant, options.requests, options.shape) for variant in options.variants}
        for engine in engines.values():
            stack.callback(engine.close)
        for _ in range(options.rounds):
            for variant, engine in engines.items():
                rates[variant, "alone"].append(engine.tokens_per_second(options.seconds))
            with neighbours(options.neighbours, options.nice):
                for variant, engine in engines.items():
                    rates[variant, "neighbour"].append(engine.tokens_per_second(options.seconds))
            loads.append(os.getloadavg()[0])
    print(
        f"{options.rounds} rounds, load average {min(loads):.1f} to {max(loads):.1f}; tokens/s, and times the first variant's"
    )
    first = options.variants[0]
    for variant in options.variants:
        cells = []
        for where in ("alone", "neighbour"):
            ratios = [one / other for one, other in zip(rates[variant, where], rates[first, where], strict=True)]
            cells.append(f"{statistics.median(rates[variant, where]):8.0f} {statistics.median(ratios):6.2f}x")
        print(
            f"{variant:<14}"
            + "   ".join(f"{name} {cell}" for name, cell in zip(("alone", "neighbour"), cells, strict=True))
        )


if __name__ == "__main__":
    main()
