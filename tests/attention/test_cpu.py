"""The CPU kernels' attention against attention written out row by row, with NaN in every slot that nobody wrote."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.attention_cases import Case, cases, plain, run
from helpers.compiler import needs_compiler
from helpers.effort import effort
from pagerunner.attention.cpu import CpuBackend
from pagerunner.batch import KVPages, StepRows, WritePlaces
from pagerunner.memory.specs import FullKV
from pagerunner.ops import paged_attention as twins
from pagerunner.ops.native import paged
from pagerunner.ops.native.library import SWITCH
from pagerunner.ops.rope import rope_angles

pytestmark = needs_compiler


@settings(max_examples=effort(66, 400), deadline=None)
@given(cases)
def test_equals_attention_row_by_row(case: Case) -> None:
    got, want = run(case, CpuBackend())
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("head_dim", [2, 8, 20, 48, 128, 256])
def test_rows_of_all_lengths_in_one_step(head_dim: int) -> None:
    rows = (plain(0, 530), *[plain(512, 16, 32)] * 3, plain(512, 3, 32), plain(523, 1, 32), plain(0, 1), plain(64, 1))
    got, want = run(Case(rows, 16, 2, 3, head_dim), CpuBackend())
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@settings(max_examples=effort(60, 400), deadline=None)
@given(st.data())
def test_projections_equal_the_twins(data: st.DataObject) -> None:
    """Norms, rotations, stores, windows, chunks, soft caps and sinks."""
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1000)))
    kv_heads, group, size = (
        draw(st.sampled_from([1, 2, 4])),
        draw(st.integers(1, 5)),
        draw(st.sampled_from([8, 20, 64])),
    )
    page_tokens, heads = draw(st.sampled_from([1, 4, 16])), kv_heads * group
    lens = draw(st.lists(st.tuples(st.integers(0, 150), st.sampled_from([1, 1, 2, 33, 70])), min_size=1, max_size=5))
    starts, query_lens = zip(*lens, strict=True)
    seq_lens = [start + count for start, count in lens]
    width = max(-(-length // page_tokens) for length in seq_lens)
    entries = torch.randperm(len(lens) * width + 3)
    slots = torch.randperm(len(lens)).tolist()
    table_SW = entries[: len(lens) * width].view(len(lens), width)
    rows = StepRows.of(query_lens, seq_lens, slots)
    positions = [torch.arange(start, end) for start, end in zip(starts, seq_lens, strict=True)]
    entry_T = torch.cat([table_SW[slot, own // page_tokens] for slot, own in zip(slots, positions, strict=True)])
    entry_T[torch.rand(len(entry_T)) < draw(st.sampled_from([0.0, 0.2]))] = -1
    write = WritePlaces(entry_T, torch.cat(positions) % page_tokens)
    limit = {draw(st.sampled_from(["window", "chunk", "neither"])): draw(st.integers(1, 100))}
    plan = twins.PagedPlan(window=limit.get("window", 0), chunk=limit.get("chunk", 0))
    sinks_H = torch.randn(heads) * 5 if draw(st.booleans()) else None
    scores = twins.Scores(size**-0.5, draw(st.sampled_from([0.0, 3.0])), sinks_H)
    angles = rope_angles(rows.positions_T, torch.rand(size // 2), 1.0, torch.float32)
    norms = (torch.rand(size), torch.rand(size)) if draw(st.booleans()) else (None, None)
    prep = twins.HeadPrep(heads, kv_heads, angles, *norms, 1e-6, offset=draw(st.booleans()))
    qkv_TND = torch.randn(rows.num_tokens, heads + 2 * kv_heads, size)
    shape = len(entries), page_tokens, kv_heads, size
    ours = KVPages(0, torch.randn(shape), torch.randn(shape))
    theirs = KVPages(0, ours.k.clone(), ours.v.clone())
    got = paged.projected_attention(qkv_TND.clone(), prep, ours, write, table_SW, rows, plan, scores)
    want = twins.projected_attention.twin(qkv_TND.clone(), prep, theirs, write, table_SW, rows, plan, scores)
    torch.testing.assert_close(got, want, atol=3e-5, rtol=1e-4)
    torch.testing.assert_close((ours.k, ours.v), (theirs.k, theirs.v), atol=1e-6, rtol=1e-5)


def test_a_refusal_names_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    reason = CpuBackend.capabilities.refusal(FullKV(2, 16, "float32"), "cpu", torch.float32)
    assert reason == "PAGERUNNER_CPU_KERNELS=0 turns the CPU kernels off"


def test_a_rows_attention_is_the_same_beside_any_others() -> None:
    torch.manual_seed(0)
    lens = [(180, 1), (5, 1), (0, 1), (70, 1), (64, 1)]
    width = 12
    table_SW = torch.randperm(len(lens) * width).view(len(lens), width)
    pages = KVPages(0, torch.randn(table_SW.numel(), 16, 4, 32), torch.randn(table_SW.numel(), 16, 4, 32))
    q_THD, k_TKD, v_TKD = torch.randn(5, 8, 32), torch.randn(5, 4, 32), torch.randn(5, 4, 32)

    def run(rows: range) -> torch.Tensor:
        part = slice(rows.start, rows.stop)
        query_lens, seq_lens = [lens[r][1] for r in rows], [sum(lens[r]) for r in rows]
        own = StepRows.of(query_lens, seq_lens, list(rows))
        heads = q_THD[part], k_TKD[part], v_TKD[part]
        return paged.paged_attention(*heads, pages, table_SW, own, twins.PagedPlan(), twins.Scores(32**-0.5))

    together = run(range(5))
    for row in range(5):
        assert torch.equal(run(range(row, row + 1))[0], together[row])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(run(range(5)), together)
    finally:
        torch.set_num_threads(threads)
