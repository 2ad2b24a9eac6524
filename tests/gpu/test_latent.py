"""The kernels of latent attention at DeepSeek's sizes, under the backend that calls them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.latent_cases import Case, RowCase, run
from pagerunner.attention import paged_mla
from pagerunner.attention.base import PlanInputs
from pagerunner.attention.paged_mla import PagedLatentBackend
from pagerunner.batch import StepRows
from pagerunner.ops import latent_prefill

SIZES = {"page_tokens": 64, "key_dim": 128, "rope_dim": 64, "value_dim": 128, "latent_dim": 512, "gap": 64}
DECODE = Case((RowCase(1500, 1), RowCase(64, 1), RowCase(0, 1), RowCase(700, 1)), **SIZES)
MIXED = Case((RowCase(300, 1), RowCase(0, 300), RowCase(500, 90), RowCase(130, 30)), **SIZES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("heads", [16, 24, 128])
@pytest.mark.parametrize("in_graph", [False, True])
def test_decode(dtype: torch.dtype, heads: int, in_graph: bool) -> None:
    case = replace(DECODE, heads=heads, dtype=dtype, compute=dtype, in_graph=in_graph, padding=4 * in_graph)
    check(case, dtype)
    check(replace(case, raw=True), dtype)


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 64, 300])
def test_numbers_of_rows(rows: int) -> None:
    lengths = [97 * i % 1400 for i in range(rows)]
    case = replace(DECODE, rows=tuple(RowCase(length, 1) for length in lengths), heads=16, raw=True, page_tokens=16)
    check(replace(case, dtype=torch.bfloat16, compute=torch.bfloat16), torch.bfloat16)
    check(case, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize(("heads", "stride"), [(16, 2), (16, 4), (24, 3), (16, 8), (128, 4)])
@pytest.mark.parametrize("rows", [1, 70])
def test_strided_batches(dtype: torch.dtype, heads: int, stride: int, rows: int) -> None:
    drafted = tuple(RowCase((1500, 0, 64, 62, 700)[i % 5] + i // 5, 1 + i % stride) for i in range(rows))
    compute = torch.bfloat16 if dtype.itemsize == 1 else dtype
    case = replace(
        DECODE, rows=drafted, heads=heads, dtype=dtype, compute=compute, stride=stride, padding=2, in_graph=True
    )
    check(case, compute)
    check(replace(case, raw=True), compute)


def test_one_long_row() -> None:
    case = replace(DECODE, rows=(RowCase(40_000, 1),), heads=16, raw=True, page_tokens=16)
    check(replace(case, dtype=torch.bfloat16, compute=torch.bfloat16), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("in_graph", [False, True])
def test_mixed(dtype: torch.dtype, in_graph: bool) -> None:
    case = replace(MIXED, heads=16, dtype=dtype, compute=dtype, in_graph=in_graph, padding=7 * in_graph)
    check(case, dtype)
    check(replace(case, raw=True), dtype)


@pytest.mark.parametrize(
    ("pages", "dtype", "heads"),
    [
        (torch.float8_e4m3fn, torch.bfloat16, 16),
        (torch.float8_e4m3fn, torch.bfloat16, 24),
        (torch.float8_e4m3fn, torch.bfloat16, 128),
        (torch.float8_e4m3fn, torch.float16, 16),
        (torch.float8_e4m3fn, torch.float32, 16),
        (torch.float8_e5m2, torch.bfloat16, 16),
    ],
)
@pytest.mark.parametrize("in_graph", [False, True])
def test_fp8_pages(pages: torch.dtype, dtype: torch.dtype, heads: int, in_graph: bool) -> None:
    case = replace(DECODE, heads=heads, dtype=pages, compute=dtype, in_graph=in_graph, padding=4 * in_graph)
    check(case, dtype)
    check(replace(case, raw=True, page_tokens=16), dtype)
    check(replace(case, rows=MIXED.rows, raw=True), dtype)


@pytest.mark.parametrize("limit", [2**27, 2**23])
def test_prompts_of_cudnn(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(latent_prefill, "MAX_ELEMENTS", limit)
    monkeypatch.setattr(paged_mla, "expanded_attention", None)
    case = replace(MIXED, rows=(RowCase(0, 4096), RowCase(0, 4096)), heads=3, raw=True, page_tokens=16)
    check(replace(case, dtype=torch.bfloat16, compute=torch.bfloat16), torch.bfloat16)


def test_long_rows_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_mla, "MAX_EXPANDED_ELEMENTS", 200 * 16 * 256)
    check(replace(MIXED, heads=16), torch.float32)


def test_dividing_a_step_does_not_wait_for_the_device() -> None:
    rows = StepRows.of([100, 3], [300, 3], [0, 1], "cuda")
    table = torch.zeros(2, 8, dtype=torch.int64, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = PagedLatentBackend().plan(PlanInputs(rows, [100, 3], [300, 3], [0, 1], table, 64, None), None)
        division = plan.divide(512)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert division is not None and division.short_T.tolist() == [100, 101, 102]


def check(case: Case, dtype: torch.dtype) -> None:
    got, want = run(case, PagedLatentBackend(), "cuda")
    assert (got - want).norm() < (2e-5 if dtype == torch.float32 else 1e-2) * want.norm()
