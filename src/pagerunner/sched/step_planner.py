"""Chooses the rows of a step: tokens, not phases."""

from __future__ import annotations

import heapq
import time
from itertools import islice

from pagerunner.memory.grant import Grant
from pagerunner.sched.draft_length import DraftLength, LengthByRows
from pagerunner.sched.pace import NoPace
from pagerunner.sched.request import Sequence
from pagerunner.sched.state import SchedulerState
from pagerunner.sched.suffix import SuffixDrafter
from pagerunner.tiers import bounds
from pagerunner.tiers.policy import Tiering
from pagerunner.types import Guess, SlotInit, StepPlan, StepRow

_INDEXED_TOKENS = 8_192
"""Most tokens of texts that are taken up in a plan to draft from, about 0.7 ms of the host's time: all requests wait meanwhile."""
_ON_DEVICE: list[int] = []  # what the host knows of a row whose token the device sampled; never written to


class StepPlanner:
    """Running sequences come first, in order. Then waiting ones are admitted while slots, tokens and pages last.

    A row that generates has one token, and after it the drafts that `draft_length` chooses. Until the steps before are committed, only bounds of
    its start are known. Example: a sequence of 100 tokens has two plans in flight with 3 drafts each. Its next row begins at position 101 at the
    least, and at 107 at the most. A row doesn't go beyond the sequence's longest length, however many drafts are right.

    With several `stages`, sequences that generate take turns, so that stages work on steps that don't wait for each other's tokens. Example: of
    5 sequences and 2 stages 3 are in one step, 2 in the next, and then the 3 again.
    """

    def __init__(
        self,
        state: SchedulerState,
        *,
        max_num_batched_tokens: int,
        enable_chunked_prefill: bool,
        stages: int = 1,
        pace: NoPace | None = None,
        draft_length: DraftLength | None = None,
        looks_ahead: bool = False,
    ) -> None:
        """`looks_ahead`: who drafts keeps pages, too, and all but the first of a row's drafts take a place behind the row's tokens."""
        self._looks_ahead = looks_ahead
        self._state, self._pace = state, pace or NoPace()
        self._draft_length = draft_length or LengthByRows([(0, 0)])
        self._drafts = 0  # most drafts of a row of the plan in the making
        self._made = 0  # those of a row that the device makes after it
        self._guesses: list[Guess] = []
        self._to_index = 0  # tokens of texts that this plan may still take up
        self._manager = state.manager
        self._max_num_batched_tokens = max_num_batched_tokens
        self._enable_chunked_prefill = enable_chunked_prefill
        self._stages = stages
        # a prompt that runs whole, and is admitted, waits for a step with room: nobody goes before it
        self._is_full = False

    def next_plan(self) -> StepPlan | None:
        """Choose the rows of a step and take their pages; None if there is nothing to run."""
        state, manager = self._state, self._manager
        manager.begin_step()
        rows: list[StepRow] = []
        sequences: list[Sequence] = []
        admitted: list[SlotInit] = []
        preempted = state.counts.preemptions
        if self._draft_length.most:
            self._drafts = self._choose_drafts()
            self._made = self._drafts if state.host_drafter is None else 0
            self._guesses, self._to_index = [], _INDEXED_TOKENS
        self._pace.begin(state, self._drafts)
        if state.adapters is not None:
            for sequence in reversed(state.adapters.settle()):  # in reverse, so that the line keeps its order
                state.waiting.put_back(sequence)
        self._is_full = False
        budget = self._schedule_running(self._max_num_batched_tokens, rows, sequences)
        if state.tiers is not None:
            computing = self._computing(budget) if state.waiting else 0
            state.tiers.begin(
                state.waiting,
                state.counts.arrivals,
                idle=not state.sequences,
                runs=bool(state.running),
                computing=computing,
            )
        may_admit = preempted == state.counts.preemptions and not (manager.waits or self._is_full)
        if state.waiting and state.free_slots and may_admit:
            budget = self._schedule_waiting(budget, rows, sequences, admitted)
        for steps in range(self._stages - 1, 0, -1):  # if nobody else can run, a step may wait for another one's tokens
            if not rows:
                budget = self._schedule_running(budget, rows, sequences, steps)
        if not rows and not admitted and not manager.transfers_wait:
            return None
        state.counts.last_step_tokens = self._max_num_batched_tokens - budget
        if rows:
            state.counts.step_sizes.add(state.counts.last_step_tokens)
        return self._plan(rows, sequences, admitted)

    def _computing(self, budget: int) -> int:
        """Tokens that are computed before those of a request that waits: of plans in flight, of this one so far, and of prompts that run."""
        here = self._max_num_batched_tokens - budget + sum(plan.num_tokens for plan, _ in self._state.in_flight)
        return here + sum(max(one.refill - one.scheduled, 0) for one in self._state.running)

    def plan_of_loads(self, tiers: Tiering) -> StepPlan | None:
        """A plan without rows, for which nobody who runs waits: it begins loads for requests that wait. None if there is nothing to load, or if the bus has work enough."""
        state, manager = self._state, self._manager
        if state.running or len(state.waiting) > bounds.LOOK_AHEAD or tiers.keeps_bus_busy:
            return None  # of a longer line the first have been looked up
        manager.begin_step()
        tiers.begin(state.waiting, state.counts.arrivals, idle=False, runs=False)
        self._guesses = []
        return self._plan([], [], []) if manager.transfers_wait else None

    def _plan(self, rows: list[StepRow], sequences: list[Sequence], admitted: list[SlotInit]) -> StepPlan:
        """The plan of these rows. It carries what was decided about pages since the plan before it."""
        state, manager = self._state, self._manager
        writes = manager.take_table_writes()
        saves = manager.end_plan(
            (sequence.grant, *_certain(row, sequence))
            for row, sequence in zip(rows, sequences, strict=True)
            if sequence.grant is not None
        )
        guided = _guided(rows, sequences) if state.guided else []
        made = self._made if self._made and not all(map(_ends, sequences)) else 0
        plan = StepPlan(
            step_id=state.counts.steps,
            rows=rows,
            admitted=admitted,
            table_writes=writes,
            zero=manager.take_fresh(),
            copies=manager.take_copies(),
            state_saves=saves,
            transfers=manager.take_transfers(),
            adapter_moves=[] if state.adapters is None else state.adapters.take_moves(),
            masks=_masks(guided, rows, sequences),
            tell_drafts=guided if made else [],
            num_drafts=made,
            guesses=self._guesses,
        )
        state.counts.steps += 1
        state.in_flight.append((plan, sequences))
        return plan

    def _choose_drafts(self) -> int:
        """Most drafts of the plan's rows, or of those that they have made for them. All rows that generate have room for as many in one step."""
        running = self._state.running
        room = max(self._max_num_batched_tokens // max(len(running), 1) - 1, 0)
        generating = [sequence.scheduled for sequence in running if sequence.scheduled >= sequence.refill]
        return self._draft_length.choose(max(len(generating), 1), sum(generating), room)

    def _schedule_running(
        self, budget: int, rows: list[StepRow], sequences: list[Sequence], turn: int | None = None
    ) -> int:
        """What is left of the budget. It is a sequence's turn to generate so many steps after its last one (default: as many as there are stages)."""
        running, drafting = self._state.running, self._draft_length.most > 0
        step, turn = self._state.counts.steps, turn or self._stages
        generating = -(-len(running) // self._stages)
        for sequence in running:  # preemption may take the last ones away meanwhile
            if not budget:
                break
            total = len(sequence.tokens) + sequence.pending
            # all its tokens are in flight, or its next mask isn't known yet, or its adapter isn't there
            if total >= sequence.max_total or sequence.blocked or sequence.awaits_adapter:
                continue
            start = sequence.scheduled
            generates = start >= sequence.refill
            if self._stages > 1 and generates:
                if not generating or (sequence.sampled_in >= 0 and step - sequence.sampled_in < turn):
                    continue
                generating -= 1
            guess = None
            low = total - 1 if generates and drafting else None  # where it begins at the least; None: at start
            if generates and drafting:
                if start >= sequence.max_total:
                    continue  # it may be complete
                end, guess = self._with_drafts(sequence, start, total, budget)
            elif generates:
                end = total
            else:
                end = total if total - start <= budget else start + budget
                if end < total and not self._enable_chunked_prefill and self._waits_for_room(sequence, budget):
                    self._is_full = True
                    continue
                if (end := self._pace.end(start, end)) == start:
                    continue
            grant = sequence.grant
            assert grant is not None
            reach = self._ahead(sequence, end) if generates and self._looks_ahead else end
            if reach > grant.capacity:
                if not (reach := self._grow(sequence, grant, start, end, reach, low)):
                    if sequence.grant is None:
                        break
                    continue
                end = min(end, reach)
            budget -= end - start
            if guess is not None and end - start > 1:
                self._guesses.append(guess._replace(slot=grant.slot))
            if generates and sequence.guide is None:
                sequence.scheduled = end
                sequence.in_flight += 1
                sequence.pending += 1
                sequence.drafts = self._made
                sequence.sampled_in = step
                rows.append(StepRow(grant.slot, start, end - start, _ON_DEVICE, True))
            else:
                rows.append(self._row(sequence, grant, start, end))
            sequences.append(sequence)
        return budget

    def _waits_for_room(self, sequence: Sequence, budget: int) -> bool:
        """Whether none of an admitted prompt was computed, which waited for its adapter, and the step has less room than it may have."""
        assert sequence.grant is not None
        return sequence.scheduled == sequence.grant.cached_tokens and budget < self._max_num_batched_tokens

    def _ahead(self, sequence: Sequence, end: int) -> int:
        """How far there should be pages for a row that generates and ends at `end`: its drafter goes on behind it. A prompt's last row has none of these
        pages, as windows would forget too much for them.
        """
        if self._drafts < 2:
            return end
        return max(min(end + self._drafts - 1, sequence.max_total), end)

    def _with_drafts(self, sequence: Sequence, start: int, total: int, budget: int) -> tuple[int, Guess | None]:
        """Where a row that generates ends at the most, and drafts of the host."""
        drafter, guess = self._state.host_drafter, None
        if drafter is not None and self._drafts:
            guess = self._guess(drafter, sequence, start)
        if start < total and not sequence.drafts:
            return total, guess
        most = min(sequence.max_total - max(start, total), budget)
        return start + min(1 + min(sequence.drafts, self._drafts), most), guess

    def _guess(self, drafter: SuffixDrafter, sequence: Sequence, start: int) -> Guess:
        """How the text goes on behind what is committed, as far as the row may need it that begins at `start` at the latest."""
        tokens, text = sequence.tokens, sequence.text
        if text is None or text.is_full:
            text = sequence.text = drafter.begin(len(tokens))
        if (missing := min(len(tokens) - text.end, self._to_index)) > 0:
            text.extend(tokens[text.end : text.end + missing])
            self._to_index -= missing
        if sequence.guide is not None:  # it has seen them, and no step is in flight
            return Guess(-1, len(tokens), sequence.host_drafts)
        guess = self._state.guess(sequence, start + 1 - len(tokens) + self._drafts)
        sequence.drafts = max(len(guess) - sequence.pending, 0)
        return Guess(-1, len(tokens), guess)

    def _grow(self, sequence: Sequence, grant: Grant, start: int, end: int, reach: int, low: int | None) -> int:
        """`KVManager.grow`, which may preempt other sequences for their pages. Returns how far there are pages: up to `reach`, where a drafter goes
        on behind the row's `end`.

        0 if the sequence itself was preempted. 0, too, if it waits: for the next step, which may move more pages together,
        for a transfer to end, or for steps in flight that may have accepted fewer drafts. What a drafter computes ahead, and then drafts, are left out before anybody
        is preempted.
        """
        while not (found := self._manager.grow(grant, start, reach, low)):
            if self._manager.waits:
                return 0
            if reach > end or (low is not None and end > start + 1):
                end = reach = end if reach > end else start + 1
                if end <= grant.capacity:
                    return end
                continue
            if low is not None and start > low:
                return 0
            # Rows already in this plan belong to sequences before this one, so the victim has none.
            self._state.preempt(victim := self._state.running.pop())
            if victim is sequence:
                return 0
        return found

    def _row(self, sequence: Sequence, grant: Grant, start: int, end: int) -> StepRow:
        """Put positions [start, end) of a sequence into the plan that is being built."""
        sequence.scheduled = end
        sequence.in_flight += 1
        tokens = sequence.tokens
        sequence.blocked = sequence.guide is not None and end >= sequence.refill
        if sequence.blocked:  # most that its guide may be told for its next row
            sequence.drafts = self._drafts if self._state.host_drafter is not None else 0
        if start >= sequence.refill:
            sequence.pending += 1
            sequence.sampled_in = self._state.counts.steps
            return StepRow(grant.slot, start, end - start, _ON_DEVICE, True)
        samples = end == sequence.refill
        sequence.pending += samples
        if samples:
            sequence.sampled_in = self._state.counts.steps
            if sequence.guide is None:
                sequence.drafts = self._made
        if end >= grant.next_publish:
            self._manager.publish(grant, tokens, end)
        if samples and sequence.parent_id:
            self._manager.offer(grant, sequence.parent_id, tokens[: sequence.prompt_len])
        # a drafter works on a token and the one behind it, which is known if the prompt goes on
        behind = not samples and self._draft_length.most > 0
        return StepRow(grant.slot, start, end - start, tokens[start : end + behind], samples)

    def _may_go(self, tiers: Tiering, sequence: Sequence, passed: int) -> bool:
        """Look the first of the line up in other memories, unless that was done. Whether a sequence may be tried: who passes others that wait for
        their pages doesn't take the room that is set aside for them, but goes only if room is set aside for it, too.
        """
        refused = sequence.retry_version == self._manager.version
        if sequence.blocked or refused or sequence in tiers.fetching or tiers.provides(sequence):
            return True
        if not passed:
            tiers.look_up(sequence)
        return not passed

    def _schedule_waiting(
        self, budget: int, rows: list[StepRow], sequences: list[Sequence], admitted: list[SlotInit]
    ) -> int:
        manager, state = self._manager, self._state
        waiting, free_slots, tiers = state.waiting, state.free_slots, state.tiers
        passed = 0  # at the beginning of the line, sequences whose pages are on their way
        while budget and len(waiting) > passed and free_slots and self._pace.has_room:
            sequence = next(islice(waiting, passed, None)) if passed else waiting.peek()
            # Tokens of a preempted sequence's last steps are still to come: they belong to what it resumes from.
            # A sequence that didn't fit can't fit before pages came back, or while the step has too few tokens left for it.
            if sequence.in_flight or budget < sequence.retry_budget:
                break
            if state.lacks_adapter(sequence):
                continue
            if tiers is not None and not self._may_go(tiers, sequence, passed):
                break
            if tiers is not None and tiers.fills(sequence):
                passed += 1
                continue
            if sequence.retry_version == manager.version:
                if not sequence.awaits_transfer:
                    break
                passed += 1
                continue
            if sequence.blocked:
                waiting.remove(sequence)
                state.guided.held[sequence.request_id] = sequence
                continue
            known = len(sequence.tokens)
            slot = free_slots[0]
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
            except Exception as error:  # a bug that one request meets must not end the others
                state.failed.append(state.fail(sequence, "admitted", error))
                continue
            if grant is None:
                sequence.retry_version = manager.version
                sequence.awaits_transfer = manager.awaits == "transfer"
                if not sequence.awaits_transfer:
                    break
                passed += 1
                continue
            start = grant.cached_tokens
            waits = state.must_wait(sequence, grant)
            end = min(known, start + budget)
            if end < known and not waits and not self._enable_chunked_prefill and budget < self._max_num_batched_tokens:
                manager.release(grant)  # nothing was computed or published
                sequence.retry_budget = min(known - start, self._max_num_batched_tokens)
                break
            if not waits:
                end = manager.grow(grant, start, self._pace.end(start, end, admitted=True))
                assert end, "admission promised these pages"
            waiting.remove(sequence)
            heapq.heappop(free_slots)
            sequence.grant = grant
            sequence.refill = known
            sequence.scheduled = start
            sequence.retry_budget = 0
            if sequence.cached_tokens < 0:
                sequence.cached_tokens = start
                local, found = sequence.found
                sequence.external_tokens = max(min(start, found) - local, 0)
                sequence.admitted_time = time.monotonic()
                if sequence.shares and not sequence.wants_prompt_logprobs:
                    manager.count_query(grant, sequence.external_tokens)
            state.run(sequence)
            admitted.append(state.begun(sequence, slot))
            if not waits:
                budget -= end - start
                rows.append(self._row(sequence, grant, start, end))
                sequences.append(sequence)
        return budget


def _certain(row: StepRow, sequence: Sequence) -> tuple[int, int]:
    """The least first position of a row of the plan that was made last, and the most that it computes for certain: a prompt's part, or one token."""
    if row.tokens:
        return row.start, row.start + row.num_tokens
    return len(sequence.tokens) + sequence.pending - 2, row.start + 1


def _ends(sequence: Sequence) -> bool:
    """Whether the plans in flight bring a sequence's last token, however few drafts are right."""
    return len(sequence.tokens) + sequence.pending >= sequence.max_total


def _guided(rows: list[StepRow], sequences: list[Sequence]) -> list[int]:
    """Rows that sample and follow a grammar, whose guides must know the drafts behind them."""
    both = enumerate(zip(rows, sequences, strict=True))
    return [number for number, (row, sequence) in both if sequence.guide is not None and row.samples]


def _masks(guided: list[int], rows: list[StepRow], sequences: list[Sequence]) -> dict[int, list[bytes | None]]:
    found = {}
    for number in guided:
        row, guide = rows[number], sequences[number].guide
        assert guide is not None
        masks = list(guide.masks[: 1 if row.tokens else row.num_tokens])
        if any(masks):
            found[number] = masks
    return found
