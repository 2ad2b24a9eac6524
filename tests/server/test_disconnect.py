"""A client that leaves frees its pages: mid-stream, before the first token, in a whole answer, and in a storm."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from helpers import fake_core
from helpers.effort import by_days
from helpers.patience import LONG, patient, until
from helpers.serving import MODEL, RunningServer, running_server, write_text_side
from pagerunner import limits
from pagerunner.config import EngineArgs
from pagerunner.server import launch

pytestmark = pytest.mark.usefixtures("forked")

ENDLESS = {"prompt": "abc def", "max_tokens": 1900, "ignore_eos": True}
ENDLESS_OPENAI = {
    "prompt": ENDLESS["prompt"],
    "max_tokens": ENDLESS["max_tokens"],
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture(scope="module")
def slow_server(text_side: Path) -> Iterator[RunningServer]:
    """10 ms a step, 8 at a time: nothing here finishes by itself within a test."""
    with pytest.MonkeyPatch.context() as patch:
        options = msgspec.json.encode(fake_core.FakeOptions(step_seconds=0.01)).decode()
        patch.setenv(fake_core.OPTIONS_VARIABLE, options)
        with running_server(EngineArgs(model=str(text_side), max_num_seqs=8), drain_seconds=0.2) as server:
            yield server


@contextmanager
def asked(server: RunningServer, path: str, body: dict[str, Any]) -> Iterator[None]:
    """A client that leaves at the end of the block."""
    host, port = server.url.removeprefix("http://").split(":")
    data = msgspec.json.encode(body)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as client:
        client.sendall(head.encode() + data)
        yield


def aborted(server: RunningServer) -> float:
    return server.metric("request_success_total", finished_reason="abort")


@pytest.mark.parametrize("n", [1, 3])
def test_leaving_a_stream(slow_server: RunningServer, n: int) -> None:
    before = aborted(slow_server)
    client = slow_server.openai()
    stream = client.completions.create(model=MODEL, **ENDLESS_OPENAI, n=n, stream=True)
    for _ in range(4):
        next(iter(stream))
    assert slow_server.engine.num_unfinished == n
    stream.close()
    slow_server.wait_idle()
    assert aborted(slow_server) - before == n
    assert slow_server.metric("kv_cache_usage_perc") == 0


def test_leaving_while_a_whole_answer_is_made(slow_server: RunningServer) -> None:
    before = aborted(slow_server)
    with asked(slow_server, "/v1/completions", {**ENDLESS, "prompt": ["a", "b"]}):
        until(lambda: slow_server.engine.num_unfinished == 2)
    slow_server.wait_idle()
    assert aborted(slow_server) - before == 2


def test_leaving_before_the_first_token(slow_server: RunningServer) -> None:
    with httpx.stream(
        "POST", f"{slow_server.url}/v1/completions", json={**ENDLESS, "n": 8, "stream": True}, timeout=LONG
    ) as full:
        events = full.iter_raw()  # dropping it would close the connection
        next(events)
        with asked(slow_server, "/v1/completions", {**ENDLESS, "stream": True}):
            until(lambda: slow_server.engine.num_unfinished == 9)
        until(lambda: slow_server.engine.num_unfinished == 8)
    slow_server.wait_idle()


def test_a_storm_of_leaving_clients(slow_server: RunningServer) -> None:
    chance = random.Random(0)

    async def one(client: httpx.AsyncClient, body: dict[str, Any], leave_after: float) -> None:
        try:
            async with asyncio.timeout(leave_after):
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    async for _ in response.aiter_raw():
                        pass
        except TimeoutError:
            pass

    async def main() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=slow_server.url, timeout=LONG, limits=limits) as client:
            await asyncio.gather(
                *(
                    one(client, {**ENDLESS, "stream": number % 2 == 0, "n": 1 + number % 3}, chance.uniform(0, 1.0))
                    for number in range(60)
                )
            )

    asyncio.run(main())
    slow_server.wait_idle()
    assert slow_server.metric("kv_cache_usage_perc") == 0
    answer = slow_server.openai().completions.create(model=MODEL, prompt="abc", max_tokens=1)
    assert answer.choices[0].finish_reason == "length"


LOOPS = """{%- for m in messages -%}{%- if m.content == "loop" -%}{%- for i in range(100000) -%}{%- for j in range(100000) -%}
{%- endfor -%}{%- endfor -%}{%- endif -%}{{ m.content }}{%- endfor -%}"""
"""A template that does not end by itself for the message "loop"."""
USER = [{"role": "user", "content": "loop"}]
RENDERING = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/messages": {"messages": USER, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": USER},
    "/v1/responses": {"input": "loop"},
    "/invocations": {"messages": USER},
    "/tokenize": {"messages": USER},
}


@contextmanager
def rendering_server(path: Path, **options: Any) -> Iterator[RunningServer]:
    """A server whose template renders "loop" for a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "TEMPLATE_SECONDS", 60.0)
        model = write_text_side(path / "model")
        (path / "loops.jinja").write_text(LOOPS, encoding="utf-8")
        args = EngineArgs(model=str(model), chat_template=str(path / "loops.jinja"))
        with running_server(args, drain_seconds=0.2, **options) as server:
            yield server


