"""The tokenizer's endpoints, and those that act on the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.serving import RunningServer
from pagerunner.text.tokenizer import Tokenizer

USER = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def tokenizer(text_side: Path) -> Tokenizer:
    return Tokenizer.from_path(str(text_side))


def test_tokenize_and_back(server: RunningServer, tokenizer: Tokenizer) -> None:
    text = "Grüße 日本語"
    ids = tokenizer.encode(text)
    answer = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 2048)
    assert answer["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": text}
    assert server.post("/tokenize", {"prompt": ""}).json()["tokens"] == []


def test_tokenize_a_conversation(server: RunningServer, tokenizer: Tokenizer) -> None:
    text = tokenizer.apply_chat_template(USER, add_generation_prompt=False)
    body = {"messages": USER, "add_generation_prompt": False}
    assert server.post("/tokenize", body).json()["tokens"] == tokenizer.encode(text, add_special_tokens=False)


def test_tokenizer_info_is_what_lm_eval_looks_for(server: RunningServer, tokenizer: Tokenizer) -> None:
    info = server.get("/tokenizer_info").json()
    assert tokenizer.chat_template is not None
    assert info["chat_template"] == tokenizer.chat_template.templates["default"]
    assert info["eos_token"] == tokenizer.special_tokens["eos_token"]
    assert (info["vocab_size"], info["model_max_length"]) == (tokenizer.vocab_size, 2048)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
        ("/tokenize", {"messages": USER, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ("/tokenize", {"messages": USER, "tools": [{}]}, "tools[0].function"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/detokenize", {"tokens": [2048]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, None),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ],
)
def test_bad_tokens(server: RunningServer, path: str, body: dict[str, Any], param: str | None) -> None:
    response = server.post(path, body)
    assert response.status_code == (404 if param == "model" else 400), response.text
    assert param is None or response.json()["error"]["param"] == param


def test_sleep_and_wake(server: RunningServer) -> None:
    assert server.get("/is_sleeping").json() == {"is_sleeping": False}
    assert server.post("/sleep?level=1&mode=keep").status_code == 200
    assert server.get("/is_sleeping").json() == {"is_sleeping": True}
    refused = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert refused.status_code == 503 and "wake_up" in refused.json()["error"]["message"]
    assert server.post("/wake_up?tags=weights&tags=kv_cache").status_code == 200
    assert server.get("/is_sleeping").json() == {"is_sleeping": False}
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_reset_prefix_cache(server: RunningServer) -> None:
    prompt = {"prompt": "nobody else sends this prompt", "max_tokens": 40}
    server.post("/v1/completions", prompt)
    server.wait_idle()
    assert server.post("/reset_prefix_cache?reset_running_requests=false").json() == {"success": True}
    usage = server.post("/v1/completions", {**prompt, "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/sleep?level=3", "level"),
        ("/sleep?mode=later", "mode"),
        ("/sleep?tags=weights", "tags"),
        ("/sleep?depth=1", "depth"),
        ("/wake_up?tags=nothing", "tags"),
        ("/wake_up?level=1", "level"),
        ("/reset_prefix_cache?reset_running_requests=true", "reset_running_requests"),
        ("/reset_prefix_cache?reset_external=1", "reset_external"),
        ("/reset_prefix_cache?reset_external=maybe", "reset_external"),
    ],
)
def test_bad_control(server: RunningServer, path: str, param: str) -> None:
    response = server.post(path)
    assert response.status_code == 400 and response.json()["error"]["param"] == param
    assert server.get("/is_sleeping").json() == {"is_sleeping": False}


def test_control_is_not_a_link_away(server: RunningServer) -> None:
    for path in ("/sleep", "/wake_up", "/reset_prefix_cache"):
        assert server.get(path).status_code == 405


def test_a_clients_id_is_a_label(server: RunningServer) -> None:
    headers = {"X-Request-Id": "mine"}
    answers = [server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=headers) for _ in range(2)]
    assert [answer.headers["x-request-id"] for answer in answers] == ["mine"] * 2
    assert [answer.json()["id"] for answer in answers] == ["cmpl-mine"] * 2  # as in vLLM; the engine has ids of its own
    named = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "request_id": "other"})
    assert named.json()["id"] == "cmpl-other"
    long = server.post("/v1/completions", {"prompt": "a"}, headers={"X-Request-Id": "x" * 300})
    assert long.status_code == 400 and "256" in long.json()["error"]["message"]
    stream = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "stream": True}, headers=headers)
    assert stream.headers["x-request-id"] == "mine"
    assert "x-request-id" not in server.get("/health").headers
