"""Latent attention against attention over expanded keys and values, row by row, with NaN in every unwritten slot."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagerunner.attention import mla
from pagerunner.attention.mla import LatentBackend, UpProjection
from pagerunner.batch import ForwardBatch, GroupBatch, LatentKV
from pagerunner.memory import specs


@dataclass(frozen=True)
class RowCase:
    """A row's past, its tokens this step, and how many pages of the first row it would like to share."""

    start: int
    queries: int
    shared_pages: int = 0


@dataclass(frozen=True)
class Case:
    """One step."""

    rows: tuple[RowCase, ...]
    page_tokens: int = 16
    heads: int = 2
    key_dim: int = 6
    rope_dim: int = 4
    value_dim: int = 5
    latent_dim: int = 8
    gap: int = 0
    dtype: torch.dtype = torch.float32


def run(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The backend's output and the reference's, [T, H, V]."""
    torch.manual_seed(0)
    size, vector = case.page_tokens, case.latent_dim + case.rope_dim
    stride = 2 * size * vector + case.gap  # two layers; the step runs the second
    num_pages = sum(-(-(r.start + r.queries) // size) for r in case.rows) + 3
    pool = torch.full((num_pages * stride,), float("nan"), dtype=case.dtype)
    pages = pool.as_strided((num_pages, size, vector), (stride, vector, 1), size * vector)
    free = torch.randperm(num_pages).tolist()
    vectors: list[torch.Tensor] = []
    tables: list[list[int]] = []
    entries, offsets = [], []
    for row in case.rows:
        length = row.start + row.queries
        own = torch.randn(length, vector).to(case.dtype).float()
        held: list[int] = []
        if tables:
            count = min(row.shared_pages, row.start // size, vectors[0].shape[0] // size)
            held = tables[0][:count]
            own[: count * size] = vectors[0][: count * size]
        past = torch.arange(len(held) * size, row.start)
        held = held + [free.pop() for _ in range(-(-length // size) - len(held))]
        pages[torch.tensor(held)[past // size], past % size] = own[past].to(case.dtype)
        entries += [held[p // size] for p in range(row.start, length)]
        offsets += [p % size for p in range(row.start, length)]
        vectors.append(own)
        tables.append(held)
    table = torch.zeros(len(tables), max(map(len, tables)), dtype=torch.int64)
    for i, held in enumerate(tables):
        table[i, : len(held)] = torch.tensor(held)
    query_lens = [r.queries for r in case.rows]
    seq_lens = [r.start + r.queries for r in case.rows]
    start = torch.tensor([0, *query_lens]).cumsum(0)
    tokens = sum(query_lens)
    q = torch.randn(tokens, case.heads, case.key_dim + case.rope_dim)
    weight = torch.randn(case.heads * (case.key_dim + case.value_dim), case.latent_dim) / case.latent_dim**0.5
    up = UpProjection(weight, case.heads, case.key_dim, case.value_dim)
    backend = LatentBackend()
    first_page = torch.zeros(len(table), dtype=torch.int64)
    metadata = backend.plan(query_lens, seq_lens, table, size, start)
    group = GroupBatch(table, first_page, torch.tensor(entries), torch.tensor(offsets), size, backend, metadata)
    layer, nothing = LatentKV(0, pages), torch.zeros(tokens, dtype=torch.int64)
    batch = ForwardBatch(nothing, nothing, start, start[1:] - 1, query_lens, seq_lens, (group,), (layer,))
    new = torch.cat([x[r.start :] for x, r in zip(vectors, case.rows, strict=True)])
    for _ in range(2):  # a second layer of the same step reuses the plan
        out = backend.forward(q, new, up, layer, group, batch, 0.4)
    want = []
    for own, row, first in zip(vectors, case.rows, start.tolist(), strict=False):
        both = (own[:, : case.latent_dim].double() @ weight.T.double()).unflatten(-1, (case.heads, -1))
        rope = own[:, None, case.latent_dim :].double().expand(-1, case.heads, -1)
        keys, values = torch.cat((both[..., : case.key_dim], rope), -1), both[..., case.key_dim :]
        scores = torch.einsum("qhd,lhd->hql", q[first : first + row.queries].double(), keys) * 0.4
        later = torch.arange(own.shape[0]) > row.start + torch.arange(row.queries).unsqueeze(-1)
        want.append(torch.einsum("hql,lhv->qhv", scores.masked_fill(later, float("-inf")).softmax(-1), values))
    return out.double(), torch.cat(want)


rows = st.builds(
    RowCase,
    start=st.one_of(st.just(0), st.integers(0, 130), st.integers(500, 700)),
    queries=st.one_of(st.just(1), st.integers(1, 9), st.integers(1, 70)),
    shared_pages=st.one_of(st.just(0), st.integers(0, 50)),
)
cases = st.builds(
    Case,
    rows=st.lists(rows, min_size=1, max_size=6).map(tuple),
    page_tokens=st.sampled_from([1, 3, 16, 48]),
    heads=st.integers(1, 3),
    key_dim=st.sampled_from([1, 6, 16]),
    value_dim=st.sampled_from([1, 5, 32]),
    latent_dim=st.sampled_from([3, 8, 64]),
    gap=st.sampled_from([0, 0, 4, 5]),
)


@settings(max_examples=100, deadline=None)
@given(cases)
def test_equals_attention_row_by_row(case: Case) -> None:
    got, want = run(case)
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)


LONG = (RowCase(600, 60), RowCase(592, 1, 37), RowCase(592, 3, 37), RowCase(0, 40), RowCase(130, 50))


@pytest.mark.parametrize("absorbs", [True, False])
@pytest.mark.parametrize("limit", [2**25, 500])
def test_both_ways_over_the_past_are_exact(monkeypatch: pytest.MonkeyPatch, absorbs: bool, limit: int) -> None:
    monkeypatch.setattr(UpProjection, "absorbs", lambda self, queries: absorbs)
    monkeypatch.setattr(mla, "MAX_EXPANDED_ELEMENTS", limit)
    got, want = run(Case(LONG))
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)


def test_the_cheaper_way_is_taken() -> None:
    up = UpProjection(torch.empty(4 * 256, 512), 4, 128, 128)  # DeepSeek-V3's sizes
    assert up.absorbs(1) and up.absorbs(170) and not up.absorbs(171)


def test_bfloat16_pages_are_read_as_they_are() -> None:
    got, want = run(Case(tuple(RowCase(r.start, r.queries) for r in LONG), dtype=torch.bfloat16))
    past = torch.tensor([r.start > 0 for r in LONG for _ in range(r.queries)])
    assert past.any()
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)


def test_says_what_it_does_not_serve() -> None:
    backend = LatentBackend()
    for dtype in ("bfloat16", "fp8_e4m3", "fp8_e5m2"):
        assert backend.unsupported(specs.LatentKV(8, 4, dtype), "cpu", torch.float32) is None
    for spec, word in (
        (specs.FullKV(1, 8, "float32"), "full"),
        (specs.LatentKV(8, 4, "float32", compression=4), "compression"),
        (specs.LatentKV(8, 4, "float32", indexer_dim=4), "indexer"),
        (specs.LatentKV(8, 4, "fp8_e4m3", scale_bytes=8), "scale"),
        (specs.LatentKV(8, 4, "fp8_e4m3", rope_dtype="bfloat16"), "rotary"),
        (specs.LatentKV(8, 4, "float32", window=64), "window"),
    ):
        reason = backend.unsupported(spec, "cpu", torch.float32)
        assert reason is not None and word in reason
