"""Parsers of tool calls and reasoning: the same whatever the cuts, never an exception, no quadratic time."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from helpers.effort import effort, share_of_the_day
from pagerunner.server.chat.reader import Answer, AnswerReader
from pagerunner.server.chat.reasoning import MARKS, Thinking
from pagerunner.server.chat.tool_parsers.formats import Harmony, Named, Required
from pagerunner.server.chat.tool_parsers.names import FORMATS
from pagerunner.server.chat.tool_parsers.stream import Arguments, StreamParser
from pagerunner.server.chat.turn import read_whole

B, b, S, e, E = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
KS, KC, KA, KE, KX = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
D = "｜DSML｜"
F_PROPERTIES = {"a": {"type": "integer"}, "t": {"type": "string"}}
G_PROPERTIES = {
    "n": {"type": "number"}, "b": {"type": "boolean"}, "l": {"type": "array", "items": {}}, "o": {"$ref": "#/$defs/Pet"},
    "m": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "u": {"type": ["string", "integer"]}, "e": {"enum": [1, 2]}, "k": {"enum": ["x", "1"]}, "any": {},
}  # fmt: skip
SCHEMAS: dict[str, Any] = {
    "f": {"type": "object", "properties": F_PROPERTIES},
    "g": {
        "properties": G_PROPERTIES,
        "additionalProperties": {"type": "integer"},
        "$defs": {"Pet": {"type": "object"}},
    },
    "a.b-日": {"properties": 3},
}
MAKE: dict[str, Callable[[], StreamParser]] = {
    **{name: lambda made=made: made.make(SCHEMAS) for name, made in FORMATS.items()},
    "openai": lambda: Harmony(thoughts=True, tools=True),
    "named": lambda: Named("f"),
    "required": Required,
    "think": lambda: Thinking(MARKS["qwen3"], inside=False),
    "inside": lambda: Thinking(MARKS["deepseek_r1"], inside=True),
    "think mistral": lambda: Thinking(MARKS["mistral"], inside=False),
    "inside kimi": lambda: Thinking(MARKS["kimi_k2"], inside=True, breaks=FORMATS["kimi_k2"].begins),
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
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1 ]}', None, "]}", [("f", '{"a": 1 ')]),
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
    ("think mistral", "[THINK]Why?\n[/THINK]Because.", "Why?", "Because.", []),
    ("think mistral", "<think>a</think>b", None, "<think>a</think>b", []),
    ("inside kimi", f"Why?{KS}{KC}", "Why?", f"{KS}{KC}", []),
    ("inside kimi", f"<think>Why?</think>{KS}", "Why?", KS, []),
    ("kimi_k2", f'Let me see.{KS}{KC}functions.f:0{KA}{{"a": 1}}{KE}\n{KC} functions.g:1 {KA} {g_json} {KE}{KX}', None, "Let me see.", [F, G]),
    ("kimi_k2", f'{KC}functions.a.b-日:12{KA}{{"q": "<|tool"}}{KE}{KX} So.', None, " So.", [("a.b-日", {"q": "<|tool"})]),
    ("kimi_k2", f"{KS}{KC}f:0{KA}{KE}{KX}", None, None, [("f", {})]),
    ("kimi_k2", f'{KS}{KC}functions.f:0{KA}{{"a": {KE}{KC}functions.f:1{KA}{{"a": 1}}{KX}', None, None, [("f", '{"a": '), F]),
    ("kimi_k2", f'{KS}{KC}tool_call_1{KA}{{"a": 1}}{KE}{KX}', None, f'{KS}{KC}tool_call_1{KA}{{"a": 1}}{KE}{KX}', []),
    ("kimi_k2", f"a{KS}{KC}functions.f:0{KA}text{KE}", None, f"a{KS}{KC}functions.f:0{KA}text{KE}", []),
    ("mistral", f'[TOOL_CALLS] [{{"name": "f", "arguments": {{"a": 1}}}}, {{"name": "g", "arguments": {g_json}, "id": "abc123def"}}]', None, None, [F, G]),
    ("mistral", f'Sure.[TOOL_CALLS]f[ARGS]{{"a": 1}}[TOOL_CALLS]g[CALL_ID]abc123def[ARGS]{g_json}', None, "Sure.", [F, G]),
    ("mistral", '[TOOL_CALLS]f{"a": 1} done', None, " done", [F]),
    ("mistral", '[TOOL_CALLS]a.b-日[ARGS]{"q": "[TOOL_CALLS]"}', None, None, [("a.b-日", {"q": "[TOOL_CALLS]"})]),
    ("mistral", "[TOOL_CALLS] nothing to call", None, "[TOOL_CALLS] nothing to call", []),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, oh', None, ", oh", [F]),
    ("mistral", '[TOOL_CALLS][{"name": 1}] x', None, '[TOOL_CALLS][{"name": 1}] x', []),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": ', None, None, [("f", '{"a": ')]),
    ("llama4_json", '{"name": "f", "parameters": {"a": 1}}', None, None, [F]),
    ("pythonic", '[f(a=1), g(s=\'x}"{\\\\ é日\', l=[1, {"b": None}])]', None, None, [F, G]),
    ("llama4_pythonic", "<|python_start|>[f(a=-1.5, t='(', o={'x': true}), f()]<|python_end|>\nok", None, "\nok", [("f", {"a": -1.5, "t": "(", "o": {"x": True}}), ("f", {})]),
    ("pythonic", "[f(a=1), f(2)] x", None, ", f(2)] x", [F]),
    ("pythonic", "[h(a=1)]", None, "[h(a=1)]", []),
    ("pythonic", "[1] f(a=1)", None, "[1] f(a=1)", []),
    ("pythonic", "[f(a=__import__('os'))]", None, "[f(a=__import__('os'))]", []),
    ("pythonic", "[f(a=1", None, "[f(a=1", []),
    ("pythonic", "[f(**{'a': 1})]", None, "[f(**{'a': 1})]", []),
    ("pythonic", "[f(a={1: 2})]", None, "[f(a={1: 2})]", []),
    ("pythonic", "[f(a=1e999, b=b'x')]", None, "[f(a=1e999, b=b'x')]", []),
    ("pythonic", "[f(a='\\ud800')]", None, "[f(a='\\ud800')]", []),
    ("pythonic", f"[f(a={10**30})]", None, None, [("f", {"a": 10**30})]),
    ("qwen3_coder", "Let me.\n\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=t>\nx\n\n\"1\"\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=f>\n</function>\n</tool_call>", None, "Let me.", [("f", {"a": 1, "t": 'x\n\n"1"'}), ("f", {})]),
    ("qwen3_xml", "<tool_call><function=g><parameter=n>1.50</parameter><parameter=b>True</parameter><parameter=l>['x', None]</parameter><parameter=o>{\"p\": [1]}</parameter></function></tool_call>", None, None, [("g", {"n": 1.5, "b": True, "l": ["x", None], "o": {"p": [1]}})]),
    ("qwen3_xml", "<tool_call><function=g><parameter=m>null</parameter><parameter=u>7</parameter><parameter=e>2</parameter><parameter=k>1</parameter><parameter=any>{\"x\": 1}</parameter><parameter=x>5</parameter></function></tool_call>", None, None, [("g", {"m": None, "u": 7, "e": 2, "k": "1", "any": {"x": 1}, "x": 5})]),
    ("qwen3_xml", "<tool_call><function=g><parameter=n>many</parameter><parameter=any>5</parameter><parameter=m>x</parameter><parameter=o>[1]</parameter></function></tool_call>", None, None, [("g", {"n": "many", "any": "5", "m": "x", "o": [1]})]),
    ("qwen3_coder", "<function=f>\n<parameter=t>\n</function> <b>&\n</parameter>\n</function>\n</tool_call> ok", None, " ok", [("f", {"t": "</function> <b>&"})]),
    ("qwen3_coder", "use <function=h> or <function= f>", None, "use <function=h> or <function= f>", []),
    ("qwen3_coder", "<tool_call><function=a.b-日><parameter=日 x>ü</parameter></tool_call> So", None, " So", [("a.b-日", {"日 x": "ü"})]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=t>\nhal", None, None, [("f", '{"t": "hal')]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1", None, None, [("f", '{"a": 1')]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter", None, "<tool_call>\n<function=f>\n<parameter", []),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter><parameter=<b>2</parameter></function></tool_call>", None, "<parameter=<b>2</parameter></function></tool_call>", [F]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=t>\nx <parameter=\n\n<parameter=a>\n1\n</function>\n</tool_call>", None, None, [("f", {"t": "x <parameter=\n", "a": 1})]),
    ("deepseek_v4", f'<{D}tool_calls><{D}invoke name="f"><{D}parameter name="t" string="true">x\n<{D}parameter name="a" string="false">1</{D}invoke></{D}tool_calls>', None, None, [("f", {"t": "x\n", "a": 1})]),
    ("qwen3_coder", "<tool_call>f please</tool_call>", None, "<tool_call>f please</tool_call>", []),
    ("deepseek_v32", f'Hm.\n\n<{D}function_calls>\n<{D}invoke name="f">\n<{D}parameter name="a" string="false">1</{D}parameter>\n<{D}parameter name="t" string="true">\n2 </{D}parameter>\n</{D}invoke>\n<{D}invoke name="f">\n</{D}invoke>\n</{D}function_calls>', None, "Hm.", [("f", {"a": 1, "t": "\n2 "}), ("f", {})]),
    ("deepseek_v4", f'<{D}tool_calls><{D}invoke name="g"><{D}parameter name="n" string="true">1</{D}parameter><{D}parameter name="m" string="false">[null, {{"é": 1}}]</{D}parameter></{D}invoke></{D}tool_calls>', None, None, [("g", {"n": "1", "m": [None, {"é": 1}]})]),
    ("deepseek_v4", f'<{D}tool_calls><{D}invoke name="f"><{D}parameter name="a" string="false">oops</{D}parameter></{D}invoke>', None, None, [("f", {"a": "oops"})]),
    ("deepseek_v31", f'{B}{b}f{S}{{"a": {e}{b}f{S}{{"a": 1}}{E}', None, None, [("f", '{"a": '), F]),
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
        if not options:
            for cut in range(1, len(text)):
                assert said(kind, [text[:cut], text[cut:]]) == whole, cut
        for _ in range(20):
            cuts = sorted(random_.randint(0, len(text)) for _ in range(4))
            pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            assert said(kind, pieces, **options) == whole


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def tagged(calls: list[tuple[str, dict[str, Any]]]) -> str:
    """As Qwen3-Coder's chat template writes calls: texts as they are, all else as JSON."""
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else dumped(value)}\n</parameter>\n"
            for key, value in arguments.items()
        )
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def dsml(calls: list[tuple[str, dict[str, Any]]], section: str) -> str:
    """As DeepSeek's encoding writes them."""
    found = ""
    for name, arguments in calls:
        found += f'<{D}invoke name="{name}">\n'
        for key, value in arguments.items():
            text = value if isinstance(value, str) else dumped(value)
            found += f'<{D}parameter name="{key}" string="{dumped(isinstance(value, str))}">{text}</{D}parameter>\n'
        found += f"</{D}invoke>\n"
    return f"\n\n<{D}{section}>\n{found}</{D}{section}>"


