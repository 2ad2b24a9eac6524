"""Kernels that prepare a step, on the device."""

from __future__ import annotations

import pytest

from helpers.step_cases import check_build_rows, check_pages, check_store_tokens, check_write_entries
from pagerunner.ops.batch import build_rows, store_tokens
from pagerunner.ops.pages import copy_pages, fill_pages
from pagerunner.ops.tables import write_entries


@pytest.mark.parametrize(
    ("lengths", "padded_rows", "padded_tokens"),
    [([1], 1, 1), ([1] * 250, 256, 256), ([3, 1, 1, 140, 2], 30, 256), ([1] * 100 + [4000, 3000], 102, 8192)],
)
def test_rows_are_built_as_by_the_twin(lengths: list[int], padded_rows: int, padded_tokens: int) -> None:
    check_build_rows(build_rows, lengths, padded_rows, padded_tokens, "cuda")


@pytest.mark.parametrize("count", [2, 5000])
def test_tokens_and_entries_are_stored_where_the_twins_store_them(count: int) -> None:
    check_store_tokens(store_tokens, count, "cuda")
    check_write_entries(write_entries, count, "cuda")


def test_pages_are_filled_and_copied_as_by_the_twins() -> None:
    check_pages(fill_pages, copy_pages, [48, 4112, 16, 2359296, 38 * 2**20], "cuda")
