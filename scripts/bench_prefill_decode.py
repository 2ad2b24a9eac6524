"""What it brings to compute prompts on one engine and continue them on another: first tokens, and times between tokens of requests that decode.

    python scripts/bench_prefill_decode.py qwen3-8b
    python scripts/bench_prefill_decode.py qwen3-8b --rate 32 --tokens 1024 --after 128   # requests in a stream, each decoded to its end
    python scripts/bench_prefill_decode.py qwen3-8b --rate 32 --tokens 1024 --after 128 --devices 0,1   # the same, with a device for each engine

Two engines in two processes, which may share a device. Weights are random, and the same in both. Each prompt is computed by the first engine before the
second one's times are taken, as if it had a device of its own. With --devices both work at the same time, and a prompt goes on as soon as it is lent.
Tokens are compared with those that the first engine goes on with itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from pagerunner.bench.shapes import SHAPES
from pagerunner.bench.workloads import write_config
from pagerunner.config import EngineArgs
from pagerunner.engine.startup.build import build_core
from pagerunner.tiers import exchange
from pagerunner.types import EngineRequest, SamplingParams
from pagerunner.types.kv_transfer import KVTransferParams

LEND = KVTransferParams(do_remote_decode=True)
AFTER = 16  # tokens that are compared


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", nargs="?", default="qwen3-8b", choices=sorted(SHAPES))
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=8_192)
    parser.add_argument("--decoding", type=int, default=32, help="requests that decode while prompts come")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two prompts")
    parser.add_argument("--pages-gib", type=float, default=16)
    parser.add_argument("--host-gib", type=float, default=20)
    parser.add_argument("--threads", type=int, default=4, help="connections that pages come by")
    parser.add_argument("--rate", type=float, help="requests a second; then --prompts is how many come in all")
    parser.add_argument("--after", type=int, default=128, help="tokens that each of these is answered with")
    parser.add_argument(
        "--devices", help="a CUDA device for each engine, such as 0,1; they work side by side, with --rate"
    )
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    return parser.parse_args()


def prompt(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(1, 1_000), k=tokens)


class Engine:
    """A core in this process, and what the other process asks of it."""

    def __init__(self, options: argparse.Namespace, model: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        longest = options.tokens + 2_048
        extra = {"kv_lease_duration": 600, "num_threads": options.threads}
        self.core = build_core(
            EngineArgs(
                model=model,
                load_format="dummy",
                skip_tokenizer_init=True,
                max_model_len=longest,
                max_num_seqs=128 if options.rate else options.decoding + 8,
                max_num_batched_tokens=8_192 if options.rate else min(8_192, longest),
                kv_cache_memory_bytes=int(options.pages_gib * 2**30),
                kv_offloading_size=options.host_gib,
                kv_transfer_config={
                    "kv_connector": "PeerConnector",
                    "kv_role": "kv_both",
                    "kv_port": port,
                    "kv_connector_extra_config": extra,
                },
            )
        )
        for _ in range(300):  # until the host memory is locked
            if self.core._executor.host_ready >= 0.98 * options.host_gib * 2**30:
                break
            time.sleep(0.1)
        self._made = 0
        self.came: dict[str, list[tuple[float, list[int]]]] = {}
        self.ends: dict[str, Any] = {}

    def add(self, tokens: list[int], most: int, params: KVTransferParams | None = None, salt: str = "") -> str:
        self._made += 1
        name = f"r{self._made}"
        sampling = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False)
        self.came[name] = []
        self.core.add(
            EngineRequest(
                request_id=name,
                prompt_token_ids=tokens,
                params=sampling,
                seed=0,
                max_tokens=most,
                kv_transfer=params,
                cache_salt=salt,
            )
        )
        return name

    def step(self) -> None:
        for update in self.core.step():
            now = time.perf_counter()
            if update.new_token_ids:
                self.came[update.request_id].append((now, update.new_token_ids))
            if update.finish_reason:
                self.ends[update.request_id] = update

    def run(self, name: str) -> list[int]:
        while name not in self.ends:
            self.step()
        return [token for _, tokens in self.came[name] for token in tokens]

    def settle(self) -> None:
        while self.core.has_work:
            self.step()

    def single(self, seed: int, tokens: int, most: int, params: KVTransferParams | None = None) -> dict[str, Any]:
        """One prompt alone."""
        began = time.perf_counter()
        name = self.add(prompt(seed, tokens), most, params)
        made = self.run(name)
        return {
            "first": self.came[name][0][0] - began,
            "whole": time.perf_counter() - began,
            "tokens": made,
            "lent": self.ends[name].kv_transfer_params,
        }

    def busy(
        self, seeds: list[int], tokens: int, decoding: int, every: float, lent: list[KVTransferParams | None]
    ) -> dict[str, Any]:
        """Prompts come while others decode: first tokens, and times between tokens of the others."""
        streams = [self.add(prompt(90_000 + seeds[0] + number, 64), 1_900) for number in range(decoding)]
        while not all(len(self.came[name]) > 8 for name in streams):
            self.step()
        begin = time.perf_counter()
        coming = [
            (begin + every * number, seed, params)
            for number, (seed, params) in enumerate(zip(seeds, lent, strict=True))
        ]
        names: list[tuple[str, float]] = []
        while coming or not all(name in self.ends for name, _ in names):
            if coming and time.perf_counter() >= coming[0][0]:
                due, seed, params = coming.pop(0)
                names.append((self.add(prompt(seed, tokens), 1, params), due))
            self.step()
        gaps: list[float] = []
        for name in streams:
            times = [at for at, _ in self.came[name] if at >= begin]
            gaps += [after - before for before, after in itertools.pairwise(times)]
        self.core.abort(streams)
        self.settle()
        gaps.sort()
        return {
            "first": statistics.median(self.came[name][0][0] - due for name, due in names),
            "p50": gaps[len(gaps) // 2],
            "p99": gaps[int(len(gaps) * 0.99)],
            "worst": gaps[-1],
        }

    def stream(
        self,
        seeds: list[int],
        tokens: int,
        most: int,
        rate: float,
        lent: list[KVTransferParams | None] | None,
        salt: str = "",
        begin: float = 0.0,
        tell: bool = False,
    ) -> dict[str, Any]:
        """Requests come at a rate: their first tokens and ends, from when each was due, and the times between tokens of all.

        `begin` is on the clock of all processes. With `tell` a line says of each request, as soon as it has ended, what was lent. Without
        `lent` such lines come on standard input, and a request with its line.
        """
        names: dict[int, str] = {}
        begun, prompts = time.perf_counter(), [prompt(seed, tokens) for seed in seeds]
        begin = begin or 2 * time.perf_counter() - begun
        told = None if lent is not None else lines_ahead(len(seeds))
        ended: dict[int, float] = {}
        while len(ended) < len(seeds):
            if told is not None:
                while not told.empty():
                    index, params = json.loads(told.get())
                    params = None if params is None else msgspec.convert(params, KVTransferParams)
                    names[index] = self.add(prompts[index], most, params, salt)
            elif lent is not None:
                while len(names) < len(seeds) and time.perf_counter() >= begin + len(names) / rate:
                    names[len(names)] = self.add(prompts[len(names)], most, lent[len(names)], salt)
            if not self.core.has_work:
                time.sleep(0.0002)
                continue
            self.step()
            now = time.perf_counter()
            for index, name in names.items():
                if index not in ended and name in self.ends:
                    ended[index] = now
                    if tell:
                        say([index, self.ends[name].kv_transfer_params])
        due = [begin + number / rate for number in range(len(seeds))]
        came = [self.came[names[index]] for index in range(len(seeds))]
        return {
            "first": [one[0][0] - at for one, at in zip(came, due, strict=True)],
            "whole": [ended[index] - at for index, at in enumerate(due)],
            "gaps": sorted(after[0] - before[0] for one in came for before, after in itertools.pairwise(one)),
            "tokens": [[token for _, some in one for token in some] for one in came],
            "lent": [self.ends[names[index]].kv_transfer_params for index in range(len(seeds))],
        }

    def counts(self) -> dict[str, Any]:
        self.settle()
        found = self.core.stats().exchange
        assert found is not None
        return {"bytes": found.pulled_bytes_total, "failed": found.failed_total, "rate": found.bytes_per_second}


def say(what: Any) -> None:
    print(msgspec.json.encode(what).decode(), flush=True)


def lines_ahead(count: int) -> queue.SimpleQueue[str]:
    """So many lines of standard input, as they come."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for _ in range(count):
            lines.put(sys.stdin.readline())

    threading.Thread(target=read, daemon=True).start()
    return lines