def pythonic(calls: list[tuple[str, dict[str, Any]]]) -> str:
    """As Llama 4 writes them."""
    written = [(name, ", ".join(f"{key}={value!r}" for key, value in one.items())) for name, one in calls]
    return f"[{', '.join(f'{name}({arguments})' for name, arguments in written)}]"


def sectioned(calls: list[tuple[str, dict[str, Any]]], form: str) -> str:
    return "".join(form.format(name=name, number=number, json=dumped(one)) for number, (name, one) in enumerate(calls))


WRITE: dict[str, Callable[[list[tuple[str, dict[str, Any]]]], str]] = {
    "hermes": lambda calls: "\n".join(
        f"<tool_call>\n{dumped({'name': name, 'arguments': one})}\n</tool_call>" for name, one in calls
    ),
    "qwen3_coder": tagged,
    "pythonic": pythonic,
    "mistral": lambda calls: sectioned(calls, "[TOOL_CALLS]{name}[ARGS]{json}"),
    "deepseek_v3": lambda calls: B + sectioned(calls, b + "function" + S + "{name}\n```json\n{json}\n```" + e) + E,
    "deepseek_v31": lambda calls: B + sectioned(calls, b + "{name}" + S + "{json}" + e) + E,
    "deepseek_v32": lambda calls: dsml(calls, "function_calls"),
    "deepseek_v4": lambda calls: dsml(calls, "tool_calls"),
    "kimi_k2": lambda calls: KS + sectioned(calls, KC + "functions.{name}:{number}" + KA + "{json}" + KE) + KX,
}
WORDS = [
    "a",
    "日é",
    "\n",
    " ",
    '"',
    "'",
    "\\",
    "{",
    "}",
    "[",
    "]",
    "<b>",
    "</tool_call>",
    "(",
    ",",
    "=",
    "null",
    "1",
    "[ARGS",
    "`",
    "\t",
]


