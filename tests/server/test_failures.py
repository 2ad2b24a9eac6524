"""The core dies, hangs or never starts; the server is stopped; the port is taken; the key is wrong."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from helpers import failing_core, fake_core
from helpers.patience import patient, until
from helpers.serving import MODEL, RunningServer, readers, running_server
from pagerunner import limits
from pagerunner.config import EngineArgs
from pagerunner.errors import CheckpointError, ConfigError
from pagerunner.server.launch import run_server

PROGRAM = """
import sys
from helpers import fake_core
from pagerunner.config import EngineArgs
from pagerunner.server.launch import run_server
options = dict(port=0, served_model_name="tiny", core_factory=fake_core.FACTORY, drain_seconds=float(sys.argv[2]))
sys.exit(run_server(EngineArgs(model=sys.argv[1]), **options))
"""


def set_options(monkeypatch: pytest.MonkeyPatch, **options: object) -> None:
    monkeypatch.setenv(fake_core.OPTIONS_VARIABLE, msgspec.json.encode(options).decode())


@contextmanager
def server_process(model: Path, drain_seconds: float = 30) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`run_server` in a process of its own, as the command line runs it, and its URL."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PROGRAM, str(model), str(drain_seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    with process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().rsplit(" ", 1)[-1].strip()
            for _ in range(200):
                try:
                    httpx.get(f"{url}/health")
                    break
                except httpx.ConnectError:
                    time.sleep(0.02)
            yield process, url
        finally:
            process.kill()


def refuses(url: str) -> bool:
    """Whether the server takes no new connections any more: it has seen a signal."""
    try:
        httpx.get(f"{url}/health")
    except httpx.ConnectError:
        return True
    except httpx.TransportError:  # closed while the request was on its way
        return False
    return False


@pytest.mark.parametrize("how", ["crash", "kill"])
def test_when_the_core_dies_every_client_hears_why_within_a_second(
    how: str, text_side: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_options(monkeypatch, step_seconds=0.01)
    reason = {"crash": "the fake core was told to crash", "kill": "SIGKILL"}[how]
    with running_server(EngineArgs(model=str(text_side))) as server:
        streams = readers(server.url, 5, prompt="abc", max_tokens=1900)
        start = time.monotonic()
        if how == "kill":
            os.kill(server.engine.core_pid, signal.SIGKILL)
        else:
            response = server.post("/v1/completions", {"prompt": [fake_core.CRASH], "max_tokens": 1})
            assert response.status_code == 503 and reason in response.json()["error"]["message"]
        for reader in streams:
            reader.join(patient(5))
            assert reader.ended_at - start < patient(1.0)
            assert reason in str(reader.error)
        for response in (server.get("/health"), server.get("/ping"), server.post("/v1/completions", {"prompt": "a"})):
            assert response.status_code == 503 and reason in response.json()["error"]["message"]
        assert server.get("/metrics").status_code == 200
        assert reason in caplog.text


def test_a_server_whose_core_has_died_tells_everybody_and_ends_with_an_exit_status_that_restarts_it(
    text_side: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_options(monkeypatch, step_seconds=0.01)
    with server_process(text_side) as (process, url):
        [reader] = readers(url, 1, prompt="ab", max_tokens=1900)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        [core] = [pid for pid in children if b"engine.core.process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(int(core), signal.SIGKILL)
        start = time.monotonic()
        reader.join(patient(5))
        assert "SIGKILL" in str(reader.error)
        health = httpx.get(f"{url}/health")
        assert health.status_code == 503 and "SIGKILL" in health.text
        assert process.wait(patient(15)) == 1
        assert time.monotonic() - start < patient(14)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


def test_health_fails_when_the_core_hangs(text_side: Path) -> None:
    with running_server(EngineArgs(model=str(text_side)), drain_seconds=0.1, stall_seconds=0.3) as server:
        assert server.get("/health").status_code == 200
        client = threading.Thread(target=_ignore_errors, args=(server, [fake_core.HANG]))
        client.start()
        deadline = time.monotonic() + patient(5)
        while (response := server.get("/health")).status_code == 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert response.status_code == 503
        assert "1 unfinished requests and has made no step" in response.json()["error"]["message"]
        os.kill(server.engine.core_pid, signal.SIGKILL)
        client.join()


def test_a_step_that_hangs_logs_all_stacks_once_and_fails_health(
    text_side: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    args = EngineArgs(model=str(text_side), num_gpu_blocks_override=128)
    options: dict[str, Any] = {"drain_seconds": 0.1, "stall_seconds": 0.4, "core_factory": failing_core.FACTORY}
    with running_server(args, **options) as server:
        assert server.post("/v1/completions", {"prompt": [5], "max_tokens": 3}).status_code == 200
        client = threading.Thread(target=_ignore_errors, args=(server, [failing_core.HANG]))
        client.start()
        deadline = time.monotonic() + patient(10)
        logged = ""
        while time.monotonic() < deadline and not (
            "(PAGERUNNER_LIMIT_STALL_SECONDS)" in logged and server.get("/health").status_code == 503
        ):
            time.sleep(0.05)
            logged += capfd.readouterr().err
        assert server.get("/health").status_code == 503
        assert "A step has taken more than 0.4 seconds" in logged
        assert "_wait_for_a_device_that_never_answers" in logged and "Thread MainThread" in logged
        time.sleep(0.6)
        assert (logged + capfd.readouterr().err).count("A step has taken more than") == 1
        os.kill(server.engine.core_pid, signal.SIGKILL)
        client.join()


def _ignore_errors(server: RunningServer, prompt: list[int]) -> None:
    try:
        server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
    except httpx.HTTPError:
        pass


def test_a_failed_start_raises_the_cores_error(text_side: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_options(monkeypatch, start="checkpoint_error")
    with pytest.raises(CheckpointError, match="truncated"):
        run_server(EngineArgs(model=str(text_side)), port=0, core_factory=fake_core.FACTORY)


def test_a_port_in_use_is_found_before_the_model_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"Port {port} on 127.0.0.1 is in use; .* --port"):
            run_server(EngineArgs(model="no such model"), port=port)  # whose loading would raise another error


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("no.such.host.invalid", 8000, "no.such.host.invalid"),
        ("127.0.0.1", 70000, r"port must be in \[0, 65535\], got 70000"),
        ("192.0.2.1", 8000, "cannot be opened"),
    ],
)
def test_addresses_that_cannot_be_had(host: str, port: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run_server(EngineArgs(model="no such model"), host=host, port=port)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_streams_finish(
    number: signal.Signals, text_side: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_options(monkeypatch, step_seconds=0.01)
    with server_process(text_side) as (process, url):
        [reader] = readers(url, 1, prompt="ab", max_tokens=60)
        process.send_signal(number)
        until(lambda: refuses(url))
        reader.join(patient(10))
        assert reader.error is None and reader.reason == "length"
        assert reader.text == "ab" * 60 or len(reader.text) >= 60
        assert process.wait(patient(10)) == 0


def test_the_second_signal_ends_streams_with_what_they_have(text_side: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_options(monkeypatch, step_seconds=0.01)
    with server_process(text_side) as (process, url):
        [reader] = readers(url, 1, prompt="ab", max_tokens=1900)
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        until(lambda: refuses(url))  # a second signal before the first is seen would be one with it
        process.send_signal(signal.SIGTERM)
        reader.join(patient(10))
        assert reader.error is None and reader.reason == "abort" and reader.text
        assert process.wait(patient(10)) == 0
        assert time.monotonic() - start < patient(5)


def test_what_outlasts_the_shutdown_timeout_ends_with_an_error(
    text_side: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_options(monkeypatch, step_seconds=0.01)
    with running_server(EngineArgs(model=str(text_side)), drain_seconds=0.5) as server:
        url = server.url
        [reader] = readers(url, 1, prompt="ab", max_tokens=1900)
        whole: list[httpx.Response] = []
        body = {"prompt": "ab", "max_tokens": 1900}
        client = threading.Thread(
            target=lambda: whole.append(httpx.post(f"{url}/v1/completions", json=body, timeout=20))
        )
        client.start()
        until(lambda: server.engine.num_unfinished == 2)
        server.stop()
        reader.join(patient(10))
        client.join(10)
        assert reader.text and "--shutdown-timeout" in str(reader.error)
        assert whole[0].status_code == 503 and "within 0.5 seconds" in whole[0].json()["error"]["message"]


@pytest.mark.parametrize("control", ["/pause?mode=keep", "/sleep?level=1&mode=keep"])
def test_requests_that_a_parked_engine_can_never_finish_end_at_once(
    control: str, text_side: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_options(monkeypatch, step_seconds=0.01)
    with running_server(EngineArgs(model=str(text_side)), drain_seconds=60) as server:
        [reader] = readers(server.url, 1, prompt="ab", max_tokens=1900)
        assert server.post(control).status_code == 200
        start = time.monotonic()
        server.stop()
        reader.join(patient(10))
        assert reader.text and "the engine is paused or sleeps" in str(reader.error)
    assert time.monotonic() - start < patient(5)


def test_requests_that_a_pause_waits_for_may_end_before_the_server(
    text_side: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that came after it began to wait can't."""
    set_options(monkeypatch, step_seconds=0.01)
    with running_server(EngineArgs(model=str(text_side)), drain_seconds=60) as server:
        url = server.url
        [reader] = readers(url, 1, prompt="ab", max_tokens=150)
        paused: list[httpx.Response] = []
        refused: list[httpx.Response] = []
        late = {"prompt": "ab", "max_tokens": 1}
        threads = [
            threading.Thread(target=lambda: paused.append(httpx.post(f"{url}/pause?mode=wait", timeout=20))),
            threading.Thread(target=lambda: refused.append(httpx.post(f"{url}/v1/completions", json=late, timeout=20))),
        ]
        for thread in threads:
            thread.start()
            time.sleep(patient(0.3))  # until it has arrived
        server.stop()
        reader.join(patient(10))
        assert reader.error is None and reader.reason == "length"
        for thread in threads:
            thread.join(10)
        assert [answer.status_code for answer in (*paused, *refused)] == [200, 503]
        assert "the engine is paused or sleeps" in refused[0].json()["error"]["message"]


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
        assert process.wait(patient(10)) == 0


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
        deadline = time.monotonic() + patient(30)
        while not children.read_text().strip():  # the core's process: signals are handled before it is started
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(patient(5)) == 0


