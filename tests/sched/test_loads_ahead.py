"""Loads for requests that wait: what was brought for a later request never takes the room of an earlier one, which would cost the bus twice."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from helpers.recount import recount
from pagerunner.memory.leases import Leases
from pagerunner.memory.manager import KVManager
from pagerunner.memory.planner import plan_memory
from pagerunner.memory.specs import FullKV, Spec, WindowKV
from pagerunner.sched.scheduler import Scheduler
from pagerunner.tiers.below import Below
from pagerunner.tiers.host import HostTier
from pagerunner.tiers.policy import Tiering
from pagerunner.types import EngineRequest, RequestUpdate, SamplingParams, StepPlan, StepResult, TransferEnd

TOKENS = 250
FULL = FullKV(1, 16, "bfloat16")
WINDOW = WindowKV(1, 16, "bfloat16", window=64)
STEP = 256


class Engine:
    """A scheduler with two plans in flight over pages for `prompts` prompts. The bus moves one transfer after another, and each takes `lag` steps.

    A `fast` bus moves them at once, but the core hears of it so many steps later.
    """

    def __init__(self, spec: Spec, prompts: float, lag: int, host_prompts: int = 400, **options: object) -> None:
        plan = plan_memory(
            [spec],
            page_tokens=16,
            budget_bytes=2**22,
            model_max_len=TOKENS + 64,
            max_num_seqs=32,
            max_num_batched_tokens=STEP,
        )
        one = plan.request_bytes(TOKENS + 16)
        plan = plan_memory(
            [spec],
            page_tokens=16,
            budget_bytes=max(int(prompts * one), plan.request_bytes(TOKENS + 64)),
            model_max_len=TOKENS + 64,
            max_num_seqs=32,
            max_num_batched_tokens=STEP,
        )
        self.manager = KVManager(plan)
        self.tiers = Tiering(self.manager, HostTier(plan, host_prompts * one), clock=lambda: 0.0)
        self.tiers.grow(host_prompts * one)
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=32,
            max_num_batched_tokens=STEP,
            max_model_len=TOKENS + 64,
            max_in_flight=2,
            tiers=self.tiers,
            **options,  # type: ignore[arg-type]
        )
        self.steps, self.lag, self.fast = 0, lag, False
        self.flight: list[StepPlan] = []
        self.bus: list[tuple[int, int]] = []  # (number, when it ends)
        self.found: dict[str, int] = {}
        self.done: list[str] = []

    def add(self, name: str, prompt: list[int], max_tokens: int = 1, priority: int = 0) -> None:
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        self.scheduler.add(
            EngineRequest(
                request_id=name,
                prompt_token_ids=prompt,
                params=params,
                seed=0,
                max_tokens=max_tokens,
                priority=priority,
            )
        )

    def step(self) -> None:
        self.steps += 1
        self.tiers.settle()
        for number, when in list(self.bus):
            if when <= self.steps:
                self.bus.remove((number, when))
                self.scheduler.end_transfer(TransferEnd(number, True, 1e-6))
        while len(self.flight) < 2 and (plan := self.scheduler.schedule()) is not None:
            self.flight.append(plan)
            for transfer in plan.transfers:
                begins = max(self.steps, self.bus[-1][1] if self.bus and not self.fast else 0)
                self.bus.append((transfer.number, begins + self.lag))
        if self.flight:
            plan = self.flight.pop(0)
            tokens = [[7] if row.samples else [] for row in plan.rows]
            self._note(self.scheduler.commit(plan, StepResult(step_id=plan.step_id, token_ids=tokens)))

    def _note(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            if update.new_token_ids:
                self.found.setdefault(update.request_id, update.num_cached_tokens)
            if update.finish_reason is not None:
                self.done.append(update.request_id)

    def run(self, most: int = 5_000) -> None:
        """Until all requests have ended and nothing is stored or loaded."""
        for _ in range(most):
            if not self.scheduler.has_work:
                recount(self.manager)
                self.tiers.settle()
                assert not any(self.manager.pool.used) and not any(self.tiers.host.pool.used)
                return
            self.step()
        raise AssertionError(f"requests starve: {self.scheduler.request_ids}")


def prompt(number: int) -> list[int]:
    return [number * 1_000 + token for token in range(TOKENS)]


def remember(engine: Engine, numbers: list[int]) -> None:
    """Put prompts into host memory, and nothing else onto the device."""
    for number in numbers:
        engine.add(f"store {number}", prompt(number))
        engine.run()
    engine.manager.reset_prefix_cache()


@pytest.fixture
def given_up(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What was kept for requests that wait and then given up, since somebody else needed the room."""
    found: list[bool] = []
    give_up = Leases.give_up_kept

    def noted(leases: Leases) -> bool:
        found.append(give_up(leases))
        return found[-1]

    monkeypatch.setattr(Leases, "give_up_kept", noted)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_what_is_loaded_ahead_is_never_given_up_and_all_that_host_memory_has_is_found(
    seed: int, given_up: list[bool]
) -> None:
    chance = random.Random(seed)
    engine = Engine(FULL, prompts=7.1, lag=chance.choice((0, 1, 3)))
    there = [number for number in range(32) if chance.random() < chance.choice((0.2, 0.5, 0.8))]
    remember(engine, there)
    given_up.clear()
    line = list(range(32))
    if seed % 2:
        chance.shuffle(line)
    for number in line:
        engine.add(f"{number}", prompt(number), max_tokens=chance.choice((1, 1, 6)))
    before = engine.tiers.counts.load_bytes
    engine.run()
    assert not any(given_up)
    assert {name: found for name, found in engine.found.items() if name.isdigit()} == {
        str(number): 240 if number in there else 0 for number in line
    }
    each = 15 * engine.manager.plan.groups[0].page_bytes
    assert engine.tiers.counts.load_bytes - before == len(there) * each


