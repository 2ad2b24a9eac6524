"""What `pagerunner proxy` costs, and what its choice by prefix is worth.

    python scripts/bench_proxy.py cost [--rounds 5] [--requests 1500]
    python scripts/bench_proxy.py prefixes [--groups 12] [--conversations 2] [--turns 4] [--pages 64]

`cost` sends streamed requests (256 characters in, 16 tokens out) to a server without a model, directly and through the proxy in turns, and
prints medians. The processor time is the proxy's own, which other load on the machine changes least.

`prefixes` starts two servers with the demo model, each with so many pages of 16 tokens. Groups of conversations share a system prompt. It prints the share of prompt tokens that the servers had cached, for each policy. All answers must be equal.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from pagerunner.bench.http_client import HttpClient

BODY = b'{"model":"null","prompt":"' + b"a" * 256 + b'","max_tokens": 16, "stream": true}'


@contextmanager
def program(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A program of ours, and the URL or port that it prints first."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-m", *words], stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            found = next(
                word for line in process.stdout for word in line.split() if word.startswith("http") or word.isdigit()
            )
            while found.isdigit() and len(found) < 4:  # "1 of 1 servers take requests."
                found = next(word for line in process.stdout for word in line.split() if word.startswith("http"))
            yield process, found
        finally:
            process.send_signal(signal.SIGKILL)


@contextmanager
def proxy(urls: list[str], policy: str = "cache_aware") -> Iterator[tuple[subprocess.Popen[str], str]]:
    words = ("--disable-uvicorn-access-log", "--log-level", "warning", "--policy", policy, "--port", "0")
    with program("pagerunner", "proxy", *words, "--worker-urls", *urls) as found:
        yield found


def processor_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def load(url: str, requests: int, at_once: int) -> tuple[float, float, float]:
    """Requests a second, and median seconds to the first byte and to the last."""
    client = HttpClient(f"{url}/v1/completions", {})
    firsts, lasts = [], []
    left = iter(range(requests))

    async def sender() -> None:
        for _ in left:
            began, first = time.perf_counter(), 0.0

            def reader(status: int, piece: bytes, now: float) -> None:
                nonlocal first
                assert status == 200, piece
                first = first or now

            await client.post(BODY, reader)
            firsts.append(first - began)
            lasts.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(sender() for _ in range(at_once)))
    seconds = time.perf_counter() - began
    client.close()
    return requests / seconds, statistics.median(firsts), statistics.median(lasts)


def cost(options: argparse.Namespace) -> None:
    with program("pagerunner.bench.null_server") as (_, port), proxy([f"http://127.0.0.1:{port}"]) as (process, url):
        places = {"direct": f"http://127.0.0.1:{port}", "proxy": url}
        print("at once | way    | requests/s | first byte ms | whole ms | proxy's processor ms a request")
        for at_once in (1, 64, 256):
            found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in places}
            spent = []
            for _ in range(options.rounds):
                for name, place in places.items():
                    before = processor_seconds(process.pid)
                    found[name].append(asyncio.run(load(place, options.requests, at_once)))
                    if name == "proxy":
                        spent.append((processor_seconds(process.pid) - before) / options.requests)
            for name, runs in found.items():
                rate, first, last = (statistics.median(column) for column in zip(*runs, strict=True))
                own = f"{statistics.median(spent) * 1e3:.2f}" if name == "proxy" else ""
                print(f"{at_once:7} | {name:6} | {rate:10.0f} | {first * 1e3:13.2f} | {last * 1e3:8.2f} | {own}")


def conversations(options: argparse.Namespace, policy: str, url: str, answers: dict[str, str]) -> float:
    """The share of prompt tokens that were cached; the conversations' turns come in a random order."""
    rng = random.Random(0)
    told: dict[tuple[int, int], str] = {}
    turns = [(group, one) for group in range(options.groups) for one in range(options.conversations)] * options.turns
    rng.shuffle(turns)
    asked = cached = 0
    with httpx.Client(timeout=120) as client:
        for place in turns:
            system = f"Rules {place[0]}: " + f"be kind to number {place[0]} and count well. " * 8
            prompt = told.get(place, f"{system} Story {place[1]} begins.")
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            got = client.post(f"{url}/v1/completions", json=body).raise_for_status().json()
            text = got["choices"][0]["text"]
            assert answers.setdefault(prompt, text) == text, (
                f"{policy}: {prompt!r} got {text!r}, not {answers[prompt]!r}"
            )
            told[place] = f"{prompt}{text} And then it goes on for quite a while."
            asked += got["usage"]["prompt_tokens"]
            cached += got["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached / asked


def prefixes(options: argparse.Namespace) -> None:
    answers: dict[str, str] = {}
    words = (
        "serve",
        "demo",
        "--port",
        "0",
        "--max-model-len",
        "1024",
        "--num-gpu-blocks-override",
        str(options.pages),
        "--quiet",
    )
    for policy in ("round_robin", "cache_aware"):
        with (
            program("pagerunner", *words) as (_, one),
            program("pagerunner", *words) as (_, two),
            proxy([one, two], policy) as (_, url),
        ):
            print(f"{policy}: {conversations(options, policy, url, answers):.1%} of prompt tokens were cached")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    one = verbs.add_parser("cost")
    one.add_argument("--rounds", type=int, default=5)
    one.add_argument("--requests", type=int, default=1500)
    one.set_defaults(run=cost)
    two = verbs.add_parser("prefixes")
    for name, default in (("groups", 12), ("conversations", 2), ("turns", 4), ("pages", 64)):
        two.add_argument(f"--{name}", type=int, default=default)
    two.set_defaults(run=prefixes)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
