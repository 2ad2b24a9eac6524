"""The core dies, hangs or never starts; the server is stopped; the port is taken; the key is wrong; the queue is full."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from helpers import failing_core, fake_core
from helpers.patience import LONG, patient, stretched, until
from helpers.server_process import set_options
from helpers.serving import MODEL, RunningServer, readers, running_server
from pagerunner import limits
from pagerunner.config import EngineArgs
from pagerunner.errors import CheckpointError, ConfigError
from pagerunner.server.launch import run_server

pytestmark = [pytest.mark.days(2), pytest.mark.usefixtures("forked")]  # each ends a server's process


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
            os.kill(server.engine.replicas[0].client.pid, signal.SIGKILL)
        else:
            response = server.post("/v1/completions", {"prompt": [fake_core.CRASH], "max_tokens": 1})
            assert response.status_code == 503 and reason in response.json()["error"]["message"]
        for reader in streams:
            reader.join(LONG)
            assert reader.ended_at - start < patient(1.0)
            assert reason in str(reader.error)
        for response in (server.get("/health"), server.get("/ping"), server.post("/v1/completions", {"prompt": "a"})):
            assert response.status_code == 503 and reason in response.json()["error"]["message"]
        assert server.get("/metrics").status_code == 200
        assert reason in caplog.text


def test_health_fails_when_the_core_hangs(text_side: Path) -> None:
    stall = stretched(0.5)
    with running_server(EngineArgs(model=str(text_side)), drain_seconds=0.1, stall_seconds=stall) as server:
        assert server.get("/health").status_code == 200
        client = threading.Thread(target=_ignore_errors, args=(server, [fake_core.HANG]))
        client.start()
        deadline = time.monotonic() + LONG + stall
        while (response := server.get("/health")).status_code == 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert response.status_code == 503
        said = "1 unfinished requests and has made no step"
        assert said in response.json()["error"]["message"]
        response = server.post("/v1/completions", {"prompt": "a"})
        assert response.status_code == 503 and said in response.json()["error"]["message"]
        for call in (
            "POST /sleep?level=0",
            "POST /wake_up",
            "POST /reset_prefix_cache",
            "GET /is_sleeping",
            "GET /memory",
        ):
            response = httpx.request(*call.split()[:1], server.url + call.split()[1], timeout=LONG)
            assert response.status_code == 503 and said in response.text, call
        os.kill(server.engine.replicas[0].client.pid, signal.SIGKILL)
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
        deadline = time.monotonic() + LONG
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
        os.kill(server.engine.replicas[0].client.pid, signal.SIGKILL)
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
            target=lambda: whole.append(httpx.post(f"{url}/v1/completions", json=body, timeout=LONG))
        )
        client.start()
        until(lambda: server.engine.num_unfinished == 2)
        server.stop()
        reader.join(LONG)
        client.join(LONG)
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
        reader.join(LONG)
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
            threading.Thread(target=lambda: paused.append(httpx.post(f"{url}/pause?mode=wait", timeout=LONG))),
            threading.Thread(
                target=lambda: refused.append(httpx.post(f"{url}/v1/completions", json=late, timeout=LONG))
            ),
        ]
        for thread in threads:
            thread.start()
            time.sleep(stretched(0.3))  # until it has arrived
        server.stop()
        reader.join(LONG)
        assert reader.error is None and reader.reason == "length"
        for thread in threads:
            thread.join(LONG)
        assert [answer.status_code for answer in (*paused, *refused)] == [200, 503]
        assert "the engine is paused or sleeps" in refused[0].json()["error"]["message"]


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
        progress = server.engine.replicas[0].desk.progress
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
