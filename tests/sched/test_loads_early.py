"""The bus has work while the line is looked up, and requests that run don't wait until all of it is.

Time is simulated: a look at a prompt takes the host LOOK seconds, a step takes STEP, and a prompt's pages take LOAD on the bus.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NamedTuple

import pytest

from helpers.recount import recount
from pagerunner.memory.manager import KVManager
from pagerunner.memory.planner import plan_memory
from pagerunner.memory.specs import FullKV, RecurrentState, Spec
from pagerunner.sched.scheduler import Scheduler
from pagerunner.tiers import bounds
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
    """Two plans in flight of `step` tokens at most, room for `room` prompts on the device and for all in host memory."""

    def __init__(self, kind: str, room: float = ROOM, step: int = TOKENS) -> None:
        specs = KINDS[kind]
        each = sum(spec.page_bytes(16) * (2 if isinstance(spec, RecurrentState) else TOKENS // 16) for spec in specs)
        plan = plan_memory(
            specs,
            page_tokens=16,
            budget_bytes=int((room + 1) * each),
            model_max_len=TOKENS + 128,
            max_num_seqs=SLOTS,
            max_num_batched_tokens=step,
        )
        self.manager, host = KVManager(plan), HostTier(plan, 2 * PROMPTS * each)
        self.tiers = Timed(self.manager, host, clock=lambda: 0.0)
        self.tiers.grow(host.num_bytes)
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=SLOTS,
            max_num_batched_tokens=step,
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
        self.end_transfers()
        while len(self.flight) < 2 and self._launch() is not None:
            pass
        if not self.flight:
            return 0
        plan, end = self.flight.pop(0)
        tiers.now = max(tiers.now, end)
        tokens = [[7] if row.samples else [] for row in plan.rows]
        updates = scheduler.commit(plan, StepResult(step_id=plan.step_id, token_ids=tokens))
        return sum(update.num_cached_tokens for update in updates if update.new_token_ids)

    def end_transfers(self) -> None:
        for number in [number for number, at in self.ends.items() if at <= self.tiers.now]:
            del self.ends[number]
            self.scheduler.end_transfer(TransferEnd(number, True, LOAD))

    def _launch(self) -> StepPlan | None:
        began = self.tiers.now
        plan = self.launched(self.scheduler.schedule())
        if plan is not None and any(not row.tokens for row in plan.rows):
            self.made.append(self.tiers.now - began)
        return plan

    def launched(self, plan: StepPlan | None) -> StepPlan | None:
        tiers = self.tiers
        if plan is None:
            return None
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
                recount(self.manager)
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


def test_the_bus_is_busy_while_a_line_of_prompts_is_being_queued(engine: Engine) -> None:
    """Each is queued QUEUED seconds after the one before. Nothing is computed meanwhile, and no more is loaded than keeps the bus busy."""
    engine = fresh(engine)
    queued, scheduler = 0.0035, engine.scheduler
    for number in range(PROMPTS):
        engine.add(f"again {number}", prompt(number))
        engine.tiers.now = max(engine.tiers.now, number * queued)
        engine.end_transfers()
        while len(engine.flight) > 1:
            ended, _ = engine.flight.pop(0)
            assert not scheduler.commit(ended, StepResult(step_id=ended.step_id, token_ids=[]))
        if (plan := engine.launched(scheduler.schedule_loads())) is not None:
            assert not plan.rows and not plan.admitted and len(plan.transfers) == 1
    early = len(engine.loads)
    assert engine.loads[0].begun <= 2 * LOOK, "the others weren't queued yet"
    assert all(b.begun - a.ended <= LOAD for a, b in zip(engine.loads, engine.loads[1:], strict=False))
    assert early <= engine.tiers.now / LOAD + bounds.BUS_SECONDS / LOAD + 1
    assert engine.run() == PROMPTS * ((TOKENS - 1) // 16 * 16) and len(engine.loads) == PROMPTS
    engine.add("runs", prompt(902, 15), max_tokens=60)
    engine.step()
    engine.add("waits", prompt(0))
    assert scheduler.schedule_loads() is None, "its next step is made at once"
    engine.run()


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


def test_a_look_calls_nothing_for_each_page(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 256 pages, whose load evicts as many. They lie in slabs of 5 and more pages, and of each slab something may be called."""
    engine = fresh(engine)
    for number in range(ROOM + 4):  # until all pages are taken
        engine.add(f"fill {number}", prompt(number))
    engine.run()
    engine.tiers.rates.seconds_per_token = 1.0
    calls: list[int] = []
    look_up = engine.tiers.look_up

    def counted(*args: object) -> bool:
        calls.append(0)
        sys.setprofile(lambda frame, event, value: calls.__setitem__(-1, calls[-1] + (event == "call")))
        try:
            return look_up(*args)  # type: ignore[arg-type]
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(engine.tiers, "look_up", counted)
    engine.loads.clear()
    engine.add("found", prompt(ROOM + 6))
    engine.run()
    assert len(engine.loads) == 1
    assert max(calls) < 9 * 256 // engine.manager.pool.per_slab[-1] + 200, calls


