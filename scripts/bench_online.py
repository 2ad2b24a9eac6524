"""How much of an engine's offline rate is left behind HTTP: short streamed requests, many at once, by processes that serve and processes that send.

    python scripts/bench_online.py --shape qwen3-0.6b --servers 1,2,4,8 --clients 8
    python scripts/bench_online.py --shape tiny --servers 1,2 --clients 2 --requests 512 --at-once 64 --flags "--device cpu --num-gpu-blocks-override 4096"

`LLM.generate` gets the same prompts on the same device first. Processor time is of each kind of process, for a request.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import msgspec

from pagerunner.bench.clients import ClientShare, ceiling, measure
from pagerunner.bench.serve_data import ServeRequest
from pagerunner.bench.serving import Planned, Target
from pagerunner.bench.shapes import SHAPES
from served_shape import write_served

IN, OUT = 64, 16


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--servers", default="1,2,4,8", help="numbers of API processes, one after the other")
    parser.add_argument("--clients", type=int, default=8, help="processes that send")
    parser.add_argument("--requests", type=int, default=8_192)
    parser.add_argument("--at-once", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--flags", default="", help="more of `pagerunner serve`, and of the engine offline")
    parser.add_argument("--python", default=sys.executable, help="how to start the server, e.g. under a profiler")
    parser.add_argument("--offline", metavar="DIR", help=argparse.SUPPRESS)
    return parser.parse_args()


def engine_flags(options: argparse.Namespace) -> list[str]:
    most = ["--max-num-seqs", str(options.at_once), "--max-model-len", "512", "--max-num-batched-tokens", "8192"]
    return ["--load-format", "dummy", *most, *options.flags.split()]


def prompts(options: argparse.Namespace, salt: int) -> list[list[int]]:
    rng, vocabulary = random.Random(salt), range(300, min(10_000, SHAPES[options.shape]["vocab_size"]))
    return [rng.choices(vocabulary, k=IN) for _ in range(options.requests)]


def offline(options: argparse.Namespace) -> None:
    """Child: seconds of each round, after a warm-up."""
    from pagerunner import LLM, SamplingParams
    from pagerunner.cli.options import Parser, add_engine_options, engine_args

    parser = Parser("offline", "")
    add_engine_options(parser)
    args = engine_args(parser.parse_args(engine_flags(options)), options.offline)
    llm = LLM(**{name: getattr(args, name) for name in args.__struct_fields__}, use_tqdm=False)
    params = SamplingParams(temperature=0, max_tokens=OUT, ignore_eos=True)
    for salt in range(options.rounds + 1):
        batch = [{"prompt_token_ids": ids} for ids in prompts(options, salt)]
        batch = batch if salt else batch[: options.at_once]
        began, computed, steps = time.perf_counter(), time.process_time(), llm._core.stats().steps_total
        outputs = llm.generate(batch, params, use_tqdm=False)
        seconds, computed = time.perf_counter() - began, time.process_time() - computed
        assert all(len(output.outputs[0].token_ids) == OUT for output in outputs)
        if salt:
            print(json.dumps([seconds, computed, llm._core.stats().steps_total - steps]), flush=True)


def offline_rate(options: argparse.Namespace, directory: Path) -> float:
    own = [
        f"--{name}={getattr(options, name.replace('-', '_'))}"
        for name in ("shape", "requests", "at-once", "rounds", "flags")
    ]
    command = [sys.executable, __file__, *own, "--offline", str(directory)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    best, computed, steps = min(rounds)
    each = ", ".join(f"{options.requests / seconds:,.0f}" for seconds, *_ in rounds)
    print(
        f"offline: {options.requests / best:,.0f} requests/s (of each round {each}); {steps} steps of {1e3 * best / steps:.1f} ms; "
        f"{1e3 * computed / options.requests:.3f} ms of processor time each",
        flush=True,
    )
    return float(options.requests / best)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def steps_of(url: str) -> int:
    """The engine's steps so far, as far as its figures have come (every 0.1 s)."""
    time.sleep(0.3)
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return int(float(next(line for line in lines if line.startswith("pagerunner:steps_total")).split()[-1]))


def processes(pid: int) -> tuple[int, list[int]]:
    """The core, and the processes that serve HTTP: children of the server, or the server itself."""
    children = [int(one) for task in Path(f"/proc/{pid}/task").glob("*/children") for one in task.read_text().split()]
    named = {one: Path(f"/proc/{one}/cmdline").read_bytes() for one in children}
    [core] = [one for one, line in named.items() if b"engine.core.process" in line]
    return core, [one for one, line in named.items() if b"api_processes" in line] or [pid]


def planned(options: argparse.Namespace, target: Target, salt: int) -> list[Planned]:
    return [Planned(0.0, IN, msgspec.Raw(target.body(ServeRequest(ids, IN, OUT)))) for ids in prompts(options, salt)]


def online(options: argparse.Namespace, directory: Path, servers: int, alone: float) -> ClientShare:
    flags = ["--port", "0", "--quiet", "--api-server-count", str(servers), *engine_flags(options)]
    command = [*options.python.split(), "-m", "pagerunner", "serve", str(directory), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().rpartition(" ")[2].strip()
            if not url:
                raise SystemExit("the server hasn't started")
            with urllib.request.urlopen(f"{url}/v1/models") as answer:
                model = json.load(answer)["data"][0]["id"]
            target = Target(url=url, model=model, chat=False, extra={"temperature": 0, "ignore_eos": True})
            core, api = processes(server.pid)
            rates = []
            for salt in range(options.rounds + 1):
                whole = planned(options, target, 100 + salt)
                whole = whole if salt else whole[: 2 * options.at_once]
                share = ClientShare(
                    url=f"{url}/v1/completions", headers={}, requests=whole, max_concurrency=options.at_once
                )
                steps = steps_of(url)
                before = [cpu_seconds(core), sum(map(cpu_seconds, api))]
                outcome = measure(share, options.clients, lambda: None)
                spent = [cpu_seconds(core) - before[0], sum(map(cpu_seconds, api)) - before[1]]
                if errors := [one.error for one in outcome.samples if one.error]:
                    raise SystemExit(f"{len(errors)} of {len(whole)} requests failed: {errors[0]}")
                if not salt:
                    continue
                assert all(one.output_len == OUT for one in outcome.samples)
                rates.append(len(whole) / outcome.seconds)
                steps = steps_of(url) - steps
                core_ms, api_ms = (1e3 * one / len(whole) for one in spent)
                print(
                    f"{servers:2} API processes: {rates[-1]:7,.0f} requests/s, {rates[-1] / alone:.2f} of offline, {steps} steps of {1e3 * outcome.seconds / steps:.1f} ms; ms of processor time for a request: core {core_ms:.3f} "
                    f"(busy {spent[0] / outcome.seconds:.0%}), API {api_ms:.3f} (each {spent[1] / outcome.seconds / len(api):.0%}); client {outcome.busy:.0%}",
                    flush=True,
                )
            return share
        finally:
            server.terminate()


def main() -> None:
    options = parse()
    if options.offline:
        return offline(options)
    with tempfile.TemporaryDirectory() as name:
        directory = write_served(options.shape, Path(name))
        alone = offline_rate(options, directory)
        for servers in map(int, options.servers.split(",")):
            share = online(options, directory, servers, alone)
        for clients in sorted({1, options.clients}):
            rate = ceiling(share, clients)
            print(f"{clients} client processes and a server that answers at once: {rate:,.0f} requests/s", flush=True)


if __name__ == "__main__":
    main()
