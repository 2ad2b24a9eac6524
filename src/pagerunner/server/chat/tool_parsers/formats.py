"""How models write tool calls. Text that begins like a call and isn't one is given back as answer."""

from __future__ import annotations

import re
from collections.abc import Collection, Generator
from dataclasses import dataclass

from pagerunner.server.chat.tool_parsers.stream import MalformedError, StreamParser, Wait, ignore


class Hermes(StreamParser):
    """Hermes 2, Qwen 2.5 and 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, with text around it."""

    def parse(self) -> Wait:
        """See StreamParser."""
        while marker := (yield from self.until(("<tool_call>",), self.say)):
            self.begin(marker)
            try:
                yield from self.spaces()
                yield from self.call_object()
                yield from self.spaces()
                yield from self.optional("</tool_call>")
            except MalformedError:
                pass
            self.end_call()


class Llama3Json(StreamParser):
    """Llama 3.1 and later: the answer is `{"name": ..., "parameters": {...}}`, or several of these with `;` between.

    Nothing marks a call, so only the names of the request's tools make one.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        super().__init__()

    def parse(self) -> Wait:
        """See StreamParser."""
        self.begin()
        yield from self.spaces()
        yield from self.optional("<|python_tag|>")
        yield from self.spaces()
        while (yield from self.char()) == "{":
            try:
                yield from self.call_object(self._names, bare=False)
            except MalformedError:
                break
            self.end_call()
            self.begin()
            yield from self.spaces()
            if (yield from self.char()) in (";", ","):
                self._take(1)
            yield from self.spaces()
        self.end_call()
        yield from self.until((), self.say)


@dataclass(frozen=True)
class Marks:
    """Special tokens around calls: `section` and what ends it, `call` and its name, `arguments` and JSON, `call_end`.

    `name` finds a call's name in what stands before its arguments. `has_ids`: all of that is the call's id.
    """

    section: str
    call: str
    arguments: str
    call_end: str
    section_end: str
    name: re.Pattern[str] = re.compile(r"(.+)", re.DOTALL)
    has_ids: bool = False


DEEPSEEK = Marks(
    section="<｜tool▁calls▁begin｜>",
    call="<｜tool▁call▁begin｜>",
    arguments="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
    section_end="<｜tool▁calls▁end｜>",
)
KIMI_K2 = Marks(
    section="<|tool_calls_section_begin|>",
    call="<|tool_call_begin|>",
    arguments="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
    section_end="<|tool_calls_section_end|>",
    name=re.compile(r"(?:functions\.)?(.+):\d+", re.DOTALL),
    has_ids=True,
)


class Marked(StreamParser):
    """Calls in `marks`. Kimi-K2 writes `functions.NAME:0` before the arguments, DeepSeek-V3.1 the name.

    DeepSeek-V3 and R1 write `function`, and behind that mark the name and a fenced block.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        super().__init__()

    def parse(self) -> Wait:
        """See StreamParser."""
        marks = self._marks
        while marker := (yield from self.until((marks.section, marks.call), self.say)):
            self.begin(marker)
            try:
                yield from self.spaces()
                if marker == marks.section:
                    yield from self.expect(marks.call)
                yield from self._call()
            except MalformedError:
                pass
            called = self._open
            self.end_call()
            self.begin()
            yield from self.spaces()
            if not called or not (yield from self.optional(marks.section_end)):
                self.end_call()

    def _call(self) -> Wait:
        marks = self._marks
        header = yield from self._read(marks.arguments)
        found = marks.name.fullmatch(header)
        if found is None:
            raise MalformedError
        name, fenced = found[1], header == "function"
        if fenced:
            name = yield from self._read("\n")
            yield from self.spaces()
            yield from self.optional("```json")
        yield from self.spaces()
        empty = yield from self.at(marks.call_end)
        if not name or (not empty and (yield from self.char()) != "{"):
            raise MalformedError
        self.start_call(name, header if marks.has_ids else "")
        if empty:
            self.argue("{}")
        if fenced:
            yield from self.value(self.argue)
            yield from self.spaces()
            yield from self.optional("```")
            yield from self.spaces()
            yield from self.optional(marks.call_end)
        else:
            end = yield from self.until((marks.call_end, marks.call, marks.section_end), self.argue)
            if end and end != marks.call_end:
                self._at -= len(end)

    def _read(self, marker: str) -> Generator[None, None, str]:
        pieces: list[str] = []
        if not (yield from self.until((marker,), pieces.append)):
            raise MalformedError
        return "".join(pieces).strip()


