"""A program in which ranks wait for each other in our kernels: processes whose rooms are one memory, in Triton's interpreter, each as late as it likes.

    python -c "from helpers import waiting_ranks; waiting_ranks.main()" SECONDS [3,5]

It prints what `ranks_agree` has found of words and of flags of two ranks, and of bare words of two, three and five. It is a process of its own because it forks: in one that has threads, such as a test's,
a child may wait for ever for what a thread had.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl

from helpers import fast_interpreter, interpreter_floats
from pagerunner.dist.base import sum_in_order
from pagerunner.ops import peer_sums
from pagerunner.ops.linear import Norm
from pagerunner.ops.peer_sums import Limits, PeerSums, room_bytes

fast_interpreter.install()
interpreter_floats.install()
kernels: Any = importlib.import_module("pagerunner.ops.kernels.peer_sum")
LIMITS = Limits(2**19, 2**31)
BARE = Limits(0, 2**31, bare=2**31, places=4)


def wait_slowly(seconds: float) -> None:
    """Let this process's kernels dawdle where they look for what another rank sends. So the others are ahead of it as far as they can be."""
    arrived, look = kernels._arrived, kernels._look

    def slowly_arrived(*given: Any) -> Any:
        time.sleep(seconds)
        return arrived(*given)

    def slow_look(*given: Any) -> Any:
        time.sleep(seconds)
        return look(*given)

    def slow_flag(flag_ptr: Any) -> Any:
        """Without PTX, which the interpreter doesn't know."""
        seen = tl.load(flag_ptr, volatile=True)
        time.sleep(seconds)
        return seen

    kernels._arrived, kernels._look, kernels._flag = slowly_arrived, slow_look, slow_flag
    kernels._fence = lambda round: round  # a process sees another one's stores in their order


def words(choose: random.Random, ranks: int) -> tuple[torch.Tensor, str]:
    """A part for each rank that goes as words, and what becomes of it."""
    return torch.randn(ranks, choose.choice([2, 64, 600, 1500])).to(torch.bfloat16), "gather"


def bare(choose: random.Random, ranks: int) -> tuple[torch.Tensor, str]:
    """A part for each rank that goes as bare words, once or in two rounds, sometimes with numbers that are none."""
    count = choose.choice([2, 64, 600, 1500, 6000])
    dtype = choose.choice([torch.bfloat16, torch.float16, torch.float32])
    parts = torch.randn(ranks, count).to(dtype)
    if choose.random() < 0.5:
        parts.view(torch.int16)[choose.randrange(ranks), : 2 * choose.randrange(1, count // 2 + 1)] = -1
    return parts, "add"


def flags(choose: random.Random, ranks: int) -> tuple[torch.Tensor, str]:
    """One whose numbers are followed by a flag."""
    shape = choose.choice([(1, 3), (3, 40), (2, 450)])
    return torch.randn(ranks, *shape), choose.choice(["add", "norm", "gather"])


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


def ranks_agree(
    make: Callable[[random.Random, int], tuple[torch.Tensor, str]],
    ranks: int,
    calls: int,
    last: dict[str, list[int]],
    seconds: float,
    limits: Limits = LIMITS,
) -> Any:
    """How many of so many calls had other numbers than they should, and the rounds that were counted, of each rank.

    `last` are the programs' counters of rounds to begin behind, by name. The last rank comes to the first call when others wait.
    """
    rooms = [torch.zeros(room_bytes(ranks, limits), dtype=torch.uint8).share_memory_() for _ in range(ranks)]
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def act(rank: int) -> None:
        end = PeerSums(torch.tensor([room.data_ptr() for room in rooms]), rank, limits)
        end._how["WAIT"] = True
        for name, numbers in last.items():
            getattr(end, name).copy_(torch.tensor(numbers))
        choose, own, wrong = random.Random(5), random.Random(rank), 0
        wait_slowly(0.08 * rank / ranks)
        for call in range(calls):
            torch.manual_seed(choose.randrange(2**30))
            parts, kind = make(choose, ranks)
            time.sleep(own.choice([0, 0, 0, 0.03]) if call else 0.2 * rank / ranks)
            found, wanted = called(end, kind, parts, rank)
            wrong += not torch.allclose(found, wanted, rtol=0, atol=0, equal_nan=True)
        results.put((rank, wrong, [getattr(end, name).tolist() for name in last]))

    processes = [context.Process(target=act, args=(rank,), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    until = time.monotonic() + seconds
    for process in processes:
        process.join(max(until - time.monotonic(), 0.1))
    late = [process.pid for process in processes if process.is_alive()]
    for process in processes:
        process.kill()
    if late:
        return f"{len(late)} of {ranks} ranks wait for ever"
    return [found for _, *found in sorted(results.get() for _ in processes)]


def main() -> None:
    """Few programs, so that each has several rounds."""
    peer_sums._PROGRAMS, peer_sums._WORD_PROGRAMS, peer_sums._BARE_PROGRAMS = 2, 3, 2
    seconds = float(sys.argv[1])
    bare_rounds = {"_bare_rounds": [2**31 - 3, 0]}
    found = [
        ranks_agree(words, 2, 12, {"_words_rounds": [-2, -1, -1]}, seconds),
        ranks_agree(flags, 2, 10, {"_rounds": [2**31 - 3, 0]}, seconds),
        ranks_agree(bare, 2, 16, bare_rounds, seconds, BARE._replace(once=1000)),
        *(ranks_agree(bare, ranks, 2, bare_rounds, seconds, BARE) for ranks in json.loads(sys.argv[2])),
    ]
    print(json.dumps(found), flush=True)
    os._exit(0)
