"""What several engines behind one port bring: mixed traffic on all of them beside one of them, and prompts with shared beginnings sent by their
beginnings beside in turn.

    python scripts/bench_replicas.py --shape qwen3-8b --engines 2
    python scripts/bench_replicas.py --shape tiny --engines 2 --flags "--device cpu --num-gpu-blocks-override 4096 --max-model-len 4096" \\
        --workload W2 --families 8 --prefix 512

The requests are sent by the processes of `pagerunner bench serve`. One server has all engines. To have one of them alone, requests name it in
the header X-data-parallel-rank; to have all of them in turn, each request names the next one.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from pagerunner.bench.clients import ClientShare, Outcome, measure
from pagerunner.bench.serve_data import ServeRequest
from pagerunner.bench.serving import Planned, Target
from pagerunner.bench.shapes import SHAPES
from pagerunner.bench.workloads import BenchRequest, workload
from served_shape import write_served

RANK = "X-data-parallel-rank"
OWN = 32  # tokens that a prompt of a family has of its own
OUT = 64


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--workload", default="mixed256")
    parser.add_argument("--clients", type=int, default=4, help="processes that send")
    parser.add_argument("--families", type=int, default=64, help="prompts with the same beginning are a family")
    parser.add_argument("--members", type=int, default=4, help="prompts of a family")
    parser.add_argument("--prefix", type=int, default=2_048, help="tokens of the beginning")
    parser.add_argument("--at-once", type=int, default=48, help="prompts of families under way")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--flags", default="--max-model-len 4096 --max-num-seqs 256", help="of `pagerunner serve`")
    return parser.parse_args()


@contextlib.contextmanager
def served(options: argparse.Namespace, directory: Path) -> Iterator[str]:
    flags = ["--load-format", "dummy", "--port", "0", "--quiet", "-dp", str(options.engines), *options.flags.split()]
    command = [sys.executable, "-m", "pagerunner", "serve", str(directory), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit("the server hasn't started")
            yield line.rpartition(" ")[2].strip()
        finally:
            process.terminate()


def planned(requests: list[BenchRequest], target: Target) -> list[Planned]:
    bodies = [ServeRequest(one.prompt_token_ids, len(one.prompt_token_ids), one.output_len) for one in requests]
    return [Planned(0.0, one.prompt_len, msgspec.Raw(target.body(one))) for one in bodies]


def send(
    url: str, requests: list[Planned], clients: int, most: int | None = None, ranks: range | None = None
) -> list[Outcome]:
    """Send all at once, or at `most` so many under way. With `ranks`, request 0 goes to the first of these engines, request 1 to the second.

    Always from processes: in this one, two threads would receive into one buffer.
    """
    groups = (
        [(None, requests)] if ranks is None else [(rank, requests[at :: len(ranks)]) for at, rank in enumerate(ranks)]
    )
    shares = [
        ClientShare(
            url=f"{url}/v1/completions",
            headers={} if rank is None else {RANK: str(rank)},
            requests=own,
            max_concurrency=most and most // len(groups),
        )
        for rank, own in groups
    ]
    with ThreadPoolExecutor(len(shares)) as threads:
        found = list(threads.map(lambda share: measure(share, max(2, clients // len(shares)), lambda: None), shares))
    for outcome in found:
        if errors := [sample.error for sample in outcome.samples if sample.error]:
            raise SystemExit(f"{len(errors)} of {len(outcome.samples)} requests failed: {errors[0]}")
    return found


def counted(url: str, name: str) -> dict[str, float]:
    """A counter of /metrics by engine."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(rf'^{name}{{[^}}]*engine="(\d+)"[^}}]*}} (\S+)$', text, re.MULTILINE)
    return {engine: float(value) for engine, value in found}


def family_requests(options: argparse.Namespace, seed: int) -> list[BenchRequest]:
    rng = random.Random(seed)
    vocabulary = range(300, min(10_000, SHAPES[options.shape]["vocab_size"]))
    prefixes = [rng.choices(vocabulary, k=options.prefix) for _ in range(options.families)]
    requests = [
        BenchRequest(prefix + rng.choices(vocabulary, k=OWN), OUT)
        for prefix in prefixes
        for _ in range(options.members)
    ]
    rng.shuffle(requests)
    return requests


def row(name: str, outcomes: list[Outcome], extra: str = "") -> float:
    samples = [sample for outcome in outcomes for sample in outcome.samples]
    seconds = max(outcome.seconds for outcome in outcomes)
    tokens = sum(sample.output_len for sample in samples)
    first = statistics.median(sample.ttft for sample in samples)
    busy = max(outcome.busy for outcome in outcomes)
    print(
        f"  {name:26} {seconds:7.2f} s  {tokens / seconds:9,.0f} tok/s  first token p50 {1e3 * first:7.1f} ms  client {busy:4.0%}{extra}",
        flush=True,
    )
    return seconds


def mixed(options: argparse.Namespace, url: str, target: Target) -> None:
    """One engine's traffic, the same on all engines, and as much for each engine."""
    vocab, salts = SHAPES[options.shape]["vocab_size"], itertools.count(1)

    def requests(times: int) -> list[Planned]:
        return planned([one for _ in range(times) for one in workload(options.workload, vocab, next(salts))], target)

    for _ in range(options.repetitions):
        alone = row("engine 0 alone", send(url, requests(1), options.clients, ranks=range(1)))
        same = row(f"{options.engines} engines", send(url, requests(1), options.clients))
        equal = row(
            f"{options.engines} engines, {options.engines}x", send(url, requests(options.engines), options.clients)
        )
        print(
            f"  {options.workload}: {options.engines} engines are {alone / same:.2f} times as fast as one, and with as many requests each "
            f"{options.engines * alone / equal:.2f} times",
            flush=True,
        )


def families(options: argparse.Namespace, url: str, target: Target) -> None:
    print(
        f"{options.families} families of {options.members} prompts, {options.prefix:,} tokens in common and {OWN} own, {OUT} out:"
    )
    for name, ranks, seed in (("by beginnings and load", None, 1), ("in turn", range(options.engines), 2)):
        before = [counted(url, f"vllm:prefix_cache_{what}_total") for what in ("hits", "queries")]
        outcomes = send(url, planned(family_requests(options, seed), target), options.clients, options.at_once, ranks)
        time.sleep(1.5)  # statistics come after steps
        after = [counted(url, f"vllm:prefix_cache_{what}_total") for what in ("hits", "queries")]
        hits, queries = (
            [now[engine] - then.get(engine, 0.0) for engine in sorted(now)]
            for then, now in zip(before, after, strict=True)
        )
        each = ", ".join(f"{hit:,.0f} of {asked:,.0f}" for hit, asked in zip(hits, queries, strict=True))
        row(name, outcomes, f"  hits {sum(hits) / max(1, sum(queries)):.3f} ({each} tokens)")


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as directory:
        began = time.perf_counter()
        with served(options, write_served(options.shape, Path(directory))) as url:
            print(
                f"{options.shape}, {options.engines} engines: ready after {time.perf_counter() - began:.1f} s",
                flush=True,
            )
            with urllib.request.urlopen(f"{url}/v1/models") as answer:
                model = json.load(answer)["data"][0]["id"]
            target = Target(url=url, model=model, chat=False, extra={"temperature": 0, "ignore_eos": True})
            warm = planned([BenchRequest([300 + one] * 64, 8) for one in range(32 * options.engines)], target)
            send(url, warm, options.engines, ranks=range(options.engines))
            mixed(options, url, target)
            families(options, url, target)


if __name__ == "__main__":
    main()
