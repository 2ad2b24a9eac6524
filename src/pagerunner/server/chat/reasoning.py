"""Reasoning, told apart from the answer."""

from __future__ import annotations

from pagerunner.server.chat.tool_parsers.stream import StreamParser, Wait

START, END = "<think>", "</think>"


class Thinking(StreamParser):
    """`<think>reasoning</think>answer`. White space around either is dropped.

    `inside`: the reasoning has begun, in the prompt or because the model always does; its mark may come or not. Otherwise it
    is there only if the text begins with the mark.
    """

    def __init__(self, *, inside: bool) -> None:
        self._inside = inside
        super().__init__()

    def parse(self) -> Wait:
        """See StreamParser."""
        self.begin()
        yield from self.spaces()
        if (yield from self.optional(START)) or self._inside:
            yield from self.spaces()
            yield from self.until((END,), self.think)
            yield from self.spaces()
        else:
            self.say("".join(self._raw))
        yield from self.until((), self.say)
