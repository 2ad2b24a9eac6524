"""Many adapters in few slots, and one name that stands for another content again and again while requests run."""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.test_disk_tier import below, written
from engine.test_disk_tier import engine as disk_engine
from engine.test_exchange import Engine
from helpers.adapters import load_adapters, random_adapter
from helpers.checkpoints import make_checkpoint
from helpers.effort import TEST_DAY, effort
from helpers.patience import LONG, until
from helpers.recount import recount, recount_adapters
from pagerunner import LLM, ConfigError, InvalidRequestError, LoRARequest, SamplingParams
from pagerunner.engine.core.core import EngineCore
from pagerunner.lora import loader as loader_module
from pagerunner.lora import readers
from pagerunner.lora.loader import AdapterLoader
from pagerunner.lora.readers import Readers

SLOTS, KEPT, REGISTERED, IN_TURN = 4, 8, effort(200, 1_000), effort(40, 200)
PROMPTS = [[7, 8, 9, 10 + number] * 6 for number in range(5)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), "qwen3")


def versions(base: Path, folder: Path, count: int) -> list[Path]:
    """As many adapters, whose files are the same but for their scale."""
    first = random_adapter(base, folder / "0", rank=2, seed=1)
    config = json.loads((first / "adapter_config.json").read_text())
    for number in range(1, count):
        path = folder / str(number)
        path.mkdir()
        os.link(first / "adapter_model.safetensors", path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 4 + 0.5 * number}))
    return [folder / str(number) for number in range(count)]


def loader_of(core: EngineCore) -> AdapterLoader:
    loader = core._executor.adapters
    assert isinstance(loader, AdapterLoader)
    return loader


def run(engine: Engine, names: list[str]) -> list[list[int]]:
    """Their tokens. Steps follow each other without waiting."""
    while not all(map(engine.ended, names)):
        engine.step()
    return [engine.tokens(name) for name in names]


def account(engine: Engine) -> dict[str, Any]:
    """What is held, with no request in the engine. The books are recounted."""
    core = engine.core
    while core.has_work or core.adapters.busy:
        core.step() if core.has_work else core.poll_adapters(0.01)
    loader, scheduler = loader_of(core), core._scheduler
    until(lambda: loader.idle)
    recount_adapters(core.adapters.books, [])
    recount(scheduler.manager)
    gc.collect()
    state = scheduler.memory_state()
    assert state.adapters is not None and not any(one.requests or one.used for one in state.adapters.there)
    return {
        "pages": list(scheduler.manager.pool.used),
        "whole": core.adapters.books.stats([]).resident,
        "host": sum(packed.pages.nbytes for packed in loader._kept.values()),
        "kept": len(loader._kept),
        "tensors": sum(isinstance(one, torch.Tensor) for one in gc.get_objects()),
        "threads": threading.active_count(),
        "held": len(core.adapters.books.held),
        "under way": loader._under_way,
    }


@pytest.mark.days(3)
@pytest.mark.parametrize("slots", [2, 4, 8])
def test_many_adapters_of_which_some_are_used_in_turn(base: Path, tmp_path: Path, slots: int) -> None:
    """Each is read from its directory again when its turn comes. What is held is the same after each round."""
    engine = Engine(str(base), None, enable_lora=True, max_loras=slots, max_cpu_loras=KEPT, max_lora_rank=8)
    paths = versions(base, tmp_path, REGISTERED)
    infos = load_adapters(engine.core, [LoRARequest(f"n{n}", n + 1, str(path)) for n, path in enumerate(paths)])
    assert len({info.digest for info in infos}) == REGISTERED
    rounds, accounts = [], []
    for count in (20, IN_TURN, IN_TURN):
        names = [engine.add(PROMPTS[0], tokens=3, lora=f"n{5 * n}") for n in range(count)]
        rounds.append(run(engine, names))
        # a reader's thread may still hold its last tensor, and the last step's rows make a difference of one; an adapter has 28
        until(lambda: len(accounts) < 2 or account(engine)["tensors"] < accounts[1]["tensors"] + 10)
        accounts.append(account(engine))
    assert rounds[0] == rounds[1][:20] and rounds[1] == rounds[2] and len({tuple(tokens) for tokens in rounds[0]}) > 1
    first, second, third = accounts
    assert (
        third | {"tensors": 0} == second | {"tensors": 0}
        and second["kept"] == KEPT
        and second["pages"] == first["pages"]
    )
    stats = engine.core.adapters.books.stats([])
    assert stats.registered == REGISTERED and stats.resident > slots  # the pool keeps more than may run at once
    assert (
        stats.hits_total + stats.fills_total == 20 + 2 * IN_TURN and stats.hits_total < IN_TURN
    )  # who is in a slot may pass others
    engine.close()


