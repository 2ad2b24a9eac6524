"""Prompts that host memory has and the device hasn't, more of them at once than there is room for: all of them are loaded, none is computed."""

from __future__ import annotations

import pytest

from pagerunner.memory.manager import KVManager
from pagerunner.memory.planner import plan_memory
from pagerunner.memory.specs import FullKV, RecurrentState, Spec
from pagerunner.sched.scheduler import Scheduler
from pagerunner.tiers.host import HostTier
from pagerunner.tiers.policy import Tiering
from pagerunner.types import EngineRequest, SamplingParams, StepResult, TransferEnd

KINDS: dict[str, list[Spec]] = {
    "full": [FullKV(1, 16, "bfloat16")],
    "hybrid": [RecurrentState(((40, 64),), ("bfloat16",)), FullKV(1, 16, "bfloat16")],
}
PROMPTS, ROOM = 12, 4
TOKENS = 330  # the last multiple of 16 before its end is 320


class Engine:
    """Transfers take `lag` calls of `step` each, one after another. There is room for ROOM prompts."""

    def __init__(self, kind: str, lag: int, batched: int) -> None:
        specs = KINDS[kind]
        each = sum(spec.page_bytes(16) * (1 if isinstance(spec, RecurrentState) else 21) for spec in specs)
        plan = plan_memory(
            specs,
            page_tokens=16,
            budget_bytes=ROOM * each + (3 * 5_120 if kind == "hybrid" else 64 * 21),
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

    def add(self, name: str, number: int) -> None:
        prompt = [1_000 * number + place for place in range(TOKENS)]
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        self.scheduler.add(EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, seed=0, max_tokens=1))

    def run(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for _ in range(5_000):
            if not self.scheduler.has_work:
                self.manager.check_integrity()
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
