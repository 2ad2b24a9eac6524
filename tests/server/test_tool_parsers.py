"""Parsers of tool calls and reasoning: the same whatever the cuts, never an exception, no quadratic time."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from helpers.effort import effort
from pagerunner.server.chat.reader import Answer, AnswerReader
from pagerunner.server.chat.reasoning import Thinking
from pagerunner.server.chat.tool_parsers.formats import DeepSeekV3, Harmony, Hermes, Llama3Json, Named, Required
from pagerunner.server.chat.tool_parsers.stream import Arguments, StreamParser
from pagerunner.server.chat.turn import read_whole

B, b, S, e, E = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
MAKE: dict[str, Callable[[], StreamParser]] = {
    "hermes": Hermes,
    "llama3_json": lambda: Llama3Json(["f", "g"]),
    "deepseek_v3": DeepSeekV3,
    "openai": lambda: Harmony(thoughts=True, tools=True),
    "named": lambda: Named("f"),
    "required": Required,
    "think": lambda: Thinking(inside=False),
    "inside": lambda: Thinking(inside=True),
}
F = ("f", {"a": 1})
G = ("g", {"s": 'x}"{\\ é日', "l": [1, {"b": None}]})
g_json = json.dumps(G[1], ensure_ascii=False)
HARMONY_CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'

# format, text, reasoning, content, calls
CASES: list[tuple[str, str, str | None, str | None, list[Any]]] = [
    ("hermes", "", None, "", []),
    ("hermes", " Hi there.\n", None, " Hi there.\n", []),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', None, None, [F]),
    ("hermes", 'Sure!\n\n<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>\n', None, "Sure!", [F]),
    ("hermes", f'<tool_call>{{"arguments": {g_json}, "name": "g"}}</tool_call>\n<tool_call>\n{{"name": "f", "id": [1], "arguments": {{"a": 1}}}}', None, None, [G, F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', None, None, [F]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', None, None, [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call> done', None, " done", [("f", {})]),
    ("hermes", "<tool_call>call f please</tool_call>", None, "<tool_call>call f please</tool_call>", []),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}', None, '<tool_call>{"name": 5, "arguments": {}}', []),
    ("hermes", '<tool_call>{"name": "f", "argu', None, '<tool_call>{"name": "f", "argu', []),
    ("hermes", '<tool_call>{"arguments": [1], "name": "f"}', None, '<tool_call>{"arguments": [1], "name": "f"}', []),
    ("hermes", "a < b <tool_cal", None, "a < b <tool_cal", []),
    ("hermes", '<tool_call><tool_call>{"name": "f", "arguments": {"a": 1}}', None, "<tool_call>", [F]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', None, None, [F]),
    ("llama3_json", f'<|python_tag|>{{"name": "g", "parameters": {g_json}}}; {{"name": "f", "arguments": {{"a": 1}}}}', None, None, [G, F]),
    ("llama3_json", '{"name": "Bob", "parameters": {"a": 1}} ', None, '{"name": "Bob", "parameters": {"a": 1}} ', []),
    ("llama3_json", '{"answer": 42}\n', None, '{"answer": 42}\n', []),
    ("llama3_json", '{"name": "f"}', None, '{"name": "f"}', []),
    ("llama3_json", 'The call is {"name": "f", "parameters": {}}', None, 'The call is {"name": "f", "parameters": {}}', []),
    ("deepseek_v3", f'Let me see.{B}{b}function{S}f\n```json\n{{"a": 1}}\n```{e}\n{b}function{S}g\n```json\n{g_json}\n```{e}{E}', None, "Let me see.", [F, G]),
    ("deepseek_v3", f'{B}{b}f{S}{{"a": 1}}{e}{b}g{S}{g_json}{e}{E}', None, None, [F, G]),
    ("deepseek_v3", f"{B}{b}f{S}nothing{e}{E}", None, f"{B}{b}f{S}nothing{e}{E}", []),
    ("deepseek_v3", f"{B} oh", None, f"{B} oh", []),
    ("openai", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello <b>", "Hm.", "Hello <b>", []),
    ("openai", f"<|channel|>analysis<|message|>Let me call.<|end|><|start|>assistant{HARMONY_CALL}", "Let me call.", None, [F]),
    ("openai", "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{\"a\": 1}", None, None, [F]),
    ("openai", f"<|channel|>commentary<|message|>I'll look.<|end|><|start|>assistant{HARMONY_CALL}", None, "I'll look.", [F]),
    ("openai", "just text", None, "just text", []),
    ("openai", "<|channel|>final", None, "<|channel|>final", []),
    ("openai", "<|channel|>commentary to=functions.f<|message|>oops<|call|>", None, None, [("f", "oops")]),
    ("named", ' {"a": 1}', None, None, [F]),
    ("named", "", None, "", []),
    ("named", '{"a": ', None, None, [("f", '{"a": ')]),
    ("required", f'[{{"name": "f", "parameters": {{"a": 1}}}}, {{"name": "g", "parameters": {g_json}}}]', None, None, [F, G]),
    ("required", "no", None, "no", []),
    ("required", '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "par', None, None, [F]),
    ("required", '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {"b', None, None, [F, ("g", '{"b')]),
    ("required", '[{"name": "f", "parameters": {"a": 1}}', None, None, [F]),
    ("required", '[ {"na', None, "", []),
    ("required", "[", None, "", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, ', None, None, [("f", '{"a": [1, ')]),
    ("think", "<think>\nWhy?\n\nSo.\n</think>\n\nBecause. \n", "Why?\n\nSo.", "Because. \n", []),
    ("think", "<think>\n\n</think>\n\nYes", None, "Yes", []),
    ("think", " I <think> so</think>", None, " I <think> so</think>", []),
    ("think", "<think>endless", "endless", None, []),
    ("inside", "Why?\n</think>\n\nBecause.", "Why?", "Because.", []),
    ("inside", "<think>Why?</think>a</think>b", "Why?", "a</think>b", []),
    ("inside", "never ends </thi", "never ends </thi", None, []),
]  # fmt: skip


def parser(kind: str, **options: Any) -> AnswerReader:
    return AnswerReader([MAKE[kind]()], **options)


def said(kind: str, pieces: list[str], **options: Any) -> list[tuple[str, str, str]]:
    """The blocks of an answer that comes in these pieces, put together from what a stream is told."""
    reader, answer = parser(kind, **options), Answer()
    blocks: list[list[str]] = []
    for number, piece in enumerate(pieces):
        for change in answer.add(reader.read(piece, last=number == len(pieces) - 1)):
            if change.kind == "open":
                assert change.number == len(blocks)
                blocks.append([change.block.kind, change.block.name, ""])
            elif change.kind == "grow":
                assert change.number == len(blocks) - 1 and change.piece
                blocks[-1][2] += change.piece
    assert blocks == [[block.kind, block.name, block.text] for block in answer.blocks]
    return [(kind, name, text) for kind, name, text in blocks]


def decoded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


@pytest.mark.parametrize(("kind", "text", "reasoning", "content", "calls"), CASES)
def test_whole_answers(kind: str, text: str, reasoning: str | None, content: str | None, calls: list[Any]) -> None:
    reader = parser(kind)
    found = read_whole(reader, text)
    got = [(call.name, decoded(call.text)) for call in found.calls]
    assert (found.reasoning or None, found.content, got) == (reasoning, content, calls)
    assert reader.finish_reason("stop") == ("tool_calls" if calls else "stop")
    assert reader.finish_reason("length") == "length"


@pytest.mark.parametrize(("kind", "text", "reasoning", "content", "calls"), CASES)
def test_streams_say_the_same_as_whole_answers_whatever_the_cuts(
    kind: str, text: str, reasoning: str | None, content: str | None, calls: list[Any]
) -> None:
    for options in ({}, {"one_call": True}, {"shows_thoughts": False}):
        whole = [(block.kind, block.name, block.text) for block in read_whole(parser(kind, **options), text).blocks]
        assert said(kind, [text], **options) == whole
        assert said(kind, [*text, ""], **options) == whole
        random_ = random.Random(len(text))
        for _ in range(20):
            cuts = sorted(random_.randint(0, len(text)) for _ in range(4))
            pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            assert said(kind, pieces, **options) == whole


@pytest.mark.parametrize("kind", ["named", "required"])
def test_a_forced_call_that_is_cut_is_never_shown_as_text(kind: str) -> None:
    text = (
        g_json if kind == "named" else f'[{{"name": "g", "parameters": {g_json}}}, {{"name": "f", "parameters": {{}}}}]'
    )
    for length in range(len(text)):
        found = read_whole(parser(kind), text[:length])
        assert not found.content and all(call.name for call in found.calls)
        assert length < 30 or found.calls  # a call that has begun is told, with the arguments that there are


def test_arguments_come_in_pieces_and_before_the_call_ends() -> None:
    reader = parser("hermes")
    reader.read('<tool_call>{"name": "f", "arguments": {', last=False)
    events = reader.read('"city": "Par', last=False)
    assert all(isinstance(event, Arguments) for event in events)
    assert "".join(event.text for event in events) == '"city": "Par'


def test_only_the_first_call_and_no_reasoning_where_that_is_asked() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2
    assert len(read_whole(parser("hermes"), text).calls) == 2
    assert len(read_whole(parser("hermes", one_call=True), text).calls) == 1
    assert not read_whole(parser("think", shows_thoughts=False), "<think>a</think>b").reasoning


PIECES = [
    "<tool_call>", "</tool_call>", B, b, S, e, E, "function", "\n```json\n", "```", "<think>", "</think>", "<|channel|>",
    "<|message|>", "<|start|>", "<|end|>", "<|call|>", "analysis", "final", " to=functions.f", "{", "}", "[", "]", '"', "\\",
    '"name"', '"arguments"', '"parameters"', ":", ",", '"f"', "f", " ", "\n", "null", "1", "text", "<", "日", "\x00", "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("kind", MAKE)
def test_no_text_raises_and_cuts_never_matter(kind: str) -> None:
    random_ = random.Random(7)
    for _ in range(400):
        pieces = random_.choices(PIECES, k=random_.randint(1, 14))
        assert said(kind, pieces) == said(kind, ["".join(pieces)])


LONG = [
    "<tool_call>", '<tool_call>{"name": "f", "arguments": {', "<", " ", "{", "[", '"', "\\", '{"name": "f", "parameters": {"a": [',
    "1", B, b, f"{b}f{S}" + "{", "<|channel|>", "<|start|><|message|>", "<think>", "x", '<tool_call>{"name": "f", "arguments": {"a": 1}}',
]  # fmt: skip


@pytest.mark.days(2)
@pytest.mark.parametrize("kind", MAKE)
def test_time_grows_with_the_text(kind: str) -> None:
    """Very much of anything, at once or in small pieces; a quadratic parser needs minutes for 100 kB, and seconds for 25."""
    size = effort(25_000, 100_000)
    for unit in LONG:
        text = ('{"a": ' if unit in ("1", "\\", '"') else "") + unit * (size // len(unit))
        started = time.process_time()
        read_whole(parser(kind), text)
        said(kind, [text[at : at + 32] for at in range(0, len(text), 32)])
        assert time.process_time() - started < size / 25_000, unit
