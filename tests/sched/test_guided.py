"""Sequences that follow a grammar stand aside while their next mask isn't known; nobody waits for them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from helpers.page_checker import PageChecker
from helpers.plans import one_group
from helpers.traffic import FixedLength
from pagerunner.config import SpeculativeConfig
from pagerunner.errors import InvalidRequestError
from pagerunner.memory.manager import KVManager
from pagerunner.sched.guided import GRACE_SECONDS
from pagerunner.sched.live import MAX_WAITING
from pagerunner.sched.scheduler import Scheduler
from pagerunner.sched.suffix import SuffixDrafter
from pagerunner.types import EngineRequest, Grammar, RequestUpdate, SamplingParams, StepPlan, StepResult


class FakeGuide:
    """Its mask says how many tokens it has been told of. Ready when `open_gate` was called once more than `advance`."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.drafts: list[int] = []
        self.allows = 0
        self.gate = 0
        self.closed = 0
        self.error: str | None = None
        self.finished = False
        self.looking = False
        self.waits: list[tuple[float, bool]] = []

    @property
    def ready(self) -> bool:
        return self.gate > len(self.told)

    @property
    def looks_ahead(self) -> bool:
        return self.looking or not self.ready

    @property
    def masks(self) -> list[bytes | None]:
        assert self.ready, "the masks were read before they were known"
        return [b"%d" % (len(self.told) + at) for at in range(1 + min(len(self.drafts), self.allows))]

    def close(self) -> None:
        self.closed += 1

    def advance(self, token_ids: list[int], drafts: Sequence[int] = ()) -> None:
        assert self.ready
        self.told += token_ids
        self.drafts = list(drafts)

    def wait(self, seconds: float, *, ahead: bool = False) -> None:
        self.waits.append((seconds, ahead))


