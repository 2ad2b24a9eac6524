"""How many steps are under way: a third one only behind short ones, as whoever comes next waits for all of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from helpers.failing_core import FailingExecutor
from helpers.simulated_engine import make_scheduler
from pagerunner.config import EngineArgs
from pagerunner.engine.core.core import SHORT_STEP_TOKENS, EngineCore
from pagerunner.engine.startup import resolve
from pagerunner.types import EngineRequest, SamplingParams, StepPlan, StepResult


class Executor(FailingExecutor):
    """Notes the tokens of each step, and of those that were under way when it was launched. All tokens are 7."""

    def __init__(self) -> None:
        self.under_way: list[int] = []
        self.launched: list[tuple[int, list[int]]] = []

    def run(self, plan: StepPlan) -> Step:
        self.launched.append((plan.num_tokens, self.under_way.copy()))
        self.under_way.append(plan.num_tokens)
        return Step(self, plan)


class Step:
    in_graph = False

    def __init__(self, executor: Executor, plan: StepPlan) -> None:
        self._executor, self._plan = executor, plan

    def result(self) -> StepResult:
        del self._executor.under_way[0]
        return StepResult(step_id=self._plan.step_id, token_ids=[[7] if row.samples else [] for row in self._plan.rows])


def launched(prompts: list[int], most: int, stages: int = 1) -> list[tuple[int, list[int]]]:
    scheduler, executor = make_scheduler(None, None), Executor()
    scheduler.max_in_flight = most
    core = EngineCore(
        lambda: scheduler,
        executor,  # type: ignore[arg-type]  # what a step needs of one
        scheduler.manager.plan,
        vocab_size=100,
        max_in_flight=most,
        stages=stages,
        enable_sleep_mode=False,
    )
    for number, length in enumerate(prompts):
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        core.add(
            EngineRequest(request_id=str(number), prompt_token_ids=[5] * length, params=params, seed=0, max_tokens=6)
        )
    while core.has_work:
        core.step()
    return executor.launched


def test_a_third_step_is_launched_behind_short_ones() -> None:
    steps = launched([20, 30], 3)
    assert [len(ahead) for _, ahead in steps[:4]] == [0, 1, 2, 2]
    assert max(len(ahead) for _, ahead in launched([20, 30], 2)) == 1


def test_nothing_more_is_launched_behind_a_long_one() -> None:
    """Three steps of a prompt's pieces and one of what is left: each may have one behind it, and no more until they have ended."""
    steps = launched([8192 * 3 + 5], 3)
    assert [tokens for tokens, _ in steps[:5]] == [8192, 8192, 8192, 5, 1]
    for tokens, ahead in steps:
        assert len(ahead) <= 1 or max(ahead) <= SHORT_STEP_TOKENS, f"{tokens} tokens behind {ahead}"
    assert max(len(ahead) for _, ahead in steps) == 2


def test_stages_have_a_step_each_and_one_more() -> None:
    assert [len(ahead) for _, ahead in launched([8192 * 4 + 5], 4, stages=3)[:4]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("args", "stages", "device", "drafts", "most"),
    [
        ({}, 1, "cuda", None, 2),
        ({"tensor_parallel_size": 2}, 1, "cuda", None, 3),
        ({"tensor_parallel_size": 2}, 1, "cuda", object(), 2),
        ({"tensor_parallel_size": 2, "max_in_flight": 1}, 1, "cuda", None, 1),
        ({"tensor_parallel_size": 2}, 1, "cpu", None, 1),
        ({"tensor_parallel_size": 2}, 3, "cuda", None, 4),
    ],
)
def test_by_default(args: dict[str, int], stages: int, device: str, drafts: object, most: int) -> None:
    of_layers = [range(number, number + 1) for number in range(stages)]
    wish = SimpleNamespace(args=EngineArgs(model="any", **args), stages=of_layers, device=device, drafts=drafts)  # type: ignore[arg-type]
    assert resolve._Wish.in_flight.fget(wish) == most  # type: ignore[attr-defined]
