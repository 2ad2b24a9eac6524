"""KV events, read by a decoder made from vLLM's documents and not from our structs."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from helpers.adapters import random_adapter
from helpers.checkpoints import make_checkpoint
from helpers.patience import LONG, until
from helpers.plans import mixed, one_group
from helpers.router import Router
from pagerunner import LLM, LoRARequest, SamplingParams
from pagerunner.config import KVEventsConfig, engine_args, kv_events
from pagerunner.engine.core import kv_events as module
from pagerunner.engine.core.kv_events import Publisher, offset
from pagerunner.errors import ConfigError
from pagerunner.memory.events import Block, BlockLog, BlockShape, Change
from pagerunner.memory.rules import joint_hit
from pagerunner.types.weights import FinishUpdate

ANY_PORT = "tcp://127.0.0.1:*"
GREEDY = SamplingParams(temperature=0.0, max_tokens=2)


@contextlib.contextmanager
def router(publisher: Publisher, **options: Any) -> Iterator[Router]:
    reader = Router(publisher.endpoint, publisher.replay_endpoint, **options)
    try:
        yield reader
    finally:
        reader.close()


def changes(count: int, size: int = 16, start: int = 0) -> list[Change | None]:
    """Blocks of one prompt that come."""
    found: list[Change | None] = []
    parent: Block | None = None
    for number in range(start, start + count):
        tokens = array("I", range(number * size, (number + 1) * size))
        parent = Block(number.to_bytes(32, "big"), [], parent, tokens, "")
        found.append(Change("GPU", parent, True))
    return found


def log_of(*given: Change | None) -> BlockLog:
    log = BlockLog(one_group(4))
    log.changes = list(given)
    return log


def publisher(**options: Any) -> Publisher:
    config = KVEventsConfig(**{"endpoint": ANY_PORT, **options})
    return Publisher(config, BlockShape.of(one_group(4)))


def connect(one: Publisher, reader: Router) -> None:
    """Publish until the reader hears it: those who connect get what comes later."""
    deadline = time.monotonic() + LONG
    while not reader.read(0.05):
        assert time.monotonic() < deadline
        one.tell(log_of(None))
    while reader.read(0.2):
        pass


def test_a_reader_gets_three_frames_and_what_it_missed_by_replay() -> None:
    one = publisher(replay_endpoint=ANY_PORT, topic="kv@me@m")
    with router(one, topic=b"kv@me@m") as reader:
        connect(one, reader)
        blocks = changes(3)
        for change in blocks:
            one.tell(log_of(change))
        last = blocks[2]
        assert last is not None
        one.tell(log_of(Change("GPU", last.block, False)))
        until(lambda: reader.read() and reader.kinds[-1] == "Removed")
        assert reader.finds(range(48)) == 32 and reader.rank == 0 and not reader.gaps
        # a second reader comes late, and asks for the rest when it sees that it has missed something
        with router(one, topic=b"kv@me@m") as late:
            connect(one, late)
            assert late.gaps == 1 and late.next == one._next
            assert late.kinds.count("Stored") == 3
    one.close()


def test_a_slow_reader_sees_a_gap_and_is_told_everything_again() -> None:
    one = publisher(max_queue_size=2)
    log = BlockLog(one_group(40))
    with router(one) as reader:
        connect(one, reader)
        [gone] = changes(1)
        assert gone is not None
        log.changes = [Change("GPU", gone.block, False)] * 100_000  # takes the thread longer than the calls below
        one.tell(log)
        for _ in range(20):
            log.changes = [None]
            one.tell(log)
        assert one.dropped and one.dropped < 20

        def caught_up() -> bool:
            one.tell(log)
            while reader.read(0.05):
                pass
            return reader.gaps > 0 and reader.next == one._next

        until(caught_up)
        assert reader.kinds[-1] == "Cleared"
    one.close()


def test_nobody_reads_and_nothing_waits() -> None:
    one = publisher(hwm=1, buffer_steps=3)
    started = time.process_time()
    for change in changes(2000):
        one.tell(log_of(change))
    one.close()
    assert not one.dropped and not one._queue.qsize()
    assert time.process_time() - started < 5


def test_a_publisher_ends_with_its_engine() -> None:
    one = publisher()
    endpoint = one.endpoint
    del one
    gc.collect()
    again = publisher(endpoint=endpoint)  # the port is free
    again.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kv-events"]


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_an_endpoint_in_use_is_an_error_with_its_name(scheme: str, tmp_path: Path) -> None:
    first = publisher(endpoint=ANY_PORT if scheme == "tcp" else f"ipc://{tmp_path}/kv")
    with pytest.raises(
        ConfigError, match=rf"kv_events_config: endpoint '{scheme}://.*' can't be opened: Address already in use"
    ):
        publisher(endpoint=first.endpoint)
    with pytest.raises(ConfigError, match="replay_endpoint .* can't be opened: Address already in use"):
        publisher(replay_endpoint=first.endpoint)
    first.close()


def test_a_router_elsewhere_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM does: routers that many engines report to bind their end."""
    monkeypatch.setattr(module, "_BINDS", ("*",))  # this host stands for another one
    context: zmq.Context[Any] = zmq.Context()
    reader = context.socket(zmq.SUB)
    try:
        reader.subscribe("")
        reader.bind(ANY_PORT)
        one = publisher(endpoint=reader.getsockopt_string(zmq.LAST_ENDPOINT))
        deadline = time.monotonic() + LONG
        while not reader.poll(50):
            assert time.monotonic() < deadline
            one.tell(log_of(None))
        one.close()
    finally:
        context.destroy(linger=0)


