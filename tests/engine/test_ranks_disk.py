"""The disk tier of several ranks: each has its part of a page in a directory of its own, and a page counts if all ranks have it."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from math import isinf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine.test_disk_tier import PROMPTS, engine
from engine.test_host_tier import run
from helpers.families import MAKERS
from helpers.once import made_once
from helpers.patience import LONG, patient, until
from helpers.recount import recount
from pagerunner import LLM
from pagerunner.config import DiskTierConfig
from pagerunner.engine.core.executors import pages
from pagerunner.engine.core.executors import process as executor
from pagerunner.engine.core.executors.pages import RanksStore
from pagerunner.engine.startup import disk_tier
from pagerunner.engine.worker import orders
from pagerunner.engine.worker.pages import RankPages
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
        recount(team.manager)
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
    assert store.find(0, keys) == [True, False, False]
    assert (store.stats().pages, store.stats().pages_of_some) == (1, 1), "nobody finds b, which one rank has"
    store.forget(0, [b"a"])
    assert store.find(0, keys) == [False] * 3 and store.stats().pages == 0
    assert sent[1:] == [orders.ClearPages(1), orders.ForgetPages(0, [b"a"])]
    store.take(1, news(clears=1, read_only="full", reads=3))
    store.write(8, [(0, b"d", range(8))])
    assert store.ended() == [(8, [False])] and len(sent) == 3
    stats = store.stats()
    assert (stats.read_only, stats.skipped, stats.reads, stats.read_rate) == ("rank 1: full", 1, 3, 2e6)


@pytest.mark.parametrize("meanwhile", ["nothing", "a reset", "an interrupt"])
def test_nothing_is_written_for_a_while_when_one_rank_has_no_room(
    meanwhile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[orders.OfPages] = []
    store = RanksStore(2, sent.append)

    def write(number: int, *outcomes: list[bool]) -> bool:
        """Whether the ranks were asked."""
        before = len(sent)
        store.write(number, [(0, key, range(8)) for key in (b"a", b"b")])
        if (asked := len(sent) > before) and number == 1:
            {"a reset": store.clear, "an interrupt": store.cancel}.get(meanwhile, lambda: None)()
        for rank, ended in enumerate(outcomes if asked else []):
            store.take(rank, news((number, ended)))
        return asked

    assert write(0, [True, False], [True, False]), "b is too long for both"
    assert write(1, [True, True], [True, False])
    assert store.ended() == [(0, [True, False]), (1, [True, False])]
    clock = time.monotonic
    paused = meanwhile == "nothing"
    assert write(2, [True, True], [True, True]) != paused
    assert store.ended() == [(2, [not paused] * 2)] and store.stats().skipped == 2 * paused
    monkeypatch.setattr(time, "monotonic", lambda: clock() + pages._PAUSE_SECONDS)
    assert write(3, [True, True], [True, True]) and store.ended() == [(3, [True, True])]


@pytest.mark.parametrize("given", [0, 1, 2])
def test_an_interrupt_between_two_ranks_leaves_no_order_that_never_ends(given: int) -> None:
    """It comes when so many of two ranks have an order. The books wait for all of them to end it, then."""
    ways: list[list[orders.OfPages]] = [[], []]
    cut: list[int] = [given]

    def send(order: orders.OfPages) -> None:
        for rank, way in enumerate(ways):
            if cut == [rank]:
                raise KeyboardInterrupt
            way.append(order)
        if cut == [2]:
            raise KeyboardInterrupt

    store = RanksStore(2, send)
    disk = Recorder()
    ranks = [RankPages(rank, disk, memoryview(bytes(64)), [32], threading.Event()) for rank in range(2)]  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        store.read(0, [(0, b"a", range(32, 64))])
    cut.clear()
    store.cancel()
    for rank, way in zip(ranks, ways, strict=True):
        for order in way:
            rank.do(order)
    assert disk.reads == [0, 0], "each rank reads once"
    store.take(0, news((0, [True])))
    assert store.ended() == []
    store.take(1, news((0, [True])))
    assert store.ended() == [(0, [True])]


def test_an_interrupt_before_an_order_is_noted_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    sent: list[orders.OfPages] = []
    store = RanksStore(2, sent.append)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pages, "_Begun", interrupted)
        store.read(0, [(0, b"a", range(32))])
    for _ in range(2):
        store.cancel()
    assert store.ended() == [(0, [False])] and sent == [orders.CancelPages()] * 2


def test_a_rank_goes_on_while_its_store_takes_an_order_and_cancels_at_once_what_has_begun() -> None:
    disk = Recorder(busy=threading.Event())
    rank = RankPages(0, disk, memoryview(bytes(64)), [32], threading.Event())  # type: ignore[arg-type]
    for number in range(2):
        rank.put(orders.MovePages(number, True, [(0, b"a", 0)]))
    said: list[orders.Done] = []
    threading.Thread(target=rank.run, args=(said.append,), daemon=True).start()
    until(lambda: disk.reads == [0])
    rank.put(orders.CancelPages())
    assert disk.cancelled == [1], "as many reads had begun"
    rank.put(orders.MovePages(2, True, [(0, b"a", 0)]))
    assert disk.busy is not None
    disk.busy.set()
    until(lambda: disk.reads == [0, 1, 2])
    assert disk.cancelled == [1, 2], "what waited for the thread is cancelled, too"
    rank.put(orders.ClosePages(7))
    until(lambda: said == [orders.Done(0, 7)])
    assert disk.closed


class Recorder:
    """A store that notes what it is to read, and how much that was when it was cancelled. While it is `busy` a read takes long to begin."""

    def __init__(self, busy: threading.Event | None = None) -> None:
        self.reads: list[int] = []
        self.cancelled: list[int] = []
        self.busy = busy
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def read(self, number: int, pages: object) -> None:
        self.reads.append(number)
        assert self.busy is None or self.busy.wait(LONG)

    def cancel(self) -> None:
        self.cancelled.append(len(self.reads))


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


def sizes(root: Path) -> list[int]:
    """Bytes of each segment. One that is being written has its whole room, and one that is sealed what it needs."""
    return [file.stat().st_size for file in root.glob("rank-*/pagerunner-pages/*.pages")]


@pytest.mark.days(4)
@pytest.mark.usefixtures("forked")
def test_ranks_that_are_closed_seal_what_they_have_written(
    checkpoint: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint("qwen3")
    first = ready(engine(path, tmp_path, **TWO))
    wanted, _ = run(first, PROMPTS)
    settled(first)
    [room] = {*sizes(tmp_path)}
    ranks = [process(first, rank) for rank in range(2)]
    del first  # which nothing of the disk's holds
    gc.collect()
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert max(sizes(tmp_path)) < room
    again = ready(engine(path, tmp_path, **TWO))
    tokens, cached = run(again, PROMPTS)
    assert tokens == wanted and all(cached)
    ranks = [process(again, rank) for rank in range(2)]
    os.kill(ranks[1], signal.SIGSTOP)  # its disk hangs, for example
    monkeypatch.setattr(executor, "CLOSE_SECONDS", 0.5)
    began = time.monotonic()
    again._core._executor.close()
    assert time.monotonic() - began < patient(10)
    for pid in ranks:
        assert not Path(f"/proc/{pid}").exists()


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


@pytest.mark.days(4)
@pytest.mark.usefixtures("forked")
def test_the_disk_is_used_with_the_weights_of_the_start_alone(checkpoint: Callable[[str], str], tmp_path: Path) -> None:
    path, disk = tmp_path / "model", tmp_path / "disk"
    shutil.copytree(checkpoint("qwen3"), path)
    [file] = path.glob("*.safetensors")
    parent, child = file.read_bytes(), load_file(file)
    child["model.embed_tokens.weight"][:9] = 0  # rows of rank 0
    disk.mkdir()
    llm = ready(engine(str(path), disk, enable_sleep_mode=True, **TWO))
    wanted, _ = run(llm, PROMPTS)
    settled(llm)

    def again() -> tuple[list[list[int]], list[int]]:
        llm.sleep(level=2)
        llm.wake_up()
        return run(llm, PROMPTS)

    tokens, cached = again()
    assert tokens == wanted and all(cached), "an unchanged checkpoint"
    save_file(child, file, metadata={"format": "pt"})
    tokens, cached = again()
    assert tokens != wanted and not any(cached)
    file.write_bytes(parent)
    tokens, cached = again()
    assert tokens == wanted and all(cached)
    settled(llm)


@pytest.mark.parametrize(("max_bytes", "of_share"), [(10_000, True), (10_000_000, False)])
def test_a_ranks_share_is_named_where_it_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int, of_share: bool
) -> None:
    monkeypatch.setattr(disk_tier, "pages_fingerprint", lambda *_: b"f" * 32)
    (tmp_path / "file").touch()
    config = SimpleNamespace(num_ranks=2, disk_tier=DiskTierConfig(root_dir=f"{tmp_path}/file", max_bytes=max_bytes))
    plan: Any = SimpleNamespace(groups=[SimpleNamespace(page_bytes=6_000)])
    resolved: Any = SimpleNamespace(config=config)
    with pytest.raises(ConfigError, match=r"too small" if of_share else "can't be used") as refused:
        disk_tier.open_store(resolved, plan, "", 1)
    assert ("share of max_bytes" in str(refused.value)) == of_share


def test_each_rank_has_its_share_of_the_bytes(checkpoint: Callable[[str], str], tmp_path: Path) -> None:
    tier = {"type": "fs", "root_dir": str(tmp_path), "max_bytes": 10_000}
    extra = {"cpu_bytes_to_use": 60_000_000, "secondary_tiers": [tier]}
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    with pytest.raises(
        ConfigError, match=r"max_bytes=5,000 .* too small.* Each of 2 ranks has its share of max_bytes=10,000"
    ):
        engine(checkpoint("qwen3"), kv_transfer_config=config, **TWO)
