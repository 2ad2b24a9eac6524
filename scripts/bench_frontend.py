"""What a request costs the processes in front of the engines: their processor time, with 1 and 2 engines and API processes.

    python scripts/bench_frontend.py [--requests 1000] [--rounds 3]

The engines run the demo model on the CPU. A request is streamed: 64 tokens in, 16 out, 64 at a time. Processor time is counted and not
rates, because client, engines and server share the machine's cores. Every round starts each server once; the table has the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

AT_ONCE = 64


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def api_processes(pid: int) -> list[int]:
    """The processes that serve HTTP: children of the server, or the server itself."""
    children = [int(one) for task in Path(f"/proc/{pid}/task").glob("*/children") for one in task.read_text().split()]
    found = [one for one in children if b"api_processes" in Path(f"/proc/{one}/cmdline").read_bytes()]
    return found or [pid]


async def load(port: int, requests: int, seed: int) -> None:
    rng, left = random.Random(seed), iter(range(requests))

    async def work() -> None:
        for _ in left:
            prompt = [rng.randrange(300) for _ in range(64)]
            body = json.dumps({"prompt": prompt, "max_tokens": 16, "ignore_eos": True, "stream": True}).encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            answer = await reader.read()
            while chunk := await reader.read():
                answer += chunk
            writer.close()
            if b"[DONE]" not in answer:
                raise SystemExit(answer.decode())

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))


def measure(engines: int, servers: int, requests: int) -> tuple[float, float]:
    """Milliseconds of processor time a request, and requests a second."""
    flags = ["--device", "cpu", "--port", "0", "--quiet", "-dp", str(engines), "--api-server-count", str(servers)]
    flags += ["--max-num-seqs", str(AT_ONCE), "--max-model-len", "512"]
    command = [sys.executable, "-m", "pagerunner", "serve", "demo", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().rsplit(":", 1)[1])
            asyncio.run(load(port, 100, 0))
            pids = api_processes(process.pid)
            before, began = sum(map(cpu_seconds, pids)), time.perf_counter()
            asyncio.run(load(port, requests, 1))
            seconds = time.perf_counter() - began
            return 1000 * (sum(map(cpu_seconds, pids)) - before) / requests, requests / seconds
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description="processor time of a request in front of the engines")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    kinds = [(1, 1), (2, 1), (1, 2), (2, 2)]
    found: dict[tuple[int, int], list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for _ in range(options.rounds):
        for kind in kinds:
            found[kind].append(measure(*kind, options.requests))
    print("engines  API processes  CPU ms a request  (of each round)  requests/s")
    for (engines, servers), rounds in found.items():
        costs, rates = zip(*rounds, strict=True)
        each = ", ".join(f"{cost:.2f}" for cost in costs)
        print(
            f"{engines:7}  {servers:13}  {statistics.median(costs):16.2f}  ({each})  {statistics.median(rates):10.0f}"
        )


if __name__ == "__main__":
    main()