def test_a_load_behind_many_others_pays_where_prompts_are_computed_before_it() -> None:
    """A load takes a step, and a prompt is computed in eight. So the ninth load doesn't pay, unless a prompt is computed already."""
    engine = Engine(FULL, prompts=24.1, lag=1)
    remember(engine, list(range(32)))
    engine.scheduler._planner._max_num_batched_tokens = 32
    rates = engine.tiers.rates
    rates.bytes_per_second, rates.seconds_per_token = 15.0 * engine.manager.plan.groups[0].page_bytes, 8 / 240
    rates.moved = rates.computed = lambda *_: None  # type: ignore[method-assign]
    before = engine.steps
    for number in range(32):
        engine.add(f"{number}", prompt(number))
    engine.run()
    assert 1 <= sum(engine.found[str(number)] == 0 for number in range(32)) <= 3
    assert engine.steps - before <= 48, "as long as the bus needs, and not as long as half of the prompts are computed"


class Disk:
    """A KeepingStore that reads pages one after another, those of a prompt in so many steps."""

    def __init__(self, engine: Engine, reading: float) -> None:
        self.engine = engine
        self.rate = 15 * engine.manager.plan.groups[0].page_bytes / reading  # bytes of a step
        self.free_at = 0.0
        self.pages: set[tuple[int, bytes]] = set()
        self.begun: list[tuple[int, list[bool], float]] = []  # (number, outcomes, when they are there)

    def find(self, group: int, keys: Sequence[bytes]) -> list[bool]:
        return [(group, key) in self.pages for key in keys]

    def write(self, number: int, pages: Sequence[Any]) -> None:
        self.pages.update((group, key) for group, key, _ in pages)
        self.begun.append((number, [True] * len(pages), 0))

    def read(self, number: int, pages: Sequence[Any]) -> None:
        self.free_at = self.engine.steps + self.seconds(len(pages) * self.engine.manager.plan.groups[0].page_bytes)
        self.begun.append((number, [True] * len(pages), self.free_at))

    def ended(self) -> list[tuple[int, list[bool]]]:
        done = [one for one in self.begun if one[2] <= self.engine.steps]
        self.begun = [one for one in self.begun if one[2] > self.engine.steps]
        return [(number, outcomes) for number, outcomes, _ in done]

    def seconds(self, nbytes: int) -> float:
        return max(self.free_at - self.engine.steps, 0) + nbytes / self.rate