def test_an_api_key_guards_everything_but_health(text_side: Path) -> None:
    with running_server(EngineArgs(model=str(text_side)), api_keys=["first secret", "zweiter Schlüssel"]) as server:
        assert server.get("/health").status_code == 200
        paths = ["/v1/models", "/metrics", "/version", "/load", "/memory", "/nothing", "/health/", "//health"]
        for path in paths:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first secret"}):
                response = server.get(path, headers=headers)
                assert response.status_code == 401, path
                assert response.json()["error"]["type"] == "UnauthorizedError"
        assert server.post("/v1/completions", {"prompt": "a"}).status_code == 401
        for key in ("first secret", "zweiter Schlüssel"):
            headers = {"Authorization": f"Bearer {key}".encode()}
            assert server.get("/version", headers=headers).status_code == 200
        answer = server.openai(api_key="first secret").completions.create(model=MODEL, prompt="a", max_tokens=1)
        assert answer.choices
        with pytest.raises(openai.AuthenticationError):
            server.openai(api_key="wrong").models.list()


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
                client.settimeout(5)
                client.connect((host, int(port)))
                clients.append(client)
                with contextlib.suppress(OSError):
                    client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
            until(lambda: httpx.get(f"{url}/health", timeout=5).status_code == 503)  # told so, at once
            for client in clients[:40]:
                client.close()
            until(lambda: httpx.get(f"{url}/health", timeout=5).status_code == 200)
            text = log.read_text(encoding="utf-8", errors="replace")
            for client in clients:
                client.close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            for client in clients:
                client.close()
            process.kill()
    assert "A connection is refused" in text and len(text) < 4_000, text[:2_000]


