"""The proxy in front of real engines with the demo model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from helpers.patience import patient
from helpers.proxies import answer, running_proxy, upstreams
from helpers.serving import MODEL, RunningServer, running_server
from pagerunner.config import EngineArgs
from pagerunner.demo import demo_path
from pagerunner.engine.core.client import DEFAULT_FACTORY
from pagerunner.server.chat.options import ChatOptions

pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture(scope="module")
def pair() -> Iterator[list[RunningServer]]:
    args = EngineArgs(model=str(demo_path("demo")), max_model_len=512, num_gpu_blocks_override=256, max_num_seqs=16)
    options: dict[str, Any] = {
        "core_factory": DEFAULT_FACTORY,
        "chat": ChatOptions(tool_parser="hermes", auto_tools=True),
    }
    with running_server(args, **options) as one, running_server(args, **options) as two:
        yield [one, two]


TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
ASKED = [{"role": "user", "content": "What is 12 + 30?"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": "One day", "n": 3, "temperature": 1.0, "seed": 7, "logprobs": 5, "max_tokens": 12}),
    ("completions", {"prompt": [1, 2, 3, 4], "return_token_ids": True, "echo": True, "logprobs": 0, "max_tokens": 4, "seed": 5}),
    ("chat/completions", {"messages": ASKED, "logprobs": True, "top_logprobs": 3, "max_tokens": 12, "temperature": 0}),
    ("chat/completions", {"messages": ASKED, "tools": [TOOL], "tool_choice": "required", "max_tokens": 24, "seed": 1}),
    ("chat/completions", {"messages": ASKED, "n": 2, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 9, "seed": 2}),
    ("responses", {"input": "Hi", "max_output_tokens": 6, "temperature": 0}),
    ("messages", {"messages": ASKED, "max_tokens": 6, "temperature": 0}),
    ("completions", {"prompt": "Hi", "no_such_field": 1}),
]  # fmt: skip


def told(url: str, path: str, body: dict[str, Any]) -> tuple[int, str, str]:
    """A status, a content type and a body, whose times and random names are taken out. Of a stream the choices' texts and the usage:
    how many tokens a piece has is chance."""
    headers = {"X-Request-Id": "same"}
    got = httpx.post(f"{url}/v1/{path}", json={"model": MODEL, **body}, headers=headers, timeout=patient(30))
    text = re.sub(r'("created(?:_at)?":|[a-z]+[-_])[0-9a-f]{10,}', r"\1...", got.text)
    if body.get("stream"):
        pieces = re.findall(r'"index":(\d+),"delta":.*?"content":(".*?"),', text)
        text = f"{[''.join(piece for at, piece in pieces if at == one) for one in '01']} {text[-400:]}"
    return got.status_code, got.headers["content-type"], text


@pytest.mark.parametrize(("path", "body"), BODIES, ids=[f"{path}-{number}" for number, (path, _) in enumerate(BODIES)])
def test_answers_are_those_of_a_server_that_is_asked_itself(
    pair: list[RunningServer], path: str, body: dict[str, Any]
) -> None:
    one = pair[0]
    told(one.url, path, body)  # now its prompt is cached, here as there
    direct = told(one.url, path, body)
    with upstreams(lambda asked: [answer(b'{"kv_transfer_params": {"do_remote_prefill": true}}')]) as (fake,):
        with running_proxy(worker_urls=[one.url]) as proxy:
            assert told(proxy.url, path, body) == direct
        with running_proxy(prefill=[fake.url], decode=[one.url]) as proxy:
            assert told(proxy.url, path, body) == direct, "from a prefill server that holds nothing"
    one.wait_idle()


def cached_share(pair: list[RunningServer], policy: str) -> float:
    """The share of the prompt tokens of conversations of four turns that their servers had cached."""
    found = asked = 0
    with running_proxy(worker_urls=[one.url for one in pair], policy=policy) as proxy:
        prompts = [
            f"{policy} conversation {number} begins here. " + "It goes on for a while. " * 4 for number in range(3)
        ]
        for _ in range(4):
            for number, prompt in enumerate(prompts):
                body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
                got = proxy.post(body={"model": MODEL, **body}).json()
                prompts[number] += got["choices"][0]["text"] + " And then it goes on and on for another while."
                asked += got["usage"]["prompt_tokens"]
                found += got["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found / asked


def test_conversations_stay_with_the_server_that_has_their_beginning(pair: list[RunningServer]) -> None:
    by_turns, by_beginning = cached_share(pair, "round_robin"), cached_share(pair, "cache_aware")
    assert by_beginning > 0.5 > by_beginning / 2 and by_beginning > 1.15 * by_turns
