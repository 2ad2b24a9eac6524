"""Reasoning, told apart from the answer."""

from __future__ import annotations

from collections.abc import Sequence

from pagerunner.server.chat.tool_parsers.stream import StreamParser, Wait
from pagerunner.text.tokenizer import Tokenizer

START, END = "<think>", "</think>"


class Thinking(StreamParser):
    """`<think>reasoning</think>answer`. White space around either is dropped.

    `inside`: the reasoning has begun already, in the prompt or because the model always reasons first. Its opening mark may
    come or not. Otherwise there is reasoning only if the text begins with the mark.
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


def thinking_tokens(token_ids: Sequence[int], tokenizer: Tokenizer, share: float) -> int:
    """How many of an answer's tokens are reasoning with its marks: all up to the first `</think>`, or all without one.

    If the mark is no token of its own, the number follows from the reasoning's `share` of the answer's text.
    """
    end = tokenizer.token_to_id(END)
    if end is None:
        return round(len(token_ids) * share)
    return token_ids.index(end) + 1 if end in token_ids else len(token_ids)


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
