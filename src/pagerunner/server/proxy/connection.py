"""A client's connection that the application can cut."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from pagerunner.server.connection import Connection
from pagerunner.server.lingering import LINGER_SECONDS

CUT = "pagerunner.cut"
"""In a request's scope: ends its connection in the middle of the answer, so that the client knows that more was to come."""


class CutConnection(Connection):
    """A connection whose requests can be cut."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._whole_app: ASGIApp = self.app
        self.app = self._cuttable

    async def _cuttable(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[CUT] = self._cut
        await self._whole_app(scope, receive, send)

    def _cut(self) -> None:
        self.cycle.disconnected = True
        self.transport.close()
        self.loop.call_later(LINGER_SECONDS, self.transport.abort)
