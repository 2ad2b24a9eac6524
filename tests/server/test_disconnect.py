"""A client that leaves frees its pages: mid-stream, before the first token, in a whole answer, and in a storm."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from helpers import fake_core
from helpers.serving import MODEL, RunningServer, running_server
from pagerunner.config import EngineArgs

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


def wait_busy(server: RunningServer, sequences: int) -> None:
    for _ in range(300):
        if server.engine.num_unfinished == sequences:
            return
        asyncio.run(asyncio.sleep(0.01))
    raise TimeoutError(f"{server.engine.num_unfinished} of {sequences} sequences")


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
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{slow_server.url}/v1/completions", json={**ENDLESS, "prompt": ["a", "b"]}, timeout=0.3)
    slow_server.wait_idle()
    assert aborted(slow_server) - before == 2


def test_leaving_before_the_first_token(slow_server: RunningServer) -> None:
    with httpx.stream("POST", f"{slow_server.url}/v1/completions", json={**ENDLESS, "n": 8, "stream": True}) as full:
        events = full.iter_raw()  # dropping it would close the connection
        next(events)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{slow_server.url}/v1/completions", json={**ENDLESS, "stream": True}, timeout=0.3)
        wait_busy(slow_server, 8)
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
        async with httpx.AsyncClient(base_url=slow_server.url, timeout=30, limits=limits) as client:
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
