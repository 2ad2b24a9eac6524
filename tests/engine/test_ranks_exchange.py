"""Pages of other engines with several ranks: each rank's part of a page comes from the same rank of the other engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.test_exchange import OTHER, PROMPT, Engine, held_pull, own_secret
from helpers.families import MAKERS
from helpers.once import made_once
from helpers.patience import until
from pagerunner.errors import ConfigError, EngineDeadError
from pagerunner.tiers.loans import Loan
from pagerunner.tiers.wire import Name

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("forked", own_secret.__name__)
TWO: dict[str, Any] = {"tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    return made_once(tmp_path_factory, MAKERS)


@pytest.fixture
def make(checkpoint) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def one(role: str | None, family: str = "qwen3", **options: Any) -> Engine:
        made.append(engine := Engine(checkpoint(family), role, **options))
        if role is not None:
            scheduler: Any = engine.core._scheduler
            until(lambda: engine.core._executor.host_ready >= scheduler.tiers.host.num_bytes)
        return engine

    yield one
    for engine in made:
        if engine.core._death is None:
            engine.close()
        engine.core._executor.close()


@pytest.mark.days(3)
@pytest.mark.parametrize(("family", "ways"), [("qwen3_next", TWO), ("gpt_oss", {"pipeline_parallel_size": 2})])
def test_tokens_are_those_of_one_engine(make, family: str, ways: dict[str, Any]) -> None:
    alone = make(None, family)
    wanted = [alone.tokens(alone.add(prompt)) for prompt in (PROMPT, OTHER)]
    prefill, decode = make("kv_producer", family, **ways), make("kv_consumer", family, **ways)
    params = [prefill.lend(prompt) for prompt in (PROMPT, OTHER)]
    names = [decode.add(prompt, lent) for prompt, lent in zip((PROMPT, OTHER), params, strict=True)]
    assert [decode.tokens(name) for name in names] == wanted
    for name, lent in zip(names, params, strict=True):
        assert decode.found(name) == lent.remote_num_tokens > 60
        assert lent.tp_size == ways.get("tensor_parallel_size", 1)
    until(lambda: not len(prefill.core._exchange.loans))


@pytest.fixture
def pair(make) -> tuple[Engine, Engine, list[int]]:
    """An engine that lends and one that pulls, of two ranks each, and the tokens of PROMPT."""
    prefill, decode = (make("kv_both", enable_sleep_mode=True, **TWO) for _ in range(2))
    return prefill, decode, prefill.tokens(prefill.add(PROMPT))


@pytest.mark.days(3)
def test_a_torn_part_of_one_rank_and_other_ways_to_divide_a_model(
    pair, make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode, wanted = pair
    torn, checksum = [2], Loan.checksum

    def of_page(loan: Loan, name: Name) -> bytes:
        number = [key for group, key in loan.pages if group == 1].index(name[1]) if name[0] == 1 else -1
        return bytes(32) if number in torn else checksum(loan, name)

    monkeypatch.setattr(Loan, "checksum", of_page)
    name = decode.add(PROMPT, prefill.lend(PROMPT))
    assert decode.tokens(name) == wanted
    assert decode.found(name) == 32, "the third page of rank 1 was torn, and those of rank 0 are of no use then"
    torn.clear()
    for engine, level in ((prefill, 1), (decode, 2)):
        engine.take(engine.core.sleep(level))
        engine.core.wake_up()
    name = decode.add(PROMPT, prefill.lend(PROMPT))
    assert decode.tokens(name) == wanted and decode.found(name) == 144, "weights that were read again are the same"
    for ways, sentence in (
        ({}, "tensor_parallel_size is 2 there and 1 here"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 1 there and 2 here"),
    ):
        other = make("kv_consumer", **ways)
        name = other.add(PROMPT, prefill.lend(PROMPT))
        assert other.tokens(name) == wanted and other.found(name) == 0
        assert sentence in caplog.text


@pytest.mark.days(3)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_killed_while_its_pages_are_pulled(pair, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    prefill, decode, wanted = pair
    killed, other = (prefill, decode) if rank else (decode, prefill)
    go = held_pull(monkeypatch)
    name = decode.add(PROMPT, prefill.lend(PROMPT))
    until(lambda: decode.step() or decode.core._exchange._arrivals.num_reads)
    watch = killed.core._executor._ranks.watch
    os.kill(watch._processes[rank].pid, signal.SIGKILL)
    until(lambda: watch._error is not None)
    if killed is decode:  # which waits for its threads that pull
        go.set()
    with pytest.raises(EngineDeadError, match=f"Rank {rank} of 2"):
        killed.core.check_alive()
    go.set()
    if killed is prefill:
        assert decode.tokens(name) == wanted and decode.found(name) == 0
    else:
        until(lambda: not len(prefill.core._exchange.loans))
    assert other.tokens(other.add(OTHER)) == other.tokens(other.add(OTHER)), "the other engine goes on"


def test_ranks_on_other_machines_are_refused(checkpoint) -> None:
    with pytest.raises(ConfigError, match="PeerConnector needs all ranks on one machine"):
        Engine(checkpoint("qwen3"), "kv_both", distributed_executor_backend="ray", **TWO)
