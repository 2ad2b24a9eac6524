"""Host memory that steps use one after another."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from pagerunner.ops import async_copy
from pagerunner.ops.async_copy import BestCopies, put


def test_memory_is_used_again_once_it_has_been_read_and_not_before() -> None:
    copies = BestCopies(4, torch.device("cpu"))
    tokens, best = torch.tensor([7, 8, 9]), torch.tensor([0.5, -1.0, 2.0])
    first = copies.copy(tokens, best)
    second = copies.copy(tokens[:2] + 10, best[:2])
    tokens.zero_()  # what the step had there is the next step's
    assert first.lists() == [[7, 8, 9], [0.5, -1.0, 2.0]]
    third = copies.copy(torch.tensor([1]), torch.tensor([3.0]))
    assert third._buffers is first._buffers is not second._buffers
    assert (second.lists(), third.lists()) == ([[17, 18], [0.5, -1.0]], [[1], [3.0]])


def test_no_logit_is_lost_that_says_there_is_no_token() -> None:
    copies = BestCopies(2, torch.device("cpu"))
    found = copies.copy(torch.tensor([0, 0]), torch.tensor([float("-inf"), float("nan")])).lists()[1]
    assert found[0] == float("-inf") and found[1] != found[1]


class _Event:
    """Of a device that isn't there; one that was never recorded counts as happened, as CUDA's do."""

    def __init__(self) -> None:
        self.happened = True

    def query(self) -> bool:
        return self.happened

    def record(self) -> None:
        self.happened = False


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(async_copy, "_held", type(async_copy._held)())
    return async_copy._held


def test_page_locked_memory_is_kept_while_a_kernel_may_read_it(held: Any) -> None:
    memory = [torch.zeros(4) for _ in range(4)]
    alive = list(map(weakref.ref, memory))
    events = []
    for number in range(3):
        events.append(async_copy._hold(memory[number]))
        if number != 1:  # an interrupt came between its launch and its event
            events[-1].record()
    memory[:3] = [torch.zeros(0)] * 3
    gc.collect()
    assert all(ref() is not None for ref in alive)
    events[0].happened = True
    async_copy._hold(memory[3]).record()
    assert len(held) == 3 and alive[0]() is None and alive[1]() is not None, "nothing says that the second is done"
    events[2].happened = True
    async_copy._hold().record()
    assert alive[1]() is None and alive[3]() is not None


def test_memory_of_a_step_that_nobody_reads_is_kept_until_the_step_has_run(
    held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **given: empty(*args, **given))
    buffers = async_copy._BestBuffers(4, True)
    assert buffers.event is not None
    buffers.event.record()
    alive = weakref.ref(buffers.tokens)
    del buffers
    gc.collect()
    assert alive() is not None
    event = held[0][0]
    async_copy._hold().record()
    async_copy._hold().record()
    assert alive() is not None
    event.happened = True
    async_copy._hold().record()
    assert alive() is not None
    held[1][0].happened = True
    async_copy._hold()
    assert alive() is None


def test_what_is_put_may_be_changed_afterwards() -> None:
    values, there = torch.arange(3), torch.zeros(5, dtype=torch.int64)
    put(values, there[1:4])
    values.zero_()
    assert there.tolist() == [0, 0, 1, 2, 0]
