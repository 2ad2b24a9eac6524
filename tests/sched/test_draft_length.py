"""How many drafts: many where they are right and the step has room, none where they cost more than they bring, and soon so after a change."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest

from helpers.device_costs import KEY_BYTES, Device
from helpers.effort import effort
from helpers.simulated_engine import Arrival, simulate
from helpers.traffic import FixedLength
from pagerunner.config import SpeculativeConfig
from pagerunner.sched.costs import CostModel
from pagerunner.sched.draft_length import AdaptiveLength, DraftLength
from pagerunner.types import StepPlan, StepResult, StepRow
from pagerunner.types.steps import StepShape

CHOICES = (1, 2, 3, 5, 7)
Rates = Callable[[int], float]
"""How often a draft of a row is right, if those before it were."""
ByPlace = tuple[float, ...]
"""The same by the draft's place, for all rows."""


class Decoding:
    """Rows that generate for ever on a device whose costs are known."""

    def __init__(
        self,
        rows: int,
        *,
        length: DraftLength | None = None,
        measured: bool = True,
        noise: float = 0.02,
        room: float = math.inf,
    ):
        self.device = Device(noise=noise)
        self.costs = CostModel(self.device.measured(CHOICES if measured else ()) if measured else None, KEY_BYTES)
        self.length = length or AdaptiveLength(self.costs, CHOICES)
        self.rows, self.random, self.room = rows, random.Random(3), room
        self.made = self.steps = 0
        self.seconds, self.tokens = 0.0, 0
        self.chosen: list[int] = []

    def run(self, steps: int, rate: Rates | ByPlace | float) -> float:
        """Tokens a second of these steps."""
        seconds, tokens = self.seconds, self.tokens
        for _ in range(steps):
            self._step(rate if callable(rate) else lambda row: rate)
        return (self.tokens - tokens) / (self.seconds - seconds)

    def _step(self, rate: Callable[[int], float | ByPlace]) -> None:
        keys = 1000 * self.rows
        drafts = self.length.choose(self.rows, keys, self.room)
        self.chosen.append(drafts)
        tried, self.made = min(self.made, drafts), drafts
        rows = [StepRow(slot, 1000, 1 + tried, [], True) for slot in range(self.rows)]
        plan = StepPlan(step_id=self.steps, rows=rows, num_drafts=drafts)
        shape = StepShape.of(plan)
        self.costs.planned(self.steps, shape, drafts)
        seconds = self.device.run(shape)
        found = []
        for row in range(self.rows):
            accepted, own = 0, rate(row)
            while accepted < tried and self.random.random() < (own[accepted] if isinstance(own, tuple) else own):
                accepted += 1
            found.append([7] * (1 + accepted))
        result = StepResult(step_id=self.steps, token_ids=found, timed=[(self.steps, seconds)])
        self.costs.timed(result.timed)
        if drafts:
            self.length.learn(plan, result)
        self.steps += 1
        self.seconds += seconds
        self.tokens += sum(map(len, found))

    def usual(self, steps: int) -> int:
        """What was chosen most often in the last steps."""
        return Counter(self.chosen[-steps:]).most_common(1)[0][0]


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 7, 15])
def test_the_numbers_that_have_graphs_leave_out_none_that_pays(most: int) -> None:
    choices = SpeculativeConfig(method="eagle3", num_speculative_tokens=most).lengths
    assert choices[-1] == most and len(choices) <= 7
    device = Device()
    for rows in (1, 8, 64, 256):
        for rate in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95):
            brings = [
                sum(rate**place for place in range(1 + drafts))
                / device.seconds(StepShape(rows, rows * (1 + drafts), 1000 * rows, 0, drafts))
                for drafts in range(1 + most)
            ]
            assert max(brings[drafts] for drafts in (0, *choices)) > 0.97 * max(brings), (rows, rate)


def test_a_most_of_3_has_2_among_its_numbers() -> None:
    assert SpeculativeConfig(method="eagle3", num_speculative_tokens=3).lengths == (1, 2, 3)


def best_fixed(rows: int, rate: Rates | ByPlace | float, steps: int = 200) -> float:
    return max(Decoding(rows, length=FixedLength(drafts)).run(steps, rate) for drafts in (0, *CHOICES))


@pytest.mark.parametrize(("rows", "rate"), [(1, 0.8), (1, 0.3), (8, 0.6), (64, 0.7), (256, 0.3), (256, 0.9)])
def test_it_brings_what_the_best_fixed_number_brings(rows: int, rate: float) -> None:
    engine = Decoding(rows)
    engine.run(100, rate)
    assert engine.run(300, rate) > 0.95 * best_fixed(rows, rate)


BY_PLACE = (1.0, 0.8, 0, 0, 0, 0, 0)  # 2.8 tokens a step with 2 drafts or more


@pytest.mark.parametrize("rate", [BY_PLACE, (0.9,) * 7])
@pytest.mark.parametrize(("rows", "least"), [(1, 0.9), (8, 0.9), (64, 0.95), (256, 0.95)])
def test_the_first_hundred_steps_bring_most_of_it(rows: int, least: float, rate: ByPlace) -> None:
    engine, best = Decoding(rows), best_fixed(rows, rate)
    assert engine.run(20, rate) > 0.8 * best
    assert engine.run(80, rate) > least * best


def test_a_place_that_is_never_right_counts_nothing_soon() -> None:
    length = AdaptiveLength(CostModel(), (1, 2, 3))
    for step in range(30):
        length.choose(1, 1000)
        plan = StepPlan(step_id=step, rows=[StepRow(0, 1000, 4, [], True)], num_drafts=3)
        length.learn(plan, StepResult(step_id=step, token_ids=[[7, 7, 7]]))
    expected = length.expected()
    assert expected[3] < expected[2] + 0.03


