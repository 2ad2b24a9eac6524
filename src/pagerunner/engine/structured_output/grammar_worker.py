"""The process that tries grammars: `python -m pagerunner.engine.structured_output.grammar_worker`, started by
engine/structured_output/grammar_door.py.

It reads the tokenizer once. Then it forks a child for each grammar. So many grammars compile side by side, a child may
crash, and ending a child costs nothing. A child has three limits: `seconds` of processor time, `_MEMORY_BYTES` of addresses
beyond those with which it began, and a small stack. The stack is smaller than that of the core's threads, so a grammar that
compiles in a child compiles there too. Lines of JSON come on standard input, and answers go to standard output.
"""

from __future__ import annotations

import json
import os
import re
import resource
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, NoReturn

import msgspec

from pagerunner.engine.structured_output.grammar import compile_grammar, guide_tokenizer
from pagerunner.engine.structured_output.structural_tag import structural_tag_grammar
from pagerunner.types import StructuredOutputsParams

_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)  # what llama.cpp's notation has and Lark's hasn't
_STACK_BYTES = 4 * 2**20  # half of what threads commonly have
_MEMORY_BYTES = 2**30
_NICENESS = 5
_WALL_FACTOR = 4  # a busy machine may take this many times the processor time
_READ_BYTES = 1 << 16
_WHITESPACE = r"[ \t]{0,8}|\r?\n[ \t]{0,64}"
"""Between two marks of JSON: a few blanks, or a line's end and an indentation. It always ends, whatever a model prefers."""


class Setup(msgspec.Struct, frozen=True):
    """The first line: the tokenizer.json, the width of masks in tokens, and the end tokens."""

    tokenizer: str
    size: int
    eos_token_ids: list[int]


class Order(msgspec.Struct, frozen=True, omit_defaults=True):
    """Try `wanted`; without it, give the job up."""

    job: int
    seconds: float = 0.0
    wanted: StructuredOutputsParams | None = None


End = Literal["", "crash", "killed", "late", "memory"]


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """A grammar's text for llguidance, or the compiler's `fault`, or how the child ended without either. Job -1 is the setup."""

    job: int = -1
    text: str = ""
    fault: str = ""
    end: End = ""


class _Child:
    def __init__(self, pid: int, pipe: int, deadline: float) -> None:
        self.pid = pid
        self.pipe = pipe
        self.deadline = deadline
        self.late = False
        self.said = bytearray()


def grammar_text(wanted: StructuredOutputsParams, is_special: Callable[[str], bool] = lambda text: False) -> str:
    """llguidance's text of a grammar, not compiled yet; `is_special` says which texts are special tokens.

    Raises:
        ValueError, TypeError, RecursionError: it is malformed.
    """
    from llguidance import LLMatcher, grammar_from

    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:  # one lexeme, because alternatives of a rule would be followed one by one
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(json.dumps(x) for x in wanted.choice))
    if wanted.grammar is not None:
        return grammar_from("grammar" if _RULE.search(wanted.grammar) else "lark", wanted.grammar)
    defaults: dict[str, Any] = {"whitespace_pattern": _WHITESPACE}
    overrides: dict[str, Any] = {}
    if wanted.whitespace_pattern is not None:
        overrides["whitespace_pattern"] = wanted.whitespace_pattern
    if wanted.disable_any_whitespace:
        defaults = {}
        overrides["whitespace_flexible"] = False
    if wanted.structural_tag is not None:
        return structural_tag_grammar(wanted.structural_tag, is_special, defaults, overrides)
    schema = wanted.json if wanted.json is not None else {"type": "object"}
    if isinstance(schema, str):
        schema = json.loads(schema)
    return LLMatcher.grammar_from_json_schema(schema, defaults=defaults, overrides=overrides)  # type: ignore[arg-type]


