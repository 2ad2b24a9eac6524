"""A scheduler and a manager over any mix of memory kinds, and a runner that notices a wrong page."""

from __future__ import annotations

from typing import Any

from helpers.page_checker import PageChecker
from helpers.plans import mixed
from helpers.recount import recount
from pagerunner.memory.manager import KVManager
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.sched.scheduler import Scheduler
from pagerunner.types import EngineRequest, SamplingParams, StepPlan


class Bench:
    """A scheduler over a mix of groups, with a page-checking runner behind it."""

    def __init__(
        self,
        kinds: dict[str, tuple[int, int]],
        megabytes: float = 8,
        batched: int = 8192,
        chunked_prefill: bool = True,
        **options: Any,
    ):
        self.plan: MemoryPlan = mixed(
            kinds, int(megabytes * (1 << 20)), batched=batched, model_max_len=20_000, chunked_prefill=chunked_prefill
        )
        self.manager = KVManager(self.plan, **options)
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=8,
            max_num_batched_tokens=batched,
            max_model_len=self.plan.max_model_len,
            enable_chunked_prefill=chunked_prefill,
        )
        self.checker = PageChecker(self.plan, prefix_caching=options.get("enable_prefix_caching", True))
        self.cached: dict[str, int] = {}
        self.plans: list[StepPlan] = []

    def add(self, name: str, prompt: list[int], max_tokens: int = 1, parent_id: str = "", seed: int = 0) -> None:
        self.scheduler.add(
            EngineRequest(
                request_id=name,
                prompt_token_ids=prompt,
                params=SamplingParams(max_tokens=None),
                seed=seed,
                max_tokens=max_tokens,
                parent_id=parent_id,
            )
        )

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        for update in self.scheduler.commit(plan, self.checker.run(plan)):
            self.cached.setdefault(update.request_id, update.num_cached_tokens)
        self.plans.append(plan)
        return plan

    def drain(self) -> list[StepPlan]:
        before = len(self.plans)
        while self.scheduler.has_work:
            self.step()
        recount(self.manager)
        assert not any(self.manager.pool.used)
        return self.plans[before:]

    def run(self, name: str, prompt: list[int], max_tokens: int = 1) -> int:
        """Run one request alone; how many tokens it found in the cache."""
        self.add(name, prompt, max_tokens)
        self.drain()
        return self.cached[name]


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))
