"""Latent attention against attention over expanded keys and values, row by row, with NaN in every unwritten slot."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.borders import set_borders
from helpers.compiler import needs_compiler
from helpers.effort import effort
from helpers.latent_cases import Case, RowCase, run
from pagerunner.attention import mla, paged_mla
from pagerunner.attention.calls import UpProjection
from pagerunner.attention.cpu import CpuLatentBackend
from pagerunner.attention.mla import LatentBackend
from pagerunner.attention.paged_mla import PagedLatentBackend
from pagerunner.memory import specs
from pagerunner.ops import latent_prefill

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


@pytest.mark.parametrize("raw", [False, True])
def test_strided_batches(raw: bool) -> None:
    rows = RowCase(37, 4), RowCase(0, 1), RowCase(200, 3, 1)
    got, want = run(Case(rows, stride=4, padding=1, in_graph=True, raw=raw), PagedLatentBackend())
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@settings(max_examples=effort(33, 200), deadline=None)
@given(cases)
def test_equals_attention_row_by_row(case: Case) -> None:
    got, want = run(case, LatentBackend())
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)


@needs_compiler
@settings(max_examples=effort(40, 300), deadline=None)
@given(cases, st.booleans(), st.booleans(), st.sampled_from([1, 3, 8, 17]))
def test_cpu_kernels_equal_attention_row_by_row(case: Case, raw: bool, pairs: bool, heads: int) -> None:
    rows = tuple(replace(row, queries=min(row.queries, 20)) for row in case.rows)  # up to 16 they run by the kernels
    got, want = run(replace(case, rows=rows, raw=raw, pairs=pairs, heads=heads), CpuLatentBackend())
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)


LONG = (RowCase(600, 60), RowCase(592, 1, 37), RowCase(592, 3, 37), RowCase(0, 40), RowCase(130, 50))


@pytest.mark.parametrize("absorbs", [True, False])
@pytest.mark.parametrize("limit", [2**25, 500])
def test_both_ways_over_the_past_are_exact(monkeypatch: pytest.MonkeyPatch, absorbs: bool, limit: int) -> None:
    monkeypatch.setattr(UpProjection, "absorbs", lambda self, queries: absorbs)
    monkeypatch.setattr(mla, "MAX_EXPANDED_ELEMENTS", limit)
    got, want = run(Case(LONG), LatentBackend())
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)


def test_the_cheaper_way_is_taken() -> None:
    up = UpProjection(torch.empty(4 * 256, 512), 4, 128, 128)  # DeepSeek-V3's sizes
    assert up.absorbs(1) and up.absorbs(170) and not up.absorbs(171)


def test_bfloat16_pages_are_read_as_they_are() -> None:
    case = Case(tuple(RowCase(r.start, r.queries) for r in LONG), dtype=torch.bfloat16)
    got, want = run(case, LatentBackend())
    past = torch.tensor([r.start > 0 for r in LONG for _ in range(r.queries)])
    assert past.any()
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("backend", [LatentBackend(), PagedLatentBackend()])
def test_says_what_it_does_not_serve(backend: LatentBackend | PagedLatentBackend) -> None:
    for dtype in ("bfloat16", "fp8_e4m3", "fp8_e5m2"):
        assert backend.capabilities.refusal(specs.LatentKV(8, 4, dtype), "cpu", torch.float32) is None
    for spec, word in (
        (specs.FullKV(1, 8, "float32"), "full"),
        (specs.LatentKV(8, 4, "float32", compression=4), "compressed"),
        (specs.LatentKV(8, 4, "float32", indexer_dim=4), "chosen"),
        (specs.LatentKV(8, 4, "fp8_e4m3", scale_bytes=8), "scale|fp8_e4m3"),
        (specs.LatentKV(8, 4, "fp8_e4m3", rope_dtype="bfloat16"), "rotary|fp8_e4m3"),
        (specs.LatentKV(8, 4, "float32", window=64), "window"),
    ):
        reason = backend.capabilities.refusal(spec, "cpu", torch.float32)
        assert reason is not None and re.search(word, reason)


@settings(max_examples=effort(12, 120), deadline=None)
@given(cases, st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2]), st.booleans())
def test_fp8_pages(case: Case, dtype: torch.dtype, raw: bool) -> None:
    got, want = run(replace(case, dtype=dtype, gap=4, raw=raw), PagedLatentBackend())
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)


@settings(max_examples=effort(25, 120), deadline=None)
@given(cases, st.booleans(), st.sampled_from([0, 3]))
def test_reading_tables_equals_attention_row_by_row(case: Case, in_graph: bool, padding: int) -> None:
    got, want = run(replace(case, in_graph=in_graph, padding=padding if in_graph else 0), PagedLatentBackend())
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("limit", [2**25, 44 * 200, 44 * 90])
@pytest.mark.parametrize("short", [0, 2, 55])
def test_long_rows_are_expanded_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch, limit: int, short: int) -> None:
    case = Case(LONG, heads=2, key_dim=12, value_dim=10)
    monkeypatch.setattr(paged_mla, "MAX_EXPANDED_ELEMENTS", limit)
    set_borders(monkeypatch, "attention", short_latent_queries=short)
    got, want = run(case, PagedLatentBackend())
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)


def test_reading_tables_rounds_as_pages_do() -> None:
    case = Case(tuple(RowCase(r.start, r.queries) for r in LONG), dtype=torch.bfloat16)
    got, want = run(case, PagedLatentBackend())
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("limit", [2**27, 90 * 3 * 22, 1])
@pytest.mark.parametrize("raw", [False, True])
def test_prompts_with_nothing_before_them(monkeypatch: pytest.MonkeyPatch, limit: int, raw: bool) -> None:
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(latent_prefill, "MAX_ELEMENTS", limit)
    monkeypatch.setattr(paged_mla, "library_serves", lambda q, size, lengths: asked.append(lengths) or bool(lengths))
    case = Case((RowCase(0, 70), RowCase(0, 20)), heads=3, key_dim=8, value_dim=10, raw=raw)
    got, want = run(case, PagedLatentBackend())
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)
    run(replace(case, rows=(RowCase(0, 70), RowCase(1, 20))), PagedLatentBackend())
    assert set(asked) == {(70, 20), ()}
