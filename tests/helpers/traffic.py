"""Random traffic over manager and scheduler, every step executed by a runner that notices a wrong page."""

from __future__ import annotations

import math
import random
import re
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from helpers.page_checker import MOST_DRAFTS, PageChecker, expected_output
from helpers.plans import MOST_IN_FLIGHT, mixed, one_group, two_groups
from helpers.recount import recount
from pagerunner.config import SpeculativeConfig
from pagerunner.errors import CapacityError, InvalidRequestError
from pagerunner.memory.manager import KVManager
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.rules import ForgettingRule
from pagerunner.sched.adapters import Adapters
from pagerunner.sched.costs import CostModel
from pagerunner.sched.draft_length import LengthByRows
from pagerunner.sched.scheduler import Scheduler
from pagerunner.sched.suffix import SuffixDrafter
from pagerunner.tiers.policy import Tiering
from pagerunner.types import EngineRequest, RequestUpdate, SamplingParams, StepPlan, StepResult
from pagerunner.types.lora import AdapterInfo
from pagerunner.types.steps import StepShape

QUICK = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)


def run_until(
    machine: type[RuleBasedStateMachine], enough: Callable[[], bool], examples: int, steps: int = 40, **more: Any
) -> None:
    """Random traffic, and then more of it while chance has left out what the test is for.

    No seed always has it: hypothesis also draws numbers that it finds in whatever modules are imported.
    """
    run_state_machine_as_test(
        machine, settings=settings(QUICK, max_examples=examples, stateful_step_count=steps, **more)
    )
    for number in range(60):
        if enough():
            return
        run_state_machine_as_test(
            seed(number)(machine), settings=settings(QUICK, max_examples=10, stateful_step_count=steps, **more)
        )
    assert enough(), "chance has left out some traffic 61 times"


def expect_failure(
    machine: type[RuleBasedStateMachine],
    errors: tuple[type[Exception], ...] = (AssertionError, KeyError),
    steps: int = 30,
    match: str = "",
) -> None:
    """Some seed's traffic must meet the planted bug; which one depends on what else hypothesis has seen loaded.

    PageFault is an AssertionError; a pool has no entry for a page that nobody holds.
    """
    quick = settings(
        QUICK, max_examples=100, stateful_step_count=steps, phases=[Phase.generate], report_multiple_bugs=False
    )
    for number in range(20):
        try:
            run_state_machine_as_test(seed(number)(machine), settings=quick)
        except errors as error:
            assert re.search(match, str(error)), error  # noqa: PT017
            return
    pytest.fail("no traffic met the planted bug")


# Few distinct texts, so that prefixes are often shared and often differ late.
TEXTS = [[1] * 200, [1] * 40 + [2] * 160, [3, 4] * 100, [1] * 17 + [5] * 183]