@pytest.mark.parametrize("kind", WRITE)
def test_what_templates_write_is_read_again(kind: str) -> None:
    """Text, some calls with texts and nested JSON in their arguments, in pieces."""
    random_ = random.Random(3)

    def value(depth: int = 2) -> Any:
        texts = ["".join(random_.choices(WORDS, k=random_.randint(0, 5))) for _ in range(3)]
        plain: list[Any] = [None, True, False, 0, -1.5, 10**20, texts[0]]
        if depth == 0:
            return random_.choice(plain)
        return random_.choice([*plain, [value(depth - 1), texts[1]], {texts[2]: value(depth - 1), "k": []}])

    keys = {"n": lambda: random_.choice([1, -2.5]), "l": lambda: [value()], "o": lambda: {"日": value()}, "m": lambda: f"x{value(0)}", "b": lambda: False}  # fmt: skip
    for _ in range(effort(25, 200)):
        calls = [
            ("g", {key: keys[key]() for key in random_.sample(sorted(keys), random_.randint(0, 4))})
            for _ in range(random_.randint(1, 3))
        ]
        before = "" if kind == "pythonic" else random_.choice(["", "I look.", "1 < 2 [x] {"])
        text = before + WRITE[kind](calls)
        cuts = sorted(random_.choices(range(len(text)), k=6))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        found = [(name if block == "call" else block, decoded(said)) for block, name, said in said(kind, pieces)]
        assert found == [*([("text", before)] if before else []), *calls], text


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
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", KS, KC, KA, KE, KX, "functions.f:0", "f(", "a=", ")", "'", "<function=", "<function=f>", "</function>", "<parameter=a>", "<parameter=",
    "</parameter>", f"<{D}tool_calls>", f"<{D}function_calls>", f'<{D}invoke name="f">', f'<{D}parameter name="a', '" string="false">',
    f"</{D}parameter>", f"</{D}invoke>", f"</{D}tool_calls>", "[THINK]", "[/THINK]", ">",
    '"name"', '"arguments"', '"parameters"', ":", ",", '"f"', "f", " ", "\n", "null", "1", "text", "<", "日", "\x00", "\ud800",
]  # fmt: skip