def test_a_wrong_replay_request_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    one = publisher(replay_endpoint=ANY_PORT)
    with router(one) as reader, caplog.at_level(logging.WARNING):
        asking = reader.context.socket(zmq.DEALER)
        asking.connect(one.replay_endpoint)
        asking.send_multipart([b"", b"7"])
        asking.send_multipart([b"what"])
        until(lambda: len(caplog.records) == 2)
        assert "an empty frame and 8 bytes; 2 frames came" in caplog.text
        connect(one, reader)
        reader.next = 0
        reader.ask()  # the thread goes on
        assert reader.next == one._next
    one.close()


@pytest.mark.parametrize(
    ("endpoint", "second"),
    [
        ("tcp://*:5557", "tcp://*:5558"),
        ("ipc:///tmp/kv", "ipc:///tmp/kv_dp1"),
        ("tcp://[::1]:5557", "tcp://[::1]:5558"),
        (ANY_PORT, ANY_PORT),
    ],
)
def test_each_engine_has_an_endpoint_of_its_own(endpoint: str, second: str) -> None:
    assert offset(endpoint, 0) == endpoint and offset(endpoint, 1) == second


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            '{"enable_kv_cache_event": true}',
            "kv_events_config must be JSON such as .*unknown field `enable_kv_cache_event`",
        ),
        ({"publisher": "kafka"}, "kafka"),
        ({"buffer_steps": 0}, ">= 1"),
        ({"endpoint": "inproc://x"}, "endpoint must begin with tcp:// or ipc://, got 'inproc://x'"),
        ({"endpoint": "localhost:5557"}, "endpoint must begin with"),
        ('{"enable_kv_cache_events": true, "replay_endpoint": "5558"}', "replay_endpoint must begin with"),
    ],
)
def test_a_wrong_config_is_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kv_events(engine_args(model="demo", kv_events_config=config))


def test_events_need_the_prefix_cache_and_layers_that_keep_tokens() -> None:
    with pytest.raises(ConfigError, match="enable_prefix_caching is false"):
        kv_events(
            engine_args(model="demo", kv_events_config={"enable_kv_cache_events": True}, enable_prefix_caching=False)
        )
    for off in (None, {}, {"enable_kv_cache_events": False}, {"enable_kv_cache_events": True, "publisher": "null"}):
        assert kv_events(engine_args(model="demo", kv_events_config=off)) is None
    with pytest.raises(ConfigError, match=r"This model's layers keep others \(recurrent"):
        BlockShape.of(mixed({"recurrent": (16, 1)}, 1 << 20))
    with pytest.raises(ConfigError, match=r"\(window-5, window-40\)"):
        BlockShape.of(mixed({"window-5": (16, 1), "window-40": (16, 1)}, 1 << 20))
    window = BlockShape.of(mixed({"window-40": (16, 1)}, 1 << 20))
    assert (window.kind, window.window) == ("sliding_window", 40)
    assert BlockShape.of(mixed({"latent-4": (16, 1), "window-40": (16, 1)}, 1 << 20)).kind == "mla_attention"


# -- whole engines


def engine(model: str, **options: Any) -> LLM:
    config = {"enable_kv_cache_events": True, "endpoint": ANY_PORT, "replay_endpoint": ANY_PORT}
    return LLM(model, max_model_len=256, max_num_seqs=4, use_tqdm=False, kv_events_config=config, **options)


def prompt(number: int, tokens: int = 100) -> dict[str, Any]:
    return {"prompt_token_ids": [5 + (number * 31 + index) % 300 for index in range(tokens)]}


def up_to_date(llm: LLM, reader: Router) -> None:
    """Read until nothing is left. Readers get every batch, because the first one is asked for again."""
    one = llm._core._publishers[0]
    deadline = time.monotonic() + LONG
    while reader.next < one._next:
        reader.read(0.05)
        if reader.next < one._next:
            reader.ask()
        assert time.monotonic() < deadline


def end_update(llm: LLM) -> None:
    """As after an update of the weights, of which no tensor came."""
    llm._core._weights.change = lambda change: None  # type: ignore[method-assign]
    llm._core.change_weights(FinishUpdate())


