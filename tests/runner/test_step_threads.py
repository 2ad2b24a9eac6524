"""How many threads a step on a CPU takes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from itertools import count
from types import FrameType

import pytest
import torch

from pagerunner import LLM, SamplingParams
from pagerunner.runner import step_threads
from pagerunner.runner.pending import PendingStep
from pagerunner.runner.runner import ModelRunner
from pagerunner.runner.step_threads import StepThreads
from pagerunner.types import StepPlan, StepRow

MIB = 1 << 20


@pytest.fixture
def two_threads() -> Iterator[None]:
    usual = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(usual)


def rows(*sizes: tuple[int, int]) -> list[StepRow]:
    return [StepRow(slot, start, tokens, [], True) for slot, (start, tokens) in enumerate(sizes)]


@pytest.mark.parametrize(
    ("layer_bytes", "token_bytes", "step", "small"),
    [
        (3 * MIB, 256, rows((40, 1)), True),
        (3 * MIB, 256, rows(*[(40, 1)] * 16), True),
        (3 * MIB, 256, rows(*[(40, 1)] * 32), False),
        (3 * MIB, 256, rows((0, 64)), False),
        (27 * MIB, 256, rows((40, 1)), False),
        (3 * MIB, 1024, rows((8000, 1)), False),
    ],
)
def test_a_step_with_little_work_in_a_layer_takes_one_thread(
    layer_bytes: int, token_bytes: int, step: list[StepRow], small: bool, two_threads: None
) -> None:
    threads = StepThreads(layer_bytes, token_bytes)
    with threads.during(step):
        assert torch.get_num_threads() == (1 if small else 2)
    assert torch.get_num_threads() == 2


def test_a_rank_without_rows_takes_the_threads_that_other_teams_tokens_need(two_threads: None) -> None:
    for most, threads in ((4, 1), (64, 2)):
        with StepThreads(3 * MIB, 256).during([], most):
            assert torch.get_num_threads() == threads


def test_a_step_that_fails_gives_the_threads_back(two_threads: None) -> None:
    with pytest.raises(ValueError, match="planted"), StepThreads(MIB, 1).during(rows((0, 1))):
        raise ValueError("planted")
    assert torch.get_num_threads() == 2


def test_a_thread_that_begins_meanwhile_has_the_usual_number(two_threads: None) -> None:
    seen: list[int] = []
    with StepThreads(MIB, 1).during(rows((0, 1))):
        assert torch.get_num_threads() == 1
        beginner = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        beginner.start()
        beginner.join()
    assert seen == [2]


@pytest.mark.parametrize("line", range(8))
def test_an_interrupt_at_any_line_costs_no_step_its_threads(line: int, two_threads: None) -> None:
    """The step after it has the usual number again, and so has what comes behind that step."""
    threads, small, large = StepThreads(MIB, 1), rows((0, 1)), rows((0, 4000))
    code, lines = StepThreads.during.__wrapped__.__code__, count(1)  # type: ignore[attr-defined]

    def interrupt(frame: FrameType, event: str, _: object) -> object:
        if frame.f_code is not code:
            return None
        if event == "line" and next(lines) == line:
            raise KeyboardInterrupt
        return interrupt

    sys.settrace(interrupt)
    try:
        with threads.during(small):
            pass
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    with threads.during(large):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 2


def test_an_engine_decodes_a_small_model_on_one_thread(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM("demo", use_tqdm=False, max_num_seqs=4, max_model_len=128, kv_cache_memory_bytes=1 << 24)
    seen: set[int] = set()
    run = ModelRunner._run

    def seeing(self: ModelRunner, plan: StepPlan) -> PendingStep:
        seen.add(torch.get_num_threads())
        return run(self, plan)

    monkeypatch.setattr(ModelRunner, "_run", seeing)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.generate(["one"], params, use_tqdm=False)
    assert seen == {1}
    monkeypatch.setattr(step_threads, "SMALL_BYTES", 0)
    llm.generate(["one"], params, use_tqdm=False)
    assert seen == {1, 2}
    assert torch.get_num_threads() == 2
