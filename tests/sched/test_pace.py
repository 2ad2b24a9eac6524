"""target_itl_ms: prompts hold up those who generate for no longer than the target, and go on all the same."""

from __future__ import annotations

import logging
import random
from collections import deque
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.device_costs import KEY_BYTES, Device
from helpers.effort import effort
from helpers.page_checker import PageChecker, expected_output
from helpers.plans import one_group
from helpers.simulated_engine import Arrival, at, poisson, simulate
from pagerunner.memory.manager import KVManager
from pagerunner.sched.costs import CostModel
from pagerunner.sched.draft_length import AdaptiveLength
from pagerunner.sched.scheduler import Scheduler
from pagerunner.types import EngineRequest, SamplingParams, StepPlan
from pagerunner.types.steps import StepShape

TOKENS = 2048


def request(name: str, prompt: int, max_tokens: int = 8, priority: int = 0) -> EngineRequest:
    own = [sum(map(ord, name)) * 1000 + place for place in range(prompt)]
    return EngineRequest(
        request_id=name,
        prompt_token_ids=own,
        params=SamplingParams(max_tokens=None),
        seed=0,
        max_tokens=max_tokens,
        priority=priority,
    )


class Engine:
    """A scheduler over a device whose costs are known, and a runner that notices a wrong page."""

    def __init__(
        self, target: float | None, *, pages: int = 2000, measured: bool = True, drafts: int = 0, **options: Any
    ) -> None:
        self.device, plan = Device(), one_group(pages)
        self.costs = CostModel(self.device.measured() if measured else None, KEY_BYTES)
        limits: dict[str, Any] = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": TOKENS,
            "max_model_len": plan.max_model_len,
        }
        limits["draft_length"] = AdaptiveLength(self.costs, [drafts] if drafts else [])
        self.scheduler = Scheduler(KVManager(plan), costs=self.costs, target_itl=target, **limits | options)
        self.checker = PageChecker(plan, prefix_caching=True, right=0.7)
        self.in_flight: deque[StepPlan] = deque()
        self.output: dict[str, list[int]] = {}
        self.plans: list[StepPlan] = []

    def step(self) -> StepPlan:
        """Plan what may be planned, and commit the oldest plan."""
        while (plan := self.scheduler.schedule()) is not None:
            self.in_flight.append(plan)
        plan = self.in_flight.popleft()
        self.plans.append(plan)
        result = self.checker.run(plan)
        timed = [(plan.step_id, self.device.run(StepShape.of(plan)))]
        result = msgspec.structs.replace(result, timed=timed)
        for update in self.scheduler.commit(plan, result):
            self.output.setdefault(update.request_id, []).extend(update.new_token_ids)
        return plan

    def drain(self) -> None:
        for _ in range(20_000):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("somebody never ends")


def pieces(plan: StepPlan) -> list[int]:
    """Tokens of the prompts of a step."""
    return [row.num_tokens for row in plan.rows if row.tokens]


def test_pieces_are_as_long_as_the_target_allows_and_whole_when_nobody_generates() -> None:
    engine = Engine(0.02)
    engine.scheduler.add(request("first", TOKENS + 500, 300))
    assert pieces(engine.step()) == [TOKENS], "nobody generates"
    engine.step()
    engine.scheduler.add(request("second", 3000))
    plans = [engine.step() for _ in range(4)]
    assert all(len(plan.rows) == 2 for plan in plans), "the first generates in every step"
    for plan in plans[:3]:
        assert 0.019 < engine.device.seconds(StepShape.of(plan)) < 0.021
    assert sum(sum(pieces(plan)) for plan in plans) == 3000
    engine.drain()