@pytest.mark.parametrize("model", ["demo", "demo-hybrid"])
def test_a_router_knows_what_an_engine_has_cached(model: str) -> None:
    """Its count of a prompt's cached tokens is what the engine finds, for prompts that end where others did."""
    llm = engine(model, num_gpu_blocks_override=24, enable_sleep_mode=True)
    with router(llm._core._publishers[0]) as reader:
        up_to_date(llm, reader)
        assert reader.kinds == []
        for number in (0, 1, 0, 2, 3, 1, 4, 0, 5):
            up_to_date(llm, reader)
            one = prompt(number)
            expected = reader.finds(one["prompt_token_ids"][:-1])
            [output] = llm.generate([one], GREEDY, use_tqdm=False)
            assert output.num_cached_tokens == expected
        up_to_date(llm, reader)
        assert {"Stored", "Removed"} <= set(reader.kinds), "nothing was evicted"
        llm.generate([{**prompt(7), "cache_salt": "mine"}], GREEDY, use_tqdm=False)
        up_to_date(llm, reader)
        tokens = prompt(7)["prompt_token_ids"][:-1]
        assert reader.finds(tokens, "mine") == 96 and reader.finds(tokens) == 0
        for lose in (llm.reset_prefix_cache, lambda: end_update(llm), lambda: llm.sleep(1)):
            llm.generate([prompt(8)], GREEDY, use_tqdm=False)
            up_to_date(llm, reader)
            assert reader.stored and reader.kinds[-1] != "Cleared"
            lose()
            up_to_date(llm, reader)
            assert not reader.stored and reader.kinds[-1] == "Cleared"
        llm.wake_up()
        llm.generate([prompt(8)], GREEDY, use_tqdm=False)
        up_to_date(llm, reader)
        assert reader.finds(prompt(8)["prompt_token_ids"]) == 96
        llm._core.recover([])
        up_to_date(llm, reader)
        assert not reader.stored and reader.kinds[-1] == "Cleared"


@pytest.mark.parametrize("model", ["demo", "demo-hybrid"])
def test_host_memory_is_a_medium_of_its_own(model: str) -> None:
    llm = engine(model, num_gpu_blocks_override=24, enable_sleep_mode=True, kv_offloading_size=0.05)
    prompts = [prompt(number) for number in range(4)]
    tokens = [one["prompt_token_ids"][:-1] for one in prompts]
    scheduler: Any = llm._core._scheduler
    manager, host = scheduler.manager, scheduler.tiers.host
    rules = [group.rule for group in manager.plan.groups]

    def found(medium: str) -> list[int]:
        while llm._core.has_work:  # transfers
            llm._core.step()
        up_to_date(llm, reader)
        hits = []
        for one in tokens:
            chain = manager.chain()
            chain.cover(one, len(one))
            pages = (manager.index if medium == "GPU" else host.index).pages
            hits.append(joint_hit(rules, pages, chain, len(one)))
        assert [reader.finds(one, medium=medium) for one in tokens] == hits
        return hits

    with router(llm._core._publishers[0]) as reader:
        for one in prompts:
            llm.generate([one], GREEDY, use_tqdm=False)
        stored = found("CPU")
        near = found("GPU")
        far = min(range(4), key=lambda number: near[number] - stored[number])
        assert stored[far] == 96 and near[far] < 96
        for lose in (lambda: None, lambda: (llm.sleep(1), llm.wake_up())):
            lose()
            [output] = llm.generate([prompts[far]], GREEDY, use_tqdm=False)
            # loaded, and told with the tokens that were known
            assert output.num_cached_tokens == 96 and found("GPU")[far] == 96 and found("CPU")[far] == 96
        assert "Cleared" not in reader.kinds[1:], "host memory sleeps with its pages"
        llm.reset_prefix_cache()
        assert found("GPU") == found("CPU") == [0] * 4 and reader.kinds[-1] == "Cleared"


def test_a_router_knows_whose_adapter_has_computed_a_block(tmp_path: Path) -> None:
    """One prompt, of the base, of two adapters, and of one's new version. Each finds its own blocks, and a router knows so before."""
    model = make_checkpoint(tmp_path, "qwen3")
    paths = [random_adapter(model, tmp_path / f"a{seed}", rank=4, seed=seed) for seed in range(3)]
    llm = engine(str(model), enable_lora=True, max_loras=2, kv_offloading_size=0.05)
    first, second = (LoRARequest(f"a{seed}", 7 + seed, str(paths[seed])) for seed in range(2))
    changed = LoRARequest("a0", 7, str(paths[2]), load_inplace=True)
    salted = {**prompt(1), "cache_salt": "mine"}
    hashes: list[set[int]] = []
    with router(llm._core._publishers[0]) as reader:
        for one, given in (
            (None, prompt(1)),
            (first, prompt(1)),
            (second, prompt(1)),
            (first, salted),
            (changed, prompt(1)),
        ):
            name, known = "" if one is None else one.lora_name, set(reader.stored)
            for cached in (0, 96):
                [output] = llm.generate([given], GREEDY, use_tqdm=False, lora_request=one)
                assert output.num_cached_tokens == cached
                one = one and LoRARequest(one.lora_name, one.lora_int_id)  # what the name stands for
            up_to_date(llm, reader)
            assert reader.finds(prompt(1)["prompt_token_ids"], given.get("cache_salt", ""), lora=name) == 96
            hashes.append(reader.stored - known)
        assert all(len(own) == 6 for own in hashes) and len(set().union(*hashes)) == 30, "no block is of two"
