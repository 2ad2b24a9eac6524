"""How many drafts rows get in a step. Each is a token more to compute, which pays only if it is often right and the step has room."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

from pagerunner.sched.costs import CostModel
from pagerunner.types import StepPlan, StepResult

_FIRST_RATE = 0.7  # of drafts that are right, before any was tried
_LIKE_BEFORE = 4.0  # so many trials say that a place's drafts are as often right as those of the place before
_OWN = 4.0  # trials of the place itself that take the place of one of those
_KEPT = 0.9  # of what was seen before, what still counts a plan later
_LEAST_KEPT = 16.0  # trials that count however old they are
_BETTER = 1.02  # times as many tokens a second as the present number brings, to take another one
_TRIAL_PLANS = 2  # the first has the drafts made that the second computes
_TRIAL_SHARE = 0.01  # of the time, what trials may cost
_PLANS_ALIKE = 4  # plans of as many rows that one choice is made for
_LEAST_PAUSE = 32  # plans between trials
_PAUSED = 200  # plans that count as having passed before the first trial: what isn't known yet is worth more
_RISK = 1.5  # times a step without drafts: the most that a number costs whose last drafts nobody has tried


class DraftLength(Protocol):
    """Chooses before each plan."""

    @property
    def most(self) -> int:
        """The most that `choose` returns."""

    def choose(self, rows: int, keys: int, room: float = math.inf) -> int:
        """Drafts for each of `rows` that generate, whose sequences have `keys` tokens together. A row has `room` for so many."""

    def counted(self, drafts: int) -> int:
        """The number that a step counts as whose rows have up to so many drafts."""

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        """What became of a step's drafts."""


class LengthByRows:
    """A number for each range of rows: vLLM's num_speculative_tokens_per_batch_size."""

    def __init__(self, numbers: Sequence[tuple[int, int]]) -> None:
        """`numbers` are (rows, drafts) in ascending order: from so many rows on, each row has so many drafts."""
        self._firsts = [first for first, _ in numbers]
        self._drafts = [drafts for _, drafts in numbers]
        self.most = max(self._drafts)

    def choose(self, rows: int, keys: int, room: float = math.inf) -> int:
        """See DraftLength."""
        return int(min(self._drafts[max(bisect_right(self._firsts, rows) - 1, 0)], room))

    def counted(self, drafts: int) -> int:
        """See DraftLength."""
        return drafts

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        """See DraftLength. What becomes of drafts changes nothing."""


class AdaptiveLength:
    """The number that brings most tokens a second: those that a row can expect, over what the step costs.

    How often the draft in each place is right, if all before it were, is averaged over the latest steps of all requests. A place that wasn't tried
    counts as the one before it; with 16 trials of its own it no longer does. Example with rates of 0.7, 0.6, 0.5: with 3 drafts a row can expect 1 + 0.7 + 0.42 + 0.21 = 2.33 tokens. At one
    row such a step takes 1.2 times one without drafts. So it brings 1.9 times as many tokens. At 256 rows it takes 3 times as long, and drafts are left out.

    What isn't tried isn't learned. So now and then the next larger number is tried, and then the next smaller one, so seldom that it costs 1 % of
    the time at most. The first trial is early. What was seen counts less with each plan, but the latest 16 trials always count.

    What is believed of places that nobody has tried may be far too good, and at 256 rows 7 drafts take 5 times as long. So a number that is dear
    isn't chosen before the one below it has run.
    """

    def __init__(self, costs: CostModel, choices: Sequence[int], target: float | None = None) -> None:
        """`choices` are the numbers that may be chosen; 0 is always one of them. Drafts don't make a step longer than the `target`, in seconds."""
        self._costs, self._choices, self._target = costs, sorted({0, *choices}), target or math.inf
        self.most = self._choices[-1]
        self._right = [0.0] * self.most  # by place, of the drafts before which all were right
        self._tried = [0.0] * self.most
        self._plans = self._learned_at = 0
        self._now = 0
        self._trial, self._trial_ends, self._trials = 0, -_PAUSED, 0
        self._rows = self._looks_again = 0

    def choose(self, rows: int, keys: int, room: float = math.inf) -> int:
        """See DraftLength."""
        self._plans += 1
        if self._plans < self._trial_ends and self._trial <= room:
            return self._trial
        if rows == self._rows and self._plans < self._looks_again and self._now <= room:
            return self._now
        self._rows, self._looks_again = rows, self._plans + _PLANS_ALIKE
        costs = self._costs
        if not costs.knows(rows, 0):
            self._now = 0
            return 0
        plain = costs.decode_seconds(rows, keys)  # what drafts cost is tried where it isn't known
        seconds = {k: costs.decode_seconds(rows, keys, k) if costs.knows(rows, k) else plain for k in self._choices}
        tokens = self.expected()
        fit = [drafts for drafts in self._choices if drafts <= room]  # one cut down to its room would never be known
        allowed = [drafts for drafts in fit if not drafts or seconds[drafts] <= self._target]
        known = next((drafts for drafts in self._choices if drafts and not self._tried[drafts - 1]), self.most)
        allowed = [drafts for drafts in allowed if drafts <= known or seconds[drafts] <= _RISK * plain]
        brings = {drafts: tokens[drafts] / seconds[drafts] for drafts in allowed}
        best = max(allowed, key=brings.__getitem__)
        if brings[best] > _BETTER * brings.get(self._now, 0.0):
            self._now = best
        paused, place = self._plans - self._trial_ends, allowed.index(self._now)
        others = [allowed[other] for other in (place + 1, place - 1) if 0 <= other < len(allowed)]
        if paused < _LEAST_PAUSE or not others:
            return self._now
        trial = others[self._trials % len(others)]
        # Computed are the drafts that the plan before has made, and no more than are chosen: two plans of a trial and the one behind it.
        computed = tokens[trial] + 2 * tokens[min(self._now, trial)]
        lost = _TRIAL_PLANS * seconds[trial] + seconds[self._now] - computed / brings[self._now]
        if lost > _TRIAL_SHARE * paused * seconds[self._now]:
            return self._now
        self._trial, self._trial_ends, self._trials = trial, self._plans + _TRIAL_PLANS, self._trials + 1
        return trial

    def counted(self, drafts: int) -> int:
        """See DraftLength: there are graphs of the choices."""
        return next((choice for choice in self._choices if choice >= drafts), drafts)

    def expected(self) -> list[float]:
        """Tokens that a row can expect of a step, by its number of drafts."""
        found, rate, chance, like_before = [1.0], _FIRST_RATE, 1.0, 1.0
        for right, tried in zip(self._right, self._tried, strict=True):
            others = max(like_before - tried / _OWN, 0.1)
            rate = (right + others * rate) / (tried + others)
            chance *= rate
            found.append(found[-1] + chance)
            like_before = _LIKE_BEFORE
        return found

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        """See DraftLength."""
        right, tried = [0] * self.most, [0] * self.most
        for row, tokens in zip(plan.rows, result.token_ids, strict=True):
            if row.num_tokens > 1 and not row.tokens and tokens:
                accepted = len(tokens) - 1
                for place in range(min(row.num_tokens - 1, accepted + 1)):
                    tried[place] += 1
                    right[place] += place < accepted
        if not tried[0]:
            return
        kept = _KEPT ** (self._plans - self._learned_at)
        self._learned_at = self._plans
        for place, new in enumerate(tried):
            if new:
                share = max(kept, min(1.0, _LEAST_KEPT / max(self._tried[place], 1.0)))
                self._tried[place] = self._tried[place] * share + new
                self._right[place] = self._right[place] * share + right[place]
