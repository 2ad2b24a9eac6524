"""Products by tiles in equal shares against their twins, in Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch

from helpers import interpreter_floats
from helpers.effort import by_days
from helpers.stored_cases import stored
from pagerunner.ops.kernels import linear_shares as kernels
from pagerunner.ops.kernels.linear_parts import Product
from pagerunner.ops.kernels.linear_tiles import TilesConfig, in_order
from pagerunner.ops.linear import linear

interpreter_floats.install()
FORMS = ["fp8 row", "fp8 block", "int4 bf16 128", "int4 f16 32 zeros", "e2m1 e8m0 32", "e2m1 e4m3 16 rows"]
PLACES = list(itertools.product([1, 2, 3, 4, 5, 7, 8, 13, 40], [32, 24]))


@pytest.mark.days(5)
@pytest.mark.parametrize(("form", "shape"), by_days(FORMS, PLACES, each=3))
def test_shares(form, shape, monkeypatch):
    """Eight tiles, of 32 or of 16 + 8 tokens and three or six steps: none, some or all of them are cut, at their beginning, at their end, or both."""
    places, high = shape
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: places)
    matrix = stored(form, 200, 384)
    x, bias = torch.randn(40, 384), torch.randn(200)
    for add in (False, True):
        out = torch.randn(40, 208)[:, :200] if add else torch.full((40, 200), float("nan"))
        want = linear.twin(x, matrix, bias) + (out if add else 0)
        kernels.run_shares(
            Product(in_order(x, matrix), matrix, bias, out, add=add), TilesConfig(high, 1, 4, 2, shares=1)
        )
        assert float((out - want).norm() / want.norm()) < 1e-5