class _Trials:
    """The children, and the replies that are still expected of them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._children: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)

    def serve(self, unread: bytearray) -> None:
        """Until standard input ends; `unread` are bytes of it that came with the setup."""
        while True:
            *lines, rest = bytes(unread).split(b"\n")
            unread[:] = rest
            for line in lines:
                self._obey(msgspec.json.decode(line, type=Order))
            due = min((child.deadline for child in self._children.values() if not child.late), default=None)
            for key, _ in self._selector.select(None if due is None else max(due - time.monotonic(), 0.0)):
                piece = os.read(key.fd, _READ_BYTES)
                if key.fd == 0:
                    if not piece:
                        return
                    unread += piece
                elif piece:
                    self._children[key.data].said += piece
                else:
                    self._report(key.data)
            self._end_late()

    def end_all(self) -> None:
        """End all children: no request waits for them any more."""
        for child in self._children.values():
            os.kill(child.pid, signal.SIGKILL)

    def _obey(self, order: Order) -> None:
        child = self._children.get(order.job)
        if order.wanted is None:
            if child is not None:
                os.kill(child.pid, signal.SIGKILL)
            return
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _try(self._tokenizer, order, writing)
        os.close(writing)
        self._children[order.job] = _Child(pid, reading, time.monotonic() + _WALL_FACTOR * order.seconds)
        self._selector.register(reading, selectors.EVENT_READ, order.job)

    def _end_late(self) -> None:
        now = time.monotonic()
        for child in self._children.values():
            if now >= child.deadline and not child.late:
                child.late = True
                os.kill(child.pid, signal.SIGKILL)

    def _report(self, job: int) -> None:
        child = self._children.pop(job)
        self._selector.unregister(child.pipe)
        os.close(child.pipe)
        status = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        if status == 0 and child.said.endswith(b"\n"):
            _say(bytes(child.said))
            return
        end: End = "crash"
        if child.late or status == -signal.SIGPROF:
            end = "late"
        elif status == -signal.SIGKILL:
            end = "killed"
        _say(msgspec.json.encode(Reply(job, end=end)) + b"\n")


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def _try(tokenizer: Any, order: Order, pipe: int) -> NoReturn:
    """In the child: compile, say what came of it, and end."""

    def compile_and_say() -> None:
        with open(pipe, "wb") as said:
            said.write(msgspec.json.encode(_compile(tokenizer, order)) + b"\n")

    try:
        os.nice(_NICENESS)
        with open("/proc/self/statm", encoding="ascii") as pages:
            used = int(pages.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES,) * 2)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, max(order.seconds, 1e-6))
        threading.stack_size(_STACK_BYTES)
        thread = threading.Thread(target=compile_and_say)
        thread.start()
        thread.join()
    finally:
        os._exit(0)  # a child that has said nothing has failed


def _compile(tokenizer: Any, order: Order) -> Reply:
    assert order.wanted is not None

    def is_special(text: str) -> bool:
        ids = tokenizer.tokenize_str(text, parse_special=True)
        return len(ids) == 1 and bool(tokenizer.is_special_token(ids[0]))

    try:
        text = grammar_text(order.wanted, is_special)
        compile_grammar(tokenizer, text)
        return Reply(order.job, text)
    except MemoryError:
        return Reply(order.job, end="memory")
    except Exception as error:  # any exception here is about this grammar
        return Reply(order.job, fault=str(error) or type(error).__name__)


def main() -> None:
    """Entry point of the process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    unread = bytearray()
    while b"\n" not in unread:
        piece = os.read(0, _READ_BYTES)
        if not piece:
            return
        unread += piece
    line, _, rest = bytes(unread).partition(b"\n")
    setup = msgspec.json.decode(line, type=Setup)
    try:
        tokenizer = guide_tokenizer(setup.tokenizer, setup.size, setup.eos_token_ids)
    except Exception as error:  # the package raises plain exceptions
        return _say(msgspec.json.encode(Reply(fault=str(error) or type(error).__name__)) + b"\n")
    _say(msgspec.json.encode(Reply()) + b"\n")
    trials = _Trials(tokenizer)
    try:
        trials.serve(bytearray(rest))
    finally:
        trials.end_all()


if __name__ == "__main__":
    main()
