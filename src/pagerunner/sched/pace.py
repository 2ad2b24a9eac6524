"""How long prompts may hold up those who generate: pieces of prompts that are as long as a target for the time between tokens allows.

Between two tokens of a request lies one step, whatever the number of plans in flight: the device runs one step behind the other. So no step that
computes prompts beside rows that generate may take longer than the target. If nobody generates, nobody is held up, and pieces are as long as ever.

Example: the target is 25 ms, and a step of the 60 rows that generate takes 5 ms. A prompt of 8,192 tokens would make it 220 ms. Its pieces of some
900 tokens make ten steps of 25 ms.

Prompts always go on. The first one of a step gets at least a tenth of the target, even where those who generate need all of it alone.
"""

from __future__ import annotations

import logging

from pagerunner.sched.costs import CostModel
from pagerunner.sched.state import SchedulerState
from pagerunner.types.steps import StepShape, pairs_of

logger = logging.getLogger(__name__)

PROMPTS_SHARE = 0.1
"""Of the target, what prompts get at least."""
LEAST_TOKENS = 16
"""A piece has no fewer, unless it is the prompt's end."""
SURE_STEPS = 50
"""So many steps in a row say that the target can't be kept, as one slow step may have misled the model."""


class NoPace:
    """There is no target: only max_num_batched_tokens bounds prompts."""

    has_room = True

    def begin(self, state: SchedulerState, drafts: int) -> None:
        """A plan is begun, in which rows that generate have so many `drafts`."""

    def end(self, start: int, wanted: int, *, admitted: bool = False) -> int:
        """Where a prompt's piece from `start` on ends in this step, `wanted` at the latest. The same as `start` if it has to wait, which one that
        was `admitted` in this step can't.
        """
        return wanted


class Pace(NoPace):
    """`target`: seconds. `most_tokens`: max_num_batched_tokens, of which rows that generate get theirs before prompts."""

    def __init__(self, costs: CostModel, target: float, most_tokens: int) -> None:
        self._costs, self._target, self._most_tokens = costs, target, most_tokens
        self._step = StepShape(0, 0, 0, 0)  # what is planned: all that generate, and the pieces so far
        self._bounded = self._full = False
        self._limit = target
        self._told = False
        self._steps_above = 0  # in a row, whose rows alone need more than the target

    def begin(self, state: SchedulerState, drafts: int) -> None:
        """See NoPace."""
        self._bounded = False
        if not state.waiting and not any(one.scheduled < one.refill for one in state.running):
            return  # there are no prompts
        rows = keys = 0
        for sequence in state.running:
            if sequence.scheduled >= sequence.refill and len(sequence.tokens) + sequence.pending < sequence.max_total:
                rows += 1
                keys += sequence.scheduled + 1
        self._step = StepShape(rows, rows * (1 + drafts), keys, 0, drafts)
        self._bounded, self._full = rows > 0, False
        if not rows:
            return
        alone = self._costs.seconds(self._step)
        self._limit = max(self._target, alone + PROMPTS_SHARE * self._target)
        self._steps_above += 1 if alone > self._target else -self._steps_above
        if self._steps_above == SURE_STEPS and not self._told:
            self._told = True
            logger.warning(
                "target_itl_ms=%g is less than the %.1f ms that a step takes for the %d requests that generate now, without any prompt. Prompts go "
                "on beside them in small pieces. Raise target_itl_ms or lower max_num_seqs.",
                1e3 * self._target,
                1e3 * alone,
                rows,
            )

    @property
    def has_room(self) -> bool:  # type: ignore[override]
        """Whether the step has time for one more prompt."""
        if not self._bounded or self._step.decode:
            return True
        return not self._full and self._fits(self._with(0, LEAST_TOKENS))

    def end(self, start: int, wanted: int, *, admitted: bool = False) -> int:
        """See NoPace."""
        if not self._bounded:
            return wanted
        count = min(wanted - start, max(self._most_tokens - self._step.tokens, 0))
        if not self._fits(self._with(start, count)):
            self._full = True
            fits, beyond = 0, count
            while beyond - fits > 1:
                middle = (fits + beyond) // 2
                fits, beyond = (middle, beyond) if self._fits(self._with(start, middle)) else (fits, middle)
            count = fits
        least = min(LEAST_TOKENS, wanted - start)
        if count < least:
            count = least if admitted or self._step.decode else 0
        if count:
            self._step = self._with(start, count)
        return start + count

    def _fits(self, step: StepShape) -> bool:
        return self._costs.seconds(step) <= self._limit

    def _with(self, start: int, count: int) -> StepShape:
        """What is planned with a piece of a prompt."""
        rows, tokens, keys, pairs, drafts, _ = self._step
        return StepShape(rows + 1, tokens + count, keys, pairs + pairs_of(start, count), drafts, False)
