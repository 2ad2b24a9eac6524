"""How many threads a step on a CPU takes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pagerunner import LLM, SamplingParams
from pagerunner.runner import step_threads
from pagerunner.runner.step_threads import StepThreads
from pagerunner.types import StepRow

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


def test_a_step_that_fails_gives_the_threads_back(two_threads: None) -> None:
    with pytest.raises(ValueError, match="planted"), StepThreads(MIB, 1).during(rows((0, 1))):
        raise ValueError("planted")
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("small_bytes", [0, step_threads.SMALL_BYTES])
def test_an_engine_decodes_a_small_model_on_one_thread(
    small_bytes: int, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_threads, "SMALL_BYTES", small_bytes)
    llm = LLM("demo", use_tqdm=False, max_num_seqs=4, max_model_len=128, kv_cache_memory_bytes=1 << 24)
    seen: set[int] = set()
    change = torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda count: (seen.add(count), change(count)))
    llm.generate(["one"], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert seen == ({1, 2} if small_bytes else set())
    assert torch.get_num_threads() == 2
