"""A server whose engine has several ranks: answers are those of one, and a rank's end reaches every client with its own sentence."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from typing import Any

import httpx
import pytest

from helpers import faulty_ranks
from helpers.effort import TEST_DAY, share_of_the_day
from helpers.patience import LONG, patient, until
from helpers.processes import children_of, is_alive
from helpers.serving import RunningServer, readers, running_server
from pagerunner.config import EngineArgs
from pagerunner.demo import demo_path
from pagerunner.engine.core import client
from pagerunner.engine.core.client import DEFAULT_FACTORY
from pagerunner.engine.frontend.async_engine import AsyncEngine
from pagerunner.errors import CapacityError
from pagerunner.types import SamplingParams

pytestmark = [pytest.mark.days(3), pytest.mark.usefixtures("forked")]  # most of them start processes

WAY = {("tensor_parallel_size", "pipeline_parallel_size")[TEST_DAY // 6 % 2]: 2}
ARGS = EngineArgs(model=str(demo_path()), device="cpu", max_num_seqs=8, num_gpu_blocks_override=640, **WAY)


def ranks_of(server: RunningServer) -> list[int]:
    """Processes of ranks that the server's core has started."""
    return ranks_under(server.engine.replicas[0].client.pid)


def ranks_under(pid: int) -> list[int]:
    """Processes of ranks that a core has started."""
    return children_of(pid, b"engine.rank")


def gone(pid: int) -> bool:
    return not is_alive(pid)


HOW = ["killed", "killed while nothing runs", "raises", "hangs"]


@pytest.mark.parametrize("how", [HOW[number] for number in share_of_the_day(4, 2)])
def test_when_a_rank_fails_every_client_hears_why_and_no_process_is_left(
    how: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGERUNNER_LIMIT_RANK_SECONDS", "3")
    with running_server(ARGS, core_factory=faulty_ranks.FACTORY) as server:
        pids, core = sorted(ranks_of(server)), server.engine.replicas[0].client.pid
        rank = pids[1]
        idle = how == "killed while nothing runs"
        streams = [] if idle else readers(server.url, 3, prompt="abc", max_tokens=1900, extra_body={"ignore_eos": True})
        reason, limit = "SIGKILL", 1.0
        began = time.monotonic()
        if how.startswith("killed"):
            os.kill(rank, signal.SIGKILL)
        else:
            token, reason, limit = {
                "raises": (faulty_ranks.RAISE, "Rank 1 of 2: ValueError: a planted error", 2.0),
                "hangs": (faulty_ranks.HANG, "Rank 1 of 2 hangs", 6.0),
            }[how]
            response = server.post("/v1/completions", {"prompt": [token], "max_tokens": 1})
            assert response.status_code == 503 and reason in response.json()["error"]["message"]
        until(lambda: server.get("/health").status_code == 503)
        assert time.monotonic() - began < patient(limit)
        for reader in streams:
            reader.join(LONG)
            assert reason in str(reader.error) and "of 2" in str(reader.error)
        for response in (server.get("/health"), server.post("/v1/completions", {"prompt": "a"})):
            assert response.status_code == 503 and reason in response.json()["error"]["message"]
        until(lambda: all(map(gone, (*pids, core))))
        log = capfd.readouterr().err
        assert how == "raises" or "Traceback" not in log, "the sentence says it"
        assert how != "raises" or re.search(r"^\[rank 1\] .* ERROR .*\nTraceback ", log, re.MULTILINE), log


def test_a_rank_that_can_not_come_up_is_the_servers_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faulty_ranks.VARIABLE, "load raises")
    with (
        pytest.raises(CapacityError, match=r"Rank 1 of 2: the weights don't fit\."),
        running_server(ARGS, core_factory=faulty_ranks.FACTORY),
    ):
        pass


def test_a_rank_that_was_stopped_while_it_loads_ends_with_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can't see that its core is gone, and would stay with all the memory that it has."""
    monkeypatch.setenv(faulty_ranks.VARIABLE, "all load hangs")
    ranks: list[int] = []
    cores: list[int] = []
    spawn = client._spawn

    def spawned(*given: Any) -> Any:
        process = spawn(*given)
        cores.append(process.pid)
        return process

    async def give_up() -> None:
        loading = asyncio.create_task(client.launch_core(ARGS, faulty_ranks.FACTORY))
        while not cores or len(ranks_under(cores[0])) < 2:
            await asyncio.sleep(0.05)
        ranks.extend(ranks_under(cores[0]))
        os.kill(ranks[1], signal.SIGSTOP)
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)

    monkeypatch.setattr(client, "_spawn", spawned)
    asyncio.run(give_up())
    try:
        until(lambda: all(map(gone, (*ranks, *cores))))
    finally:
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_rank_that_was_stopped_while_a_step_runs_ends_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core waits for it, and is ended itself. A rank that is stopped doesn't see that."""
    # So that ranks are started, each in a session of its own: what is forked shares one, and the kernel ends its stopped processes.
    monkeypatch.setenv("OMP_DYNAMIC", "false")

    async def generate_and_close() -> list[int]:
        engine = await AsyncEngine.from_args(ARGS)
        core = engine.replicas[0].client
        ranks = ranks_under(core.pid)
        answer = engine.generate("a", SamplingParams(max_tokens=1900, ignore_eos=True), "0")
        await anext(answer)
        os.kill(ranks[1], signal.SIGSTOP)
        await asyncio.sleep(0.2)  # until a step waits for it, in which the core hears nothing
        await core.close(timeout=0.2)
        await engine.shutdown()
        return ranks

    ranks = asyncio.run(generate_and_close())
    try:
        assert len(ranks) == 2
        until(lambda: all(map(gone, ranks)), patient(2))
    finally:
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_answers_sleep_and_the_end_of_a_server_with_ranks() -> None:
    body: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "seed": 3, "n": 1}
    found = []
    for ranks in (1, 2):
        args = EngineArgs(
            model=ARGS.model,
            device="cpu",
            num_gpu_blocks_override=64,
            max_model_len=512,
            tensor_parallel_size=ranks,
            enable_sleep_mode=True,
        )
        with running_server(args, core_factory=DEFAULT_FACTORY) as server:
            first = server.post("/v1/completions", body).json()["choices"][0]["text"]
            for level in (1, 2):
                assert httpx.post(f"{server.url}/sleep?level={level}", timeout=LONG).status_code == 200
                assert httpx.post(f"{server.url}/wake_up", timeout=LONG).status_code == 200
            assert server.post("/v1/completions", body).json()["choices"][0]["text"] == first
            others = ranks_of(server)
            assert len(others) == (ranks if ranks > 1 else 0)
        until(lambda pids=others: all(map(gone, pids)))  # type: ignore[misc]
        found.append(first)
    assert found[0] == found[1]
