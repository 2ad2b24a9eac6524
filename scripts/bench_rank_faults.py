"""How soon everybody knows that a rank has failed, and how soon its device is free: a server under load, one of whose ranks is killed, stopped or raises.

    python scripts/bench_rank_faults.py --shape qwen3-8b
    python scripts/bench_rank_faults.py --shape qwen3-0.6b --faults stopped,raises --rank-seconds 5
    python scripts/bench_rank_faults.py --shape tiny --args '{"device": "cpu", "num_gpu_blocks_override": 640}'
    python scripts/bench_rank_faults.py --faults killed,actor --args '{"distributed_executor_backend": "ray"}'

With Ray, whose cluster must run on this machine (`ray start --head`), "actor" kills the process of Ray's that holds a rank.
Seconds are counted from the fault. A stopped rank is given --rank-seconds to move again before it counts as failed (`PAGERUNNER_LIMIT_RANK_SECONDS`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from pagerunner.config import EngineArgs
from served_shape import write_served

FAULTS = ("killed", "stopped", "raises", "actor")
FAULTY = "helpers.faulty_ranks:build"  # of tests/
RAISE = 501  # the prompt's token at which a rank of FAULTY raises
EXITING = 4  # a flag in /proc/PID/stat: the process ends, but what it holds isn't free yet
FREE_BYTES = 2**29
SERVE = """
import sys, msgspec
from pagerunner.config import EngineArgs
from pagerunner.server.launch import run_server
options = {"core_factory": sys.argv[2]} if sys.argv[2] else {}
sys.exit(run_server(EngineArgs(**msgspec.json.decode(sys.argv[1])), port=0, served_model_name="model", **options))
"""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--ranks", type=int, default=2, help="tensor_parallel_size")
    parser.add_argument("--faults", default="killed", help=f"some of {','.join(FAULTS)}")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rank-seconds", type=float, default=30)
    parser.add_argument("--args", type=json.loads, default={}, help="more of EngineArgs, as JSON")
    return parser.parse_args()


def stat(pid: int) -> tuple[str, int]:
    """A process's state, a letter (X if it is gone), and its flags."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "X", EXITING
    return fields[0], int(fields[6])


def gone(pid: int) -> bool:
    """Whether all its threads have ended, so that its parent can know."""
    try:
        return stat(pid)[0] in "XZ" and len(os.listdir(f"/proc/{pid}/task")) == 1
    except (FileNotFoundError, ProcessLookupError):
        return True


def below(pid: int) -> list[int]:
    """All processes that this one has started, and theirs."""
    try:
        found = [int(one) for task in Path(f"/proc/{pid}/task").glob("*/children") for one in task.read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return found + [other for one in found for other in below(one)]


def rank_processes() -> set[int]:
    """Those of all ranks on this machine, whoever has started them."""
    found = set()
    for one in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if b"pagerunner.engine.rank" in one.read_bytes().split(b"\0"):
                found.add(int(one.parent.name))
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def used_bytes() -> list[int]:
    """Of each device's memory; empty where there is none."""
    try:
        pynvml = importlib.import_module("pynvml")
        pynvml.nvmlInit()
    except Exception:
        return []
    handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
    return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles]


