"""Chat templates at arm's length: a few processes that render conversations, each ended when it takes too long."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pagerunner import limits
from pagerunner.children import helper_environment, start_async
from pagerunner.errors import EngineDeadError, InvalidRequestError, RequestFailedError
from pagerunner.text.fair_slots import FairSlots
from pagerunner.text.template_worker import Done, Job, Setup, pack
from pagerunner.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_QUICK_AT_ONCE = 8
_SLOW_AT_ONCE = 4
_QUICK_SECONDS = 0.5  # after which a conversation counts as slow
_SLOW_NICENESS = 19
_KEPT_IDLE = 4
_PATIENCE_SECONDS = 0.05
_START_SECONDS = 60.0
_CLOSED = "The engine has stopped and renders no more conversations."


class TemplateRenderer:
    """Renders with a tokenizer's chat template, in processes that are started when they are needed. This process never reads
    a template itself.

    One conversation costs a message to a process and back. A process that is late, dies or loses its client is replaced.
    A conversation that takes longer than a moment goes on among the slow ones, of which only a few run at once; it may have
    to begin again there. So slow conversations don't hold up others.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._processes = _Processes()
        self._idle: list[asyncio.subprocess.Process] = []
        self._hoping: list[asyncio.Future[asyncio.subprocess.Process]] = []
        self._busy = 0  # processes with a conversation that is not slow yet
        self._quick = FairSlots(_QUICK_AT_ONCE)
        self._slow = FairSlots(_SLOW_AT_ONCE)
        self._done = msgspec.msgpack.Decoder(Done)

    async def variables(self) -> frozenset[str]:
        """The names that the template reads beside special tokens.

        None without a template, or when the template can't be read. Each conversation then gets an error that says why."""
        if self._tokenizer.chat_template is None:
            return frozenset()
        try:
            process, ready = await self._start()
        except (InvalidRequestError, RequestFailedError) as error:
            logger.warning("The chat template can't be read: %s", error)
            return frozenset()
        self._idle.append(process)
        if ready.error is not None:
            logger.warning("%s Chats with it are refused.", ready.error)
        return frozenset(ready.variables) - self._tokenizer.special_tokens.keys()

    async def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], source: str = "") -> str:
        """The prompt text.

        Args:
            messages: the conversation.
            options: what `Tokenizer.apply_chat_template` takes by name, except the template.
            source: a name for the client that asks. Clients get equal shares.

        Raises:
            InvalidRequestError: there is no template, it refuses the conversation, or takes too long or too much memory.
            RequestFailedError: no process could be started.
            EngineDeadError: `close` has been called.
        """
        if self._tokenizer.chat_template is None:
            return self._tokenizer.apply_chat_template(messages)  # says what is missing
        variables = {**self._tokenizer.special_tokens, **options}
        tools = variables.pop("tools", None)
        try:
            frame = pack(Job([dict(message) for message in messages], tools, variables))
        except (UnicodeEncodeError, OverflowError, TypeError, RecursionError) as error:
            raise InvalidRequestError(f"messages hold a value that no template takes: {error}.", "messages") from error
        done = await self._in_turn(frame, source)
        if done.error is not None:
            raise InvalidRequestError(done.error, done.param)
        return done.text

    async def close(self) -> None:
        """End all processes, and the conversations that are still rendered; EngineDeadError tells their clients."""
        self._idle.clear()
        await self._processes.close()

    async def _in_turn(self, frame: bytes, source: str) -> Done:
        await self._quick.acquire(source)
        try:
            run, done = await self._quickly(frame)
            if done is None and run.died:  # perhaps it was killed before it saw the conversation
                run, done = await self._quickly(frame)
            if done is not None:
                await self._keep(run.process)
                return done
            goes_on = run.running and self._slow.take(source)
        finally:
            self._quick.release(source)
        if not run.running:
            return await run.result()
        if not goes_on:
            await run.end()
            await self._slow.acquire(source)
        try:
            if not goes_on:
                run = await self._begin(frame)
            run.lower_priority()
            return await run.result()
        finally:
            try:
                await run.end()
            finally:
                self._slow.release(source)

    async def _quickly(self, frame: bytes) -> tuple[_Run, Done | None]:
        run = await self._begin(frame)
        self._busy += 1
        try:
            return run, await run.wait(_QUICK_SECONDS)
        finally:
            self._busy -= 1

    async def _begin(self, frame: bytes) -> _Run:
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return _Run(self._processes, process, frame, self._done)
            await self._processes.end(process)
        process = await self._spare() or (await self._start())[0]
        return _Run(self._processes, process, frame, self._done)

    async def _spare(self) -> asyncio.subprocess.Process | None:
        """A process that gets free in a moment. Most conversations take less time than starting a process."""
        given: asyncio.Future[asyncio.subprocess.Process] = asyncio.get_running_loop().create_future()
        self._hoping.append(given)
        try:
            await asyncio.wait([given], timeout=_PATIENCE_SECONDS if self._busy else 0)
        except BaseException:
            if given.done():
                self._idle.append(given.result())
            raise
        finally:
            if not given.done():
                self._hoping.remove(given)
        return given.result() if given.done() else None

    async def _keep(self, process: asyncio.subprocess.Process) -> None:
        if self._hoping:
            self._hoping.pop(0).set_result(process)
        elif len(self._idle) < _KEPT_IDLE:
            self._idle.append(process)
        else:
            await self._processes.end(process)

    async def _start(self) -> tuple[asyncio.subprocess.Process, Done]:
        template = self._tokenizer.chat_template
        if template is None:
            raise RuntimeError("there is no chat template")
        setup = Setup(template.templates, template.where)
        try:
            process, frame = await self._processes.start(setup)
        except EOFError:  # the system may have killed it, for want of memory
            try:
                process, frame = await self._processes.start(setup)
            except EOFError as error:
                raise RequestFailedError(
                    "The process that renders chat templates ended twice while it was started. The system may be short of memory."
                ) from error
        return process, self._done.decode(frame)


