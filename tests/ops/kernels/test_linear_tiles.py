"""Products with stored matrices by tiles against their twins, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from helpers import interpreter_floats
from helpers.effort import by_days
from helpers.stored_cases import stored
from pagerunner.ops.kernels import linear_tiles as kernels
from pagerunner.ops.kernels.linear_tiles import Tiles, run_tiles, serves
from pagerunner.ops.linear import linear

interpreter_floats.install()
FORMS = [
    "fp8 row", "fp8 block", "int8 row", "int8 group 128", "int4 bf16 128", "int4 f16 64 zeros", "int4 f16 32 zeros", "int4 f32 all",
    "int4 f32 all zeros", "e2m1 e8m0 32", "e2m1 e4m3 16 rows",
]  # fmt: skip


ADDED_AND_BIAS = [(False, True), (True, False), (True, True), (False, False)]


@pytest.mark.parametrize(("form", "parts", "extras"), by_days(FORMS, [1, 3], ADDED_AND_BIAS))
def test_tiles(form, parts, extras):
    add, bias = extras
    tiles = Tiles(64, 32, 128 if "block" in form or "128" in form else 64, 4, 2, parts)
    matrix = stored(form, 72, 384)
    x, bias_O = torch.randn(70, 400)[:, 8:-8], torch.randn(72) if bias else None
    out = torch.randn(70, 80)[:, :72] if add else torch.full((70, 72), float("nan"))
    want = linear.twin(x, matrix, bias_O) + (out if add else 0)
    assert serves(x, matrix, tiles)
    run_tiles(x, matrix, bias_O, out, tiles, add=add)
    assert float((out - want).norm() / want.norm()) < 1e-3  # scales of numbers are rounded to float32 alone


@pytest.mark.parametrize("form", ["fp8 row", "int4 f16 32 zeros", "e2m1 e8m0 32", "int8 row"])
@pytest.mark.parametrize("parts", [1, 2])
def test_input_features_that_no_block_divides(form, parts):
    matrix = stored(form, 40, 288)
    x = torch.randn(5, 288)
    out = torch.full((5, 40), float("nan"))
    run_tiles(x, matrix, None, out, Tiles(16, 16, 128, 4, 2, parts))
    want = linear.twin(x, matrix)
    assert float((out - want).norm() / want.norm()) < 1e-5


def test_groups_that_a_block_cuts_are_for_others():
    x = torch.randn(5, 288)
    assert not serves(x, stored("int4 f16 96", 40, 288), Tiles(16, 16, 64, 4, 2))
    assert serves(x, stored("int4 f16 96", 40, 288), Tiles(16, 16, 32, 4, 2))
    assert not serves(x, stored("fp8 block", 40, 288), Tiles(16, 16, 256, 4, 2))


def test_half_precision():
    matrix = stored("int4 f16 32 zeros", 40, 256)
    x = torch.randn(9, 256, dtype=torch.float16)
    out = torch.empty(9, 40, dtype=torch.float16)
    run_tiles(x, matrix, None, out, Tiles(16, 16, 64, 4, 2, 2))
    want = x.float() @ linear.twin(torch.eye(256), matrix)
    assert float((out.float() - want).norm() / want.norm()) < 2e-3


def test_input_features_are_divided_where_tiles_leave_multiprocessors_idle(monkeypatch):
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 132)
    device = torch.device("cpu")
    few, wide = stored("int4 f16 128", 512, 4096), stored("int4 f16 128", 16640, 128)
    assert [kernels.tiles_for(tokens, few, device).parts for tokens in (17, 64, 65, 192)] == [4, 4, 4, 4]
    assert [kernels.tiles_for(tokens, wide, device).parts for tokens in (17, 192)] == [1, 1]
    assert kernels.tiles_for(64, few, device).tokens == 64 and kernels.tiles_for(65, few, device).tokens == 128
