"""The paged backend on its twins: the cases of every backend, and what only backends that read tables meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.attention_cases import Case, cases, check_sampled, plain, run
from helpers.effort import effort
from pagerunner.attention.base import PlanInputs, Reach
from pagerunner.attention.paged import PagedBackend, usual_query_len
from pagerunner.batch import StepRows
from pagerunner.memory.specs import FullKV, LatentKV, WindowKV


@settings(max_examples=effort(33, 200), deadline=None)
@given(cases, st.sampled_from([0, 3]), st.sampled_from([0, 2]))
def test_equals_attention_row_by_row(case: Case, padding: int, spare: int) -> None:
    got, want = run(replace(case, padding=padding, spare_columns=spare), PagedBackend())
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("reach", [Reach(20), Reach(300), Reach(100, chunked=True)])
def test_long_rows_in_windows(reach: Reach) -> None:
    case = Case((plain(90, 600), plain(0, 700), plain(0, 20), plain(99, 1)), 16, 2, 2, 8, reach=reach)
    got, want = run(case, PagedBackend())
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_pages_of_other_dtypes(kv_dtype: torch.dtype) -> None:
    rows = (plain(0, 40), plain(600, 1), plain(100, 50), plain(33, 3))
    got, want = run(Case(rows, 16, 2, 2, 32, kv_dtype=kv_dtype), PagedBackend())
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_says_what_it_does_not_serve() -> None:
    backend = PagedBackend()
    assert backend.capabilities.refusal(FullKV(2, 16, "float32", 8), "cpu", torch.float32) is None
    assert backend.capabilities.refusal(WindowKV(2, 16, "fp8_e4m3", window=4), "cpu", torch.bfloat16) is None
    reasons = [
        (LatentKV(2, 16, "float32"), torch.float32, "LatentKV"),
        (FullKV(2, 512, "float32"), torch.float32, "512"),
        (FullKV(2, 16, "float32"), torch.float64, "float64"),
    ]
    for spec, dtype, word in reasons:
        reason = backend.capabilities.refusal(spec, "cpu", dtype)
        assert reason is not None and word in reason


@pytest.mark.parametrize(
    ("lens", "usual"),
    [
        ([], 1),
        ([1, 1, 1], 1),
        ([7], 7),
        ([1] * 200 + [2048] * 4, 2048),  # rows that decode don't count
        ([2080] + [32] * 192, 32),  # a prefix and those who wait for it
        ([100, 300], 300),
        ([200, 200], 200),
    ],
)
def test_the_usual_query_length_is_that_of_most_new_tokens(lens: list[int], usual: int) -> None:
    assert usual_query_len(lens) == usual


@pytest.mark.parametrize(
    ("queries", "lengths", "past"),
    [([3, 1, 2], [9, 7, 2], (6, 0)), ([1, 1, 1], [9, 7, 2], ()), ([1, 1, 1], (), None), ((), (), None)],
)
def test_the_past_of_rows_with_several_tokens(
    queries: Sequence[int], lengths: Sequence[int], past: tuple[int, ...] | None
) -> None:
    """An eager pass of a drafter knows how many tokens rows have, and not their lengths. A capture knows neither."""
    rows = StepRows.of(queries or [1, 1, 1], lengths or [5, 5, 5], [0, 1, 2], torch.device("cpu"))
    inputs = PlanInputs(rows, queries, lengths, (), torch.zeros(3, 4, dtype=torch.int64), 16, None)
    assert PagedBackend().plan(inputs, None).past == past


@pytest.mark.parametrize("sampled", [[], [0], [70], [0, 39, 40, 70, 73], [72, 2]])
@pytest.mark.parametrize("reach", [None, Reach(20), Reach(32, chunked=True)])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
def test_sampled_tokens_alone_see_what_they_see_among_all(
    sampled: list[int], reach: Reach | None, kv_dtype: torch.dtype
) -> None:
    case = Case((plain(0, 40), plain(60, 31), plain(33, 3)), 16, 2, 2, 8, kv_dtype=kv_dtype, reach=reach)
    check_sampled(case, sampled, PagedBackend(), atol=2e-5, rtol=2e-5)
