"""What it costs that somebody looks at /ui: one server under steady load, with and without a viewer, in turns.

    python scripts/bench_viewer.py [--streams 64] [--pairs 40] [--window 2]

The viewer reads `GET /ui/live` as the page does. Streams of random lengths run all the time; windows of a few seconds with a viewer
and without alternate, in changing order, and what counts is CPU time per generated token: medians over pairs of neighbouring
windows, with the 95 % confidence interval of the median and the quartiles.

On a machine that does other things too that says little, because a token's CPU time varies by several percent then. Two
measurements before it don't depend on that: what the parts of a frame take, timed one by one in this process on an engine with as
many requests; and what a viewer costs an engine that has nothing else to do, whole processes with sockets and all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import msgspec

from bench_server_overhead import children, one_stream, prompts, write_checkpoint
from pagerunner.config import EngineArgs
from pagerunner.engine.core import messages as wire
from pagerunner.engine.startup.build import build_core
from pagerunner.server.live import PERIOD_SECONDS, frame
from pagerunner.server.service import sse
from pagerunner.types import EngineRequest, SamplingParams

INPUT_TOKENS = 32
OUTPUT_TOKENS = (64, 192)  # drawn from this range, so that streams don't begin together
SETTLE_SECONDS = 0.3


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process, to the nanosecond."""
    return sum(int(one.read_text().split()[0]) for one in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def spread(core: int, others: Iterable[int]) -> None:
    """Give the core's process a processor of its own, so that the client's and the server's work doesn't move it about."""
    *rest, last = sorted(os.sched_getaffinity(0))
    if not rest:
        return
    for pid, places in ((core, {last}), *((other, set(rest)) for other in others)):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), places)


async def generated(port: int) -> float:
    """Tokens that the server has generated so far."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    found = re.search(r"^vllm:generation_tokens_total\S* (\S+)$", text, re.MULTILINE)
    assert found
    return float(found[1])


@contextlib.asynccontextmanager
async def viewer(port: int) -> AsyncIterator[None]:
    """Somebody who looks."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    writer.write(b"GET /ui/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")

    async def read() -> None:
        while await reader.read(2**18):
            pass

    reading = asyncio.create_task(read())
    yield
    reading.cancel()
    writer.close()


async def load(port: int, salts: itertools.count[int]) -> None:
    """One stream after the other."""
    while True:
        salt = next(salts)
        (ids,) = prompts(1, INPUT_TOKENS, salt)
        length = random.Random(salt).randint(*OUTPUT_TOKENS)
        body = {"prompt": ids, "max_tokens": length, "ignore_eos": True, "temperature": 0, "stream": True}
        await one_stream(port, json.dumps({**body, "stream_options": {"include_usage": True}}).encode())


async def window(port: int, pids: dict[str, int], seconds: float, watched: bool) -> dict[str, float]:
    """Tokens a second, and each process's CPU seconds per token."""
    async with viewer(port) if watched else contextlib.nullcontext():
        await asyncio.sleep(SETTLE_SECONDS)
        tokens, started = await generated(port), time.perf_counter()
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        await asyncio.sleep(seconds)
        after = {name: cpu_seconds(pid) for name, pid in pids.items()}
        took, made = time.perf_counter() - started, await generated(port) - tokens
    return {"rate": made / took} | {name: (after[name] - before[name]) / made for name in pids}


def summary(ratios: list[float]) -> str:
    """Median, the 95 % interval of the median (by order statistics), and the quartiles, in percent more or less."""
    ranked = sorted(100 * (ratio - 1) for ratio in ratios)
    half = 0.98 * len(ranked) ** 0.5
    low, high = ranked[max(int(len(ranked) / 2 - half), 0)], ranked[min(int(len(ranked) / 2 + half), len(ranked) - 1)]
    quarter, _, rest = statistics.quantiles(ranked, n=4)
    return f"{statistics.median(ranked):+.2f} % (95 % of the median {low:+.2f} to {high:+.2f}, quartiles {quarter:+.2f} {rest:+.2f})"


