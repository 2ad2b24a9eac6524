"""What a chat request's tools, format and reasoning mean for its prompt and its sampling."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pagerunner.engine.structured_output.grammar_door import GrammarDoor
from pagerunner.errors import InvalidRequestError
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
        ("openai_gptoss", "<|start|>assistant", "<|channel|>final<|message|>"),
    ],
)
def test_the_grammar_begins_behind_the_reasoning(parser: str | None, tail: str, after: str | None) -> None:
    fields: dict[str, Any] = {"structured_outputs": {"regex": "a"}}
    _, params = planned(ChatOptions(reasoning_parser=parser), tail, **fields)
    assert params.structured_outputs is not None and params.structured_outputs.after == after
    assert params.structured_outputs.begins == ("<think>" if parser == "qwen3" and tail == "assistant\n" else None)
    assert params.skip_special_tokens is (parser != "openai_gptoss")
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


def test_required_calls_share_their_definitions(text_side: Path) -> None:
    fields: dict[str, Any] = {"tools": [tool("f"), tool("g")], "tool_choice": "required"}
    _, params = planned(ChatOptions(), **fields)
    assert params.structured_outputs is not None
    GrammarDoor(Tokenizer.from_path(text_side).to_json(), 512, [0]).check(params.structured_outputs)
    fields["tools"].append(tool("h", {"type": "string"}))
    with pytest.raises(InvalidRequestError, match="'h' define 'Node'"):
        planned(ChatOptions(), **fields)


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
