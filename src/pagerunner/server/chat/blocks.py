"""Answers that are told block by block, in named events: what /v1/messages and /v1/responses have in common."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import Any

import msgspec

from pagerunner.server.chat.reader import Answer, Change
from pagerunner.server.chat.turn import ChatRun
from pagerunner.server.fanout import TokenCounter
from pagerunner.server.service import StreamWriter
from pagerunner.types import CompletionOutput, RequestOutput

_encode = msgspec.json.Encoder().encode


class BlockWriter(StreamWriter):
    """What is known of one answer: grows with outputs, whole or deltas, and shows itself as a body or as events.

    An event is a mapping whose `type` is also the event's name.
    """

    end = b""

    def __init__(self, run: ChatRun) -> None:
        self._reader = run.plan.new_reader()
        self._answer = Answer()
        self._counter = TokenCounter()
        self._finish_reason: str | None = None

    def add(self, result: RequestOutput) -> list[Change]:
        """Take an output; returns what it changed."""
        self._counter.add(0, result)
        changes: list[Change] = []
        for output in result.outputs:
            self._finish_reason = output.finish_reason
            self._take(output)
            changes += self._answer.add(self._reader.read(output.text, last=output.finish_reason is not None))
        self._name(changes)
        return changes

    def encode(self, chunk: dict[str, Any]) -> bytes:
        """An event with its name."""
        name: str = chunk["type"]
        return b"event: " + name.encode() + b"\ndata: " + _encode(chunk) + b"\n\n"

    def chunks(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The events of one output."""
        return self._tell(self.add(output))

    def _tell(self, changes: list[Change]) -> list[dict[str, Any]]:
        return [event for change in changes for event in self._told(change)]

    @abc.abstractmethod
    def _take(self, output: CompletionOutput) -> None:
        """Keep what the body needs of an output beside its text."""

    @abc.abstractmethod
    def _name(self, changes: list[Change]) -> None:
        """Give ids to the blocks that these changes open."""

    @abc.abstractmethod
    def _told(self, change: Change) -> Iterable[dict[str, Any]]:
        """The events of one change."""
