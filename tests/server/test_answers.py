"""What a chat request's tools, format and reasoning mean for its prompt and its sampling."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pagerunner.engine.structured_output.grammar_door import GrammarDoor
from pagerunner.server.chat.options import ChatOptions
from pagerunner.server.chat.plan import ChatPlan
from pagerunner.server.chat.turn import read_whole
from pagerunner.server.endpoints.chat import chat_turn
from pagerunner.server.params import chat_params
from pagerunner.server.protocol.requests import ChatRequest
from pagerunner.text.chat_template import ChatTemplate
from pagerunner.text.tokenizer import Tokenizer
from pagerunner.types import SamplingParams

AUTO = ChatOptions(tool_parser="hermes", auto_tools=True)
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}, "additionalProperties": False}


def tool(name: str, node: Any = NODE) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"n": {"$ref": "#/$defs/Node"}}, "$defs": {"Node": node}}
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}


def planned(options: ChatOptions, tail: str = "", **fields: Any) -> tuple[ChatPlan, SamplingParams]:
    request = msgspec.convert({"messages": [{"role": "user", "content": "x"}], **fields}, ChatRequest)
    plan = ChatPlan(chat_turn(request, chat_params(request, SamplingParams())), options)

    async def decode(token_ids: Any) -> str:
        return tail

    asyncio.run(plan.see_prompt(decode, [1, 2, 3]))
    return plan, plan.adjust(plan._turn.params)


@pytest.mark.parametrize(
    ("parser", "tail", "after"),
    [
        (None, "", None),
        ("qwen3", "assistant\n", "</think>"),
        ("qwen3", "<think>\n", "</think>"),
        ("qwen3", "<think>\n\n</think>\n\n", None),
        ("deepseek_r1", "assistant", "</think>"),
        ("deepseek_v3", "</think>", None),
        ("mistral", "[/INST]", "[/THINK]"),
        ("openai_gptoss", "<|start|>assistant", "<|channel|>final<|message|>"),
    ],
)
def test_the_grammar_begins_behind_the_reasoning(parser: str | None, tail: str, after: str | None) -> None:
    fields: dict[str, Any] = {"structured_outputs": {"regex": "a"}}
    _, params = planned(ChatOptions(reasoning_parser=parser), tail, **fields)
    assert params.structured_outputs is not None and params.structured_outputs.after == after
    begins = {"qwen3": {"assistant\n": "<think>"}, "mistral": {"[/INST]": "[THINK]"}}
    assert params.structured_outputs.begins == begins.get(parser or "", {}).get(tail)
    assert params.skip_special_tokens is (parser not in ("openai_gptoss", "mistral"))
    fields["structured_outputs"]["after"] = "own"
    assert planned(ChatOptions(reasoning_parser=parser), tail, **fields)[1].structured_outputs.after == "own"
    assert planned(ChatOptions(reasoning_parser=parser), tail)[1].structured_outputs is None


@pytest.mark.parametrize(
    ("parser", "tail", "text", "reasoning"),
    [
        ("qwen3", "assistant\n", "a</think>b", None),
        ("qwen3", "<think>\n", "a</think>b", "a"),
        ("qwen3", "</think>\n\n", "<think>a</think>b", None),
        ("deepseek_r1", "assistant", "a</think>b", "a"),
        ("deepseek_v3", "<｜Assistant｜><think>", "a</think>b", "a"),
        ("deepseek_v3", "<｜Assistant｜></think>", "<think>a</think>b", None),
        ("minimax_m2", "ai", "a</think>b", "a"),
        ("glm45", "", "<think>a</think>b", "a"),
        ("mistral", "[/INST]", "[THINK]a[/THINK]b", "a"),
        (
            "openai_gptoss",
            "",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
            "a",
        ),
    ],
)
def test_where_reasoning_begins(parser: str, tail: str, text: str, reasoning: str | None) -> None:
    plan, _ = planned(ChatOptions(reasoning_parser=parser), tail)
    found = read_whole(plan.new_reader(), text)
    assert (found.reasoning or None) == reasoning
    assert found.content == ("b" if reasoning else text)


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_call_ends_reasoning_that_the_model_forgot_to_end(choice: str) -> None:
    options = ChatOptions(tool_parser="qwen3_xml", auto_tools=True, reasoning_parser="qwen3")
    plan, _ = planned(options, "<think>\n", tools=[tool("f")], tool_choice=choice)
    found = read_whole(plan.new_reader(), "I call f.\n<tool_call><function=f></function></tool_call>")
    called = choice == "auto"
    assert (found.reasoning == "I call f.") is called and [call.name for call in found.calls] == ["f"] * called


CALLED = [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}] * 2
SAID = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": CALLED}, {"role": "user", "content": "y"}]


def test_ids_of_calls_are_those_that_templates_read() -> None:
    """Kimi-K2's count all calls of the conversation. Mistral's are nine letters and digits, or its template refuses the call."""

    def ids(parser: str, text: str, **fields: Any) -> list[str]:
        options = ChatOptions(tool_parser=parser, auto_tools=True)
        plan, params = planned(options, tools=[tool("f")], messages=SAID, **fields)
        assert params.skip_special_tokens is (fields != {} or parser == "hermes")
        return [call.id for call in read_whole(plan.new_reader(), text).calls]

    two = '[{"name": "f", "parameters": {}}, {"name": "f", "parameters": {}}]'
    assert ids("kimi_k2", two, tool_choice="required") == ["functions.f:2", "functions.f:3"]
    kimi = "<|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert ids("kimi_k2", kimi) == ["functions.f:7"]
    mistral = ids("mistral", "[TOOL_CALLS]f{}[TOOL_CALLS]f[CALL_ID]abcdef123[ARGS]{}")
    assert re.fullmatch("[0-9a-z]{9}", mistral[0]) and mistral[1] == "abcdef123"
    assert ids("hermes", '<tool_call>{"name": "f"}</tool_call>') == [""]


def test_required_calls_define_a_name_each_in_their_own_way(text_side: Path) -> None:
    door = GrammarDoor(Tokenizer.from_path(text_side).to_json(), 512, [0])
    fields: dict[str, Any] = {"tools": [tool("f"), tool("g")], "tool_choice": "required"}
    for tools in (fields["tools"], [*fields["tools"], tool("h", {"type": "string"})]):
        _, params = planned(ChatOptions(), **{**fields, "tools": tools})
        assert params.structured_outputs is not None
        door.check(params.structured_outputs)


def test_templates_get_tools_and_effort() -> None:
    plan, _ = planned(AUTO, tools=[{"type": "function", "function": {"name": "f", "description": "d"}}])
    assert plan.template_tools == [{"type": "function", "function": {"name": "f", "description": "d"}}]
    assert planned(AUTO)[0].template_tools is None
    plan, _ = planned(ChatOptions(reasoning_parser="openai_gptoss"), reasoning_effort="low")
    assert plan.template_options({"reasoning_effort", "enable_thinking"}) == {
        "reasoning_effort": "low",
        "enable_thinking": True,
    }
    assert planned(AUTO, reasoning_effort="low")[0].template_options({"enable_thinking"}) == {"enable_thinking": True}
    assert planned(AUTO, reasoning_effort="none")[0].template_options({"enable_thinking"}) == {"enable_thinking": False}
    assert planned(AUTO, reasoning_effort="none")[0].template_options({"thinking"}) == {"thinking": False}
    both = planned(AUTO, chat_template_kwargs={"enable_thinking": True, "thinking": False})[0]
    assert both.template_options({"enable_thinking", "thinking"}) == {"enable_thinking": True, "thinking": False}
    own = planned(AUTO, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True, "mood": 1})[0]
    assert own.template_options({"enable_thinking", "reasoning_effort"}) == {"enable_thinking": True}
    assert own.template_options({"messages"}) == {}  # a template that reads none of it: vLLM's clients send it anyway


def test_special_tokens_stay_where_calls_are_made_of_them() -> None:
    tools = [tool("f")]
    for name, kept in (("hermes", False), ("llama3_json", False), ("deepseek_v3", True), ("openai", True)):
        options = ChatOptions(tool_parser=name, auto_tools=True)
        assert planned(options, tools=tools)[1].skip_special_tokens is not kept
        assert planned(options)[1].skip_special_tokens


@pytest.mark.parametrize(
    "template",
    ["{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}", "{{ c.function.arguments }}"],
)
def test_templates_may_treat_arguments_as_values_or_as_text(template: str) -> None:
    found = ChatTemplate({"default": "{% for c in messages[0].tool_calls %}" + template + "{% endfor %}"}, "here")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"city": "Köln"}}}
    assert found.render([{"role": "assistant", "content": "", "tool_calls": [call]}], None, {}) == '{"city": "Köln"}'