class _Run:
    """One conversation in one process, which is ended if the caller leaves."""

    def __init__(
        self,
        processes: _Processes,
        process: asyncio.subprocess.Process,
        frame: bytes,
        decoder: msgspec.msgpack.Decoder[Done],
    ) -> None:
        self.process, self._processes = process, processes
        self._decoder = decoder
        self._answer = asyncio.ensure_future(self._exchange(frame))

    @property
    def running(self) -> bool:
        """Whether there is no answer yet."""
        return not self._answer.done()

    @property
    def died(self) -> bool:
        """Whether the process has ended by itself."""
        return not self.running and isinstance(self._answer.exception(), _DiedError)

    async def wait(self, seconds: float) -> Done | None:
        """The answer; None when there is none yet, or the process has ended. Raises what `result` raises otherwise."""
        try:
            await asyncio.wait([self._answer], timeout=seconds)
        except BaseException:
            await self.end()
            raise
        if self.running:
            return None
        if self.died:
            await self.end()
            return None
        return await self.result()

    async def result(self) -> Done:
        """The answer. Raises InvalidRequestError when it takes too long or the process dies."""
        try:
            return await self._answer
        except BaseException:
            await self.end()
            raise

    async def end(self) -> None:
        """End the process. It is killed at once: whoever waits here may be cancelled."""
        self._answer.cancel()
        _kill(self.process)
        await asyncio.gather(self._answer, return_exceptions=True)
        await self._processes.end(self.process)

    def lower_priority(self) -> None:
        """Let all other processes on this machine go first."""
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.process.pid, _SLOW_NICENESS)

    async def _exchange(self, frame: bytes) -> Done:
        try:
            async with asyncio.timeout(limits.TEMPLATE_SECONDS):
                return self._decoder.decode(await _ask(self.process, frame))
        except TimeoutError:
            raise InvalidRequestError(
                f"The chat template took more than {limits.TEMPLATE_SECONDS} seconds for this conversation "
                f"{limits.knob('TEMPLATE_SECONDS')}.",
                param="messages",
            ) from None
        except (OSError, EOFError) as error:
            if self._processes.closed:
                raise EngineDeadError(_CLOSED) from None
            raise _DiedError(
                "The process that rendered the chat template died of this conversation.", param="messages"
            ) from error


class _DiedError(InvalidRequestError):
    """The process has ended without an answer."""


class _Processes:
    """The processes of a renderer, from their start to their end. Nobody who leaves early leaves one to a loop that has ended."""

    def __init__(self) -> None:
        self._running: set[asyncio.subprocess.Process] = set()
        self._ending: dict[asyncio.subprocess.Process, asyncio.Future[None]] = {}
        self.closed = False

    async def start(self, setup: Setup) -> tuple[asyncio.subprocess.Process, bytes]:
        """A process and what it says of the template.

        Raises:
            EOFError: it ends first.
            RequestFailedError: it is late or can't be started.
            EngineDeadError: no more processes are started.
        """
        if self.closed:
            raise EngineDeadError(_CLOSED)
        try:
            process = await start_async("pagerunner.text.template_worker", helper_environment())
        except OSError as error:
            raise RequestFailedError(f"The process that renders chat templates can't be started: {error}.") from error
        self._running.add(process)
        try:
            async with asyncio.timeout(_START_SECONDS):
                return process, await _ask(process, pack(setup))
        except TimeoutError as error:
            await self.end(process)
            raise RequestFailedError(
                f"The process that renders chat templates didn't start within {_START_SECONDS:g} seconds."
            ) from error
        except OSError as error:  # the process is gone, and so is the pipe to it
            await self.end(process)
            raise EOFError from error
        except BaseException:
            await self.end(process)
            raise

    async def end(self, process: asyncio.subprocess.Process) -> None:
        """Kill a process and wait until it is gone. Whoever waits may be cancelled; the process is gone soon all the same."""
        _kill(process)
        ending = self._ending.get(process)
        if ending is None:
            ending = self._ending[process] = asyncio.ensure_future(self._gone(process))
        await asyncio.shield(ending)

    async def close(self) -> None:
        """End all processes, and start no others."""
        self.closed = True
        while self._running:
            await asyncio.gather(*map(self.end, self._running))

    async def _gone(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        if process.stdout is not None:
            with contextlib.suppress(RuntimeError):  # its conversation reads to the end
                await process.stdout.read()
        self._running.discard(process)
        self._ending.pop(process, None)


async def _ask(process: asyncio.subprocess.Process, frame: bytes) -> bytes:
    if process.stdin is None or process.stdout is None:
        raise EOFError
    process.stdin.write(frame)
    await process.stdin.drain()
    size = await process.stdout.readexactly(4)
    return await process.stdout.readexactly(int.from_bytes(size, "big"))


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    if process.stdin is not None:
        process.stdin.close()
