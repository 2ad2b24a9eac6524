"""A request's way to its connection past ASGI: clients that leave, and events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.patience import LONG
from pagerunner.server.client_link import ClientLink
from pagerunner.server.errors import ClientGoneError
from pagerunner.server.lingering import LingeringTransport


class Written:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.pieces.append(data)


def make(version: bytes = b"1.1") -> tuple[ClientLink, Any, Written]:
    async def drain() -> None:
        cycle.flow.write_paused = False

    flow = SimpleNamespace(write_paused=False, drain=drain, resume_reading=lambda: None)
    conn = SimpleNamespace(their_http_version=version)
    cycle: Any = SimpleNamespace(flow=flow, conn=conn, disconnected=False, scope={"method": "POST"})
    transport: Any = Written()
    return ClientLink(cycle, LingeringTransport(transport, lambda: False)), cycle, transport


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(main(), LONG))


def test_a_client_that_leaves_ends_the_work() -> None:
    async def main() -> tuple[bool, int]:
        link, _, _ = make()
        asyncio.get_running_loop().call_soon(link.tell_gone)
        ended = False
        try:
            with pytest.raises(ClientGoneError):
                await link.unless_gone(asyncio.sleep(100))
        finally:
            ended = True
        task = asyncio.current_task()
        assert task is not None
        await asyncio.sleep(0)  # the cancellation has been taken back
        return ended, task.cancelling()

    assert run(main) == (True, 0)


def test_work_is_not_done_for_a_client_that_has_left_before() -> None:
    async def main() -> None:
        link, cycle, _ = make()
        assert await link.unless_gone(asyncio.sleep(0, 5)) == 5
        link.tell_gone()  # between two pieces of work nothing is cancelled
        cycle.disconnected = True
        with pytest.raises(ClientGoneError):
            await link.unless_gone(asyncio.sleep(100))

    run(main)


def test_work_that_goes_on_when_it_is_cancelled_has_no_client_either() -> None:
    async def stubborn() -> str:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            return "an answer"
        return ""

    async def main() -> None:
        link, _, _ = make()
        asyncio.get_running_loop().call_soon(link.tell_gone)
        with pytest.raises(ClientGoneError):
            await link.unless_gone(stubborn())

    run(main)


@pytest.mark.parametrize("gone_too", [False, True])
def test_who_cancels_the_task_is_obeyed(gone_too: bool) -> None:
    async def main() -> None:
        link, _, _ = make()
        task = asyncio.create_task(link.unless_gone(asyncio.sleep(100)))
        await asyncio.sleep(0)
        if gone_too:
            link.tell_gone()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main)


def test_what_is_held_goes_in_one_piece() -> None:
    async def main() -> tuple[list[bytes], int]:
        link, cycle, transport = make()
        link.hold()
        await link.write(b"data: 1\n\n")
        await link.write(b"")  # which would end the answer
        await link.write(b"data: 22\n\n")
        assert not transport.pieces
        link.release()
        cycle.flow.write_paused = True
        await link.write(b"x")
        cycle.disconnected = True
        await link.write(b"lost")
        return transport.pieces, link.size

    assert run(main) == ([b"9\r\ndata: 1\n\n\r\na\r\ndata: 22\n\n\r\n", b"1\r\nx\r\n"], 20)


def test_only_clients_that_know_chunks_get_them() -> None:
    assert make()[0].fits and not make(b"1.0")[0].fits
