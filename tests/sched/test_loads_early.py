"""The bus has work while the line is looked up, and requests that run don't wait until all of it is.

Time is simulated: a look at a prompt takes the host LOOK seconds, a step takes STEP, and a prompt's pages take LOAD on the bus.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pytest

from pagerunner.memory.manager import KVManager
from pagerunner.memory.planner import plan_memory
from pagerunner.memory.specs import FullKV, RecurrentState, Spec
from pagerunner.sched.scheduler import Scheduler
from pagerunner.tiers.books import Waiting
from pagerunner.tiers.host import HostTier
from pagerunner.tiers.policy import Tiering
from pagerunner.types import EngineRequest, SamplingParams, StepPlan, StepResult, TransferEnd

TOKENS, PROMPTS, ROOM, SLOTS = 4_096, 48, 24, 32
LOOK, STEP, LOAD = 0.0015, 0.010, 0.0044
KINDS: dict[str, list[Spec]] = {
    "full": [FullKV(1, 16, "bfloat16")],
    "hybrid": [RecurrentState(((40, 64),), ("bfloat16",)), FullKV(1, 16, "bfloat16")],
}


class Timed(Tiering):
    """Looks take the host's time."""

    now = 0.0

    def look_up(self, request: Waiting, behind: Iterable[Waiting] | None = None) -> bool:
        before = self._refused
        found = super().look_up(request, behind)
        self.now += LOOK * (found or before != self._refused)  # else it knew that there is no room
        return found


class Load(NamedTuple):
    """A load's seconds on the bus, and when it was launched."""

    begun: float
    ended: float


class Engine:
    """Two plans in flight, room for ROOM prompts on the device and for all in host memory."""

    def __init__(self, kind: str) -> None:
        specs = KINDS[kind]
        each = sum(spec.page_bytes(16) * (2 if isinstance(spec, RecurrentState) else TOKENS // 16) for spec in specs)
        plan = plan_memory(
            specs,
            page_tokens=16,
            budget_bytes=(ROOM + 1) * each,
            model_max_len=TOKENS + 128,
            max_num_seqs=SLOTS,
            max_num_batched_tokens=TOKENS,
        )
        self.manager, host = KVManager(plan), HostTier(plan, 2 * PROMPTS * each)
        self.tiers = Timed(self.manager, host, clock=lambda: 0.0)
        self.tiers.grow(host.num_bytes)
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=SLOTS,
            max_num_batched_tokens=TOKENS,
            max_model_len=TOKENS + 128,
            tiers=self.tiers,
            max_in_flight=2,
        )
        self.bus = self.device = 0.0
        self.ends: dict[int, float] = {}
        self.loads: list[Load] = []
        self.flight: list[tuple[StepPlan, float]] = []
        self.made: list[float] = []  # seconds that plans beside running requests took the host

    def add(self, name: str, tokens: list[int], max_tokens: int = 1) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add(
            EngineRequest(request_id=name, prompt_token_ids=tokens, params=params, seed=0, max_tokens=max_tokens)
        )

    def step(self) -> int:
        """One turn of the core's loop. Returns how many tokens of prompts were found by requests that have their first token."""
        tiers, scheduler = self.tiers, self.scheduler
        while (
            not self.flight
            and self.ends
            and min(self.ends.values()) > tiers.now
            and not scheduler.manager.transfers_wait
        ):
            if (plan := self._launch()) is None:
                tiers.now = min(self.ends.values())
        for number in [number for number, at in self.ends.items() if at <= tiers.now]:
            del self.ends[number]
            scheduler.end_transfer(TransferEnd(number, True, LOAD))
        while len(self.flight) < 2 and self._launch() is not None:
            pass
        if not self.flight:
            return 0
        plan, end = self.flight.pop(0)
        tiers.now = max(tiers.now, end)
        tokens = [[7] if row.samples else [] for row in plan.rows]
        updates = scheduler.commit(plan, StepResult(step_id=plan.step_id, token_ids=tokens))
        return sum(update.num_cached_tokens for update in updates if update.new_token_ids)

    def _launch(self) -> StepPlan | None:
        tiers, began = self.tiers, self.tiers.now
        if (plan := self.scheduler.schedule()) is None:
            return None
        if any(not row.tokens for row in plan.rows):
            self.made.append(tiers.now - began)
        for transfer in plan.transfers:
            begins = max(self.bus, self.device, tiers.now) if transfer.loads else tiers.now
            self.ends[transfer.number] = begins + LOAD
            if transfer.loads:
                self.bus = begins + LOAD
                self.loads.append(Load(begins, self.bus))
        if plan.rows:
            self.device = max(self.device, tiers.now) + STEP
        self.flight.append((plan, self.device if plan.rows else tiers.now))
        return plan

    def run(self) -> int:
        found = 0
        for _ in range(10_000):
            if not self.scheduler.has_work:
                self.manager.check_integrity()
                return found
            found += self.step()
        raise AssertionError("requests are left")


def prompt(number: int, tokens: int = TOKENS) -> list[int]:
    return [10_000 * number + place for place in range(tokens)]


@pytest.fixture(scope="module", params=list(KINDS))
def engine(request: pytest.FixtureRequest) -> Engine:
    engine = Engine(request.param)
    for number in range(PROMPTS):
        engine.add(f"first {number}", prompt(number))
        engine.run()
    return engine


def fresh(engine: Engine) -> Engine:
    engine.manager.reset_prefix_cache()
    engine.loads.clear()
    engine.made.clear()
    engine.bus = engine.device = engine.tiers.now = 0.0
    rates = engine.tiers.rates
    rates.bytes_per_second = sum(engine.tiers._page_bytes[-1:]) * (TOKENS // 16) / LOAD
    rates.seconds_per_token = 1.0
    return engine


def test_the_bus_is_busy_from_the_first_prompt_that_was_looked_up(engine: Engine) -> None:
    engine = fresh(engine)
    for number in range(PROMPTS):
        engine.add(f"again {number}", prompt(number))
    hit = (TOKENS - 1) // 16 * 16
    assert engine.run() == PROMPTS * hit
    assert len(engine.loads) == PROMPTS
    idle = engine.loads[-1].ended - PROMPTS * LOAD
    assert engine.loads[0].begun <= 2 * LOOK, "the other prompts are looked up while the first one is on the bus"
    assert idle <= 2 * STEP, f"the bus was idle for {idle:.3f} s of {engine.loads[-1].ended:.3f}"


def test_requests_that_run_dont_wait_until_the_whole_line_is_looked_up(engine: Engine) -> None:
    engine = fresh(engine)
    engine.add("runs", prompt(900, 64), max_tokens=60)
    while not engine.made:
        engine.step()
    for number in range(PROMPTS):
        engine.add(f"beside {number}", prompt(number))
    engine.run()
    assert len(engine.loads) == PROMPTS
    assert max(engine.made) <= 14 * LOOK
    busy = [load.begun for load in engine.loads]
    assert all(b - a <= LOAD + STEP for a, b in zip(busy[:ROOM], busy[1:ROOM], strict=False)), "and the bus has work"


def test_what_was_just_loaded_is_not_looked_for_again_to_be_stored(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fresh(engine)
    asked: list[str] = []
    store = engine.tiers._store
    monkeypatch.setattr(engine.tiers, "_store", lambda *args: asked.append("store") or store(*args))
    for number in range(4):
        engine.add(f"loaded {number}", prompt(number, TOKENS - 1))  # whose hit ends before its last token
    engine.run()
    assert len(engine.loads) == 4 and not asked
    engine.add("new", prompt(901))
    engine.run()
    assert asked, "a prompt that was computed is stored"
