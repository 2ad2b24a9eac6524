"""A row's logarithm of a sum of exponentials: exact enough, and the same bits whatever rows stand beside it."""

from __future__ import annotations

import pytest
import torch

from pagerunner.ops.logsumexp import row_logsumexp


@pytest.mark.parametrize("run", [row_logsumexp.twin, row_logsumexp.kernel])
@pytest.mark.parametrize("size", [1, 511, 2048, 5000])
def test_rows(run, size):
    x_LV = torch.randn(7, size) * 4
    x_LV[2, : size // 2] = float("-inf")
    found_L = run(x_LV)
    torch.testing.assert_close(found_L, x_LV.double().logsumexp(-1).float(), rtol=1e-6, atol=1e-6)
    assert all(torch.equal(run(x_LV[row : row + 1]), found_L[row : row + 1]) for row in range(7))
    assert torch.equal(run(x_LV[:, ::2][:, :size]), run(x_LV[:, ::2].contiguous()))


@pytest.mark.parametrize("run", [row_logsumexp.twin, row_logsumexp.kernel])
def test_nan_is_told(run):
    x_LV = torch.zeros(2, 600)
    x_LV[1, 599] = float("nan")
    assert run(x_LV).isnan().tolist() == [False, True]
