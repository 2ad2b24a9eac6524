"""Which engine takes a request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pagerunner.engine.frontend.replicas import Chooser, Replica
from pagerunner.errors import EngineDeadError, InvalidRequestError
from pagerunner.memory.affinity import MOST_SENT, MOST_UNITS, SentUnits
from pagerunner.sched.stats import SchedulerStats
from pagerunner.types import EngineRequest, SamplingParams


class Engine(Replica):
    """An engine without a core."""

    def __init__(self, waiting: int = 0, running: int = 0) -> None:
        self.level = -1
        self.stalls = 0.0
        self.sent = SentUnits()
        self._weights_fault = ""
        self._stall_seconds = 60.0
        self.desk: Any = SimpleNamespace(
            stats=SchedulerStats(waiting=waiting, running=running),
            progress=SimpleNamespace(queued=0, unfinished=0),
            add=lambda *given: None,
        )
        self.client: Any = SimpleNamespace(death=None, who="engine", send=lambda message: None)

    def stalled_seconds(self) -> float:
        return self.stalls


def request(tokens: int, first: int = 0, salt: str = "") -> EngineRequest:
    ids = list(range(first, first + tokens))
    params = SamplingParams(max_tokens=1)
    return EngineRequest(request_id="r", prompt_token_ids=ids, params=params, seed=0, max_tokens=1, cache_salt=salt)


def send(chooser: Chooser, one: Engine, given: EngineRequest) -> None:
    one.submit("r", None, [given], 0.0, chooser.hashes(given))


def chosen(chooser: Chooser, given: EngineRequest, rank: int | None = None) -> Replica:
    return chooser.choose(chooser.hashes(given), rank)


def test_the_one_with_the_least_to_do_and_equal_ones_in_turn() -> None:
    engines = [Engine(), Engine(), Engine()]
    chooser = Chooser(engines, prefixes=True)
    assert {chosen(chooser, request(20)) for _ in range(3)} == set(engines), "each had its turn"
    engines[0].desk.stats = SchedulerStats(waiting=1)
    engines[1].desk.stats = SchedulerStats(running=3)
    engines[2].desk.stats = SchedulerStats(running=4)
    assert chosen(chooser, request(20)) is engines[1], "one that waits counts as four that run"
    engines[1].desk.progress = SimpleNamespace(queued=1, unfinished=3)  # sent since the core's last figures
    assert chosen(chooser, request(20)) in (engines[0], engines[2])


def test_a_prompt_follows_its_beginning_until_that_engine_has_more_to_do() -> None:
    first, second = engines = [Engine(), Engine()]
    chooser = Chooser(engines, prefixes=True)
    send(chooser, second, request(2048))
    assert all(chosen(chooser, request(3000)) is second for _ in range(4))
    second.desk.stats = SchedulerStats(running=3)
    assert chosen(chooser, request(3000)) is second, "2,048 tokens count as four that run"
    second.desk.stats = SchedulerStats(running=5)
    assert chosen(chooser, request(3000)) is first
    second.desk.stats = SchedulerStats(running=1)
    assert chosen(chooser, request(3000, first=7)) is first, "it begins differently"
    assert chosen(chooser, request(3000, salt="other")) is first, "prompts with other salts share nothing"
    assert chosen(Chooser(engines, prefixes=False), request(3000)) is first, "nothing is kept of prompts"


def test_what_is_remembered_is_bounded_and_forgets_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Engine()
    chooser = Chooser([one, Engine()], prefixes=True)
    long = request(16 * MOST_UNITS + 160)
    assert len(chooser.hashes(long)) == MOST_UNITS
    for number in range(MOST_SENT // MOST_UNITS + 1):
        send(chooser, one, request(16 * MOST_UNITS, first=number))
        assert len(one.sent) <= MOST_SENT
    half = request(8 * MOST_UNITS, first=10**6)
    send(chooser, one, half)
    oldest = next(number for number in range(1, 9) if one.sent.leading(chooser.hashes(request(8192, first=number))))
    assert 0 < one.sent.leading(chooser.hashes(request(8192, first=oldest))) <= MOST_UNITS


def test_who_can_not_serve_is_passed_over() -> None:
    dead, stalled, asleep, fine = engines = [Engine(), Engine(), Engine(), Engine(waiting=50)]
    dead.client.death = EngineDeadError("it was killed.")
    stalled.stalls, asleep.level = 100.0, 1
    stalled.desk.progress = SimpleNamespace(queued=0, unfinished=0)
    chooser = Chooser(engines, prefixes=True)
    assert all(chosen(chooser, request(20)) is fine for _ in range(4))
    fine.client.death = EngineDeadError("it was killed.")
    assert chosen(chooser, request(20)) is asleep, "it says itself why it can't"
    asleep.client.death = EngineDeadError("it was killed.")
    hangs = "engine has given no sign of life for 100 seconds; more than 60 count as a stall"
    with pytest.raises(EngineDeadError, match=rf"^it was killed\. {hangs} \(.*STALL_SECONDS.*\)\.$"):
        chosen(chooser, request(20))


def test_one_that_only_waits_gets_nothing_while_another_serves() -> None:
    paused, silent, half_new, fine = engines = [Engine(), Engine(), Engine(), Engine(waiting=50)]
    paused.level = half_new.level = 0
    silent.stalls = 100.0
    half_new._weights_fault = "half new"
    chooser = Chooser(engines, prefixes=True)
    assert all(chosen(chooser, request(20)) is fine for _ in range(4))
    fine.level = 0
    assert {chosen(chooser, request(20)) for _ in range(4)} == {paused}, (
        "all wait for the end of the pause, and it has less to do"
    )


def test_a_client_may_choose() -> None:
    engines = [Engine(waiting=50), Engine()]
    chooser = Chooser(engines, prefixes=True)
    assert chosen(chooser, request(20), 0) is engines[0]
    for wrong in (2, -1):
        said = rf"data_parallel_rank must be in \[0, 2\), as data_parallel_size is 2; got {wrong}\."
        with pytest.raises(InvalidRequestError, match=said) as caught:
            chosen(chooser, request(20), wrong)
        assert caught.value.param == "data_parallel_rank"
    engines[0].client.death = EngineDeadError("it was killed.")
    with pytest.raises(EngineDeadError, match="it was killed"):
        chosen(chooser, request(20), 0)
    engines[1].stalls = 100.0
    with pytest.raises(EngineDeadError, match="no sign of life for 100 seconds"):
        chosen(chooser, request(20), 1)
