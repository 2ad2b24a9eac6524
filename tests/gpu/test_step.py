"""Kernels that prepare a step, on the device."""

from __future__ import annotations

import pytest

from helpers.step_cases import check_build_rows, check_drafting, check_pages, check_store_tokens, check_write_entries
from pagerunner.ops.batch import build_rows, store_tokens
from pagerunner.ops.drafting import build_pass, next_tokens, store_drafts
from pagerunner.ops.pages import copy_pages, fill_pages
from pagerunner.ops.tables import write_entries


@pytest.mark.parametrize(("rows", "padding"), [([1], 0), ([4, 1, 4], 5), ([40, 2, 300, 1], 1), ([4] * 256, 0)])
def test_passes_of_drafters_are_made_as_by_the_twins(rows: list[int], padding: int) -> None:
    check_drafting(next_tokens, build_pass, store_drafts, rows, padding, "cuda")


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
