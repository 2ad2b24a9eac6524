"""Compressed latents against a dense computation, row by row, with NaN in every slot that no token has completed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.effort import effort
from pagerunner.attention import compressed
from pagerunner.attention.base import PlanInputs
from pagerunner.attention.calls import CompressedCall, IndexerQueries
from pagerunner.attention.compressed import CompressedBackend, SlotPooling
from pagerunner.attention.torch_plan import scratch_bytes
from pagerunner.batch import GroupBatch, LatentPages, StatePages, StepRows, WritePlaces
from pagerunner.memory import specs
from pagerunner.ops.paged_attention import Scores
from pagerunner.ops.state_rows import StateRows, StateSaves

HEADS, DIM, INDEX = 2, 6, 4


@dataclass(frozen=True)
class Case:
    """One step: rows of (past, new tokens)."""

    rows: tuple[tuple[int, int], ...]
    ratio: int = 4
    slots: int = 4  # of a page
    top_k: int | None = None
    dtype: torch.dtype = torch.float32
    sinks: bool = True  # which also tell the log-sum-exp


def pool_densely(x_LC: torch.Tensor, bias: torch.Tensor, overlap: bool) -> torch.Tensor:
    """Every complete slot of a sequence, one by one, [S, D]."""
    ratio, size = bias.shape
    found = []
    for first in range(0, len(x_LC) - ratio + 1, ratio):
        values, gates = x_LC[first : first + ratio, :size], x_LC[first : first + ratio, size:] + bias
        if overlap:
            values, gates = values[:, size // 2 :], gates[:, size // 2 :]
            if first:
                before = x_LC[first - ratio : first]
                values = torch.cat((before[:, : size // 2], values))
                gates = torch.cat((before[:, size : size + size // 2] + bias[:, : size // 2], gates))
        found.append((values * gates.softmax(0)).sum(0))
    return torch.stack(found) if found else x_LC.new_zeros(0, size // 2 if overlap else size)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("cuts", [(30,), (1, 2, 7, 30), (3, 4, 5, 8, 12, 29, 30), tuple(range(1, 31))])
def test_pooling_does_not_depend_on_chunks(overlap: bool, cuts: tuple[int, ...]) -> None:
    """Also beside another row, from a page that holds what others left; and a state that was saved on the way goes on alike."""
    torch.manual_seed(0)
    ratio, size = 4, 2 * DIM if overlap else DIM
    biases = tuple(torch.randn(ratio, size) for _ in range(2))
    inputs = tuple(torch.randn(30, 2 * size) for _ in range(2))
    pooling, width = SlotPooling(biases, overlap), ratio * (1 + overlap)
    want = torch.cat([pool_densely(x, bias, overlap) for x, bias in zip(inputs, biases, strict=True)], -1)
    states = tuple(torch.full((4, width, 2 * size), float("nan")) for _ in range(2))
    for state in states:
        state[1:3] = 0
    unit, table = width * 2 * size * 4, torch.tensor([[1], [2]])

    def run_to(first: int, end: int, slot: int) -> torch.Tensor:
        rows = StepRows.of([end - first, 2], [end, end + 2], [slot, 1 - slot])
        saved = [[0, 1, 1], [0], [end], [3 * unit]] if end < 30 and slot == 0 else [[0, 0, 0], [], [], []]
        kinds = (torch.int32, torch.int32, torch.int32, torch.int64)
        saves = StateSaves(*(torch.tensor(part, dtype=kind) for part, kind in zip(saved, kinds, strict=True)))
        both = tuple(torch.cat((x[first:end], torch.randn(2, x.shape[1]))) for x in inputs)
        others = [state[2 if slot == 0 else 1].clone() for state in states]
        found = pooling.rows(both, StatePages(0, states), StateRows(rows, table, saves))[: end - first]
        for state, other in zip(states, others, strict=True):
            state[2 if slot == 0 else 1] = other
        return found

    outputs, first = [], 0
    for end in cuts:
        outputs.append(run_to(first, end, 0))
        if end < 30:
            for state in states:
                state[2] = state[3]
            rest = (end + ratio - 1) // ratio * ratio + ratio - 1 - end  # the first whole slot behind
            if end + rest < 30:
                found = run_to(end, end + rest + 1, 1)[rest]
                torch.testing.assert_close(found, want[(end + rest) // ratio])
        first = end
    torch.testing.assert_close(torch.cat(outputs)[ratio - 1 :: ratio], want)


def run(case: Case) -> tuple[torch.Tensor, torch.Tensor, CompressedBackend]:
    """What the backend makes of a step, and what a dense computation does, [T, H, D]."""
    torch.manual_seed(0)
    size, tokens_page = case.slots, case.slots * case.ratio
    pages = sum(-(-(past + new) // tokens_page) for past, new in case.rows) + 2
    pool = torch.full((pages, 2 * size * (DIM + INDEX)), float("nan"), dtype=case.dtype)
    stride = pool.stride(0)
    latent = pool.as_strided((pages, size, DIM), (stride, DIM, 1), 3)
    indexer = pool.as_strided((pages, size, INDEX), (stride, INDEX, 1), 3 + size * DIM)
    free = torch.randperm(pages).tolist()
    table = torch.zeros(
        len(case.rows), max(-(-(past + new) // tokens_page) for past, new in case.rows), dtype=torch.int64
    )
    vectors, keys, entries, offsets, positions = [], [], [], [], []
    for row, (past, new) in enumerate(case.rows):
        held = [free.pop() for _ in range(-(-(past + new) // tokens_page))]
        table[row, : len(held)] = torch.tensor(held)
        count = (past + new) // case.ratio
        vectors.append(torch.randn(count, DIM).to(case.dtype).float())
        keys.append(torch.randn(count, INDEX).to(case.dtype).float())
        for slot in range(past // case.ratio):
            latent[held[slot // size], slot % size] = vectors[row][slot].to(case.dtype)
            indexer[held[slot // size], slot % size] = keys[row][slot].to(case.dtype)
        for position in range(past, past + new):
            entries.append(held[position // tokens_page])
            offsets.append(position % tokens_page)
            positions.append(position)
    query_lens, seq_lens = [new for _, new in case.rows], [sum(row) for row in case.rows]
    total = len(positions)
    q, local, lse = torch.randn(total, HEADS, DIM), torch.randn(total, HEADS, DIM), torch.randn(total, HEADS)
    chooser = None
    if case.top_k is not None:
        chooser = IndexerQueries(torch.randn(total, 5, INDEX), torch.randn(total, 5), case.top_k)
    sinks = torch.randn(HEADS) if case.sinks else None
    backend = CompressedBackend()
    slots = range(len(query_lens))
    step = StepRows.of(query_lens, seq_lens, slots)
    plan = backend.plan(PlanInputs(step, query_lens, seq_lens, slots, table, tokens_page, None), None)
    group = GroupBatch(table, WritePlaces(torch.tensor(entries), torch.tensor(offsets)), tokens_page, backend, plan)
    pages = LatentPages(0, latent, None, indexer)
    done = plan.completed(case.ratio)
    assert done.tolist() == [i for i, position in enumerate(positions) if (position + 1) % case.ratio == 0]
    new_vectors = torch.cat([x[past // case.ratio :] for x, (past, _) in zip(vectors, case.rows, strict=True)])
    new_keys = torch.cat([x[past // case.ratio :] for x, (past, _) in zip(keys, case.rows, strict=True)])
    for _ in range(2):  # a second layer of the same step reuses the plan
        got = backend.run(
            CompressedCall(q, (local, lse), new_vectors, new_keys, chooser, pages, group, step, Scores(0.4, 0.0, sinks))
        )
    want, want_lse = local.double().clone(), lse.double().clone()
    token = 0
    for row, (past, new) in enumerate(case.rows):
        for position in range(past, past + new):
            seen = (position + 1) // case.ratio
            chosen = torch.arange(seen)
            if chooser is not None and seen > chooser.top_k:
                scores = (q_at := chooser.q_TJI[token]) @ keys[row][:seen].T
                assert q_at.shape == (5, INDEX)
                chosen = (chooser.weights_TJ[token] @ scores.relu()).topk(chooser.top_k).indices
            if seen:
                picked = vectors[row][chosen].double()
                scores = q[token].double() @ picked.T * 0.4
                weights = torch.cat((scores, lse[token].double().unsqueeze(-1)), -1).softmax(-1)
                want[token] = weights[:, :-1] @ picked + weights[:, -1:] * local[token].double()
                want_lse[token] = torch.logaddexp(scores.logsumexp(-1), lse[token].double())
            token += 1
    if sinks is not None:
        want *= torch.sigmoid(want_lse - sinks).unsqueeze(-1)
    return got.double(), want, backend


rows = st.tuples(
    st.one_of(st.just(0), st.integers(0, 90)), st.one_of(st.just(1), st.integers(1, 9), st.integers(1, 60))
)
cases = st.builds(
    Case,
    rows=st.lists(rows, min_size=1, max_size=4).map(tuple),
    ratio=st.sampled_from([2, 3, 8]),
    slots=st.sampled_from([1, 3, 16]),
    sinks=st.booleans(),
)


@settings(max_examples=effort(25, 120), deadline=None)
@given(cases)
def test_equals_a_dense_computation(case: Case) -> None:
    got, want, _ = run(case)
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("block", [256, 7])
@pytest.mark.parametrize("top_k", [1, 3, 100])
def test_an_indexer_chooses_slots(monkeypatch: pytest.MonkeyPatch, block: int, top_k: int) -> None:
    monkeypatch.setattr(compressed, "BLOCK_QUERIES", block)
    got, want, _ = run(Case(((0, 3), (40, 33), (61, 1), (2, 50)), top_k=top_k))
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)


def test_of_equal_slots_the_earlier_are_seen() -> None:
    chooser = IndexerQueries(torch.ones(8, 1, INDEX), torch.ones(8, 1), 2)
    keys = torch.zeros(6, INDEX)
    keys[4] = 1
    seen = compressed._allowed(16, 24, 4, chooser, keys, slice(0, 8))
    assert [row.nonzero().flatten().tolist() for row in seen] == [[0, 1]] * 3 + [[0, 4]] * 5


@pytest.mark.parametrize("held", ["float32", "bfloat16"])
def test_reading_takes_what_the_plan_says(held: str) -> None:
    case = Case(((87, 9), (3, 1)), top_k=5, dtype=getattr(torch, held))
    spec = specs.LatentKV(DIM - 2, 2, held, compression=4, indexer_dim=INDEX)
    assert run(case)[2]._scratch.num_bytes == scratch_bytes((spec, spec), 96, 8, "float32")
    other = specs.LatentKV(DIM - 2, 2, held, compression=8)
    alone = scratch_bytes((other,), 96, 8, "float32")
    assert scratch_bytes((spec, other), 96, 8, "float32") == scratch_bytes((spec,), 96, 8, "float32") + alone


def test_says_what_it_does_not_serve() -> None:
    backend = CompressedBackend()
    for dtype in ("float32", "bfloat16", "fp8_e4m3"):
        for sizes in ({"compression": 4, "indexer_dim": 4}, {"compression": 4}, {"indexer_dim": 4}):
            spec = specs.LatentKV(8, 4, dtype, **sizes)
            assert backend.capabilities.refusal(spec, "cpu", torch.float32) is None
    for spec, word in (
        (specs.LatentKV(8, 4, "float32"), "not latent"),
        (specs.FullKV(1, 8, "float32"), "full"),
        (specs.LatentKV(8, 4, "float32", window=8), "window"),
        (specs.LatentKV(8, 4, "fp8_e4m3", compression=4, rope_dtype="bfloat16"), "rotary"),
        (specs.LatentKV(8, 4, "fp8_e4m3", compression=4, scale_bytes=8), "scale"),
    ):
        reason = backend.capabilities.refusal(spec, "cpu", torch.float32)
        assert reason is not None and word in reason