def _pieces_of(kind: str) -> list[str]:
    """The pieces that have a meaning in a format, more often than the others."""
    known = "".join(text for name, text, *_ in CASES if name == kind)
    return PIECES + [piece for piece in PIECES if piece in known] * 6


@pytest.mark.parametrize("kind", MAKE)
def test_no_text_raises_and_cuts_never_matter(kind: str) -> None:
    random_ = random.Random(7)
    for _ in range(400):
        pieces = random_.choices(_pieces_of(kind), k=random_.randint(1, 14))
        found = said(kind, ["".join(pieces)])
        assert said(kind, pieces) == found
        if kind in FORMATS and all(block == "text" for block, *_ in found):
            assert "".join(text for *_, text in found) == "".join(pieces), "what is no call is told as it is"


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (None, "5"),
        ({"type": 3}, "5"),
        ({"anyOf": {"type": "integer"}}, 5),
        ({"$ref": "#/properties/a"}, "5"),
        ({"$ref": "#/nowhere/3"}, "5"),
        ({"anyOf": [{"$ref": "#/$defs/x"}, 7, {"type": "integer"}]}, 5),
        ({"type": ["integer"] * 10**6}, 5),
        ({"const": 3}, 5),
        ({"enum": "x"}, "5"),
        ({"type": []}, "5"),
        ({"allOf": [{"type": [{}, None]}]}, "5"),
    ],
)
def test_no_schema_takes_long_or_raises(schema: Any, value: Any) -> None:
    """One of them contains itself 500 times, at every depth."""
    schemas = {"f": {"properties": {"a": schema}, "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}] * 500}}}}
    text = "<tool_call><function=f>" + "<parameter=a>5</parameter>" * 100 + "</function></tool_call>"
    started = time.process_time()
    [call] = read_whole(AnswerReader([FORMATS["qwen3_xml"].make(schemas)]), text).calls
    assert decoded(call.text) == {"a": value}
    assert time.process_time() - started < 2


LONG = [
    "<tool_call>", '<tool_call>{"name": "f", "arguments": {', "<", " ", "{", "[", '"', "\\", '{"name": "f", "parameters": {"a": [',
    "[TOOL_CALLS]", "[TOOL_CALLS]f[ARGS]{", "[TOOL_CALLS][", f"{KC}f:0{KA}" + "{", KC, "[f(", "[f(a=", "[f(a=(", "-", "[f(a='", "<function=f>", "<function=f><parameter=a>", "<function=f><parameter=t>",
    f"<{D}tool_calls>", "[THINK]", "<tool_call><function=f><parameter=t>x</parameter>", "1", B, b, f"{b}f{S}" + "{", "<|channel|>", "<|start|><|message|>", "<think>", "x", '<tool_call>{"name": "f", "arguments": {"a": 1}}',
]  # fmt: skip


ALIASES = {"qwen3_xml", "llama4_json", "llama4_pythonic", "deepseek_v31", "deepseek_v4", "inside kimi", "think mistral"}  # fmt: skip


@pytest.mark.days(2)
@pytest.mark.parametrize("kind", [kind for kind in MAKE if kind not in ALIASES])
def test_time_grows_with_the_text(kind: str) -> None:
    """Very much of anything, at once or in small pieces; a quadratic parser needs minutes for 100 kB, and seconds for 25."""
    size = effort(25_000, 100_000)
    for unit in (LONG[number] for number in share_of_the_day(len(LONG), 2)):
        text = ('{"a": ' if unit in ("1", "\\", '"') else "") + unit * (size // len(unit))
        started = time.process_time()
        read_whole(parser(kind), text)
        said(kind, [text[at : at + 32] for at in range(0, len(text), 32)])
        assert time.process_time() - started < size / 25_000, unit
