"""Paged attention's kernels on the device at real shapes: NaN wherever nothing was written, padding, rings, fp8, float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.attention_cases import Case, check_sampled, plain
from helpers.borders import set_borders
from helpers.paged_kernels import (
    check_attention,
    check_drafts,
    check_projected,
    check_projected_drafts,
    check_store,
)
from pagerunner.attention.base import Reach
from pagerunner.attention.paged import PagedBackend

pytest.importorskip("triton")

from pagerunner.ops.kernels.linear.linear_wide import has_gluon  # noqa: E402
from pagerunner.ops.kernels.paged import paged_attention as kernels  # noqa: E402
from pagerunner.ops.kernels.paged import paged_dense  # noqa: E402

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
ONE = (plain(3, 1), plain(0, 1), plain(1700, 1), *[plain(20 + 37 * i, 1) for i in range(30)])
MIXED = (plain(3, 1), plain(0, 5), plain(400, 33), plain(20, 1), plain(0, 300), plain(512, 200))
SHARED = (plain(1100, 1), *[plain(1030 + i, 1, 64) for i in range(40)])
CLOSE = {"atol": 2e-2, "rtol": 2e-2}


@pytest.mark.parametrize("page", [1, 16, 128])
@pytest.mark.parametrize("rows", [ONE, MIXED], ids=["one", "mixed"])
def test_float32_is_exact(page: int, rows: tuple) -> None:
    check_attention(Case(rows, page, 2, 2, 64), "cuda")


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3, E5M2])
@pytest.mark.parametrize("rows", [ONE, MIXED, SHARED], ids=["one", "mixed", "shared"])
def test_low_precision_stays_close(rows: tuple, kv_dtype: torch.dtype) -> None:
    check_attention(Case(rows, 16, 8, 4, 128, dtype=BF16, kv_dtype=kv_dtype, padding=5), "cuda", **CLOSE)


@pytest.mark.parametrize("dim", [64, 80, 256])
@pytest.mark.parametrize("group", [1, 7, 16])
def test_heads_of_many_shapes(dim: int, group: int) -> None:
    for rows in (ONE[:8], MIXED):
        case = Case(rows, 48, 2, group, dim, dtype=BF16, kv_dtype=BF16, sinks=True, softcap=3.0)
        check_attention(case, "cuda", **CLOSE)


@pytest.mark.parametrize("reach", [Reach(1), Reach(40), Reach(300), Reach(64, chunked=True)])
@pytest.mark.parametrize("rows", [ONE, MIXED], ids=["one", "mixed"])
def test_windows_and_chunks(reach: Reach, rows: tuple) -> None:
    check_attention(Case(rows, 16, 8, 2, 128, dtype=BF16, kv_dtype=BF16, reach=reach, padding=3), "cuda", **CLOSE)


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("rows", [ONE[:8], ONE, MIXED], ids=["few", "one", "mixed"])
def test_from_the_projection_on(rows: tuple, kv_dtype: torch.dtype) -> None:
    case = Case(rows, 16, 8, 2, 128, dtype=BF16, kv_dtype=kv_dtype)
    check_projected(case, "cuda", atol=6e-2, rtol=0.26 if kv_dtype == E4M3 else 3e-2)


@pytest.mark.parametrize("reach", [None, Reach(128), Reach(64, chunked=True)], ids=["full", "window", "chunk"])
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim"),
    [(8, 4, 128), (4, 8, 128), (2, 16, 128), (8, 8, 64), (2, 1, 80), (1, 16, 256), (1, 12, 80)],
)
@pytest.mark.parametrize("rows", [1, 3, 15])
def test_few_rows(rows: int, kv_heads: int, group: int, dim: int, reach: Reach | None) -> None:
    """Contexts from nothing to more than all programs hold at once, with sinks or without."""
    starts = [300, 0, 40000, 5000, 1, 63, 64, 65, 127, 128, 129, 1000, 2000, 16, 15][:rows]
    sinks, softcap = rows == 15, 3.0 if rows == 3 else 0.0
    for some in (starts, starts[::-1]):
        cases = tuple(plain(start, 1) for start in some)
        case = Case(
            cases, 16, kv_heads, group, dim, dtype=BF16, kv_dtype=BF16, reach=reach, sinks=sinks, softcap=softcap
        )
        check_projected(case, "cuda", atol=6e-2, rtol=3e-2)


@pytest.mark.parametrize(("rows", "kv_heads", "group"), [(16, 4, 4), (17, 2, 8), (32, 2, 4), (64, 1, 8)])
def test_more_rows_of_few_heads(monkeypatch: pytest.MonkeyPatch, rows: int, kv_heads: int, group: int) -> None:
    """Where nobody looks for pages that all rows share."""
    plan = PagedBackend.plan
    monkeypatch.setattr(PagedBackend, "plan", lambda *args: replace(plan(*args), sharing=False))
    for starts in ([170 + 7 * i for i in range(rows)], [0, 20000, 64, *[997 * i % 3000 for i in range(rows)]][:rows]):
        cases = tuple(plain(start, 1) for start in starts)
        case = Case(cases, 16, kv_heads, group, 128, dtype=BF16, kv_dtype=BF16, padding=int(rows == 17))
        check_projected(case, "cuda", atol=6e-2, rtol=3e-2)


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("reach", [None, Reach(1000), Reach(2048, chunked=True)], ids=["full", "window", "chunk"])
@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(8, 4, 128), (1, 16, 64), (2, 1, 80), (1, 8, 256)])
def test_few_tokens_over_many_keys(
    kv_heads: int, group: int, dim: int, reach: Reach | None, kv_dtype: torch.dtype
) -> None:
    """Keys of a row's blocks are divided among programs, beside short rows and rows of one token."""
    for tokens in (2, 16, 60, 100):
        rows = (plain(8176, tokens), plain(0, 5), plain(3000, 1), plain(40, 2), plain(1023, 7))
        for some in (rows[:1], rows):
            case = Case(some, 16, kv_heads, group, dim, dtype=BF16, kv_dtype=kv_dtype, reach=reach, sinks=tokens == 16)
            check_attention(replace(case, padding=3), "cuda", **CLOSE)


