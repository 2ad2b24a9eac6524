"""Prompts that one server computes and another one answers; and which of equal servers takes a prompt."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.patience import LONG, patient, until
from helpers.proxies import END, EVENTS, Asked, FakeUpstream, RunningProxy, answer, chunk, running_proxy, upstreams
from pagerunner.memory.prefix import RecentPrompts
from pagerunner.server.proxy import pool as pool_module
from pagerunner.server.proxy.bodies import read_fields, units
from pagerunner.server.proxy.metrics import ProxyMetrics
from pagerunner.server.proxy.options import ProxyOptions
from pagerunner.server.proxy.pool import Pool, Server

GIVEN = b'{ "remote_block_ids":[[1,2]], "remote_port": 1e400,"do_remote_prefill":true, "unknown": "\\u00e9"}'
"""What a prefill server may say: no other program reads it."""


def hands_over(asked: Asked) -> Iterator[bytes]:
    yield answer(b'{"id": "x", "choices": [], "kv_transfer_params": ' + GIVEN + b', "usage": null}')


@pytest.fixture
def pair() -> Iterator[tuple[FakeUpstream, FakeUpstream, RunningProxy]]:
    with (
        upstreams(hands_over, lambda asked: [answer(b'"whole"')]) as (prefill, decode),
        running_proxy(
            prefill=[prefill.url], decode=[decode.url], prefill_timeout_secs=patient(0.5), prefill_min_tokens=0
        ) as proxy,
    ):
        yield prefill, decode, proxy


Pair = tuple[FakeUpstream, FakeUpstream, RunningProxy]


def test_both_servers_get_what_they_need(pair: Pair) -> None:
    prefill, decode, proxy = pair
    decode.script = lambda asked: [EVENTS, chunk("1"), chunk("2"), END]
    body = (
        b'{"model":"m", "messages":[{"role":"user","content":"a\\u00e9"}], "max_tokens":50,"max_completion_tokens":40, "n":3,'
        b'"stream":true,"stream_options":{"include_usage":true}, "min_tokens":4, "seed":1e400,"logprobs":true,'
        b'"tools":[{"x":1.0}],"tool_choice":"auto", "kv_transfer_params":{ }}'
    )
    got = proxy.post(
        "/v1/chat/completions", content=body, headers={"Authorization": "Bearer k", "Accept-Encoding": "gzip"}
    )
    assert got.text == "data: 1\n\ndata: 2\n\n"
    (first,), (second,) = prefill.asked, decode.asked
    assert first.line == second.line == "POST /v1/chat/completions HTTP/1.1"
    assert first.headers["authorization"] == second.headers["authorization"] == "Bearer k"
    assert len(first.headers["x-request-id"]) == 32 and first.headers["x-request-id"] == second.headers["x-request-id"]
    assert "accept-encoding" not in first.headers and second.headers["accept-encoding"] == "gzip"
    common = b'"model":"m","messages":[{"role":"user","content":"a\\u00e9"}],"max_tokens":'
    assert first.body == b"{" + common + (
        b'1,"max_completion_tokens":1,"n":1,"stream":false,"seed":1e400,"logprobs":true,"tools":[{"x":1.0}],'
        b'"tool_choice":"auto","kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,'
        b'"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}'
    )
    assert second.body == b"{" + common + (
        b'50,"max_completion_tokens":40,"n":3,"stream":true,"stream_options":{"include_usage":true},"min_tokens":4,'
        b'"seed":1e400,"logprobs":true,"tools":[{"x":1.0}],"tool_choice":"auto","kv_transfer_params":' + GIVEN + b"}"
    )
    assert proxy.post(headers={"X-Request-Id": "mine"}).status_code == 200
    assert prefill.asked[1].headers["x-request-id"] == decode.asked[1].headers["x-request-id"] == "mine"
    assert proxy.metric("prefill_fallbacks_total") == 0


def breaks_off(asked: Asked) -> Iterator[bytes]:
    yield answer(GIVEN)[:-5]
    raise EOFError


def never(asked: Asked) -> Iterator[bytes]:
    time.sleep(patient(2))
    yield answer()


@pytest.mark.parametrize(
    ("reason", "script"),
    [
        ("refused", lambda asked: [answer(b'{"error": "no\nsuch field"}', "400 Bad Request")]),
        ("refused", lambda asked: [answer(b"full", "429 Too Many Requests")]),
        ("failed", breaks_off),
        ("failed", lambda asked: [b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", *[bytes(1 << 20)] * 40]),
        ("unreadable", lambda asked: [answer(b"<html>")]),
        ("unreadable", lambda asked: [answer(b"[" * 100_000)]),
        ("unreadable", lambda asked: [answer(b'[{"kv_transfer_params": {}}]')]),
        ("nothing to hand over", lambda asked: [answer(b'{"kv_transfer_params": null}')]),
        ("nothing to hand over", lambda asked: [answer(b'{"kv_transfer_params": "x"}')]),
        ("nothing to hand over", lambda asked: [answer()]),
        ("late", never),
    ],
)
def test_a_decode_server_computes_what_no_prefill_server_has(
    pair: Pair, reason: str, script: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode, proxy = pair
    prefill.script = script
    body = b'{"prompt": "Hi",  "max_tokens": 5}'
    assert proxy.post(content=body).json() == "whole"
    assert decode.asked[0].body == body, "byte for byte what the client has sent"
    assert proxy.metric("prefill_fallbacks_total", reason=reason) == 1
    told = "A decode server computes a prompt itself, because no prefill server has: "
    assert (told in caplog.text) is (reason != "nothing to hand over")


def test_without_a_living_prefill_server(pair: Pair) -> None:
    prefill, decode, proxy = pair
    prefill.close()
    for _ in range(4):
        assert proxy.post().json() == "whole"
    assert proxy.metric("server_up", server="prefill server 0") == 0
    assert proxy.metric("prefill_fallbacks_total", reason="failed") == 4
    health = proxy.get("/health")
    assert health.status_code == 200 and "prefill server 0" in health.json()["lost"]
    decode.health = "503 Service Unavailable"
    proxy.wait_up(0, up=False)
    assert proxy.get("/health").status_code == proxy.post().status_code == 503


def test_a_decode_server_that_does_not_take_the_parameters(pair: Pair) -> None:
    prefill, decode, proxy = pair
    decode.script = lambda asked: [
        answer(b'"own"') if b"remote" not in asked.body else answer(b"no", "400 Bad Request")
    ]
    assert proxy.post().json() == "own"
    assert proxy.metric("prefill_fallbacks_total", reason="refused by decode") == 1
    decode.script = lambda asked: [answer(b"no", "401 Unauthorized")]
    assert proxy.post().status_code == 401 and len(decode.asked) == 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/completions", {"prompt": [[1, 2], [3]]}),
        ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1}),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 0}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/responses", {"input": "a"}),
    ],
)
def test_what_prefill_servers_are_not_asked(pair: Pair, path: str, body: dict[str, Any]) -> None:
    prefill, decode, proxy = pair
    assert proxy.post(path, body).json() == "whole"
    assert not prefill.asked and decode.asked[0].json() == body


@pytest.mark.parametrize(
    "body",
    [{"prompt": "a"}, {"prompt": ["a"]}, {"prompt": [1, 2]}, {"prompt": "a", "echo": True}, {"prompt": [[1, 2]]}],
)
def test_what_they_are_asked(pair: Pair, body: dict[str, Any]) -> None:
    prefill, decode, proxy = pair
    assert proxy.post(body=body).json() == "whole"
    assert len(prefill.asked) == 1 and decode.asked[0].json() == {**body, "kv_transfer_params": json.loads(GIVEN)}


SMUGGLED = '{"prompt": "a", "kv_transfer_params": {"remote_host": "10.0.0.1"}}'


OTHER_PATHS = ("/v1/%63ompletions", "/invocations", "/v1/messages", "/v1/responses")


@pytest.mark.parametrize(
    ("told", "body"),
    [
        ("kv_transfer_params is what", SMUGGLED.encode()),
        ("kv_transfer_params is what", SMUGGLED.replace("kv", "\\u006bv").encode()),
        ("kv_transfer_params is what", b'{"kv_transfer_params":{},"kv_transfer_params":{"a":1}}'),
        ("not valid UTF-8", SMUGGLED.encode("utf-16")),
        ("not valid JSON", b"\xef\xbb\xbf" + SMUGGLED.encode()),
        ("not valid JSON", SMUGGLED.replace('"a"', "NaN").encode()),
        ("not valid JSON", b""),
        ("got `array`", b"[" * 100_000),
    ],
)
def test_a_client_can_not_say_where_pages_are(pair: Pair, told: str, body: bytes) -> None:
    prefill, decode, proxy = pair
    for path in ("/v1/completions", *OTHER_PATHS):
        got = proxy.post(path, content=body)
        assert got.status_code == 400 and told in got.json()["error"]["message"]
    assert not prefill.asked and not decode.asked


@pytest.mark.parametrize("body", [b"", b"[1]", b'{"prompt": ', b"\xff", b"[" * 100_000, SMUGGLED.encode()])
def test_equal_servers_say_themselves_what_is_wrong(body: bytes) -> None:
    with upstreams(None, None) as found, running_proxy(worker_urls=[one.url for one in found]) as proxy:
        assert proxy.post(content=body).status_code == 200
        assert [asked.body for one in found for asked in one.asked] == [body]


def test_a_client_that_leaves_ends_its_prefill(pair: Pair) -> None:
    prefill, decode, proxy = pair
    begun = threading.Event()

    def script(asked: Asked) -> Iterator[bytes]:
        begun.set()
        while True:
            yield b"HTTP/1.1 103 Early Hints\r\n\r\n"
            time.sleep(0.005)

    prefill.script = script
    with socket.create_connection(("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]))) as client:
        client.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 14\r\n\r\n{"prompt":"a"}')
        assert begun.wait(LONG)
    assert prefill.left.wait(LONG) and not decode.asked
    until(lambda: proxy.proxy.running == 0)


def test_a_prompt_that_is_too_short_to_be_handed_over_is_computed_once() -> None:
    with (
        upstreams(hands_over, lambda asked: [answer(b'"whole"')]) as (prefill, decode),
        running_proxy(prefill=[prefill.url], decode=[decode.url]) as proxy,
    ):
        for length, asked in ((253, 0), (254, 1)):  # and two quotation marks: 64 tokens
            assert proxy.post(body={"prompt": "x" * length}).json() == "whole"
            assert len(prefill.asked) == asked
        assert proxy.metric("prefill_fallbacks_total", reason="short prompt") == 1


def test_what_a_burst_of_requests_finds_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = servers(1).servers
    now = [100.0]
    monkeypatch.setattr(pool_module.time, "monotonic", lambda: now[0])
    one.sent.add([b"prefix"])
    for late, fault in ((0, ""), (0, ""), (0, ""), (2, ""), (0, ""), (2, "late")):
        now[0] += late
        one.heard("late")
        assert one.fault == fault, "three intervals, not three requests"
    assert one.sent.leading([b"prefix"]) == 1, "it may have kept everything"
    one.heard("")
    assert not one.fault
    one.heard("gone", refused=True)
    assert one.fault == "gone" and not len(one.sent), "nobody listens any more"


def servers(count: int) -> Pool:
    options = ProxyOptions(worker_urls=["http://a"])
    found = [Server(f"server {number}", "http://a", options, ProxyMetrics()) for number in range(count)]
    for one in found:
        one.fault = ""
    return Pool(found, "cache_aware")


def hashes(**fields: Any) -> list[bytes]:
    return units(read_fields(json.dumps(fields).encode()), RecentPrompts())


def test_a_prompt_follows_its_beginning_until_that_server_has_more_to_do() -> None:
    pool = servers(3)
    first, second, third = pool.servers
    assert {pool.choose([], set()) for _ in range(3)} == set(pool.servers), "of equal ones each has its turn"
    text = "".join(f"{number} " for number in range(2000))[:8192]
    long = hashes(prompt=text)
    assert len(long) == 8194 // 64
    second.sent.add(long)
    assert all(pool.choose(hashes(prompt=text + " and more"), set()) is second for _ in range(4))
    second.running = 3
    assert pool.choose(long, set()) is second, "8,192 bytes count as 2,048 tokens, and those as four requests"
    second.running = 5
    assert pool.choose(long, set()) in (first, third)
    second.running = 1
    for other in (hashes(prompt="x" + text), hashes(prompt=text, cache_salt="s"), hashes(prompt=text, model="m")):
        assert pool.choose(other, set()) in (first, third)
    assert pool.choose(long, {second, first}) is third and pool.choose(long, set(pool.servers)) is None
    third.fault = "dead"
    assert pool.choose(long, {second, first}) is None


def test_a_conversations_next_turn_begins_as_the_one_before() -> None:
    said = [{"role": "system", "content": "Be brief. " * 40}, {"role": "user", "content": "What is 12 + 30?"}]
    before = hashes(model="m", messages=said, tools=[{"a": 1}], temperature=0.5)
    after = hashes(stream=True, messages=[*said, {"role": "assistant", "content": "42"}], model="m", tools=[{"a": 1}])
    assert len(before) > 6 and after[: len(before) - 1] == before[:-1]
    assert hashes(messages=said, tools=[{"a": 2}])[0] != before[0]
