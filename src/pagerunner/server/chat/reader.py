"""Generated text becomes an answer: pieces of text, of reasoning and of tool calls.

A stream shows the events as they come. A whole answer adds up the same events, so both say the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from pagerunner.server.chat.tool_parsers.stream import Arguments, CallEnd, CallStart, Event, StreamParser, Text, Thought


class AnswerReader:
    """Reads one answer, whole or in pieces.

    Args:
        parsers: each reads the text that the parser before it left.
        one_call: leave out all calls but the first.
        chosen: whether the model chose the function.
        shows_thoughts: whether reasoning is told at all.
        new_id: the id of a call to a function, by its name and number, if the model has written none.
    """

    def __init__(
        self,
        parsers: list[StreamParser],
        *,
        one_call: bool = False,
        chosen: bool = True,
        shows_thoughts: bool = True,
        new_id: Callable[[str, int], str] = lambda name, number: "",
    ) -> None:
        self._parsers = parsers
        self._one_call = one_call
        self._chosen = chosen
        self._shows_thoughts = shows_thoughts
        self._new_id = new_id
        self._arguments: str | None = None  # of the last call that is shown
        self.thoughts = self.others = 0  # characters of reasoning, shown or not, and of text and calls

    def read(self, text: str, *, last: bool) -> list[Event]:
        """What a further piece of the text means. `last` says that no other piece follows."""
        events: list[Event] = [Text(text)] if text else []
        for parser in self._parsers:
            later: list[Event] = []
            for event in events:
                later += parser.feed(event.text) if isinstance(event, Text) else [event]
            events = later + (parser.finish() if last else [])
        for place, event in enumerate(events):
            if isinstance(event, CallStart) and not event.id:
                events[place] = event._replace(id=self._new_id(event.name, event.number))
            elif isinstance(event, Thought):
                self.thoughts += len(event.text)
            elif isinstance(event, Text | Arguments):
                self.others += len(event.text)
        shown = [event for event in events if self._shows(event)]
        for event in shown:
            if isinstance(event, CallStart | Arguments):
                self._arguments = "" if isinstance(event, CallStart) else f"{self._arguments}{event.text}"
        return shown

    def finish_reason(self, reason: str | None, stop: int | str | None = None) -> str | None:
        """ "tool_calls" for calls that the model chose. The last of them isn't to be made if `stop`, a stop string, has cut it.

        A call that the client named ends with "stop", as OpenAI's does.
        """
        calls = self._arguments is not None and (not isinstance(stop, str) or is_json(self._arguments))
        return "tool_calls" if reason == "stop" and calls and self._chosen else reason

    def _shows(self, event: Event) -> bool:
        if isinstance(event, Thought):
            return self._shows_thoughts
        return isinstance(event, Text) or not (self._one_call and event.number)


@dataclass
class Block:
    """A run of one kind: text, reasoning, or one call, of which `text` are the arguments and `name` the function.

    `id` is the call's, unless it is left to the endpoint.
    """

    kind: Literal["text", "reasoning", "call"]
    pieces: list[str] = field(default_factory=list)
    name: str = ""
    id: str = ""

    @property
    def text(self) -> str:
        """All pieces together."""
        return "".join(self.pieces)


class Change(NamedTuple):
    """What an event means for block `number`: it is opened, grows by `piece`, or is closed."""

    kind: Literal["open", "grow", "close"]
    number: int
    block: Block
    piece: str = ""


class Answer:
    """What the events of one answer add up to: `blocks` in the order in which they came."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open = False

    def add(self, events: list[Event]) -> list[Change]:
        """Take further events; says block by block what they changed."""
        changes: list[Change] = []
        for event in events:
            match event:
                case Text(piece):
                    changes += self._run("text", piece)
                case Thought(piece):
                    changes += self._run("reasoning", piece)
                case CallStart(_, name, id_):
                    changes += [*self.close(), self._begin(Block("call", name=name, id=id_))]
                case Arguments(_, piece):
                    changes.append(self._grow(piece))
                case CallEnd():
                    changes += self.close()
        return _joined(changes)

    def close(self) -> list[Change]:
        """No more is added to the last block."""
        was, self._open = self._open, False
        return [Change("close", len(self.blocks) - 1, self.blocks[-1])] if was else []

    def empty(self) -> list[Change]:
        """An answer without anything, as a text without characters."""
        return [self._begin(Block("text")), *self.close()]

    @property
    def content(self) -> str | None:
        """The text; None where there are only reasoning or calls."""
        found = [block.text for block in self.blocks if block.kind == "text"]
        return "".join(found) if found or not self.blocks else None

    @property
    def reasoning(self) -> str:
        """The reasoning."""
        return "".join(block.text for block in self.blocks if block.kind == "reasoning")

    @property
    def calls(self) -> list[Block]:
        """The calls."""
        return [block for block in self.blocks if block.kind == "call"]

    def _run(self, kind: Literal["text", "reasoning"], piece: str) -> list[Change]:
        if self._open and self.blocks[-1].kind == kind:
            return [self._grow(piece)]
        return [*self.close(), self._begin(Block(kind)), self._grow(piece)]

    def _begin(self, block: Block) -> Change:
        self.blocks.append(block)
        self._open = True
        return Change("open", len(self.blocks) - 1, block)

    def _grow(self, piece: str) -> Change:
        self.blocks[-1].pieces.append(piece)
        return Change("grow", len(self.blocks) - 1, self.blocks[-1], piece)


def _joined(changes: list[Change]) -> list[Change]:
    """The same with the pieces of one block as one."""
    joined: list[Change] = []
    for change in changes:
        if change.kind == "grow" and joined and joined[-1].kind == "grow":
            change = change._replace(piece=joined.pop().piece + change.piece)
        joined.append(change)
    return joined


def is_json(text: str) -> bool:
    """Whether a call's arguments are whole."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
