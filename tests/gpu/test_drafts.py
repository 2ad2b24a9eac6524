"""Kernels of drafts, on the device."""

from __future__ import annotations

import pytest

from helpers.draft_cases import check_accept, check_ngrams
from pagerunner.ops.accept import accept
from pagerunner.ops.ngram import draft_ngrams


@pytest.mark.parametrize("by_chance", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 2), (7, 4), (256, 8)])
def test_the_kernel_accepts_what_the_twin_does(rows: int, width: int, by_chance: bool) -> None:
    check_accept(accept, rows, width, by_chance=by_chance, device="cuda")


@pytest.mark.parametrize(
    ("rows", "width", "length", "tokens", "count", "least", "most"),
    [(1, 1, 3, 2, 3, 1, 2), (64, 4, 900, 3, 5, 2, 5), (8, 8, 9000, 2, 7, 3, 12), (256, 3, 30, 2, 0, 1, 5)],
)
def test_the_kernel_drafts_what_the_twin_does(
    rows: int, width: int, length: int, tokens: int, count: int, least: int, most: int
) -> None:
    check_ngrams(
        draft_ngrams, rows, width, length=length, tokens=tokens, count=count, least=least, most=most, device="cuda"
    )
