"""The proxy in front of real engines with the demo model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from helpers.patience import LONG, until
from helpers.ports import free_port
from helpers.proxies import Asked, answer, running_proxy, upstreams
from helpers.serving import MODEL, RunningServer, running_server
from pagerunner.config import EngineArgs
from pagerunner.demo import demo_path
from pagerunner.engine.core.client import DEFAULT_FACTORY
from pagerunner.server.chat.options import ChatOptions

pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningServer]]:
    """Two servers that lend each other the pages of prompts."""

    def args() -> EngineArgs:
        return EngineArgs(
            model=str(demo_path("demo")), max_model_len=512, num_gpu_blocks_override=256, max_num_seqs=16,
            kv_offloading_size=0.25, kv_transfer_config={"kv_connector": "PeerConnector", "kv_role": "kv_both", "kv_port": free_port()},
        )  # fmt: skip

    options: dict[str, Any] = {
        "core_factory": DEFAULT_FACTORY,
        "chat": ChatOptions(tool_parser="hermes", auto_tools=True),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))  # where their secret is
        with running_server(args(), **options) as one, running_server(args(), **options) as two:
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
    got = httpx.post(f"{url}/v1/{path}", json={"model": MODEL, **body}, headers=headers, timeout=LONG)
    text = re.sub(r'("created(?:_at)?":|[a-z]+[-_])[0-9a-f]{10,}', r"\1...", got.text)
    if body.get("stream"):
        *events, end = [json.loads(line[6:]) for line in got.text.splitlines() if line.startswith("data: {")]
        choices = [one for event in events for one in event["choices"]]
        texts = ["".join(one["delta"].get("content") or "" for one in choices if one["index"] == at) for at in (0, 1)]
        reasons = sorted(str(one["finish_reason"]) for one in choices if one["finish_reason"])
        text = json.dumps([texts, reasons, end["usage"]], separators=(",", ":"))
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
        with running_proxy(prefill=[fake.url], decode=[one.url], prefill_min_tokens=0) as proxy:
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


LONG_TEXT = "A prompt of some length goes on for a while, and then it goes on. " * 4
HANDED: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": LONG_TEXT + "One day", "n": 3, "seed": 7, "logprobs": 5, "max_tokens": 12}),
    ("completions", {"prompt": [4 + number % 400 for number in range(200)], "return_token_ids": True, "max_tokens": 9, "temperature": 0}),
    ("chat/completions", {"messages": [{"role": "user", "content": LONG_TEXT}], "logprobs": True, "top_logprobs": 3, "max_tokens": 12, "seed": 3}),
    ("chat/completions", {"messages": [{"role": "user", "content": LONG_TEXT}], "tools": [TOOL], "tool_choice": "required", "max_tokens": 24, "seed": 1}),
    ("chat/completions", {"messages": [{"role": "user", "content": LONG_TEXT}], "n": 2, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 9, "seed": 2}),
]  # fmt: skip


def pages_metric(server: RunningServer, name: str) -> float:
    found = re.search(rf"^pagerunner:kv_peer_{name}\{{.*\}} (\S+)$", server.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize(("path", "body"), HANDED, ids=[f"{path}-{number}" for number, (path, _) in enumerate(HANDED)])
def test_a_prompt_that_one_engine_computes_is_answered_by_another(
    pair: list[RunningServer], path: str, body: dict[str, Any]
) -> None:
    prefill, decode = pair
    salted = {**body, "cache_salt": path + str(len(str(body)))}  # neither has it
    lent, pulled = pages_metric(prefill, "lent_total"), pages_metric(decode, "pulled_total")
    with running_proxy(prefill=[prefill.url], decode=[decode.url]) as proxy:
        through = told(proxy.url, path, salted)
        assert proxy.metric("prefill_fallbacks_total") == 0
    assert re.search(r'cached_tokens":[1-9]', through[2])
    until(lambda: pages_metric(decode, "pulled_total") > pulled)
    assert pages_metric(prefill, "lent_total") == lent + 1
    told(prefill.url, path, salted)
    assert through == told(prefill.url, path, salted), "the same engine's second answer: it has as much cached"


def test_an_engine_that_can_not_have_the_pages_computes_them(pair: list[RunningServer]) -> None:
    prefill, decode = pair
    body = {"prompt": LONG_TEXT, "max_tokens": 8, "temperature": 0, "logprobs": 0}

    def lies(asked: Asked) -> list[bytes]:
        """What the real one says, but for a lease that nobody has given."""
        got = httpx.post(f"{prefill.url}/v1/completions", content=asked.body, timeout=LONG)
        return [answer(re.sub(rb'"remote_lease":"[0-9a-f]+"', b'"remote_lease":"%s"' % (b"0" * 32), got.content))]

    def elsewhere(asked: Asked) -> list[bytes]:
        return [re.sub(rb'("remote_host":)"127.0.0.1"', rb'\1"10.11.1.1"', lies(asked)[0])]  # as long

    with upstreams(None) as (fake,), running_proxy(prefill=[fake.url], decode=[decode.url]) as proxy:
        for script, refused in ((lies, 0), (elsewhere, 1)):
            fake.script = script
            salted = {**body, "cache_salt": script.__name__}
            status, _, through = told(proxy.url, "completions", salted)
            direct = told(prefill.url, "completions", salted)[2]
            texts = [re.search(r'"text":"(.*?)","logprobs"', text) for text in (through, direct)]
            assert status == 200 and texts[0] and texts[1] and texts[0][1] == texts[1][1]
            assert proxy.metric("prefill_fallbacks_total", reason="refused by decode") == refused
    decode.wait_idle()