def plans() -> st.SearchStrategy[MemoryPlan]:
    """Pools of one group (any page size) or of two that share slabs; some so small that one request fills them."""
    single = st.builds(
        lambda size, tokens: one_group(max(-(-tokens // size), 2), page_tokens=size, model_max_len=160),
        st.sampled_from([1, 4, 8, 16, 32, 48]),
        st.integers(48, 600),
    )
    shapes = st.sampled_from([((16, 4), (1, 3)), ((4, 16), (1, 3)), ((32, 16), (2, 1)), ((1, 8), (1, 3))])
    double = st.builds(lambda slabs, shape: two_groups(slabs, *shape), st.integers(12, 60), shapes)
    coarse = st.builds(
        lambda slabs, shape, size: two_groups(slabs, *shape, slab_bytes=size),
        st.integers(3, 12),
        shapes,
        st.sampled_from([4096, 6160, 10_000]),
    )
    return st.one_of(single, double, coarse, mixes(), mixes(), mixes())


@st.composite
def mixes(draw: st.DrawFn, names: tuple[str, ...] = (), drafts: tuple[int, ...] = (0, 0, 1, 3, 7)) -> MemoryPlan:
    """Any set of kinds (or these) with any page sizes, in a pool that may just hold one request of 150 tokens."""
    names = names or draw(
        st.lists(
            st.sampled_from(
                [
                    "full",
                    "window-1",
                    "window-5",
                    "window-40",
                    "chunked-32",
                    "chunked-50",
                    "latent-1",
                    "latent-4",
                    "recurrent",
                ]
            ),
            min_size=1,
            max_size=4,
            unique=True,
        )
    )
    sizes = st.tuples(st.sampled_from([4, 8, 16, 48]), st.integers(1, 4))
    kinds = {name: draw(sizes) for name in names}
    batched = draw(st.sampled_from([1, 7, 32, 64, 500]))
    chunked = draw(st.booleans())
    num_drafts = draw(st.sampled_from(drafts))
    plan = mixed(kinds, 1 << 20, batched=batched, chunked_prefill=chunked, num_drafts=num_drafts)
    alone = sum(group.pages_needed(150) * group.page_bytes for group in plan.groups)
    budget = int(alone * draw(st.floats(1.2, 4.0)))
    return mixed(kinds, budget, batched=batched, chunked_prefill=chunked, num_drafts=num_drafts)


WORDS = SpeculativeConfig(
    method="suffix",
    num_speculative_tokens=MOST_DRAFTS,
    suffix_decoding_max_spec_factor=3.0,
    suffix_decoding_min_token_prob=0.0,
)


class FixedLength(LengthByRows):
    """The same number of drafts for every plan."""

    def __init__(self, most: int) -> None:
        super().__init__([(0, most)])


class AnyLength(FixedLength):
    """Another number of drafts for each plan."""

    def __init__(self, most: int, seed: int) -> None:
        super().__init__(most)
        self._rng = random.Random(seed)

    def choose(self, rows: int, keys: int, room: float = math.inf) -> int:
        """Some number, often the most."""
        assert keys >= 0
        return int(min(self._rng.choice((self.most, self._rng.randint(0, self.most))), room))


def token_costs() -> CostModel:
    """Steps that take 0.1 ms for each token."""
    costs = CostModel()
    for tokens in (1, 500):
        costs.learn(StepShape(1, tokens, 0, tokens, decode=False), 1e-4 * tokens)
    return costs


def most_drafts(plan: MemoryPlan) -> int:
    """So many drafts a row are what the plan's windows are wide enough for."""
    rules = [group.rule for group in plan.groups]
    return min(
        (rule.open_tokens // (MOST_IN_FLIGHT + 1) - 1 for rule in rules if isinstance(rule, ForgettingRule)), default=7
    )


class Traffic(RuleBasedStateMachine):
    """Requests come, run, are aborted; whatever happens, each gets exactly its own tokens and no page is lost."""

    manager_class: type[KVManager] = KVManager
    pools: st.SearchStrategy[MemoryPlan] = plans()
    cachings: st.SearchStrategy[bool] = st.booleans()
    drafters: st.SearchStrategy[SuffixDrafter | None] = st.sampled_from([None, None, True]).map(
        lambda host: SuffixDrafter(WORDS, tokens=1 << 12) if host else None
    )

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        try:
            self.plan = data.draw(self.pools)
        except CapacityError:
            self.plan = one_group(20, model_max_len=160)
        self.caching = data.draw(self.cachings)
        self.depth = data.draw(st.integers(1, 3))
        steps = [rule.step_tokens for rule in (group.rule for group in self.plan.groups) if rule.forgets]
        self.batched = steps[0] if steps else data.draw(st.sampled_from([1, 7, 32, 64, 500]))
        self.max_len = self.plan.max_model_len
        self.seqs = data.draw(st.integers(1, 6))
        whole = any(not group.rule.shortens for group in self.plan.groups)
        self.chunked = not whole and data.draw(st.booleans() if not steps else st.just(True))
        self.manager = self.manager_class(
            self.plan, enable_prefix_caching=self.caching, list_fresh_pages=data.draw(st.booleans())
        )
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=self.seqs,
            max_num_batched_tokens=self.batched,
            max_model_len=self.max_len,
            policy=data.draw(st.sampled_from(["fcfs", "priority"])),
            enable_chunked_prefill=self.chunked,
            max_in_flight=self.depth,
            tiers=self.make_tiers(data),
            adapters=self.make_adapters(data),
            looks_ahead=(looks_ahead := data.draw(st.booleans())),
            draft_length=AnyLength(max(most_drafts(self.plan), 0), data.draw(st.integers(0, 9))),
            host_drafter=data.draw(self.drafters),
            costs=token_costs(),
            target_itl=data.draw(st.sampled_from([None, 1e-9, 0.002, 0.005])) if self.chunked else None,
        )
        right = data.draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
        self.checker = PageChecker(self.plan, prefix_caching=self.caching, right=right, looks_ahead=looks_ahead)
        self.flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.requests: dict[str, EngineRequest] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.drafts = [0, 0, 0]  # rows with drafts, their drafts, those accepted
        self.made = 0
        self.failed = False

    def make_tiers(self, data: st.DataObject) -> Tiering | None:
        """What decides about another memory."""
        return None

    def make_adapters(self, data: st.DataObject) -> Adapters | None:
        """The books of adapters, of which requests have those that `adapter_for` names."""
        return None

    def adapter_for(self, request_id: str) -> str:
        """The name of a new request's adapter, or ""."""
        return ""

    def info_of(self, name: str) -> AdapterInfo | None:
        """What a name of an adapter stands for."""
        return None

    @rule(
        text=st.integers(0, len(TEXTS) - 1),
        length=st.integers(1, 150),
        max_tokens=st.integers(1, 80),
        siblings=st.integers(1, 3),
        salt=st.sampled_from(["", "", "s"]),
        priority=st.integers(0, 2),
        stops=st.sampled_from([(), (), (3,)]),
        min_tokens=st.integers(0, 3),
        logprobs=st.sampled_from([None, None, None, 0]),
    )
    def submit(
        self,
        text: int,
        length: int,
        max_tokens: int,
        siblings: int,
        salt: str,
        priority: int,
        stops: tuple[int, ...],
        min_tokens: int,
        logprobs: int | None,
    ) -> None:
        self.made += 1
        for number in range(siblings):
            request = EngineRequest(
                request_id=f"{self.made}-{number}",
                prompt_token_ids=TEXTS[text][:length],
                params=SamplingParams(
                    max_tokens=None,
                    stop_token_ids=stops,
                    min_tokens=min(min_tokens, max_tokens),
                    prompt_logprobs=logprobs,
                ),
                seed=number,
                max_tokens=max_tokens,
                eos_token_ids=(0,),
                priority=priority,
                arrival_time=float(self.made),
                cache_salt=salt,
                parent_id=str(self.made) if siblings > 1 else "",
                lora=self.adapter_for(f"{self.made}-{number}"),
            )
            try:
                self.scheduler.add(request)
            except InvalidRequestError:
                info = self.info_of(request.lora)
                assert length >= self.max_len or self.manager.refusal(min(length + max_tokens, self.max_len), info)
                continue
            self.requests[request.request_id] = request
            self.outputs[request.request_id] = []

    @rule(count=st.integers(1, 12), fault=st.sampled_from([False] * 9 + [True]))
    def run_steps(self, count: int, fault: bool) -> None:
        for _ in range(count):
            self.step(fault)

    def step(self, fault: bool = False) -> None:
        self.failed = True
        plan = self.scheduler.schedule()
        if plan is not None:
            assert sum(row.num_tokens for row in plan.rows) <= self.batched and (
                plan.rows or plan.transfers or plan.admitted
            )
            assert all(row.start + row.num_tokens <= self.max_len for row in plan.rows)
            if not self.chunked and not all(row.samples for row in plan.rows):
                assert sum(row.num_tokens for row in plan.rows) == self.batched, "a prompt is spread over steps"
            assert len({row.slot for row in plan.rows}) == len(plan.rows) <= self.seqs
            self.flight.append((plan, self.checker.run(plan, {0: "broken"} if fault else None)))
        if self.flight and (plan is None or len(self.flight) == self.depth):
            self.note(self.scheduler.commit(*self.flight.popleft()))
        self.failed = False

    @rule(choice=st.integers(0, 10**6))
    def abort_one(self, choice: int) -> None:
        alive = [name for name in self.requests if name not in self.ended]
        if alive:
            self.note(self.scheduler.abort([alive[choice % len(alive)], "unknown"]))

    @rule()
    def reset_prefix_cache(self) -> None:
        in_use = any(self.manager.pool.used)
        assert self.scheduler.reset_prefix_cache() is not in_use

    @rule()
    def sleep(self) -> None:
        while self.flight:
            self.note(self.scheduler.commit(*self.flight.popleft()))
        self.scheduler.preempt_all()
        assert not any(self.manager.pool.used) and not any(self.manager.pool.cached)
        self.checker.lose_pages()

    def note(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            name = update.request_id
            assert name not in self.ended, "an update after the last one"
            request = self.requests[name]
            first = not self.outputs[name] and update.new_token_ids
            self.outputs[name] += update.new_token_ids
            if update.drafted is not None:
                drafted, accepted = update.drafted
                assert 0 <= accepted <= drafted >= 1
                assert len(update.new_token_ids) == 1 + accepted or update.finish_reason in ("stop", "length")
                self.drafts = [self.drafts[0] + 1, self.drafts[1] + drafted, self.drafts[2] + accepted]
            if first and request.params.prompt_logprobs is not None:
                assert update.prompt_logprobs is not None and update.num_cached_tokens == 0
                head, *rest = update.prompt_logprobs
                assert head is None
                prompt = request.prompt_token_ids
                assert [(e.token_id, e.logprob) for e in rest if e] == [
                    (prompt[i], float(i)) for i in range(1, len(prompt))
                ]
            else:
                assert update.prompt_logprobs is None
            assert update.num_cached_tokens < len(request.prompt_token_ids)
            if update.finish_reason is not None:
                self.ended[name] = update.finish_reason
                tokens, reason = expected_output(request, self.max_len)
                if update.finish_reason in ("abort", "error"):
                    assert self.outputs[name] == tokens[: len(self.outputs[name])]
                else:
                    assert (self.outputs[name], update.finish_reason) == (tokens, reason)

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "manager"):
            recount(self.manager)

    def end_transfers(self) -> None:
        """No transfer is under way any more."""

    def finish(self) -> None:
        """Every request ends, whatever becomes of transfers; then they end too."""
        for _ in range(40_000):
            if not self.scheduler.has_work:
                break
            self.step()
        self.end_transfers()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler") or self.failed:
            return
        self.finish()
        assert not self.scheduler.has_work, "some request never finishes"
        assert set(self.ended) == set(self.requests)
        if (spec := self.scheduler.stats().spec) is not None:
            assert self.drafts == [spec.num_drafts, spec.num_draft_tokens, spec.num_accepted_tokens]
        recount(self.manager)
        assert not any(self.manager.pool.used), "pages are still in use after the last request"
        if not self.caching and not any(self.manager.index.adapters):
            assert self.manager.pool.free_slabs == self.plan.num_slabs
        assert self.scheduler.reset_prefix_cache()
        assert self.manager.pool.free_slabs == self.plan.num_slabs
