"""Exceptions a user can meet. Each message is one sentence that names the value, the limit and the knob to turn."""

from __future__ import annotations

from collections.abc import Callable


class PagerunnerError(Exception):
    """Base of every error that the engine raises on purpose."""


class ConfigError(PagerunnerError, ValueError):
    """An engine argument, flag or `config.json` field is wrong, unknown or unsupported. The CLI exits with code 2."""


class MissingAdapterError(ConfigError):
    """The directory of an adapter isn't there, or can't be read (HTTP 404)."""


class CheckpointError(PagerunnerError, ValueError):
    """A model directory is incomplete, truncated, or does not hold the tensors that its config asks for."""


class CapacityError(ConfigError):
    """The memory budget cannot hold what was asked for; the message says what it can hold."""


class InvalidRequestError(PagerunnerError, ValueError):
    """One request is malformed or can never run. Only that request fails (HTTP 400)."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(InvalidRequestError):
    """A prompt has more tokens than the model's context; a shorter one may run."""


class RequestFailedError(PagerunnerError):
    """One request failed inside the engine through no fault of its own (HTTP 500). The others go on."""


class QueueFullError(PagerunnerError):
    """Too many requests wait already (HTTP 429 with Retry-After). The same request may be accepted a moment later."""


class EngineSleepingError(PagerunnerError):
    """The engine sleeps and was asked to run something (HTTP 503); wake it first."""


class EngineDeadError(PagerunnerError):
    """The engine core died; no request can be served any more (HTTP 503)."""


def described(error: BaseException, text: Callable[[BaseException], str] = str) -> str:
    """An exception's type and text, and those of its first cause.

    Example: Triton's CompilationError shows a line of a kernel. Only the cause says what is wrong there.
    """
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    said = f"{type(error).__name__}: {text(error)}"
    return said if cause is error else f"{said} ({type(cause).__name__}: {text(cause)})"
