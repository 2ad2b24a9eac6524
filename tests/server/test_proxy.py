"""The proxy in front of servers that behave well, slowly or badly."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from helpers.patience import LONG, patient, until
from helpers.proxies import END, EVENTS, Asked, answer, chunk, gone, running_proxy, upstreams
from pagerunner import limits
from pagerunner.errors import ConfigError
from pagerunner.server.proxy.options import ProxyOptions


def dies(asked: Asked) -> Iterator[bytes]:
    raise EOFError
    yield b""


def test_a_request_and_its_answer_pass_unchanged() -> None:
    odd = b'{"prompt": "a\\u00e9", "seed": 1e400, "n":1 , "n": 2}'
    reply = answer(b'{"odd":  1e400}\n', "418 I'm a teapot", "application/x-odd", "X-Own: 7\r\nDate: yesterday\r\n")
    with upstreams(lambda asked: [reply]) as (one,), running_proxy(worker_urls=[f"{one.url}/base/"]) as proxy:
        headers = {
            "Authorization": "Bearer secret",
            "X-Api-Key": "k",
            "X-Request-Id": "mine",
            "traceparent": "00-ab",
            "Connection": "x-hop",
            "X-Hop": "no",
            "TE": "trailers",
        }
        got = proxy.post("/v1/embeddings?a=%20b", content=odd, headers=headers)
        assert (got.status_code, got.content) == (418, b'{"odd":  1e400}\n')
        assert got.headers["x-own"] == "7" and got.headers["content-type"] == "application/x-odd"
        assert len(got.headers.get_list("date")) == 1 and got.headers["date"] != "yesterday"
        (asked,) = one.asked
        assert asked.line == "POST /base/v1/embeddings?a=%20b HTTP/1.1" and asked.body == odd
        assert asked.headers["host"] == one.url.removeprefix("http://")
        passed = {
            name: asked.headers.get(name) for name in ("authorization", "x-api-key", "x-request-id", "traceparent")
        }
        assert passed == {
            "authorization": "Bearer secret",
            "x-api-key": "k",
            "x-request-id": "mine",
            "traceparent": "00-ab",
        }
        assert not {"x-hop", "te", "transfer-encoding"} & asked.headers.keys()
        assert httpx.request("GET", f"{proxy.url}/v1/models/org/name", content=b"body", timeout=LONG).status_code == 418
        assert httpx.head(f"{proxy.url}/v1/models").headers["content-length"] == "16"
        one.asked.pop()
        assert one.asked[-1].line == "GET /base/v1/models/org/name HTTP/1.1"
        told = proxy.post("/sleep")
        assert (
            told.status_code == 404 and "POST /sleep is not passed on by the proxy" in told.json()["error"]["message"]
        )
        assert proxy.get("/v1/completions").status_code == 405
        for path in (b"/v1/models/../../metrics", b"/v1/models/%2e%2e/%2E./memory"):  # clients would shorten them
            with socket.create_connection(("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]))) as client:
                client.sendall(b"GET %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % path)
                assert client.makefile("rb").readline().split()[1] == b"404"
        assert len(one.asked) == 2


def test_a_stream_passes_piece_by_piece() -> None:
    read = threading.Event()

    def script(asked: Asked) -> Iterator[bytes]:
        yield EVENTS + chunk("1")
        assert read.wait(LONG), "the first event was held back"
        yield chunk("2") + END

    with upstreams(script) as (one,), running_proxy(worker_urls=[one.url]) as proxy:
        for _ in range(2):
            read.clear()
            with httpx.stream("POST", f"{proxy.url}/v1/completions", json={"stream": True}, timeout=LONG) as stream:
                lines = stream.iter_lines()
                assert next(lines) == "data: 1"
                read.set()
                assert list(lines) == ["", "data: 2", ""]
        assert one.connections <= 2, "one for the health, and one for both streams"
        assert proxy.metric("requests_total", server="server 0") == 2
        assert proxy.metric("requests_running") == 0


def test_a_client_that_does_not_read_holds_its_server_up_and_fills_no_memory() -> None:
    def script(asked: Asked) -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n"
        for _ in range(1000):
            yield bytes(1_000_000)

    with upstreams(script) as (one,), running_proxy(worker_urls=[one.url]) as proxy:
        with httpx.stream("POST", f"{proxy.url}/v1/completions", json={}, timeout=LONG) as stream:
            pieces = stream.iter_raw()
            next(pieces)
            until(lambda: one.written > 0)
            while True:
                before = one.written
                time.sleep(patient(0.3))
                if one.written == before:
                    break
            assert one.written < 40_000_000, "all that is on the way lies in the system's buffers"
            for _ in range(50):
                next(pieces)
        assert one.left.wait(LONG), "a client that leaves ends the request at the server"
        until(lambda: proxy.metric("requests_running") == 0)


@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_leaves_ends_its_request_at_the_server(begun: bool) -> None:
    asked_for = threading.Event()

    def script(asked: Asked) -> Iterator[bytes]:
        if begun:
            yield EVENTS
        asked_for.set()
        if not begun:
            time.sleep(patient(0.5))
        yield from gone(one)

    with upstreams(script) as (one,), running_proxy(worker_urls=[one.url]) as proxy:
        with socket.create_connection(("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]))) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
            assert asked_for.wait(LONG)
        assert one.left.wait(LONG)
        until(lambda: proxy.proxy.running == 0)


@pytest.mark.parametrize(
    ("path", "last", "rest"),
    [
        ("/v1/completions", chunk("1"), ["data: 1", "", "data: {", "", "data: [DONE]", ""]),
        ("/v1/completions", chunk("1") + b"8\r\ndata: ha", None),
        ("/v1/completions", chunk("1") + b"zz\r\n", ["data: 1", "", "data: {", "", "data: [DONE]", ""]),
        ("/v1/messages", chunk("1"), None),
    ],
)
def test_a_server_that_dies_in_a_stream(path: str, last: bytes, rest: list[str] | None) -> None:
    def script(asked: Asked) -> Iterator[bytes]:
        yield EVENTS + last
        raise EOFError

    with upstreams(script) as (one,), running_proxy(worker_urls=[one.url]) as proxy:
        lines: list[str] = []
        with httpx.stream("POST", f"{proxy.url}{path}", json={}, timeout=LONG) as stream:
            if rest is None:
                with pytest.raises(httpx.RemoteProtocolError):
                    lines += stream.iter_lines()
            else:
                lines += stream.iter_lines()
                assert [line[:7] if "error" in line else line for line in lines] == rest
                assert "The answer breaks off: the server 0" in lines[2] and '"code":502' in lines[2]
        assert len(one.asked) == 1, "what a client has read isn't asked again"
        assert proxy.metric("failures_total", reason="broken off") == 1


HOSTILE = {
    "no HTTP": b"SSH-2.0-OpenSSH_9.9\r\n\r\n",
    "nothing": b"",
    "endless headers": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000,
    "an endless line": b"HTTP/1.1 200 " + b"x" * 200_000,
    "odd status": b"HTTP/1.1 700 Odd\r\nContent-Length: 0\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    "switched": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
    "line in header": b"HTTP/1.1 200 OK\r\nX: a\x00b\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("sent", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_answer_is_a_502(sent: bytes) -> None:
    def script(asked: Asked) -> Iterator[bytes]:
        yield sent
        raise EOFError

    with upstreams(script) as (one,), running_proxy(worker_urls=[one.url]) as proxy:
        got = proxy.post()
        assert got.status_code == 502, got.text
        assert got.json()["error"]["message"].startswith("No answer has come: the server 0 has ")
        one.script = lambda asked: [answer(b'"well"')]
        assert proxy.post().json() == "well"


def test_bytes_that_nobody_asked_for_are_nobodys_answer() -> None:
    sent = answer(b'"first"')
    with (
        upstreams(lambda asked: [sent + answer(b'"smuggled"')]) as (one,),
        running_proxy(worker_urls=[one.url], health_check_interval_secs=60) as proxy,
    ):
        for number in range(3):
            assert proxy.post().json() == "first"
            assert one.connections == 1 + number, "none is used again"


def test_informational_answers_are_passed_over() -> None:
    sent = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 3 + answer(b'"last"')
    with upstreams(lambda asked: [sent]) as (one,), running_proxy(worker_urls=[one.url]) as proxy:
        assert proxy.post().json() == "last"


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    def script(asked: Asked) -> Iterator[bytes]:
        yield b"HTTP/1.0 200 OK\r\n\r\nall of it"
        raise EOFError

    with upstreams(script) as (one,), running_proxy(worker_urls=[one.url]) as proxy:
        assert proxy.post().text == proxy.post().text == "all of it"


def test_a_kept_connection_that_was_closed_meanwhile_is_no_failure() -> None:
    def script(asked: Asked) -> Iterator[bytes]:
        numbers.append(len(numbers))
        if len(numbers) == 2:  # on the connection of the first request
            raise EOFError
        yield answer()

    numbers: list[int] = []
    with upstreams(script) as (one,), running_proxy(worker_urls=[one.url], health_check_interval_secs=60) as proxy:
        assert proxy.post().status_code == 200
        assert proxy.post().status_code == 200, "it is sent once more, on a new connection"
        assert len(one.asked) == 3


def test_a_server_that_closes_each_connection_after_its_answer() -> None:
    def script(asked: Asked) -> Iterator[bytes]:
        yield answer()
        raise EOFError

    with upstreams(script) as (one,), running_proxy(worker_urls=[one.url]) as proxy:
        assert [proxy.post().status_code for _ in range(8)] == [200] * 8
        assert proxy.metric("failures_total") == 0


def test_another_server_answers_for_one_that_can_not() -> None:
    with (
        upstreams(None, None) as (one, two),
        running_proxy(worker_urls=[one.url, two.url], policy="round_robin", health_check_interval_secs=60) as proxy,
    ):
        one.script = dies
        assert [proxy.post().status_code for _ in range(4)] == [200] * 4
        assert len(two.asked) == 4 and one.asked, "it was asked in its turn"
        two.script = dies
        assert proxy.post().status_code == 502
        one.script = lambda asked: [answer(b'"busy"', "429 Too Many Requests")]
        two.script = lambda asked: [answer(b'"full"', "503 Service Unavailable")]
        for _ in range(2):
            assert proxy.post().status_code in (429, 503), "both are busy; the second one's answer passes"
        two.script = lambda asked: [answer()]
        assert [proxy.post().status_code for _ in range(4)] == [200] * 4
        one.close()
        assert [proxy.post().status_code for _ in range(8)] == [200] * 8
        assert proxy.metric("server_up", server="server 0") == 0, "three connections were refused"
        two.close()
        until(lambda: proxy.post().status_code == 503)
        told = proxy.post()
        assert (
            "No server takes requests now: the server 0 can't be reached" in told.text and told.headers["retry-after"]
        )


def test_a_request_that_kills_servers_kills_two() -> None:
    with upstreams(dies, dies, dies) as found, running_proxy(worker_urls=[one.url for one in found]) as proxy:
        assert "has closed the connection before it answered" in proxy.post().text
        assert sum(bool(one.asked) for one in found) == 2


def test_a_sick_server_gets_nothing_until_it_is_well(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pagerunner")
    with (
        upstreams(None, None) as (one, two),
        running_proxy(worker_urls=[one.url, two.url], health_failure_threshold=2) as proxy,
    ):
        assert proxy.get("/health").content == b""
        one.health = "503 Service Unavailable"
        proxy.wait_up(0, up=False)
        before = len(one.asked)
        assert all(proxy.post().status_code == 200 for _ in range(4)) and len(one.asked) == before
        assert proxy.get("/health").json() == {"lost": {"server 0": "answers /health with status 503"}}
        two.health = "500 Internal Server Error"
        proxy.wait_up(1, up=False)
        assert proxy.get("/ping").status_code == proxy.post().status_code == 503
        one.health = "200 OK"
        proxy.wait_up(0)
        assert proxy.post().status_code == 200 and len(one.asked) == before + 1
        assert proxy.metric("server_up", url=one.url) == 1 and proxy.metric("server_up", url=two.url) == 0
    text = caplog.text
    assert f"The server 0 ({one.url}) takes no more requests: it answers /health with status 503." in text
    assert text.count(f"The server 0 ({one.url}) takes requests.") == 2


def test_a_proxy_starts_before_its_servers() -> None:
    with running_proxy(worker_urls=["http://127.0.0.1:9", "http://" + "a" * 70]) as proxy:
        assert proxy.get("/health").status_code == 503
        told = proxy.post().json()["error"]["message"]
        assert "the server 0 can't be reached" in told and "the server 1 can't be reached" in told


def test_what_is_too_large_or_foreign_is_refused_before_a_server_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BODY_BYTES", 1000)
    with upstreams(None) as (one,), running_proxy(worker_urls=[one.url]) as proxy:
        large = proxy.post(content=bytes(1001))
        assert large.status_code == 413 and "PAGERUNNER_LIMIT_MAX_BODY_BYTES" in large.text
        assert proxy.post(headers={f"x-{number}": "y" for number in range(200)}).status_code == 431
        assert proxy.post(headers={"x": "y" * 70_000}).status_code == 431
        assert proxy.post(headers={"Origin": "https://evil.example"}).status_code == 403
        assert proxy.post(headers={"Host": "evil.example"}).status_code == 403
        assert not one.asked
        assert proxy.post(content=b"[" * 999).status_code == 200, "what it means is the server's business"


def test_an_answer_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(asked: Asked) -> Iterator[bytes]:
        if asked.json().get("stream"):
            yield EVENTS
            yield from gone(one)
        time.sleep(patient(1))

    with upstreams(script) as (one,), running_proxy(worker_urls=[one.url], request_timeout_secs=0.3) as proxy:
        late = proxy.post()
        assert late.status_code == 504
        assert "not ended within 0.3 seconds (--request-timeout-secs)" in late.text
        text = proxy.post(body={"stream": True}).text
        assert "--request-timeout-secs" in text and text.endswith("data: [DONE]\n\n")
        assert one.left.wait(LONG)


def test_a_first_signal_lets_requests_end_and_a_second_ends_them() -> None:
    more = threading.Event()

    def script(asked: Asked) -> Iterator[bytes]:
        yield EVENTS + chunk("1")
        if asked.json().get("short"):
            assert more.wait(LONG)
            yield chunk("2") + END
        yield from gone(one)

    def read(body: dict[str, Any]) -> None:
        with httpx.stream("POST", f"{proxy.url}/v1/completions", json=body, timeout=LONG) as stream:
            begun.release()
            texts["short" in body] = stream.read().decode()

    begun = threading.Semaphore(0)
    texts: dict[bool, str] = {}
    with upstreams(script) as (one,), running_proxy(worker_urls=[one.url]) as proxy:
        readers = [threading.Thread(target=read, args=(body,)) for body in ({"short": 1}, {"long": 1})]
        for reader in readers:
            reader.start()
            assert begun.acquire(timeout=LONG)
        proxy.stop()
        more.set()
        readers[0].join(LONG)
        assert texts[True] == "data: 1\n\ndata: 2\n\n"
        proxy.stop()
        readers[1].join(LONG)
        assert "The proxy is shutting down, and the request has not ended." in texts[False]


@contextmanager
def program(*words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "pagerunner", "proxy", "--port", "0", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.usefixtures("forked")
def test_the_command_line() -> None:
    with (
        upstreams(None) as (one,),
        program("--worker-urls", one.url, "http://127.0.0.1:9", "--policy=round_robin") as process,
    ):
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "1 of 2 servers take requests.\n"
        url = process.stdout.readline().split()[-1]
        assert [httpx.post(f"{url}/v1/completions", json={}, timeout=LONG).status_code for _ in range(2)] == [200, 200]
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG) == 0
        log = process.stderr.read()
        assert (
            "The server 1 (http://127.0.0.1:9) can't be reached" in log and '"POST /v1/completions HTTP/1.1" 200' in log
        )
    for words, told in (
        ((), "either --worker-urls"),
        (("--worker-urls", "a:1"), "must be like http://127.0.0.1:8000, got 'a:1'"),
    ):
        with program(*words) as process:
            assert told in process.communicate()[1] and process.returncode == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "either --worker-urls, or --prefill and --decode"),
        ({"worker_urls": ["http://a"], "decode": ["http://b"]}, "either --worker-urls"),
        ({"prefill": ["http://a"]}, "--decode is missing"),
        ({"worker_urls": ["http://a"], "vllm_pd_disaggregation": True}, "needs --prefill and --decode"),
        (
            {"prefill": ["http://a", "8998"], "decode": ["http://b"]},
            "URLs alone, got '8998'. A bootstrap port is for the Mooncake",
        ),
        ({"prefill": ["http://a", "none"], "decode": ["http://b"]}, "URLs alone, got 'none'"),
        ({"worker_urls": ["http://a"] * 2}, "http://a is named twice"),
        ({"worker_urls": ["http://a"], "policy": "random"}, "cache_aware, round_robin, got 'random'"),
        ({"worker_urls": ["http://a"], "request_timeout_secs": float("nan")}, "--request-timeout-secs must be above 0"),
    ],
)
def test_what_is_asked_of_a_proxy_must_make_sense(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ProxyOptions(**options)


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "http://",
        "ftp://a",
        "http://a:x",
        "http://a:65536",
        "http://a?b",
        "http://u:p@a",
        "http://é",
        "http://a/\n",
    ],
)
def test_a_url_must_be_a_servers(url: str) -> None:
    with (
        pytest.raises(ConfigError, match="A server's URL must be like http://127.0.0.1:8000"),
        running_proxy(worker_urls=[url]),
    ):
        raise AssertionError
