"""What planning and committing share: who waits, who runs, which slots are free, and how sequences leave."""

from __future__ import annotations

import heapq
import logging
import time
from bisect import insort
from collections import deque
from typing import Literal

from pagerunner.memory.grant import Grant
from pagerunner.memory.manager import KVManager
from pagerunner.sched.adapters import Adapters
from pagerunner.sched.guide import MakeGuide
from pagerunner.sched.guided import GuidedSequences
from pagerunner.sched.queue import FcfsQueue, PriorityQueue, WaitingQueue
from pagerunner.sched.request import Sequence
from pagerunner.sched.stats import SchedulerCounts
from pagerunner.sched.suffix import SuffixDrafter
from pagerunner.tiers.policy import Tiering
from pagerunner.types import FinishReason, RequestUpdate, SlotInit, StepPlan, TokenLogprobs

logger = logging.getLogger(__name__)
WARN_SECONDS = 10.0
"""Least time between two lines about preemptions."""


class SchedulerState:
    """Every unfinished sequence stands in one place: in `waiting`, in `running`, or held back by `guided` or by `adapters`.

    `in_flight` has the plans that are not committed, oldest first, with the sequence of each row. `failed` has the last
    updates of sequences that failed while a step was planned. `host_drafter` drafts, where the host does.
    """

    def __init__(
        self,
        manager: KVManager,
        *,
        max_num_seqs: int,
        policy: Literal["fcfs", "priority"],
        make_guide: MakeGuide | None,
        tiers: Tiering | None = None,
        host_drafter: SuffixDrafter | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.manager = manager
        self.adapters = adapters
        self.host_drafter = host_drafter
        self.tiers = tiers
        self.by_priority = policy == "priority"
        if adapters is not None:
            adapters.restart(manager)
            adapters.order = (lambda one: one.key) if self.by_priority else (lambda one: one.key[2])
        self.waiting: WaitingQueue = PriorityQueue() if self.by_priority else FcfsQueue()
        self.running: list[Sequence] = []
        self.sequences: dict[str, Sequence] = {}
        self.free_slots = list(range(max_num_seqs))  # a heap: lowest first
        self.guided = GuidedSequences(make_guide)
        self.in_flight: deque[tuple[StepPlan, list[Sequence]]] = deque()
        self.failed: list[RequestUpdate] = []
        self.counts = SchedulerCounts()
        self._warned_at = -WARN_SECONDS
        self._warned_preemptions = 0

    def count_on(self, earlier: SchedulerState) -> None:
        """Go on with the counts of an earlier state."""
        self.counts = earlier.counts.carried_on()
        self._warned_preemptions = self.counts.preemptions

    def guess(self, sequence: Sequence, most: int) -> list[int]:
        """What the host drafts behind a sequence's tokens; nothing while its text isn't taken up. Who has a salt is told no others' words."""
        text = sequence.text
        if self.host_drafter is None or text is None or text.end < len(sequence.tokens):
            return []
        return self.host_drafter.draft(text, most, alone=bool(sequence.request.cache_salt))

    def lacks_adapter(self, sequence: Sequence) -> bool:
        """Whether a sequence of the line has to wait for its adapter. If so, it stands beside the line from now on."""
        if self.adapters is None or self.adapters.take(sequence):
            return False
        self.waiting.remove(sequence)
        if self.tiers is not None:
            self.tiers.let_go(sequence)
            sequence.looked_up = sequence.fetched = False
        return True

    @staticmethod
    def begun(sequence: Sequence, slot: int) -> SlotInit:
        """What the runner must know of a sequence that takes a slot."""
        return SlotInit(slot, sequence.request, sequence.tokens[sequence.prompt_len :], sequence.adapter_slot)

    def must_wait(self, sequence: Sequence, grant: Grant) -> bool:
        """Whether a sequence that is admitted with this grant has no row in the plan in the making: it borrows pages that the plan fills, or its adapter isn't there yet."""
        return self.manager.must_wait(grant) or (self.adapters is not None and self.adapters.must_wait(sequence, grant))

    def run(self, sequence: Sequence) -> None:
        """A sequence that was admitted runs. It has what was set aside for it."""
        if self.adapters is not None and sequence.grant is not None:
            self.adapters.admitted(sequence, sequence.grant)
        if self.by_priority:
            insort(self.running, sequence, key=lambda one: one.key)
        else:
            self.running.append(sequence)
        if self.tiers is not None:
            self.tiers.let_go(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back for want of pages, which is counted and logged."""
        self.counts.preemptions += 1
        sequence.preemptions += 1
        self._warn_of_preemption(sequence)
        if self.tiers is not None and sequence.shares:
            self.tiers.wish(sequence.chain, min(sequence.scheduled, len(sequence.tokens)))
        self.send_back(sequence)

    def send_back(self, sequence: Sequence) -> None:
        """Take a running sequence's pages and slot. Later it resumes from all tokens that it has then."""
        self.vacate(sequence)
        self.waiting.put_back(sequence)

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
            len(self.running),
            len(self.waiting),
            100 * self.manager.usage,
            self.counts.preemptions - self._warned_preemptions,
            self.counts.preemptions,
        )
        self._warned_at, self._warned_preemptions = now, self.counts.preemptions

    def vacate(self, sequence: Sequence) -> None:
        """Give back a running sequence's pages and slot."""
        grant = sequence.grant
        assert grant is not None
        self.manager.release(grant)
        heapq.heappush(self.free_slots, grant.slot)
        sequence.grant = None
        sequence.awaits_adapter = False
        sequence.scheduled = 0
        sequence.retry_version = -1
        sequence.looked_up = sequence.fetched = False

    def update(
        self,
        sequence: Sequence,
        reason: FinishReason | None = None,
        *,
        token_ids: list[int] | None = None,
        stop: int | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        error: str | None = None,
        param: str | None = None,
        pooled: list[float] | None = None,
        drafted: tuple[int, int] | None = None,
    ) -> RequestUpdate:
        """An update. One with a `reason` is the last: the sequence ends, wherever it stands.

        A sequence's first update with tokens also says what is known about its prompt.
        """
        if reason is not None:
            self._end(sequence)
        first = (bool(token_ids) or pooled is not None) and not sequence.reported
        if first:
            sequence.reported = True
            if self.tiers is not None and sequence.shares:
                external, cached = sequence.external_tokens, sequence.cached_tokens
                self.tiers.wish(sequence.chain, sequence.prompt_len, external if external == cached else 0)
            if sequence.grant is not None:
                self.manager.has_first_token(sequence.grant)
            self.counts.prompt_tokens += sequence.prompt_len
        return RequestUpdate(
            request_id=sequence.request_id,
            new_token_ids=token_ids or [],
            finish_reason=reason,
            stop_reason=stop,
            logprobs=logprobs,
            prompt_logprobs=[None, *sequence.prompt_logprobs] if first and sequence.wants_prompt_logprobs else None,
            num_cached_tokens=max(sequence.cached_tokens, 0) if first else 0,
            num_external_computed_tokens=sequence.external_tokens if first else 0,
            admitted_time=sequence.admitted_time if first else 0.0,
            num_preemptions=sequence.preemptions,
            error=error,
            param=param,
            pooled=pooled,
            drafted=drafted,
        )

    def _end(self, sequence: Sequence) -> None:
        sequence.finished = True
        if self.tiers is not None and sequence.shares and not self.tiers.prompts_only:
            self.tiers.wish(sequence.chain, min(sequence.scheduled, len(sequence.tokens)))
        if self.host_drafter is not None and sequence.text is not None:
            sequence.text = None
            if not sequence.request.cache_salt:
                self.host_drafter.keep(sequence.tokens[sequence.prompt_len :])
        del self.sequences[sequence.request_id]
        held = sequence.request_id in self.guided.held
        self.guided.drop(sequence)
        if self.adapters is not None:
            held = held or sequence.request_id in self.adapters.held
            self.adapters.let_go(sequence)
        if held:
            pass
        elif sequence.grant is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self.vacate(sequence)

    def distrust(self, sequence: Sequence, start: int) -> None:
        """What was computed of a sequence from position `start` on is wrong."""
        self.manager.distrust(sequence.chain, start)
        if self.tiers is not None:
            self.tiers.distrust(sequence.chain, start)

    def fail(self, sequence: Sequence, what: str, error: Exception) -> RequestUpdate:
        """End a sequence that has met a bug. Other sequences go on."""
        logger.exception("Request %s can't be %s.", sequence.request_id, what)
        return self.update(sequence, "error", error=f"It can't be {what}: {error!r}.")
