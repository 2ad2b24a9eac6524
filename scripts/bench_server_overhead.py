"""How much of the engine's offline rate is left behind HTTP: concurrent streams against `LLM.generate`, in turns.

    python scripts/bench_server_overhead.py [--streams 256] [--rounds 5] [--output-len 128]

Both run the same random model (`pagerunner bench`'s tiny shape) on the same prompts. Every round runs the offline engine
and then the server, so that other load on the machine hits both; what counts is the median of the rounds' ratios. On a machine
that has nothing else to do and cores for server and core, that comes near the ratio of CPU times, which is printed too. The
client reads raw bytes and counts events, so that it takes as little as possible of the cores that it shares with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pagerunner.bench.shapes import SHAPES
from pagerunner.bench.workloads import write_model

VOCAB = SHAPES["tiny"]["vocab_size"]


def write_checkpoint(directory: Path) -> Path:
    """The tiny shape without weights, with a byte-level tokenizer that has a text for every id of its vocabulary."""
    write_model("tiny", directory)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 8))) for _ in range(8_000)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [" ".join(words)],
        trainers.BpeTrainer(vocab_size=VOCAB, initial_alphabet=alphabet, show_progress=False, min_frequency=1),
    )
    if tokenizer.get_vocab_size() != VOCAB:
        raise SystemExit(f"the tokenizer has {tokenizer.get_vocab_size()} tokens, not {VOCAB}")
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def prompts(count: int, length: int, salt: int) -> list[list[int]]:
    """Fresh random ids, so that no prefix cache serves one round from another."""
    rng = random.Random(salt)
    return [[rng.randrange(VOCAB) for _ in range(length)] for _ in range(count)]


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "load_format": "dummy",
        "max_num_seqs": options.streams,
        "max_model_len": options.input_len + options.output_len,
    }


def offline(options: argparse.Namespace) -> None:
    """Child: one round for each line on standard input, which is a salt; prints its seconds."""
    from pagerunner import LLM, SamplingParams

    llm = LLM(options.offline, use_tqdm=False, **engine_options(options))
    params = SamplingParams(temperature=0, max_tokens=options.output_len, ignore_eos=True)
    print("ready", flush=True)
    for line in sys.stdin:
        batch = [{"prompt_token_ids": ids} for ids in prompts(options.streams, options.input_len, int(line))]
        start = time.perf_counter()
        outputs = llm.generate(batch, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(output.outputs[0].token_ids) == options.output_len for output in outputs)
        print(seconds, flush=True)


async def one_stream(port: int, body: bytes) -> tuple[int, int]:
    """Events and generated tokens of one stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
    events, tail = 0, b""
    while piece := await reader.read(2**18):
        events += piece.count(b"data: ")
        tail = (tail + piece)[-600:]
    writer.close()
    return events, int(tail.split(b'"completion_tokens":')[1].split(b",")[0])


async def online(port: int, options: argparse.Namespace, salt: int) -> tuple[float, int]:
    """Seconds for all streams, and their events."""
    common = {"max_tokens": options.output_len, "ignore_eos": True, "temperature": 0, "stream": True}
    bodies = [
        json.dumps({**common, "stream_options": {"include_usage": True}, "prompt": ids}).encode()
        for ids in prompts(options.streams, options.input_len, salt)
    ]
    start = time.perf_counter()
    results = await asyncio.gather(*(one_stream(port, body) for body in bodies))
    seconds = time.perf_counter() - start
    assert all(tokens == options.output_len for _, tokens in results), "a stream ended early"
    return seconds, sum(events for events, _ in results)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def measure(options: argparse.Namespace, directory: Path, children_of: list[subprocess.Popen[str]]) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in engine_options(options).items()]
    server = subprocess.Popen(
        [*options.python.split(), "-m", "pagerunner", "serve", str(directory), "--port=0", "--quiet", *flags],
        stdout=subprocess.PIPE,
        text=True,
    )
    here = [sys.executable, __file__, f"--offline={directory}"]
    here += [f"--{name}={getattr(options, name.replace('-', '_'))}" for name in ("streams", "input-len", "output-len")]
    engine = subprocess.Popen(here, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    children_of += [server, engine]
    assert server.stdout and engine.stdin and engine.stdout
    port = int(server.stdout.readline().rsplit(":", 1)[1])
    engine.stdout.readline()
    tokens = options.streams * options.output_len
    ratios, shares = [], []
    for number in range(options.rounds + 1):
        idle = cpu_seconds(engine.pid)
        engine.stdin.write(f"{number}\n")
        engine.stdin.flush()
        alone = float(engine.stdout.readline())
        alone_cpu = cpu_seconds(engine.pid) - idle
        pids = {"server": server.pid, "core": children(server.pid)[0]}
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        mine = resource.getrusage(resource.RUSAGE_SELF)
        served, events = asyncio.run(online(port, options, number))
        spent = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
        after = resource.getrusage(resource.RUSAGE_SELF)
        spent["client"] = after.ru_utime + after.ru_stime - mine.ru_utime - mine.ru_stime
        if number == 0:
            continue  # first use of both
        ratios.append(alone / served)
        shares.append(alone_cpu / spent["core"])
        busy = ", ".join(f"{name} {seconds:.2f}" for name, seconds in spent.items())
        print(
            f"round {number}: offline {tokens / alone:,.0f} tokens/s, served {tokens / served:,.0f} "
            f"({events} events), ratio {ratios[-1]:.3f}; of {served:.2f} s, CPU seconds: {busy} (offline {alone_cpu:.2f})",
            flush=True,
        )
    print(
        f"{options.streams} streams: median ratio {statistics.median(ratios):.3f}, best {max(ratios):.3f}; CPU time of the "
        f"offline engine to that of the served one {statistics.median(shares):.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--python", default=sys.executable, help="how to start the server, e.g. under a profiler")
    parser.add_argument("--offline", metavar="DIR", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.offline:
        offline(options)
        return
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="pagerunner-bench-") as directory:
        try:
            measure(options, write_checkpoint(Path(directory)), processes)
        finally:
            for process in processes:
                process.terminate()
                process.wait()


if __name__ == "__main__":
    main()
