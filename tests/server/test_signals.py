"""A server in a process of its own: it is stopped by signals, its core dies, and it has few file descriptors."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from helpers.effort import share_of_the_day
from helpers.patience import LONG, patient, until
from helpers.processes import children_of
from helpers.server_process import PROGRAM, refuses, server_process, set_options
from helpers.serving import readers
from pagerunner.server import listening

pytestmark = pytest.mark.days(3)  # each starts a server's process


def test_a_server_whose_core_has_died_tells_everybody_and_ends_with_an_exit_status_that_restarts_it(
    text_side: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_options(monkeypatch, step_seconds=0.01)
    with server_process(text_side, 300) as (process, url):
        [reader] = readers(url, 1, prompt="ab", max_tokens=1900)
        [core] = children_of(process.pid, b"engine.core.process")
        os.kill(core, signal.SIGKILL)
        start = time.monotonic()
        reader.join(LONG)
        assert "SIGKILL" in str(reader.error)
        health = httpx.get(f"{url}/health", timeout=LONG)
        assert health.status_code == 503 and "SIGKILL" in health.text
        assert process.wait(LONG) == 1
        assert time.monotonic() - start < 2 * LONG, "requests that run would have 300 s"
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", timeout=LONG)


SIGNALS = [signal.SIGTERM, signal.SIGINT]


@pytest.mark.parametrize("number", [SIGNALS[number] for number in share_of_the_day(2, 2)])
def test_the_first_signal_lets_streams_finish(
    number: signal.Signals, text_side: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_options(monkeypatch, step_seconds=0.01)
    with server_process(text_side) as (process, url):
        [reader] = readers(url, 1, prompt="ab", max_tokens=60)
        process.send_signal(number)
        until(lambda: refuses(url))
        reader.join(LONG)
        assert reader.error is None and reader.reason == "length"
        assert reader.text == "ab" * 60 or len(reader.text) >= 60
        assert process.wait(LONG) == 0


@pytest.mark.parametrize("number", [SIGNALS[number] for number in share_of_the_day(2, 2, first=1)])
def test_the_second_signal_ends_streams_with_what_they_have(
    number: signal.Signals, text_side: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_options(monkeypatch, step_seconds=0.01)
    with server_process(text_side) as (process, url):
        [reader] = readers(url, 1, prompt="ab", max_tokens=1900)
        start = time.monotonic()
        process.send_signal(number)
        until(lambda: refuses(url))  # a second signal before the first is seen would be one with it
        process.send_signal(number)
        reader.join(LONG)
        assert reader.error is None and reader.reason == "abort" and reader.text
        assert process.wait(LONG) == 0
        assert time.monotonic() - start < patient(5)


def test_two_signals_lose_no_answer_that_was_made(text_side: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of two prompts, of which one has ended, and a whole answer that its client is slow to read."""
    set_options(monkeypatch, step_seconds=0.005)  # so that 1,900 tokens take longer than anything here
    with server_process(text_side) as (process, url):
        port = int(url.rsplit(":", 1)[1])
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\r\n"
        sockets = []
        for body in (
            {"prompt": [[40, 41], [50, 51]], "max_tokens": 1900, "stop_token_ids": [41], "return_token_ids": True},
            {"prompt": [[60] * 1900] * 5, "max_tokens": 1, "prompt_logprobs": 20},
        ):
            data = msgspec.json.encode(body)
            client = socket.create_connection(("127.0.0.1", port))
            client.sendall(head.format(len(data)).encode() + data)
            sockets.append(client)
        # the second answer begins: megabytes, more than sockets hold, and nobody reads
        select.select([sockets[1]], [], [], patient(20))
        process.send_signal(signal.SIGTERM)
        until(lambda: refuses(url))
        process.send_signal(signal.SIGTERM)
        time.sleep(1)
        answers = [_read_all(client) for client in sockets]
        first = [(choice["finish_reason"], len(choice["token_ids"])) for choice in answers[0]["choices"]]
        assert first[0] == ("stop", 2) and first[1][0] == "abort" and first[1][1] > 0
        assert [len(choice["prompt_logprobs"]) for choice in answers[1]["choices"]] == [1900] * 5
        assert process.wait(LONG) == 0


def _read_all(client: socket.socket) -> Any:
    data = bytearray()
    with client:
        while piece := client.recv(65536):
            data += piece
    return msgspec.json.decode(bytes(data).split(b"\r\n\r\n", 1)[1])


def test_a_signal_while_loading_stops_at_once(text_side: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_options(monkeypatch, load_seconds=60)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(text_side), "30"], env=env) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline = time.monotonic() + LONG
        while not children.read_text().strip():  # the core's process: signals are handled before it is started
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG) == 0


@pytest.mark.parametrize(("files", "said"), [(64, r"Only 64 open files are allowed .*at a time: 1\."), (256, "")])
def test_a_start_with_very_few_file_descriptors_says_so(
    files: int, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (files, files))
    with caplog.at_level("WARNING"):
        listening.allow_many_connections()
    assert re.search(said, caplog.text) if said else not caplog.text


def test_with_few_file_descriptors_the_server_answers_and_its_log_stays_short(text_side: Path, tmp_path: Path) -> None:
    """Connections that bring half a body, more than there are descriptors: others are told, and nothing floods."""
    program = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n" + PROGRAM
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    log = tmp_path / "log"
    with log.open("wb") as errors:
        command = [sys.executable, "-c", program, str(text_side), "1"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
    clients: list[socket.socket] = []
    with process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().rsplit(" ", 1)[-1].strip()
            host, port = url.removeprefix("http://").split(":")
            for _ in range(400):
                client = socket.socket()
                client.settimeout(LONG)
                client.connect((host, int(port)))
                clients.append(client)
                with contextlib.suppress(OSError):
                    client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
            until(lambda: httpx.get(f"{url}/health", timeout=LONG).status_code == 503)  # told so, at once
            for client in clients[:40]:
                client.close()
            until(lambda: httpx.get(f"{url}/health", timeout=LONG).status_code == 200)
            text = log.read_text(encoding="utf-8", errors="replace")
            for client in clients:
                client.close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(LONG) == 0
        finally:
            for client in clients:
                client.close()
            process.kill()
    assert "A connection is refused" in text and len(text) < 4_000, text[:2_000]
