"""Who waits over a host tier: how often it is looked up, what sleep leaves of that, and stores that can't be had."""

from __future__ import annotations

from collections.abc import Iterable

from pagerunner.memory.manager import KVManager
from pagerunner.memory.planner import plan_memory
from pagerunner.memory.specs import FullKV
from pagerunner.sched.scheduler import Scheduler
from pagerunner.tiers.host import HostTier
from pagerunner.tiers.policy import Tiering, Waiting
from pagerunner.types import EngineRequest, SamplingParams, StepResult, TransferEnd

TOKENS = 160


class Counted(Tiering):
    """Counts what it looks up."""

    looks = 0

    def look_up(self, request: Waiting, behind: Iterable[Waiting] | None = None) -> bool:
        before = self._refused
        found = super().look_up(request, behind)
        self.looks += found or before != self._refused  # else it knew that there is no room
        return found


class Engine:
    """A scheduler whose transfers end with the step that they began with. There is room for one prompt of TOKENS and what it generates."""

    def __init__(self) -> None:
        plan = plan_memory(
            [FullKV(1, 16, "bfloat16")],
            page_tokens=16,
            budget_bytes=64 * 250,
            model_max_len=240,
            max_num_seqs=4,
            max_num_batched_tokens=64,
        )
        self.manager = KVManager(plan)
        self.host = HostTier(plan, 64 * TOKENS * 8)
        self.tiers = Counted(self.manager, self.host)
        self.tiers.grow(self.host.num_bytes)
        self.scheduler = Scheduler(
            self.manager, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=240, tiers=self.tiers
        )

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        self.scheduler.add(
            EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, seed=0, max_tokens=max_tokens)
        )

    def step(self) -> dict[str, int]:
        """The cached tokens of requests that report their first token."""
        plan = self.scheduler.schedule()
        if plan is None:
            return {}
        tokens = [[7] if row.samples else [] for row in plan.rows]
        updates = self.scheduler.commit(plan, StepResult(step_id=plan.step_id, token_ids=tokens))
        for transfer in plan.transfers:
            self.scheduler.end_transfer(TransferEnd(transfer.number, True, 0.01))
        return {update.request_id: update.num_cached_tokens for update in updates if update.num_cached_tokens}

    def run(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for _ in range(1_000):
            if not self.scheduler.has_work:
                return found
            found |= self.step()
        raise AssertionError("requests are left")


def _one_waits() -> Engine:
    """Host memory has a prompt. A request for it waits, as another has the room."""
    engine = Engine()
    engine.add("first", list(range(TOKENS)), 2)
    engine.run()
    engine.add("runs", [5] * TOKENS, 60)
    while engine.scheduler.stats().generation_tokens_total < 10:
        engine.step()
    engine.add("waits", list(range(TOKENS)), 2)
    engine.step()
    assert engine.scheduler.stats().waiting == 1
    return engine


def test_who_has_no_room_is_looked_up_again_only_after_pages_came_back() -> None:
    engine = _one_waits()
    before = engine.tiers.looks
    for _ in range(20):
        engine.step()
    assert engine.scheduler.stats().waiting == 1
    assert engine.tiers.looks == before
    assert engine.run()["waits"] >= TOKENS - 16  # room has come: it loads what host memory has


def test_who_waited_while_the_engine_slept_finds_what_host_memory_has() -> None:
    engine = _one_waits()
    sequence = engine.scheduler._state.sequences["waits"]
    sequence.looked_up = True  # as when there was nothing to load, since the device had it
    engine.scheduler.preempt_all()
    assert engine.run()["waits"] >= TOKENS - 16


def test_prompts_that_were_evicted_before_host_memory_was_locked_are_counted() -> None:
    engine = Engine()
    engine.host = HostTier(engine.manager.plan, 64 * TOKENS * 8)
    engine.tiers.host = engine.host  # nothing of it is locked yet
    engine.add("runs", [9] * 8, 60)
    for number in range(5):
        engine.add(f"{number}", [100 * number + token % 100 for token in range(TOKENS)], 1)
        for _ in range(6):
            engine.step()
    engine.tiers.grow(engine.host.num_bytes)
    engine.run()
    stored = len(engine.host.index.pages[0]) // (TOKENS // 16)
    assert (stored, engine.tiers.stats().stores_skipped_total) == (1, 4)


def test_a_store_that_has_no_room_holds_up_no_other_while_host_memory_is_being_locked() -> None:
    plan = plan_memory(
        [FullKV(1, 16, "bfloat16")],
        page_tokens=16,
        budget_bytes=64 * 16 * 4_000,
        model_max_len=40_000,
        max_num_seqs=8,
        max_num_batched_tokens=256,
    )
    manager, host = KVManager(plan), HostTier(plan, 64 * 2**20)
    tiers = Tiering(manager, host)
    tiers.grow(32 * 2**20)  # and no more for now
    num_pages = host.ready_bytes // plan.groups[0].page_bytes
    held = host.take([num_pages - 100])
    assert held is not None
    for slot, length in enumerate((200 * 16, 5 * 16)):
        tokens, chain = [slot] * length, manager.chain()
        grant = manager.admit(slot, chain, tokens, 0, shares=True, parent_id="", prompt_len=length)
        assert grant is not None
        manager.begin_step()
        assert manager.grow(grant, 0, length) == length
        manager.publish(grant, tokens, length)
        tiers.wish(chain, length)
    tiers.begin([], 1, idle=False)
    assert [len(one.fresh[0]) for one in tiers._under_way.values()] == [5]
    tiers.grow(64 * 2**20)
    tiers.begin([], 1, idle=False)
    assert [len(one.fresh[0]) for one in tiers._under_way.values()] == [5, 200]
    assert tiers.counts.stores_skipped == 0
