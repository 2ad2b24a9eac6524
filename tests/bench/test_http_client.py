"""The load generator's client: what it reads of an answer, which requests it sends again, and that its processes add up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from helpers.patience import LONG, patient
from pagerunner.bench import clients, null_server
from pagerunner.bench.clients import ClientShare, ceiling, measure
from pagerunner.bench.http_client import HttpClient, HttpFaultError, Timeouts, _Connection
from pagerunner.bench.serving import Planned
from pagerunner.errors import ConfigError

OK = b"HTTP/1.1 200 OK\r\n"
EVENT = b'data: {"choices":[{"text":"a"}]}\r\n\r\n'
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"%x;ext=1\r\n%b\r\n" % (len(EVENT), EVENT)
WHOLE = {
    "chunks": (CHUNKED + b"3\r\nb\r\n\r\n0\r\n\r\n", EVENT + b"b\r\n", True),
    "chunks and fields behind": (CHUNKED + b"0\r\nX-Sum: 1\r\n\r\n", EVENT, True),
    "a length": (OK + b"content-length:  5\r\n\r\nabcde", b"abcde", True),
    "no body": (OK + b"Content-Length: 0\r\n\r\n", b"", True),
    "a length, and the end": (OK + b"Content-Length: 1\r\nConnection: close\r\n\r\na", b"a", False),
    "chunks count, not a length": (
        CHUNKED.replace(b"OK\r\n", b"OK\r\nContent-Length: 1\r\n") + b"0\r\n\r\n",
        EVENT,
        True,
    ),
    "a status without a body": (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
    "an interim answer": (
        b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" + OK + b"Content-Length: 2\r\n\r\nok",
        b"ok",
        True,
    ),
}


class Nowhere(asyncio.Transport):
    """Takes what is written, and forgets it."""

    def write(self, data: Any) -> None:
        """Forget."""

    def abort(self) -> None:
        """Nothing is open."""


def read(pieces: Sequence[bytes]) -> tuple[_Connection, asyncio.Future[None], list[bytes]]:
    connection, got = _Connection(), []
    connection.connection_made(Nowhere())
    ended = connection.ask(b"", lambda status, body, now: got.append(body))
    for piece in pieces:
        assert not ended.done()
        connection.get_buffer(0)[: len(piece)] = piece
        connection.buffer_updated(len(piece))
    return connection, ended, got


@pytest.mark.parametrize("case", WHOLE)
def test_an_answer_is_read_wherever_it_is_cut(case: str) -> None:
    answer, body, goes_on = WHOLE[case]

    async def cut_everywhere() -> None:
        for at in range(1, len(answer)):
            connection, ended, got = read([answer[:at], answer[at:]])
            assert ended.done() and b"".join(got) == body and connection.usable == goes_on
        assert b"".join(read([answer[at : at + 1] for at in range(len(answer))])[2]) == body

    asyncio.run(cut_everywhere())


@pytest.mark.parametrize("garbage", [b"SSH-2.0-OpenSSH\r\n\r\n", OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"])
def test_what_is_not_http_is_an_error(garbage: bytes) -> None:
    async def main() -> None:
        connection, ended, _ = read([garbage])
        assert isinstance(ended.exception(), HttpFaultError) and not connection.usable

    asyncio.run(main())


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    async def main(error: Exception | None) -> None:
        connection, ended, got = read([OK + b"Content-Type: text/event-stream\r\n\r\n" + EVENT, EVENT])
        assert not ended.done() and not connection.usable
        connection.connection_lost(error)
        assert got == [EVENT, EVENT] and isinstance(ended.exception(), HttpFaultError if error else type(None))

    for error in (None, ConnectionResetError()):
        asyncio.run(main(error))


# -- requests that are sent again

GOOD = OK + b"Content-Length: 2\r\n\r\nok"
CLOSE = b""


def posts(answers: Sequence[Sequence[bytes]], count: int) -> tuple[list[int | str], int]:
    """Post `count` times to a server that answers so on its connections: an outcome of each, and how many requests came.

    CLOSE closes without an answer, the moment the request has come. So does the end of a connection's list.
    """
    script, seen = iter(answers), 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        for answer in next(script):
            await reader.readuntil(b"\r\n\r\n{}")
            seen += 1
            if answer == CLOSE:
                break
            writer.write(answer)
        writer.close()

    async def main() -> list[int | str]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x", {})
        outcomes: list[int | str] = []
        for _ in range(count):
            try:
                async with asyncio.timeout(LONG):
                    outcomes.append(await client.post(b"{}", lambda status, body, now: None))
            except HttpFaultError as error:
                outcomes.append(str(error))
        client.close()
        server.close()
        return outcomes

    return asyncio.run(main()), seen


def test_a_request_on_a_connection_that_the_server_is_closing_is_sent_again() -> None:
    """The race of a keep-alive time: the server's end, and the client's request, are on their way at once."""
    assert posts([[GOOD, CLOSE], [GOOD]], 2) == ([0, 1], 3)


def test_a_request_is_sent_again_once_and_only_where_no_byte_came() -> None:
    outcomes, seen = posts([[CLOSE]], 1)
    assert "closed the connection" in str(outcomes[0]) and seen == 1, "the connection is new: nothing excuses its end"
    outcomes, seen = posts([[GOOD, CLOSE], [CLOSE]], 2)
    assert outcomes[0] == 0 and "closed the connection" in str(outcomes[1]) and seen == 3
    outcomes, seen = posts([[GOOD, b"HTTP"]], 2)
    assert outcomes[0] == 0 and "closed the connection" in str(outcomes[1]) and seen == 2


def test_a_body_that_ends_with_the_connection_is_whole() -> None:
    """As RFC 9112, section 6.3, has it; many small servers answer so."""
    assert posts([[OK + b"\r\nok"], [GOOD]], 2)[0] == [0, 0]


def test_a_connection_that_has_been_closed_is_not_used() -> None:
    closing = OK + b"Content-Length: 2\r\nConnection: close\r\n\r\nok"
    assert posts([[closing], [GOOD]], 2) == ([0, 0], 2)


# -- servers that don't answer


def test_a_server_that_is_silent_or_slow_fails_the_request_and_names_the_limit() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent = json.loads((await reader.readuntil(b"}"))[-20:].partition(b"\r\n\r\n")[2])
        try:
            for _ in range(sent["bytes"]):
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n"[:1])
                await asyncio.sleep(0.01)
            await reader.read()  # until the client has gone
        finally:
            writer.close()

    async def main() -> list[str]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x"
        client = HttpClient(url, {}, Timeouts(first_byte=0.4, whole=0.8))
        errors: list[str] = []
        for body in (b'{"bytes":0}', b'{"bytes":1}'):
            async with asyncio.timeout(LONG):
                with pytest.raises(HttpFaultError) as caught:
                    await client.post(body, lambda status, body, now: None)
            errors.append(str(caught.value))
        server.close()
        return errors

    assert asyncio.run(main()) == [
        "The server has not begun to answer within 0.4 seconds (--first-byte-timeout).",
        "The answer has not ended within 0.8 seconds (--request-timeout).",
    ]


def test_a_server_that_accepts_no_connection() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        with socket.create_connection(listener.getsockname()):  # which fills the queue

            async def main() -> None:
                async with asyncio.timeout(LONG):
                    await HttpClient(url, {}, Timeouts(connect=0.3)).post(b"{}", lambda status, body, now: None)

            with pytest.raises(HttpFaultError, match=r"has accepted no connection in 0\.3 seconds"):
                asyncio.run(main())


# -- processes


@contextlib.contextmanager
def null() -> Iterator[str]:
    import subprocess

    from pagerunner import children

    process = children.start(null_server.__name__, children.helper_environment(), stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        assert not children.end({"the null server": process})


def share(url: str, count: int, **options: Any) -> ClientShare:
    bodies = [b'{"prompt":[1,2],"max_tokens":%d}' % (1 + index) for index in range(count)]
    requests = [Planned(0.0, 2, msgspec.Raw(body)) for body in bodies]
    return ClientShare(url=url, headers={}, requests=requests, **{"max_concurrency": 8, **options})


def test_processes_share_the_requests_and_samples_keep_their_order() -> None:
    told: list[None] = []
    with null() as url:
        outcome = measure(share(f"{url}/v1/completions", 20), 3, lambda: told.append(None))
    assert [one.output_len for one in outcome.samples] == list(range(1, 21)) and len(told) == 20
    assert all(not one.error and len(one.itl) == one.output_len - 1 for one in outcome.samples)
    assert all(0 <= one.start <= one.start + one.ttft <= outcome.seconds for one in outcome.samples)
    assert 0 < outcome.busy < 1.5


def test_the_null_server_sends_what_a_real_stream_has() -> None:
    with null() as url:
        for path, limit in (("/v1/completions", "max_tokens"), ("/v1/chat/completions", "max_completion_tokens")):
            text = httpx.post(url + path, json={limit: 5}, timeout=LONG).text
            *events, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
            chunks = [json.loads(event) for event in events]
            assert done == "[DONE]" and chunks[-1]["usage"]["completion_tokens"] == 5
            assert len(chunks) == 6
            assert measure(share(url + path, 3), 1, lambda: None).samples[2].text == " word" * 3
    assert ceiling(share("http://elsewhere:1/v1/completions", 30), 1) > 10


def test_a_process_that_ends_early_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_MODULE", "pagerunner.bench.shapes")
    with pytest.raises(ConfigError, match="A process of the load generator ended with exit status 0"):
        measure(share("http://127.0.0.1:1/", 4), 2, lambda: None)
    with pytest.raises(ConfigError, match="--num-clients 9 needs a --max-concurrency of at least 9, got 8"):
        measure(share("http://127.0.0.1:1/", 10), 9, lambda: None)
    with pytest.raises(ConfigError, match="--num-clients 5 needs at least 5 requests, got 4; see --num-prompts"):
        measure(share("http://127.0.0.1:1/", 4), 5, lambda: None)


def test_an_error_ends_the_processes_at_once() -> None:
    late = [Planned(at, 2, msgspec.Raw(b"{}")) for at in (300.0, 0.0, 300.0, 300.0)]  # the second process fails

    def fail() -> None:
        raise RuntimeError("stop")

    with null() as url:
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="stop"):
            measure(msgspec.structs.replace(share(url, 1), requests=late), 2, fail)
        assert time.monotonic() - began < patient(30)


def test_nobody_listens() -> None:
    [sample] = measure(share("http://127.0.0.1:1/", 1), 1, lambda: None).samples
    assert sample.error and not sample.retries
    with pytest.raises(ConfigError, match="must begin with http"):
        HttpClient("127.0.0.1:8000/v1", {})


def test_a_ceiling_is_not_that_of_a_process_which_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four requests at 2,000 a second take 2 ms, and a process 50 ms before it has sent the first."""
    sent: list[int] = []

    def measured(null: Any, num_clients: int, progress: Any) -> Any:
        sent.append(len(null.requests))
        return SimpleNamespace(seconds=0.05 + len(null.requests) / 2000)

    monkeypatch.setattr(clients, "measure", measured)
    for requests in (4, 700, 5000):
        assert clients.ceiling(share("http://elsewhere:1/v1/completions", requests), 2) > 0.94 * 2000
    assert sent[0] == 4 and sent[-1] == 5000 and 5000 not in sent[:-1] and len(sent) == 7
