"""Kernels of drafts, in Triton's interpreter."""

from __future__ import annotations

import pytest

from helpers.draft_cases import check_accept, check_ngrams

pytest.importorskip("triton")

from pagerunner.ops.accept import accept  # noqa: E402
from pagerunner.ops.ngram import draft_ngrams  # noqa: E402


@pytest.mark.parametrize("by_chance", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 2), (7, 4), (20, 6)])
def test_the_kernel_accepts_what_the_twin_does(rows: int, width: int, by_chance: bool) -> None:
    check_accept(accept.kernel, rows, width, by_chance=by_chance)


@pytest.mark.parametrize(
    ("rows", "width", "length", "tokens", "count", "least", "most"),
    [(1, 1, 3, 2, 3, 1, 2), (9, 4, 40, 3, 5, 2, 4), (5, 2, 2200, 2, 7, 3, 12), (4, 3, 30, 2, 0, 1, 5), (3, 3, 20, 9, 2, 5, 5)],
)  # fmt: skip
def test_the_kernel_drafts_what_the_twin_does(
    rows: int, width: int, length: int, tokens: int, count: int, least: int, most: int
) -> None:
    check_ngrams(draft_ngrams.kernel, rows, width, length=length, tokens=tokens, count=count, least=least, most=most)
