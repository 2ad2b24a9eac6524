"""Log-probabilities: exact enough, of equal alternatives the first ones, and the same bits whatever rows stand beside a row."""

from __future__ import annotations

import pytest
import torch

from helpers.logprob_cases import check_best, check_equal, check_rows
from pagerunner.ops.logprobs import gather_logprobs

BOTH = pytest.mark.parametrize("run", [gather_logprobs.twin, gather_logprobs.kernel])


@BOTH
@pytest.mark.parametrize(("size", "dtype"), [(1, torch.float32), (511, torch.bfloat16), (4097, torch.float32)])
def test_rows(run, size, dtype):
    check_rows(run, size, dtype)


@BOTH
def test_the_best_of_a_large_vocabulary(run):
    check_best(run, 9000, 20)
    check_best(run, 9000, 1)


@BOTH
def test_few_runs_and_equal_logits(run):
    """The best are looked for one after another."""
    check_best(run, 300, 5)
    check_equal(run, 5000)


@BOTH
def test_nan_is_told(run):
    x = torch.zeros(2, 600)
    x[1, 599] = float("nan")
    assert run(x, None, torch.tensor([0, 0]), 0)[1].isnan().tolist() == [[False], [True]]


@BOTH
def test_no_rows(run):
    found = run(torch.zeros(3, 50), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), 4)
    assert [x.shape for x in found] == [(0, 5), (0, 5)]
