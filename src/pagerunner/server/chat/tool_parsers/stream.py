"""Parsers of generated text that may be stopped at any character: the base of those for tool calls and for reasoning.

A parser is a generator that waits where the text ends so far. Its events don't depend on how the text is cut into pieces,
except for where text events are cut. Its time is proportional to the text's length. No text makes it raise.
"""

from __future__ import annotations

import functools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator
from typing import NamedTuple

Wait = Generator[None, None, None]
Emit = Callable[[str], None]

_NESTING = re.compile(r'[{}\[\]"]')
_STRING_END = re.compile(r'["\\]')
_SPACES = re.compile(r"\s*")
_SCALAR = re.compile(r"[-+.\w]*")
_CLOSER = {"{": "}", "[": "]"}


class Text(NamedTuple):
    """A piece of the answer."""

    text: str


class Thought(NamedTuple):
    """A piece of the reasoning."""

    text: str


class CallStart(NamedTuple):
    """Tool call `number` begins. `id` is the model's own, if it writes any."""

    number: int
    name: str
    id: str = ""


class Arguments(NamedTuple):
    """A piece of a call's arguments, which together are JSON."""

    number: int
    text: str


class CallEnd(NamedTuple):
    """A call has ended, perhaps because the text has: then its arguments are cut."""

    number: int


Event = Text | Thought | CallStart | Arguments | CallEnd


class MalformedError(Exception):
    """The text isn't what its beginning promised; never leaves a parser."""


