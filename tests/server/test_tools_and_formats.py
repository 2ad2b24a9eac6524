"""The unmodified openai package: tools, reasoning and formats, over scripted answers and over a random model."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from helpers.checkpoints import make_checkpoint
from helpers.patience import LONG
from helpers.serving import MODEL, RunningServer, running_server
from pagerunner.config import EngineArgs
from pagerunner.engine.core.client import DEFAULT_FACTORY
from pagerunner.errors import ConfigError
from pagerunner.server.chat.options import ChatOptions

pytestmark = pytest.mark.usefixtures("forked")

PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
PARAMETERS["additionalProperties"] = False
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}
NOW: Any = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def scripted(text_side: Path) -> Iterator[RunningServer]:
    options = ChatOptions(tool_parser="hermes", auto_tools=True, reasoning_parser="qwen3", reasoning_field="both")
    with running_server(EngineArgs(model=str(text_side)), chat=options) as server:
        yield server


def says(text: str) -> Any:
    return [{"role": "user", "content": f"<|begin|>{text}"}]


def test_calls_and_reasoning_of_a_whole_answer(scripted: RunningServer) -> None:
    answer = scripted.openai().chat.completions.create(
        model=MODEL, messages=says(f"<think>\nWhere?\n</think>\n\nI'll look.\n{CALL}\n{CALL}"), tools=TOOLS
    )
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I'll look."
    extra = choice.message.model_dump()
    assert extra["reasoning"] == extra["reasoning_content"] == "Where?"
    calls = choice.message.tool_calls or []
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("weather", {"city": "Oslo"})
    ] * 2
    assert len({call.id for call in calls}) == 2 and calls[0].type == "function"


@pytest.mark.parametrize("shown", [True, False])
def test_usage_counts_the_tokens_of_the_reasoning(scripted: RunningServer, shown: bool) -> None:
    asked: dict[str, Any] = {"model": MODEL, "extra_body": {"include_reasoning": shown}}

    def spent(text: str, n: int = 1) -> tuple[int, int]:
        create = scripted.openai().chat.completions.create
        usage = create(messages=says(text), n=n, **asked).usage
        *_, last = create(messages=says(text), n=n, stream=True, stream_options={"include_usage": True}, **asked)
        assert usage is not None and usage.completion_tokens_details is not None and last.usage is not None
        assert usage.completion_tokens_details == last.usage.completion_tokens_details
        return usage.completion_tokens_details.reasoning_tokens or 0, usage.completion_tokens

    reasoning, whole = spent("<think>Hm, a hard one.</think>b")
    assert 5 < reasoning < whole
    assert spent("<think>Hm, a hard one.</think>b", n=3) == (3 * reasoning, 3 * whole)
    assert spent("No thoughts.")[0] == 0


def test_usage_without_a_reasoning_parser_says_nothing_of_reasoning(server: RunningServer) -> None:
    body = {"messages": says("<think>Hm.</think>b")}
    assert "completion_tokens_details" not in server.post("/v1/chat/completions", body).json()["usage"]


def test_the_stream_helper_puts_the_same_together(scripted: RunningServer) -> None:
    text = f"<think>Where?</think>Yes. {CALL}"
    with scripted.openai().chat.completions.stream(model=MODEL, messages=says(text), tools=TOOLS) as stream:
        pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion()
    assert "".join(pieces) == '{"city": "Oslo"}'
    [choice] = final.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Yes."
    [call] = choice.message.tool_calls or []
    assert (call.function.name, call.function.arguments, call.index) == ("weather", '{"city": "Oslo"}', 0)


def test_reasoning_is_streamed_under_both_names(scripted: RunningServer) -> None:
    stream = scripted.openai().chat.completions.create(
        model=MODEL, messages=says("<think>\nOne. Two.\n</think>\nThree."), stream=True
    )
    deltas = [choice.delta.model_dump(exclude_unset=True) for chunk in stream for choice in chunk.choices]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == "One. Two."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Three."
    first = next(number for number, delta in enumerate(deltas) if delta.get("content"))
    assert not any("reasoning" in delta for delta in deltas[first + 1 :])


def test_a_malformed_call_is_content_and_one_call_may_be_all(scripted: RunningServer) -> None:
    create = scripted.openai().chat.completions.create
    [choice] = create(model=MODEL, messages=says("<tool_call>oh no"), tools=TOOLS).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (
        "<tool_call>oh no",
        None,
        "stop",
    )
    [choice] = create(model=MODEL, messages=says(CALL + CALL), tools=TOOLS, parallel_tool_calls=False).choices
    assert len(choice.message.tool_calls or []) == 1
    [choice] = create(model=MODEL, messages=says(CALL), tools=TOOLS, tool_choice="none").choices
    assert choice.message.content == CALL
    [choice] = create(model=MODEL, messages=says(CALL)).choices
    assert choice.message.content == CALL
    body = {"include_reasoning": False}
    [choice] = create(model=MODEL, messages=says("<think>a</think>b"), extra_body=body).choices
    assert "reasoning" not in choice.message.model_dump() and choice.message.content == "b"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_a_stop_string_cuts_isnt_to_be_made(guided: RunningServer, stream: bool) -> None:
    body = {"model": MODEL, "messages": ASK, "tools": TOOLS, "tool_choice": "required", "stream": stream}
    for stop, reason in (["}"], "stop"), (["<none>"], "tool_calls"):
        found = guided.post("/v1/chat/completions", {**body, "stop": stop, "max_tokens": 120})
        lines = [line.removeprefix("data: ") for line in found.text.split("\n\n") if '"choices"' in line]
        choices = [json.loads(line)["choices"][0] for line in lines]
        assert [one["finish_reason"] for one in choices if one["finish_reason"]] == [reason]
        assert choices[-1]["stop_reason"] == (stop[0] if reason == "stop" else None)


def test_a_forced_answer_is_read_as_the_forced_call(scripted: RunningServer) -> None:
    """The fake core follows no grammar; here it says what one would have made it say."""
    create = scripted.openai().chat.completions.create
    named: Any = {"type": "function", "function": {"name": "weather"}}
    [choice] = create(model=MODEL, messages=says('{"city": "Rome"}'), tools=TOOLS, tool_choice=named).choices
    [call] = choice.message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Rome"}')
    assert (choice.finish_reason, choice.message.content) == ("stop", None)
    text = '<think>Hm</think>[{"name": "now", "parameters": {}}, {"name": "weather", "parameters": {"city": "Rome"}}]'
    [choice] = create(model=MODEL, messages=says(text), tools=TOOLS, tool_choice="required").choices
    assert [call.function.name for call in choice.message.tool_calls or []] == ["now", "weather"]
    assert choice.finish_reason == "tool_calls"


def test_a_conversation_with_calls_and_results_goes_back_in(scripted: RunningServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages: Any = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "c1", "content": "Rain."},
        *says("So it rains."),
    ]
    [choice] = scripted.openai().chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices
    assert choice.message.content == "So it rains."


def test_usage_and_n_with_parsers(scripted: RunningServer) -> None:
    stream = scripted.openai().chat.completions.create(
        model=MODEL, messages=says(CALL), tools=TOOLS, n=2, stream=True, stream_options={"include_usage": True}
    )
    arguments = {0: "", 1: ""}
    for chunk in stream:
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                arguments[choice.index] += call.function.arguments or ""
    assert set(arguments.values()) == {'{"city": "Oslo"}'}
    assert chunk.usage is not None and chunk.usage.completion_tokens > 10


def test_options_that_cannot_work() -> None:
    for options, word in [
        ({"tool_parser": "mistrel"}, "hermes, qwen3_coder, .*, kimi_k2, openai, got 'mistrel'"),
        ({"reasoning_parser": "x"}, "qwen3"),
        ({"reasoning_field": "x"}, "reasoning_content"),
        ({"auto_tools": True}, "tool_call_parser"),
    ]:
        with pytest.raises(ConfigError, match=word):
            ChatOptions(**options)  # type: ignore[arg-type]


# -- a random model, which only a grammar makes say anything


class Pet(pydantic.BaseModel, extra="forbid"):
    kind: Literal["cat", "dog"]
    age: Literal[1, 2, 3]
    tame: bool


@pytest.fixture(scope="module")
def guided(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = make_checkpoint(tmp_path_factory.mktemp("guided"), "qwen3")
    args = EngineArgs(model=str(path), max_model_len=512, kv_cache_memory_bytes=4_000_000, max_in_flight=2)
    with running_server(args, core_factory=DEFAULT_FACTORY) as server:
        yield server


COMPACT = {"structured_outputs": {"json": Pet.model_json_schema(), "disable_any_whitespace": True}}
ASK: Any = [{"role": "user", "content": "A pet, please."}]


def test_forced_tools_of_anthropics_client(guided: RunningServer) -> None:
    import anthropic

    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    tool: Any = {"name": "weather", "input_schema": {**schema, "additionalProperties": False}}
    asked: Any = {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": "A pet."}]}
    client = anthropic.Anthropic(base_url=guided.url, api_key="none", max_retries=0, timeout=LONG)
    for choice in ({"type": "tool", "name": "weather"}, {"type": "any", "disable_parallel_tool_use": True}):
        answer = client.messages.create(**asked, tools=[tool], tool_choice=choice)
        [call] = answer.content
        assert answer.stop_reason == "tool_use" and call.type == "tool_use"
        assert call.input in ({"city": "Oslo"}, {"city": "Rome"})
    cut = client.messages.create(**asked, tools=[tool], tool_choice={"type": "any"}, stop_sequences=["it"])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", "it")  # a client would make the call otherwise


def test_parse_gives_a_model_of_pydantic(guided: RunningServer) -> None:
    answer = guided.openai().chat.completions.parse(model=MODEL, messages=ASK, response_format=Pet, max_tokens=400)
    assert isinstance(answer.choices[0].message.parsed, Pet)
    tool = openai.pydantic_function_tool(Pet, name="buy")
    answer = guided.openai().chat.completions.parse(
        model=MODEL, messages=ASK, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=200
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Pet)


def test_every_format_through_both_endpoints(guided: RunningServer) -> None:
    client = guided.openai()
    for stream in (False, True):
        for body, check in [
            ({"structured_outputs": {"regex": "[a-d]{4}"}}, lambda text: re.fullmatch("[a-d]{4}", text)),
            ({"structured_outputs": {"choice": ["left", "right"]}}, lambda text: text in ("left", "right")),
            ({"structured_outputs": {"grammar": 'root ::= "x" [0-9] "y"'}}, lambda text: re.fullmatch("x[0-9]y", text)),
            (COMPACT, Pet.model_validate_json),
        ]:
            chat = client.chat.completions.create(
                model=MODEL, messages=ASK, extra_body=body, stream=stream, max_tokens=100
            )
            plain = client.completions.create(
                model=MODEL, prompt="A pet:", extra_body=body, stream=stream, max_tokens=100
            )
            if stream:
                texts = ["".join(chunk.choices[0].delta.content or "" for chunk in chat)]
                texts.append("".join(chunk.choices[0].text for chunk in plain))
            else:
                texts = [chat.choices[0].message.content, plain.choices[0].text]
            assert all(check(text) for text in texts), texts
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, response_format={"type": "json_object"}, max_tokens=60
    )
    assert (answer.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [{"type": "function", "function": {"name": "weather"}}, "required"])
def test_forced_calls(guided: RunningServer, stream: bool, choice: Any) -> None:
    options: Any = {"model": MODEL, "messages": ASK, "tools": TOOLS, "tool_choice": choice, "max_tokens": 120}
    options["parallel_tool_calls"] = False
    if stream:
        with guided.openai().chat.completions.stream(**options) as events:
            [made] = events.get_final_completion().choices
    else:
        [made] = guided.openai().chat.completions.create(**options).choices
    assert made.finish_reason == ("tool_calls" if choice == "required" else "stop")
    [call] = made.message.tool_calls or []
    assert call.function.name in ({"weather", "now"} if choice == "required" else {"weather"})
    assert json.loads(call.function.arguments) in ({"city": "Oslo"}, {"city": "Rome"}, {})


TREE = {"properties": {"v": {"const": 1}, "below": {"$ref": "#"}}, "required": ["v"], "additionalProperties": False}
ROME: Any = {
    "properties": {"city": {"$ref": "#/definitions/City"}},
    "required": ["city"],
    "additionalProperties": False,
}
NAMED: Any = {"type": "function", "function": {"name": "f"}}


def forced(*parameters: Any) -> Any:
    """The bodies of calls of `f`, or of `f` and `g`, by name and by "required"."""
    tools = [{"type": "function", "function": {"name": "fg"[i], "parameters": one}} for i, one in enumerate(parameters)]
    body = {"messages": ASK, "tools": tools, "max_tokens": 200, "parallel_tool_calls": False, "temperature": 1}
    return [{**body, "tool_choice": choice} for choice in (NAMED, "required")]


@pytest.mark.parametrize("kind", [None, ["object", "null"]])
def test_arguments_are_an_object_whatever_the_schema_leaves_open(guided: RunningServer, kind: Any) -> None:
    schema: Any = {"minimum": 7, "maximum": 7, "maxLength": 0, "maxItems": 0, **({"type": kind} if kind else {})}
    for body in forced({**schema, "properties": {"a": {"const": 1}}, "additionalProperties": False}):
        for seed in range(4):
            [choice] = guided.post("/v1/chat/completions", {**body, "seed": seed}).json()["choices"]
            assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) in ({}, {"a": 1}), choice


def test_a_reference_in_a_tool_means_that_tool(guided: RunningServer) -> None:
    """ "#" is the root of the tool's own schema, and two tools may define one name in two ways."""
    draft = {"$schema": "http://json-schema.org/draft-07/schema#"}
    other = {**draft, **ROME, "definitions": {"City": {"enum": ["Rome"]}}}
    oslo: Any = {**ROME, "definitions": {"City": {"enum": ["Oslo"]}}}
    inner: Any = {
        **ROME,
        "definitions": {"City": {"$id": "city", "$ref": "#/$defs/C", "$defs": {"C": {"const": "Oslo"}}}},
    }
    for first, second in (
        *((one, other) for one in (TREE, {**TREE, "$id": ""}, {**TREE, "$id": "#"}, oslo, inner)),
        ({**oslo, "$id": "http://a/b"}, {**other, "$id": "http://a/b"}),
    ):
        for body in forced(first, second):
            for seed in range(4):
                [choice] = guided.post("/v1/chat/completions", {**body, "seed": seed}).json()["choices"]
                call = choice["message"]["tool_calls"][0]["function"]
                found = json.loads(call["arguments"])
                while "below" in found:
                    found = found["below"]
                own = {"v": 1} if "v" in first["properties"] else {"city": "Oslo"}
                wanted = {"city": "Rome"} if call["name"] == "g" else own
                assert found == wanted, choice


