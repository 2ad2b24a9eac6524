"""/v1/messages with the unmodified anthropic package. The fake core repeats the prompt's tokens, or says a script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic
import pytest

from helpers.serving import MODEL, RunningServer, running_server
from pagerunner.config import EngineArgs
from pagerunner.server.chat.options import ChatOptions
from pagerunner.server.gate import Keys
from pagerunner.server.protocol.messages import MessagesRequest
from pagerunner.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import anthropic

TOOL: Any = {"name": "weather", "description": "d", "input_schema": {"type": "object", "properties": {}}}


def client_of(server: RunningServer, **options: Any) -> anthropic.Anthropic:
    options = {"api_key": "none", "max_retries": 0, "timeout": 20, **options}
    import anthropic  # takes 1.5 s: not for the processes that only collect this file

    return anthropic.Anthropic(base_url=server.url, **options)


@pytest.fixture(scope="module")
def scripted(text_side: Path) -> Iterator[RunningServer]:
    options = ChatOptions("hermes", True, "qwen3")
    with running_server(EngineArgs(model=str(text_side)), chat=options) as server:
        yield server


def says(text: str) -> Any:
    return [{"role": "user", "content": f"<|begin|>{text}"}]


def test_thoughts_text_and_calls(scripted: RunningServer) -> None:
    text = '<think>Where?</think>I look. <tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    answer = client_of(scripted).messages.create(model=MODEL, max_tokens=900, messages=says(text), tools=[TOOL])
    thinking, said, call = answer.content
    assert thinking.type == "thinking" and thinking.thinking == "Where?"
    assert said.type == "text" and said.text == "I look."
    assert call.type == "tool_use" and (call.name, call.input) == ("weather", {"city": "Oslo"})
    assert (answer.stop_reason, answer.role, answer.model) == ("tool_use", "assistant", MODEL)
    assert answer.id.startswith("msg-") and answer.usage.output_tokens > 10


def test_the_events_of_a_stream(scripted: RunningServer) -> None:
    body = {"model": MODEL, "max_tokens": 900, "messages": says("<think>Hm</think>Yes."), "stream": True}
    response = scripted.post("/v1/messages", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    names = [line.removeprefix("event: ") for line in response.text.splitlines() if line.startswith("event: ")]
    first, rest = names[:2], [name for name in names[2:] if name != "content_block_delta"]
    assert first == ["message_start", "ping"]
    blocks = ["content_block_start", "content_block_stop"]
    assert rest == [*blocks, *blocks, "message_delta", "message_stop"]
    with client_of(scripted).messages.stream(
        model=MODEL, max_tokens=900, messages=says("<think>Hm</think>Yes.")
    ) as stream:
        assert "".join(stream.text_stream) == "Yes."
        assert stream.get_final_message().usage.output_tokens > 3


def test_stop_sequences_usage_and_system(scripted: RunningServer) -> None:
    client = client_of(scripted)
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 900,
        "system": "Be brief.",
        "messages": says("one two three"),
    }
    answer = client.messages.create(**asked, stop_sequences=["two"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "two")
    assert answer.content[0].text == "one "  # type: ignore[union-attr]
    again = client.messages.create(**asked, stop_sequences=["two"]).usage
    assert again.input_tokens == 0 and (again.cache_read_input_tokens or 0) > 5  # the fake core has seen the prompt
    whole = client.messages.create(**{**asked, "max_tokens": 2})
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 2
    count = client.messages.count_tokens(model=MODEL, system="Be brief.", messages=asked["messages"], tools=[TOOL])
    assert count.input_tokens == (again.cache_read_input_tokens or 0) + again.input_tokens


def test_a_conversation_as_templates_take_it() -> None:
    import msgspec

    body = {
        "max_tokens": 1,
        "system": [
            {"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "B"},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Rain."}]},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
    }
    system, user, assistant, tool, last = msgspec.convert(body, MessagesRequest).conversation()
    assert system == {"role": "system", "content": "A\nB"} and user == {"role": "user", "content": "Weather?"}
    assert assistant["content"] == "I look." and assistant["reasoning"] == "Hm."
    function = {"name": "weather", "arguments": {"city": "Oslo"}}
    assert assistant["tool_calls"] == [{"id": "t1", "type": "function", "function": function}]
    assert tool == {"role": "tool", "tool_call_id": "t1", "content": "Rain."} and last["content"] == "And?"


def test_an_answer_that_has_begun_goes_on(server: RunningServer, text_side: Path) -> None:
    """The fake core repeats the prompt, which so shows where it ends."""
    tokenizer = Tokenizer.from_path(str(text_side))
    conversation: Any = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The answer is "}]
    prompt = tokenizer.apply_chat_template(conversation, add_generation_prompt=False)
    prompt = prompt[: prompt.rindex("The answer is") + len("The answer is ")].removesuffix(" ") + " "
    answer = client_of(server).messages.create(model=MODEL, max_tokens=500, messages=conversation)
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == len(
        tokenizer.encode(prompt, add_special_tokens=False)
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"no_such": 1}, "no_such"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "runs no tools"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "needs a name"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "takes text only"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "tool_use"),
    ],
)
def test_what_is_refused(server: RunningServer, fields: dict[str, Any], words: str) -> None:
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}], **fields}
    response = server.post("/v1/messages", body)
    assert response.status_code == 400, response.text
    error = response.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert words in error["error"]["message"]


def test_errors_are_anthropics(server: RunningServer, text_side: Path) -> None:
    import anthropic

    asked: dict[str, Any] = {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client_of(server).messages.create(model="nobody", **asked)
    assert server.post("/v1/messages", content=b"{").json()["error"]["type"] == "invalid_request_error"
    assert server.get("/v1/messages").json()["error"]["type"] == "invalid_request_error"
    with running_server(EngineArgs(model=str(text_side)), api_keys=["secret"]) as guarded:
        with pytest.raises(anthropic.AuthenticationError, match="API key"):
            client_of(guarded, api_key="wrong").messages.create(model=MODEL, **asked)
        for options in ({"api_key": "secret"}, {"api_key": None, "auth_token": "secret"}):
            assert client_of(guarded, **options).messages.create(model=MODEL, **asked).stop_reason == "max_tokens"
    assert Keys(api=("a",)).api == ("a",)


class Pet(pydantic.BaseModel, extra="forbid"):
    kind: str = pydantic.Field(max_length=4)
    tame: bool
