"""From exceptions to HTTP statuses and the error body that OpenAI's clients read."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from pagerunner.errors import (
    CapacityError,
    ConfigError,
    EngineDeadError,
    EngineSleepingError,
    InvalidRequestError,
    QueueFullError,
)
from pagerunner.server.protocol.answers import ErrorBody, ErrorDetail

_TYPES = {
    400: "BadRequestError",
    401: "UnauthorizedError",
    403: "ForbiddenError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    431: "RequestTooLargeError",
    500: "InternalServerError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}
_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


_MESSAGE_CHARS = 1_000
_PARAM_CHARS = 200
_RETRY_SECONDS = "2"


class ClientGoneError(Exception):
    """The client has closed the connection; nobody reads an answer."""


class HttpError(Exception):
    """An answer other than 200 that is decided at the door."""

    def __init__(self, status: int, message: str, param: str | None = None, *, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry  # whether the same request may be answered a moment later
        self.status = status
        self.param = param


def error_body(error: Exception) -> ErrorBody:
    """The body for an error; `error.code` in it is the HTTP status."""
    match error:
        case HttpError():
            status, param = error.status, error.param
        case InvalidRequestError():
            status, param = 400, error.param
        case QueueFullError():
            status, param = 429, None
        case EngineSleepingError() | EngineDeadError() | CapacityError():
            status, param = 503, None
        case ConfigError():
            status, param = 400, None
        case _:
            status, param = 500, None
    message = short(str(error), _MESSAGE_CHARS) or type(error).__name__
    if param is not None:
        param = short(param, _PARAM_CHARS)
    return ErrorBody(ErrorDetail(message, _TYPES.get(status, "Error"), param, status))


def anthropic_body(error: Exception) -> dict[str, Any]:
    """The body for an error of /v1/messages, as Anthropic's clients read it."""
    detail = error_body(error).error
    kind = _ANTHROPIC_TYPES.get(detail.code, "invalid_request_error" if detail.code < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": detail.message}}


def error_response(error: Exception, path: str = "") -> Response:
    """The answer for an error of a request to `path`."""
    body = error_body(error)
    status = body.error.code
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    later = isinstance(error, HttpError) and error.retry
    if later or status == 429:
        headers["Retry-After"] = _RETRY_SECONDS
    if later or status in (408, 413, 415, 431):
        headers["Connection"] = "close"  # the rest of the body is not read
    shown = anthropic_body(error) if path.startswith(_ANTHROPIC_PATH) else body
    return Response(msgspec.json.encode(shown), status, headers, media_type="application/json")


def short(text: str, most: int = 100) -> str:
    """A text from a client for an answer or a log, cut to `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def one_line(text: str) -> str:
    """A message as it may be logged: clients have a say in it, so it is short and has no control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:500])
