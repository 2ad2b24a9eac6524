"""Decides what every step runs: tokens, not phases.

`schedule()` builds the next plan, `commit()` takes a step's tokens. Up to `max_in_flight` plans may be scheduled and not
committed. So a sequence is scheduled before the host knows its last token; the device knows the token.
`sched/step_planner.py` chooses a plan's rows, `sched/results.py` takes its tokens, and `sched/state.py` has the state of both.
"""

from __future__ import annotations

import copy
from typing import Literal

import msgspec

from pagerunner.errors import InvalidRequestError
from pagerunner.memory.manager import KVManager
from pagerunner.memory.ownership import MemoryState, memory_state
from pagerunner.memory.stats import memory_stats
from pagerunner.sched.adapters import Adapters
from pagerunner.sched.costs import CostModel
from pagerunner.sched.draft_length import DraftLength
from pagerunner.sched.guide import MakeGuide
from pagerunner.sched.live import LiveRequest, live_requests, why_first_waits
from pagerunner.sched.pace import Pace
from pagerunner.sched.request import Sequence
from pagerunner.sched.results import commit
from pagerunner.sched.state import SchedulerState
from pagerunner.sched.stats import SchedulerStats, SpecCounts
from pagerunner.sched.step_planner import StepPlanner
from pagerunner.sched.suffix import SuffixDrafter
from pagerunner.tiers.policy import LOAD_FAILED, Tiering
from pagerunner.types import EngineRequest, RequestUpdate, StepPlan, StepResult, TransferEnd
from pagerunner.types.checks import show
from pagerunner.types.lora import AdapterInfo
from pagerunner.types.steps import StepShape

WAITING_WEIGHT = 4
"""A request that waits counts as so many that run, as in vLLM."""


