"""Ranks that wait for each other in our kernels: processes whose rooms are one memory, in Triton's interpreter, each as late as it likes."""

from __future__ import annotations

import importlib
import multiprocessing
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers import interpreter_floats
from helpers.patience import patient
from pagerunner.dist.base import sum_in_order

pytest.importorskip("triton")
import triton.language as tl

from pagerunner.ops import peer_sums
from pagerunner.ops.linear import Norm
from pagerunner.ops.peer_sums import PeerSums, room_bytes

interpreter_floats.install()
kernels: Any = importlib.import_module("pagerunner.ops.kernels.peer_sum")
RANKS = 2


def wait_slowly(seconds: float) -> None:
    """Let this process's kernels dawdle where they look for what another rank sends. So the others are ahead of it as far as they can be."""
    arrived = kernels._arrived

    def slowly_arrived(*given: Any) -> Any:
        time.sleep(seconds)
        return arrived(*given)

    def slow_flag(flag_ptr: Any) -> Any:
        """Without PTX, which the interpreter doesn't know."""
        seen = tl.load(flag_ptr, volatile=True)
        time.sleep(seconds)
        return seen

    kernels._arrived, kernels._flag = slowly_arrived, slow_flag


def words(choose: random.Random) -> tuple[torch.Tensor, str]:
    """A part for each rank that goes as words, and what becomes of it."""
    count = choose.choice([2, 64, 600, 1500])
    return torch.randn(RANKS, count).to(torch.bfloat16), choose.choice(["add", "add", "gather"])


def flags(choose: random.Random) -> tuple[torch.Tensor, str]:
    """One whose numbers are followed by a flag. Those of 700 numbers and more go in two rounds."""
    shape = choose.choice([(1, 3), (3, 40), (2, 450)])
    return torch.randn(RANKS, *shape), choose.choice(["add", "norm", "gather"])


def called(end: PeerSums, kind: str, parts: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank gets, and what it should get."""
    mine, total = parts[rank].clone(), sum_in_order(parts)
    if kind == "gather":
        found = torch.empty_like(parts)
        end.gather(mine, found)
        return found, parts
    if kind == "norm":
        found = torch.ones_like(mine)
        end.add_norm_(mine, found, Norm(torch.ones(mine.shape[-1]), 1e-6))
        return found, total + 1
    end.add_(mine)
    return mine, total


def ranks_agree(make: Callable[[random.Random], tuple[torch.Tensor, str]], calls: int, last: dict[str, list[int]]) -> list[Any]:
    """How many of so many calls had other numbers than they should, and the rounds that were counted, of each rank.

    `last` are the programs' counters of rounds to begin behind, by name. The last rank comes to the first call when others wait.
    """
    rooms = [torch.zeros(room_bytes(RANKS), dtype=torch.uint8).share_memory_() for _ in range(RANKS)]
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def act(rank: int) -> None:
        end = PeerSums(torch.tensor([room.data_ptr() for room in rooms]), rank)
        end._how["WAIT"] = True
        for name, numbers in last.items():
            getattr(end, name).copy_(torch.tensor(numbers))
        choose, own, wrong = random.Random(5), random.Random(rank), 0
        wait_slowly(0.04 * rank)
        for call in range(calls):
            torch.manual_seed(choose.randrange(2**30))
            parts, kind = make(choose)
            time.sleep(own.choice([0, 0, 0, 0.03]) if call else 0.1 * rank)
            found, wanted = called(end, kind, parts, rank)
            wrong += not torch.equal(found, wanted)
        results.put((rank, wrong, [getattr(end, name).tolist() for name in last]))

    processes = [context.Process(target=act, args=(rank,), daemon=True) for rank in range(RANKS)]
    for process in processes:
        process.start()
    until = time.monotonic() + patient(30)
    for process in processes:
        process.join(max(until - time.monotonic(), 0.1))
    late = [process.pid for process in processes if process.is_alive()]
    for process in processes:
        process.kill()
    assert not late, f"{len(late)} of {RANKS} ranks wait for ever"
    return [found for _, *found in sorted(results.get() for _ in processes)]


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each has several rounds."""
    monkeypatch.setattr(peer_sums, "_PROGRAMS", 2)
    monkeypatch.setattr(peer_sums, "_WORD_PROGRAMS", 3)


def test_a_word_is_taken_when_it_is_of_the_round(few_programs: None) -> None:
    """Rounds are counted in 32 bits, and -1 is followed by 2: a room that nobody has written is zero, and halves of a room take turns."""
    (wrong, counted), (others_wrong, others) = ranks_agree(words, 12, {"_words_epochs": [-2, -1, -1]})
    assert (wrong, others_wrong) == (0, 0)
    assert counted == others and min(counted[0]) >= 2
    assert counted[0][0] == 12, "-1, 2, 3, and so on: each round is in the half that the one before wasn't in"


def test_numbers_are_taken_behind_their_flag(few_programs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one launch or in two halves of one, around the round whose number has another sign."""
    monkeypatch.setattr(peer_sums, "ONCE_BYTES", {RANKS: 1000})
    (wrong, counted), (others_wrong, others) = ranks_agree(flags, 10, {"_epochs": [2**31 - 3, 0]})
    assert (wrong, others_wrong) == (0, 0)
    assert counted == others and counted[0][0] < 0 < counted[0][1]