@pytest.mark.parametrize(("kv_heads", "group", "dim", "window"), [(8, 8, 64, 128), (8, 4, 128, 64), (8, 8, 64, 129)])
@pytest.mark.parametrize("rows", [16, 17, 140, 300])
def test_windows_of_many_rows(rows: int, kv_heads: int, group: int, dim: int, window: int) -> None:
    """Windows of a tile of keys, and one key longer."""
    cases = tuple(
        plain(start, 1) for start in ([0, 1, 127, 128, 129, 63, 64, 5000] + [97 * i % 700 for i in range(rows)])[:rows]
    )
    case = Case(cases, 16, kv_heads, group, dim, dtype=BF16, kv_dtype=BF16, reach=Reach(window), sinks=True, padding=5)
    check_projected(case, "cuda", atol=6e-2, rtol=3e-2)


@pytest.mark.parametrize("static", [False, True], ids=["scales of pages", "scales of the layer"])
@pytest.mark.parametrize("loud", [1.0, 500.0, 1e-4])
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("reach", [None, Reach(40)], ids=["full", "window"])
def test_fp8_scales_from_the_projection_on(
    reach: Reach | None, kv_dtype: torch.dtype, loud: float, static: bool
) -> None:
    kept = {} if reach is None else {"reach": reach}
    case = Case(ONE[:8], 16, 2, 2, 64, kv_dtype=kv_dtype, **kept)
    step = 0.13 if kv_dtype == E4M3 else 0.26  # of the format; a sum in another order may fall on either side
    check_projected(case, "cuda", atol=1e-4, rtol=step, loud=loud, static=static)


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("sampled", [[], [0, 5, 38, 39, 339, 539], list(range(100, 180))], ids=["none", "few", "many"])
def test_sampled_tokens_alone(sampled: list[int], kv_dtype: torch.dtype) -> None:
    case = Case(MIXED, 16, 8, 2, 128, dtype=BF16, kv_dtype=kv_dtype)
    check_sampled(case, sampled, PagedBackend(), "cuda", **CLOSE)


