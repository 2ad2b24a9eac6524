"""What a busy neighbour costs an engine on a CPU, by how its OpenMP threads are counted and how they wait.

    python scripts/bench_neighbour.py --rounds 5

Every variant runs in turn within a round, with and without a neighbour: a process of nice 10 that keeps one core busy. The
medians over the rounds are printed, and each with a neighbour as a share of the same without. Other work on the machine makes
"without" something else than idle; the load average is printed for that reason.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIANTS: dict[str, dict[str, str]] = {
    "torch's own": {"GOMP_SPINCOUNT": "300000", "OMP_NUM_THREADS": str(os.cpu_count() or 1)},
    "pagerunner's": {},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(os.cpu_count() or 1)},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
SOURCE = str(Path(__file__).resolve().parents[1] / "src")


@contextmanager
def neighbour(wanted: bool) -> Iterator[None]:
    """A process that computes all the time, if wanted."""
    if not wanted:
        yield
        return
    process = subprocess.Popen(["nice", "-n", "10", sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def tokens_per_second(variant: str, arguments: list[str]) -> float:
    """Output tokens per second of one `pagerunner bench throughput`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "MKL_"))}
    environment |= {"PYTHONPATH": SOURCE, **VARIANTS[variant]}
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pagerunner", "bench", "throughput", "--json", *arguments]
        made = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=directory, check=True)
    found = json.loads(made.stdout.strip().splitlines()[-1])
    return float(found["output_tokens_per_second"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("arguments", nargs="*", default=[], help="for `pagerunner bench throughput`, after --")
    options = parser.parse_args()
    arguments = options.arguments or ["--shape", "tiny", "--workload", "W2", "--dtype", "float32"]
    rates: defaultdict[tuple[str, bool], list[float]] = defaultdict(list)
    for turn in range(options.rounds):
        for busy in (False, True):
            for variant in options.variants:
                with neighbour(busy):
                    rates[variant, busy].append(tokens_per_second(variant, arguments))
        print(f"round {turn + 1}: load average {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    print(f"{'threads':<14}{'alone':>10}{'neighbour':>12}{'share':>8}")
    for variant in options.variants:
        alone, beside = (statistics.median(rates[variant, busy]) for busy in (False, True))
        print(f"{variant:<14}{alone:>10.0f}{beside:>12.0f}{beside / alone:>8.2f}")


if __name__ == "__main__":
    main()
