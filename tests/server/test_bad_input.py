"""Bad requests get a 400 that names what is wrong, and the next good request succeeds."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from helpers import fake_core
from helpers.serving import MODEL, RunningServer
from pagerunner import limits
from pagerunner.errors import InvalidRequestError, PromptTooLongError
from pagerunner.server.errors import HttpError, error_body
from pagerunner.server.service import Call, Service, blaming
from pagerunner.types import SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


UNSUPPORTED = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
NAMED = {"name": "x", "schema": UNSUPPORTED}
FORMAT = {"type": "json_schema", "json_schema": NAMED}
ANTHROPIC = {"type": "json_schema", "schema": UNSUPPORTED}


def unsupported_tool(schema: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", schema: UNSUPPORTED}}


def call(arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def assert_serves(server: RunningServer) -> None:
    response = server.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 1})
    assert response.status_code == 200, response.text
    server.wait_idle()


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [-1]}, None),
        ({"prompt": [999_999]}, None),
        ({"prompt": [10**30]}, None),
        ({"prompt": "word " * 5000}, None),
        ({"prompt": ["a"] * (limits.MAX_PROMPTS_PER_CALL + 1)}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 100}, "prompt"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 1_000_000}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"min_tokens": 10, "max_tokens": 5}, "min_tokens"),
        ({"stop": ["x"] * 200_000}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"bad_words": ["x"] * 200_000}, "bad_words"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 500}}, "logit_bias"),
        ({"logprobs": 1000}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"seed": 2**70}, "seed"),
        ({"priority": 2**40}, "priority"),
        ({"cache_salt": "x" * 1000}, "cache_salt"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"nonsense": True}}, "stream_options.nonsense"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "echo": True, "logprobs": 1, "n": 2}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"guided_json": {}}, "guided_json"),
        ({"guided_json": {}}, "guided_json"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
def test_bad_completion_fields(server: RunningServer, fields: dict[str, Any], param: str | None) -> None:
    error = error_of(server.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 1, **fields}), 400)
    assert error["type"] == "BadRequestError"
    if param is not None:
        assert error["param"] is not None and error["param"].split("[")[0] == param
        assert param.rsplit(".", 1)[-1] in error["message"]
    assert_serves(server)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "role"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]}, "tool_calls"),
        ({"mood": "good"}, "mood"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL]}, "enable-auto-tool-choice"),
        ({"tools": [TOOL] * 600}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "'g'"),
        ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": [call("[1]")]}]}, "arguments"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_tokens"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"prediction": {"type": "content", "content": "x"}}, "nothing is drafted"),
        ({"store": True}, "keeps no answers"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
        ({"continue_final_message": True}, "add_generation_prompt"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 9999}, "truncate_prompt_tokens"),
        ({"skip_special_tokens": False, "spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
        ({"reasoning_effort": "furious"}, "reasoning_effort"),
        ({"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]}, "function_call"),
        ({"messages": [{"role": "user", "content": "x"}] * 9, "max_tokens": "x"}, "max_tokens"),
    ],
)
def test_bad_chat_fields(server: RunningServer, fields: dict[str, Any], word: str) -> None:
    error = error_of(server.post(CHAT, {"messages": USER, "max_tokens": 1, **fields}), 400)
    assert word in error["message"]
    assert_serves(server)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"prompt": "abc"',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "abc", "temperature": NaN}',
        b'{"prompt": "abc", "temperature": 1e999}',
        b"[]",
        b"null",
        b'"text"',
        b"[" * 100_000,
        b'{"metadata": ' + b"[" * 100_000,
        b"\x00\x01\x02",
    ],
    ids=range(12),
)
def test_bodies_that_are_no_json_object(server: RunningServer, path: str, content: bytes) -> None:
    assert error_of(server.post(path, content=content), 400)["message"]
    assert_serves(server)


def test_an_unknown_model_is_a_404_that_names_the_served_one(server: RunningServer) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})):
        error = error_of(server.post(path, {"model": "other", **body}), 404)
        assert error["param"] == "model" and MODEL in error["message"]


def test_unknown_paths_and_methods_have_the_same_error_body(server: RunningServer) -> None:
    error_of(server.get("/v1/nothing"), 404)
    error_of(server.get(COMPLETIONS), 405)


def test_a_body_over_the_limit_is_a_413_announced_or_not(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_BODY_BYTES", 1000)
    body = b'{"prompt": "' + b"a" * 2000 + b'"}'
    error = error_of(server.post(COMPLETIONS, content=body), 413)
    assert "1000 bytes" in error["message"]
    error_of(server.post(COMPLETIONS, content=iter([body[:600], body[600:]])), 413)
    assert_serves(server)


def test_a_refusal_by_the_core_is_a_400_for_streams_too(server: RunningServer) -> None:
    for stream in (False, True):
        body = {"prompt": [fake_core.FAIL_ONE, fake_core.BREAK_ADD], "stream": stream, "max_tokens": 3}
        assert "could not add the request" in error_of(server.post(COMPLETIONS, body), 500)["message"]
    assert_serves(server)


def test_a_request_that_fails_inside_ends_alone(server: RunningServer) -> None:
    body = {"prompt": [[5, 6], [fake_core.FAIL_ONE]], "max_tokens": 3}
    assert "NaN in its logits." in error_of(server.post(COMPLETIONS, body), 500)["message"]
    assert_serves(server)


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\n"])
def test_broken_http_does_no_harm(server: RunningServer, data: bytes) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(data)
    assert_serves(server)


LONG = "a" * (limits.MAX_PROMPT_CHARS + 1)
MANY = [{"role": "user", "content": "x"}] * (limits.MAX_MESSAGES + 1)


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        ("/tokenize", {"prompt": LONG}, "MAX_PROMPT_CHARS"),
        (COMPLETIONS, {"prompt": LONG, "add_special_tokens": False}, "MAX_PROMPT_CHARS"),
        (COMPLETIONS, {"prompt": LONG, "echo": True, "max_tokens": 0}, "MAX_PROMPT_CHARS"),
        (CHAT, {"messages": MANY}, "MAX_MESSAGES"),
        ("/tokenize", {"messages": MANY}, "MAX_MESSAGES"),
        ("/v1/responses", {"input": MANY}, "MAX_MESSAGES"),
    ],
    ids=["tokenize", "add_special_tokens", "echo", "chat", "tokenize messages", "responses"],
)
def test_a_limit_holds_whichever_way_a_text_comes_in(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], limit: str
) -> None:
    encoded: list[int] = []
    tokenizer = server.engine.tokenizer
    encode = type(tokenizer).encode
    monkeypatch.setattr(
        type(tokenizer), "encode", lambda self, text, **how: encoded.append(len(text)) or encode(self, text, **how)
    )
    error = error_of(server.post(path, body), 400)
    assert f"PAGERUNNER_LIMIT_{limit} " in error["message"] and not encoded
    assert_serves(server)


@pytest.mark.parametrize(
    ("text", "alone"),
    [
        (r"\ud800", r"\ud800"),
        (r"\ude00", r"\ude00"),
        (r"\uD800x", r"\uD800"),
        (r"\ud800\u0041", r"\ud800"),
        (r"\\\ud800", r"\ud800"),
    ],
)
def test_a_lone_surrogate_is_named(server: RunningServer, text: str, alone: str) -> None:
    body = f'{{"prompt": "abc \\ud83d\\ude00 {text}", "max_tokens": 1}}'
    message = error_of(server.post(COMPLETIONS, content=body.encode()), 400)["message"]
    assert f"{alone} at byte {body.rindex(alone)} is a lone surrogate" in message and "truncated" not in message


def test_json_that_ends_early_is_told_so(server: RunningServer) -> None:
    for body in (b'{"prompt": "abc', rb'{"prompt": "\\ud800", "max_tokens": 1', rb'{"prompt": "\ud83d\ude00"'):
        assert "truncated" in error_of(server.post(COMPLETIONS, content=body), 400)["message"]


def test_a_compressed_body_is_refused_as_such(server: RunningServer) -> None:
    import gzip

    body = gzip.compress(b'{"prompt": "abc", "max_tokens": 1}')
    error = error_of(server.post(COMPLETIONS, content=body, headers={"Content-Encoding": "gzip"}), 415)
    assert "gzip" in error["message"] and "Content-Encoding" in error["message"]
    plain = server.post(COMPLETIONS, content=gzip.decompress(body), headers={"Content-Encoding": "identity"})
    assert plain.status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": UNSUPPORTED}}, "structured_outputs"),
        (COMPLETIONS, {"prompt": "a", "response_format": FORMAT}, "response_format"),
        (CHAT, {"messages": USER, "response_format": FORMAT}, "response_format"),
        (CHAT, {"messages": USER, "structured_outputs": {"json": UNSUPPORTED}}, "structured_outputs"),
        (CHAT, {"messages": USER, "tools": [unsupported_tool("parameters")], "tool_choice": "required"}, "tools"),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", **NAMED}}}, "text.format"),
        (
            "/v1/messages",
            {"messages": USER, "max_tokens": 5, "output_config": {"format": ANTHROPIC}},
            "output_config.format",
        ),
        (
            "/v1/messages",
            {
                "messages": USER,
                "max_tokens": 5,
                "tools": [{"name": "f", "input_schema": UNSUPPORTED}],
                "tool_choice": {"type": "any"},
            },
            "tools",
        ),
    ],
)
def test_a_format_that_is_not_supported_is_told_by_the_clients_own_field(
    server: RunningServer, path: str, body: dict[str, Any], field: str
) -> None:
    for stream in (False, True):
        response = server.post(path, {"model": MODEL, **body, "stream": stream})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert "uniqueItems" in error["message"] and error["message"].startswith(field)
        assert error.get("param", field) == field
    assert_serves(server)


def test_an_error_that_several_calls_get_names_the_field_of_each() -> None:
    shared = PromptTooLongError("structured_outputs is too long.", "structured_outputs")
    for names, param in (({"structured_outputs": "response_format"}, "response_format"), ({}, "structured_outputs")):
        with pytest.raises(PromptTooLongError, match=f"^{param} is too long.$") as caught, blaming(names):
            raise shared
        assert caught.value.param == param


def test_an_adapter_that_has_gone_since_the_call_was_let_in_is_told_by_the_field_model() -> None:
    for names in ({}, {"prompt": "messages"}):
        with pytest.raises(InvalidRequestError) as caught, blaming(names):
            raise InvalidRequestError("There is no adapter 'gone'.", "lora_request")
        assert caught.value.param == "model"


@pytest.mark.parametrize("unloaded", [True, False])
def test_an_adapter_that_is_unloaded_while_a_call_is_let_in_is_a_model_that_does_not_exist(unloaded: bool) -> None:
    """Status 404, as before the call was let in. An adapter that can't be had for another reason is still the call's fault: 400."""

    class Engine:
        adapters = SimpleNamespace(infos={"sql": None}, get=lambda name: None if unloaded else name)

        async def generate(self, *_: Any, **__: Any) -> AsyncIterator[None]:
            raise InvalidRequestError("The adapter can't be had.", "lora_request")
            yield

    service = Service(Engine(), ["base"], "/base")  # type: ignore[arg-type]
    request: Any = SimpleNamespace(priority=0, cache_salt=None)
    outputs = service.run(Call("a", 0, "gone", "a", None), [{"prompt_token_ids": [1]}], SamplingParams(), request)
    with pytest.raises((HttpError, InvalidRequestError)) as caught:
        asyncio.run(anext(outputs))  # type: ignore[arg-type]
    error = error_body(caught.value).error
    assert (error.code, error.param) == (404 if unloaded else 400, "model")
    assert ("The model 'gone' does not exist; there is base, sql." in error.message) == unloaded
