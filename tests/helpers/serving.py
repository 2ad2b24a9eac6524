"""A really listening server in a thread, for tests with real clients."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

from helpers import fake_core
from helpers.checkpoints import make_config, write_tokenizer
from helpers.patience import LONG, patient
from pagerunner.config import EngineArgs
from pagerunner.engine.frontend.async_engine import AsyncEngine
from pagerunner.server import launch, listening
from pagerunner.server.http_logs import HttpLogs

MODEL = "tiny"

# A server sets apart the objects of a process of its own. The tests' process isn't one, and tests/conftest.py has set them apart.
launch.set_apart = contextlib.nullcontext  # type: ignore[assignment]


class RunningServer:
    """The address of a server, its engine, and clients for it."""

    def __init__(self, url: str, engine: AsyncEngine, stop: Callable[[], None]) -> None:
        self.url = url
        self.engine = engine
        self.stop = stop

    def openai(self, **options: Any) -> openai.OpenAI:
        """A client that doesn't retry, so that tests see the first answer."""
        return openai.OpenAI(base_url=f"{self.url}/v1", max_retries=0, timeout=LONG, **{"api_key": "none", **options})

    def async_openai(self) -> openai.AsyncOpenAI:
        """The same for asyncio."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=LONG)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """POST JSON, or raw `content`."""
        if body is not None:
            options["json"] = body
        return httpx.post(f"{self.url}{path}", timeout=LONG, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        """GET."""
        return httpx.get(f"{self.url}{path}", timeout=LONG, **options)

    @contextmanager
    def streaming(self, readers: int, bodies: Callable[[int], Iterable[dict[str, Any]]]) -> Iterator[None]:
        """Threads that read streams of completions while the block runs, each those of its own bodies in turn."""
        stop = threading.Event()

        def read(number: int) -> None:
            for body in bodies(number):
                asked = {"json": {**body, "stream": True, "ignore_eos": True}, "timeout": 60}
                with httpx.stream("POST", f"{self.url}/v1/completions", **asked) as stream:  # type: ignore[arg-type]
                    for _ in stream.iter_lines():
                        if stop.is_set():
                            return

        threads = [threading.Thread(target=read, args=(number,)) for number in range(readers)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample in /metrics."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        for line in self.get("/metrics").text.splitlines():
            if line.startswith((f"vllm:{name}{{", f"vllm:{name} ")) and all(label in line for label in wanted):
                return float(line.rsplit(" ", 1)[1])
        raise KeyError(name)

    def wait_idle(self, seconds: float = 5.0) -> None:
        """Wait until the engine has nothing to do and holds no pages for requests."""
        deadline = time.monotonic() + patient(seconds)
        while self.engine.num_unfinished or self.engine.stats.running or self.engine.stats.waiting:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.engine.num_unfinished} sequences are unfinished: {self.engine.stats}")
            time.sleep(0.01)


class Reader(threading.Thread):
    """Reads one stream to its end and keeps what came, or the error."""

    def __init__(self, client: openai.OpenAI, body: dict[str, Any]) -> None:
        super().__init__()
        self.client = client
        self.body = body
        self.text = ""
        self.reason: str | None = None
        self.error: Exception | None = None
        self.ended_at = 0.0
        self.begun = threading.Event()

    def run(self) -> None:
        """Read."""
        try:
            for chunk in self.client.completions.create(model=MODEL, stream=True, **self.body):
                self.begun.set()
                for choice in chunk.choices:
                    self.text += choice.text
                    self.reason = choice.finish_reason or self.reason
        except openai.OpenAIError as error:
            self.error = error
        self.ended_at = time.monotonic()


def readers(url: str, count: int, **body: Any) -> list[Reader]:
    """Threads that read one stream each, on a connection each, and have begun to.

    A client takes a tenth of a second of a processor to make. With one for each thread the first streams had ended before the last began.
    """
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LONG)
    found = [Reader(client, body) for _ in range(count)]
    for reader in found:
        reader.start()
    for reader in found:
        assert reader.begun.wait(LONG)
    return found


def write_text_side(path: Path, **config: Any) -> Path:
    """A checkpoint directory without weights: config.json and tokenizer, all that a fake core's frontend needs."""
    import json

    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(make_config("qwen3", vocab_size=2048, **config)), encoding="utf-8")
    write_tokenizer(path, 512, add_bos=False)
    return path


@contextmanager
def running_server(
    args: EngineArgs, *, core_factory: str = fake_core.FACTORY, **options: Any
) -> Iterator[RunningServer]:
    """Serve on a free loopback port in a thread; stopped and joined at the end."""
    listener = listening.bind("127.0.0.1", 0)
    started = threading.Event()
    box: dict[str, Any] = {}

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def on_ready(engine: AsyncEngine, stop: listening.StopSignals) -> None:
            box["engine"], box["stop"] = engine, lambda: loop.call_soon_threadsafe(stop.ask)
            started.set()

        await launch.serve(
            args,
            listener,
            served_model_name=MODEL,
            core_factory=core_factory,
            on_ready=on_ready,
            **{"logs": HttpLogs(access=False), **options},
        )

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            box["error"] = error
        finally:
            started.set()

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    if "error" in box:
        thread.join()
        raise box["error"]
    port = listener.getsockname()[1]
    server = RunningServer(f"http://127.0.0.1:{port}", box["engine"], box["stop"])
    try:
        _wait_listening(server)
        yield server
    finally:
        gc.collect()  # a client that a test has left open keeps its request running
        seconds = listening.DRAIN_SECONDS + 10
        if thread.is_alive():
            box["stop"]()
        thread.join(seconds)
        listener.close()
    if thread.is_alive():
        raise TimeoutError(f"the server has not stopped within {seconds:g} seconds")
    if "error" in box:
        raise box["error"]


def _wait_listening(server: RunningServer) -> None:
    deadline = time.monotonic() + LONG
    while True:
        try:
            server.get("/health")
            return
        except httpx.ConnectError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
