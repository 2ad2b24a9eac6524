"""A server without a model: it streams the events of an answer at once, so that whoever loads it measures the load generator.

It runs in a process of its own, prints its port, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
from typing import ClassVar

_LIMIT = re.compile(rb'"max_(?:completion_)?tokens":\s*(\d+)')
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 23 Nov 2026 11:32:55 GMT\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_EVENT = 'data: {"id":"%s-3fcd167036dd46dcb47e8b0936d60c78","object":"%s","created":1795433575,"model":"null","choices":[%s}\n\n'
_CHOICE = '{"index":0,%s,"logprobs":null,"finish_reason":null,"stop_reason":null}],"usage":null'
_USAGE = (
    '],"usage":{"prompt_tokens":0,"completion_tokens":%s,"total_tokens":%s,"prompt_tokens_details":{"cached_tokens":0}}'
)


def _chunk(text: str) -> bytes:
    return f"{len(text):x}\r\n{text}\r\n".encode()


def answer(request: bytes) -> list[bytes]:
    """What is written for a request, piece by piece: the head, as many tokens as it asks for, their number with the end."""
    found = _LIMIT.search(request)
    count = int(found[1]) if found else 16
    chat = b"/chat/" in request[:200]
    names = ("chatcmpl", "chat.completion.chunk") if chat else ("cmpl", "text_completion")
    token = _chunk(_EVENT % (*names, _CHOICE % ('"delta":{"content":" word"}' if chat else '"text":" word"')))
    last = _chunk(_EVENT % (*names, _USAGE % (count, count))) + _chunk("data: [DONE]\n\n") + b"0\r\n\r\n"
    return [_HEAD, *[token] * count, last]


class NullServer(asyncio.Protocol):
    """A connection. Each that is being answered gets one piece in a turn of the loop, as an engine's steps make them."""

    answering: ClassVar[dict[NullServer, list[bytes]]] = {}
    request = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is there."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Begin to answer once a request is whole."""
        self.request += data
        head, found, body = self.request.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if found and len(body) >= (int(length[1]) if length else 0):
            if not self.answering:
                asyncio.get_running_loop().call_soon(_step)
            self.answering[self] = answer(self.request)[::-1]
            self.request = b""

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self.answering.pop(self, None)


def _step() -> None:
    for connection, pieces in list(NullServer.answering.items()):
        connection.transport.write(pieces.pop())
        if not pieces:
            del NullServer.answering[connection]
    if NullServer.answering:
        asyncio.get_running_loop().call_soon(_step)


async def main() -> None:
    """Serve on a free port of this machine alone."""
    server = await asyncio.get_running_loop().create_server(NullServer, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    asyncio.run(main())