def test_a_dear_number_is_not_chosen_before_the_one_below_it_has_run() -> None:
    engine = Decoding(256)
    engine.run(300, (1.0, 1.0, 0, 0, 0, 0, 0))  # so the third is believed to be right, and those behind it
    assert 0 < max(engine.chosen) <= 3, "7 would take 5 times as long as none"


def test_good_drafts_at_one_row_are_many() -> None:
    engine = Decoding(1)
    assert engine.run(300, 0.85) > 2 * Decoding(1, length=FixedLength(0)).run(300, 0.85)
    assert engine.usual(100) >= 5


def test_poor_drafts_at_256_rows_are_none_and_cost_less_than_3_percent() -> None:
    poor = 0.23  # 1.3 tokens a step with many drafts
    engine = Decoding(256)
    without = Decoding(256, length=FixedLength(0)).run(400, poor)
    assert engine.run(400, poor) > 0.97 * without, "from the first step on"
    assert engine.run(1000, poor) > 0.985 * without
    assert engine.usual(1000) == 0
    assert Decoding(256, length=FixedLength(3)).run(100, poor) < 0.75 * without, "the loss that it avoids"


@pytest.mark.parametrize(("rows", "within"), [(1, 80), (64, 40), (256, 100)])
def test_a_change_is_followed(rows: int, within: int) -> None:
    engine = Decoding(rows)
    engine.run(300, 0.02)
    assert engine.usual(100) == 0
    engine.run(within, 0.95)
    assert engine.chosen[-1] >= 1
    assert engine.run(200, 0.95) > 0.9 * best_fixed(rows, 0.95)
    engine.run(within, 0.02)
    assert engine.usual(5) == 0


def test_one_requests_poor_drafts_leave_the_others_theirs() -> None:
    def one_poor(row: int) -> float:
        return 0.0 if row == 0 else 0.8

    engine = Decoding(8)
    engine.run(100, one_poor)
    assert engine.run(300, one_poor) > 0.97 * best_fixed(8, one_poor)
    assert engine.usual(200) >= 3


def test_drafts_make_no_step_longer_than_the_target() -> None:
    engine = Decoding(64)
    assert engine.run(300, 0.95) and engine.usual(100) >= 5
    target = 1.02 * engine.costs.decode_seconds(64, 64_000, 3)
    bounded = Decoding(64)
    bounded.length = AdaptiveLength(bounded.costs, CHOICES, target)
    bounded.run(300, 0.95)
    assert bounded.usual(100) == 3 == max(bounded.chosen)
    bounded.length = AdaptiveLength(bounded.costs, CHOICES, 1e-4)
    bounded.run(50, 0.95)
    assert bounded.usual(50) == 0, "what a step takes without drafts is no reason for none"


def test_without_a_measurement_it_tries_and_learns() -> None:
    for rows, rate in ((1, 0.8), (64, 0.05)):
        engine = Decoding(rows, measured=False)
        engine.run(300, rate)
        assert engine.run(300, rate) > 0.95 * best_fixed(rows, rate)


@pytest.mark.parametrize(("rate", "room"), [(0.15, 3), (0.5, 2)])
def test_a_number_that_a_step_has_no_room_for_is_not_chosen_over_and_over(rate: float, room: int) -> None:
    run = Decoding(256, measured=False, room=room)
    run.run(500, rate)
    fixed = [Decoding(256, length=FixedLength(drafts)).run(200, rate) for drafts in (0, *CHOICES) if drafts <= room]
    assert run.run(500, rate) > 0.97 * max(fixed)
    assert max(run.chosen) <= room


def test_what_one_row_taught_is_not_believed_of_many() -> None:
    engine = Decoding(1, measured=False)
    engine.run(200, 0.9)
    assert engine.usual(100) >= 3
    engine.rows = 256
    engine.run(100, 0.1)
    assert engine.usual(50) == 0
    assert engine.run(300, 0.1) > 0.97 * best_fixed(256, 0.1)


def test_a_trial_is_as_seldom_as_it_is_dear() -> None:
    engine = Decoding(256)
    engine.run(300, 0.1)
    begun = [place for place in range(301, 2300) if engine.run(1, 0.1) and engine.chosen[-1] > engine.chosen[-2]]
    apart = [later - one for one, later in zip(begun, begun[1:], strict=False)]
    assert 10 < len(begun) < 40, "one in 34 steps would be 58"
    assert min(apart) > 32


def test_a_step_that_only_has_drafts_made_teaches_nothing() -> None:
    costs = CostModel(Device().measured(CHOICES), KEY_BYTES)
    before = [costs.decode_seconds(64, 0, drafts) for drafts in (0, *CHOICES)]
    costs.planned(0, StepShape(64, 64, 0, 0), 3)
    costs.planned(1, StepShape(64, 128, 0, 0, 1), 3)
    costs.timed([(0, 0.5), (1, 0.5)])
    assert [costs.decode_seconds(64, 0, drafts) for drafts in (0, *CHOICES)] == before


@pytest.mark.parametrize(("rows", "rate", "least"), [(256, 0.23, 0.97), (64, 0.8, 1.2)])
def test_requests_that_come_at_once_with_two_plans_in_flight(rows: int, rate: float, least: float) -> None:
    load = [Arrival(0, 100, effort(120, 400)) for _ in range(rows)]
    without = simulate(load, Device(noise=0.03), None)
    fixed = simulate(load, Device(noise=0.03), None, rate=rate, fixed=3)
    found = simulate(load, Device(noise=0.03), None, rate=rate)
    assert found.tokens == without.tokens
    assert found.tokens_per_second > least * without.tokens_per_second
    assert found.tokens_per_second > 0.95 * fixed.tokens_per_second
