"""The disk tier of several ranks: each has its part of a page in a directory of its own, and a page counts if all ranks have it."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable
from math import isinf
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine.test_disk_tier import PROMPTS, engine
from engine.test_host_tier import run
from helpers.families import MAKERS
from helpers.once import made_once
from helpers.patience import until
from pagerunner import LLM
from pagerunner.engine.core.executors.pages import RanksStore
from pagerunner.engine.worker import orders
from pagerunner.errors import ConfigError, EngineDeadError
from pagerunner.tiers.stats import DiskStats, StoreStats

pytest.importorskip("transformers")
TWO = {"tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    return made_once(tmp_path_factory, MAKERS)


def ready(llm: LLM) -> LLM:
    """Once the core knows that the ranks' host memory can be used: what comes before is computed."""
    scheduler: Any = llm._core._scheduler
    host = getattr(scheduler, "teams", [scheduler])[0].tiers.host
    until(lambda: llm._core._executor.host_ready >= host.num_bytes)
    return llm


def settled(llm: LLM) -> DiskStats:
    """The disk's figures when nothing is under way any more, and nothing in use."""
    scheduler: Any = llm._core._scheduler
    while llm._core.has_work:  # stores to host memory, which writes follow
        llm._core.step()
    for team in getattr(scheduler, "teams", [scheduler]):
        until(lambda team=team: team.tiers.settle() or not team.tiers.below._writes)
        team.manager.check_integrity()
        assert not any(team.manager.pool.used) and not any(team.tiers.host.pool.used) and not team.tiers.busy
    disk = llm.stats().tier.disk
    assert isinstance(disk, DiskStats)
    return disk


def kill(llm: LLM, rank: int) -> None:
    """Kill a rank. The engine ends with it, and says so."""
    os.kill(process(llm, rank), signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=f"Rank {rank} of 2"):
        run(llm, PROMPTS)


def process(llm: LLM, rank: int) -> int:
    executor: Any = llm._core._executor
    return int(executor._ranks.watch._processes[rank].pid)


def news(*ended: tuple[int, list[bool]], there: str = "", gone: str = "", clears: int = 0, **stats: Any) -> orders.Kept:
    names = [[(0, key.encode()) for key in keys] for keys in (there, gone)]
    return orders.Kept(0, [*ended], *names, StoreStats(**{"read_rate": 1e6} | stats), "read_rate" not in stats, clears)


def test_ranks_have_what_all_of_them_have() -> None:
    sent: list[orders.OfPages] = []
    store = RanksStore(2, sent.append)
    keys = [b"a", b"b", b"c"]
    store.take(0, news(there="abc"))
    assert store.find(0, keys) == [False] * 3 and isinf(store.seconds(1)), "rank 1 has said nothing"
    store.take(1, news(there="bc", read_rate=5e5))
    assert isinf(store.seconds(1)), "it doesn't read"
    store.take(1, news(gone="c"))
    assert store.find(0, keys) == [False, True, False] and store.find(1, keys) == [False] * 3
    store.read(7, [(0, b"b", range(64, 96)), (0, b"a", range(32))])
    assert sent == [orders.MovePages(7, True, [(0, b"b", 64), (0, b"a", 0)])]
    assert store.seconds(36) == pytest.approx(1e-4)
    store.take(1, news((7, [True, True])))
    assert store.ended() == []
    store.take(0, news((7, [True, False])))
    assert store.ended() == [(7, [True, False])] and store.ended() == []
    assert store.seconds(100) == pytest.approx(1e-4)
    store.clear()
    store.take(0, news(there="a"))
    store.take(1, news(there="a", clears=1))
    assert store.find(0, keys) == [False] * 3, "rank 0 said so before it was cleared"
    store.take(0, news(there="ab", clears=1))
    assert store.find(0, keys) == [True, False, False] and store.stats().pages == 1
    store.forget(0, [b"a"])
    assert store.find(0, keys) == [False] * 3 and store.stats().pages == 0
    assert sent[1:] == [orders.ClearPages(1), orders.ForgetPages(0, [b"a"])]
    store.take(1, news(clears=1, read_only="full", reads=3))
    store.write(8, [(0, b"d", range(8))])
    assert store.ended() == [(8, [False])] and len(sent) == 3
    stats = store.stats()
    assert (stats.read_only, stats.skipped, stats.reads, stats.read_rate) == ("rank 1: full", 1, 3, 2e6)


