"""Decides what every step runs: tokens, not phases.

`schedule()` builds the next plan, `commit()` takes a step's tokens. Up to `max_in_flight` plans may be under way between
them: a sequence whose next token is not known yet is scheduled all the same, because the device knows it.
"""

from __future__ import annotations

import heapq
import logging
import time
from bisect import insort
from collections import deque
from itertools import islice
from typing import Literal

import msgspec

from pagerunner.errors import InvalidRequestError
from pagerunner.memory.grant import Grant
from pagerunner.memory.manager import KVManager
from pagerunner.memory.ownership import MemoryState, memory_state
from pagerunner.memory.stats import memory_stats
from pagerunner.sched.guide import MakeGuide
from pagerunner.sched.guided import GuidedSequences
from pagerunner.sched.live import MAX_WAITING, LiveRequest, Wait, live_request
from pagerunner.sched.queue import FcfsQueue, PriorityQueue, WaitingQueue
from pagerunner.sched.request import Sequence
from pagerunner.sched.stats import SchedulerStats
from pagerunner.types import (
    NO_TOKEN_ALLOWED,
    EngineRequest,
    FinishReason,
    RequestUpdate,
    SlotInit,
    StepPlan,
    StepResult,
    StepRow,
    TokenLogprobs,
)

logger = logging.getLogger(__name__)
WARN_SECONDS = 10.0
"""Least time between two lines about preemptions."""
_ON_DEVICE: list[int] = []  # what the host knows of a row whose token the device sampled; never written to


