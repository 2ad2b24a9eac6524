"""The end of a server while connections come."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from helpers.patience import patient
from pagerunner.server.http_logs import HttpLogs
from pagerunner.server.listening import Server, bind, uvicorn_config


@pytest.mark.parametrize("turns", range(5))
def test_a_connection_that_is_accepted_at_the_end_is_no_reason_to_go_on(turns: int) -> None:
    """In `turns` of the event loop it has been accepted, has a transport, and is told to the server, or not yet."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("x")(scope, receive, send)

    async def run() -> None:
        with bind("127.0.0.1", 0) as listener, socket.socket() as client:
            server = Server(uvicorn_config(app, HttpLogs()))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:
                await asyncio.sleep(0)
            client.connect(listener.getsockname())
            for _ in range(turns):
                await asyncio.sleep(0)
            await asyncio.wait_for(server.shutdown([listener]), patient(1))
            server.should_exit = server.force_exit = True
            await serving

    asyncio.run(run())
