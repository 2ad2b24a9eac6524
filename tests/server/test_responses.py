"""/v1/responses with the unmodified openai package. The fake core repeats the prompt's tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from helpers.fake_core import OPTIONS_VARIABLE
from helpers.serving import MODEL, RunningServer, running_server
from pagerunner.config import EngineArgs
from pagerunner.text.tokenizer import Tokenizer

LOGPROBS = "message.output_text.logprobs"
FUNCTION: Any = {"type": "function", "name": "weather", "description": "d", "strict": True}
FUNCTION["parameters"] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
RAW = {"skip_special_tokens": False, "ignore_eos": True}
EVENTS_BEFORE = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
]
EVENTS_AFTER = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


@pytest.fixture(scope="module")
def tokenizer(text_side: Path) -> Tokenizer:
    return Tokenizer.from_path(str(text_side))


def rendered(tokenizer: Tokenizer, *messages: tuple[str, str]) -> str:
    return tokenizer.apply_chat_template([{"role": role, "content": text} for role, text in messages])


def length(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


def test_a_text_with_instructions(server: RunningServer, tokenizer: Tokenizer) -> None:
    text = rendered(tokenizer, ("system", "Be brief."), ("user", "hello, world"))
    count = length(tokenizer, text)
    answer = server.openai().responses.create(
        model=MODEL, instructions="Be brief.", input="hello, world", max_output_tokens=count, extra_body=RAW
    )
    assert answer.id.startswith("resp-")
    assert answer.output_text == text
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    usage = answer.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (count, count, 2 * count)
    assert usage.input_tokens_details.cached_tokens in (0, count)
    assert answer.model == MODEL and answer.instructions == "Be brief." and answer.store is False


def test_messages_and_answers_sent_back(server: RunningServer, tokenizer: Tokenizer) -> None:
    client = server.openai()
    first = client.responses.create(model=MODEL, input="one", max_output_tokens=3, extra_body=RAW)
    conversation: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
        *[item.model_dump() for item in first.output],
        {"type": "message", "role": "user", "content": "two"},
    ]
    text = rendered(tokenizer, ("user", "one"), ("assistant", first.output_text), ("user", "two"))
    answer = client.responses.create(
        model=MODEL, input=conversation, max_output_tokens=length(tokenizer, text), extra_body=RAW
    )
    assert answer.output_text == text


def test_a_complete_answer_may_fill_the_context(server: RunningServer, tokenizer: Tokenizer) -> None:
    stop = tokenizer.encode("hello", add_special_tokens=False)[-1]
    answer = server.openai().responses.create(
        model=MODEL,
        input="hello",
        temperature=0.5,
        top_p=0.9,
        metadata={"a": "b"},
        extra_body={"stop_token_ids": [stop]},
    )
    assert answer.status == "completed" and answer.incomplete_details is None and answer.error is None
    assert (answer.temperature, answer.top_p, answer.metadata) == (0.5, 0.9, {"a": "b"})
    assert answer.output[0].status == "completed"  # type: ignore[union-attr]
    full = server.openai().responses.create(model=MODEL, input="hello", extra_body={"ignore_eos": True})
    assert full.usage is not None and full.usage.total_tokens == 2048


def test_events(server: RunningServer, tokenizer: Tokenizer) -> None:
    text = rendered(tokenizer, ("user", "Grüße 日本語 🙂"))
    options: dict[str, Any] = {"model": MODEL, "input": "Grüße 日本語 🙂", "extra_body": RAW}
    options["max_output_tokens"] = length(tokenizer, text)
    events = list(server.openai().responses.create(**options, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == EVENTS_BEFORE
    assert kinds[-4:] == [*EVENTS_AFTER, "response.incomplete"]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == text  # type: ignore[union-attr]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response  # type: ignore[union-attr]
    assert last.output_text == text and last.usage is not None and last.usage.output_tokens > 0
    with server.openai().responses.stream(**options) as stream:  # the client's own accumulation
        for event in stream:
            if event.type == "response.output_text.delta":
                snapshot = event.snapshot
    assert snapshot == text


def test_the_wire(server: RunningServer) -> None:
    response = server.post("/v1/responses", {"input": "a", "stream": True, "max_output_tokens": 2})
    assert response.headers["content-type"].startswith("text/event-stream")
    first, *_, last, end = response.text.split("\n\n")
    assert first.startswith('event: response.created\ndata: {"type":"response.created","sequence_number":0,')
    assert last.startswith("event: response.incomplete\n") and end == ""


def test_logprobs(server: RunningServer) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "input": "hello",
        "max_output_tokens": 3,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    answer = server.openai().responses.create(**options)
    logprobs = answer.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert [entry.logprob for entry in logprobs] == [-0.5] * 3
    assert all([top.logprob for top in entry.top_logprobs] == [-0.5, -1.5] for entry in logprobs)
    events = server.openai().responses.create(**options, stream=True)
    streamed = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.token for entry in streamed] == [entry.token for entry in logprobs]


def test_async_streams_at_once(server: RunningServer, tokenizer: Tokenizer) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.responses.create(
            model=MODEL, input=f"number {number}", max_output_tokens=20, stream=True, extra_body=RAW
        )
        return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    async def main() -> list[str]:
        async with server.async_openai() as client:
            return await asyncio.gather(*(one(client, number) for number in range(8)))

    for number, text in enumerate(asyncio.run(main())):
        ids = tokenizer.encode(rendered(tokenizer, ("user", f"number {number}")), add_special_tokens=False)
        assert text == tokenizer.decode([ids[i % len(ids)] for i in range(20)], skip_special_tokens=False)


def test_an_answer_that_is_ended_midway_says_so_in_its_last_event(
    text_side: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OPTIONS_VARIABLE, '{"step_seconds": 0.02}')  # 2,000 tokens would take 40 seconds
    with running_server(EngineArgs(model=str(text_side))) as slow:
        stream = slow.openai().responses.create(
            model=MODEL, input="hello", max_output_tokens=2000, stream=True, extra_body=RAW
        )
        events = iter(stream)
        assert [next(events).type for _ in range(5)] == [*EVENTS_BEFORE, "response.output_text.delta"]
        slow.post("/sleep?mode=abort")
        slow.post("/wake_up")
        *_, last = events
    assert last.type == "response.failed" and last.response.error is not None
    assert last.response.error.code == "server_error" and last.response.output_text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"reasoning": {"effort": "furious"}}, "reasoning.effort"),
        ({"truncation": "middle"}, "truncation"),
        ({"tools": [FUNCTION]}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [FUNCTION], "tool_choice": "required", "include": [LOGPROBS]}, "include"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 99}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "["}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": "reasoning", "content": [{"type": "image"}]}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0]"),
        ({"input": 5}, "input"),
        ({"input": "word " * 5000}, "input"),
        ({"input": "word " * 5000, "truncation": "auto"}, "input"),
    ],
)
def test_what_is_refused(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    response = server.post("/v1/responses", {"input": "hello", "max_output_tokens": 1, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_neutral_fields_are_accepted(server: RunningServer) -> None:
    answer = server.openai().responses.create(
        model=MODEL,
        input="a",
        max_output_tokens=1,
        store=False,
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=True,
        text={"format": {"type": "text"}},
        truncation="disabled",
        user="me",
        extra_body={"priority": 1, "cache_salt": "s"},
    )
    assert answer.usage is not None and answer.usage.output_tokens == 1