@pytest.mark.parametrize(("host_prompts", "reading", "most"), [(400, 1, 40), (12, 4, 100), (400, 10, 160)])
def test_prompts_on_a_disk_are_read_while_others_are_computed(host_prompts: int, reading: int, most: int) -> None:
    """Reading one takes so many steps, and computing one eight. Disk and device are both at work: 32 prompts take 28, 85 and 142 steps at least. Host memory may have
    room for all that is read, or for six prompts at a time.
    """
    engine = Engine(FULL, prompts=24.1, lag=0, host_prompts=host_prompts)
    disk, host = Disk(engine, reading), engine.tiers.host
    sizes = [group.page_bytes for group in engine.manager.plan.groups]
    engine.tiers.below = Below(disk, host, bytes(host.num_bytes), sizes, clock=lambda: 0.0)  # type: ignore[arg-type]
    remember(engine, list(range(32)))
    host.clear()
    engine.scheduler._planner._max_num_batched_tokens = 32
    rates = engine.tiers.rates
    rates.bytes_per_second, rates.seconds_per_token = 1e12, 8 / 240
    rates.moved = rates.computed = lambda *_: None  # type: ignore[method-assign]
    before = engine.steps
    for number in range(32):
        engine.add(f"{number}", prompt(number))
    engine.run()
    assert engine.steps - before <= most
    assert any(engine.found[str(number)] for number in range(32))


@pytest.mark.parametrize("lag", [0, 3, 4])
def test_prompts_are_stored_before_the_next_ones_push_them_out(lag: int) -> None:
    engine = Engine(FULL, prompts=7.1, lag=lag)
    engine.fast = True
    for number in range(32):
        engine.add(f"{number}", prompt(number))
    engine.run()
    assert len(engine.tiers.host.index.pages[0]) == 32 * 15
    assert engine.steps <= 32 + lag + 2 and engine.tiers.counts.stores_skipped == 0


def test_a_request_of_higher_priority_takes_what_is_set_aside_and_the_others_are_looked_up_again() -> None:
    engine = Engine(FULL, prompts=3.1, lag=4, policy="priority")
    remember(engine, [0, 1, 2, 3, 4])
    for number in range(3):
        engine.add(f"{number}", prompt(number), priority=1)
    engine.step()
    assert len(engine.tiers._ahead) == 3
    engine.add("runs", prompt(9), max_tokens=2, priority=0)
    engine.add("urgent", prompt(3), priority=0)
    engine.step()
    assert len(engine.tiers._ahead) < 3, "the last loads are given up for who comes before them"
    engine.run()
    wanted = {"runs": 0, "urgent": 240, "0": 240, "1": 240, "2": 240}
    assert {name: engine.found[name] for name in wanted} == wanted
    assert engine.done.index("urgent") < engine.done.index("1")


@pytest.mark.parametrize("spec", [FULL, WINDOW])
@pytest.mark.parametrize("seed", range(8))
def test_nobody_starves(seed: int, spec: Spec) -> None:
    """Running requests outgrow their prompts and preempt each other, priorities come in between, and some requests are gone before their turn."""
    chance = random.Random(seed)
    engine = Engine(spec, prompts=chance.choice((1.3, 2.5, 4.0)), lag=chance.choice((0, 2, 5)), policy="priority")
    remember(engine, [number for number in range(12) if chance.random() < 0.6])
    names = [f"{number}" for number in range(40)]
    for name in names:
        tokens = prompt(int(name) % 16)[: chance.choice((TOKENS, TOKENS, 100))]
        engine.add(name, tokens, max_tokens=chance.choice((1, 20, 60)), priority=chance.choice((0, 0, 1)))
        for _ in range(chance.choice((0, 0, 1, 5))):
            engine.step()
        if chance.random() < 0.1:
            engine.scheduler.abort([chance.choice(names)])
    engine.run()
