"""How models write tool calls. Text that begins like a call and isn't one is given back as answer."""

from __future__ import annotations

import re
from collections.abc import Collection, Generator

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


class DeepSeekV3(StreamParser):
    """DeepSeek-V3 and R1 (`function<sep>NAME` and a fenced block) and V3.1 (`NAME<sep>` and the object itself)."""

    _CALLS, _CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
    _SEP, _CALL_END, _CALLS_END = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"

    def parse(self) -> Wait:
        """See StreamParser."""
        while marker := (yield from self.until((self._CALLS, self._CALL), self.say)):
            self.begin(marker)
            try:
                yield from self.spaces()
                if marker == self._CALLS:
                    yield from self.expect(self._CALL)
                yield from self._call()
            except MalformedError:
                pass
            self.end_call()
            self.begin()
            yield from self.spaces()
            if not (yield from self.optional(self._CALLS_END)):
                self.end_call()

    def _call(self) -> Wait:
        name = yield from self._read(self._SEP)
        if name == "function":
            name = yield from self._read("\n")
            yield from self.spaces()
            yield from self.optional("```json")
        yield from self.spaces()
        if not name or (yield from self.char()) != "{":
            raise MalformedError
        self.start_call(name)
        yield from self.value(self.argue)
        yield from self.spaces()
        yield from self.optional("```")
        yield from self.spaces()
        yield from self.optional(self._CALL_END)

    def _read(self, marker: str) -> Generator[None, None, str]:
        pieces: list[str] = []
        if not (yield from self.until((marker,), pieces.append)):
            raise MalformedError
        return "".join(pieces).strip()


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
            yield from self.expect("[")
            while True:
                yield from self.spaces()
                yield from self.call_object()
                self.end_call()
                self.begin()
                yield from self.spaces()
                if not (yield from self.optional(",")):
                    break
                self.begin()
            yield from self.expect("]")
        except MalformedError:
            if self.cut() and not self._open:
                return
            self.end_call()
        yield from self.until((), self.say)