class Bench:
    def __init__(self, pages: int = 100, right: float = 0.0, **options: Any) -> None:
        plan = one_group(pages)
        self.guides: dict[str, FakeGuide] = {}
        self.manager = KVManager(plan, enable_prefix_caching=True)
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": plan.max_model_len}
        self.scheduler = Scheduler(self.manager, make_guide=self.make_guide, **limits | options)
        self.checker = PageChecker(plan, prefix_caching=True, right=right, looks_ahead=right > 0)
        self.output: dict[str, list[int]] = {}
        self.ended: dict[str, RequestUpdate] = {}

    def make_guide(self, request: EngineRequest) -> FakeGuide:
        return self.guides.setdefault(request.request_id, FakeGuide())

    def add(
        self,
        name: str,
        prompt_len: int,
        max_tokens: int,
        *,
        guided: bool,
        tokens: list[int] | None = None,
        salt: str = "",
    ) -> None:
        self.scheduler.add(
            EngineRequest(
                request_id=name,
                prompt_token_ids=tokens or [sum(map(ord, name)) * 1000 + at for at in range(prompt_len)],
                cache_salt=salt,
                params=SamplingParams(max_tokens=None),
                seed=0,
                max_tokens=max_tokens,
                grammar=Grammar("g") if guided else None,
            )
        )

    def settle(self) -> None:
        self.take(self.scheduler.settle_guides())

    def take(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            self.output.setdefault(update.request_id, []).extend(update.new_token_ids)
            if update.finish_reason is not None:
                assert self.ended.setdefault(update.request_id, update) is update

    def plan(self) -> StepPlan | None:
        self.settle()
        return self.scheduler.schedule()

    def commit(self, plan: StepPlan) -> None:
        self.take(self.scheduler.commit(plan, self.checker.run(plan)))

    def step(self) -> StepPlan:
        plan = self.plan()
        assert plan is not None
        self.commit(plan)
        return plan


def test_the_mask_goes_with_the_row_that_samples_and_with_no_other() -> None:
    bench = Bench(max_num_batched_tokens=16)
    bench.add("g", 24, 3, guided=True)
    bench.guides["g"].gate = 99
    plans = [bench.step() for _ in range(4)]
    assert [plan.masks for plan in plans] == [{}, {0: [b"0"]}, {0: [b"1"]}, {0: [b"2"]}]
    assert bench.guides["g"].told == bench.output["g"][:-1]
    assert bench.ended["g"].finish_reason == "length"


def test_while_a_grammar_compiles_everybody_else_runs() -> None:
    bench = Bench()
    bench.add("g", 20, 2, guided=True)
    bench.add("x", 20, 4, guided=False)
    for _ in range(4):
        assert bench.step().masks == {}
    assert list(bench.ended) == ["x"]
    assert bench.plan() is None and bench.scheduler.has_work and bench.scheduler.wait_for_guide(0)
    assert bench.scheduler.stats().waiting == 1
    bench.guides["g"].gate = 99
    bench.step(), bench.step()
    assert len(bench.output["g"]) == 2
    assert not bench.scheduler.has_work and not bench.scheduler.wait_for_guide(0)


def test_with_two_in_flight_it_stands_aside_until_its_token_is_known() -> None:
    bench = Bench(max_in_flight=2)
    bench.add("x", 20, 6, guided=False)
    bench.add("g", 20, 3, guided=True)
    bench.guides["g"].gate = 99
    first, second = bench.plan(), bench.plan()
    assert first is not None and second is not None
    assert (len(first.rows), len(second.rows)) == (2, 1)
    bench.commit(first)
    third = bench.plan()
    assert third is not None and len(third.rows) == 2 and third.masks == {1: [b"1"]}


def test_requests_are_taken_in_the_order_of_their_coming_when_their_grammars_are_there() -> None:
    bench = Bench(max_num_seqs=1)
    for name in "abc":
        bench.add(name, 20, 1, guided=True)
    assert bench.plan() is None
    for guide in bench.guides.values():
        guide.gate = 99
    while bench.scheduler.has_work:
        bench.step()
    assert list(bench.ended) == ["a", "b", "c"]


def test_a_complete_text_ends_without_another_step() -> None:
    bench = Bench()
    bench.add("g", 20, 50, guided=True)
    bench.guides["g"].gate = 99
    bench.step(), bench.step()
    bench.guides["g"].finished = True
    assert bench.plan() is None
    assert (bench.ended["g"].finish_reason, len(bench.output["g"])) == ("stop", 2)
    assert bench.manager.pool.used == [0] and not bench.scheduler.has_work


@pytest.mark.parametrize("when", ["compiling", "running"])
def test_a_guide_that_fails_ends_its_request_only(when: str) -> None:
    bench = Bench()
    bench.add("g", 20, 50, guided=True)
    bench.add("x", 20, 4, guided=False)
    if when == "running":
        bench.guides["g"].gate = 99
        bench.step()
    bench.guides["g"].gate, bench.guides["g"].error = 99, "too large"
    while bench.scheduler.has_work:
        bench.step()
    assert (bench.ended["g"].finish_reason, bench.ended["g"].error) == ("error", "too large")
    assert len(bench.output["x"]) == 4 and bench.manager.pool.used == [0]


def test_an_abort_while_compiling_and_an_engine_without_guides() -> None:
    bench = Bench()
    bench.add("g", 20, 50, guided=True)
    assert bench.plan() is None
    bench.take(bench.scheduler.abort(["g"]))
    assert bench.ended["g"].finish_reason == "abort" and not bench.scheduler.has_work
    plain = Scheduler(bench.manager, max_num_seqs=1, max_num_batched_tokens=16, max_model_len=64)
    request = EngineRequest(
        request_id="g", prompt_token_ids=[1], params=SamplingParams(), seed=0, max_tokens=1, grammar=Grammar("g")
    )
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        plain.add(request)
    assert not plain.has_work


def test_a_row_has_the_drafts_that_its_grammar_allows_and_a_mask_for_each_place() -> None:
    bench = Bench(right=1.0, draft_length=FixedLength(3))
    bench.add("g", 8, 12, guided=True)
    guide = bench.guides["g"]
    guide.gate, guide.allows = 99, 2
    first, second = bench.step(), bench.step()
    assert first.tell_drafts == [0] and first.masks == {0: [b"0"]} and len(guide.drafts) == 3
    assert second.rows[0].num_tokens == 3 and second.masks == {0: [b"1", b"2", b"3"]}
    assert len(bench.output["g"]) == 4, "both drafts were right"
    guide.allows = 0
    assert bench.step().masks == {0: [b"4"]}
    guide.allows = 9
    while "g" not in bench.ended:
        plan = bench.step()
        assert [len(masks) for masks in plan.masks.values()] == [plan.rows[0].num_tokens]
    assert len(bench.output["g"]) == 12


def test_masks_behind_drafts_are_waited_for_as_long_as_a_step_may_and_no_row_misses_its_step_for_them() -> None:
    bench = Bench(right=1.0, draft_length=FixedLength(3))
    for name in ("g", "h"):
        bench.add(name, 8, 12, guided=True)
        bench.guides[name].gate, bench.guides[name].allows = 99, 1
    bench.step()
    bench.guides["g"].looking = True
    plan = bench.step()
    assert [row.num_tokens for row in plan.rows] == [2, 2], "those that are made are used"
    assert [(0 < seconds <= GRACE_SECONDS, ahead) for seconds, ahead in bench.guides["g"].waits] == [(True, True)]
    assert bench.guides["h"].waits == []


@pytest.mark.parametrize("salt", ["", "a"])
def test_the_hosts_drafts_are_looked_at_before_the_plan_that_has_them(salt: str) -> None:
    words = SuffixDrafter(SpeculativeConfig(method="suffix", num_speculative_tokens=3))
    bench = Bench(draft_length=FixedLength(3), host_drafter=words)
    bench.add("g", 40, 30, guided=True, tokens=[*range(1, 9)] * 5, salt=salt)
    guide = bench.guides["g"]
    guide.gate, guide.allows = 99, 2

    def step(*tokens: int) -> StepPlan:
        plan = bench.plan()
        assert plan is not None and plan.tell_drafts == [] and plan.num_drafts == 0
        bench.take(bench.scheduler.commit(plan, StepResult(step_id=plan.step_id, token_ids=[[*tokens]])))
        return plan

    assert step(1).guesses == [] and guide.drafts == [], "the prompt isn't taken up before its answer begins"
    assert step(2).rows[0].num_tokens == 1 and guide.drafts == [3, 4, 5]
    plan = step(3, 4)
    assert plan.rows[0].num_tokens == 3 and plan.masks == {0: [b"2", b"3", b"4"]}
    assert [(guess.start, guess.tokens) for guess in plan.guesses] == [(42, [3, 4, 5])]
    assert guide.drafts == [5, 6, 7], "one of two was right"
    guide.allows = 0
    plan = step(9)
    assert plan.rows[0].num_tokens == 1 and plan.guesses == [] and guide.drafts == []
    assert bench.output["g"] == [1, 2, 3, 4, 9]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_in_a_pool_that_preempts(seed: int, drafts: int) -> None:
    """Guides become ready at random, and allow some drafts; every guide is told every token of its sequence once, in order."""
    random_ = random.Random(seed)
    limits = {"max_in_flight": 2, "max_num_batched_tokens": random_.choice([24, 64]), "max_num_seqs": 5}
    right = {"right": 0.7, "draft_length": FixedLength(drafts)} if drafts else {}
    bench = Bench(pages=12, **limits, **right)
    names = [f"{'g' if index % 2 else 'x'}{index}" for index in range(16)]
    for name in names:
        bench.add(name, random_.randint(1, 60), random_.randint(1, 40), guided=name.startswith("g"))
    in_flight: deque[StepPlan] = deque()
    for _ in range(20_000):
        for guide in bench.guides.values():
            if random_.random() < 0.5 and not guide.ready:
                guide.gate, guide.allows = len(guide.told) + 1, random_.randrange(4)
        while len(in_flight) < 2 and (plan := bench.plan()) is not None:
            for row in plan.masks:
                assert plan.rows[row].samples
            in_flight.append(plan)
        if in_flight:
            bench.commit(in_flight.popleft())
        elif not bench.scheduler.has_work:
            break
    assert sorted(bench.ended) == sorted(names)
    assert all(update.finish_reason == "length" for update in bench.ended.values())
    for name, guide in bench.guides.items():
        output = bench.output[name]  # the tokens of its last step have nothing behind them
        assert guide.told == output[: len(guide.told)] and 1 <= len(output) - len(guide.told) <= 1 + drafts
    assert bench.scheduler.stats().preemptions_total > 0
    assert bench.manager.pool.used == [0]


def test_closing_the_guides_closes_each_once() -> None:
    bench = Bench(max_num_seqs=1)
    for name in "abc":
        bench.add(name, 5, 3, guided=True)
    bench.guides["a"].gate = 99
    bench.plan()  # one runs, and the others are held back
    bench.scheduler.abort(["b"])
    for _ in range(2):
        bench.scheduler.close_guides()
        assert [guide.closed for guide in bench.guides.values()] == [1, 1, 1]


def test_requests_that_a_grammar_holds_back_are_listed_with_the_reason() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("g", 20, 2, guided=True)
    assert bench.scheduler.stats().waiting_for == "grammar", "it is still in the line"
    bench.add("h", 20, 2, guided=True)
    assert bench.plan() is None
    assert waits(bench) == {"g": "grammar", "h": "grammar"}
    assert (bench.scheduler.stats().waiting, bench.scheduler.stats().waiting_for) == (2, "grammar")
    bench.add("x", 20, 2, guided=False)
    bench.add("y", 20, 2, guided=False)
    bench.step()
    assert waits(bench) == {"x": "", "g": "grammar", "h": "grammar", "y": "slot"}
    assert (bench.scheduler.stats().waiting, bench.scheduler.stats().waiting_for) == (3, "slot")
    assert set(waits(bench, paused=True).values()) == {"paused"}
    assert bench.scheduler.stats(paused=True).waiting_for == "paused"


def test_no_more_are_listed_than_else_when_grammars_hold_many_back() -> None:
    bench = Bench()
    for number in range(MAX_WAITING + 10):
        bench.add(f"g{number}", 4, 2, guided=True)
    assert bench.plan() is None
    bench.add("x", 4, 2, guided=False)
    assert len(bench.scheduler.live()) == MAX_WAITING
    assert bench.scheduler.stats().waiting == MAX_WAITING + 11


def waits(bench: Bench, *, paused: bool = False) -> dict[str, str]:
    return {one.request_id: one.wait for one in bench.scheduler.live(paused=paused)}
