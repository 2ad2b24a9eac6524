"""Connections that send half a request, read slowly, or bring very much; meanwhile others are served."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.effort import share_of_the_day
from helpers.patience import LONG, patient, until
from helpers.serving import MODEL, RunningServer, running_server
from pagerunner import limits
from pagerunner.config import EngineArgs
from pagerunner.server import http, lingering
from pagerunner.server.connection import Connection, ShortUrls

pytestmark = pytest.mark.days(3)  # each has a server of its own

GOOD = {"prompt": "abc", "max_tokens": 4, "temperature": 0}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


@contextmanager
def connected(server: RunningServer, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.settimeout(LONG)
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
        began = time.monotonic()
        with connected(server) as client:
            client.sendall(start)
            assert read_to_end(client) == b""
            assert 0.3 < time.monotonic() - began < patient(3)
    with connected(server) as client:  # a byte now and then doesn't help
        began = time.monotonic()
        with pytest.raises(OSError):
            for _ in range(100):
                client.sendall(b"a")
                time.sleep(0.05)
        assert time.monotonic() - began < patient(3)
    with connected(server) as client:  # nor does a first request that was whole
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(0.2)
        client.sendall(b"GET /health HTT")
        assert read_to_end(client).startswith(b"HTTP/1.1 200")
    assert answer(server) == before


def test_an_idle_connection_has_its_own_time(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(limits, "KEEP_ALIVE_SECONDS", 1)
    with connected(server) as client:
        began = time.monotonic()
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_to_end(client).startswith(b"HTTP/1.1 200")
        assert 0.9 < time.monotonic() - began < patient(3)


def test_a_request_that_comes_as_an_idle_connection_ends_is_answered(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop has looked for bytes, runs other streams, and then the timer. The request comes in between."""
    closing, sent = threading.Event(), threading.Event()
    handler = Connection.timeout_keep_alive_handler

    def behind_others(connection: Connection) -> None:
        closing.set()
        assert sent.wait(LONG)
        handler(connection)

    monkeypatch.setattr(limits, "KEEP_ALIVE_SECONDS", 0.1)
    monkeypatch.setattr(Connection, "timeout_keep_alive_handler", behind_others)
    ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connected(server) as client:
        client.sendall(ask)
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        assert closing.wait(LONG)
        client.sendall(ask)
        sent.set()
        assert client.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_client_that_resets_its_idle_connection_leaves_nothing_behind(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "KEEP_ALIVE_SECONDS", 0.3)
    with connected(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    time.sleep(0.5)  # its idle time is over
    answer(server)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


NOT_WAITED_FOR = {
    "nothing": b"",
    "half of the headers": b"GET /health HTTP/1.1\r\nHost: ",
    "idle": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "answered, no byte of the body": b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n",
    "answered, a part of the body": b"POST /nope HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nxxxx",
    "answered, chunks": b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n",
    "refused": HEAD + b"Content-Length: 99000000\r\n\r\nxx",
    "unreadable": b"GET\r\n\r\n",
}


def test_a_stop_waits_for_no_client_whose_answer_is_given(text_side: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering, "LINGER_SECONDS", 100)
    with contextlib.ExitStack() as clients:
        with running_server(EngineArgs(model=str(text_side))) as server:
            for data in NOT_WAITED_FOR.values():
                client = clients.enter_context(connected(server))
                client.sendall(data)
                if b"\r\n\r\n" in data:
                    assert client.recv(1000).startswith(b"HTTP/1.1 ")
            began = time.monotonic()
        assert time.monotonic() - began < patient(1.5)


HALVES = {
    "no byte": b"Content-Length: 1000\r\n\r\n",
    "a part": b'Content-Length: 1000\r\n\r\n{"prompt": "a',
    "a part of a chunk": b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"p',
}


@pytest.mark.parametrize("signals", [1, 2])
def test_a_stop_ends_requests_whose_bodies_do_not_come(text_side: Path, signals: int) -> None:
    """When --shutdown-timeout is over, or at the second signal: not ten seconds later."""
    with contextlib.ExitStack() as clients:
        with running_server(EngineArgs(model=str(text_side)), drain_seconds=0.5 if signals == 1 else 60) as server:
            sent = [clients.enter_context(connected(server)) for _ in HALVES]
            for client, data in zip(sent, HALVES.values(), strict=True):
                client.sendall(HEAD + data)
            assert answer(server)  # the others have arrived
            began = time.monotonic()
            for _ in range(signals):
                server.stop()
            replies = [read_to_end(client) for client in sent]
        assert time.monotonic() - began < patient(5)
    for reply in replies:
        assert reply.startswith(b"HTTP/1.1 503") and b"shutting down" in reply and b"is not complete" in reply


def test_a_server_whose_core_has_died_waits_for_no_body(text_side: Path) -> None:
    with contextlib.ExitStack() as clients:
        with running_server(EngineArgs(model=str(text_side)), drain_seconds=60, death_seconds=0.2) as server:
            client = clients.enter_context(connected(server))
            client.sendall(HEAD + HALVES["a part"])
            assert server.get("/health").status_code == 200  # the half has arrived
            began = time.monotonic()
            os.kill(server.engine.replicas[0].client.pid, signal.SIGKILL)
            reply = read_to_end(client)
        assert time.monotonic() - began < patient(5)
    assert reply.startswith(b"HTTP/1.1 503") and b"is not complete" in reply


@pytest.mark.parametrize("drips", [False, True])
def test_a_body_that_is_answered_already_is_not_waited_for_long(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, drips: bool
) -> None:
    """The first byte after the answer ends the time that an idle connection has; then nothing comes, or a byte now and then."""
    monkeypatch.setattr(limits, "HEADER_SECONDS", 0.5)
    monkeypatch.setattr(lingering, "LINGER_SECONDS", 0.3)
    with connected(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for _ in range(100 if drips else 1):
                client.sendall(b"x")
                time.sleep(0.05 if drips else 0)
            assert read_to_end(client) == b""
        assert 0.3 < time.monotonic() - began < patient(3)
    assert answer(server)


def test_a_body_that_never_ends_is_given_up(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.3)
    with connected(server) as client:
        client.sendall(request(GOOD, length=10_000))
        reply = read_to_end(client)
    assert reply.startswith(b"HTTP/1.1 408") and b"PAGERUNNER_LIMIT_BODY_SECONDS" in reply


def test_a_long_request_is_not_cut_by_the_header_limit(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADER_SECONDS", 1.5)
    with connected(server) as client:
        data = request(GOOD)
        client.sendall(data[:-5])
        time.sleep(2.0)
        client.sendall(data[-5:])
        assert client.recv(100).startswith(b"HTTP/1.1 200")


STREAM = {**GOOD, "max_tokens": 40, "ignore_eos": True, "stream": True}


@pytest.mark.parametrize("body", [GOOD, STREAM, {**GOOD, "n": 2}])
def test_a_client_that_only_reads_any_more_gets_its_answers(server: RunningServer, body: Any) -> None:
    with connected(server) as client:
        client.sendall(request(body) + request(GOOD))
        client.shutdown(socket.SHUT_WR)
        reply = read_to_end(client)
    assert reply.count(b"HTTP/1.1 200") == 2 and reply.endswith(b"}")
    assert b"[DONE]" in reply or not body.get("stream")


def test_a_client_that_leaves_a_stream_ends_its_request_though_no_token_comes(server: RunningServer) -> None:
    try:
        with connected(server) as client:
            client.sendall(request({**STREAM, "max_tokens": 1500, "n": 8}))  # which take longer than to pause
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
            assert server.post("/pause?mode=keep").status_code == 200
            client.settimeout(0.3)
            with contextlib.suppress(TimeoutError):  # a system answers a close at once where something is unread
                while client.recv(65536):
                    pass
            assert server.engine.num_unfinished == 8
        until(lambda: not server.engine.num_unfinished)
    finally:
        assert server.post("/resume").status_code == 200


def test_a_client_that_only_reads_a_stream_any_more_passes_over_a_comment(server: RunningServer) -> None:
    with connected(server) as client:
        client.sendall(request({**STREAM, "max_tokens": 300}))
        begun = client.recv(65536)
        client.shutdown(socket.SHUT_WR)
        reply = begun + read_to_end(client)
    assert reply.count(b"3\r\n:\n\n\r\n") == 1 and reply.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_client_of_http_1_0_that_sends_no_more_counts_as_gone(server: RunningServer) -> None:
    with connected(server) as client:
        client.sendall(request({**GOOD, "max_tokens": 1500, "ignore_eos": True}).replace(b"HTTP/1.1", b"HTTP/1.0"))
        client.shutdown(socket.SHUT_WR)
        assert read_to_end(client) == b"", "it must not be sent an interim answer"
    server.wait_idle()


def test_half_a_request_and_no_more(server: RunningServer) -> None:
    for half in (b"", b"GET /health HT", request(GOOD)[:-5]):
        with connected(server) as client:
            client.sendall(half)
            client.shutdown(socket.SHUT_WR)
            assert read_to_end(client) == b""


def test_empty_lines_before_a_request_are_passed_over(server: RunningServer) -> None:
    ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connected(server) as client:
        for pieces in ([b"\r\n" + ask], [b"\r\n\r\n", ask], [b"\r", b"\n", ask], [b"\r\n\r", b"\n" + ask]):
            for piece in pieces:
                client.sendall(piece)
                time.sleep(0.05)
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
        client.sendall(request(GOOD) + b"\r\n" + ask)  # as some old clients end a body
        client.shutdown(socket.SHUT_WR)
        assert read_to_end(client).count(b"HTTP/1.1 200") == 2
    for garbage in (b"\n" + ask, b"\r\r\n" + ask, b"\r\n \r\n" + ask):
        with connected(server) as client:
            client.sendall(garbage)
            assert read_to_end(client).startswith(b"HTTP/1.1 400")


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


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_more_than_is_read_gets_the_answer(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, chunked: bool
) -> None:
    """It sends all before it reads anything, as most clients do."""
    monkeypatch.setattr(lingering, "LINGER_SECONDS", 100)
    head = b"Transfer-Encoding: chunked\r\n\r\n" + b"zz\r\n" if chunked else b"Content-Length: 99000000\r\n\r\n"
    with connected(server) as client:
        client.sendall(HEAD + head)
        for _ in range(40):
            client.sendall(b"x" * 100_000)
            time.sleep(0.01)
        began = time.monotonic()
        client.shutdown(socket.SHUT_WR)
        reply = read_to_end(client)
        assert time.monotonic() - began < patient(5), "the connection ends with the client's half"
    assert reply.startswith(b"HTTP/1.1 400" if chunked else b"HTTP/1.1 413") and reply.endswith(b"}")
    assert answer(server)


def test_a_client_that_never_stops_sending_is_not_read_for_ever(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lingering, "LINGER_SECONDS", 0.3)
    with connected(server) as client:
        began = time.monotonic()
        client.sendall(HEAD + b"Content-Length: 99000000\r\n\r\n")
        with pytest.raises(ConnectionError):
            while time.monotonic() - began < 10:
                client.sendall(b"x")
                time.sleep(0.02)
        assert 0.2 < time.monotonic() - began < patient(3)


def test_a_body_that_drips_is_given_up(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_TOTAL_SECONDS", 0.6)
    with connected(server) as client:
        client.sendall(request(GOOD, length=10_000))
        began = time.monotonic()
        client.settimeout(0.1)
        reply = b""
        while not reply and time.monotonic() - began < 5:
            try:
                client.sendall(b" ")
                reply = client.recv(65536)
            except TimeoutError:
                pass
        client.settimeout(LONG)
        reply += read_to_end(client)  # the head may have come alone
    assert reply.startswith(b"HTTP/1.1 408") and b"PAGERUNNER_LIMIT_BODY_TOTAL_SECONDS" in reply


def test_bodies_that_are_being_received_have_a_bound_together(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_BODIES_BYTES", 100_000)
    half = request({"prompt": "x" * 90_000}, length=200_000)
    with connected(server) as first, connected(server) as second:
        first.sendall(half)
        until(lambda: http._in_flight.size > 80_000)
        second.sendall(half)
        reply = read_to_end(second)
        assert reply.startswith(b"HTTP/1.1 503") and b"MAX_BODIES_BYTES" in reply
        assert b"retry-after" in reply.lower()
        first.sendall(b"x" * 20_000)
        time.sleep(0.1)
        assert answer(server), "an ordinary body is received all the same"
    large = {"prompt": "x" * 90_000, "max_tokens": 1}
    until(lambda: server.post("/v1/completions", large).status_code != 503)
    assert answer(server)


AMBIGUOUS = {
    "both lengths": (
        HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"both Content-Length",
    ),
    "both, the other way": (
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
        b"both Content",
    ),
    "folded": (HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n", b"folded header"),
    "folded with a tab": (HEAD + b"X: a\n\tb\r\nContent-Length: 0\r\n\r\n", b"folded header"),
    "bad chunk": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"chunks"),
    "negative chunk": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n", b"chunks"),
    "no end of a chunk": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}xx", b"chunks"),
    "long extension": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2;" + b"a" * 1_000_000, b"chunks"),
}


@pytest.mark.parametrize("case", AMBIGUOUS)
@pytest.mark.parametrize("after_another", [False, True])
def test_what_two_servers_may_read_differently_is_refused_and_closed(
    server: RunningServer, case: str, after_another: bool
) -> None:
    data, words = AMBIGUOUS[case]
    with connected(server) as client:
        if after_another:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
        client.sendall(data + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        reply = read_to_end(client)
    assert reply.startswith(b"HTTP/1.1 400") and words in reply and reply.count(b"HTTP/1.1") == 1
    assert json.loads(reply.split(b"\r\n\r\n", 1)[1])["error"]["code"] == 400
    assert answer(server)


def test_a_chunked_body_is_read(server: RunningServer) -> None:
    body = json.dumps(GOOD).encode()
    chunks = b"".join(b"%x;a=b\r\n%c\r\n" % (1, byte) for byte in body) + b"0\r\n\r\n"
    with connected(server) as client:
        client.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
        assert client.recv(65536).startswith(b"HTTP/1.1 200")


def test_long_names_come_back_short(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    name = "n" * 1_000_000
    for path, body in (
        ("/v1/completions", {"prompt": "a", name: 1}),
        ("/v1/completions", {"prompt": "a", "model": name}),
        ("/v1/chat/completions", {"messages": [{"role": name, "content": "a"}]}),
        ("/v1/completions", {"prompt": "a", "stop": [1], "user": name}),
    ):
        response = server.post(path, body)
        assert 400 <= response.status_code < 500 and len(response.content) < 2_000, response.text[:200]
    assert len(server.get("/v1/models/" + "n" * 10_000).content) < 1_000
    assert len(server.get("/nothing/" + "n" * 10_000).content) < 1_000
    assert all(len(record.getMessage()) < 1_500 for record in caplog.records)


def test_long_urls_are_cut_in_the_access_log() -> None:
    record = logging.LogRecord("uvicorn.access", logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', (), None)
    record.args = ("127.0.0.1:5", "GET", "/" + "u" * 100_000, "1.1", 431)
    assert ShortUrls().filter(record) and len(record.getMessage()) < 300
    record.args = ("127.0.0.1:5", "GET", "/health", "1.1", 200)
    assert ShortUrls().filter(record) and record.getMessage() == '127.0.0.1:5 - "GET /health HTTP/1.1" 200'


def test_one_connection_too_many_is_told_so(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "MAX_CONNECTIONS", 5)
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(connected(server)) for _ in range(5)]
        time.sleep(0.2)
        for _ in range(20):
            with connected(server) as client:
                reply = read_to_end(client)
                assert reply.startswith(b"HTTP/1.1 503") and b"5 connections" in reply
                assert b"retry-after" in reply.lower()
        held[0].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert held[0].recv(1000).startswith(b"HTTP/1.1 200")
    lines = [record for record in caplog.records if "A connection is refused" in record.getMessage()]
    assert len(lines) <= 2 and (not lines or "MAX_CONNECTIONS" in lines[0].getMessage())
    monkeypatch.undo()
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
            assert text == expected and time.monotonic() - start < patient(10)
        threads = [threading.Thread(target=lambda one=one: with_slow.append(_to_done(one))) for one in sockets[:3]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
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
    """Three of six each day."""
    million = 10 * 2**20
    cases = [
        ({"prompt": "a" * million, "max_tokens": 1}, "PAGERUNNER_LIMIT_MAX_PROMPT_CHARS"),
        ({"prompt": "ab " * 400_000, "max_tokens": 1}, "max_model_len"),
        ({"prompt": [7] * 1_900_000, "max_tokens": 1}, "max_model_len"),
        ({"prompt": "a", "stop": ["x"] * 1_900_000}, "PAGERUNNER_LIMIT_MAX_STOP_STRINGS"),
        ({"prompt": [7] * (million // 3), "max_tokens": 1}, "PAGERUNNER_LIMIT_MAX_BODY_VALUES"),
        ({"prompt": "a", "user": [[[["x"]]]] * (million // 15), "max_tokens": 1}, None),
    ]
    for body, words in [cases[number] for number in share_of_the_day(len(cases), 2)]:
        data = json.dumps(body).encode()
        latencies = []
        done = threading.Event()

        def watch(done: threading.Event = done, latencies: list[float] = latencies) -> None:
            with httpx.Client(base_url=server.url, timeout=LONG) as client:
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
            assert response.status_code in (400, 413) and words in response.json()["error"]["message"], response.text[
                :300
            ]
        print(f"{words}: others waited up to {max(latencies, default=0):.2f} s")
        assert max(latencies, default=0) < patient(5)
    assert server.post("/v1/completions", content=b"x" * (limits.MAX_BODY_BYTES + 1)).status_code == 413
    answer_ = server.openai().completions.create(model=MODEL, prompt="abc", max_tokens=1)
    assert answer_.choices


def test_a_stream_is_the_same_with_and_without_chunks(server: RunningServer) -> None:
    def counted() -> float:
        lines = server.get("/metrics").text.splitlines()
        name = 'http_response_size_bytes_sum{handler="/v1/completions"}'
        return float(next((line.split()[-1] for line in lines if line.startswith(name)), 0))

    def stream(version: bytes) -> tuple[bytes, bytes, float]:
        before = counted()
        with connected(server) as client:
            client.sendall(
                request(STREAM).replace(b"HTTP/1.1", version).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
            )
            head, _, body = read_to_end(client).partition(b"\r\n\r\n")
        until(lambda: counted() > before)
        return head.lower(), body, counted() - before

    (old, plain, plain_size), (new, chunked, chunked_size) = map(stream, (b"HTTP/1.0", b"HTTP/1.1"))
    assert b"chunked" in new and b"chunked" not in old and chunked.endswith(b"\r\n0\r\n\r\n")
    events, rest = b"", chunked
    while rest != b"0\r\n\r\n":
        size, _, rest = rest.partition(b"\r\n")
        piece, end, rest = rest[: int(size, 16)], rest[int(size, 16) :][:2], rest[int(size, 16) + 2 :]
        assert end == b"\r\n" and piece.endswith(b"\n\n")  # whole events
        events += piece
    assert (plain_size, chunked_size) == (len(plain), len(events))
    texts = [
        "".join(json.loads(line[6:])["choices"][0]["text"] for line in body.split(b"\n\n") if line[6:7] == b"{")
        for body in (plain, events)
    ]
    assert texts[0] == texts[1] != "" and plain.endswith(b"data: [DONE]\n\n") and events.endswith(b"data: [DONE]\n\n")