def test_who_waits_for_a_directory_holds_up_nobody(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four slow directories take all readers. Base requests run meanwhile, and adapters in host memory come to slots and run."""
    engine = Engine(str(base), None, enable_lora=True, max_loras=SLOTS + 3, max_cpu_loras=SLOTS + 3, max_lora_rank=8)
    paths = versions(base, tmp_path, 20)
    for first in (5, 0):  # host memory has room for the last seven
        load_adapters(engine.core, [LoRARequest(f"n{n}", 1, str(paths[n])) for n in range(first, first + 5)])
    loader, gate = loader_of(engine.core), threading.Event()
    for number in range(10, 12):
        load_adapters(engine.core, [LoRARequest(f"n{number}", 1, str(paths[number]))])
    read = loader_module.read_adapter

    def slow(path: Path, *rest: Any) -> Any:
        assert gate.wait(LONG)
        return read(path, *rest)

    monkeypatch.setattr(loader_module, "read_adapter", slow)
    assert len(loader._kept) == SLOTS + 3
    late = [engine.add(PROMPTS[n], lora=f"n{n + 5}") for n in range(4)]
    for _ in range(3):
        engine.step()
    assert [engine.tokens(engine.add(PROMPTS[0], lora=lora)) for lora in ("", "n0", "n1")]
    assert not any(engine.ended(name) for name in late)
    gate.set()
    assert all(len(engine.tokens(name)) == 6 for name in late)
    engine.close()


def test_directories_that_do_not_answer(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither sleep nor the end waits for them, and after a while others are read beside them. What comes of them after a sleep goes to no slot."""
    monkeypatch.setattr(readers, "SLOW_SECONDS", 0.0)
    engine = Engine(str(base), None, enable_lora=True, max_loras=5, max_lora_rank=8, enable_sleep_mode=True)
    core, paths = engine.core, versions(base, tmp_path, 7)
    load_adapters(core, [LoRARequest(f"n{n}", 1, str(path)) for n, path in enumerate(paths)])
    loader, read, gates = loader_of(core), loader_module.read_adapter, {str(path): threading.Event() for path in paths}

    def gated(path: Path, *rest: Any) -> Any:
        assert gates[str(path)].wait(LONG)
        return read(path, *rest)

    gates[str(paths[6])].set()
    wanted = engine.tokens(engine.add(PROMPTS[0], lora="n0"))
    for other in range(1, 6):
        engine.tokens(engine.add(PROMPTS[0], lora=f"n{other}"))
    monkeypatch.setattr(loader_module, "read_adapter", gated)
    late = [engine.add(PROMPTS[0], lora=f"n{n}") for n in (6, 0, 1, 2, 3)]
    engine.take(core.sleep(1, "keep") or ())
    core.wake_up()
    assert len(engine.tokens(late[0])) == 6, "a fifth directory is read"
    assert any("n0" in line or str(paths[0]) in line for line in caplog.messages if "may not answer" in line)
    engine.take(core.sleep(1, "keep") or ())
    assert not engine.ended(late[1])
    gates[str(paths[0])].set()
    until(lambda: not any(str(paths[0]) == one.path for one in loader._readers._running))
    assert loader.table.blocks.places.eq(-1).all(), "the engine sleeps"
    core.wake_up()
    assert engine.tokens(late[1]) == wanted
    engine.close()
    for gate in gates.values():
        gate.set()


def test_loads_of_which_one_cannot_begin_are_not_begun(base: Path, tmp_path: Path) -> None:
    engine = Engine(str(base), None, enable_lora=True, max_lora_rank=8)
    core, (first, second) = engine.core, versions(base, tmp_path, 2)
    load_adapters(core, [LoRARequest("a", 1, str(first))])
    for names, said in ((("b", "a"), "'a' is loaded already"), (("b", "b"), "'b' is being loaded")):
        with pytest.raises(InvalidRequestError, match=said):
            load_adapters(core, [LoRARequest(name, 1, str(second)) for name in names])
        assert not core.poll_adapters(0.01) and not core.adapters.busy and [*core.adapters.books.names] == ["a"]
    load_adapters(core, [LoRARequest("b", 1, str(second))])
    engine.close()


@pytest.mark.parametrize("answers", ["before", "later"])
def test_an_interrupt_ends_the_wait_for_a_directory(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: str
) -> None:
    """The directory answers before the adapter is asked for again, or while that is waited for. It is read once."""
    llm = LLM(
        str(base), enable_lora=True, max_lora_rank=8, use_tqdm=False, max_model_len=64, num_gpu_blocks_override=32
    )
    [path], gate, read = versions(base, tmp_path, 1), threading.Event(), loader_module.read_adapter

    reads: list[Path] = []

    def gated(*given: Any) -> Any:
        reads.append(given[0])
        os.kill(os.getpid(), signal.SIGINT)
        assert gate.wait(LONG)
        return read(*given)

    monkeypatch.setattr(loader_module, "read_adapter", gated)
    greedy, lora = SamplingParams(temperature=0, max_tokens=2, detokenize=False), LoRARequest("a", 1, str(path))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[:1], greedy, lora_request=lora)
    assert not gate.is_set() and llm.generate(PROMPTS[:1], greedy)
    if answers == "later":
        threading.Timer(0.05, gate.set).start()
    else:
        gate.set()
        until(lambda: loader_of(llm._core).idle)
    assert llm.generate(PROMPTS[:1], greedy, lora_request=lora) and len(reads) == 1