@pytest.mark.parametrize("stream", [False, True])
def test_tools_that_no_call_can_follow_are_refused_before_the_answer_begins(
    guided: RunningServer, stream: bool
) -> None:
    circle = {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}}
    for schema, words in (
        (circle, "tools is nothing that can be followed: its references go in a circle"),
        ({"type": "string"}, "The parameters of tool 'f' have the type 'string'; a call's arguments are an object"),
        ({"type": ["array", "null"]}, "have the type ['array', 'null']"),
    ):
        for body in forced(schema):
            response = guided.post("/v1/chat/completions", {**body, "stream": stream})
            assert response.status_code == 400 and words in response.json()["error"]["message"], response.text
            assert response.json()["error"]["param"] == "tools"
    for body in forced(TREE, TREE):
        twice = {**body, "tools": [body["tools"][0]] * 2, "stream": stream}
        response = guided.post("/v1/chat/completions", twice)
        assert response.status_code == 400 and "tools has two functions named 'f'" in response.text


def test_a_bad_grammar_is_a_400_and_neighbours_go_on(guided: RunningServer) -> None:
    async def main() -> None:
        client = guided.async_openai()
        plain = {"model": MODEL, "prompt": "abc", "seed": 3, "max_tokens": 40, "extra_body": {"ignore_eos": True}}
        alone = await client.completions.create(**plain)
        bad = [{"regex": "("}, {"json": {"type": "nope"}}, {"grammar": "start: x"}, {"json": {"$ref": "#"}}]

        async def refused(values: Any, stream: bool) -> None:
            with pytest.raises(openai.BadRequestError, match="structured_outputs"):
                await client.completions.create(
                    model=MODEL, prompt="abc", stream=stream, extra_body={"structured_outputs": values}
                )

        crowd = await asyncio.gather(
            client.completions.create(**plain), *(refused(values, stream) for values in bad for stream in (True, False))
        )
        assert crowd[0].choices[0].text == alone.choices[0].text
        await client.close()

    asyncio.run(main())
    guided.wait_idle()


ENDLESS: Any = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"]}
ENDLESS["$defs"] = {"A": {"$ref": "#/$defs/A"}}


def test_what_a_grammar_and_the_request_exclude_together_is_the_requests_fault(guided: RunningServer) -> None:
    """Neither a 500: the sentence names the parameter."""
    body = {"prompt": "abc", "max_tokens": 400, "temperature": 1}
    [letter] = guided.engine.tokenizer.encode("a", add_special_tokens=False)
    nested = {"regex": "((((a{1,100}){1,100}){1,100}){1,100})"}
    for extra, words in (
        ({"structured_outputs": {"regex": "[0-9]+"}, "allowed_token_ids": [letter]}, "allowed_token_ids"),
        ({"structured_outputs": nested, "allowed_token_ids": [letter]}, "nested repetitions"),
        ({"structured_outputs": {"json": {"$ref": "#"}}}, "no finite text"),
        ({"structured_outputs": {"json": ENDLESS}}, "its grammar cannot be followed: no finite text matches it."),
    ):
        response = guided.post("/v1/completions", {**body, **extra})
        error = response.json()["error"]
        assert response.status_code == 400 and words in error["message"], response.text
        assert error["param"] == "structured_outputs"