class StreamParser(ABC):
    """Feed it pieces of a text, then finish it; it returns what they mean. Subclasses write `parse`."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._events: list[Event] = []
        self._blank: list[str] = []  # white space that nothing has followed
        self._blank_kind: type[Text] | type[Thought] = Text
        self._raw: list[str] = []  # what was read since `begin`
        self._calls = 0
        self._open = False  # whether a call has started and not ended
        self._steps = self._run()
        next(self._steps)

    @abstractmethod
    def parse(self) -> Wait:
        """Read the text to its end."""

    def feed(self, text: str) -> list[Event]:
        """What a further piece of text means."""
        self._text = self._text[self._at :] + text
        self._at = 0
        next(self._steps, None)
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """What the end of the text means."""
        self._ended = True
        return self.feed("")

    def _run(self) -> Wait:
        yield
        yield from self.parse()
        if not self._calls and self._blank_kind is Text:
            self._emit_blank()

    # -- saying

    def say(self, text: str) -> None:
        """Text of the answer. White space waits for what follows: before a call, and behind calls, it is dropped."""
        self._put(text, Text)

    def think(self, text: str) -> None:
        """Text of the reasoning; white space around it is dropped."""
        self._put(text, Thought)

    def _put(self, text: str, kind: type[Text] | type[Thought]) -> None:
        if kind is not self._blank_kind:
            self._blank, self._blank_kind = [], kind
        shown = text.rstrip()
        if shown:
            self._emit_blank()
            self._events.append(kind(shown))
        if len(shown) < len(text):
            self._blank.append(text[len(shown) :])

    def _emit_blank(self) -> None:
        if self._blank:
            self._events.append(self._blank_kind("".join(self._blank)))
        self._blank = []

    def start_call(self, name: str, id_: str = "") -> None:
        """A call to `name` begins; what was read belongs to it."""
        self._blank = []
        self._open = True
        self._events.append(CallStart(self._calls, name, id_))

    def argue(self, text: str) -> None:
        """A piece of the open call's arguments."""
        if text:
            self._events.append(Arguments(self._calls, text))

    def end_call(self) -> None:
        """End the open call. If no call was started, tell what was read as text of the answer."""
        if self._open:
            self._events.append(CallEnd(self._calls))
            self._calls += 1
            self._open = False
        else:
            self.say("".join(self._raw))
        self._raw = []

    def cut(self) -> bool:
        """Whether the text has ended, and nothing of it is left to read."""
        return self._ended and self._at >= len(self._text)

    # -- reading

    def begin(self, raw: str = "") -> None:
        """Remember what is read from here on, behind `raw`."""
        self._raw = [raw]

    def _take(self, count: int) -> str:
        text = self._text[self._at : self._at + count]
        self._at += count
        self._raw.append(text)
        return text

    def char(self) -> Generator[None, None, str]:
        """The next character, not consumed; "" at the end."""
        while self._at >= len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def spaces(self) -> Wait:
        """Consume white space."""
        yield from self.word(_SPACES)

    def optional(self, text: str) -> Generator[None, None, bool]:
        """Consume `text` if it is what comes."""
        while True:
            there = self._text[self._at : self._at + len(text)]
            if there == text:
                self._take(len(text))
                return True
            if self._ended or not text.startswith(there):
                return False
            yield

    def at(self, text: str) -> Generator[None, None, bool]:
        """Whether `text` is what comes, which isn't consumed."""
        found = yield from self.optional(text)
        if found:
            self._at -= len(text)
            self._raw.pop()
        return found

    def word(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """Consume as many characters as the pattern takes, which may be none."""
        pieces: list[str] = []
        while (yield from self.char()):
            found = pattern.match(self._text, self._at)
            pieces.append(self._take(found.end() - self._at if found else 0))
            if self._at < len(self._text):
                break
        return "".join(pieces)

    def expect(self, text: str) -> Wait:
        """Consume `text`. Raises MalformedError where something else comes."""
        if not (yield from self.optional(text)):
            raise MalformedError

    def until(self, markers: Collection[str], emit: Emit) -> Generator[None, None, str]:
        """Emit text up to the first of the markers and consume that; returns it, or "" when the text ended before it."""
        pattern = _alternatives(tuple(markers))
        while True:
            found = pattern.search(self._text, self._at) if markers else None
            if found:
                emit(self._take(found.start() - self._at))
                return self._take(len(found[0]))
            held = 0 if self._ended else _held(self._text, self._at, markers)
            emit(self._take(len(self._text) - self._at - held))
            if self._ended:
                return ""
            yield

    def value(self, emit: Emit) -> Wait:
        """Emit a JSON value as it is written. Raises MalformedError where its brackets don't match or the text ends."""
        first = yield from self.char()
        if first == '"':
            yield from self._string(emit)
        elif first not in ("{", "["):
            text = yield from self.word(_SCALAR)
            if not text:
                raise MalformedError
            emit(text)
        else:
            closers: list[str] = []
            while True:
                found = _NESTING.search(self._text, self._at)
                if not found:
                    emit(self._take(len(self._text) - self._at))
                    if not (yield from self.char()):
                        raise MalformedError
                    continue
                what = found[0]
                if what == '"':
                    emit(self._take(found.start() - self._at))
                    yield from self._string(emit)
                    continue
                if what in _CLOSER:
                    closers.append(_CLOSER[what])
                elif what != closers.pop():
                    emit(self._take(found.start() - self._at))
                    raise MalformedError
                emit(self._take(found.end() - self._at))
                if not closers:
                    return

    def _string(self, emit: Emit) -> Wait:
        yield from self.expect('"')
        emit('"')
        while True:
            found = _STRING_END.search(self._text, self._at)
            if not found:
                emit(self._take(len(self._text) - self._at))
                if not (yield from self.char()):
                    raise MalformedError
            elif found[0] == '"':
                emit(self._take(found.end() - self._at))
                return
            else:
                emit(self._take(found.start() - self._at))
                while len(self._text) < self._at + 2:
                    if self._ended:
                        emit(self._take(1))
                        raise MalformedError
                    yield
                emit(self._take(2))

    def string(self) -> Generator[None, None, str]:
        """A JSON string's value. Raises MalformedError for anything else."""
        pieces: list[str] = []
        yield from self._string(pieces.append)
        return _loaded_text("".join(pieces))

    def listed(self, call: Callable[[], Wait]) -> Wait:
        """A list of calls in brackets, each read by `call`. Raises MalformedError for anything else; calls before it have ended."""
        yield from self.expect("[")
        while True:
            yield from self.spaces()
            yield from call()
            self.end_call()
            self.begin()
            yield from self.spaces()
            if not (yield from self.optional(",")):
                break
        yield from self.expect("]")
        self.begin()

    def call_object(self, names: Collection[str] | None = None, *, bare: bool = True) -> Wait:
        """A call as an object with `name` and `arguments` (or `parameters`). Events begin when both are there.

        Args:
            names: what a name may be; None allows all.
            bare: whether arguments may be missing.

        Raises:
            MalformedError: it is something else, as far as known before the arguments' end.
        """
        name: str | None = None
        held: str | None = None
        yield from self.expect("{")
        while True:
            yield from self.spaces()
            key = yield from self.string()
            yield from self.spaces()
            yield from self.expect(":")
            yield from self.spaces()
            if key == "name" and name is None:
                name = yield from self.string()
                if not name or (names is not None and name not in names):
                    raise MalformedError
            elif key in ("arguments", "parameters") and held is None:
                if name is not None and (yield from self.char()) == "{":
                    self.start_call(name)
                    held = ""
                    yield from self.value(self.argue)
                else:
                    pieces: list[str] = []
                    yield from self.value(pieces.append)
                    held = _object_text("".join(pieces))
            else:
                yield from self.value(ignore)
            yield from self.spaces()
            if not (yield from self.optional(",")):
                break
        yield from self.expect("}")
        if name is None or (held is None and not bare):
            raise MalformedError
        if not self._open:
            self.start_call(name)
            self.argue("{}" if held is None else held)


def ignore(text: str) -> None:
    """Take what is read and tell nothing of it."""


def _loaded_text(text: str) -> str:
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        raise MalformedError from None
    return str(value)


def _object_text(text: str) -> str:
    """Arguments as JSON: some models write them as a string that holds JSON, or null."""
    if text.startswith('"'):
        text = _loaded_text(text)
    if text in ("null", ""):
        return "{}"
    if not text.lstrip().startswith("{"):
        raise MalformedError
    return text


@functools.lru_cache(maxsize=64)
def _alternatives(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))


def _held(text: str, start: int, markers: Collection[str]) -> int:
    """How many of the last characters may be the beginning of a marker."""
    longest = max(map(len, markers), default=0)
    for count in range(min(longest - 1, len(text) - start), 0, -1):
        if any(marker.startswith(text[-count:]) for marker in markers):
            return count
    return 0
