"""Kernels that prepare a step, in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.step_cases import (
    check_build_rows,
    check_drafting,
    check_host_words,
    check_pages,
    check_store_tokens,
    check_write_entries,
)

pytest.importorskip("triton")

from pagerunner.ops.batch import build_rows, store_tokens  # noqa: E402
from pagerunner.ops.drafting import build_pass, next_tokens, store_drafts  # noqa: E402
from pagerunner.ops.host_words import from_host, to_host  # noqa: E402
from pagerunner.ops.kernels import host_words  # noqa: E402
from pagerunner.ops.pages import copy_pages, fill_pages  # noqa: E402
from pagerunner.ops.tables import write_entries  # noqa: E402


@pytest.mark.parametrize(
    ("lengths", "padded_rows", "padded_tokens"),
    [
        ([1], 1, 1),
        ([1, 1, 1], 8, 8),
        ([1] * 130, 136, 136),
        ([5], 1, 16),
        ([3, 1, 1, 40, 2], 5, 47),
        ([3, 1, 1, 140, 2], 30, 256),
        ([2] * 129, 129, 300),
    ],
)
def test_rows_are_built_as_by_the_twin(lengths: list[int], padded_rows: int, padded_tokens: int) -> None:
    check_build_rows(build_rows.kernel, lengths, padded_rows, padded_tokens)


@pytest.mark.parametrize(
    ("lengths", "padded_rows", "stride"), [([1], 1, 2), ([3, 1, 2], 4, 4), ([4] * 70, 72, 4), ([2, 1] * 40, 80, 3)]
)
def test_rows_at_a_stride_are_built_as_by_the_twin(lengths: list[int], padded_rows: int, stride: int) -> None:
    check_build_rows(build_rows.kernel, lengths, padded_rows, padded_rows * stride, stride=stride)


@pytest.mark.parametrize("count", [2, 300])
def test_tokens_and_entries_are_stored_where_the_twins_store_them(count: int) -> None:
    check_store_tokens(store_tokens.kernel, count)
    check_write_entries(write_entries.kernel, count)


@pytest.mark.parametrize(("rows", "padding"), [([1], 0), ([4, 1, 4], 5), ([40, 2, 300, 1], 1), ([1] * 140, 4)])
def test_passes_of_drafters_are_made_as_by_the_twins(rows: list[int], padding: int) -> None:
    check_drafting(next_tokens.kernel, build_pass.kernel, store_drafts.kernel, rows, padding)


@pytest.mark.parametrize("sizes", [[16], [48, 4112, 16, 32784]])
def test_pages_are_filled_and_copied_as_by_the_twins(sizes: list[int]) -> None:
    check_pages(fill_pages.kernel, copy_pages.kernel, sizes)


@pytest.mark.parametrize("words", [1, 300, 1025])
def test_words_come_from_the_host_and_go_back_as_by_the_twins(words: int) -> None:
    check_host_words(from_host.kernel, to_host.kernel, words)


def test_words_go_only_between_tensors_that_are_alike() -> None:
    for there, here in ((torch.zeros(2), torch.zeros(3)), (torch.zeros(2), torch.zeros(1, dtype=torch.int64))):
        with pytest.raises(AssertionError):
            from_host.kernel(there, here)
    with pytest.raises(AssertionError):
        to_host.kernel(torch.zeros(8)[::2], torch.zeros(4))


def test_a_kernel_that_was_launched_is_launched_again_by_its_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[Any, ...]] = []
    kernel = SimpleNamespace(run=lambda *given: launches.append(given), function=5, packed_metadata=(4, 1, 0))
    monkeypatch.setattr(host_words, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda at: 9)))
    a, b, c, d = torch.zeros(1030), torch.zeros(1030), torch.zeros(4), torch.zeros(4)
    monkeypatch.setitem(host_words._compiled, (a.device.index, True), kernel)
    monkeypatch.setitem(host_words._compiled, (a.device.index, False), kernel)
    from_host.kernel(b, a)
    to_host.kernel(a, b, c, d)
    ends, more = (a.data_ptr(), b.data_ptr(), 1030), (c.data_ptr(), d.data_ptr(), 4)
    begin = (9, 5, (4, 1, 0), None, None, None)
    assert launches == [
        (3, 1, 1, *begin, *ends, *ends, True, host_words.BLOCK, None),
        (3, 2, 1, *begin, *ends, *more, False, host_words.BLOCK, None),
    ]