def test_a_full_queue_says_when_to_come_again(text_side: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_options(monkeypatch, step_seconds=0.05)
    monkeypatch.setattr(limits, "MAX_QUEUED_REQUESTS", 6)
    with running_server(EngineArgs(model=str(text_side), max_num_seqs=2)) as server:
        body = {"prompt": [40, 41], "max_tokens": 4, "ignore_eos": True}
        assert server.post("/v1/completions", {**body, "n": 6}).status_code == 200
        chat = {"messages": [{"role": "user", "content": "a word, and some more"}]}
        for path, larger, param in (  # each would be refused whenever it comes
            ("completions", {"prompt": [40, 41], "n": 7}, "n"),
            ("completions", {"prompt": "a", "n": 7}, "n"),
            ("completions", {"prompt": [[40, 41]] * 7}, "prompt"),
            ("completions", {"prompt": ["a"] * 4, "n": 2}, "n"),
            ("chat/completions", {**chat, "n": 7}, "n"),
        ):
            refused = server.post(f"/v1/{path}", larger)
            assert refused.status_code == 400 and "Retry-After" not in refused.headers
            assert refused.json()["error"]["param"] == param
            assert "at most 6 may wait at once (PAGERUNNER_LIMIT_MAX_QUEUED_REQUESTS" in refused.text
        found: list[httpx.Response] = []
        together = threading.Barrier(30)

        def ask() -> None:
            together.wait()
            found.append(server.post("/v1/completions", body))

        asking = [threading.Thread(target=ask) for _ in range(30)]
        for one in asking:
            one.start()
        for one in asking:
            one.join()
        statuses = {response.status_code for response in found}
        assert statuses == {200, 429}
        refused = next(response for response in found if response.status_code == 429)
        assert int(refused.headers["Retry-After"]) >= 1
        assert "PAGERUNNER_LIMIT_MAX_QUEUED_REQUESTS" in refused.json()["error"]["message"]
        server.wait_idle()
        progress = server.engine._desk.progress
        assert progress.queued == progress.queued_tokens == 0
        assert server.post("/v1/completions", body).status_code == 200
        monkeypatch.setattr(limits, "MAX_QUEUED_TOKENS", 10)
        text = "a word, and some more words that have more than ten tokens"
        for path, larger, param in (
            ("completions", {"prompt": [[5] * 8] * 4}, "prompt"),
            ("completions", {"prompt": [5] * 11}, "prompt"),
            ("completions", {"prompt": [5] * 8, "n": 2}, "n"),
            ("completions", {"prompt": text}, "prompt"),
            ("completions", {"prompt": text, "stream": True}, "prompt"),
            ("completions", {"prompt": "sixteen ", "n": 2}, "n"),
            ("chat/completions", {**chat}, "messages"),
            ("responses", {"input": text}, "input"),
        ):
            refused = server.post(f"/v1/{path}", larger)
            assert refused.status_code == 400, refused.text
            error = refused.json()["error"]
            assert error["message"].startswith("The request has ") and "MAX_QUEUED_TOKENS" in error["message"]
            assert error["param"] == param
        server.wait_idle()
        assert progress.queued == progress.queued_tokens == 0
