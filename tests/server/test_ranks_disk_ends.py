"""Ranks that write pages to their disks end or sleep within a bound, whatever ends the engine, and what all have written is found again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from helpers import faulty_ranks
from helpers.patience import LONG, patient, until
from helpers.serving import RunningServer, running_server
from server.test_parallel import ARGS, gone, ranks_of

pytestmark = [pytest.mark.days(4), pytest.mark.usefixtures("forked")]
PROMPT = {"prompt": [5 + number % 200 for number in range(1200)], "max_tokens": 1, "temperature": 0}
SHORT = {"prompt": "a", "max_tokens": 1}
ROOM = 64_000_000 // 2 // 8
"""Bytes of a segment that is being written."""


def with_disk(root: Path) -> Any:
    tier = {"type": "fs", "root_dir": str(root), "max_bytes": 64_000_000}
    tier["n_write_threads"] = 1  # so those of a prompt's pages that are there when ranks are killed are its first
    extra = {"cpu_bytes_to_use": 60_000_000, "secondary_tiers": [tier]}
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return msgspec.structs.replace(
        ARGS, tensor_parallel_size=2, pipeline_parallel_size=1, kv_transfer_config=config, num_gpu_blocks_override=640
    )


def tier(server: RunningServer) -> Any:
    return server.engine.stats.tier


def ask(server: RunningServer) -> tuple[str, int, int]:
    """The answer when host memory is ready, how many of the prompt's tokens came from a tier, and the pages that all disks had before."""
    until(lambda: server.post("/v1/completions", SHORT) and tier(server).ready_bytes)
    pages = tier(server).disk.pages
    answer = server.post("/v1/completions", PROMPT).json()
    return answer["choices"][0]["text"], (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0), pages


def wait_for(server: RunningServer, what: str) -> None:
    """Until the disks have written: "writes" are of any rank, "pages" of all."""
    until(lambda: server.post("/v1/completions", SHORT) and getattr(tier(server).disk, what))


def sizes(root: Path) -> list[int]:
    return [file.stat().st_size for file in root.glob("rank-*/pagerunner-pages/*.pages")]


@pytest.mark.parametrize("how", ["stopped", "a rank is killed", "the core is killed"])
@pytest.mark.parametrize("fault", ["disk slow", "disk hangs"])
def test_ranks_end_while_one_writes(how: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = with_disk(tmp_path)
    with monkeypatch.context() as planted:
        planted.setenv(faulty_ranks.VARIABLE, fault)
        with running_server(args, core_factory=faulty_ranks.FACTORY) as server:
            wanted, *before = ask(server)
            assert before == [0, 0]
            wait_for(server, "pages" if how != "stopped" and fault == "disk slow" else "writes")
            *ranks, core = pids = [*ranks_of(server), server.engine.replicas[0].client.pid]
            began = time.monotonic()
            if how != "stopped":
                os.kill(ranks[1] if how == "a rank is killed" else core, signal.SIGKILL)
        until(lambda: all(map(gone, pids)))
        assert time.monotonic() - began < patient(10 if how == "stopped" else 3)
    if how == "stopped":
        assert max(sizes(tmp_path)) < ROOM, "segments are sealed, also of the rank whose disk is slow"
    with running_server(args, core_factory=faulty_ranks.READS) as server:
        answer, cached, pages = ask(server)
        assert answer == wanted and cached == 16 * pages
        assert bool(pages) == (fault == "disk slow"), "a page counts if all ranks have it"


def test_ranks_sleep_while_one_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faulty_ranks.VARIABLE, "disk slow")
    args = msgspec.structs.replace(with_disk(tmp_path), enable_sleep_mode=True)
    with running_server(args, core_factory=faulty_ranks.FACTORY) as server:
        wanted, *_ = ask(server)
        wait_for(server, "writes")
        began = time.monotonic()
        assert httpx.post(f"{server.url}/sleep?level=2", timeout=LONG).status_code == 200
        assert time.monotonic() - began < patient(4), "what a rank has begun ends, and nothing else begins"
        assert httpx.post(f"{server.url}/wake_up", timeout=LONG).status_code == 200
        assert ask(server)[0] == wanted