@pytest.mark.parametrize("kv_dtype", [torch.float32, BF16, E4M3, E5M2])
def test_stored_as_the_twin_stores(kv_dtype: torch.dtype) -> None:
    dtype = torch.float32 if kv_dtype == torch.float32 else BF16
    for fused in (True, False):
        check_store(Case(MIXED, 16, 8, 2, 128, dtype=dtype, kv_dtype=kv_dtype), "cuda", fused=fused)


def test_a_long_row_in_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 64, and of 128 in no groups, where the kernel in Gluon isn't."""
    monkeypatch.setattr(kernels._Call, "_is_wide", lambda *_: False)
    check_attention(Case((plain(0, 4096),), 16, 2, 2, 64, dtype=BF16, kv_dtype=BF16), "cuda", **CLOSE)
    rows = (plain(0, 4096), plain(0, 4096), plain(0, 8192))
    check_attention(Case(rows, 16, 2, 1, 128, dtype=BF16, kv_dtype=BF16), "cuda", **CLOSE)


LONG = (
    (plain(0, 700), plain(0, 1), plain(0, 300), plain(0, 33)),
    (plain(700, 1500), plain(3, 1), plain(2001, 600), plain(128, 257), plain(0, 513), plain(5, 2)),
    (plain(1000, 4000),),
)


@pytest.mark.parametrize(("kv_heads", "group"), [(8, 2), (8, 4), (4, 8), (1, 32), (8, 5), (4, 7), (2, 3)])
@pytest.mark.parametrize(
    ("page", "dtype", "kv_dtype"),
    [(16, BF16, BF16), (64, torch.float16, torch.float16), (128, BF16, E4M3), (16, torch.float16, E5M2)],
)
def test_long_rows_in_gluon(
    monkeypatch: pytest.MonkeyPatch, page: int, dtype: torch.dtype, kv_dtype: torch.dtype, kv_heads: int, group: int
) -> None:
    """New tokens, those after a past, and one row, beside rows that decode, and padding. Much of a past in fp8 is copied a few heads at a time."""
    runs: list[bool] = []
    run = kernels.paged_prefill_wide.run
    monkeypatch.setattr(
        kernels.paged_prefill_wide,
        "run",
        lambda *args, past, **kept: runs.append(past) or run(*args, past=past, **kept),
    )
    monkeypatch.setattr(paged_dense, "MOST_ELEMENTS", 100 * 2 * 128 * 128)  # in fp8: of 24 tiles four heads, of 8 all
    for rows in LONG:  # together, as they have kernels in common
        past = rows is not LONG[0]
        case = Case(rows, page, kv_heads, group, 128, dtype=dtype, kv_dtype=kv_dtype, lead=16, padding=3 if past else 0)
        check_attention(case, "cuda", **CLOSE)
        turns = 2 if rows is LONG[1] and kv_dtype in (E4M3, E5M2) and kv_heads == 8 else 1
        assert runs == [past] * (2 * turns if has_gluon(torch.device("cuda")) else 0)
        runs.clear()


HEADS = [(8, 4, 64), (2, 7, 64), (8, 2, 80), (3, 3, 80), (8, 4, 96), (2, 5, 112), (4, 1, 128)]


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize(("kv_heads", "group", "dim"), [*HEADS, (4, 6, 256), (8, 2, 256), (4, 1, 256), (3, 3, 192)])
def test_long_rows_of_other_heads(
    monkeypatch: pytest.MonkeyPatch, kv_heads: int, group: int, dim: int, kv_dtype: torch.dtype
) -> None:
    """Of other sizes than 128, and in no groups: what is read beyond a head's end is the next head's."""
    runs, run = [], kernels.paged_prefill_wide.run
    monkeypatch.setattr(
        kernels.paged_prefill_wide,
        "run",
        lambda *args, past, **kept: runs.append(past) or run(*args, past=past, **kept),
    )
    for rows in LONG:
        case = Case(rows, 16, kv_heads, group, dim, dtype=BF16, kv_dtype=kv_dtype, lead=16, padding=3)
        check_attention(case, "cuda", **CLOSE)
    assert len(runs) == (6 if has_gluon(torch.device("cuda")) else 0)


