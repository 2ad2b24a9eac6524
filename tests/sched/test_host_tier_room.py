"""Prompts that host memory has and the device hasn't, more of them at once than there is room for: all of them are loaded, none is computed.

And prompts that are stored in pieces.
"""

from __future__ import annotations

from collections.abc import KeysView

import pytest

from helpers.recount import recount
from pagerunner.memory.manager import KVManager
from pagerunner.memory.planner import plan_memory
from pagerunner.memory.prefix import PageKey, PrefixChain
from pagerunner.memory.specs import FullKV, RecurrentState, Spec
from pagerunner.sched.scheduler import Scheduler
from pagerunner.tiers.host import HostTier
from pagerunner.tiers.policy import Tiering
from pagerunner.types import EngineRequest, SamplingParams, StepPlan, StepResult, TransferEnd

KINDS: dict[str, list[Spec]] = {
    "full": [FullKV(1, 16, "bfloat16")],
    "hybrid": [RecurrentState(((40, 64),), ("bfloat16",)), FullKV(1, 16, "bfloat16")],
}
PROMPTS, ROOM = 12, 4
TOKENS = 330  # the last multiple of 16 before its end is 320


class Engine:
    """Transfers take `lag` calls of `step` each, one after another. There is room for `room` prompts."""

    def __init__(self, kind: str, lag: int, batched: int, room: int = ROOM) -> None:
        specs = KINDS[kind]
        each = sum(spec.page_bytes(16) * (1 if isinstance(spec, RecurrentState) else 21) for spec in specs)
        plan = plan_memory(
            specs,
            page_tokens=16,
            budget_bytes=room * each + (3 * 5_120 if kind == "hybrid" else 64 * 21),
            model_max_len=400,
            max_num_seqs=3,
            max_num_batched_tokens=batched,
        )
        self.manager, self.host = KVManager(plan), HostTier(plan, 40 * each)
        self.tiers = Tiering(self.manager, self.host, clock=lambda: 0.0)
        self.tiers.grow(self.host.num_bytes)
        self.tiers.rates.bytes_per_second, self.tiers.rates.seconds_per_token = 1e9, 1.0
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=3,
            max_num_batched_tokens=batched,
            max_model_len=400,
            tiers=self.tiers,
            max_in_flight=2,
        )
        self.lag, self.computed, self.now = lag, 0, 0
        self.ends: dict[int, int] = {}

    def step(self) -> dict[str, int]:
        self.now += 1
        for number in [number for number, at in self.ends.items() if at <= self.now]:
            del self.ends[number]
            self.scheduler.end_transfer(TransferEnd(number, True, 0.01))
        plan = self.scheduler.schedule()
        if plan is None:
            return {}
        for transfer in plan.transfers:
            self.ends[transfer.number] = max([self.now, *self.ends.values()]) + self.lag
        self.computed += plan.num_tokens
        tokens = [[7] if row.samples else [] for row in plan.rows]
        updates = self.scheduler.commit(plan, StepResult(step_id=plan.step_id, token_ids=tokens))
        return {one.request_id: one.num_cached_tokens for one in updates if one.num_cached_tokens is not None}

    def add(self, name: str, number: int, max_tokens: int = 1, tokens: int = TOKENS) -> None:
        prompt = [1_000 * number + place for place in range(tokens)]
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add(
            EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, seed=0, max_tokens=max_tokens)
        )

    def run(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for _ in range(5_000):
            if not self.scheduler.has_work:
                recount(self.manager)
                return found
            found |= self.step()
        raise AssertionError("requests are left")


@pytest.mark.parametrize("batched", [64, 331, 4_096])
@pytest.mark.parametrize("lag", [0, 1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_what_host_memory_has_is_loaded_and_not_computed_however_many_prompts_come_at_once(
    kind: str, lag: int, batched: int
) -> None:
    engine = Engine(kind, lag, batched)
    for number in range(PROMPTS):  # each is stored before the next one can push it out
        engine.add(f"first {number}", number)
        engine.run()
    assert engine.computed == PROMPTS * TOKENS
    for again in ("second ", "third "):
        engine.computed = 0
        for number in range(PROMPTS):
            engine.add(f"{again}{number}", number)
        assert engine.run() == {f"{again}{number}": 320 for number in range(PROMPTS)}
        assert engine.computed == PROMPTS * 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_whose_pages_are_on_their_way_is_tried_when_they_have_come(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(kind, 5, 64)
    for number in range(PROMPTS):
        engine.add(f"first {number}", number)
        engine.run()
    tries, admit = [], engine.manager.admit
    monkeypatch.setattr(engine.manager, "admit", lambda *args, **more: tries.append(1) or admit(*args, **more))
    for number in range(PROMPTS):
        engine.add(f"second {number}", number)
    engine.step()
    assert engine.scheduler.stats().waiting_for == "transfer"
    engine.run()
    assert len(tries) == PROMPTS


def pages_stored(engine: Engine, group: int) -> list[int]:
    """Pages of a group that each plan begins to store, until nothing is left to do."""
    begun, schedule = [], engine.scheduler.schedule

    def noted() -> StepPlan | None:
        if (plan := schedule()) is not None:
            begun.append(
                sum(page[0] == group for transfer in plan.transfers if not transfer.loads for page in transfer.pages)
            )
        return plan

    engine.scheduler.schedule = noted  # type: ignore[method-assign]
    engine.run()
    return [count for count in begun if count]


def wished(engine: Engine, number: int) -> tuple[PrefixChain, int]:
    chain = engine.manager.chain("")
    chain.cover([1_000 * number + place for place in range(TOKENS)], TOKENS)
    return chain, TOKENS


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_prompt_is_stored_in_pieces_and_found_as_one(kind: str) -> None:
    engine, full = Engine(kind, lag=2, batched=512), len(KINDS[kind]) - 1
    engine.tiers._pieces.most = 8
    engine.add("long", 1)
    assert pages_stored(engine, full) == [8, 8, 4]
    chain, _ = wished(engine, 1)
    held, cached = engine.host.index, engine.host.pool.cached[full]
    assert list(held.pages[full]) == chain.hashes[:20], "from the front to the end"
    assert kind == "full" or list(held.pages[0]) == [chain.hashes[19]]
    assert [held.keys[full][page] for page in cached][-16:] == chain.hashes[15::-1], "the front is given away last"
    engine.manager.reset_prefix_cache()
    engine.add("again", 1)
    assert engine.run() == {"again": 320}


def test_pieces_of_several_prompts_share_what_a_plan_may_store() -> None:
    engine = Engine("full", lag=1, batched=4_096)
    engine.tiers._pieces.most = 8
    for number in range(3):
        engine.add(f"{number}", number)
    assert pages_stored(engine, 0) == [8, 8, 8, 8, 8, 8, 8, 4]


def test_what_is_pushed_out_between_pieces_costs_the_rest_of_the_prompt_and_holds_no_page() -> None:
    engine = Engine("full", lag=3, batched=512)
    engine.tiers._pieces.most = 8
    engine.add("long", 1)
    while not engine.ends:
        engine.step()
    assert engine.tiers.storing(*wished(engine, 1))
    engine.manager.reset_prefix_cache()  # pages of the first piece are held by its transfer
    engine.run()
    assert not engine.tiers.storing(*wished(engine, 1)) and not engine.tiers.busy
    assert engine.tiers.counts.stores_skipped == 1 and not any(engine.host.pool.used)


def test_a_prompt_that_is_longer_than_host_memory_pushes_nothing_out_of_it() -> None:
    engine = Engine("full", lag=1, batched=512)
    engine.tiers.host = host = HostTier(engine.manager.plan, 16 * engine.manager.plan.groups[0].page_bytes)
    engine.tiers.grow(host.num_bytes)
    engine.tiers._pieces.most = 8
    engine.add("short", 1, tokens=96)
    engine.run()
    before = dict(host.index.pages[0])
    engine.add("long", 2)
    engine.run()
    assert len(before) == 6 and host.index.pages[0] == before and engine.tiers.counts.stores_skipped == 1


def test_two_prompts_with_one_front_wait_for_the_same_store() -> None:
    engine = Engine("full", lag=4, batched=512)
    engine.add("one", 1)
    while not engine.ends:
        engine.step()
    chain, tokens = wished(engine, 1)
    engine.tiers.wish(chain, 160)
    engine.scheduler.schedule()
    assert not engine.tiers._wishes and engine.tiers.storing(chain, 160), (
        "nothing of its own, but the other's store brings it"
    )
    engine.run()
    assert not engine.tiers.storing(chain, 160) and not engine.tiers.storing(chain, tokens)


def test_a_piece_is_stored_without_asking_each_store_under_way_what_it_brings() -> None:
    class Asked(dict[PageKey, int]):
        def keys(self) -> KeysView[PageKey]:
            raise AssertionError("a plan with 256 stores under way took 6 ms")

    engine = Engine("full", lag=30, batched=512)
    for number in range(2):
        engine.add(f"{number}", number)
    while len(engine.ends) < 2:
        engine.step()
    for transfer in engine.tiers._under_way.values():
        transfer.fresh = list(map(Asked, transfer.fresh))
    chain, _ = wished(engine, 1)
    engine.tiers.wish(chain, 160)
    engine.scheduler.schedule()
    assert engine.tiers._bringing[chain.hashes[9]] == engine.tiers._bringing[chain.hashes[19]]
    engine.run()
    assert not any(engine.tiers._coming) and not engine.tiers._bringing
    assert len(engine.host.index.pages[0]) == 40


def test_what_a_preempted_request_has_generated_comes_back_from_host_memory() -> None:
    """Three texts of 390 tokens, with room for less than two. Those that go on take the others' pages."""
    engine = Engine("full", 1, 512, room=2)
    for number in range(3):
        engine.add(f"text {number}", number, max_tokens=290, tokens=100)
    engine.run()
    preempted = engine.scheduler.stats().preemptions_total
    assert preempted and engine.computed <= 3 * 389 + 16 * preempted