def test_too_many_directories_that_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(readers, "MOST_SLOW", 3)
    threads = set(threading.enumerate())
    own, gate, ended = Readers(), threading.Event(), list[int]()
    for number in range(3):
        own.begin(f"/gone/{number}", lambda: ended.append(gate.wait(LONG)))
    until(lambda: sum(one.slow for one in own._running) == 3)
    with pytest.raises(ConfigError, match="3 directories of adapters .* the first of them '/gone/0', and at most 3"):
        own.begin("/gone/3", lambda: None)
    gate.set()
    until(lambda: own.idle)
    own.begin("/there", lambda: ended.append(7))
    until(lambda: own.idle)
    assert ended == [True, True, True, 7]
    until(lambda: threads >= set(threading.enumerate()))  # an LLM that is dropped closes nothing
    own.close()


@pytest.mark.days(3)
@pytest.mark.parametrize("ways", [{}, {"tensor_parallel_size": 2}], ids=["one rank", "two ranks"])
def test_a_name_that_changes_under_load_mixes_no_versions(
    base: Path, tmp_path: Path, forked: None, ways: dict[str, Any]
) -> None:
    """Pages are short, so requests are preempted; the engine sleeps now and then. Each request's tokens are those of the version that it came with."""
    paths = versions(base, tmp_path, 4)
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
    whole = Engine(str(base), None, max_loras=4, **options)
    wanted: dict[str, list[list[int]]] = {}
    for number, info in enumerate(
        load_adapters(whole.core, [LoRARequest(f"v{n}", 1, str(paths[n])) for n in range(4)])
    ):
        wanted[info.digest] = run(whole, [whole.add(prompt, tokens=24, lora=f"v{number}") for prompt in PROMPTS])
    assert len({str(tokens) for tokens in wanted.values()}) == 4
    engine = Engine(
        str(base),
        None,
        max_loras=2,
        num_gpu_blocks_override=8 + (22 if ways else 15),  # an adapter takes so many
        max_model_len=64,
        enable_sleep_mode=True,
        kv_cache_memory_bytes=None,
        **options,
        **ways,
    )
    core, books, rng = engine.core, engine.core.adapters.books, random.Random(TEST_DAY)
    here = shutil.copytree(paths[0], tmp_path / "here")
    load_adapters(core, [LoRARequest("x", 1, str(here))])
    came: dict[str, list[int]] = {}
    changes = itertools.cycle(range(4))
    for turn in range(effort(20, 300)):
        which = rng.randrange(len(PROMPTS))
        came[engine.add(PROMPTS[which], tokens=24, lora="x")] = wanted[books.names["x"].digest][which]
        if turn % 3 == 0 and not core.adapters._loads:
            shutil.copy(
                paths[next(changes)] / "adapter_config.json", here
            )  # what requests that are there have is gone from the disk
            core.adapters.begin(LoRARequest("x", 1, str(here), load_inplace=True))
        for _ in range(rng.randrange(6)):
            engine.step()
            recount_adapters(books, core._scheduler._state.sequences.values())
        if turn % 10 == 9:
            engine.take(core.sleep(1, "keep") or ())
            assert books.stats([]).resident == 0
            core.wake_up()
    assert dict(zip(came, run(engine, list(came)), strict=True)) == came
    assert core.stats().preemptions_total > 0 and core.adapters.version > 3
    assert len(core.adapters._copies) <= 2, "host memory of old versions is free again"
    engine.close()
    whole.close()