@pytest.mark.parametrize("reach", [None, Reach(512), Reach(1001), Reach(700, chunked=True)], ids=str)
@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(8, 8, 64), (8, 2, 128), (1, 5, 128), (4, 2, 256), (1, 4, 256)])
def test_long_rows_with_windows_and_sinks(kv_heads: int, group: int, dim: int, reach: Reach | None) -> None:
    """Few heads' blocks are divided."""
    for rows in LONG:
        case = Case(rows, 32, kv_heads, group, dim, dtype=BF16, kv_dtype=BF16, reach=reach, sinks=True, lead=16)
        check_attention(case, "cuda", **CLOSE)


DRAFTS = (plain(1700, 4), plain(0, 1), plain(3, 2), plain(126, 4), plain(0, 3))
MORE_DRAFTS = (*DRAFTS, *[plain(20 + 37 * i, 1 + i % 4) for i in range(90)])
ROWS = {"few": DRAFTS, "many": MORE_DRAFTS}


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3, E5M2])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(8, 4, 128), (4, 8, 128), (8, 8, 64), (2, 8, 256), (3, 1, 80)])
def test_strided_batches(kv_heads: int, group: int, dim: int, rows: tuple, kv_dtype: torch.dtype) -> None:
    case = Case(rows, 16, kv_heads, group, dim, dtype=BF16, kv_dtype=kv_dtype, padding=3)
    check_drafts(case, 4, "cuda", **CLOSE)


@pytest.mark.parametrize(
    ("group", "stride"), [(2, 3), (4, 2), (4, 5), (4, 8), (8, 3), (8, 8), (16, 4), (16, 8), (32, 2), (32, 5)]
)
@pytest.mark.parametrize("reach", [None, Reach(128), Reach(64, chunked=True)], ids=["full", "window", "chunk"])
def test_strides_and_groups(group: int, stride: int, reach: Reach | None) -> None:
    rows = tuple(plain(start, 1 + i % stride) for i, start in enumerate((62, 0, 1000, 63, 127, 128, 300)))
    case = Case(rows, 16, 2, group, 128, dtype=BF16, kv_dtype=BF16, reach=reach, sinks=True, softcap=3.0)
    check_drafts(case, stride, "cuda", **CLOSE)
    check_projected_drafts(case, stride, "cuda", atol=6e-2, rtol=3e-2)


@pytest.mark.parametrize(("group", "stride"), [(4, 2), (4, 4), (4, 8), (8, 8), (1, 8), (16, 4)])
@pytest.mark.parametrize("dim", [64, 128])
def test_drafts_get_what_rows_of_one_token_get(
    monkeypatch: pytest.MonkeyPatch, group: int, stride: int, dim: int
) -> None:
    """Bit for bit, where slices cut no row: as many multiprocessors as make one slice."""
    monkeypatch.setattr(kernels, "multiprocessors", lambda _: 1)
    set_borders(monkeypatch, "attention", few_rows=1)
    rows = tuple(plain(start, stride) for start in (0, 62, 500, 127, 1300))
    check_drafts(Case(rows, 16, 4, group, dim, dtype=BF16, kv_dtype=BF16), stride, "cuda", **CLOSE, equal=True)


@pytest.mark.parametrize("stride", [4, 8])
def test_drafts_store_fp8_pages(stride: int) -> None:
    case = Case(DRAFTS, 16, 8, 4, 128, dtype=BF16, kv_dtype=E4M3, padding=2)
    check_projected_drafts(case, stride, "cuda", atol=6e-2, rtol=0.26)
