"""The torch backend against attention written out row by row, with NaN in every slot that nobody wrote."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagerunner.attention.base import Reach
from pagerunner.attention.torch_plan import BandPart, NewPart, PaddedPart, SharedPart, make_plan
from pagerunner.attention.torch_ref import TorchBackend, attend
from pagerunner.batch import ForwardBatch, GroupBatch, LayerKV
from pagerunner.memory.specs import ChunkedKV, FullKV, LatentKV, RecurrentState, WindowKV


@dataclass(frozen=True)
class RowCase:
    """A row's past, its tokens this step, and how much of an earlier row's pages it would like to share."""

    start: int
    queries: int
    parent: int
    shared_pages: int


@dataclass(frozen=True)
class Case:
    """One step."""

    rows: tuple[RowCase, ...]
    page_tokens: int
    kv_heads: int
    group: int
    head_dim: int
    gap: int = 0
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    head_dim_v: int = 0
    reach: Reach | None = None
    sinks: bool = False
    softcap: float = 0.0


def run(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The backend's output and the reference's, [T, H, D]."""
    torch.manual_seed(0)
    size, heads, dim = case.page_tokens, case.kv_heads, case.head_dim
    dim_v = case.head_dim_v or dim
    block = size * heads * (dim + dim_v)
    stride = 2 * block + case.gap  # two layers; the step runs the second
    num_pages = sum(-(-(r.start + r.queries) // size) for r in case.rows) + 3
    pool = torch.full((num_pages * stride + 7,), float("nan"), dtype=case.kv_dtype)
    kv = [
        pool.as_strided((num_pages, size, heads, d), (stride, heads * d, d, 1), 7 + block + i * size * heads * dim)
        for i, d in enumerate((dim, dim_v))
    ]
    free = torch.randperm(num_pages).tolist()
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    tables: list[list[int]] = []
    entries, offsets, first_pages = [], [], []
    for i, row in enumerate(case.rows):
        length = row.start + row.queries
        k, v = (torch.randn(length, heads, d).to(case.kv_dtype).to(case.dtype) for d in (dim, dim_v))
        oldest, kept_from = 0, row.start
        if case.reach is not None:  # what this step doesn't read, and what no later step reads, is in no page
            oldest = max(case.reach.oldest(row.start), 0)
            kept_from = max(case.reach.oldest(length), row.start)
        pages: list[int] = []
        if i and case.reach is None:
            parent = row.parent % i
            count = min(row.shared_pages, row.start // size, keys[parent].shape[0] // size)
            pages = tables[parent][:count]
            k[: count * size], v[: count * size] = keys[parent][: count * size], values[parent][: count * size]
        own_from = len(pages) * size
        pages = pages + [free.pop() for _ in range(-(-length // size) - len(pages))]
        past = torch.arange(max(own_from, oldest), row.start)
        where = (torch.tensor(pages)[past // size], past % size)
        kv[0][where], kv[1][where] = k[past].to(case.kv_dtype), v[past].to(case.kv_dtype)
        entries += [pages[p // size] if p >= kept_from else -1 for p in range(row.start, length)]
        offsets += [p % size for p in range(row.start, length)]
        keys.append(k)
        values.append(v)
        first_pages.append(oldest // size)
        tables.append(pages[oldest // size :])
    table = torch.zeros(len(tables), max(map(len, tables)), dtype=torch.int64)
    for i, pages in enumerate(tables):
        table[i, : len(pages)] = torch.tensor(pages)
    query_lens = [r.queries for r in case.rows]
    seq_lens = [r.start + r.queries for r in case.rows]
    start = torch.tensor([0, *query_lens]).cumsum(0)
    tokens = sum(query_lens)
    # as a model has them: side by side in one projection's output
    q_heads = heads * case.group
    qk = torch.empty(tokens, q_heads + heads, dim, dtype=case.dtype)
    qk[:, :q_heads] = torch.randn(tokens, q_heads, dim)
    qk[:, q_heads:] = torch.cat([k[r.start :] for k, r in zip(keys, case.rows, strict=True)])
    q, v_new = qk[:, :q_heads], torch.cat([v[r.start :] for v, r in zip(values, case.rows, strict=True)])
    backend = TorchBackend()
    metadata = backend.plan(query_lens, seq_lens, table, size, start, case.reach, first_pages)
    sinks = torch.randn(q_heads) if case.sinks else None
    group = GroupBatch(
        table,
        torch.tensor(first_pages),
        torch.tensor(entries),
        torch.tensor(offsets),
        size,
        backend,
        metadata,
    )
    layer = LayerKV(0, kv[0], kv[1])
    nothing = torch.zeros(tokens, dtype=torch.int64)
    batch = ForwardBatch(nothing, nothing, start, start[1:] - 1, query_lens, seq_lens, (group,), (layer,))
    scale = 0.7 / math.sqrt(dim)
    for _ in range(2):  # a second layer of the same step reuses the plan
        out = backend.forward(q, qk[:, q_heads:], v_new, layer, group, batch, scale, sinks, case.softcap)
    return out.double(), torch.cat(expected(case, q, start.tolist(), keys, values, scale, sinks))


def expected(
    case: Case,
    q: torch.Tensor,
    starts: list[int],
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    scale: float,
    sinks: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Attention written out, [Q, H, D] of every row in float64."""
    want = []
    for k, v, row, first in zip(keys, values, case.rows, starts, strict=False):
        k_LHD, v_LHD = (x.double().repeat_interleave(case.group, 1) for x in (k, v))
        scores_HQL = torch.einsum("qhd,lhd->hql", q[first : first + row.queries].double(), k_LHD) * scale
        if case.softcap:
            scores_HQL = torch.tanh(scores_HQL / case.softcap) * case.softcap
        queries_Q1 = row.start + torch.arange(row.queries).unsqueeze(-1)
        hidden_QL = torch.arange(k.shape[0]) > queries_Q1
        if case.reach is not None:
            hidden_QL |= torch.arange(k.shape[0]) < case.reach.oldest(queries_Q1)
        scores_HQL = scores_HQL.masked_fill(hidden_QL, float("-inf"))
        if sinks is not None:
            scores_HQL = torch.cat((scores_HQL, sinks.double().view(-1, 1, 1).expand(-1, row.queries, 1)), -1)
        weights_HQL = scores_HQL.softmax(-1)[..., : k.shape[0]]
        want.append(torch.einsum("hql,lhd->qhd", weights_HQL, v_LHD))
    return want


rows = st.builds(
    RowCase,
    start=st.one_of(st.just(0), st.integers(0, 130), st.integers(500, 700)),
    queries=st.one_of(st.just(1), st.integers(1, 9), st.integers(1, 70)),
    parent=st.integers(0, 7),
    shared_pages=st.one_of(st.just(0), st.integers(0, 50)),
)
cases = st.builds(
    Case,
    rows=st.lists(rows, min_size=1, max_size=8).map(tuple),
    page_tokens=st.sampled_from([1, 3, 16, 48]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim=st.sampled_from([2, 8, 20, 64]),
    gap=st.sampled_from([0, 0, 4, 5]),
    head_dim_v=st.sampled_from([0, 0, 0, 6]),
    reach=st.one_of(st.none(), st.none(), st.builds(Reach, st.sampled_from([1, 2, 20, 64, 300]), st.booleans())),
    sinks=st.booleans(),
    softcap=st.sampled_from([0.0, 0.0, 0.0, 1.5]),
)


@settings(max_examples=200, deadline=None)
@given(cases)
def test_equals_attention_row_by_row(case: Case) -> None:
    got, want = run(case)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@settings(max_examples=150, deadline=None)
@given(cases.filter(lambda case: case.reach is not None))
def test_windows_and_chunks_equal_attention_row_by_row(case: Case) -> None:
    got, want = run(case)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("reach", [Reach(20), Reach(300), Reach(100, chunked=True)])
def test_a_long_row_in_a_window_reads_a_band(reach: Reach) -> None:
    got, want = run(Case((plain(90, 600), plain(0, 700), plain(0, 20), plain(99, 1)), 16, 2, 2, 8, reach=reach))
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    parts = make_plan([600], [690], torch.arange(44)[None], 16, reach, [0])
    assert max(p.allowed_QL.shape[1] for p in parts if isinstance(p, BandPart)) < 256 + reach.size


def plain(start: int, queries: int, shared: int = 0) -> RowCase:
    return RowCase(start, queries, 0, shared)


@pytest.mark.parametrize("count", [1, 2, 33])
def test_decodes_of_many_lengths(count: int) -> None:
    lengths = [(i * 37) % 300 for i in range(count)]
    got, want = run(Case(tuple(plain(n, 1) for n in lengths), 16, 2, 3, 16))
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_rows_read_pages_that_another_row_of_the_step_writes() -> None:
    case = Case((plain(0, 530), *[plain(512, 16, 32)] * 5, plain(512, 3, 32), plain(523, 1, 32)), 16, 2, 2, 16)
    got, want = run(case)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_stays_close(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    rows = (plain(0, 40), plain(600, 1), plain(600, 2, 37), plain(600, 1, 37), plain(100, 50))
    got, want = run(Case(rows, 16, 2, 2, 32, dtype=dtype, kv_dtype=kv_dtype))
    torch.testing.assert_close(got, want, atol=0.03, rtol=0.03)


def test_a_prefix_shared_by_decodes_is_read_once() -> None:
    table = torch.tensor([[3, 4, 5, 6 + i] for i in range(8)])
    shared, own = 3 * 256, [40 + i for i in range(8)]
    parts = make_plan([1] * 8, [shared + n for n in own], table, 256)
    kinds = [type(part) for part in parts]
    assert kinds == [PaddedPart, SharedPart]
    assert isinstance(parts[0], PaddedPart) and isinstance(parts[1], SharedPart)
    assert parts[0].slots.entries_N.numel() == 8 * max(own)
    assert parts[1].slots.entries_N.numel() == shared


def test_new_rows_of_one_length_are_one_call_and_touch_no_pages() -> None:
    table = torch.arange(6).view(3, 2)
    parts = make_plan([20, 20, 7], [20, 20, 7], table, 16)
    assert [(p.rows, p.queries, p.more) for p in parts if isinstance(p, NewPart)] == [(2, 20, False), (1, 7, False)]
    assert len(parts) == 2


def test_padding_reads_only_slots_of_the_same_row() -> None:
    table = torch.tensor([[5, 9], [2, 0]])
    (part,) = make_plan([1, 1], [30, 12], table, 16)
    assert isinstance(part, PaddedPart)
    slots = list(zip(part.slots.entries_N.tolist(), part.slots.offsets_N.tolist(), strict=True))
    assert set(slots[30:]) == {(2, i) for i in range(12)}


@pytest.mark.parametrize("causal", [False, True])
def test_the_plain_form_agrees_with_the_flash_kernel(causal: bool) -> None:
    q, k, v = (torch.randn(2, 3, 10, 8) for _ in range(3))
    mask = None if causal else torch.zeros(2, 1, 10, 10).masked_fill_(torch.rand(2, 1, 10, 10) > 0.7, float("-inf"))
    got_out, got_lse = attend(q, k, v, 0.3, mask=mask, causal=causal)
    scores = torch.matmul(q, k.transpose(-1, -2)) * 0.3
    if causal:
        scores = scores.masked_fill(torch.ones(10, 10, dtype=torch.bool).triu(1), float("-inf"))
    scores = scores if mask is None else scores + mask
    torch.testing.assert_close(got_out, scores.softmax(-1) @ v)
    torch.testing.assert_close(got_lse, scores.logsumexp(-1))


def test_says_what_it_does_not_serve() -> None:
    backend = TorchBackend()
    for spec in (
        FullKV(2, 16, "float32", 8),
        WindowKV(2, 16, "float32", window=9),
        ChunkedKV(2, 16, "float32", chunk=9),
        LatentKV(2, 16, "fp8_e4m3", window=9),
    ):
        assert backend.unsupported(spec, "cpu", torch.float32) is None
    for other in (LatentKV(2, 16, "float32"), RecurrentState(((2,),), ("float32",))):
        reason = backend.unsupported(other, "cpu", torch.float32)
        assert reason is not None and type(other).__name__ in reason


def test_one_call_gathers_a_bounded_number_of_slots() -> None:
    table = torch.arange(64 * 64).view(64, 64)
    parts = make_plan([1] * 64, [1024] * 64, table, 16)
    sizes = [part.slots.entries_N.numel() for part in parts if isinstance(part, PaddedPart)]
    assert sum(sizes) == 64 * 1024 and max(sizes) <= 32768


@torch.inference_mode()
def test_scratch_from_inference_mode_serves_outside_it() -> None:
    rows = (plain(40, 1), plain(70, 1))
    run(Case(rows, 16, 2, 2, 16))
    backend = TorchBackend()
    like = torch.zeros(1)
    first = backend._scratch.take(0, 10, 4, like)
    assert not first.is_inference()
    assert backend._scratch.take(0, 5, 4, like).data_ptr() == first.data_ptr()
    assert backend._scratch.take(1, 5, 4, like).data_ptr() != first.data_ptr()
