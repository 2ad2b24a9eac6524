"""Several engines behind one port, over the fake core: requests are shared out, and the end of one engine is not the server's."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from helpers import fake_core
from helpers.checkpoints_window import make_window_checkpoint
from helpers.patience import LONG, stretched, until
from helpers.processes import children_of, is_alive
from helpers.router import Router
from helpers.server_process import set_options
from helpers.serving import RunningServer, readers, running_server
from pagerunner.config import EngineArgs
from pagerunner.demo import demo_path
from pagerunner.engine.core.client import DEFAULT_FACTORY
from pagerunner.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture(scope="module")
def two(text_side: Path) -> Iterator[RunningServer]:
    args = EngineArgs(model=str(text_side), data_parallel_size=2, enable_sleep_mode=True)
    with pytest.MonkeyPatch.context() as patch:
        set_options(patch, step_seconds=0.002)
        with running_server(args) as server:
            yield server


def finished(server: RunningServer) -> list[float]:
    """Sequences that each engine has finished."""
    reasons = ("stop", "length", "abort")
    server.wait_idle()
    return [
        sum(server.metric("request_success_total", engine=engine, finished_reason=reason) for reason in reasons)
        for engine in ("0", "1")
    ]


def ask(server: RunningServer, prompt: Any, rank: int | str | None = None, **more: Any) -> httpx.Response:
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    return server.post("/v1/completions", {"prompt": prompt, "max_tokens": 2, **more}, headers=headers)


def test_requests_are_shared_out_and_a_clients_choice_counts(two: RunningServer) -> None:
    before = finished(two)
    for number in range(8):
        assert ask(two, [40 + number, 50]).status_code == 200
    assert [now - old for now, old in zip(finished(two), before, strict=True)] == [4, 4]
    before = finished(two)
    for path, body in (
        ("completions", {"prompt": "hello", "max_tokens": 1, "n": 3}),
        ("chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}),
        ("completions", {"prompt": ["one", "two"], "max_tokens": 1}),
        ("responses", {"input": "hello", "max_output_tokens": 1}),
        ("messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}),
    ):
        response = two.post(f"/v1/{path}", {"model": "tiny", **body}, headers={"X-data-parallel-rank": "1"})
        assert response.status_code == 200, response.text
    assert [now - old for now, old in zip(finished(two), before, strict=True)] == [0, 8]


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        (2, "X-data-parallel-rank must be in [0, 2), as data_parallel_size is 2; got 2."),
        ("one", "X-data-parallel-rank must be the number of an engine, got 'one'."),
        ("-1", "X-data-parallel-rank must be the number of an engine, got '-1'."),
        ("9" * 40, "X-data-parallel-rank must be the number of an engine"),
    ],
)
def test_a_wrong_choice_is_refused(two: RunningServer, rank: int | str, said: str) -> None:
    response = ask(two, "hello", rank)
    assert response.status_code == 400 and said in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "X-data-parallel-rank", "what the client has sent"


def test_two_choices_are_refused(two: RunningServer) -> None:
    url, headers = two.url, [("X-data-parallel-rank", "0"), ("X-data-parallel-rank", "1")]
    response = httpx.post(
        f"{url}/v1/completions", json={"prompt": "hello", "max_tokens": 1}, headers=headers, timeout=LONG
    )
    assert response.status_code == 400 and "must be the number of an engine, got '0, 1'." in response.text


def test_prompts_with_one_beginning_go_to_one_engine(two: RunningServer) -> None:
    shared = list(range(100, 420))
    assert ask(two, [*shared, 7], rank=1).status_code == 200
    before = finished(two)
    for number in range(5):
        assert ask(two, [*shared, 500 + number]).status_code == 200
    assert [now - old for now, old in zip(finished(two), before, strict=True)] == [0, 5]


def test_metrics_have_a_sample_for_each_engine(two: RunningServer) -> None:
    families = {one.name: one for one in text_string_to_metric_families(two.get("/metrics").text)}
    for name in (
        "vllm:num_requests_running",
        "vllm:request_success",
        "vllm:time_to_first_token_seconds",
        "vllm:cache_config_info",
        "vllm:gpu_cache_usage_perc",
        "vllm:engine_sleep_state",
        "pagerunner:engine_up",
        "pagerunner:startup_seconds",
        "pagerunner_core_process_open_fds",
    ):
        assert {sample.labels["engine"] for sample in families[name].samples} == {"0", "1"}, name
    assert [sample.value for sample in families["pagerunner:engine_up"].samples] == [1, 1]


def test_memory_and_the_page_show_the_engine_that_is_asked_for(two: RunningServer) -> None:
    for path in ("memory", "ui/live"):
        response = two.get(f"/{path}?engine=2")
        assert response.status_code == 400 and "engine must be in [0, 2), got '2'" in response.text
    with readers_of(two, 1):
        found = [two.get(f"/memory?engine={engine}").json()["state"]["requests"] for engine in (0, 1)]
        assert [len(requests) for requests in found] == [0, 1]
        for engine in (0, 1):
            with httpx.stream("GET", f"{two.url}/ui/live?engine={engine}", timeout=LONG) as stream:
                frame = json.loads(next(stream.iter_lines()).removeprefix("data: "))
            assert frame["engines"] == [2, engine] and frame["stats"]["running"] == engine


class readers_of:  # noqa: N801 - reads as a phrase
    """A stream on an engine while the block runs."""

    def __init__(self, server: RunningServer, rank: int) -> None:
        headers, body = {"X-data-parallel-rank": str(rank)}, {"prompt": "abc", "max_tokens": 1900, "stream": True}
        self._stream = httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**body, "ignore_eos": True}, headers=headers, timeout=LONG
        )

    def __enter__(self) -> None:
        self._lines = self._stream.__enter__().iter_lines()
        assert next(self._lines)

    def __exit__(self, *error: object) -> None:
        self._stream.__exit__(None, None, None)


def test_sleep_and_pause_are_states_of_all(two: RunningServer) -> None:
    for down, up in (("sleep?level=1", "wake_up"), ("pause", "resume")):
        assert two.post(f"/{down}").status_code == 200
        assert two.get("/is_paused").json() == {"is_paused": True}
        states = [two.engine.replicas[number].level for number in (0, 1)]
        assert states == [1, 1] if down.startswith("sleep") else [0, 0]
        assert two.post(f"/{up}").status_code == 200
        assert two.get("/is_paused").json() == {"is_paused": False}
    assert two.post("/reset_prefix_cache").json() == {"success": True}
    assert all(ask(two, "hello", rank).status_code == 200 for rank in (0, 1))


@pytest.mark.days(3)
def test_the_end_of_one_engine_is_the_end_of_its_requests_alone(
    text_side: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    set_options(monkeypatch, step_seconds=0.01)
    with running_server(EngineArgs(model=str(text_side), data_parallel_size=2)) as server:
        streams = readers(server.url, 4, prompt="abc", max_tokens=300, extra_body={"ignore_eos": True})
        os.kill(server.engine.replicas[1].client.pid, signal.SIGKILL)
        for reader in streams:
            reader.join(LONG)
        said = "The process of engine 1 of 2 was ended by SIGKILL"
        assert sum(said in str(reader.error) for reader in streams) == 2
        assert sum(reader.error is None and reader.reason == "length" for reader in streams) == 2
        health = server.get("/health")
        assert health.status_code == 200 and said in health.json()["lost"]["1"]
        assert all(ask(server, [40 + number]).status_code == 200 for number in range(4))
        response = ask(server, "hello", 1)
        assert response.status_code == 503 and said in response.json()["error"]["message"]
        text = server.get("/metrics").text
        assert 'pagerunner:engine_up{engine="0",model_name="tiny"} 1.0' in text
        assert 'pagerunner:engine_up{engine="1",model_name="tiny"} 0.0' in text
        assert 'vllm:num_requests_running{engine="1",model_name="tiny"} 0.0' in text
        assert 'pagerunner_core_process_open_fds{engine="0"}' in text
        assert 'pagerunner_core_process_open_fds{engine="1"}' not in text
        assert server.post("/reset_prefix_cache").json() == {"success": True}, "the other one does what is asked"
        capfd.readouterr()
        response = ask(server, [fake_core.CRASH])
        assert re.search(r"^\[engine 0\] .* ERROR .*\nTraceback ", capfd.readouterr().err, re.MULTILINE)
        assert response.status_code == 503 and "engine 0 of 2" in response.json()["error"]["message"]
        until(lambda: server.get("/health").status_code == 503)
        for engine in ("engine 0 of 2", "engine 1 of 2"):
            assert engine in server.get("/health").json()["error"]["message"]


@pytest.mark.days(3)
def test_when_one_engine_refuses_to_sleep_none_sleeps(text_side: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server(EngineArgs(model=str(text_side), data_parallel_size=2, enable_sleep_mode=True)) as server:
        client = server.engine.replicas[1].client
        real = client.call

        async def call(make: Any) -> Any:
            if type(make(0)).__name__ == "Sleep":
                raise CheckpointError("no memory to lock")
            return await real(make)

        monkeypatch.setattr(client, "call", call)
        assert server.post("/sleep?level=1").status_code == 500
        assert [one.level for one in server.engine.replicas] == [-1, -1]
        assert server.get("/is_sleeping").json() == {"is_sleeping": False}
        assert all(ask(server, "hello", rank).status_code == 200 for rank in (0, 1))


@pytest.mark.parametrize("refused", ["PrepareSleep", "Sleep"])
def test_a_refused_sleep_leaves_a_pause_and_requests_as_they_are(
    refused: str, two: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = two.engine.replicas[1].client
    real = client.call

    async def call(make: Any) -> Any:
        message = make(0)
        if type(message).__name__ == refused and message.level:
            raise CheckpointError("no memory to lock")
        return await real(make)

    monkeypatch.setattr(client, "call", call)
    assert two.post("/pause?mode=keep").status_code == 200
    refusal = two.post("/sleep?level=1&mode=keep")
    assert refusal.status_code == 500 and "no memory to lock" in refusal.text
    assert [one.level for one in two.engine.replicas] == [0, 0]
    assert two.post("/resume").status_code == 200
    if refused == "PrepareSleep":
        with readers_of(two, 0):
            assert two.post("/sleep?level=1").status_code == 500  # mode=abort
            assert [one.level for one in two.engine.replicas] == [-1, -1]
            assert two.metric("num_requests_running", engine="0") == 1, "it hasn't been ended"
    two.wait_idle()
    assert all(ask(two, "hello", rank).status_code == 200 for rank in (0, 1))


def test_a_call_names_an_engine_that_hangs_and_leaves_the_others_alone(
    two: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two.engine.replicas
    stall = stretched(1)

    def up() -> list[float]:
        time.sleep(0.1)  # an answer takes a tenth of that to make and to read
        families = text_string_to_metric_families(two.get("/metrics").text)
        return [one.value for family in families if family.name == "pagerunner:engine_up" for one in family.samples]

    for one in (first, second):
        monkeypatch.setattr(one, "_stall_seconds", stall)
    os.kill(second.client.pid, signal.SIGSTOP)
    try:
        answer = two.post("/pause")
        said = f"The process of engine 1 of 2 has not answered a call for {stall:g} seconds"
        assert answer.status_code == 503 and said in answer.text
        until(lambda: second.fault)
        began = time.monotonic()
        answer = two.post("/reset_prefix_cache")
        assert answer.status_code == 503 and "engine 1 of 2 has given no sign of life for" in answer.text
        assert time.monotonic() - began < stall, "it is known to hang"
        assert two.get("/is_paused").status_code == 503 and first.level < 0
        health = two.get("/health")
        said = "The process of engine 1 of 2 has given no sign of life for "
        assert health.status_code == 200 and said in health.json()["lost"]["1"] and "0" not in health.json()["lost"]
        assert all(ask(two, [40 + number]).status_code == 200 for number in range(3)), "the other one serves"
        refused = ask(two, "hello", 1)
        assert refused.status_code == 503 and said in refused.json()["error"]["message"]
        until(lambda: up() == [1, 0])
    finally:
        os.kill(second.client.pid, signal.SIGCONT)
    until(lambda: not second.fault)
    until(lambda: up() == [1, 1])
    assert two.get("/health").content == b"" and ask(two, "hello", 1).status_code == 200
    assert two.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.days(3)
def test_an_engine_that_can_not_come_up_is_the_servers_error(text_side: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_options(monkeypatch, start="checkpoint_error")
    args = EngineArgs(model=str(text_side), data_parallel_size=2)
    with pytest.raises(CheckpointError, match="is truncated"), running_server(args):
        pass


@pytest.mark.days(3)
def test_two_real_engines_answer_alike(tmp_path: Path) -> None:
    args = EngineArgs(
        model=str(demo_path()),
        device="cpu",
        data_parallel_size=2,
        max_model_len=512,
        max_num_seqs=4,
        kv_events_config=events_at(tmp_path),
    )
    with running_server(args, core_factory=DEFAULT_FACTORY) as server:
        body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
        texts = [
            server.post("/v1/completions", body, headers={"X-data-parallel-rank": str(rank)}).json()["choices"][0][
                "text"
            ]
            for rank in (0, 1)
        ]
        assert texts[0] == texts[1] and texts[0]
        plans = [server.get(f"/memory?engine={engine}").json()["plan"] for engine in (0, 1)]
        assert plans[0] == plans[1], "each has half of the memory, and no more"
        prompt = list(range(10, 50))
        assert ask(server, prompt, 1).status_code == 200
        assert cached(tmp_path, prompt) == [0, 32]


@pytest.mark.days(3)
def test_a_rank_of_one_of_two_engines_is_killed_and_the_other_one_serves() -> None:
    args = EngineArgs(
        model=str(demo_path()),
        device="cpu",
        data_parallel_size=2,
        tensor_parallel_size=2,
        max_model_len=2048,
        max_num_seqs=4,
        num_gpu_blocks_override=640,
    )
    with running_server(args, core_factory=DEFAULT_FACTORY) as server:
        ranks = [children_of(replica.client.pid, b"engine.rank") for replica in server.engine.replicas]
        assert list(map(len, ranks)) == [2, 2]
        texts = [ask(server, "Once upon a time", rank, temperature=0).json()["choices"][0]["text"] for rank in (0, 1)]
        assert texts[0] == texts[1] and texts[0]
        streams = readers(server.url, 4, prompt="abc", max_tokens=200, extra_body={"ignore_eos": True})
        os.kill(ranks[1][0], signal.SIGKILL)
        for reader in streams:
            reader.join(LONG)
        ended = [str(reader.error) for reader in streams if reader.error is not None]
        assert len(ended) == 2 and all(re.search(r"[Ee]ngine 1 of 2.*Rank [01] of 2", said) for said in ended), ended
        assert sum(reader.reason == "length" for reader in streams) == 2
        until(lambda: not any(map(is_alive, ranks[1])))
        assert server.get("/health").status_code == 200
        assert all(ask(server, [40 + number]).status_code == 200 for number in range(4))
        assert ask(server, "hello", 1).status_code == 503


@pytest.mark.days(3)
def test_teams_of_ranks_are_asked_for_and_shown_as_engines(tmp_path: Path) -> None:
    """Attention has two engines' pages and requests, and experts are divided between them."""
    model = make_window_checkpoint(tmp_path, "qwen3_moe")
    args = EngineArgs(
        model=str(model),
        device="cpu",
        data_parallel_size=2,
        enable_expert_parallel=True,
        max_model_len=96,
        max_num_seqs=4,
        skip_tokenizer_init=True,
        kv_events_config=events_at(tmp_path),
    )
    with running_server(args, core_factory=DEFAULT_FACTORY) as server:
        for rank, count in ((0, 1), (1, 3)):
            for number in range(count):
                assert ask(server, [40 + number, 50], rank).status_code == 200
        assert "must be in [0, 2)" in ask(server, [40], 2).text
        server.wait_idle()
        until(lambda: server.metric("prefix_cache_queries_total", engine="1") == 6)
        assert server.metric("prefix_cache_queries_total", engine="0") == 2
        for engine in (0, 1):
            assert server.get(f"/memory?engine={engine}").json()["state"]["requests"] == []
            with httpx.stream("GET", f"{server.url}/ui/live?engine={engine}", timeout=LONG) as stream:
                frame = json.loads(next(stream.iter_lines()).removeprefix("data: "))
            assert frame["engines"] == [2, engine]
            assert frame["stats"]["prefix_queries_total"] == (2, 6)[engine]
        prompt = list(range(10, 50))
        assert ask(server, prompt, 1).status_code == 200
        assert cached(tmp_path, prompt) == [0, 32]
        [replica] = server.engine.replicas
        os.kill(replica.client.pid, signal.SIGKILL)
        until(lambda: server.get("/health").status_code == 503)
        text = server.get("/metrics").text
        assert all(f'pagerunner:engine_up{{engine="{engine}",model_name="tiny"}} 0.0' in text for engine in (0, 1))


def events_at(directory: Path) -> dict[str, Any]:
    """Each engine and each team publishes at a path of its own."""
    ends = {"endpoint": f"ipc://{directory}/kv", "replay_endpoint": f"ipc://{directory}/replay"}
    return {"enable_kv_cache_events": True, **ends}


def cached(directory: Path, prompt: list[int]) -> list[int]:
    """How much of a prompt the readers of both engines believe to be cached."""
    found = []
    for rank, suffix in enumerate(("", "_dp1")):
        reader = Router(f"ipc://{directory}/kv{suffix}", f"ipc://{directory}/replay{suffix}")
        reader.ask()
        reader.close()
        assert reader.rank in (rank, -1)
        found.append(reader.finds(prompt))
    return found