@pytest.mark.days(3)
@pytest.mark.parametrize("ways", [{}, {"tensor_parallel_size": 2}], ids=["one rank", "two ranks"])
def test_forty_adapters_in_a_pool_that_holds_three(
    base: Path, tmp_path: Path, forked: None, ways: dict[str, Any]
) -> None:
    """Adapters and prompts evict each other, requests are preempted and aborted, the engine sleeps. Each request's tokens are those of its own adapter."""
    count, each = effort(12, 40), 22 if ways else 15
    paths = versions(base, tmp_path, count)
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_cpu_loras": 5, "poison_fresh_pages": True}
    whole = Engine(str(base), None, max_loras=4, **options)
    requests = [LoRARequest(f"n{n}", 1, str(path)) for n, path in enumerate(paths)]
    load_adapters(whole.core, requests)
    wanted = [run(whole, [whole.add(prompt, tokens=20, lora=f"n{n}") for prompt in PROMPTS]) for n in range(count)]
    few = {"max_model_len": 64, "kv_cache_memory_bytes": None, "num_gpu_blocks_override": 3 * each + 9}
    engine = Engine(str(base), None, max_loras=4, enable_sleep_mode=True, **few, **options, **ways)
    core, rng = engine.core, random.Random(TEST_DAY)
    assert {info.num_pages for info in load_adapters(core, requests)} == {each}
    scheduler = core._scheduler
    came: dict[str, list[int]] = {}
    for turn in range(2 * count):
        number, prompt = rng.randrange(count), rng.randrange(len(PROMPTS))
        came[engine.add(PROMPTS[prompt], tokens=20, lora=f"n{number}")] = wanted[number][prompt]
        if turn % 5 == 4:
            gone = rng.choice(list(came))
            engine.take(core.abort([gone]))
            came.pop(gone)
        for _ in range(rng.randrange(8)):
            engine.step()
            recount_adapters(core.adapters.books, scheduler._state.sequences.values())
            recount(scheduler.manager)
        if turn % 20 == 19:
            engine.take(core.sleep(1, "keep") or ())
            assert not any(scheduler.manager.pool.used) and core.adapters.books.stats([]).num_bytes == 0
            core.wake_up()
    assert dict(zip(came, run(engine, list(came)), strict=True)) == came
    while core.adapters.busy:
        core.poll_adapters(0.01)
    stats = core.stats().lora
    assert stats is not None and 1 <= stats.resident <= 3 and not stats.used_bytes
    assert stats.hits_total and stats.fills_total > count / 2 and core.stats().preemptions_total
    whole.close()
    engine.close()


