"""Pages on a disk: a prompt's pages outlive the engine, tokens are those of an engine without it, and other weights find nothing."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.test_host_tier import KINDS, nothing_held, run
from helpers.effort import by_days
from helpers.families import MAKERS
from helpers.once import made_once
from helpers.patience import until
from pagerunner import LLM
from pagerunner.config import EngineArgs
from pagerunner.engine.startup.kv_transfer import read_kv_transfer
from pagerunner.engine.startup.resolve import resolve
from pagerunner.errors import ConfigError
from pagerunner.tiers.disk import DiskStore

pytest.importorskip("transformers")
PROMPTS = [[(7 * i + 3 * j * (i + 1)) % 490 + 4 for j in range(130 + 8 * i)] for i in range(4)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    return made_once(tmp_path_factory, MAKERS)


def engine(path: str, root: Path | None = None, **options: Any) -> LLM:
    """An engine whose pages hold all prompts. With a root it has host memory and a disk, too."""
    limits = {
        "max_model_len": 256,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 64,
        "skip_tokenizer_init": True,
    } | options
    if root is not None:
        tiers = [{"type": "fs", "root_dir": str(root), "max_bytes": 64_000_000}]
        extra = {"cpu_bytes_to_use": 60_000_000, "secondary_tiers": tiers}
        limits["kv_transfer_config"] = {
            "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra,
        }  # fmt: skip
    plan = resolve(EngineArgs(model=path, device="cpu", kv_cache_memory_bytes=2_000_000, **limits)).plan
    return LLM(path, kv_cache_memory_bytes=8 * plan.request_bytes(256), use_tqdm=False, **limits)


def below(llm: LLM) -> Any:
    return llm._core._scheduler.tiers.below


def written(llm: LLM) -> int:
    """How many pages are on the disk when nothing is to be written any more."""
    until(lambda: below(llm).settle() or not below(llm)._writes)
    return int(llm.stats().tier.disk.pages)


@pytest.mark.days(2)
@pytest.mark.parametrize(("family", "dtype"), by_days(KINDS, ("auto", "fp8", "bfloat16")))
def test_prompts_are_warm_after_a_restart(
    checkpoint: Callable[[str], str], tmp_path: Path, family: str, dtype: str
) -> None:
    path = checkpoint(family)
    wanted, _ = run(engine(path, kv_cache_dtype=dtype), PROMPTS)
    first = engine(path, tmp_path, kv_cache_dtype=dtype)
    assert run(first, PROMPTS)[0] == wanted
    pages = written(first)
    memory = first.memory_state()["host"]["disk"]
    assert (memory["pages"], memory["waiting"], memory["read_only"]) == (pages, 0, "")
    nothing_held(first)
    shutil.copytree(tmp_path, tmp_path / "left")  # as a crash would leave it
    again = engine(path, tmp_path / "left", kv_cache_dtype=dtype)
    tokens, cached = run(again, PROMPTS)
    assert tokens == wanted
    assert all(cached), "pages come back from the disk"
    disk = again.stats().tier.disk
    assert again.memory_state()["host"]["disk"]["hits_total"] == disk.hits
    assert disk.hits == sum(cached) and disk.reads <= pages and disk.failures == 0 and disk.writes == 0
    nothing_held(again)


def test_a_fine_tune_finds_nothing_of_its_parent(checkpoint: Callable[[str], str], tmp_path: Path) -> None:
    path, root = Path(checkpoint("qwen3")), tmp_path / "kv"
    parent = engine(str(path), root)
    run(parent, PROMPTS)
    written(parent)
    nothing_held(parent)
    below(parent)._store.close()
    tuned = tmp_path / "tuned"
    shutil.copytree(path, tuned)
    data = bytearray((tuned / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 0x40  # of one number: training new tokens changes a few rows alone
    (tuned / "model.safetensors").write_bytes(data)
    for model, options, finds in (
        (path, {}, 4),
        (tuned, {}, 0),
        (path, {"kv_cache_dtype": "fp8"}, 0),
        (path, {"block_size": 32}, 0),
        (path, {"batch_invariant": True}, 0),  # what others computed may differ in its last bits
    ):
        tokens, cached = run(engine(str(model), root, **options), PROMPTS)
        assert sum(map(bool, cached)) == finds, (model, options)
        assert tokens == run(engine(str(model), **options), PROMPTS)[0]


def test_wrong_pages_cost_a_computation(checkpoint: Callable[[str], str], tmp_path: Path) -> None:
    path = checkpoint("qwen3")
    first = engine(path, tmp_path)
    wanted, _ = run(first, PROMPTS)
    written(first)
    below(first)._store.close()
    for file in (tmp_path / "pagerunner-pages").glob("*.pages"):
        data = bytearray(file.read_bytes())
        for place in range(8192 + 100, len(data), 5 * 8192):
            data[place] ^= 1
        file.write_bytes(data)
    again = engine(path, tmp_path)
    tokens, cached = run(again, PROMPTS)
    disk = again.stats().tier.disk
    assert tokens == wanted and disk.failures > 0
    assert 0 < sum(cached) < 544  # what is before a wrong page
    written(again)  # what was computed instead
    nothing_held(again)


def test_new_weights_and_resets_end_hits(checkpoint: Callable[[str], str], tmp_path: Path) -> None:
    path = checkpoint("qwen3")
    first = engine(path, tmp_path)
    wanted, _ = run(first, PROMPTS)
    written(first)
    llm = engine(path, tmp_path, enable_sleep_mode=True)
    assert llm.reset_prefix_cache()
    assert run(llm, PROMPTS[:1]) == (wanted[:1], [0])
    llm.sleep(level=1)
    llm.wake_up()
    assert run(llm, PROMPTS[:1]) == (wanted[:1], [128])  # from host memory
    llm.sleep(level=2)
    llm.wake_up()
    tokens, cached = run(llm, PROMPTS)
    assert tokens == wanted and cached == [128, 0, 0, 0], "the same weights: what was written since the reset"
    written(llm)
    nothing_held(llm)


def test_other_weights_do_not_use_the_disk_and_those_of_the_start_use_it_again(
    checkpoint: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(checkpoint("qwen3"), tmp_path, enable_sleep_mode=True)
    wanted, _ = run(llm, PROMPTS)
    written(llm)
    with monkeypatch.context() as others:
        others.setattr(llm._core._executor, "weights_digest", lambda: "other weights")
        llm.sleep(level=2)
        llm.wake_up()
        assert run(llm, PROMPTS) == (wanted, [0] * 4)
        assert below(llm).detached
        llm._core.recover([])
        assert run(llm, PROMPTS) == (wanted, [0] * 4)
    llm.sleep(level=2)
    llm.wake_up()
    tokens, cached = run(llm, PROMPTS)
    assert tokens == wanted and all(cached)
    nothing_held(llm)


def test_weights_are_summed_up_again_only_when_they_may_be_others(
    checkpoint: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(checkpoint("qwen3"), tmp_path, enable_sleep_mode=True)
    calls: list[str] = []
    monkeypatch.setattr(
        "pagerunner.engine.worker.weights.weights_digest", lambda tensors: calls.append("") or f"{len(calls)}"
    )
    known = llm._core._executor.weights_digest()
    llm.sleep(level=1)
    llm.wake_up()
    assert llm._core._executor.weights_digest() == known and not calls
    llm.sleep(level=2)
    llm.wake_up()
    assert llm._core._executor.weights_digest() == "1" == llm._core._executor.weights_digest()


def test_hits_are_tokens_that_were_used(checkpoint: Callable[[str], str], tmp_path: Path) -> None:
    first = engine(checkpoint("qwen3"), tmp_path)
    wanted, _ = run(first, PROMPTS)
    written(first)
    below(first)._store.close()
    llm = engine(checkpoint("qwen3"), tmp_path)
    llm._core._scheduler.tiers.rates.pays = lambda *_: False
    assert run(llm, PROMPTS[:1]) == (wanted[:1], [0])
    disk = llm.stats().tier.disk
    assert disk.reads and not disk.hits, "read, and then not loaded"
    nothing_held(llm)


def test_an_interrupt_does_not_wait_for_writes_that_have_not_begun(
    checkpoint: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, begun = DiskStore._write_page, list[float]()
    llm = engine(checkpoint("qwen3"), tmp_path)
    with monkeypatch.context() as slow:
        slow.setattr(DiskStore, "_write_page", lambda *given: begun.append(time.sleep(0.5)) or real(*given))
        wanted, _ = run(llm, PROMPTS)
        until(lambda: below(llm).settle() or below(llm)._writes)
        before = len(begun)
        llm._core.recover([])
        print(f"{len(begun) - before} of 32 pages in the meantime")
        assert len(begun) - before < 20
    assert run(llm, PROMPTS)[0] == wanted
    written(llm)
    nothing_held(llm)


def test_an_interrupted_engine_waits_for_its_disk_and_goes_on(checkpoint: Callable[[str], str], tmp_path: Path) -> None:
    path = checkpoint("qwen3")
    llm = engine(path, tmp_path)
    wanted, _ = run(llm, PROMPTS)
    before = below(llm)
    llm._core.recover([])
    assert below(llm) is not before and not before._writes
    assert run(llm, PROMPTS)[0] == wanted
    nothing_held(llm)


def _config(**extra: Any) -> dict[str, Any]:
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"secondary_tiers": [{"type": "obj"}]}, "type of secondary_tiers must be one of fs, got 'obj'"),
        ({"secondary_tiers": [{"type": "fs", "root_dir": "/x"}]}, "missing required field `max_bytes`.* An entry of type fs has"),
        ({"secondary_tiers": [{"type": "fs", "root_dir": "", "max_bytes": 9}]}, "root_dir of secondary_tiers must name a directory, got ''"),
        ({"secondary_tiers": [{"type": "fs", "root_dir": "/x", "max_bytes": 0}]}, "max_bytes of secondary_tiers must be from 1 to .*, got 0"),
        ({"secondary_tiers": [{"type": "fs", "root_dir": "/x", "max_bytes": 9, "locality": "x"}]}, "unknown field `locality`"),
        ({"secondary_tiers": [{"type": "fs", "root_dir": "/x", "max_bytes": 9}] * 2}, "2 entries; there can be one"),
        ({"spec_name": "TieringOffloadingSpec"}, "TieringOffloadingSpec needs secondary_tiers"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(extra: dict[str, Any], says: str) -> None:
    args = EngineArgs(model="m", kv_transfer_config=_config(cpu_bytes_to_use=10**9, **extra))
    with pytest.raises(ConfigError, match=says):
        read_kv_transfer(args)


def test_whole_numbers_may_be_written_as_floats() -> None:
    tier = {"type": "fs", "root_dir": "/x", "max_bytes": 1e9}
    found = read_kv_transfer(
        EngineArgs(model="m", kv_transfer_config=_config(cpu_bytes_to_use=3e7, secondary_tiers=[tier]))
    )
    assert found.host_bytes == 30_000_000 and found.disk is not None and found.disk.max_bytes == 10**9
    with pytest.raises(ConfigError, match="cpu_bytes_to_use"):
        read_kv_transfer(EngineArgs(model="m", kv_transfer_config=_config(cpu_bytes_to_use=3.5)))


def test_a_directory_that_cannot_be_is_refused_at_the_start(checkpoint: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="root_dir='.*file' of the disk tier can't be used"):
        engine(checkpoint("qwen3"), tmp_path / "file")


def test_of_more_prompts_than_have_room_in_host_memory_each_is_read_in_its_turn(
    checkpoint: Callable[[str], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [[(i * j) % 480 + 5 for j in range(130)] for i in range(1, 9)]
    path = checkpoint("qwen3")
    first = engine(path, tmp_path)
    wanted, _ = run(first, prompts)
    written(first)
    below(first)._store.close()
    second = engine(path, tmp_path)
    until(lambda: second._core._executor.host_ready >= second._core._scheduler.tiers.host.num_bytes)
    below(second)._store._stats.read_rate = 1e12  # so that reading always pays
    page_bytes = second._core.memory_plan.groups[0].page_bytes
    second._core._scheduler.tiers.host.num_bytes = int(2 * 3.2 * 8 * page_bytes)  # half of it has room for three
    assert run(second, prompts) == (wanted, [128] * 8)
    assert second.stats().tier.disk.given_up == 0
    second.reset_prefix_cache()
    third = engine(path, tmp_path)
    until(lambda: third._core._executor.host_ready >= third._core._scheduler.tiers.host.num_bytes)
    below(third)._store._stats.read_rate = 1e12
    third._core._scheduler.tiers.host.num_bytes = int(1.8 * 8 * page_bytes)  # half of it has no room even for one
    assert run(third, prompts[:2]) == (wanted[:2], [0] * 2)
    assert third.stats().tier.disk.given_up == 2
    assert sum("have no room in host memory and are computed" in line for line in caplog.messages) == 1


def test_an_idle_engine_says_that_what_was_written_is_used_no_more(
    checkpoint: Callable[[str], str], tmp_path: Path
) -> None:
    llm = engine(checkpoint("qwen3"), tmp_path)
    run(llm, PROMPTS[:2])
    while llm._core.has_work:
        llm._core.step()
    until(lambda: not any(group["in_use"] for group in llm.memory_state()["host"]["groups"]))
