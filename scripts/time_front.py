"""What a streamed request costs the processes of a server, without a device and without sockets: processor time of one thread.

    python scripts/time_front.py api [--tokens 16] [--at-once 64]
    python scripts/time_front.py core [--clients 8]

`api` is a process that serves HTTP: connections whose bytes are kept, and a core that gives every request a token a step. `core` is the
core's loop with the real scheduler and a model that does nothing (scripts/time_host.py), for requests of several such processes. A request
has 64 tokens, and when one ends the next one comes. What stands in for the other side isn't counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import socket
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
import zmq

import time_host
from pagerunner import SamplingParams
from pagerunner.config import EngineArgs
from pagerunner.engine.core import messages as wire
from pagerunner.engine.core.client import LoadedCore
from pagerunner.engine.core.garbage import set_apart
from pagerunner.engine.core.process import CoreLoop
from pagerunner.engine.frontend.async_engine import AsyncEngine
from pagerunner.memory.planner import plan_memory
from pagerunner.memory.report import plan_json
from pagerunner.memory.specs import FullKV
from pagerunner.types import EngineRequest, RequestUpdate
from served_shape import write_served

PROMPT, SEQUENCES = 64, 512
_encode = msgspec.msgpack.Encoder().encode


def prompt(rng: random.Random) -> list[int]:
    return rng.choices(range(3_000, 9_000), k=PROMPT)


class Core:
    """A core for one process that serves HTTP: each step gives every request one token."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._decoder = msgspec.msgpack.Decoder(wire.ToCore)
        self._running: dict[str, int] = {}
        self._messages: asyncio.Queue[bytes] = asyncio.Queue()
        self.recv, self.seconds = self._messages.get, 0.0

    def send(self, data: bytes) -> None:
        began = time.thread_time()
        message = self._decoder.decode(data)
        if isinstance(message, wire.Add):
            self._running[message.request_ids[0]] = 0
        self.seconds += time.thread_time() - began

    def step(self) -> None:
        updates = []
        for name in list(self._running):
            done = self._running[name] = self._running[name] + 1
            if done == self._tokens:
                del self._running[name]
            reason: Any = "length" if done == self._tokens else None
            admitted = time.monotonic() if done == 1 else 0.0
            updates.append(
                RequestUpdate(
                    request_id=name, new_token_ids=[3_000 + done], finish_reason=reason, admitted_time=admitted
                )
            )
        if updates:
            self._messages.put_nowait(_encode(wire.Updates(updates)))

    def close(self) -> None:
        """Nothing."""


