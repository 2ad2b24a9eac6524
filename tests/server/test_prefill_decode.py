"""Two real servers and the proxy: one computes prompts, the other one continues them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from helpers.patience import LONG, until
from helpers.ports import free_port
from helpers.proxies import running_proxy
from helpers.serving import MODEL, RunningServer, running_server
from pagerunner.config import EngineArgs
from pagerunner.demo import demo_path
from pagerunner.engine.core.client import DEFAULT_FACTORY

pytestmark = pytest.mark.usefixtures("forked")
PROMPT = "Once upon a time there was a page that nobody had written yet. " * 12


def args(role: str) -> EngineArgs:
    return EngineArgs(
        model=str(demo_path("demo")),
        max_model_len=512,
        num_gpu_blocks_override=256,
        max_num_seqs=16,
        kv_offloading_size=0.1,
        kv_transfer_config={"kv_connector": "PeerConnector", "kv_role": role, "kv_port": free_port()},
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningServer]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with (
            running_server(args("kv_producer"), core_factory=DEFAULT_FACTORY) as one,
            running_server(args("kv_consumer"), core_factory=DEFAULT_FACTORY) as two,
        ):
            yield [one, two]


def ask(url: str, path: str = "completions", **body: Any) -> dict[str, Any]:
    got = httpx.post(f"{url}/v1/{path}", json={"model": MODEL, "temperature": 0, **body}, timeout=LONG)
    assert got.status_code == 200, got.text
    return got.json()


def metric(server: RunningServer, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=LONG).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_a_prompt_is_computed_on_one_server_and_continued_on_the_other(pair: list[RunningServer]) -> None:
    prefill, decode = pair
    with running_proxy(prefill=[prefill.url], decode=[decode.url]) as proxy:
        for path, body in [
            ("completions", {"prompt": PROMPT, "max_tokens": 12}),
            ("chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "n": 2}),
        ]:
            before = metric(decode, "pagerunner:kv_peer_pulled_total")
            through = ask(proxy.url, path, **body)
            direct = ask(prefill.url, path, **body)
            kept = ("text", "message", "finish_reason")
            choices = [[{name: one.get(name) for name in kept} for one in of["choices"]] for of in (through, direct)]
            assert choices[0] == choices[1]
            assert through["usage"]["prompt_tokens"] == direct["usage"]["prompt_tokens"]
            found = through["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert found >= through["usage"]["prompt_tokens"] - 17, "all pages but the last have come"
            until(lambda before=before: metric(decode, "pagerunner:kv_peer_pulled_total") == before + 1)
        until(lambda: metric(prefill, "pagerunner:kv_peer_loans") == 0)


def test_vllms_fields_by_hand(pair: list[RunningServer]) -> None:
    prefill, decode = pair
    body = {"prompt": "By hand. " + PROMPT, "max_tokens": 1, "stream": False}
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    asked |= dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    lent = ask(prefill.url, **body, kv_transfer_params=asked)["kv_transfer_params"]
    assert lent["do_remote_prefill"] is True and lent["do_remote_decode"] is False and lent["tp_size"] == 1
    streamed = httpx.post(
        f"{decode.url}/v1/completions",
        json={"model": MODEL, **body, "stream": True, "stream_options": {"include_usage": True}, "kv_transfer_params": lent},
        timeout=LONG,
    )  # fmt: skip
    assert f'"cached_tokens":{lent["remote_num_tokens"]}' in streamed.text
    for wrong, sentence in [
        ({**lent, "remote_host": "169.254.169.254"}, "isn't among the peers"),
        ({**lent, "remote_lease": "guess"}, "remote_lease must be 32 hexadecimal digits"),
        ({**lent, "no_such_field": 1}, "no_such_field"),
        ({**lent, "remote_block_ids": [2**80]}, "kv_transfer_params.remote_block_ids[0]"),
        ({**lent, "tp_size": 2**80}, "kv_transfer_params.tp_size"),
        (asked, "this engine lends no pages"),
    ]:
        got = httpx.post(
            f"{decode.url}/v1/completions",
            json={"model": MODEL, **body, "kv_transfer_params": wrong},
            timeout=LONG,
        )
        assert got.status_code == 400 and sentence in got.json()["error"]["message"]


def test_an_engine_that_hangs_costs_only_time(pair: list[RunningServer]) -> None:
    prefill, decode = pair
    prompt = "Stopped. " + PROMPT
    lent = ask(prefill.url, prompt=prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    wanted = ask(prefill.url, prompt=prompt, max_tokens=6)["choices"][0]["text"]
    pid = prefill.engine.replicas[0].client.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        found = ask(decode.url, prompt=prompt, max_tokens=6, kv_transfer_params=lent["kv_transfer_params"])
    finally:
        os.kill(pid, signal.SIGCONT)
    assert found["choices"][0]["text"] == wanted
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert metric(decode, "vllm:nixl_num_failed_transfers_total") == 1