def load(server: RunningServer) -> int:
    return int(server.get("/load").json()["server_load"])


def wait_load(server: RunningServer, wanted: int, seconds: float = 2) -> None:
    deadline = time.monotonic() + patient(seconds)
    while (found := load(server)) != wanted:
        if time.monotonic() > deadline:
            raise TimeoutError(f"/load is {found}, not {wanted}")
        time.sleep(0.02)


@pytest.fixture(scope="module")
def rendering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with rendering_server(tmp_path_factory.mktemp("loops")) as server:
        yield server


@pytest.mark.parametrize(("path", "stream"), by_days(RENDERING, [False, True]))
def test_leaving_while_the_template_renders(rendering: RunningServer, path: str, stream: bool) -> None:
    body = {**RENDERING[path], **({"stream": True} if stream and "token" not in path else {})}
    with asked(rendering, path, body):
        wait_load(rendering, int(path != "/tokenize"))
        time.sleep(0.2)
    wait_load(rendering, 0)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/invocations"])
def test_leaving_while_a_text_is_tokenised(
    rendering: RunningServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def endless(*_: object, **__: object) -> list[int]:
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()
        return []

    monkeypatch.setattr(rendering.engine, "encode", endless)
    with asked(rendering, path, {"prompt": "abc", "add_special_tokens": False}):
        assert begun.wait(LONG)
    assert ended.wait(LONG)
    wait_load(rendering, 0)


def test_clients_that_left_while_rendering_hold_no_places(rendering: RunningServer) -> None:
    async def leave() -> None:
        async with httpx.AsyncClient(base_url=rendering.url, timeout=1) as client:
            body = {"messages": USER, "max_tokens": 1}
            await asyncio.gather(
                *(client.post("/v1/chat/completions", json=body) for _ in range(20)), return_exceptions=True
            )

    asyncio.run(leave())
    wait_load(rendering, 0)
    hello = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    assert rendering.post("/v1/chat/completions", hello).status_code == 200


def test_stopping_while_templates_render(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launch, "LAST_WORDS_SECONDS", 0.2)
    found: list[httpx.Response] = []
    body = {"messages": USER, "max_tokens": 1}
    with caplog.at_level(logging.ERROR), rendering_server(tmp_path) as server:
        clients = [
            threading.Thread(target=lambda: found.append(server.post("/v1/chat/completions", body))) for _ in range(6)
        ]
        for client in clients:
            client.start()
        wait_load(server, 6)
    for client in clients:
        client.join(LONG)
    assert [one.status_code for one in found] == [503] * 6
    assert "stopped" in found[0].json()["error"]["message"]
    assert [record.getMessage() for record in caplog.records] == []