def test_several_prompts_share_a_step_that_has_time_for_them() -> None:
    engine = Engine(0.02)
    engine.scheduler.add(request("first", 10, 100))
    engine.step()
    for name in "abcde":
        engine.scheduler.add(request(name, 300, 1))
    assert pieces(engine.step()) == [300, 300, pytest.approx(250, abs=60)], "the third in part, the others wait in line"
    assert engine.scheduler.stats().waiting == 2
    engine.drain()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_prompt_before_those_who_generate_leaves_them_their_tokens(in_flight: int) -> None:
    engine = Engine(0.02, policy="priority", max_in_flight=in_flight)
    for name in "abc":
        engine.scheduler.add(request(name, 10, 200, priority=1))
    for _ in range(3):
        engine.step()
    engine.scheduler.add(request("urgent", 3500, 1))
    for _ in range(5):
        engine.step()
    together = [plan for plan in engine.plans if len(plan.rows) == 4 and plan.rows[0].tokens][:3]
    assert all([row.num_tokens for row in plan.rows][1:] == [1, 1, 1] for plan in together)
    assert all(500 < pieces(plan)[0] < 1000 for plan in together)
    engine.drain()


def test_a_target_below_a_decode_step_is_said_once_with_both_numbers(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(0.002)
    engine.scheduler.add(request("first", 10, 400))
    engine.step()
    engine.scheduler.add(request("second", 1000, 4))
    with caplog.at_level(logging.WARNING):
        for _ in range(200):
            engine.step()
    said = [record.message for record in caplog.records if "target_itl_ms" in record.message]
    assert len(said) == 1
    assert "target_itl_ms=2 is less than the 3.9 ms that a step takes for the 1 requests" in said[0]
    assert "second" in engine.output, "it went on beside the first"
    engine.drain()


@settings(max_examples=effort(25, 400), deadline=None)
@given(
    seed=st.integers(0, 10**9),
    target=st.sampled_from([1e-9, 0.003, 0.006, 0.02, 0.1]),
    policy=st.sampled_from(["fcfs", "priority"]),
    in_flight=st.sampled_from([1, 2, 3]),
    measured=st.booleans(),
    pages=st.sampled_from([120, 1000]),
    drafts=st.sampled_from([0, 0, 1, 4]),
)
def test_every_prompt_goes_on_and_tokens_do_not_depend_on_it(
    seed: int, target: float, policy: str, in_flight: int, measured: bool, pages: int, drafts: int
) -> None:
    generator = random.Random(seed)
    limits: dict[str, Any] = {"policy": policy, "max_in_flight": in_flight, "max_num_seqs": 5}
    engine = Engine(target, measured=measured, pages=pages, drafts=drafts, **limits)
    requests: list[EngineRequest] = []
    while len(requests) < 12 or engine.scheduler.has_work:
        if len(requests) < 12 and (generator.random() < 0.3 or not engine.scheduler.has_work):
            prompt = generator.choice([1, 20, 150, 500])
            requests.append(
                request(f"r{len(requests)}", prompt, generator.randint(1, 12), generator.choice([0, 0, 1, 2]))
            )
            engine.scheduler.add(requests[-1])
        unfinished = [
            one
            for one in engine.scheduler._state.running
            if one.scheduled < min(one.refill, len(one.tokens)) and not one.blocked
        ]
        before = {id(one): one.scheduled for one in unfinished}
        plan = engine.step()
        if unfinished and in_flight == 1 and pages == 1000:  # nobody is preempted
            least = min(16, *(one.refill - before[id(one)] for one in unfinished))
            assert sum(pieces(plan)) >= least, "no prompt goes on"
        assert len(engine.plans) < 6000
    for one in requests:
        assert engine.output[one.request_id] == expected_output(one, engine.scheduler.max_model_len)[0]


def test_the_load_of_the_benchmark_keeps_the_target_and_its_throughput() -> None:
    load = poisson(32, effort(100, 320), 1024, 128)
    without, bounded = (simulate(load, Device(noise=0.03), target) for target in (None, 0.025))
    assert at(without.between, 0.99) > 0.08
    assert at(bounded.between, 0.99) < 0.030
    assert bounded.tokens_per_second > 0.95 * without.tokens_per_second
    assert bounded.error < 0.05


def test_a_burst_beside_long_prompts_keeps_it_without_a_measurement_at_the_start() -> None:
    load = [*poisson(20, effort(60, 300), 200, 100), *(Arrival(0.5 * number, 30_000, 20) for number in range(3))]
    out = simulate(sorted(load, key=lambda one: one.at), Device(noise=0.05), 0.02, measured=False)
    assert at(out.between, 0.99) < 0.024
