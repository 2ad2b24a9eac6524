"""A proxy in a thread, and servers behind it that answer what a test says, byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx

from helpers.patience import LONG, until
from pagerunner.server import listening
from pagerunner.server.http_logs import HttpLogs
from pagerunner.server.proxy.app import Proxy
from pagerunner.server.proxy.launch import serve_proxy
from pagerunner.server.proxy.options import ProxyOptions


class Asked(NamedTuple):
    """A request as a fake server has read it."""

    line: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        """Its body."""
        return json.loads(self.body)


Script = Callable[[Asked], Iterable[bytes]]


def answer(body: bytes = b"{}", status: str = "200 OK", kind: str = "application/json", more: str = "") -> bytes:
    """A whole answer."""
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(text: str) -> bytes:
    """One event in a chunk."""
    data = f"data: {text}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


class FakeUpstream:
    """A server that writes what `script` yields for a request, and closes the connection where the script raises."""

    def __init__(self, script: Script | None = None) -> None:
        self.script: Script = script or (lambda asked: [answer()])
        self.asked: list[Asked] = []
        self.health = "200 OK"
        self.connections = 0
        self.written = 0
        self.left = threading.Event()
        """Set when a client leaves before its answer is whole."""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """As a process that is killed."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        self._open.add(connection)
        with connection, contextlib.suppress(OSError, ValueError), connection.makefile("rb") as lines:
            while (asked := self._read(lines)) is not None:
                if asked.line.endswith("/health HTTP/1.1"):
                    connection.sendall(answer(b"", self.health))
                    continue
                self.asked.append(asked)
                try:
                    for piece in self.script(asked):
                        connection.sendall(piece)
                        self.written += len(piece)
                except OSError:
                    self.left.set()
                    break
                except EOFError:
                    break
        self._open.discard(connection)

    @staticmethod
    def _read(lines: Any) -> Asked | None:
        line = lines.readline().decode().strip()
        if not line:
            return None
        headers = {}
        while field := lines.readline().decode("latin-1").strip():
            name, _, value = field.partition(": ")
            headers[name.lower()] = value
        return Asked(line, headers, lines.read(int(headers.get("content-length", 0))))


def gone(connection_left: FakeUpstream) -> Iterator[bytes]:
    """Pieces without end, until the client leaves."""
    while True:
        yield chunk("again")
        time.sleep(0.005)


class RunningProxy:
    """The address of a proxy, and the object behind it."""

    def __init__(self, url: str, proxy: Proxy, stop: Callable[[], None]) -> None:
        self.url, self.proxy, self.stop = url, proxy, stop

    def post(self, path: str = "/v1/completions", body: Any = None, **options: Any) -> httpx.Response:
        """POST JSON, or raw `content`."""
        if body is not None or "content" not in options:
            options["json"] = {"prompt": "Hi"} if body is None else body
        return httpx.post(f"{self.url}{path}", timeout=LONG, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        """GET."""
        return httpx.get(f"{self.url}{path}", timeout=LONG, **options)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples with these labels in /metrics."""
        found = 0.0
        for line in self.get("/metrics").text.splitlines():
            match = re.fullmatch(rf"pagerunner:proxy_{name}\{{(.*)\}} (\S+)", line)
            if match and all(f'{key}="{value}"' in match[1] for key, value in labels.items()):
                found += float(match[2])
        return found

    def wait_up(self, number: int = 0, up: bool = True) -> None:
        """Wait until a server takes requests, or doesn't."""
        until(lambda: (not self.proxy.servers[number].fault) is up)


@contextmanager
def running_proxy(**options: Any) -> Iterator[RunningProxy]:
    """Serve on a free loopback port in a thread; stopped and joined at the end."""
    listener = listening.bind("127.0.0.1", 0)
    ready: dict[str, Any] = {}
    started = threading.Event()
    given = ProxyOptions(**{"health_check_interval_secs": 0.1, **options})

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def on_ready(proxy: Proxy, stop: listening.StopSignals) -> None:
            ready.update(proxy=proxy, stop=lambda: loop.call_soon_threadsafe(stop.ask))
            started.set()

        await serve_proxy(given, listener, HttpLogs(access=False), on_ready)

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            ready["error"] = error
        finally:
            started.set()

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    try:
        if "error" not in ready:
            yield RunningProxy(f"http://127.0.0.1:{listener.getsockname()[1]}", ready["proxy"], ready["stop"])
    finally:
        if thread.is_alive():
            for _ in range(3):  # nothing is waited for
                ready["stop"]()
        thread.join(LONG)
        listener.close()
    if "error" in ready:
        raise ready["error"]
    assert not thread.is_alive()


@contextmanager
def upstreams(*scripts: Script | None) -> Iterator[list[FakeUpstream]]:
    """Fake servers, closed at the end."""
    found = [FakeUpstream(script) for script in scripts]
    try:
        yield found
    finally:
        for one in found:
            one.close()
