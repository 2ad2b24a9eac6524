"""A step that fails ends the engine: whoever waits gets the reason, and so does whoever comes later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from helpers import failing_core
from helpers.effort import share_of_the_day
from helpers.failing_core import IN_RESULT, IN_RUN, OUT_OF_MEMORY
from helpers.patience import LONG
from helpers.serving import write_text_side
from pagerunner.config import EngineArgs
from pagerunner.engine.core.core import EngineCore, SleepMode
from pagerunner.engine.frontend.async_engine import AsyncEngine
from pagerunner.errors import CapacityError, EngineDeadError
from pagerunner.types import EngineRequest, SamplingParams

pytestmark = [pytest.mark.days(2), pytest.mark.usefixtures("forked")]  # each starts a core's process

REASONS = [
    (IN_RUN, r"A step failed \(RuntimeError: CUDA error: device-side assert triggered\), and the engine has ended"),
    (IN_RESULT, r"illegal memory access was encountered\), and the engine has ended"),
    (OUT_OF_MEMORY, r"out of memory in a step \(CUDA out of memory.*2\.00 GiB.*lower gpu_memory_utilization"),
]


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> EngineArgs:
    model: Path = write_text_side(tmp_path_factory.mktemp("dead"))
    return EngineArgs(model=str(model), device="cpu", max_in_flight=2)


def request(name: str, prompt: list[int]) -> EngineRequest:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    return EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, seed=0, max_tokens=20)


@pytest.mark.parametrize(("token", "reason"), REASONS)
def test_a_failed_step_ends_the_core_for_good(args: EngineArgs, token: int, reason: str) -> None:
    core = failing_core.build(args)
    core.add(request("fine", [1, 2, 3]))
    core.step()
    core.add(request("bad", [token]))
    with pytest.raises(EngineDeadError, match=reason):
        for _ in range(3):
            core.step()
    assert not core.has_work
    later: list[Callable[[EngineCore], object]] = [
        lambda core: core.step(),
        lambda core: core.add(request("late", [1])),
        lambda core: core.sleep(1),
        lambda core: core.wake_up(),
    ]
    for call in later:
        with pytest.raises(EngineDeadError, match=reason):
            call(core)
    assert {update.request_id for update in core.abort(["fine", "bad"])} == {"fine", "bad"}
    assert core.stats().running == 0


def test_a_step_that_fails_while_sleep_drains_ends_the_core_too(args: EngineArgs) -> None:
    core = failing_core.build(msgspec.structs.replace(args, max_num_batched_tokens=32))
    core.add(request("bad", [1] * 32 + [IN_RESULT]))
    core.step()  # the second part of the prompt is in flight, and has not been read
    with pytest.raises(EngineDeadError, match="illegal memory access"):
        core.sleep(2, "keep")
    assert not core.has_work


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_requests_go_on_when_sleep_is_refused(args: EngineArgs, mode: SleepMode) -> None:
    core = failing_core.build(args)
    core.add(request("fine", [1, 2, 3]))
    tokens = [token for update in core.step() for token in update.new_token_ids]
    with pytest.raises(CapacityError, match="in host memory"):
        core.sleep(1, mode)
    while core.has_work:
        tokens += [token for update in core.step() for token in update.new_token_ids]
    assert tokens == [7] * 20


@pytest.mark.days(2)
@pytest.mark.parametrize(("token", "reason"), [REASONS[number] for number in share_of_the_day(len(REASONS), 3)])
def test_every_waiting_request_hears_the_reason_and_health_fails(args: EngineArgs, token: int, reason: str) -> None:
    async def scenario() -> None:
        engine = await AsyncEngine.from_args(args, core_factory=failing_core.FACTORY)
        try:
            params = SamplingParams(max_tokens=1500, ignore_eos=True)
            streams = [
                await engine.add_request(str(number), {"prompt_token_ids": [5, number]}, params) for number in range(4)
            ]
            await streams[0].get()
            engine.check_health()
            streams.append(await engine.add_request("bad", {"prompt_token_ids": [token]}, params))
            for stream in streams:
                with pytest.raises(EngineDeadError, match=reason):
                    async with asyncio.timeout(LONG):
                        while not (await stream.get()).finished:
                            pass
            with pytest.raises(EngineDeadError, match=reason):
                engine.check_health()
            with pytest.raises(EngineDeadError, match=reason):
                await engine.add_request("late", {"prompt_token_ids": [1]}, params)
        finally:
            await engine.shutdown()

    asyncio.run(scenario())


@pytest.mark.days(2)
def test_sleep_that_waits_for_a_failing_request_ends_the_process(args: EngineArgs) -> None:
    async def scenario() -> None:
        engine = await AsyncEngine.from_args(args, core_factory=failing_core.FACTORY)
        try:
            params = SamplingParams(max_tokens=1500, ignore_eos=True)
            await engine.add_request("fine", {"prompt_token_ids": [5]}, params)
            await engine.add_request("bad", {"prompt_token_ids": [IN_RESULT]}, params)
            with pytest.raises(EngineDeadError, match="illegal memory access"):
                await engine.sleep(2, "wait")
            with pytest.raises(EngineDeadError, match="illegal memory access"):
                engine.check_health()
        finally:
            await engine.shutdown()

    asyncio.run(scenario())