@pytest.mark.days(4)
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("family", "ways"),
    [
        ("qwen3_next", TWO),
        ("gpt_oss", {"pipeline_parallel_size": 2}),
        ("qwen3_moe", {"data_parallel_size": 2, "enable_expert_parallel": True}),
    ],
)
def test_prompts_are_warm_after_a_restart(
    checkpoint: Callable[[str], str], tmp_path: Path, family: str, ways: dict[str, Any]
) -> None:
    path = checkpoint(family)
    wanted, _ = run(engine(path), PROMPTS)
    first = ready(engine(path, tmp_path, **ways))
    assert run(first, PROMPTS)[0] == wanted
    pages = settled(first).pages
    kill(first, 0)
    again = ready(engine(path, tmp_path, **ways))
    tokens, cached = run(again, PROMPTS)
    disk = settled(again)
    assert tokens == wanted and all(cached)
    assert disk.hits == sum(cached) and disk.pages == pages
    holders = 1 if "data_parallel_size" in ways else 2
    assert (disk.reads, disk.failures, disk.writes) == (holders * pages, 0, 0)


@pytest.mark.days(4)
@pytest.mark.usefixtures("forked")
def test_what_one_rank_lacks_is_computed(checkpoint: Callable[[str], str], tmp_path: Path) -> None:
    path = checkpoint("qwen3")
    wanted, _ = run(engine(path), PROMPTS)
    full = ready(engine(path, tmp_path, **TWO))
    resource.prlimit(process(full, 1), resource.RLIMIT_FSIZE, (0, 0))  # a full disk
    assert run(full, PROMPTS)[0] == wanted
    disk = settled(full)
    assert disk.pages == 0 and disk.read_only.startswith("rank 1: ")
    skipped, written = disk.skipped, disk.writes
    more = [[3, *prompt] for prompt in PROMPTS]
    run(full, more)
    disk = settled(full)
    assert disk.skipped > skipped and disk.writes == written, "one rank alone doesn't write"
    kill(full, 1)

    again = ready(engine(path, tmp_path, **TWO))
    assert run(again, PROMPTS) == (wanted, [0] * 4)
    assert settled(again).pages == 34
    kill(again, 0)
    for file in (tmp_path / "rank-1-of-2" / "pagerunner-pages").glob("*.pages"):
        data = bytearray(file.read_bytes())
        for place in range(8192 + 100, len(data), 3 * 8192):
            data[place] ^= 1
        file.write_bytes(data)
    torn = ready(engine(path, tmp_path, **TWO))
    tokens, cached = run(torn, PROMPTS)
    assert tokens == wanted and 0 < sum(cached) < 544
    disk = settled(torn)
    assert disk.failures > 0 and disk.writes > 0, "what was wrong is written anew"
    assert disk.pages == 34

    other = engine(path, tmp_path)
    assert run(other, PROMPTS) == (wanted, [0] * 4), "one rank has another directory"


@pytest.mark.days(4)
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("ways", [TWO, {"pipeline_parallel_size": 2}])
def test_a_fine_tune_of_one_ranks_weights_finds_nothing_of_its_parent(
    checkpoint: Callable[[str], str], tmp_path: Path, ways: dict[str, Any]
) -> None:
    path, child, disk = checkpoint("qwen3"), str(tmp_path / "child"), tmp_path / "disk"
    shutil.copytree(path, child)
    for file in Path(child).glob("*.safetensors"):
        weights = load_file(file)
        for name in weights:
            if "embed_tokens" in name:  # rows of rank 0, and of the first stage
                half = len(weights[name]) // 2
                weights[name][:half] = weights[name][:half].flip(0)
        save_file(weights, file, metadata={"format": "pt"})
    disk.mkdir()
    wanted, _ = run(engine(child), PROMPTS)
    parent = ready(engine(path, disk, **ways))
    assert run(parent, PROMPTS)[0] != wanted
    settled(parent)
    kill(parent, 0)
    first = ready(engine(child, disk, **ways))
    assert run(first, PROMPTS) == (wanted, [0] * 4)
    settled(first)
    kill(first, 0)
    again = ready(engine(child, disk, **ways))
    tokens, cached = run(again, PROMPTS)
    assert tokens == wanted and all(cached)


def test_each_rank_has_its_share_of_the_bytes(checkpoint: Callable[[str], str], tmp_path: Path) -> None:
    tier = {"type": "fs", "root_dir": str(tmp_path), "max_bytes": 10_000}
    extra = {"cpu_bytes_to_use": 60_000_000, "secondary_tiers": [tier]}
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    with pytest.raises(
        ConfigError, match=r"max_bytes=5,000 .* too small.* Each of 2 ranks has its share of max_bytes=10,000"
    ):
        engine(checkpoint("qwen3"), kv_transfer_config=config, **TWO)
