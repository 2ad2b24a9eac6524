"""The door for grammars: a bad one is refused before its request is queued.

A grammar from outside can take any time to be read, and one that nests deeply enough ends the process that compiles it. So
that is tried in a process of its own (`python -m pagerunner.engine.structured_output.grammar_door`), which is killed when its time is up, and
in a small stack, so that the core's threads can do whatever it could.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import resource
import selectors
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from pagerunner import limits
from pagerunner.engine.structured_output.grammar import KEPT, TOKENIZER_SECONDS, compile_grammar, guide_tokenizer
from pagerunner.errors import InvalidRequestError, RequestFailedError
from pagerunner.types import Grammar, StructuredOutputsParams

_PARAM = "structured_outputs"
_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)  # what llama.cpp's notation has and Lark's hasn't
_STACK_BYTES = 4 * 2**20  # half of what threads commonly have
_MEMORY_BYTES = 4 * 2**30  # of addresses


class _Setup(msgspec.Struct):
    tokenizer: str
    size: int
    eos_token_ids: list[int]


class _Reply(msgspec.Struct):
    text: str = ""
    fault: str = ""


class _LateError(InvalidRequestError):
    """It took too long, which may have been the machine's fault: the next request with it is not refused unseen."""


class GrammarDoor:
    """Checks structured outputs for one tokenizer (its tokenizer.json), model vocabulary and end tokens."""

    def __init__(self, tokenizer_json: str, size: int, eos_token_ids: Iterable[int]) -> None:
        self._setup = msgspec.json.encode(_Setup(tokenizer_json, size, list(eos_token_ids)))
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="pagerunner-grammar")
        self._of_thread = threading.local()
        self._checked: OrderedDict[bytes, Future[Grammar]] = OrderedDict()  # by digest

    def check(self, wanted: StructuredOutputsParams) -> Grammar:
        """The grammar for the core. Waits for the check, which is remembered unless it ran out of time.

        Raises:
            InvalidRequestError: it is malformed, too large, or takes more than limits.MAX_GRAMMAR_SECONDS.
            RequestFailedError: it can't be checked now.
        """
        return self._start(wanted).result()

    async def prepare(self, wanted: StructuredOutputsParams) -> Grammar:
        """The same as `check`, for an event loop. Raises like it."""
        return await asyncio.shield(asyncio.wrap_future(self._start(wanted)))

    def _start(self, wanted: StructuredOutputsParams) -> Future[Grammar]:
        try:
            line = msgspec.json.encode(wanted)
        except (TypeError, ValueError, RecursionError) as error:
            raise _unusable(str(error)) from None
        most = limits.MAX_GRAMMAR_CHARS
        # As text a schema has been measured already; what else there is beside one is short.
        if isinstance(wanted.json, dict) and len(line) > most and len(line.decode()) > most:
            raise InvalidRequestError(
                f"structured_outputs has {len(line.decode()):,} characters; at most {most:,} are allowed "
                f"{limits.knob('MAX_GRAMMAR_CHARS')}.",
                param=_PARAM,
            )
        key = hashlib.sha256(line).digest()
        found = self._checked.get(key)
        if found is None or (found.done() and isinstance(found.exception(), (_LateError, RequestFailedError))):
            found = self._checked[key] = self._threads.submit(self._check, line, wanted)
            if len(self._checked) > KEPT:
                self._checked.popitem(last=False)
        return found

    def _check(self, line: bytes, wanted: StructuredOutputsParams) -> Grammar:
        checker: _Checker | None = getattr(self._of_thread, "checker", None)
        if checker is None:
            checker = self._of_thread.checker = self._new_checker()
        try:
            reply = checker.ask(line, limits.MAX_GRAMMAR_SECONDS)
        except (OSError, EOFError) as error:
            checker.kill()
            self._of_thread.checker = None
            fault = _unusable(
                f"it is too deep, too large, or takes more than {limits.MAX_GRAMMAR_SECONDS:g} seconds to compile."
            )
            raise (_LateError(str(fault), _PARAM) if isinstance(error, TimeoutError) else fault) from None
        if reply.fault:
            raise _unusable(reply.fault)
        return Grammar(reply.text, wanted.after or "", wanted.begins or "")

    def _new_checker(self) -> _Checker:
        try:
            checker = _Checker()
        except OSError as error:
            raise RequestFailedError(f"The process that checks grammars can't be started: {error}.") from error
        try:
            fault = checker.ask(self._setup, TOKENIZER_SECONDS).fault
        except (OSError, EOFError) as error:
            checker.kill()
            raise RequestFailedError(f"The process that checks grammars didn't start: {error!r}.") from error
        if fault:
            checker.kill()
            raise _unusable(f"this model's tokenizer is of another kind: {fault}")
        return checker


def _unusable(fault: str) -> InvalidRequestError:
    fault = " ".join(fault[:1_000].split())
    fault = fault if len(fault) <= 400 else f"{fault[:397]}..."
    return InvalidRequestError(f"structured_outputs is nothing that can be followed: {fault}", param=_PARAM)


class _Checker:
    """A process that compiles one grammar at a time. It ends when its standard input does."""

    def __init__(self) -> None:
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pagerunner.engine.structured_output.grammar_door"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the parent
        )

    def ask(self, line: bytes, seconds: float) -> _Reply:
        """What the process says to a line. Raises OSError or EOFError when it doesn't in time, or ends."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(line + b"\n")
        stdin.flush()
        deadline = time.monotonic() + seconds
        data = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while not data.endswith(b"\n"):
                if not selector.select(max(deadline - time.monotonic(), 0.0)):
                    raise TimeoutError
                piece = os.read(stdout.fileno(), 1 << 16)
                if not piece:
                    raise EOFError
                data += piece
        return msgspec.json.decode(data, type=_Reply)

    def kill(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def grammar_text(wanted: StructuredOutputsParams) -> str:
    """llguidance's text of a grammar, not compiled yet. Raises ValueError, TypeError or RecursionError."""
    from llguidance import LLMatcher, grammar_from

    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(x) for x in wanted.choice))
    if wanted.grammar is not None:
        return grammar_from("grammar" if _RULE.search(wanted.grammar) else "lark", wanted.grammar)
    options: dict[str, Any] = {}
    if wanted.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if wanted.whitespace_pattern is not None:
        options["whitespace_pattern"] = wanted.whitespace_pattern
    schema = wanted.json if wanted.json is not None else {"type": "object"}
    if isinstance(schema, str):
        schema = json.loads(schema)
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]


def _serve() -> None:
    """The process: a line with the setup, then a line for each grammar; a line of reply for each."""

    def say(reply: _Reply) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
        sys.stdout.buffer.flush()

    lines = iter(sys.stdin.buffer.readline, b"")
    setup = msgspec.json.decode(next(lines), type=_Setup)
    try:
        tokenizer = guide_tokenizer(setup.tokenizer, setup.size, setup.eos_token_ids)
    except Exception as error:  # the package raises plain exceptions
        return say(_Reply(fault=str(error) or type(error).__name__))
    say(_Reply())
    for line in lines:
        try:
            text = grammar_text(msgspec.json.decode(line, type=StructuredOutputsParams))
            compile_grammar(tokenizer, Grammar(text).text)
            say(_Reply(text))
        except Exception as error:  # it is about this grammar, whatever it is
            say(_Reply(fault=str(error) or type(error).__name__))


def main() -> None:
    """Entry point of the process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
