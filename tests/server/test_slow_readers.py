"""Clients that don't read what they asked for: they are given up in time, and others lose nothing."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers import fake_core
from helpers.patience import LONG, stretched, until
from helpers.serving import RunningServer, readers, running_server
from pagerunner import limits
from pagerunner.config import EngineArgs
from pagerunner.logs import SparingLog
from pagerunner.server import connection

pytestmark = [pytest.mark.usefixtures("forked"), pytest.mark.days(3)]

TOKENS = 60_000
ASKED = {"prompt": "abc", "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "n": 4, "logprobs": 5}


@pytest.fixture(scope="module")
def endless(text_side: Path) -> Iterator[RunningServer]:
    """Answers of so many tokens that no system keeps them for a client, at a millisecond a token."""
    with pytest.MonkeyPatch.context() as patch:
        options = fake_core.FakeOptions(step_seconds=0.001, max_model_len=2 * TOKENS, num_pages=100_000)
        patch.setenv(fake_core.OPTIONS_VARIABLE, msgspec.json.encode(options).decode())
        with running_server(EngineArgs(model=str(text_side), max_num_seqs=16), drain_seconds=0.2) as server:
            yield server


@pytest.fixture(autouse=True)
def each_warning_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even soon after another test's."""
    monkeypatch.setattr(connection, "_behind", SparingLog(connection.logger))


@contextmanager
def asking(server: RunningServer, body: dict[str, Any], version: str = "1.1") -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(LONG)
        client.connect((host, int(port)))
        client.sendall(head.encode() + data)
        yield client


def read_to_end(client: socket.socket) -> bytes:
    data = bytearray()
    while piece := client.recv(1 << 16):
        data += piece
    return bytes(data)


def test_a_stream_that_is_not_read_ends_with_an_error_and_others_go_on(
    endless: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "UNREAD_SECONDS", 0.5)
    with caplog.at_level(logging.WARNING):
        (beside,) = readers(endless.url, 1, prompt="abc", max_tokens=1500, extra_body={"ignore_eos": True})
        with asking(endless, ASKED) as client:
            until(lambda: endless.engine.num_unfinished > 1)
            beside.join()
            assert beside.error is None and beside.reason == "length"
            endless.wait_idle()
            assert endless.metric("kv_cache_usage_perc") == 0
            *_, error, end, rest = read_to_end(client).split(b"data: ")[-3:] + [b""]
    assert end.startswith(b"[DONE]") and not rest
    told = json.loads(error)["error"]
    assert told["code"] == 408 and "PAGERUNNER_LIMIT_UNREAD_SECONDS" in told["message"]
    assert "not read it for 0.5 seconds" in caplog.text and "failed" not in caplog.text


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_client_that_never_reads_is_disconnected(
    endless: RunningServer, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(limits, "UNREAD_SECONDS", 0.3)
    with asking(endless, ASKED, version):
        until(lambda: endless.engine.num_unfinished)
        endless.wait_idle()
        until(lambda: endless.get("/load").json()["server_load"] == 0)


@pytest.mark.parametrize(("stream", "seconds"), [(False, 0.3), (True, 1.5)])
def test_a_slow_reader_loses_nothing(
    endless: RunningServer, monkeypatch: pytest.MonkeyPatch, stream: bool, seconds: float
) -> None:
    """It takes longer than the limit for all that waits, but reads on within it, or catches up with its stream."""
    monkeypatch.setattr(limits, "UNREAD_SECONDS", stretched(seconds))
    body = {**ASKED, "prompt": [[7] * 2_000] * 4, "n": 1, "max_tokens": 200, "logprobs": 20, "echo": True}
    with asking(endless, {**body, "stream": stream}) as client:
        data, paused = bytearray(), 0
        end = b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}"
        while not (data.endswith(end) and data.count(b'"finish_reason":"length"') == 4):
            data += client.recv(1 << 16)
            if len(data) > paused:
                paused = len(data) + (1 << 18)
                time.sleep(0.05)


def test_an_answer_that_is_not_read_is_given_up(
    endless: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "UNREAD_SECONDS", 0.3)
    body = {"prompt": [[7] * 2_000] * 20, "max_tokens": 1, "echo": True, "logprobs": 20}
    with asking(endless, body) as client, caplog.at_level(logging.WARNING):
        until(lambda: "An answer is given up" in caplog.text)
        head, body_part = read_to_end(client).split(b"\r\n\r\n", 1)
    assert len(body_part) < int(head.lower().split(b"content-length: ")[1].split()[0])