async def idle(port: int, pids: dict[str, int], pairs: int = 5, seconds: float = 3.0) -> None:
    """Print what a viewer costs while nothing runs."""
    extra: dict[str, list[float]] = {name: [] for name in pids}
    for _ in range(pairs):
        spent: dict[bool, dict[str, float]] = {}
        for watched in (False, True):
            async with viewer(port) if watched else contextlib.nullcontext():
                await asyncio.sleep(SETTLE_SECONDS)
                before = {name: cpu_seconds(pid) for name, pid in pids.items()}
                await asyncio.sleep(seconds)
                spent[watched] = {name: (cpu_seconds(pid) - before[name]) / seconds for name, pid in pids.items()}
        for name in pids:
            extra[name].append(spent[True][name] - spent[False][name])
    for name, shares in extra.items():
        print(f"a viewer of an idle engine takes the {name} {statistics.median(shares):.2%} of a core", flush=True)


async def measure(port: int, pids: dict[str, int], options: argparse.Namespace) -> None:
    await idle(port, pids)
    salts = itertools.count()
    more = options.streams + options.streams // 4  # some always wait, so that all steps are full
    streams = [asyncio.create_task(load(port, salts)) for _ in range(more)]
    await window(port, pids, options.window, True)  # first use of everything
    ratios: dict[str, list[float]] = {}
    for number in range(options.pairs):
        order = (True, False) if number % 2 else (False, True)
        found = {watched: await window(port, pids, options.window, watched) for watched in order}
        for name, value in found[True].items():
            ratios.setdefault(name, []).append(value / found[False][name])
        if any(stream.done() for stream in streams):
            raise SystemExit("a stream has failed")
    for stream in streams:
        stream.cancel()
    print(f"with a viewer, {options.streams} streams, {options.pairs} pairs of {options.window:g} s:")
    print(f"  core's CPU time per token    {summary(ratios['core'])}")
    print(f"  server's CPU time per token  {summary(ratios['server'])}")
    print(f"  tokens a second              {summary(ratios['rate'])}")


def serve(directory: Path, options: argparse.Namespace) -> None:
    flags = ["--load-format=dummy", f"--max-num-seqs={options.streams}", "--max-model-len=512"]
    command = [sys.executable, "-m", "pagerunner", "serve", str(directory), "--port=0", "--quiet", *flags]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        port = int(server.stdout.readline().rsplit(":", 1)[1])
        pids = {"core": children(server.pid)[0], "server": server.pid}
        spread(pids["core"], (server.pid, os.getpid()))
        asyncio.run(measure(port, pids, options))
    finally:
        server.terminate()
        server.wait()


def one_frame(directory: Path, options: argparse.Namespace) -> None:
    """Print what the parts of a frame take, between steps of an engine, so with caches as they are then."""
    args = EngineArgs(model=str(directory), load_format="dummy", max_num_seqs=options.streams, max_model_len=512)
    core = build_core(args)
    for number, ids in enumerate(prompts(options.streams, INPUT_TOKENS, 0)):
        params = SamplingParams(max_tokens=None)
        name = f"cmpl-{number:032x}-0"
        core.add(
            EngineRequest(
                request_id=name, prompt_token_ids=ids, params=params, seed=0, max_tokens=400, eos_token_ids=()
            )
        )
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(wire.FromCore)
    spent: dict[str, list[float]] = {}
    last, seen, clock = None, 0, time.thread_time
    for step in range(300):
        core.step()
        if step % 10:
            continue
        times = [clock()]
        data = encoder.encode(wire.Reply(1, core.watch(seen)))
        times.append(clock())
        reply = decoder.decode(data)
        assert isinstance(reply, wire.Reply) and isinstance(reply.value, wire.LiveState)
        state = reply.value
        sse({**frame(state, last), "steps": state.steps})
        times.append(clock())
        last, seen = state, state.steps[-1].number if state.steps else seen
        for part, (begin, end) in zip(("core", "server"), itertools.pairwise(times), strict=True):
            spent.setdefault(part, []).append(end - begin)
    for part, values in spent.items():
        middle = statistics.median(values)
        print(f"a frame takes the {part} {middle * 1e3:.2f} ms, {middle / PERIOD_SECONDS:.2%} of a core")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--window", type=float, default=2.0, metavar="SECONDS")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pagerunner-bench-") as directory:
        checkpoint = write_checkpoint(Path(directory))
        one_frame(checkpoint, options)
        serve(checkpoint, options)


if __name__ == "__main__":
    main()