class Mistral(StreamParser):
    """`[TOOL_CALLS]` and a list of `{"name": ..., "arguments": {...}}`, or for each call `[TOOL_CALLS]NAME[ARGS]{...}`.

    The latter may have `[CALL_ID]` and an id before `[ARGS]`, and may leave `[ARGS]` out.
    """

    _MARK = "[TOOL_CALLS]"
    _WORD = re.compile(r'[^\s\[\]{}"]*')

    def parse(self) -> Wait:
        """See StreamParser."""
        while marker := (yield from self.until((self._MARK,), self.say)):
            self.begin(marker)
            try:
                yield from self.spaces()
                if (yield from self.char()) == "[":
                    yield from self.listed(self.call_object)
                else:
                    yield from self._call()
            except MalformedError:
                pass
            self.end_call()

    def _call(self) -> Wait:
        name = yield from self.word(self._WORD)
        id_ = ""
        if (yield from self.optional("[CALL_ID]")):
            id_ = yield from self.word(self._WORD)
        yield from self.optional("[ARGS]")
        yield from self.spaces()
        if not name or (yield from self.char()) != "{":
            raise MalformedError
        self.start_call(name, id_)
        yield from self.value(self.argue)


class Harmony(StreamParser):
    """gpt-oss: messages on channels. `analysis` is reasoning, `final` the answer, `to=functions.NAME` a call.

    Without `thoughts`, reasoning is left out; without `tools`, a call's text is given as answer.
    """

    _ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
    _CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
    _RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)")

    def __init__(self, *, thoughts: bool, tools: bool) -> None:
        self._thoughts = thoughts
        self._tools = tools
        super().__init__()

    def parse(self) -> Wait:
        """See StreamParser."""
        said: set[str] = set()
        while True:
            marker = yield from self.until(("<|start|>", "<|channel|>"), self.say)
            if not marker:
                return
            self.begin(marker)
            pieces = [marker]
            if not (yield from self.until(("<|message|>",), pieces.append)):
                self.end_call()
                return
            header = "".join(pieces)
            channel = found[1] if (found := self._CHANNEL.search(header)) else "final"
            recipient = self._RECIPIENT.search(header)
            if recipient and self._tools:
                self.start_call(recipient[1])
                emit = self.argue
            elif channel == "analysis":
                emit = self.think if self._thoughts else ignore
            else:
                emit = self.say
            if not self._open and channel in said:
                emit("\n")
            said.add(channel)
            end = yield from self.until(self._ENDS, emit)
            if self._open:
                self.end_call()
            if end in ("<|start|>", "<|channel|>"):
                self._at -= len(end)


class Named(StreamParser):
    """The whole answer is the arguments of one call to this tool; a grammar makes it so."""

    def __init__(self, name: str) -> None:
        self._name = name
        super().__init__()

    def parse(self) -> Wait:
        """See StreamParser."""
        self.begin()
        yield from self.spaces()
        if (yield from self.char()):
            self.start_call(self._name)
            yield from self.until((), self.argue)
            self.end_call()


class Required(StreamParser):
    """The whole answer is a JSON list of calls; a grammar makes it so. If the list is cut, its last call counts if the
    name is there and the arguments have begun. Otherwise that call is left out."""

    def parse(self) -> Wait:
        """See StreamParser."""
        self.begin()
        try:
            yield from self.spaces()
            yield from self.listed(self.call_object)
        except MalformedError:
            if self.cut() and not self._open:
                return
            self.end_call()
        yield from self.until((), self.say)
