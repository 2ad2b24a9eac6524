"""StageTokens: tokens are heard before the step that reads them, and no earlier."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagerunner.ops import ahead
from pagerunner.ops.batch import SlotState
from pagerunner.runner.stage_tokens import StageTokens
from pagerunner.types import StepRow


class FakeStage:
    """Tells of each step the slots 0, 1, ... and tokens that say which step it was."""

    is_last = False

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.told: list[list[list[int]]] = []

    def hear(self, told_3S: torch.Tensor) -> None:
        self.heard.append(told_3S.shape[1])
        told_3S[0] = torch.arange(told_3S.shape[1])
        told_3S[1] = 100 * len(self.heard)
        told_3S[2] = 10 * len(self.heard)

    def tell(self, told_3S: torch.Tensor) -> None:
        self.told.append(told_3S.tolist())


def prompt(slot: int, *, samples: bool = True) -> StepRow:
    return StepRow(slot, 0, 3, [5, 6, 7], samples)


def goes_on(slot: int) -> StepRow:
    return StepRow(slot, 3, 1, [], True)


def test_a_step_hears_what_it_reads_and_what_must_be_there() -> None:
    stage: Any = FakeStage()
    last = SlotState.empty(4, "cpu")
    tokens = StageTokens(stage, last, in_flight=3)
    tokens.begin([prompt(0), prompt(1)])
    tokens.begin([prompt(2, samples=False)])
    tokens.begin([prompt(2)])
    assert stage.heard == []
    tokens.begin([goes_on(0)])
    assert (stage.heard, last.tokens.tolist()) == ([2], [100, 100, 0, 0, 0]), "of the first step; the second has none"
    assert last.lengths.tolist() == [11, 11, 0, 0, 0]
    tokens.begin([goes_on(1)])
    assert stage.heard == [2], "of the first step too"
    tokens.begin([prompt(3)])
    assert stage.heard == [2, 1], "three steps later they are there"
    tokens.begin([goes_on(3)])
    assert stage.heard == [2, 1, 1, 1, 1], "of the step before, and so of all before that"
    tokens.catch_up()
    assert stage.heard == [2, 1, 1, 1, 1, 1]


def test_the_last_stage_tells_slots_tokens_and_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    stage: Any = FakeStage()
    stage.is_last = True
    tokens = StageTokens(stage, SlotState.empty(4, "cpu"), in_flight=3)
    tokens.begin([goes_on(0)])
    tokens.end(torch.tensor([3, 1]), torch.tensor([70, 80]), torch.tensor([7, 8]))
    marked = ahead._rehearsing.set(True)
    tokens.end(torch.tensor([3, 1]), torch.tensor([70, 80]), torch.tensor([7, 8]))
    ahead._rehearsing.reset(marked)
    assert (stage.told, stage.heard) == ([[[3, 1], [70, 80], [7, 8]]], [])