@pytest.mark.parametrize("step", [TOKENS, 2 * TOKENS])
@pytest.mark.parametrize(("room", "passes"), [(2.0, 2), (2.5, 1)])
def test_every_prompt_of_a_hybrid_is_stored_where_few_have_room(room: float, passes: int, step: int) -> None:
    """With (room + 1) prompts' pages, snapshots fill the last of them. Pages may lie so scattered that a snapshot has none; the next pass has it."""
    engine = Engine("hybrid", room, step)
    engine.tiers.rates.seconds_per_token = 1.0
    found = []
    for turn in range(passes + 2):
        for number in range(16):
            engine.add(f"{turn}: {number}", prompt(number))
        found.append(engine.run() // ((TOKENS - 1) // 16 * 16))
    assert found[0] == 0 and found[passes:] == [16] * 2, found


def test_a_snapshot_stays_until_its_prompts_first_token_is_known_and_no_longer() -> None:
    engine = Engine("hybrid", 2.5)
    engine.add("one", prompt(1), max_tokens=8)
    used = engine.manager.pool.used
    engine._launch()
    recount(engine.manager)
    assert used[0] == 2, "its state and the snapshot"
    engine.step()
    recount(engine.manager)
    assert used[0] == 1, "a request that generates holds its state alone"
    engine.run()
    assert used[0] == 0


def test_a_lone_prompt_that_host_memory_has_in_part_is_loaded_without_room_for_its_snapshot() -> None:
    """There is room for its state and the snapshot that it goes on from, and not for that of its end."""
    engine = Engine("hybrid", 0.0339)
    assert engine.manager.pool.slack([2, 264]) >= 0 > engine.manager.pool.slack([3, 264])
    engine.add("first", prompt(1, TOKENS // 2))
    engine.run()
    engine.manager.reset_prefix_cache()
    engine.tiers.rates.seconds_per_token = 1.0
    engine.add("longer", prompt(1, TOKENS + 120))
    assert engine.run() == (TOKENS // 2 - 1) // 16 * 16 and len(engine.loads) == 1


def test_a_prompt_is_loaded_when_those_that_it_waited_for_generate() -> None:
    """They have let their snapshots go, and it has no room for its own all the same."""
    engine = Engine("hybrid", 0.0339)
    engine.add("first", prompt(1, TOKENS // 2))
    engine.run()
    engine.manager.reset_prefix_cache()
    engine.tiers.rates.seconds_per_token = 1.0
    engine.add("runs", prompt(2, 65), max_tokens=50)
    engine._launch()
    slack = engine.manager.pool.slack
    length = next(
        length for length in range(TOKENS + 96, 0, -16) if slack([1, length // 16]) >= 0 > slack([2, length // 16])
    )
    engine.add("longer", prompt(1, length))
    assert engine.run() == (TOKENS // 2 - 1) // 16 * 16 and len(engine.loads) == 1