def serve(options: argparse.Namespace) -> None:
    """Answer the parent's calls, one JSON line each."""
    exchange.MOST_LENT = 0.95  # of a stream all is lent before anything is pulled
    engine = Engine(options, options.engine)
    print(json.dumps("ready"), flush=True)
    while line := sys.stdin.readline():
        what, given = json.loads(line)
        for field in ("params", "lent"):
            if given.get(field) is not None:
                kind = KVTransferParams if field == "params" else list[KVTransferParams | None]
                given[field] = msgspec.convert(given[field], kind)
        say(getattr(engine, what)(**given))


class Remote:
    """An engine in a process of its own."""

    def __init__(self, model: str, device: str | None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--engine", model],
            env={**os.environ, **({} if device is None else {"CUDA_VISIBLE_DEVICES": device})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("an engine has ended; its log says why")
        return json.loads(line)

    def ask(self, *line: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line) + "\n")

    def __call__(self, what: str, **given: Any) -> Any:
        self.ask(what, given)
        return self.answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> None:
    options = parse()
    if options.engine:
        return serve(options)
    with tempfile.TemporaryDirectory() as directory:
        fields = dict(SHAPES[options.shape])
        fields["max_position_embeddings"] = max(fields.get("max_position_embeddings", 0), options.tokens + 2_048)
        model = str(write_config(Path(directory), **fields))
        began = time.perf_counter()
        devices = options.devices.split(",") if options.devices else [None, None]
        prefill, decode = (Remote(model, device) for device in devices)
        try:
            assert prefill.answer() == decode.answer() == "ready"
            print(f"start: {time.perf_counter() - began:.0f} s", flush=True)
            equal = (stream if options.rate else measure)(options, prefill, decode)
        finally:
            prefill.close()
            decode.close()
    if equal < 3:  # a prompt alone is continued by the same steps on both engines
        sys.exit(f"TOKENS ARE OTHERS: pages that were pulled gave {3 - equal} of 3 prompts another answer")


def measure(options: argparse.Namespace, prefill: Remote, decode: Remote) -> int:
    """Prompts one by one, and some that come while others decode. Returns how many of 3 have the same tokens on both engines."""
    tokens, count = options.tokens, options.prompts
    lend = msgspec.to_builtins(LEND)
    prefill("single", seed=1, tokens=tokens, most=1)
    decode("single", seed=1, tokens=tokens, most=1)
    lending, pulled, computed, equal = [], [], [], 0
    before = decode("counts")["bytes"]
    for seed in range(100, 103):
        one = prefill("single", seed=seed, tokens=tokens, most=1, params=lend)
        lending.append((one["first"], one["whole"]))
        wanted = prefill("single", seed=seed, tokens=tokens, most=AFTER)["tokens"]
        two = decode("single", seed=seed, tokens=tokens, most=AFTER, params=one["lent"])
        pulled.append(two["first"])
        equal += two["tokens"] == wanted
        computed.append(decode("single", seed=seed + 1_000, tokens=tokens, most=1)["first"])
    counts = decode("counts")
    each = (counts["bytes"] - before) / 3
    first, whole = (statistics.median(one[at] for one in lending) for at in (0, 1))
    print(
        f"one prompt of {tokens:,} tokens, {each / 1e6:,.0f} MB: first token {first * 1e3:.0f} ms where it is computed, its pages are lent after "
        f"{whole * 1e3:.0f} ms; first token where it is continued {statistics.median(pulled) * 1e3:.0f} ms after that ({each / statistics.median(pulled) / 1e9:.2f} GB/s), computed there "
        f"{statistics.median(computed) * 1e3:.0f} ms; {AFTER} tokens equal {equal} of 3; failed {counts['failed']}",
        flush=True,
    )
    asked = {"tokens": tokens, "decoding": options.decoding, "every": options.every}
    alone = decode("busy", seeds=list(range(2_000, 2_000 + count)), lent=[None] * count, **asked)
    seeds = list(range(3_000, 3_000 + count))
    lent = [prefill("single", seed=seed, tokens=tokens, most=1, params=lend)["lent"] for seed in seeds]
    apart = decode("busy", seeds=seeds, lent=lent, **asked)
    print(f"{options.decoding} requests decode while {count} prompts come, one each {options.every} s:")
    for what, found in (("prompts computed there", alone), ("prompts pulled", apart)):
        print(
            f"  {what:24} between tokens p50 {found['p50'] * 1e3:6.1f} ms, p99 {found['p99'] * 1e3:6.1f}, worst {found['worst'] * 1e3:6.1f}; first "
            f"token {found['first'] * 1e3:6.0f} ms",
            flush=True,
        )
    counts = decode("counts")
    print(f"pulled {counts['bytes'] / 1e9:.2f} GB, failed {counts['failed']}, {counts['rate'] / 1e9:.2f} GB/s")
    return equal


def stream(options: argparse.Namespace, prefill: Remote, decode: Remote) -> int:
    """The same requests apart and together. Without --devices the two engines take turns, as if each had a device of its own.

    Returns how many of 3 that come alone have the same tokens on both engines.
    """
    lend, count, asked = msgspec.to_builtins(LEND), options.prompts, {"tokens": options.tokens, "rate": options.rate}
    for engine in (prefill, decode):  # kernels and graphs
        engine("stream", seeds=list(range(24)), most=24, lent=[None] * 24, salt="warm", **asked)
    equal = 0
    for seed in range(100, 103):
        lent = prefill("single", seed=seed, tokens=options.tokens, most=1, params=lend)["lent"]
        wanted = prefill("single", seed=seed, tokens=options.tokens, most=options.after)["tokens"]
        equal += decode("single", seed=seed, tokens=options.tokens, most=options.after, params=lent)["tokens"] == wanted
    print(f"alone: {options.after} tokens equal in {equal} of 3", flush=True)
    asked["seeds"] = list(range(1_000, 1_000 + count))
    before = decode("counts")["bytes"]
    if options.devices:
        one, apart = side_by_side(prefill, decode, options.after, asked)
        first = apart["first"]
    else:
        one = prefill("stream", most=1, lent=[lend] * count, **asked)
        apart = decode("stream", most=options.after, lent=one["lent"], **asked)
        first = [sum(times) for times in zip(one["whole"], apart["first"], strict=True)]
    counts = decode("counts")
    together = decode("stream", most=options.after, lent=[None] * count, salt="together", **asked)
    rows = [("apart", apart["gaps"], first), ("together", together["gaps"], together["first"])]
    if options.devices:
        half = {**asked, "rate": options.rate / 2, "seeds": asked["seeds"][: count // 2]}
        found = decode("stream", most=options.after, lent=[None] * (count // 2), salt="half", **half)
        rows.append(("together, half as many (one of two engines)", found["gaps"], found["first"]))
    same = sum(mine == other for mine, other in zip(apart["tokens"], together["tokens"], strict=True))
    lent_all, pulled = sum(map(bool, one["lent"])), (counts["bytes"] - before) / 1e9
    print(
        f"{count} requests at {options.rate:g} a second, {options.tokens:,} tokens in, {options.after} out: lent {lent_all}, pulled {pulled:.1f} GB at "
        f"{counts['rate'] / 1e9:.2f} GB/s, failed {counts['failed']}; all tokens equal in {same} (others' steps decide how sums are rounded)"
    )
    rows.append(("prefill alone, until lent", [0.0], one["whole"]))
    if not options.devices:
        rows.append(("pulled", [0.0], apart["first"]))
    print("| ms | between tokens p50 | p99 | worst | first token p50 | p99 |\n|---|---|---|---|---|---|")
    for name, gaps, times in rows:
        found = [part(gaps, 0.5), part(gaps, 0.99), max(gaps), part(sorted(times), 0.5), part(sorted(times), 0.99)]
        print(f"| {name} |" + "".join(f" {1e3 * value:.1f} |" if value else " |" for value in found), flush=True)
    return equal


def side_by_side(prefill: Remote, decode: Remote, after: int, asked: dict[str, Any]) -> tuple[Any, Any]:
    """What both engines say of the stream, while one computes prompts and the other goes on with those that are lent."""
    count, begin = len(asked["seeds"]), time.perf_counter() + 2.0
    decode.ask("stream", {**asked, "most": after, "lent": None, "begin": begin})
    lend = [msgspec.to_builtins(LEND)] * count
    prefill.ask("stream", {**asked, "most": 1, "lent": lend, "begin": begin, "tell": True})
    for _ in range(count):
        decode.ask(*prefill.answer())
    return prefill.answer(), decode.answer()


def part(values: list[float], share: float) -> float:
    return values[int(len(values) * share)] if values else 0.0


if __name__ == "__main__":
    main()