def test_a_fill_that_fails_leaves_nothing_to_be_found(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the pages are copied before it fails. Its requests end with the reason, and those that come later have all pages filled."""
    [path] = versions(base, tmp_path, 1)
    engine = Engine(str(base), None, enable_lora=True, max_lora_rank=8, poison_fresh_pages=True)
    core, table = engine.core, loader_of(engine.core).table
    [info] = load_adapters(core, [LoRARequest("a", 1, str(path))])
    whole = type(table).fill

    def half(self: Any, slot: int, packed: Any, offsets: list[int], missing: list[int]) -> None:
        whole(self, slot, packed, offsets, missing[: len(missing) // 2])
        raise RuntimeError("the bus is gone")

    with monkeypatch.context() as broken:
        broken.setattr(type(table), "fill", half)
        ended = engine.last(engine.add(PROMPTS[0], lora="a"))
        assert ended.finish_reason == "error" and "the bus is gone" in str(ended.error)
        state = core.memory_state().adapters
        assert state is not None and not state.there and not any(core._scheduler.manager.pool.used)
    wanted = engine.tokens(engine.add(PROMPTS[0], lora="a"))
    assert core.adapters.books.stats([]).fill_bytes_total == info.num_pages * core.memory_plan.groups[0].page_bytes
    core.reset_prefix_cache()
    assert engine.tokens(engine.add(PROMPTS[0], lora="a")) == wanted, "filled again"
    engine.close()


def test_what_goes_on_after_an_interrupt_waits_for_fills(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pages are free then, and a fill of before still writes to some of them. It ends once somebody waits for it."""
    [path] = versions(base, tmp_path, 1)
    engine = Engine(str(base), None, enable_lora=True, max_lora_rank=8)
    core, loader = engine.core, loader_of(engine.core)
    load_adapters(core, [LoRARequest("a", 1, str(path))])
    gate, order = threading.Event(), list[str]()
    fill, drain = loader.table.fill, loader.drain

    def slow(*given: Any) -> None:
        gate.wait(60)
        fill(*given)
        order.append("filled")

    with monkeypatch.context() as slowed:
        slowed.setattr(loader.table, "fill", slow)
        slowed.setattr(loader, "drain", lambda: (gate.set(), drain()))
        engine.add(PROMPTS[0], lora="a")
        engine.step()
        core.recover([])
        order.append("recovered")
        gate.set()
    assert order == ["filled", "recovered"] and not any(core._scheduler.manager.pool.used)
    wanted = engine.tokens(engine.add(PROMPTS[0], lora="a"))
    core.reset_prefix_cache()
    assert engine.tokens(engine.add(PROMPTS[0], lora="a")) == wanted
    engine.close()


def test_an_adapter_that_never_fits_is_refused(base: Path, tmp_path: Path) -> None:
    [path] = versions(base, tmp_path, 1)
    few: dict[str, Any] = {"kv_cache_memory_bytes": None, "max_model_len": 64, "enable_lora": True, "max_lora_rank": 8}
    small = Engine(str(base), None, num_gpu_blocks_override=15, **few)
    with pytest.raises(
        ConfigError, match="needs 16 pages for 1 tokens, 15 pages of its adapter among them; the pool has 15"
    ):
        load_adapters(small.core, [LoRARequest("a", 1, str(path))])
    small.close()
    engine = Engine(str(base), None, num_gpu_blocks_override=17, **few)
    load_adapters(engine.core, [LoRARequest("a", 1, str(path))])
    with pytest.raises(
        InvalidRequestError, match="The request needs 18 pages for 34 tokens, 15 pages of its adapter among them"
    ):
        engine.add(PROMPTS[0], tokens=10, lora="a")
    assert len(engine.tokens(engine.add(PROMPTS[0], tokens=8, lora="a"))) == 8
    engine.close()


@pytest.mark.parametrize("change", ["load_inplace", "unload"])
def test_requests_go_on_with_what_is_gone_from_its_directory(base: Path, tmp_path: Path, change: str) -> None:
    """One slot and host memory for one adapter: x waits for y's slot while its directory gets another content, or is deleted."""
    x, y, other = versions(base, tmp_path, 3)
    alone = Engine(str(base), None, enable_lora=True, max_lora_rank=8)
    load_adapters(alone.core, [LoRARequest("x", 1, str(x))])
    wanted = run(alone, [alone.add(PROMPTS[0], lora="x")])
    engine = Engine(str(base), None, enable_lora=True, max_lora_rank=8, enable_sleep_mode=True)
    core = engine.core
    load_adapters(core, [LoRARequest("y", 1, str(y))])
    before = engine.add(PROMPTS[1], tokens=20, lora="y")
    engine.step()
    load_adapters(core, [LoRARequest("x", 1, str(x))])
    held = engine.add(PROMPTS[0], lora="x")
    engine.step()
    if change == "unload":
        shutil.rmtree(x)
        core.adapters.remove("x")
        load_adapters(core, [LoRARequest("z", 1, str(other))])
    else:
        shutil.copy(other / "adapter_config.json", x)
        load_adapters(core, [LoRARequest("x", 1, str(x), load_inplace=True)])
    run(engine, [before])
    engine.take(core.sleep(1, "keep") or ())
    core.wake_up()
    assert run(engine, [held]) == wanted
    assert account(engine)["kept"] == 1
    engine.close()
    alone.close()


@pytest.mark.parametrize("change", ["load_inplace", "in silence", "gone"])
@pytest.mark.parametrize("first", ["x", "twin"])
def test_a_content_of_two_names_is_read_where_it_still_is(base: Path, tmp_path: Path, change: str, first: str) -> None:
    """One slot and host memory for one adapter. Requests of both names wait together while one of the two directories gets another content, or is deleted."""
    x, y, other = versions(base, tmp_path, 3)
    twin = shutil.copytree(x, tmp_path / "twin")
    alone = Engine(str(base), None, enable_lora=True, max_lora_rank=8)
    load_adapters(alone.core, [LoRARequest("x", 1, str(x))])
    [wanted] = run(alone, [alone.add(PROMPTS[0], lora="x")])
    engine = Engine(str(base), None, enable_lora=True, max_lora_rank=8)
    core = engine.core
    load_adapters(core, [LoRARequest(name, 1, str(path)) for name, path in (("y", y), ("x", x), ("twin", twin))])
    before = engine.add(PROMPTS[1], tokens=20, lora="y")
    engine.step()
    held = [engine.add(PROMPTS[0], lora=name) for name in (first, *{"x", "twin"} - {first})]
    if change == "gone":
        shutil.rmtree(x)
    else:
        shutil.copy(other / "adapter_config.json", x)
    last = (
        LoRARequest("x", 1, str(x), load_inplace=True) if change == "load_inplace" else LoRARequest("z", 1, str(other))
    )
    load_adapters(core, [last])  # host memory has no other one any more
    assert len(loader_of(core)._kept) == 1
    run(engine, [before])
    assert run(engine, held) == [wanted, wanted]
    if change == "in silence":
        shutil.copy(other / "adapter_config.json", twin)
        engine.tokens(engine.add(PROMPTS[1], tokens=2, lora="z"))
        core.reset_prefix_cache()
        ended = engine.last(engine.add(PROMPTS[0], lora="x"))
        assert ended.finish_reason == "error" and "has changed since it was loaded" in str(ended.error)
    engine.close()
    alone.close()


def test_a_disk_gives_pages_to_the_same_content_alone(base: Path, tmp_path: Path) -> None:
    """One prompt, computed with two adapters and without: what an engine that starts later finds of it, where one name has another content."""
    paths = versions(base, tmp_path, 3)
    prompt = [(7 * i) % 490 + 4 for i in range(100)]
    greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)

    def found(llm: LLM, lora: LoRARequest | None) -> int | None:
        [output] = llm.generate([{"prompt_token_ids": prompt}], greedy, False, lora_request=lora)
        return output.num_cached_tokens

    first, second, third = (str(path) for path in paths)
    llm = disk_engine(str(base), tmp_path / "kv", enable_lora=True, max_lora_rank=8)
    for lora in (None, LoRARequest("a", 1, first), LoRARequest("b", 2, second)):
        assert found(llm, lora) == 0
    assert found(llm, None) == 96  # a step, in which the last one's pages go
    assert written(llm) == 18
    below(llm)._store.close()
    later = disk_engine(str(base), tmp_path / "kv", enable_lora=True, max_lora_rank=8)
    assert found(later, LoRARequest("b", 2, third)) == 0, "the name's new content"
    assert found(later, LoRARequest("a", 1, second)) == found(later, None) == 96
    assert found(later, LoRARequest("c", 3, first)) == 96
    tier = later.stats().tier
    assert tier is not None and tier.disk is not None and tier.disk.hits == 3 * 96


