"""The kernels of latent attention in Triton's interpreter, under the backend that calls them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.borders import set_borders
from helpers.effort import effort, share_of_the_day
from helpers.interpreter_floats import install
from helpers.latent_cases import Case, RowCase, run
from pagerunner.attention import paged_mla
from pagerunner.attention.paged_mla import PagedLatentBackend
from pagerunner.batch import StepRows, WritePlaces
from pagerunner.ops import latent_attention
from pagerunner.ops.latent_attention import store_latent_
from pagerunner.ops.latent_heads import LatentPrep, absorb_latent_heads_, prepare_latent_heads_
from pagerunner.ops.linear import Norm
from pagerunner.ops.rope import rope_angles

pytest.importorskip("triton")
install()
from pagerunner.ops.kernels.latent import latent_decode  # noqa: E402

KERNELS = ("store_latent_", "prepare_latent_heads_", "absorb_latent_heads_", "latent_values", "expanded_attention")
ROWS = (RowCase(37, 1), RowCase(0, 9), RowCase(20, 5, 1), RowCase(200, 1))


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KERNELS:
        monkeypatch.setattr(paged_mla, name, getattr(paged_mla, name).kernel)


# Each value, and each of heads and dtypes in a graph and outside; tests/gpu has the cross product.
@pytest.mark.parametrize(
    ("dtype", "heads", "in_graph", "raw"),
    [
        (torch.float32, 3, False, True),
        (torch.float32, 20, True, False),
        (torch.float16, 3, True, True),
        (torch.float16, 20, False, True),
    ],
)
def test_queries_in_the_latent_space(dtype: torch.dtype, heads: int, in_graph: bool, raw: bool) -> None:
    case = Case(ROWS, heads=heads, gap=4, dtype=dtype, compute=torch.float32, in_graph=in_graph, padding=2 * in_graph)
    got, want = run(replace(case, raw=raw), PagedLatentBackend())
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)


# The interpreter counts as 4 multiprocessors, so there are 4 slices.
@pytest.mark.parametrize("least", [1, 2, 9])
def test_keys_are_cut_into_slices(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    tiles = latent_decode.decode_tiles
    monkeypatch.setattr(latent_decode, "decode_tiles", lambda *of: tiles(*of)._replace(keys=16, least=least))
    case = Case((RowCase(300, 1), RowCase(5, 1), RowCase(140, 1)), in_graph=True, padding=1, raw=True)
    got, want = run(case, PagedLatentBackend())
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)


DRAFTS = (RowCase(300, 4), RowCase(0, 1), RowCase(29, 4), RowCase(140, 2))


@pytest.mark.days(2)
@pytest.mark.parametrize(
    ("heads", "dtype", "raw", "least"),
    [
        (2, torch.float32, True, 1),
        (16, torch.float16, False, 2),
        (20, torch.float32, True, 9),
        (3, torch.float8_e4m3fn, True, 1),
    ],
)
def test_strided_batches(
    monkeypatch: pytest.MonkeyPatch, heads: int, dtype: torch.dtype, raw: bool, least: int
) -> None:
    """Rows of fewer tokens than the stride, drafts across borders of tiles and pages, and one block of queries or two."""
    tiles = latent_decode.decode_tiles
    monkeypatch.setattr(latent_decode, "decode_tiles", lambda *of: tiles(*of)._replace(keys=16, least=least))
    case = Case(DRAFTS, heads=heads, dtype=dtype, raw=raw, stride=4, padding=1, in_graph=True)
    got, want = run(case, PagedLatentBackend())
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("stride", [2, 3, 8])
def test_strides(stride: int) -> None:
    rows = tuple(RowCase(start, 1 + start % stride) for start in (7, 31, 62, 0, 95))
    got, want = run(Case(rows, stride=stride, in_graph=True, raw=True), PagedLatentBackend())
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize(("rows", "latent"), [(1, 8), (2, 8), (3, 8), (16, 8), (35, 8), (70, 130)])
def test_numbers_of_rows(monkeypatch: pytest.MonkeyPatch, rows: int, latent: int) -> None:
    """Programs take 1, 2 or 16 tokens, or 64 and pieces of their latents; results are whole and in parts."""
    if latent > 64:
        pieces = latent_decode.ValuesConfig(128, 64, 1, 8, 64, 4)
        assert latent_decode.values_config(100, 128) == pieces
        monkeypatch.setattr(latent_decode, "values_config", lambda tokens, heads: pieces)
    lengths = (7 * i % 61 + 300 * (i == 1) for i in range(rows))
    case = Case(tuple(RowCase(n, 1) for n in lengths), latent_dim=latent, raw=True, pairs=rows % 2 == 0)
    got, want = run(case, PagedLatentBackend())
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)


def test_more_tokens_than_the_schedule_looks_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_decode, "BLOCK", 4)
    monkeypatch.setattr(latent_decode, "PAIRS", 8)
    case = Case((RowCase(150, 6), RowCase(0, 3), RowCase(90, 4)), in_graph=True, padding=2)
    got, want = run(case, PagedLatentBackend())
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)


@settings(max_examples=effort(20, 200), deadline=None)
@given(
    st.lists(st.one_of(st.just(0), st.integers(1, 9), st.integers(1, 4000)), min_size=1, max_size=40),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([0, 3]),
)
def test_every_tile_is_in_one_slice_and_every_part_is_found(
    lengths: list[int], slices: int, least: int, extra: int
) -> None:
    tiles = latent_decode.Tiles(16, 32, 4, 1, 1, least)
    count = len(lengths)
    rows = StepRows.of([1] * count, lengths, range(count))
    rows = replace(rows, row_T=torch.where(rows.positions_T < 0, -1, rows.row_T), positions_T=rows.positions_T.clamp(0))
    schedule = latent_decode.run_schedule(rows, slices, tiles, extra=extra)
    unit = schedule.unit.view(-1, 4).tolist()
    part = schedule.part[: 2 * count].view(-1, 2).tolist()
    cut = schedule.slice.view(-1, 2).tolist()
    assert [x[1] for x in unit[:-1]] == lengths
    counts = [-(-length // 32) for length in lengths]
    assert cut[0][0] in (0, extra) and cut[-1][0] == unit[-1][0] == sum(each + extra for each in counts if each)
    found: dict[int, list[int]] = {token: [] for token in range(count)}
    done: dict[int, list[int]] = {token: [] for token in range(count)}
    for number, ((tile, token), (stop, _)) in enumerate(pairwise(cut)):
        while tile < stop:  # as kernels do
            upto, tile = min(stop, unit[token][0] + counts[token]), max(tile, unit[token][0])
            if upto > tile:
                found[token].append(number)
                done[token] += range(tile - unit[token][0], upto - unit[token][0])
                tile = upto
            token += 1
    assert [done[token] for token in range(count)] == [list(range(each)) for each in counts]
    for token, (first, pieces) in enumerate(part):
        assert pieces == len(found[token])
        if pieces > 1:
            assert found[token] == list(range(first, first + pieces))


def test_half_precision() -> None:
    got, want = run(Case(ROWS, dtype=torch.float16, compute=torch.float16, raw=True), PagedLatentBackend())
    assert (got - want).norm() < 3e-3 * want.norm()


LIMITS = [2**25, 22 * 30]


@pytest.mark.parametrize("limit", [LIMITS[number] for number in share_of_the_day(len(LIMITS), 2, first=1)])
def test_expanded_keys(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(paged_mla, "MAX_EXPANDED_ELEMENTS", limit)
    set_borders(monkeypatch, "attention", short_latent_queries=4)
    case = Case((RowCase(40, 37), RowCase(3, 1), RowCase(0, 5), RowCase(0, 40)), page_tokens=3, raw=True)
    got, want = run(case, PagedLatentBackend())
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)


FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


FP8_CASES = [(FP8[0], 3, False, True), (FP8[1], 3, False, False), (FP8[1], 20, True, False), (FP8[0], 20, True, True)]


# Each dtype, both numbers of heads, in a graph and outside, with raw keys and others, on each day; tests/gpu has the cross product.
@pytest.mark.parametrize(
    ("dtype", "heads", "in_graph", "raw"),
    [FP8_CASES[number] for number in share_of_the_day(len(FP8_CASES), 2)],
)
def test_fp8_pages(dtype: torch.dtype, heads: int, in_graph: bool, raw: bool) -> None:
    case = Case(ROWS, heads=heads, gap=4, dtype=dtype, in_graph=in_graph, padding=2 * in_graph, raw=raw)
    got, want = run(case, PagedLatentBackend())
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("limit", [LIMITS[number] for number in share_of_the_day(len(LIMITS), 2)])
def test_expanded_keys_of_fp8_pages(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(paged_mla, "MAX_EXPANDED_ELEMENTS", limit)
    set_borders(monkeypatch, "attention", short_latent_queries=4)
    rows = (RowCase(40, 37), RowCase(3, 1), RowCase(0, 5), RowCase(0, 40))
    got, want = run(Case(rows, page_tokens=3, raw=True, dtype=FP8[0]), PagedLatentBackend())
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)


def test_keys_in_pages_of_very_different_scales() -> None:
    """A page of large vectors beside pages of small ones and a page of zeros: the small ones' bits are kept."""
    torch.manual_seed(0)
    table, rows = torch.arange(4).view(1, 4), StepRows.of([1], [16], [0])
    pages, scales = torch.zeros(4, 4, 12, dtype=FP8[0]), torch.zeros(4)
    vectors = torch.randn(16, 12) * torch.tensor([1e-3, 8.0, 0.0, 0.2]).repeat_interleave(4).unsqueeze(1)
    at = torch.arange(16)
    store_latent_.twin(vectors, pages, WritePlaces(at // 4, at % 4), scales)
    q_THC, q_THP, up_HVC = torch.randn(1, 3, 8), torch.randn(1, 3, 4), torch.randn(3, 5, 8)
    call = q_THC, q_THP, pages, table, rows, 0.3, up_HVC
    want = latent_attention.latent_values.twin(*call, {}, scales)
    torch.testing.assert_close(latent_decode.latent_values(*call, {}, scales), want, atol=1e-5, rtol=1e-5)


class _Raw(NamedTuple):
    """Vectors and what makes them ready."""

    vectors_TL: torch.Tensor
    prep: LatentPrep
    q_THD: torch.Tensor


def _raw(tokens: int, factor_T: torch.Tensor, pairs: bool) -> _Raw:
    norm = Norm(1 + 0.2 * torch.randn(7), 1e-6)
    angles = rope_angles(torch.arange(tokens), torch.rand(3), 1.0, torch.float32)
    vectors_TL = torch.randn(tokens, 13) * factor_T.unsqueeze(1)
    return _Raw(vectors_TL, LatentPrep(norm, angles, pairs), torch.randn(tokens, 2, 11))


@settings(max_examples=effort(10, 120), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 9), st.sampled_from([0.0, 0.01, 1.0, 50.0])), min_size=1, max_size=5
    ),
    st.sampled_from(FP8),
    st.booleans(),
    st.integers(0, 3),
)
def test_fp8_scales_grow_as_the_twins(
    runs: list[tuple[int, int, float]], dtype: torch.dtype, pairs: bool, way: int
) -> None:
    """Rows that add tokens to pages which may hold some: codes and scales are the twin's, bit for bit."""
    torch.manual_seed(0)
    size = 5
    pages, scales = torch.zeros(20, size, 13, dtype=dtype), torch.zeros(20)
    free = iter(torch.randperm(20).tolist())
    entries, offsets, factors = [], [], []
    for start, count, factor in runs:
        held = [next(free) for _ in range(-(-(start + count) // size))]
        past = torch.arange(start)
        if start:
            places = WritePlaces(torch.tensor(held)[past // size], past % size)
            store_latent_.twin(torch.randn(start, 13), pages, places, scales)
        at = [start + i for i in range(count)]
        entries += [held[p // size] for p in at] + [-1]
        offsets += [p % size for p in at] + [0]
        factors += [factor] * count + [1.0]
    raw = _raw(len(entries), torch.tensor(factors), pairs)
    where = WritePlaces(torch.tensor(entries), torch.tensor(offsets))
    results = []
    at_once = {"most_of_page": size} if way == 3 else {}
    for op in (store_latent_, prepare_latent_heads_, absorb_latent_heads_, absorb_latent_heads_)[way : way + 1] * 2:
        mine, own = pages.clone(), scales.clone()
        function = op.kernel if results else op.twin
        vectors_TL, q_THD = raw.vectors_TL.clone(), raw.q_THD.clone()
        if op is store_latent_:
            function(vectors_TL, mine, where, own)
        elif op is prepare_latent_heads_:
            function(q_THD, vectors_TL, raw.prep, mine, where, own)
        else:
            function(q_THD, vectors_TL, raw.prep, torch.ones(2, 5, 7), mine, where, own, **at_once)
        results.append((mine.view(torch.uint8), own))
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=0)
    if way == 0:
        torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=0)
    else:  # a norm's sum may differ in its last bit, and a code then in its last
        assert (results[0][0].int() - results[1][0].int()).abs().max() <= 1
