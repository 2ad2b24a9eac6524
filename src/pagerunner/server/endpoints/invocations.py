"""POST /invocations: what Amazon SageMaker calls. The body's fields say which endpoint is meant."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from msgspec import UNSET, Raw, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from pagerunner.errors import InvalidRequestError
from pagerunner.server.http import decode_body, read_body

Handler = Callable[[Request], Awaitable[Response]]


class InvocationRequest(msgspec.Struct):
    """Body of POST /invocations: that of /v1/chat/completions, /v1/completions or /v1/embeddings."""

    messages: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET


_DECODER = msgspec.json.Decoder(InvocationRequest)


class Invocations:
    """Passes a call on to the endpoint that takes it."""

    def __init__(self, chat: Handler, completions: Handler, embeddings: Handler) -> None:
        self._handlers = (("messages", chat), ("prompt", completions), ("input", embeddings))

    async def __call__(self, http: Request) -> Response:
        """Answer as the endpoint does that takes messages, a prompt, or an input."""
        body = await read_body(http)
        request = decode_body(body, _DECODER)
        for name, handler in self._handlers:
            if getattr(request, name) is not UNSET:
                http.state.body = body
                return await handler(http)
        raise InvalidRequestError(
            "The body has neither messages (chat), a prompt (completions) nor an input (embeddings).", param="messages"
        )