class Scheduler:
    """Continuous batching over a `KVManager`.

    Running sequences come first, in order of admission ("fcfs") or of (priority, arrival) ("priority"). When one of them can't
    grow, the last running sequence is preempted. Waiting sequences are admitted in the same order while the pages of their
    whole prompt fit. Every accepted request finishes.

    Args:
        max_num_seqs: slots, that is how many sequences run at once.
        max_num_batched_tokens: tokens of one step.
        max_model_len: prompt and output together.
        enable_chunked_prefill: whether a prompt may be spread over steps. Without it a prompt runs whole, unless it is
            longer than max_num_batched_tokens.
        max_in_flight: plans that may be scheduled and not committed.
        make_guide: starts to follow the grammar of a request that has one.
        stages: how many steps the device works on at the same time, one behind the other.
        tiers: decides what goes to another memory and comes back from it.
        costs: learns what steps cost, from the times that come with their results.
        target_itl: how many seconds a step may take that computes prompts beside rows that generate, as `costs` has it.
    """

    def __init__(
        self,
        manager: KVManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: Literal["fcfs", "priority"] = "fcfs",
        enable_chunked_prefill: bool = True,
        max_in_flight: int = 1,
        make_guide: MakeGuide | None = None,
        stages: int = 1,
        tiers: Tiering | None = None,
        load_failure: Literal["recompute", "fail"] = "recompute",
        costs: CostModel | None = None,
        target_itl: float | None = None,
        draft_length: DraftLength | None = None,
        looks_ahead: bool = False,
        host_drafter: SuffixDrafter | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        """`load_failure`: what becomes of a request whose pages don't come back from another memory. `looks_ahead`: see StepPlanner. `draft_length` chooses how many drafts
        rows have; without it they have none. `host_drafter` makes them, if the device doesn't. `adapters`: which there are, if requests may have some.
        """
        self.manager = manager
        self.tiers, self._load_failure = tiers, load_failure
        self.max_model_len = max_model_len
        self.max_in_flight, self._costs, self._draft_length = max_in_flight, costs, draft_length
        self._state = SchedulerState(
            manager,
            max_num_seqs=max_num_seqs,
            policy=policy,
            make_guide=make_guide,
            tiers=tiers,
            host_drafter=host_drafter,
            adapters=adapters,
        )
        if draft_length is not None and draft_length.most:
            self._state.counts.spec = SpecCounts.of(draft_length.most)
        self._planner = StepPlanner(
            self._state,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
            stages=min(stages, max_in_flight),
            pace=Pace(costs, target_itl, max_num_batched_tokens) if costs is not None and target_itl else None,
            draft_length=draft_length,
            looks_ahead=looks_ahead,
        )

    # -- requests

    def check(self, request: EngineRequest, adapter: AdapterInfo | None = None) -> None:
        """Raise what `add` raises."""
        adapter = adapter or self._adapter(request)
        prompt_len = len(request.prompt_token_ids)
        if prompt_len == 0:
            raise InvalidRequestError("The prompt has no tokens; at least 1 is needed.", param="prompt")
        if prompt_len >= self.max_model_len:
            raise InvalidRequestError(
                f"The prompt has {prompt_len:,} tokens; max_model_len={self.max_model_len:,} leaves room for at most "
                f"{self.max_model_len - 1:,} and one output token. Shorten it or raise max_model_len.",
                param="prompt",
            )
        if request.request_id in self._state.sequences:
            raise InvalidRequestError(f"request_id {request.request_id!r} is already in use.", param="request_id")
        refusal = self.manager.refusal(min(prompt_len + request.max_tokens, self.max_model_len), adapter)
        if refusal is not None:
            raise InvalidRequestError(f"The request {refusal}", param="max_tokens")

    def _adapter(self, request: EngineRequest) -> AdapterInfo | None:
        if not request.lora:
            return None
        if self._state.adapters is None:
            raise InvalidRequestError(
                f"The request asks for the adapter {show(request.lora)}, and this engine serves none; start it with enable_lora=True "
                "(--enable-lora).",
                "lora_request",
            )
        return self._state.adapters.of(request.lora)

    def add(self, request: EngineRequest, adapter: AdapterInfo | None = None) -> None:
        """Queue a request. It has this content of its `adapter`, or that which its name stands for now.

        Raises:
            InvalidRequestError: it can never run (the message has the numbers), or its id is taken.
        """
        self.check(request, adapter)
        manager, adapter = self.manager, adapter or self._adapter(request)
        sequence = Sequence(
            request,
            manager.chain(request.cache_salt, request.parent_id, adapter),
            shares=manager.enable_prefix_caching or not request.is_alone,
            max_model_len=self.max_model_len,
            arrival=self._state.counts.arrivals,
            adapter=adapter,
        )
        if request.grammar is not None:
            self._state.guided.start(sequence)
        self._state.counts.arrivals += 1
        self._state.sequences[request.request_id] = sequence
        if self._state.adapters is not None:
            self._state.adapters.came(sequence)
        self._state.waiting.push(sequence)

    def adapter_of(self, request_id: str) -> AdapterInfo | None:
        """The content that an unfinished request's adapter has."""
        sequence = self._state.sequences.get(request_id)
        return None if sequence is None else sequence.adapter

    def resume(self, request: EngineRequest, output: list[int], adapter: AdapterInfo | None = None) -> None:
        """Queue a request that goes on after `output`, the tokens that an earlier scheduler has reported of it."""
        self.add(request, adapter)
        if not output:
            return
        sequence = self._state.sequences[request.request_id]
        sequence.tokens += output
        sequence.reported = True
        sequence.cached_tokens = 0  # the first admission has counted its look into the prefix index
        if (guide := sequence.guide) is not None:
            while not guide.ready:
                guide.wait(1.0)
            if guide.error is None:
                guide.advance(output)

    def count_on(self, earlier: Scheduler) -> None:
        """Go on with the counts of an earlier scheduler, which this one takes the place of."""
        self._state.count_on(earlier._state)
        self.manager.count_on(earlier.manager)
        if self.tiers is not None and earlier.tiers is not None:
            self.tiers.count_on(earlier.tiers)

    def close_guides(self) -> None:
        """Give up the guides of all sequences. Another scheduler takes the place of this one, which schedules nothing more."""
        self._state.guided.close()

    def abort(self, request_ids: list[str]) -> list[RequestUpdate]:
        """End requests at once, whatever they are doing. Ids that are unknown or finished are passed over."""
        updates = []
        for request_id in request_ids:
            sequence = self._state.sequences.get(request_id)
            if sequence is not None:
                updates.append(self._state.update(sequence, "abort"))
        return updates

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._state.sequences

    @property
    def load(self) -> int:
        """How much there is to do: requests that run, and more for those that wait."""
        running = len(self._state.running)
        return running + WAITING_WEIGHT * (len(self._state.sequences) - running)

    @property
    def request_ids(self) -> list[str]:
        """Every unfinished request."""
        return list(self._state.sequences)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, any plan is not committed, or pages are still stored or loaded."""
        return bool(self._state.sequences or self._state.in_flight or (self.tiers is not None and self.tiers.busy))

    # -- planning

    def settle_guides(self) -> list[RequestUpdate]:
        """Call before `schedule`: take the results of guides.

        A sequence may run again, or is complete, or has failed.
        """
        updates = []
        for sequence in reversed(self._state.guided.settled()):  # in reverse, so that the line keeps its order
            guide = sequence.guide
            assert guide is not None
            sequence.blocked = False
            if self._state.guided.held.pop(sequence.request_id, None) is not None:
                self._state.waiting.put_back(sequence)
            if guide.error is not None:
                updates.append(self._state.update(sequence, "error", error=guide.error, param="structured_outputs"))
            elif guide.finished:
                updates.append(self._state.update(sequence, "stop"))
            else:
                sequence.drafts = len(guide.masks) - 1
        return updates

    def wait_for_guide(self, seconds: float) -> bool:
        """With nothing to run: wait for a guide. False if none is at work."""
        return self._state.guided.wait(seconds)

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to run or `max_in_flight` plans are under way."""
        if len(self._state.in_flight) >= self.max_in_flight:
            return None
        plan = self._planner.next_plan()
        while plan is None and self.manager.moves_unfinished:  # with nothing to run, nobody waits for the moves
            plan = self._planner.next_plan()
        if self._costs is not None and plan is not None and plan.rows:
            shape = StepShape.of(plan)
            if shape.drafts and self._draft_length is not None:
                shape = shape._replace(drafts=self._draft_length.counted(shape.drafts))
            self._costs.planned(plan.step_id, shape, plan.num_drafts)
        return plan

    def schedule_loads(self) -> StepPlan | None:
        """A step that only begins to load pages for requests that wait. None if some run, whose next step does so, or if there is nothing to load now.

        With it, the bus works while a line of prompts is still being queued.
        """
        if self.tiers is None or len(self._state.in_flight) >= self.max_in_flight:
            return None
        return self._planner.plan_of_loads(self.tiers)

    @property
    def num_transfers(self) -> int:
        """Transfers of pages that haven't ended."""
        return 0 if self.tiers is None else self.tiers.num_transfers

    def end_transfer(self, end: TransferEnd) -> None:
        """A transfer has ended, on all ranks."""
        assert self.tiers is not None
        self.tiers.end(end)

    def needs_pages(self, request_id: str) -> bool:
        """Whether a request waits that hasn't looked into other memories yet."""
        sequence = self._state.sequences.get(request_id)
        return sequence is not None and not sequence.looked_up and sequence.grant is None  # one may run without

    def host_ready(self, num_bytes: int) -> None:
        """So many bytes of host memory can be used by now. What has come there from a store below is found."""
        if self.tiers is not None:
            self.tiers.grow(num_bytes)
            self.tiers.settle()

    def clear_tiers(self, *, new_weights: bool = False) -> None:
        """Forget what other memories hold, as somebody asks for it or because the weights are others."""
        if self.tiers is not None:
            self.tiers.clear(new_weights=new_weights)

    def attach_tiers(self) -> None:
        """The weights are known again: those that other memories' pages are of, or others."""
        if self.tiers is not None:
            self.tiers.attach()

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long."""
        if self.tiers is not None:
            self.tiers.rates.computed(plan.num_tokens, seconds)

    def preempt_all(self) -> None:
        """Send every running sequence back to the waiting line, in order, and forget all pages (for sleep).

        Statistics don't count this as preemptions: those are signs of too little memory. Transfers must have ended: the pages
        that they read and write go too.
        """
        # fills of adapters are waited for, before their pages go
        assert not self.manager.num_transfers, "transfers are under way"
        while self._state.running:
            self._state.send_back(self._state.running.pop())
        if self.tiers is not None:
            self.tiers.let_all_go()
            for sequence in self._state.sequences.values():  # those that wait too: what they had found is gone
                sequence.looked_up = sequence.fetched = False
        self.manager.reset_prefix_cache()
        if self._state.adapters is not None:
            self._state.adapters.lose_all(self._state.sequences.values())

    # -- results

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Take the tokens of the oldest plan in flight. Returns one update per request that got something."""
        if self._costs is not None:
            self._costs.timed(result.timed)
        if (plan.num_drafts or plan.guesses) and self._draft_length is not None:
            self._draft_length.learn(plan, result)
        return commit(self._state, plan, result)

    def take_failed(self) -> list[RequestUpdate]:
        """The last updates of requests that failed while steps were planned, or whose pages didn't come from another memory. So call it before and
        after `schedule`, which computes those that wait for no pages any more.
        """
        failed, self._state.failed = self._state.failed, []
        if self._state.adapters is not None:
            for sequence, why in self._state.adapters.take_failed():
                if not sequence.finished:
                    failed.append(self._state.update(sequence, "error", error=why, param="lora_request"))
        return failed + self._without_pages() if self.tiers is not None else failed

    def _without_pages(self) -> list[RequestUpdate]:
        """Requests whose pages didn't come: unless they are to be computed, they end."""
        assert self.tiers is not None
        lost = self.tiers.take_failed()
        if self._load_failure == "recompute":
            return []
        sequences = [one for one in lost if isinstance(one, Sequence) and one.grant is None and not one.finished]
        return [self._state.update(one, "error", error=LOAD_FAILED) for one in sequences]

    # -- state

    def reset_prefix_cache(self) -> bool:
        """Forget all cached pages. False if some pages are in use; no prompt finds those any more either."""
        return self.manager.reset_prefix_cache()

    def memory_state(self) -> MemoryState:
        """Who holds which pages now."""
        running = self._state.running
        holders = {sequence.request_id: sequence.grant for sequence in running if sequence.grant is not None}
        return msgspec.structs.replace(
            memory_state(self.manager, holders),
            host=None if self.tiers is None else self.tiers.memory_state(),
            adapters=None if self._state.adapters is None else self._state.adapters.memory_state(),
        )

    def live(self, *, paused: bool = False) -> list[LiveRequest]:
        """The running requests, then the first of those that wait, and why. `paused`: nothing is scheduled for now."""
        return live_requests(self._state, paused=paused)

    def stats(self, *, paused: bool = False) -> SchedulerStats:
        """Counts for the log and the metrics. `paused`: nothing is scheduled for now."""
        state, counts = self._state, self._state.counts
        return SchedulerStats(
            **msgspec.structs.asdict(memory_stats(self.manager)),
            running=len(state.running),
            waiting=len(state.waiting)
            + len(state.guided.held)
            + (0 if state.adapters is None else len(state.adapters.held)),
            waiting_for=why_first_waits(state, paused=paused),
            preemptions_total=counts.preemptions,
            steps_total=counts.steps,
            prompt_tokens_total=counts.prompt_tokens,
            generation_tokens_total=counts.generated,
            last_step_tokens=counts.last_step_tokens,
            step_sizes=copy.deepcopy(counts.step_sizes),
            spec=copy.deepcopy(counts.spec),
            tier=None if self.tiers is None else self.tiers.stats(),
            costs=None if self._costs is None else self._costs.stats,
            lora=None if state.adapters is None else state.adapters.stats(state.sequences.values()),
        )
