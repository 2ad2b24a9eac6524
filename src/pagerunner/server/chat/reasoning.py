"""Reasoning, told apart from the answer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from pagerunner.server.chat.tool_parsers.stream import StreamParser, Wait
from pagerunner.text.tokenizer import Tokenizer


class ThoughtMarks(NamedTuple):
    """What is before and after reasoning.

    Args:
        always: whether each answer begins with reasoning, with its first mark or without.
        special: whether the marks are special tokens, so that texts must have them.
    """

    start: str = "<think>"
    end: str = "</think>"
    always: bool = False
    special: bool = False


MARKS = {
    "qwen3": ThoughtMarks(),
    "deepseek_r1": ThoughtMarks(always=True),
    "deepseek_v3": ThoughtMarks(),
    "deepseek_v4": ThoughtMarks(),
    "glm45": ThoughtMarks(),
    "glm47": ThoughtMarks(),
    "kimi_k2": ThoughtMarks(),
    "minimax_m2": ThoughtMarks(always=True),
    "mistral": ThoughtMarks("[THINK]", "[/THINK]", special=True),
}
"""By vLLM's names for their parsers. Those with equal marks are told apart by their prompts alone."""


class Thinking(StreamParser):
    """`<think>reasoning</think>answer`. White space around either is dropped.

    `inside`: the reasoning has begun already, in the prompt or because the model always reasons first. Its opening mark may
    come or not. Otherwise there is reasoning only if the text begins with the mark. `breaks` end it too, and are no part of it.
    """

    def __init__(self, marks: ThoughtMarks, *, inside: bool, breaks: Collection[str] = ()) -> None:
        self._marks = marks
        self._breaks = breaks
        self._inside = inside
        super().__init__()

    def parse(self) -> Wait:
        """See StreamParser."""
        self.begin()
        yield from self.spaces()
        marks = self._marks
        if (yield from self.optional(marks.start)) or self._inside:
            yield from self.spaces()
            end = yield from self.until((marks.end, *self._breaks), self.think)
            if end in self._breaks:
                self._at -= len(end)
            yield from self.spaces()
        else:
            self.say("".join(self._raw))
        yield from self.until((), self.say)


def thinking_tokens(
    token_ids: Sequence[int], tokenizer: Tokenizer, share: float, end: str, breaks: Collection[str] = ()
) -> int:
    """How many of an answer's tokens are reasoning with its marks: all up to the first mark that ends it, or all without one.

    If the mark is no token of its own, the number follows from the reasoning's `share` of the answer's text.
    """
    ends = [tokenizer.token_to_id(mark) for mark in (end, *breaks)]
    if ends[0] is None:
        return round(len(token_ids) * share)
    for place, token in enumerate(token_ids):
        if token in ends:
            return place + (token == ends[0])
    return len(token_ids)


def analysis_tokens(token_ids: Sequence[int], tokenizer: Tokenizer, share: float) -> int:
    """The same for gpt-oss: the tokens within messages on the `analysis` channel."""
    channel, message = (tokenizer.token_to_id(f"<|{name}|>") for name in ("channel", "message"))
    ends = {tokenizer.token_to_id(f"<|{name}|>") for name in ("end", "return", "call", "start")}
    if channel is None or message is None:
        return round(len(token_ids) * share)
    count, inside = 0, False
    header: list[int] | None = None
    for token in token_ids:
        if token == channel:
            header, inside = [], False
        elif header is not None and token == message:
            inside, header = tokenizer.decode(header).strip().startswith("analysis"), None
        elif header is not None:
            header.append(token)
        elif token in ends:
            inside = False
        else:
            count += inside
    return count
