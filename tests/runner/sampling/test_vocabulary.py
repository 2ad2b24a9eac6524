"""Samplers of several ranks, each with the logits of its own token ids, choose what one sampler chooses from all of them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.effort import effort
from helpers.patience import LONG
from pagerunner.runner.sampling import Sampler, vocabulary
from pagerunner.runner.sampling.vocabulary import DividedVocabulary
from pagerunner.types import SamplingParams
from runner.sampling.support import fill, sample

V = 300
BIAS = SamplingParams(temperature=0.8, seed=4, logit_bias={7: 2.5, 290: 3.0}, max_tokens=9)
KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.95),
    SamplingParams(temperature=1.3, top_k=270),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=2.0, min_p=0.05),
    SamplingParams(temperature=0, logprobs=3),
    SamplingParams(temperature=1.0, logprobs=2),
    SamplingParams(temperature=1.0, presence_penalty=1.5, repetition_penalty=1.2, logprobs=1),
    SamplingParams(temperature=0, frequency_penalty=2.0),
    SamplingParams(temperature=1.0, allowed_token_ids=[3, 150, 299]),
    SamplingParams(temperature=1.0, min_tokens=4, stop_token_ids=[9, 200]),
    BIAS,
]


class ThreadComm:
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, held: list[Any]) -> None:
        self.rank, self.size, self._barrier, self._held = rank, size, barrier, held
        self.num_bytes = 0

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.num_bytes += x.nbytes * (self.size - 1)
        return torch.stack(self._told(x))

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        self.num_bytes += x.nbytes - x[self.rank].nbytes
        return torch.stack([one[self.rank] for one in self._told(x)])

    def _told(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._held[self.rank] = x
        self._barrier.wait()
        found = list(self._held)
        self._barrier.wait()
        return found


def in_ranks(size: int, act: Callable[[ThreadComm], Any]) -> list[Any]:
    barrier, held = threading.Barrier(size, timeout=LONG), [None] * size
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: act(ThreadComm(rank, size, barrier, held)), range(size)))


def parts(size: int) -> list[range]:
    bounds = [V * rank // size for rank in range(size + 1)]
    return [range(*pair) for pair in zip(bounds, bounds[1:], strict=False)]


def steps(sampler: Sampler, kinds: list[SamplingParams], logits: list[torch.Tensor], masks: Any) -> list[Any]:
    """Tokens, log-probabilities and errors of several steps in which all slots are sampled, and what a graph would have found."""
    for slot, params in enumerate(kinds):
        fill(sampler, slot, params, seed=slot, prompt=[1, 2, 150, 299])
    rows, found = list(range(len(kinds))), []
    for step, one in enumerate(logits):
        sampled = sample(sampler, one, rows, [4 + step] * len(kinds), masks if step == 1 else None)
        found.append((*sampled.read(), sampled.errors))
    return found


def poisoned(choose: torch.Generator, rows: int, dtype: torch.dtype, spread: float) -> torch.Tensor:
    """Logits with ties, tokens that are ruled out, and rows with NaN, or without a finite logit."""
    logits = (torch.randn(rows, V, generator=choose) * spread).to(dtype)
    kind = torch.randint(8, (rows,), generator=choose)
    logits[kind == 1, 100:200] = 1.0
    logits[kind == 2, 3:] = -math.inf
    logits[kind == 3, 250] = math.nan
    if spread < 0.1:
        logits[kind == 4] = -math.inf
    return logits


@settings(max_examples=effort(8, 150), deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([2, 3, 4]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([0.05, 1.0, 6.0]),
)
def test_ranks_choose_what_one_sampler_chooses(seed: int, size: int, dtype: torch.dtype, spread: float) -> None:
    choose = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(KINDS), generator=choose).tolist()
    kinds = [KINDS[number] for number in order]
    logits = [poisoned(choose, len(kinds), dtype, spread) for _ in range(3)]
    masks = {order.index(2): [bytes([0xF0] * 40)], order.index(0): [bytes([0x0F] * 40)]}
    wanted = steps(Sampler(len(kinds), V, "cpu"), kinds, logits, masks)

    def act(comm: Any) -> Any:
        ids = parts(size)
        own = [one[:, ids[comm.rank].start : ids[comm.rank].stop] for one in logits]
        return steps(Sampler(len(kinds), V, "cpu", DividedVocabulary(comm, ids)), kinds, own, masks)

    first, *others = in_ranks(size, act)
    assert all(repr(other) == repr(first) for other in others), "ranks differ"
    for (tokens, details, errors), (same, same_details, same_errors) in zip(first, wanted, strict=True):
        fine = [row for row in range(len(kinds)) if row not in errors]
        assert errors == same_errors and [tokens[row] for row in fine] == [same[row] for row in fine]
        assert repr([details[row] for row in fine]) == repr([same_details[row] for row in fine])


@pytest.mark.parametrize(
    ("params", "num_bytes"),
    [(KINDS[0], 16), (KINDS[1], 16 + 16 + 16), (KINDS[2], 16 + 800 / 3 + 16 / 3), (KINDS[6], 16 + 800)],
)
def test_nothing_but_keys_weights_and_tokens_is_gathered_of_usual_rows(
    params: SamplingParams, num_bytes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that a rank sends to two others for a row. Of rows with reports, logits too; and of rows with filters logits for one rank, which draws."""
    rows, drew = 192, []
    whole = vocabulary.sample
    monkeypatch.setattr(vocabulary, "sample", lambda x, *more: drew.append(len(x)) or whole(x, *more))

    def act(comm: ThreadComm) -> int:
        sampler = Sampler(rows, V, "cpu", DividedVocabulary(comm, parts(3)))  # type: ignore[arg-type]
        for slot in range(rows):
            fill(sampler, slot, params)
        sample(sampler, torch.randn(rows, V // 3), range(rows), [4] * rows).read()
        return comm.num_bytes

    first, *others = in_ranks(3, act)
    assert others == [first] * 2 and first / rows == pytest.approx(num_bytes, abs=0.5)
    assert drew == ([64] * 3 if params is KINDS[2] else [])