def test_host_memory_gives_pages_to_the_same_content_alone(base: Path, tmp_path: Path) -> None:
    """As above, when the device's pages are gone: what host memory holds of a prompt is found by content, and not by name."""
    llm = LLM(
        str(base), enable_lora=True, max_loras=3, max_lora_rank=8, kv_offloading_size=0.05, max_model_len=256, num_gpu_blocks_override=64,
        skip_tokenizer_init=True, use_tqdm=False,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)

    def found(prompt: list[int], name: str = "", path: str = "", **more: Any) -> int | None:
        lora = LoRARequest(name, 1, path, **more) if name else None
        [output] = llm.generate([{"prompt_token_ids": prompt}], greedy, False, lora_request=lora)
        return output.num_cached_tokens

    first, second, third = (str(path) for path in versions(base, tmp_path, 3))
    prompt, other = ([(n * i) % 490 + 4 for i in range(100)] for n in (7, 11))
    assert [found(prompt), found(prompt, "a", first), found(prompt, "b", second)] == [0, 0, 0]
    assert found(other) == 0  # what is to be stored, the next plan says
    llm._core._scheduler.manager.reset_prefix_cache()  # type: ignore[attr-defined]
    assert found(prompt, "b", third, load_inplace=True) == 0, "the name's new content"
    assert [found(prompt), found(prompt, "a", first), found(prompt, "c", second)] == [96, 96, 96]
    tier = llm.stats().tier
    assert tier is not None and tier.hits_total == 3 * 96


def test_a_copy_that_a_read_has_found_again_is_not_given_up_before_the_core_knows(base: Path, tmp_path: Path) -> None:
    """Two names have one content. The core gives the copy up, and the second name's read, which has found it, has ended meanwhile."""
    engine = Engine(str(base), None, enable_lora=True, max_loras=1, max_cpu_loras=1, max_lora_rank=8)
    core, loader, [path] = engine.core, loader_of(engine.core), versions(base, tmp_path, 1)
    [first] = load_adapters(core, [LoRARequest("a", 1, str(path))])
    core.adapters.begin(LoRARequest("b", 2, str(path)))
    until(lambda: loader._ends.qsize() == 1)
    loader.forget(first.digest)
    assert first.digest in loader._kept
    core.poll_adapters(0)
    assert run(engine, [engine.add(PROMPTS[0], lora="b")])[0]
    loader.forget(first.digest)
    assert not loader._kept and not loader._told and not loader._seen
    engine.close()
