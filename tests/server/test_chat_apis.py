"""The three chat APIs are one way through: the same text gives the same answer in each of them, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.effort import share_of_the_day
from helpers.patience import LONG
from helpers.serving import MODEL, RunningServer, running_server
from pagerunner.config import EngineArgs
from pagerunner.server.chat.options import ChatOptions

pytestmark = pytest.mark.usefixtures("forked")

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "Oslo"}}'
DEEPSEEK = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
KIMI = (
    '<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Oslo"}'
    "<|tool_call_end|><|tool_calls_section_end|>"
)
CODER = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather<|message|>"
    '{"city": "Oslo"}<|call|>'
)
FORCED = '[{"name": "weather", "parameters": {"city": "Oslo"}}, {"name": "weather", "parameters": {"city": "Rome"}}]'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

# name: options, the answer's text, tool_choice
SETTINGS: dict[str, tuple[ChatOptions, str, str]] = {
    "qwen": (ChatOptions("hermes", True, "qwen3"), f"<think>\nWhere?\n</think>\n\nI look. {CALL}\n{CALL}", "auto"),
    "qwen-text": (ChatOptions("hermes", True, "qwen3"), "<think>Where?</think>It rains.\n\nA lot.", "auto"),
    "llama": (ChatOptions("llama3_json", True), f"{LLAMA}; {LLAMA}", "auto"),
    "deepseek": (ChatOptions("deepseek_v3", True, "deepseek_r1"), f"Where?</think>I look.{DEEPSEEK}", "auto"),
    "kimi": (ChatOptions("kimi_k2", True, "kimi_k2"), f"<think>Where?</think>I look.{KIMI}", "auto"),
    "coder": (ChatOptions("qwen3_coder", True, "qwen3"), f"I look.\n\n{CODER}\n{CODER}\nDone.", "auto"),
    "harmony": (ChatOptions("openai", True, "openai_gptoss"), HARMONY, "auto"),
    "required": (ChatOptions(reasoning_parser="qwen3"), f"<think>Hm.</think>{FORCED}", "required"),
    "named": (ChatOptions(), '{"city": "Oslo"}', "named"),
    "none": (ChatOptions("hermes", True), f"No call: {CALL}", "none"),
}


@pytest.fixture(scope="module", params=SETTINGS)
def setting(request: pytest.FixtureRequest, text_side: Path) -> Iterator[tuple[RunningServer, str, str]]:
    options, text, choice = SETTINGS[request.param]
    with running_server(EngineArgs(model=str(text_side)), chat=options) as server:
        yield server, text, choice


def events(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chat(server: RunningServer, text: str, choice: str, limit: int, stream: bool) -> Any:
    """(reasoning, text, calls, why it ended)"""
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    named = {"type": "function", "function": {"name": "weather"}}
    body = {"messages": [{"role": "user", "content": f"<|begin|>{text}"}], "tools": [tool], "max_tokens": limit}
    body |= {"tool_choice": named if choice == "named" else choice, "stream": stream}
    response = server.post("/v1/chat/completions", body)
    if not stream:
        [one] = response.json()["choices"]
        message = one["message"]
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
        return message.get("reasoning", ""), message["content"] or "", calls, one["finish_reason"]
    reasoning = content = ""
    made: list[list[str]] = []
    for chunk in events(response):
        for one in chunk["choices"]:
            delta = one["delta"]
            reasoning += delta.get("reasoning", "")
            content += delta.get("content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    made.append([call["function"]["name"], ""])
                made[call["index"]][1] += call["function"]["arguments"]
            reason = one["finish_reason"]
    return reasoning, content, [(name, arguments) for name, arguments in made], reason


def normal(item: Any) -> Any:
    """A value without ids, times and counts of cached tokens."""
    if isinstance(item, dict):
        out = {"id", "call_id", "created_at", "cached_tokens", "cache_read_input_tokens", "input_tokens", "item_id"}
        return {key: normal(value) for key, value in item.items() if key not in out}
    return [normal(one) for one in item] if isinstance(item, list) else item


def responses(server: RunningServer, text: str, choice: str, limit: int, stream: bool) -> Any:
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA}
    body = {"input": f"<|begin|>{text}", "tools": [tool], "max_output_tokens": limit, "stream": stream}
    body["tool_choice"] = {"type": "function", "name": "weather"} if choice == "named" else choice
    response = server.post("/v1/responses", body)
    if not stream:
        return normal(response.json())
    found = events(response)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    pieces: dict[int, str] = {}
    for event in found:
        if event["type"].endswith(".delta"):
            pieces[event["output_index"]] = pieces.get(event["output_index"], "") + event["delta"]
    body = found[-1]["response"]
    for index, item in enumerate(body["output"]):
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert pieces.get(index, "") == text  # what is said at the end is what was said on the way
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == body["output"]
    return normal(body)


def messages(server: RunningServer, text: str, choice: str, limit: int, stream: bool) -> Any:
    import anthropic  # takes 1.5 s: not for the processes that only collect this file

    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=LONG)
    kinds: dict[str, Any] = {"named": {"type": "tool", "name": "weather"}, "required": {"type": "any"}}
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"<|begin|>{text}"}],
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "tool_choice": kinds.get(choice, {"type": choice}),
        "max_tokens": limit,
    }
    if not stream:
        return normal(client.messages.create(**options).model_dump(mode="json", exclude_none=True))
    with client.messages.stream(**options) as made:
        return normal(made.get_final_message().model_dump(mode="json", exclude_none=True))


@pytest.mark.days(3)
def test_streams_and_whole_answers_are_the_same_wherever_they_are_cut(setting: tuple[RunningServer, str, str]) -> None:
    """A quarter of the cuts each day, and the whole."""
    server, text, choice = setting
    length = len(server.engine.tokenizer.encode(text, add_special_tokens=False))
    cuts = [*range(1, length, length // 6), length]
    for limit in (*(cuts[number] for number in share_of_the_day(len(cuts), 4)), length + 1):
        whole = chat(server, text, choice, limit, False)
        assert chat(server, text, choice, limit, True) == whole
        reasoning, content, calls, reason = whole
        response = responses(server, text, choice, limit, False)
        assert responses(server, text, choice, limit, True) == response
        assert response["status"] == ("incomplete" if reason == "length" else "completed")
        items = response["output"]
        assert "".join(item["content"][0]["text"] for item in items if item["type"] == "reasoning") == reasoning
        assert "".join(item["content"][0]["text"] for item in items if item["type"] == "message") == content
        assert [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"] == calls
        assert bool(response["usage"]["output_tokens_details"]["reasoning_tokens"]) == bool(reasoning)
        message = messages(server, text, choice, limit, False)
        assert messages(server, text, choice, limit, True) == message
        blocks = message["content"]
        assert "".join(block["thinking"] for block in blocks if block["type"] == "thinking") == reasoning
        assert "".join(block["text"] for block in blocks if block["type"] == "text") == content
        assert [block["name"] for block in blocks if block["type"] == "tool_use"] == [name for name, _ in calls]
        wanted = "max_tokens" if reason == "length" else "tool_use" if calls else "end_turn"
        assert message["stop_reason"] == wanted
        if choice in ("named", "required"):
            assert not content or "<think>".startswith(content)  # a cut call is never shown as text
    if choice != "none" and "It rains" not in text:
        assert calls and all(json.loads(arguments)["city"] for _, arguments in calls)
    server.wait_idle()
