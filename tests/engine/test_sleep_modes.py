"""What sleep makes of unfinished requests, asked of the engine core and of the fake that stands in for it in other tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helpers.fake_core import FakeCore, FakeOptions
from pagerunner import LLM, EngineSleepingError, SamplingParams
from pagerunner.demo import demo_path
from pagerunner.types import EngineRequest, RequestUpdate


@pytest.fixture(scope="module")
def real() -> Any:
    llm = LLM(str(demo_path()), num_gpu_blocks_override=256, max_num_seqs=2, enable_sleep_mode=True, use_tqdm=False)
    return llm._core


@pytest.fixture(params=["real", "fake"])
def core(request: pytest.FixtureRequest) -> Iterator[Any]:
    core = request.getfixturevalue("real") if request.param == "real" else FakeCore(FakeOptions(), max_num_seqs=2)
    yield core
    core.sleep(0, "abort")
    core.wake_up()


def add(core: Any, *names: str) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    for name in names:
        core.add(
            EngineRequest(
                request_id=name, prompt_token_ids=[5, 6, 7], params=params, seed=0, max_tokens=params.max_tokens
            )
        )


def ended(updates: list[RequestUpdate]) -> dict[str, str | None]:
    return {update.request_id: update.finish_reason for update in updates if update.finish_reason is not None}


def run(core: Any) -> list[RequestUpdate]:
    updates: list[RequestUpdate] = []
    while core.has_work:
        updates += core.step()
    return updates


@pytest.mark.parametrize("level", [0, 1, 2])
def test_waiting_for_the_requests_of_a_paused_engine_finishes_them(core: Any, level: int) -> None:
    add(core, "ran")
    core.step()
    core.sleep(0, "keep")
    add(core, "new_0", "new_1")  # more than run at once
    assert not core.has_work
    assert ended(core.sleep(level, "wait")) == {"ran": "length", "new_0": "length", "new_1": "length"}
    assert core.sleep_level is not None and not core.has_work
    core.wake_up()
    assert run(core) == []


@pytest.mark.parametrize("asleep", [1, 2])
def test_an_engine_asleep_refuses_to_finish_requests_and_keeps_them(core: Any, asleep: int) -> None:
    add(core, "kept")
    core.step()
    core.sleep(asleep, "keep")
    for level in (0, 1, 2):
        with pytest.raises(EngineSleepingError, match="can't finish its 1 "):
            core.sleep(level, "wait")
    assert core.sleep_level is not None
    core.wake_up()
    assert ended(run(core)) == {"kept": "length"}


@pytest.mark.parametrize("asleep", [0, 1, 2])
def test_with_nothing_unfinished_a_sleep_that_waits_goes_deeper(core: Any, asleep: int) -> None:
    core.sleep(asleep)
    assert core.sleep(2, "wait") == []
    assert core.sleep_level is not None
    core.wake_up()
    add(core, "next")
    assert ended(run(core)) == {"next": "length"}


def test_a_pause_goes_on_when_a_sleep_that_waits_is_refused(core: Any) -> None:
    core.sleep(0)
    add(core, "new")
    with pytest.raises(Exception, match="sleep level"):
        core.sleep(3, "wait")
    assert core.sleep_level is not None and not core.has_work
    core.wake_up()
    assert ended(run(core)) == {"new": "length"}


@pytest.mark.parametrize("level", [0, 1, 2])
def test_requests_of_an_engine_that_is_parked_wait_for_it_and_for_nothing_else(core: Any, level: int) -> None:
    add(core, *"abc")
    core.step()
    assert (core.stats().waiting, core.stats().waiting_for) == (1, "slot")
    core.sleep(level, "keep")
    stats, state = core.stats(), core.watch(0)
    assert stats.waiting >= 1 and stats.waiting_for == "paused" == state.stats.waiting_for
    assert {one.wait for one in state.requests} <= {"paused"}
    core.wake_up()
    assert core.stats().waiting_for != "paused"
    assert ended(run(core)) == dict.fromkeys("abc", "length")
    assert core.stats().waiting_for == ""
