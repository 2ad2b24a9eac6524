"""Hundreds of concurrent streams over the real core, half of them dropped at random moments: nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.checkpoints import make_checkpoint
from helpers.effort import effort
from helpers.serving import RunningServer, running_server
from pagerunner.config import EngineArgs
from pagerunner.engine.core.client import DEFAULT_FACTORY

STREAMS = effort(250, 500)
BODY: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
LAST = {**BODY, "prompt": "The last one", "max_tokens": 24}


@pytest.fixture(scope="module")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = make_checkpoint(tmp_path_factory.mktemp("models"), "qwen3", vocab_size=400)
    args = EngineArgs(model=str(path), max_model_len=128, max_num_seqs=64, num_gpu_blocks_override=96)
    with running_server(args, core_factory=DEFAULT_FACTORY) as server:
        yield server


def tokens(server: RunningServer) -> list[int]:
    found: list[int] = server.post("/v1/completions", LAST).json()["choices"][0]["token_ids"]
    return found


async def one(server: RunningServer, number: int, chance: random.Random) -> str:
    """Reads its stream to the end, or leaves: before the request is whole, before an answer, or while it comes.

    Lines are counted, not seconds: a fast machine answers all streams in any number of seconds that a slow one needs.
    """
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps({**BODY, "prompt": f"Stream {number % 50}", "stream": True, "n": 1 + number % 2}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    leaves = number % 2 == 1
    whole = not leaves or chance.random() < 0.9
    writer.write(head.encode() + (data if whole else data[:20]))
    # A stream has 18 lines or more: 8 of headers and what precedes the first tokens, and 6 from "[DONE]" on.
    most_lines = (chance.randint(0, 11) if whole else 0) if leaves else None
    text = b""
    async with asyncio.timeout(60):
        while most_lines is None or text.count(b"\n") < most_lines:
            line = await reader.readline()
            if not line:
                break
            text += line
    if leaves and chance.random() < 0.5:
        writer.transport.abort()  # a reset instead of an orderly end
    writer.close()
    return "left" if b"[DONE]" not in text else text.decode()


def test_every_page_is_free_and_the_next_answer_exact(real_server: RunningServer) -> None:
    expected = tokens(real_server)
    chance = random.Random(0)

    async def storm() -> list[str]:
        return await asyncio.gather(*(one(real_server, number, chance) for number in range(STREAMS)))

    texts = asyncio.run(storm())
    assert not [number for number in range(0, STREAMS, 2) if texts[number] == "left"]
    assert sum(text == "left" for text in texts) == STREAMS // 2
    for number in range(0, STREAMS, 2):  # streams of one prompt have one text
        assert _ids(texts[number]) == _ids(texts[number % 50]), number
    real_server.wait_idle(20)
    assert tokens(real_server) == expected
    real_server.wait_idle()
    state = real_server.get("/memory").json()["state"]
    assert state["requests"] == [] and [group["in_use"] for group in state["groups"]] == [0]
    assert real_server.engine.num_unfinished == 0 and real_server.metric("kv_cache_usage_perc") == 0
    assert real_server.get("/health").status_code == 200


def _ids(text: str) -> list[int]:
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [token for event in events for choice in event["choices"] for token in choice["token_ids"]]