class Kept(asyncio.Transport):
    """A connection whose bytes are kept."""

    def __init__(self, peer: socket.socket) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2), "socket": peer})
        self.pieces: list[bytes] = []

    def write(self, data: Any) -> None:
        self.pieces.append(data)

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        """Nothing."""

    def resume_reading(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


async def serving(options: argparse.Namespace, folder: Path) -> None:
    from uvicorn.server import ServerState

    from pagerunner.server.app import create_app
    from pagerunner.server.connection import Connection
    from pagerunner.server.gate import Keys
    from pagerunner.server.http_logs import HttpLogs
    from pagerunner.server.listening import uvicorn_config
    from pagerunner.server.metrics import Metrics, Registered
    from pagerunner.server.service import Service

    loop, core = asyncio.get_running_loop(), Core(options.tokens)
    plan = plan_memory(
        [FullKV(1, 16, "float32")],
        page_tokens=16,
        budget_bytes=None,
        num_pages_override=64,
        max_model_len=1_024,
        model_max_len=1_024,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=2_048,
    )
    ready = wire.Ready(1_024, msgspec.json.encode(plan_json(plan)))
    loaded = LoadedCore("It", 1, None, cast(Any, core), folder, loop.create_future(), ready, 1)
    metrics = Metrics("m", None, shared=Registered("m", str(folder)))
    args = EngineArgs(model=str(write_served("qwen3-0.6b", folder)), device="cpu")
    engine = await AsyncEngine.from_args(args, observer=metrics, cores=[loaded])
    config = uvicorn_config(create_app(Service(engine, ["m"], "m"), metrics, [], Keys()), HttpLogs())
    config.load()
    logging.disable(logging.INFO)
    state, rng, (peer, _other) = ServerState(), random.Random(0), socket.socketpair()
    connections = []
    for _ in range(options.at_once):
        connection, transport = Connection(config, state, {}, loop), Kept(peer)
        connection.connection_made(transport)
        connections.append((connection, transport))

    def request() -> bytes:
        what = {"prompt": prompt(rng), "max_tokens": options.tokens, "stream": True, "ignore_eos": True}
        body = json.dumps({**what, "temperature": 0, "stream_options": {"include_usage": True}}).encode()
        return b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    for number in range(options.rounds + 1):
        left = [request() for _ in range(options.requests if number else options.requests // 5)]
        count, apart, core.seconds, began = len(left), 0.0, 0.0, time.thread_time()
        for connection, _ in connections:
            connection.data_received(left.pop())
        ended = 0
        while ended < count:
            for _ in range(20):
                await asyncio.sleep(0)
            paused = time.thread_time()
            core.step()
            whole = []
            for connection, kept in connections:
                if kept.pieces and kept.pieces[0].startswith(b"HTTP/1.1 4"):
                    raise SystemExit(b"".join(kept.pieces).decode())
                if kept.pieces and kept.pieces[-1].endswith(b"0\r\n\r\n"):
                    whole.append(connection)
            for _, kept in connections:
                kept.pieces.clear()
            ended += len(whole)
            apart += time.thread_time() - paused
            for connection in whole[: len(left)]:
                connection.data_received(left.pop())
        if number:
            spent = time.thread_time() - began - apart - core.seconds
            print(f"{1e6 * spent / count:.0f} us a request of {options.tokens} tokens", flush=True)
    await engine.shutdown()


class Line:
    """A core's socket to one process that serves HTTP."""

    def __init__(self) -> None:
        self.come: list[bytes] = []
        self.gone: list[bytes] = []
        self.send = self.gone.append

    def recv(self, flags: int) -> bytes:
        if not self.come:
            raise zmq.Again
        return self.come.pop(0)


def core_loop(options: argparse.Namespace, folder: Path) -> None:
    import triton.runtime.jit  # as in a GPU's process: what collections look through  # noqa: F401

    torch.set_num_threads(1)
    llm: Any = time_host.make_llm(folder, SEQUENCES)
    core, rng = llm._core, random.Random(0)
    decoder = msgspec.msgpack.Decoder(wire.FromCore)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=options.tokens, output_kind="delta")

    def add(number: int) -> bytes:
        name = f"cmpl-{rng.getrandbits(128):032x}-c1-{number}"
        one = EngineRequest(
            request_id=name, prompt_token_ids=prompt(rng), params=params, max_tokens=options.tokens, seed=0
        )
        return _encode(wire.Add.of([one]))

    for number in range(options.rounds + 1):
        lines = [Line() for _ in range(options.clients)]
        loop: Any = CoreLoop(core, cast(Any, lines), 60.0)
        loop._lives = [1] * options.clients
        left = [add(one) for one in range(options.requests)]
        for one in range(SEQUENCES):
            lines[one % options.clients].come.append(left.pop())
        spent, steps, ended = [0.0, 0.0, 0.0], 0, 0
        while ended < options.requests:
            times = [time.thread_time()]
            for client, message in loop._receive():
                loop._client = client
                loop._handle(message)
            times.append(time.thread_time())
            updates = core.step()
            times.append(time.thread_time())
            loop._report(updates)
            times.append(time.thread_time())
            spent, steps = (
                [
                    sum(pair)
                    for pair in zip(spent, (b - a for a, b in zip(times, times[1:], strict=False)), strict=True)
                ],
                steps + 1,
            )
            for line in lines:
                for message in map(decoder.decode, line.gone):
                    for update in message.updates if isinstance(message, wire.Updates) else ():
                        if update.finish_reason is not None:
                            ended += 1
                            line.come += [left.pop()] if left else []
                line.gone.clear()
        if number:
            come, step, gone = (1e6 * seconds / options.requests for seconds in spent)
            print(
                f"{come + step + gone:.0f} us a request: messages in {come:.1f}, steps {step:.1f}, messages out {gone:.1f}; {steps} steps",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("process", choices=("api", "core"))
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--at-once", type=int, default=64, help="connections of a process that serves HTTP")
    parser.add_argument("--clients", type=int, default=8, help="processes that serve HTTP, in front of the core")
    parser.add_argument("--requests", type=int, default=2_048)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as name, set_apart():
        if options.process == "core":
            core_loop(options, Path(name))
        else:
            asyncio.run(serving(options, Path(name)))


if __name__ == "__main__":
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:  # prometheus_client reads it when it is imported
        with tempfile.TemporaryDirectory() as directory:
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = directory
            main()
