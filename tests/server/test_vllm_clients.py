"""What clients of vLLM send and read, unmodified. The fake core repeats the prompt's tokens, so an answer shows its prompt."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from helpers.fake_core import OPTIONS_VARIABLE
from helpers.patience import LONG
from helpers.serving import MODEL, RunningServer, running_server
from pagerunner.config import EngineArgs
from pagerunner.text.tokenizer import Tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RAW = {"skip_special_tokens": False, "ignore_eos": True}
USER = [{"role": "user", "content": "hello, world"}]


@pytest.fixture(scope="module")
def tokenizer(text_side: Path) -> Tokenizer:
    return Tokenizer.from_path(str(text_side))


def prompt_seen(server: RunningServer, tokenizer: Tokenizer, body: dict[str, Any]) -> str:
    """The prompt that a chat call runs, by its own answer."""
    answer = server.post(CHAT, {"max_tokens": 1, "return_token_ids": True, **RAW, **body})
    assert answer.status_code == 200, answer.text
    return tokenizer.decode(answer.json()["prompt_token_ids"], skip_special_tokens=False)


def test_an_answer_goes_back_with_whatever_a_client_has_put_into_it(server: RunningServer) -> None:
    """litellm sends its own message objects back, other clients mark parts and tools for caches."""
    call = {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}", "extra": 1}}
    messages: list[Any] = [
        {
            "role": "system",
            "content": [{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}],
            "id": "m0",
        },
        {"role": "user", "content": "hi", "prefix": True, "mood": "good"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call],
            "function_call": None,
            "audio": None,
            "refusal": None,
            "annotations": [{"type": "url_citation"}],
            "provider_specific_fields": {"refusal": None},
        },
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "3", "x": 1}], "status": "ok"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm."},
        {"role": "user", "content": "again"},
    ]
    tool = {"type": "function", "cache_control": {}, "function": {"name": "f", "x": 1, "defer_loading": False}}
    body = {"messages": messages, "tools": [tool], "tool_choice": {**tool, "function": {"name": "f", "y": 2}}}
    response = server.post(CHAT, {**body, "max_tokens": 3})
    assert response.status_code == 200, response.text


def test_fields_that_change_nothing_are_accepted(server: RunningServer) -> None:
    body: dict[str, Any] = {
        "audio": None,
        "best_of": 1,
        "chat_template_kwargs": {"enable_thinking": False, "mood": "good"},
        "documents": [{"title": "a", "text": "b"}],
        "ec_transfer_params": {},
        "function_call": "auto",
        "functions": [],
        "include_stop_str_in_output": True,
        "kv_transfer_params": {},
        "length_penalty": 1.0,
        "logits_processors": [],
        "media_io_kwargs": {},
        "metadata": {"a": "b"},
        "mm_processor_kwargs": {},
        "modalities": ["text"],
        "prediction": None,
        "prompt_cache_key": "k",
        "reasoning_effort": "high",
        "repetition_detection": None,
        "return_prompt_text": False,
        "safety_identifier": "s",
        "service_tier": "auto",
        "session_id": "s",
        "spaces_between_special_tokens": False,
        "store": False,
        "stream_interval": 1,
        "thinking_token_budget": None,
        "truncation_side": "left",
        "use_beam_search": False,
        "user": "u",
        "verbosity": "low",
        "vllm_xargs": {},
        "watermarking": False,
    }
    for name, value in body.items():
        response = server.post(CHAT, {"messages": USER, "max_tokens": 1, name: value})
        assert response.status_code == 200, (name, response.text)
    assert server.post(CHAT, {"messages": USER, "max_tokens": 1, **body}).status_code == 200


def test_a_message_that_has_begun_is_gone_on_with_and_echoed(server: RunningServer, tokenizer: Tokenizer) -> None:
    messages = [*USER, {"role": "assistant", "content": "The answer is"}]
    body: dict[str, Any] = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    seen = prompt_seen(server, tokenizer, body)
    assert seen.endswith("The answer is") and not tokenizer.apply_chat_template(messages).endswith("The answer is")
    for text in ("The answer is ", "  The answer"):
        spaced = [*USER, {"role": "assistant", "content": text}]
        assert prompt_seen(server, tokenizer, {**body, "messages": spaced}).endswith(
            text.strip() + text[len(text.rstrip()) :]
        )
    plain = server.post(CHAT, {**body, "max_tokens": 5}).json()["choices"][0]["message"]["content"]
    echoed = server.post(CHAT, {**body, "max_tokens": 5, "echo": True}).json()["choices"][0]["message"]["content"]
    assert echoed == "The answer is" + plain
    client = server.openai()
    options: Any = {"model": MODEL, "messages": messages, "max_tokens": 5}
    extra = {"add_generation_prompt": False, "continue_final_message": True, "echo": True}
    stream = client.chat.completions.create(**options, stream=True, extra_body=extra)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == echoed
    count = server.post("/tokenize", {"messages": messages, **{k: v for k, v in extra.items() if k != "echo"}}).json()
    assert tokenizer.decode(count["tokens"], skip_special_tokens=False) == seen
    for text in ("e", "<", "end", "assistant"):  # which the markup behind the message holds too
        short = [*USER, {"role": "assistant", "content": text}]
        assert prompt_seen(server, tokenizer, {**body, "messages": short}) == seen.removesuffix("The answer is") + text
    bad = server.post(CHAT, {**body, "messages": [*USER, {"role": "assistant", "content": ""}]})
    assert bad.status_code == 400 and "continue_final_message" in bad.json()["error"]["message"]


def test_prompts_are_truncated_on_either_side(server: RunningServer, tokenizer: Tokenizer) -> None:
    ids = list(range(300, 340))
    body: dict[str, Any] = {"prompt": ids, "max_tokens": 4, "return_token_ids": True, **RAW}
    for fields, kept in (
        ({"truncate_prompt_tokens": 3}, ids[-3:]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, ids[:3]),
        ({"truncate_prompt_tokens": 100}, ids),
        ({"truncate_prompt_tokens": -1}, ids),
    ):
        [choice] = server.post(COMPLETIONS, {**body, **fields}).json()["choices"]
        assert choice["prompt_token_ids"] == kept
    long = {**body, "prompt": "word " * 3000, "truncate_prompt_tokens": -1}
    [choice] = server.post(COMPLETIONS, long).json()["choices"]
    assert len(choice["prompt_token_ids"]) == 2048 - 4  # room for the answer
    # far more than what is tokenised of a prompt that isn't to be truncated
    endless = "word " * 100_000 + "one two three"
    for fields, text in (({}, endless[-200:]), ({"truncation_side": "right"}, endless[:200])):
        some = {**body, "prompt": endless, "truncate_prompt_tokens": 7, **fields}
        [choice] = server.post(COMPLETIONS, some).json()["choices"]
        alone = tokenizer.encode(text)
        assert choice["prompt_token_ids"] == (alone[:7] if fields else alone[-7:])
    chat = {"messages": [{"role": "user", "content": endless}], "truncate_prompt_tokens": 40}
    assert "two three" in prompt_seen(server, tokenizer, chat)
    echo = server.post(
        COMPLETIONS, {**body, "prompt": "one two three", "truncate_prompt_tokens": 2, "echo": True}
    ).json()
    shown = tokenizer.decode(echo["choices"][0]["prompt_token_ids"])
    assert echo["choices"][0]["text"].startswith(shown) and not echo["choices"][0]["text"].startswith("one two")
    whole = prompt_seen(server, tokenizer, {"messages": USER})
    assert prompt_seen(server, tokenizer, {"messages": USER, "truncate_prompt_tokens": 5}) == tokenizer.decode(
        tokenizer.encode(whole, add_special_tokens=False)[-5:], skip_special_tokens=False
    )


def test_tokens_may_be_told_by_their_ids(server: RunningServer) -> None:
    body = {"max_tokens": 3, "return_tokens_as_token_ids": True, "return_token_ids": True}
    [choice] = server.post(CHAT, {**body, "messages": USER, "logprobs": True, "top_logprobs": 2}).json()["choices"]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{one}" for one in choice["token_ids"]]
    assert all(top["token"].startswith("token_id:") for entry in entries for top in entry["top_logprobs"])
    body |= {"prompt": "one two", "logprobs": 1, "echo": True}
    [choice] = server.post(COMPLETIONS, body).json()["choices"]
    every = [*choice["prompt_token_ids"], *choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == [f"token_id:{one}" for one in every]
    assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] if top for name in top)


def test_the_words_that_clients_look_for(server: RunningServer) -> None:
    """litellm and agents shorten a conversation when they read the first, and know a wrong model by the second."""
    for path, body in (
        (COMPLETIONS, {"prompt": [300] * 5000}),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 5000}]}),
        ("/v1/responses", {"input": "word " * 5000}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "word " * 5000}], "max_tokens": 1}),
    ):
        response = server.post(path, body)
        assert response.status_code == 400 and "his model's maximum context length is 2048" in response.text
    for response in (server.post(CHAT, {"model": "x", "messages": USER}), server.get("/v1/models/x")):
        assert response.status_code == 404 and "does not exist" in response.json()["error"]["message"]


def test_developers_are_the_system_where_a_template_knows_no_others(
    server: RunningServer, tokenizer: Tokenizer
) -> None:
    seen = prompt_seen(server, tokenizer, {"messages": [{"role": "developer", "content": "Be brief."}, *USER]})
    assert seen == prompt_seen(server, tokenizer, {"messages": [{"role": "system", "content": "Be brief."}, *USER]})


def test_a_conversation_that_is_too_long_loses_its_oldest_messages(server: RunningServer, tokenizer: Tokenizer) -> None:
    turns: list[Any] = [{"role": "system", "content": "Be brief."}]
    for number in range(40):
        turns += [{"role": "user", "content": f"question {number} " + "word " * 40}]
        turns += [{"role": "assistant", "content": f"answer {number}"}]
    turns.append({"role": "user", "content": "The last one."})
    body = {"input": turns, "max_output_tokens": 100, **RAW}
    refused = server.post("/v1/responses", body)
    assert refused.status_code == 400 and "maximum context length" in refused.text
    answer = server.post("/v1/responses", {**body, "truncation": "auto"}).json()
    count = answer["usage"]["input_tokens"]
    assert 1500 < count <= 2048 - 100 and answer["truncation"] == "auto"
    shown = answer["output"][0]["content"][0]["text"]
    first = int(re.search(r"question (\d+)", shown)[1])  # type: ignore[index]
    assert "Be brief." in shown and 0 < first < 40
    endless = [turns[0], *[{"role": "user", "content": "word " * 20_000}] * 9, *turns[1:]]
    cut = server.post("/v1/responses", {**body, "input": endless, "truncation": "auto"}).json()
    assert cut["usage"]["input_tokens"] == count and cut["output"][0]["content"][0]["text"] == shown
    alone = [turns[0], {"role": "user", "content": "word " * 5000}]
    assert server.post("/v1/responses", {**body, "input": alone, "truncation": "auto"}).status_code == 400


def test_nothing_is_stored_and_the_answer_says_so(server: RunningServer) -> None:
    answer = server.openai().responses.create(model=MODEL, input="a", max_output_tokens=1, store=True)
    assert answer.store is False


def test_pause_and_resume(text_side: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPTIONS_VARIABLE, '{"step_seconds": 0.01}')
    with running_server(EngineArgs(model=str(text_side))) as server:
        found: list[Any] = []
        body = {"prompt": "abc", "max_tokens": 300, **RAW}  # 3 seconds at least, and it is paused before
        thread = threading.Thread(target=lambda: found.append(server.post(COMPLETIONS, body).json()))
        thread.start()
        while not server.engine.num_unfinished:
            time.sleep(0.01)
        assert server.get("/load").json()["server_load"] == 1
        assert server.post("/pause?mode=keep").json() == {"status": "paused"}
        assert server.get("/is_paused").json() == {"is_paused": True}
        late = threading.Thread(
            target=lambda: found.append(server.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 1}).json())
        )
        late.start()
        while server.engine.num_unfinished < 2:
            time.sleep(0.01)
        with pytest.raises(httpx.ReadTimeout):  # a client that leaves while it waits is forgotten
            httpx.post(f"{server.url}{COMPLETIONS}", json={"prompt": "abc", "max_tokens": 1}, timeout=0.3)
        while server.engine.num_unfinished > 2:
            time.sleep(0.01)
        assert not found and server.get("/health").status_code == 200
        assert server.post("/resume").json() == {"status": "resumed"}
        thread.join(LONG)
        late.join(LONG)
        found.sort(key=lambda answer: -answer["usage"]["completion_tokens"])
        assert found[1]["usage"]["completion_tokens"] == 1
        assert found[0]["choices"][0]["finish_reason"] == "length"  # it went on where it was
        assert server.get("/load").json()["server_load"] == 0
        assert server.post("/pause?wait_for_inflight_requests=true&clear_cache=false").status_code == 200
        assert server.post("/resume").status_code == 200
        assert server.post("/sleep?level=1").status_code == 200
        assert "wake_up" in server.post("/resume").json()["error"]["message"]
        server.post("/wake_up")
        for query in ("mode=now", "clear_cache=maybe", "speed=1"):
            assert server.post(f"/pause?{query}").status_code == 400
        assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_one_path_for_every_kind_of_call(server: RunningServer) -> None:
    for body, kind in (
        ({"messages": USER, "max_tokens": 1}, "chat.completion"),
        ({"prompt": "a", "max_tokens": 1}, "text_completion"),
    ):
        assert server.post("/invocations", body).json()["object"] == kind
    assert "modules.json" in server.post("/invocations", {"input": "a"}).json()["error"]["message"]
    assert server.post("/invocations", {}).status_code == 400
    assert server.post("/invocations", content=b"[").status_code == 400


def test_standard_metrics(server: RunningServer) -> None:
    server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
    server.post(COMPLETIONS, {"prompt": "a", "max_tokens": -1})
    server.get("/nothing")
    text = server.get("/metrics").text
    for sample in (
        r'http_requests_total\{handler="/v1/completions",method="POST",status="2xx"\} [1-9]',
        r'http_requests_total\{handler="/v1/completions",method="POST",status="4xx"\} [1-9]',
        r'http_requests_total\{handler="none",method="GET",status="4xx"\} [1-9]',
        r'http_request_duration_seconds_bucket\{handler="/v1/completions",le="0.1",method="POST"\} ',
        r"http_request_duration_highr_seconds_count [1-9]",
        r'http_request_size_bytes_sum\{handler="/v1/completions"\} [1-9]',
        r'http_response_size_bytes_count\{handler="/v1/completions"\} [1-9]',
        r"process_resident_memory_bytes [1-9]",
        r'pagerunner_core_process_resident_memory_bytes\{engine="0"\} [1-9]',
        r"process_open_fds [1-9]",
        r"vllm:num_preemptions_total\{",
    ):
        assert re.search(f"^{sample}", text, re.MULTILINE), sample
    assert 'handler="/metrics"' not in text and 'handler="/health"' not in text


def test_the_api_is_described_without_the_network(server: RunningServer) -> None:
    document = server.get("/openapi.json").json()
    names = set(document["components"]["schemas"])
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert {"200", "400", "401", "500", "503"} <= operation["responses"].keys(), path
            declared = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"}
            assert declared == set(re.findall(r"\{(\w+)\}", path))
    text = server.get("/openapi.json").text
    assert set(re.findall(r'"#/components/schemas/(\w+)"', text)) <= names
    page = server.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    for path in document["paths"]:
        assert path in page.text
    assert (
        "max_completion_tokens" in page.text
        and "<script" not in page.text
        and "http" not in page.text.split("</style>")[1]
    )
    assert server.get("/redoc").headers["location"] == "/docs"
    assert server.get("/").headers["location"] == "/ui"


def test_a_server_without_docs_and_with_keys(text_side: Path) -> None:
    with running_server(EngineArgs(model=str(text_side)), docs=False, api_keys=["k"]) as server:
        key = {"Authorization": "Bearer k"}
        for path in ("/docs", "/redoc", "/openapi.json"):
            assert server.get(path, headers=key).status_code == 404
        for path in ("/ping", "/health", "/"):
            assert server.get(path).status_code in (200, 307)
        for path in ("/metrics", "/load", "/v1/models"):
            assert server.get(path).status_code == 401
            assert server.get(path, headers={"x-api-key": "k"}).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            server.openai(api_key="wrong").models.list()


def test_who_asks_is_who_is_connected(text_side: Path, caplog: pytest.LogCaptureFixture) -> None:
    from pagerunner.server.http_logs import HttpLogs

    caplog.set_level("INFO", logger="uvicorn.access")
    logs = HttpLogs(silent=("/health",))
    with running_server(EngineArgs(model=str(text_side)), logs=logs) as server:
        server.get("/version", headers={"X-Forwarded-For": "6.6.6.6"})
        server.get("/health?x=1")
    HttpLogs().apply()
    assert "/version" in caplog.text and "6.6.6.6" not in caplog.text and "/health" not in caplog.text
