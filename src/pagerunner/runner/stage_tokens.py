"""How the tokens that a pipeline's last stage samples, and the lengths that slots have then, reach the others.

The last stage tells the tokens of each step, in order. Another stage hears them as late as it may: before a step that reads one of them on the
device. So as long as no row of a step needs the tokens of the step before, stages work on different steps at the same time.

Example with two stages: steps 1 and 2 are of other requests. Step 3 goes on with those of step 1. Before step 3 the first stage hears the tokens
of step 1, which were sampled while it computed step 2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from pagerunner.dist.base import Stage
from pagerunner.ops.ahead import rehearsing
from pagerunner.ops.batch import SlotState
from pagerunner.types import StepRow


class StageTokens:
    """One stage's end. `samples`: the stage is the last one."""

    def __init__(self, stage: Stage, state: SlotState, in_flight: int) -> None:
        """`in_flight` steps at most are under way at once. So when a step begins, tokens of steps before these are there."""
        self._stage, self._state, self._in_flight = stage, state, in_flight
        self._step = 0
        self._to_hear: deque[tuple[int, int]] = deque()  # steps, and how many tokens each has sampled
        self._sampled_in: dict[int, int] = {}  # by slot the last step that has sampled for it
        self.samples = stage.is_last

    def begin(self, rows: Sequence[StepRow]) -> None:
        """Call before a step of these rows: what it reads of the slots' state is there afterwards."""
        if self.samples or rehearsing():
            return
        self._step += 1
        reads = (self._sampled_in.get(row.slot, 0) for row in rows if not row.tokens)
        self._hear(max((self._step - self._in_flight, *reads)))
        sampled = [row.slot for row in rows if row.samples]
        if sampled:
            self._to_hear.append((self._step, len(sampled)))
            self._sampled_in.update(dict.fromkeys(sampled, self._step))

    def end(self, slots_S: torch.Tensor, tokens_S: torch.Tensor, positions_S: torch.Tensor) -> None:
        """Call behind each step of the last stage that has sampled, with what `SlotState.store` takes."""
        if not rehearsing():
            self._stage.tell(torch.stack((slots_S, tokens_S, positions_S)))

    def catch_up(self) -> None:
        """Hear all that is to be heard. Waits for the last stage."""
        self._hear(self._step)

    def _hear(self, step: int) -> None:
        while self._to_hear and self._to_hear[0][0] <= step:
            _, count = self._to_hear.popleft()
            told_3S = torch.empty(3, count, dtype=torch.int64, device=self._state.tokens.device)
            self._stage.hear(told_3S)
            self._state.store(*told_3S)