class Scheduler:
    """Continuous batching over a `KVManager`.

    Running sequences come first, in order of admission ("fcfs") or of (priority, arrival) ("priority"); the last of them is
    preempted when another can't grow. Waiting ones are admitted in the same order while the pages of their whole prompt
    fit. Every accepted request finishes.

    Args:
        max_num_seqs: slots, that is how many sequences run at once.
        max_num_batched_tokens: tokens of one step.
        max_model_len: prompt and output together.
        enable_chunked_prefill: whether a prompt may be spread over steps. Without it a prompt runs whole, unless it is
            longer than max_num_batched_tokens.
        max_in_flight: plans that may be scheduled and not committed.
        make_guide: starts to follow the grammar of a request that has one.
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
    ) -> None:
        self.manager = manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.enable_chunked_prefill = enable_chunked_prefill
        self.max_in_flight = max_in_flight
        self._by_priority = policy == "priority"
        self._waiting: WaitingQueue = PriorityQueue() if self._by_priority else FcfsQueue()
        self._running: list[Sequence] = []
        self._sequences: dict[str, Sequence] = {}
        self._free_slots = list(range(max_num_seqs))  # a heap: lowest first
        self._guided = GuidedSequences(make_guide)
        self._in_flight: deque[tuple[StepPlan, list[Sequence]]] = deque()
        self._arrivals = 0
        self._steps = 0
        self._preemptions = 0
        self._warned_at = -WARN_SECONDS
        self._warned_preemptions = 0
        self._prompt_tokens = 0
        self._generated = 0
        self._last_step_tokens = 0
        self._failed: list[RequestUpdate] = []

    # -- requests

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: it can never run (the message has the numbers), or its id is taken.
        """
        prompt_len = len(request.prompt_token_ids)
        if prompt_len == 0:
            raise InvalidRequestError("The prompt has no tokens; at least 1 is needed.", param="prompt")
        if prompt_len >= self.max_model_len:
            raise InvalidRequestError(
                f"The prompt has {prompt_len:,} tokens; max_model_len={self.max_model_len:,} leaves room for at most "
                f"{self.max_model_len - 1:,} and one output token. Shorten it or raise max_model_len.",
                param="prompt",
            )
        if request.request_id in self._sequences:
            raise InvalidRequestError(f"request_id {request.request_id!r} is already in use.", param="request_id")
        refusal = self.manager.refusal(min(prompt_len + request.max_tokens, self.max_model_len))
        if refusal is not None:
            raise InvalidRequestError(f"The request {refusal}", param="max_tokens")
        manager = self.manager
        sequence = Sequence(
            request,
            manager.chain(request.cache_salt, parent_id=request.parent_id),
            shares=manager.enable_prefix_caching or request.parent_id != "",
            max_model_len=self.max_model_len,
            arrival=self._arrivals,
        )
        if request.grammar is not None:
            self._guided.start(sequence)
        self._arrivals += 1
        self._sequences[request.request_id] = sequence
        self._waiting.push(sequence)

    def resume(self, request: EngineRequest, output: list[int]) -> None:
        """Queue a request that goes on after `output`, the tokens that an earlier scheduler has reported of it."""
        self.add(request)
        if not output:
            return
        sequence = self._sequences[request.request_id]
        sequence.tokens += output
        sequence.reported = True
        sequence.cached_tokens = 0  # its look into the prefix index was counted
        if (guide := sequence.guide) is not None:
            while not guide.ready:
                guide.wait(1.0)
            if guide.error is None:
                guide.advance(output)

    def count_on(self, earlier: Scheduler) -> None:
        """Go on with the counts of an earlier scheduler, which this one takes the place of."""
        self._arrivals = earlier._arrivals
        self._steps = earlier._steps
        self._preemptions = self._warned_preemptions = earlier._preemptions
        self._prompt_tokens = earlier._prompt_tokens
        self._generated = earlier._generated
        self.manager.count_on(earlier.manager)

    def abort(self, request_ids: list[str]) -> list[RequestUpdate]:
        """End requests at once, whatever they are doing. Ids that are unknown or finished are passed over."""
        updates = []
        for request_id in request_ids:
            sequence = self._sequences.get(request_id)
            if sequence is not None:
                updates.append(self._finish(sequence, "abort"))
        return updates

    @property
    def request_ids(self) -> list[str]:
        """Every unfinished request."""
        return list(self._sequences)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished or any plan is not committed."""
        return bool(self._sequences or self._in_flight)

    # -- planning

    def settle_guides(self) -> list[RequestUpdate]:
        """Take up what guides have worked out, before `schedule`: who may run again, and who is complete or failed."""
        updates = []
        for sequence in reversed(self._guided.settled()):  # the first of those put back comes first again
            guide = sequence.guide
            assert guide is not None
            sequence.blocked = False
            if self._guided.held.pop(sequence.request_id, None) is not None:
                self._waiting.put_back(sequence)
            if guide.error is not None:
                updates.append(self._finish(sequence, "error", error=guide.error, param="structured_outputs"))
            elif guide.finished:
                updates.append(self._finish(sequence, "stop"))
        return updates

    def wait_for_guide(self, seconds: float) -> bool:
        """With nothing to run: wait for a guide. False if none is at work."""
        return self._guided.wait(seconds)

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to run or `max_in_flight` plans are under way."""
        if len(self._in_flight) >= self.max_in_flight:
            return None
        plan = self._next_plan()
        while plan is None and self.manager.moves_unfinished:  # with nothing to run, nobody waits for the moves
            plan = self._next_plan()
        return plan

    def _next_plan(self) -> StepPlan | None:
        self.manager.begin_step()
        rows: list[StepRow] = []
        sequences: list[Sequence] = []
        admitted: list[SlotInit] = []
        preempted = self._preemptions
        budget = self._schedule_running(self.max_num_batched_tokens, rows, sequences)
        may_admit = preempted == self._preemptions and not self.manager.moves_unfinished
        if may_admit and self._waiting and self._free_slots:
            budget = self._schedule_waiting(budget, rows, sequences, admitted)
        if not rows:
            return None
        manager = self.manager
        self._last_step_tokens = self.max_num_batched_tokens - budget
        writes = manager.take_table_writes()
        saves = manager.end_plan(
            (sequence.grant, row.start, row.start + row.num_tokens)
            for row, sequence in zip(rows, sequences, strict=True)
            if sequence.grant is not None
        )
        plan = StepPlan(
            step_id=self._steps,
            rows=rows,
            admitted=admitted,
            table_writes=writes,
            zero=manager.take_fresh(),
            copies=manager.take_copies(),
            state_saves=saves,
            masks=_masks(rows, sequences) if self._guided else {},
        )
        self._steps += 1
        self._in_flight.append((plan, sequences))
        return plan

    def _schedule_running(self, budget: int, rows: list[StepRow], sequences: list[Sequence]) -> int:
        running = self._running
        for sequence in running:  # of which the last ones may be taken away meanwhile
            if not budget:
                break
            total = len(sequence.tokens) + sequence.pending
            if total >= sequence.max_total or sequence.blocked:  # all its tokens are in flight, or the next needs them
                continue
            start = sequence.scheduled
            end = total if total - start <= budget else start + budget
            grant = sequence.grant
            assert grant is not None
            if end > grant.capacity and not (end := self._grow(sequence, grant, start, end)):
                if sequence.grant is None:
                    break
                continue
            budget -= end - start
            if start >= sequence.refill and sequence.guide is None:
                sequence.scheduled = end
                sequence.in_flight += 1
                sequence.pending += 1
                rows.append(StepRow(grant.slot, start, end - start, _ON_DEVICE, True))
            else:
                rows.append(self._row(sequence, grant, start, end))
            sequences.append(sequence)
        return budget

    def _grow(self, sequence: Sequence, grant: Grant, start: int, end: int) -> int:
        """`KVManager.grow`, if need be with others' pages; 0 if the sequence itself was preempted, or waits for a step because
        enough pages can be moved together, but not in this step.
        """
        while not (found := self.manager.grow(grant, start, end)):
            if self.manager.moves_unfinished:
                return 0
            # Rows already in this plan belong to sequences before this one, so the victim has none.
            self._preempt(victim := self._running.pop())
            if victim is sequence:
                return 0
        return found

    def _row(self, sequence: Sequence, grant: Grant, start: int, end: int) -> StepRow:
        """Put positions [start, end) of a sequence into the plan that is being built."""
        sequence.scheduled = end
        sequence.in_flight += 1
        tokens = sequence.tokens
        sequence.blocked = sequence.guide is not None and end >= sequence.refill
        if start >= sequence.refill:
            sequence.pending += 1
            return StepRow(grant.slot, start, end - start, _ON_DEVICE, True)
        samples = end == sequence.refill
        sequence.pending += samples
        if end >= grant.next_publish:
            self.manager.publish(grant, tokens, end)
        if samples and sequence.parent_id:
            self.manager.offer(grant, sequence.parent_id, tokens[: sequence.prompt_len])
        return StepRow(grant.slot, start, end - start, tokens[start:end], samples)

    def _schedule_waiting(
        self, budget: int, rows: list[StepRow], sequences: list[Sequence], admitted: list[SlotInit]
    ) -> int:
        manager, waiting = self.manager, self._waiting
        while budget and waiting and self._free_slots:
            sequence = waiting.peek()
            # Tokens of a preempted sequence's last steps are still to come: they belong to what it resumes from.
            # One that didn't fit can't fit before pages came back, or while the step has no more tokens to give.
            if sequence.in_flight or sequence.retry_version == manager.version or budget < sequence.retry_budget:
                break
            if sequence.blocked:
                waiting.remove(sequence)
                self._guided.held[sequence.request_id] = sequence
                continue
            known = len(sequence.tokens)
            slot = self._free_slots[0]
            try:
                grant = manager.admit(
                    slot,
                    sequence.chain,
                    sequence.tokens,
                    sequence.hit_limit(),
                    shares=sequence.shares,
                    parent_id=sequence.parent_id,
                    prompt_len=sequence.prompt_len,
                )
            except Exception as error:  # a bug that one request has found must not end the others
                self._failed.append(self._fail(sequence, "admitted", error))
                continue
            if grant is None:
                sequence.retry_version = manager.version
                break
            start = grant.cached_tokens
            waits = manager.must_wait(grant)
            end = min(known, start + budget)
            if end < known and not waits and not self.enable_chunked_prefill and budget < self.max_num_batched_tokens:
                manager.release(grant)  # nothing was computed or published
                sequence.retry_budget = min(known - start, self.max_num_batched_tokens)
                break
            if not waits:
                end = manager.grow(grant, start, end)
                assert end, "admission promised these pages"
            waiting.remove(sequence)
            heapq.heappop(self._free_slots)
            sequence.grant = grant
            sequence.refill = known
            sequence.scheduled = start
            sequence.retry_budget = 0
            if sequence.cached_tokens < 0:
                sequence.cached_tokens = start
                sequence.admitted_time = time.monotonic()
                if sequence.shares and not sequence.wants_prompt_logprobs:
                    manager.count_query(grant)
            if self._by_priority:
                insort(self._running, sequence, key=_key)
            else:
                self._running.append(sequence)
            admitted.append(SlotInit(slot, sequence.request, sequence.tokens[sequence.prompt_len :]))
            if not waits:
                budget -= end - start
                rows.append(self._row(sequence, grant, start, end))
                sequences.append(sequence)
        return budget

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's pages and slot; it resumes from all tokens it has by then."""
        self._preemptions += 1
        self._warn_of_preemption(sequence)
        self._vacate(sequence)
        self._waiting.put_back(sequence)

    def _warn_of_preemption(self, sequence: Sequence) -> None:
        """One line at once, and then at most one every WARN_SECONDS, with how many there were since the last."""
        now = time.monotonic()
        if now - self._warned_at < WARN_SECONDS:
            return
        logger.warning(
            "Request %s is preempted: up to %d computed tokens are lost, less what stays in the prefix cache (%d running, "
            "%d waiting, %.1f%% of the page memory in use). Preemptions since the last such line: %d, in all: %d.",
            sequence.request_id,
            sequence.scheduled,
            len(self._running),
            len(self._waiting),
            100 * self.manager.usage,
            self._preemptions - self._warned_preemptions,
            self._preemptions,
        )
        self._warned_at, self._warned_preemptions = now, self._preemptions

    def _vacate(self, sequence: Sequence) -> None:
        grant = sequence.grant
        assert grant is not None
        self.manager.release(grant)
        heapq.heappush(self._free_slots, grant.slot)
        sequence.grant = None
        sequence.scheduled = 0
        sequence.retry_version = -1

    def preempt_all(self) -> None:
        """Send every running sequence back to the waiting line, in order, and forget all pages (for sleep)."""
        while self._running:
            self._preempt(self._running.pop())
        self.manager.reset_prefix_cache()

    # -- results

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Take the tokens of the oldest plan in flight; what changed, one update per request that got something."""
        expected, sequences = self._in_flight.popleft()
        assert expected.step_id == plan.step_id == result.step_id, "plans are committed in the order of their making"
        updates: list[RequestUpdate] = []
        more = bool(result.errors or result.prompt_logprobs or result.pooled)
        logprobs = result.logprobs
        for number, (row, sequence, token_ids) in enumerate(zip(plan.rows, sequences, result.token_ids, strict=True)):
            sequence.in_flight -= 1
            sequence.pending -= row.samples
            if sequence.finished:
                continue
            try:
                if more and (update := self._end_row(sequence, row, number, result)) is not None:
                    updates.append(update)
                elif row.samples:
                    updates.append(self._append(sequence, token_ids, logprobs.get(number) if logprobs else None))
            except Exception as error:
                self.manager.distrust(sequence.chain, row.start)
                updates.append(self._fail(sequence, "continued", error))
        return updates

    def _end_row(self, sequence: Sequence, row: StepRow, number: int, result: StepResult) -> RequestUpdate | None:
        """Take what few rows have: a fault, log-probabilities of the prompt, a vector. The update if that ends the sequence."""
        if number in result.errors:
            self.manager.distrust(sequence.chain, row.start)
            error = result.errors[number]
            param = "structured_outputs" if error == NO_TOKEN_ALLOWED else None
            return self._finish(sequence, "error", error=error, param=param)
        if number in result.prompt_logprobs:
            sequence.add_prompt_logprobs(row, result.prompt_logprobs[number])
        if number in result.pooled:
            return self._finish(sequence, "stop", pooled=result.pooled[number])
        return None

    def take_failed(self) -> list[RequestUpdate]:
        """The last updates of requests that failed while steps were planned."""
        failed, self._failed = self._failed, []
        return failed

    def _fail(self, sequence: Sequence, what: str, error: Exception) -> RequestUpdate:
        logger.exception("Request %s can't be %s.", sequence.request_id, what)
        return self._finish(sequence, "error", error=f"It can't be {what}: {error!r}.")

    def _append(self, sequence: Sequence, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> RequestUpdate:
        """Append sampled tokens up to the one that ends the sequence."""
        tokens = sequence.tokens
        known = len(tokens)
        reason: FinishReason | None = None
        stop: int | None = None
        for token in token_ids:
            tokens.append(token)
            if token in sequence.stop_ids or len(tokens) >= sequence.max_total:
                reason, stop = sequence.finish_reason(token)
                if reason is not None:
                    token_ids = token_ids[: len(tokens) - known]
                    logprobs = logprobs[: len(token_ids)] if logprobs is not None else None
                    break
        self._generated += len(token_ids)
        grant = sequence.grant
        if grant is not None and sequence.scheduled >= grant.next_publish:
            self.manager.publish(grant, tokens, min(sequence.scheduled, len(tokens)))
        if reason is not None:
            return self._finish(sequence, reason, token_ids=token_ids, stop=stop, logprobs=logprobs)
        if sequence.guide is not None:
            sequence.guide.advance(token_ids)
        if sequence.reported:
            return RequestUpdate(request_id=sequence.request_id, new_token_ids=token_ids, logprobs=logprobs)
        return self._update(sequence, token_ids=token_ids, logprobs=logprobs)

    def _update(
        self,
        sequence: Sequence,
        *,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None = None,
        reason: FinishReason | None = None,
        stop: int | None = None,
        error: str | None = None,
        param: str | None = None,
        pooled: list[float] | None = None,
    ) -> RequestUpdate:
        """An update; a sequence's first one with tokens also says what is known about its prompt."""
        first = (bool(token_ids) or pooled is not None) and not sequence.reported
        if first:
            sequence.reported = True
            self._prompt_tokens += sequence.prompt_len
        return RequestUpdate(
            request_id=sequence.request_id,
            new_token_ids=token_ids,
            finish_reason=reason,
            stop_reason=stop,
            logprobs=logprobs,
            prompt_logprobs=[None, *sequence.prompt_logprobs] if first and sequence.wants_prompt_logprobs else None,
            num_cached_tokens=max(sequence.cached_tokens, 0) if first else 0,
            admitted_time=sequence.admitted_time if first else 0.0,
            error=error,
            param=param,
            pooled=pooled,
        )

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        token_ids: list[int] | None = None,
        stop: int | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        error: str | None = None,
        param: str | None = None,
        pooled: list[float] | None = None,
    ) -> RequestUpdate:
        sequence.finished = True
        del self._sequences[sequence.request_id]
        held = sequence.request_id in self._guided.held
        self._guided.drop(sequence)
        if held:
            pass
        elif sequence.grant is None:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
            self._vacate(sequence)
        return self._update(
            sequence,
            token_ids=token_ids or [],
            logprobs=logprobs,
            reason=reason,
            stop=stop,
            error=error,
            param=param,
            pooled=pooled,
        )

    # -- state

    def reset_prefix_cache(self) -> bool:
        """Forget all cached pages; False if some are in use (they can't be found any more either)."""
        return self.manager.reset_prefix_cache()

    def memory_state(self) -> MemoryState:
        """Who holds which pages now."""
        holders = {sequence.request_id: sequence.grant for sequence in self._running if sequence.grant is not None}
        return memory_state(self.manager, holders)

    def live(self) -> list[LiveRequest]:
        """The running requests, then the first of those that wait, and why."""
        groups = self.manager.plan.groups
        found = [live_request(sequence, groups) for sequence in self._running]
        wait = self._why_first_waits()
        for sequence in islice(self._waiting, MAX_WAITING):
            found.append(live_request(sequence, groups, wait))
            wait = "line"
        return found

    def _why_first_waits(self) -> Wait:
        if not self._waiting:
            return ""
        first = self._waiting.peek()
        if not self._free_slots:
            return "slot"
        if first.in_flight:
            return "turn"
        if first.retry_version >= 0 and self.manager.awaits_snapshot:
            return "snapshot"
        return "pages" if first.retry_version == self.manager.version else "budget"

    def stats(self) -> SchedulerStats:
        """Counts for the log and the metrics."""
        return SchedulerStats(
            **msgspec.structs.asdict(memory_stats(self.manager)),
            running=len(self._running),
            waiting=len(self._waiting) + len(self._guided.held),
            waiting_for=self._why_first_waits(),
            preemptions_total=self._preemptions,
            steps_total=self._steps,
            prompt_tokens_total=self._prompt_tokens,
            generation_tokens_total=self._generated,
            last_step_tokens=self._last_step_tokens,
        )


def _masks(rows: list[StepRow], sequences: list[Sequence]) -> dict[int, bytes]:
    found = {}
    for number, (row, sequence) in enumerate(zip(rows, sequences, strict=True)):
        if sequence.guide is not None and row.samples and (mask := sequence.guide.mask) is not None:
            found[number] = mask
    return found


def _key(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.key
