"""Chat templates at arm's length: a few processes that render conversations, each ended when it takes too long."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pagerunner import limits
from pagerunner.errors import InvalidRequestError, RequestFailedError
from pagerunner.text.template_worker import Done, Job, Setup, pack
from pagerunner.text.tokenizer import Tokenizer

_MOST_WORKERS = 4
_START_SECONDS = 60.0
_KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", *(limits.PREFIX + limit.name for limit in limits.TABLE))


class TemplateRenderer:
    """Renders with a tokenizer's chat template. Processes are started when they are needed, up to four, and kept.

    One conversation costs a message to a process and back. A process that is late, dies or loses its client is replaced.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._idle: list[asyncio.subprocess.Process] = []
        self._slots = asyncio.Semaphore(_MOST_WORKERS)
        self._done = msgspec.msgpack.Decoder(Done)

    async def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """The prompt text; `options` are what `Tokenizer.apply_chat_template` takes by name, but for the template.

        Raises:
            InvalidRequestError: there is no template, it refuses the conversation, or takes too long or too much memory.
            RequestFailedError: no process could be started.
        """
        template = self._tokenizer.chat_template
        if template is None:
            return self._tokenizer.apply_chat_template(messages)  # says what is missing
        variables = {**self._tokenizer.special_tokens, **options}
        tools = variables.pop("tools", None)
        try:
            frame = pack(Job([dict(message) for message in messages], tools, variables))
        except (UnicodeEncodeError, OverflowError, TypeError, RecursionError) as error:
            raise InvalidRequestError(f"messages hold a value that no template takes: {error}.", "messages") from error
        setup = Setup(template.templates, template.where)
        async with self._slots:
            process = self._idle.pop() if self._idle else await _start(setup)
            try:
                done = await self._exchange(process, frame)
            except BaseException:
                await _end(process)
                raise
            self._idle.append(process)
        if done.error is not None:
            raise InvalidRequestError(done.error, done.param)
        return done.text

    async def close(self) -> None:
        """End the idle processes; busy ones end with their requests."""
        while self._idle:
            await _end(self._idle.pop())

    async def _exchange(self, process: asyncio.subprocess.Process, frame: bytes) -> Done:
        try:
            async with asyncio.timeout(limits.TEMPLATE_SECONDS):
                return self._done.decode(await _ask(process, frame))
        except TimeoutError:
            raise InvalidRequestError(
                f"The chat template took more than {limits.TEMPLATE_SECONDS} seconds for this conversation "
                f"{limits.knob('TEMPLATE_SECONDS')}.",
                param="messages",
            ) from None
        except (OSError, EOFError) as error:
            raise InvalidRequestError(
                "The process that rendered the chat template died of this conversation.", param="messages"
            ) from error


async def _ask(process: asyncio.subprocess.Process, frame: bytes) -> bytes:
    if process.stdin is None or process.stdout is None:
        raise EOFError
    process.stdin.write(frame)
    await process.stdin.drain()
    size = await process.stdout.readexactly(4)
    return await process.stdout.readexactly(int.from_bytes(size, "big"))


async def _start(setup: Setup) -> asyncio.subprocess.Process:
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}  # no keys
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "pagerunner.text.template_worker"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**kept, "PYTHONPATH": path},
        start_new_session=True,  # a Ctrl-C is for the server, which drains first
    )
    try:
        async with asyncio.timeout(_START_SECONDS):
            await _ask(process, pack(setup))
    except (OSError, EOFError, TimeoutError) as error:
        await _end(process)
        raise RequestFailedError(f"The process that renders chat templates could not be started: {error!r}.") from error
    except BaseException:
        await _end(process)
        raise
    return process


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    if process.stdin is not None:
        process.stdin.close()
    await asyncio.shield(process.wait())
