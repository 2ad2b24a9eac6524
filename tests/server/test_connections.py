"""Connections that send half a request, read slowly, or bring very much; meanwhile others are served."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from helpers.serving import MODEL, RunningServer
from pagerunner import limits

GOOD = {"prompt": "abc", "max_tokens": 4, "temperature": 0}


@contextmanager
def connected(server: RunningServer, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.settimeout(10)
        client.connect((host, int(port)))
        yield client


def request(body: Any, length: int | None = None) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length or len(data)}\r\n\r\n"
    return head.encode() + data


def read_to_end(client: socket.socket) -> bytes:
    data = b""
    while piece := client.recv(65536):
        data += piece
    return data


def answer(server: RunningServer) -> Any:
    response = server.post("/v1/completions", GOOD)
    assert response.status_code == 200
    return response.json()["choices"][0]["text"]


def test_half_open_sockets_are_closed_in_time(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADER_SECONDS", 0.5)
    before = answer(server)
    starts = [b"", b"POST", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n", b"GET /health HTTP/1.1\r\nX: "]
    for start in starts:
        with connected(server) as client:
            began = time.monotonic()
            client.sendall(start)
            assert read_to_end(client) == b""
            assert 0.3 < time.monotonic() - began < 3
    with connected(server) as client:  # a byte now and then doesn't help
        began = time.monotonic()
        with pytest.raises(OSError):
            for _ in range(100):
                client.sendall(b"a")
                time.sleep(0.05)
        assert time.monotonic() - began < 3
    with connected(server) as client:  # nor does a first request that was whole
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(0.2)
        client.sendall(b"GET /health HTT")
        assert read_to_end(client).startswith(b"HTTP/1.1 200")
    assert answer(server) == before


def test_a_body_that_never_ends_is_given_up(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.3)
    with connected(server) as client:
        client.sendall(request(GOOD, length=10_000))
        reply = read_to_end(client)
    assert reply.startswith(b"HTTP/1.1 408") and b"PAGERUNNER_LIMIT_BODY_SECONDS" in reply


def test_a_long_request_is_not_cut_by_the_header_limit(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADER_SECONDS", 0.2)
    with connected(server) as client:
        data = request(GOOD)
        client.sendall(data[:-5])
        time.sleep(0.6)
        client.sendall(data[-5:])
        assert client.recv(100).startswith(b"HTTP/1.1 200")


def test_what_is_not_http_gets_an_error_object(server: RunningServer) -> None:
    for garbage in (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n"):
        with connected(server) as client:
            client.sendall(garbage)
            reply = read_to_end(client)
        assert reply.startswith(b"HTTP/1.1 400")
        assert json.loads(reply.split(b"\r\n\r\n", 1)[1])["error"]["code"] == 400


def test_garbage_after_a_request_harms_nobody(server: RunningServer) -> None:
    stream = {**GOOD, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with connected(server) as client:
        client.sendall(request(stream) + b"\x00\x00garbage\r\n\r\n")
        client.recv(1000)
    server.wait_idle()
    assert answer(server)


def test_slow_readers_hold_up_nobody_and_lose_nothing(server: RunningServer) -> None:
    """Eight streams that are not read, with small buffers, while others come and go; then all of their text is there."""
    body = {"prompt": [40, 41, 42], "max_tokens": 1500, "ignore_eos": True, "stream": True, "logprobs": 20}
    expected = None
    with_slow: list[bytes] = []
    clients = [connected(server, receive_buffer=4096) for _ in range(8)]
    sockets = [client.__enter__() for client in clients]
    try:
        for one in sockets:
            one.sendall(request(body))
        for _ in range(8):
            start = time.monotonic()
            text = answer(server)
            expected = expected or text
            assert text == expected and time.monotonic() - start < 10
        threads = [threading.Thread(target=lambda one=one: with_slow.append(_to_done(one))) for one in sockets[:3]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        for data in with_slow:
            assert b"[DONE]" in data and b'"finish_reason":"length"' in data
        assert len(with_slow) == 3
    finally:
        for client in clients:
            client.__exit__(None, None, None)
    server.wait_idle()
    assert server.metric("kv_cache_usage_perc") == 0


def _to_done(client: socket.socket) -> bytes:
    data = b""
    while b"[DONE]" not in data[-100:]:
        data += client.recv(65536)
    return data


def test_bodies_of_ten_megabytes(server: RunningServer) -> None:
    million = 10 * 2**20
    cases = [
        ({"prompt": "a" * million, "max_tokens": 1}, "PAGERUNNER_LIMIT_MAX_PROMPT_CHARS"),
        ({"prompt": "ab " * 400_000, "max_tokens": 1}, "max_model_len"),
        ({"prompt": [7] * (million // 3), "max_tokens": 1}, "max_model_len"),
        ({"prompt": "a", "stop": ["x"] * (million // 5)}, "PAGERUNNER_LIMIT_MAX_STOP_STRINGS"),
        ({"prompt": "a", "user": [[[["x"]]]] * (million // 15), "max_tokens": 1}, None),
    ]
    for body, words in cases:
        data = json.dumps(body).encode()
        latencies = []
        done = threading.Event()

        def watch(done: threading.Event = done, latencies: list[float] = latencies) -> None:
            with httpx.Client(base_url=server.url, timeout=20) as client:
                while not done.is_set():
                    start = time.monotonic()
                    client.get("/version")
                    latencies.append(time.monotonic() - start)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            response = server.post("/v1/completions", content=data)
        finally:
            done.set()
            watcher.join()
        if words is None:
            assert response.status_code == 200
        else:
            assert response.status_code == 400 and words in response.json()["error"]["message"], response.text[:300]
        print(f"{words}: others waited up to {max(latencies):.2f} s")
        assert max(latencies) < 5
    assert server.post("/v1/completions", content=b"x" * (limits.MAX_BODY_BYTES + 1)).status_code == 413
    answer_ = server.openai().completions.create(model=MODEL, prompt="abc", max_tokens=1)
    assert answer_.choices