class Clock:
    """When things were first true, in seconds from `begin`."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.at: dict[str, float] = {}
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def watch(self, seconds: float, **conditions: Callable[[], bool]) -> None:
        """In a thread: look every so many seconds."""

        def look() -> None:
            while not self._ended.is_set():
                for name, true in conditions.items():
                    if name not in self.at and true():
                        self.at[name] = time.perf_counter() - self.begin
                time.sleep(seconds)

        self._threads.append(threading.Thread(target=look, daemon=True))
        self._threads[-1].start()

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


class Load(threading.Thread):
    """Streams that last until the server ends them: when each began to answer, and when and how it ended."""

    def __init__(self, port: int, streams: int) -> None:
        super().__init__(daemon=True)
        self.port, self.streams = port, streams
        self.begun = 0
        self.ended: list[float] = []
        self.last: list[bytes] = []

    def run(self) -> None:
        asyncio.run(self._all())

    async def _all(self) -> None:
        await asyncio.gather(*map(self._one, range(self.streams)))

    async def _one(self, number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        prompt = [1_000 + number + at for at in range(64)]
        writer.write(
            post({"prompt": prompt, "max_tokens": 3_000, "ignore_eos": True, "stream": True, "temperature": 0})
        )
        tail = b""
        try:
            while piece := await reader.read(2**16):
                self.begun += b"data:" not in tail and b"data:" in piece
                tail = (tail + piece)[-2_000:]
        except ConnectionError as error:
            tail += str(error).encode()
        self.ended.append(time.perf_counter())
        self.last.append(tail)
        writer.close()


def post(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def health(port: int) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except OSError:
        return 0, ""
    finally:
        connection.close()


def measure(options: argparse.Namespace, directory: Path, fault: str) -> None:
    args = {
        "model": str(directory),
        "load_format": "dummy",
        "tensor_parallel_size": options.ranks,
        "max_num_seqs": options.streams + 1,
        "max_model_len": 4_096,
        **options.args,
    }
    EngineArgs(**args)  # whose sentence says what is wrong
    before, began, others = used_bytes(), time.perf_counter(), rank_processes()
    tests = str(Path(__file__).parents[1] / "tests")
    environment = os.environ | {"PAGERUNNER_LIMIT_RANK_SECONDS": f"{options.rank_seconds:g}"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*sys.path, tests]))
    factory = FAULTY if fault == "raises" else ""
    command = [sys.executable, "-c", SERVE, msgspec.json.encode(args).decode(), factory]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            if not line:
                raise SystemExit(f"{fault}: the server hasn't started")
            print(f"{fault}: ready after {time.perf_counter() - began:.1f} s", flush=True)
            ranks = sorted(rank_processes() - others)
            report(fault, server, ranks, int(line.rsplit(":", 1)[1]), before, options)
        finally:
            server.kill()


def report(
    fault: str,
    server: subprocess.Popen[str],
    ranks: list[int],
    port: int,
    before: list[int],
    options: argparse.Namespace,
) -> None:
    others = [*below(server.pid), *ranks]
    assert len(ranks) == options.ranks, ranks
    load = Load(port, options.streams)
    load.start()
    until = time.perf_counter() + 60
    while load.begun < options.streams and time.perf_counter() < until:
        time.sleep(0.01)
    time.sleep(0.5)
    loaded = used_bytes()
    said: list[str] = []

    def unhealthy() -> bool:
        status, text = health(port)
        said[:] = said or ([text] if status == 503 else [])
        return status == 503

    clock = Clock()
    clock.watch(0.002, unhealthy=unhealthy)
    clock.watch(
        0.002,
        ending=lambda: bool(stat(ranks[-1])[1] & EXITING),
        rank_gone=lambda: gone(ranks[-1]),
        ranks_gone=lambda: all(map(gone, ranks)),
        all_gone=lambda: all(map(gone, others)),
    )
    clock.watch(0.02, server_gone=lambda: server.poll() is not None)
    for number, used in enumerate(before):
        clock.watch(0.02, **{f"card {number}": lambda at=number, used=used: used_bytes()[at] < used + FREE_BYTES})
    clock.begin = time.perf_counter()
    match fault:
        case "killed":
            os.kill(ranks[-1], signal.SIGKILL)
        case "actor":
            os.kill(parent(ranks[-1]), signal.SIGKILL)
        case "stopped":
            os.kill(ranks[-1], signal.SIGSTOP)
        case "raises":
            asker = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            asker.request("POST", "/v1/completions", json.dumps({"prompt": [RAISE], "max_tokens": 1}))
    wanted = {"unhealthy", "all_gone", "server_gone", *(f"card {number}" for number in range(len(before)))}
    until = time.perf_counter() + options.rank_seconds + 20
    while not wanted <= clock.at.keys() and time.perf_counter() < until:
        time.sleep(0.02)
    clock.end()
    load.join(1)
    told = sorted(at - clock.begin for at in load.ended)
    with_reason = sum(b"of %d" % options.ranks in tail for tail in load.last)
    names = {
        "ending": "the rank begins to end",
        "rank_gone": "it is gone",
        "unhealthy": "/health is 503",
        "ranks_gone": "all ranks are gone",
        "all_gone": "the core and all others too",
        "server_gone": "the server has ended",
        **{f"card {number}": f"memory of card {number} is free" for number in range(len(before))},
    }
    gib = ", ".join(f"{(now - then) / 2**30:.1f}" for now, then in zip(loaded, before, strict=True))
    print(
        f"{fault}, {options.streams} streams, rank limit {options.rank_seconds:g} s; GiB in use on each card: {gib or '-'}"
    )
    for name, words in names.items():
        print(f"  {words:32} {clock.at[name]:7.3f} s" if name in clock.at else f"  {words:32}  not in time")
    when = f"{told[0]:.3f} to {told[-1]:.3f} s" if told else "never"
    print(f"  {len(told)} of {options.streams} clients' streams ended {when}, {with_reason} with the reason")
    print(f"  said: {said[0] if said else '-'}", flush=True)


def main() -> None:
    options = parse()
    if unknown := set(options.faults.split(",")) - set(FAULTS):
        raise SystemExit(f"--faults: there are {', '.join(FAULTS)}, not {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as directory:
        write_served(options.shape, Path(directory))
        for fault in options.faults.split(","):
            measure(options, Path(directory), fault)


if __name__ == "__main__":
    main()
