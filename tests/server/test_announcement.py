"""The line that says where the server is comes when connections are taken, and not before."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from helpers.patience import LONG
from pagerunner.server import launch, listening


class SlowServer:
    """Takes a while before it listens, or never gets there; otherwise what `launch` needs of uvicorn's."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.started = self.should_exit = self.force_exit = False
        self._failure = failure

    async def serve(self, sockets: list[socket.socket]) -> None:
        await asyncio.sleep(0.1)
        if self._failure is not None:
            raise self._failure
        sockets[0].listen()
        self.started = True
        while not self.should_exit:
            await asyncio.sleep(0.01)


class Engine:
    num_unfinished = 0

    async def is_sleeping(self) -> bool:
        return False

    def stop(self, error: Exception | None) -> None:
        """Nothing runs."""


def run(server: Any, capsys: pytest.CaptureFixture[str]) -> str:
    """What is printed until a connection is refused or made; then the server is stopped."""

    async def scenario() -> str:
        stop, never = listening.StopSignals(), asyncio.get_running_loop().create_future()
        with listening.bind("127.0.0.1", 0) as listener:
            running = asyncio.create_task(launch._run(server, listener, Engine(), stop, 1.0, never, announce=True))
            printed = ""
            while not printed and not running.done():
                await asyncio.sleep(0.005)
                printed = capsys.readouterr().out
            if printed:
                socket.create_connection(listener.getsockname(), timeout=LONG).close()
            stop.ask()
            await running
        return printed

    return asyncio.run(scenario())


def test_who_reads_the_line_can_connect(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(SlowServer(), capsys).startswith("pagerunner serves at http://127.0.0.1:")


def test_a_server_that_cannot_start_announces_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="no more"):
        run(SlowServer(OSError("no more sockets")), capsys)
    assert capsys.readouterr().out == ""
