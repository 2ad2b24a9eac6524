"""Products with stored matrices by tiles against their twins, in Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch

from helpers import interpreter_floats
from helpers.effort import by_days
from helpers.stored_cases import stored
from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.kernels.linear import linear_tiles as kernels
from pagerunner.ops.kernels.linear.linear_parts import Product
from pagerunner.ops.kernels.linear.linear_tiles import TilesConfig, in_order, run_tiles, serves
from pagerunner.ops.linear import Norm, linear

interpreter_floats.install()
FORMS = [
    "fp8 row", "fp8 block", "int8 row", "int8 group 128", "int4 bf16 128", "int4 f16 64 zeros", "int4 f16 32 zeros", "int4 f32 all",
    "int4 f32 all zeros", "e2m1 e8m0 32", "e2m1 e4m3 16 rows",
]  # fmt: skip


ADDED_AND_BIAS = [(False, True), (True, False), (True, True), (False, False)]
PLACES = list(itertools.product([32, 24], ADDED_AND_BIAS))  # rows of a tile, and what the product is added to


@pytest.mark.parametrize(("form", "parts", "place"), by_days(FORMS, [1, 3], PLACES))
def test_tiles(form, parts, place):
    """Tiles of 32 or of 16 + 8 tokens."""
    high, (add, bias) = place
    matrix = stored(form, 200, 384)
    x, bias_O = torch.randn(40, 400)[:, 8:-8], torch.randn(200) if bias else None
    out = torch.randn(40, 208)[:, :200] if add else torch.full((40, 200), float("nan"))
    want = linear.twin(x, matrix, bias_O) + (out if add else 0)
    assert serves(matrix)
    run_tiles(Product(in_order(x, matrix), matrix, bias_O, out, add=add), TilesConfig(high, 2, 4, 2, parts))
    assert float((out - want).norm() / want.norm()) < 1e-3  # scales of numbers are rounded to float32 alone


@pytest.mark.parametrize("form", ["fp8 row", "int4 f16 32 zeros", "e2m1 e8m0 32", "e2m1 e4m3 16 rows", "int8 row"])
@pytest.mark.parametrize("parts", [1, 2])
def test_input_features_that_no_step_divides(form, parts):
    matrix = stored(form, 40, 288)
    x = torch.randn(5, 288)
    out = torch.full((5, 40), float("nan"))
    run_tiles(Product(in_order(x, matrix), matrix, None, out), TilesConfig(16, 1, 8, 2, parts))
    want = linear.twin(x, matrix)
    assert float((out - want).norm() / want.norm()) < 1e-5


def test_which_groups_are_served():
    assert not serves(stored("int4 f16 96", 40, 384))
    assert not serves(stored("int4 f32 32", 40, 384)), "the scales of 128 columns are more than a word"
    assert serves(stored("int4 f32 64", 40, 384)) and serves(stored("int4 f16 128", 40, 384))


@pytest.mark.parametrize(("form", "inputs"), [("int8 row", 320), ("int4 f16 32", 320), ("int4 f16 128", 256)])
def test_the_order_keeps_every_input_once(form, inputs):
    matrix = stored(form, 16, inputs)
    x = torch.arange(1.0, 2 * inputs + 1).reshape(2, inputs)
    ordered = in_order(x, matrix)
    step = 64 if form == "int8 row" else 128
    assert ordered.shape == (2, -(-inputs // step) * step)
    for first in range(0, inputs, step):
        kept = [sorted(row[first : first + step].tolist()) for row in (*ordered, *torch.nn.functional.pad(x, (0, 64)))]
        assert kept[:2] == kept[2:]
    if step == 128:
        assert ordered[0, :16].tolist() == [1, 2, 33, 34, 65, 66, 97, 98, 3, 4, 35, 36, 67, 68, 99, 100]


def test_norm_and_gate_come_before_the_order():
    matrix, plain = stored("int4 f16 32", 16, 320), stored("int4 f16 32", 16, 320)
    x, norm = torch.randn(3, 320).bfloat16(), Norm(torch.rand(320).bfloat16(), 1e-6)
    for offset in (False, True):
        norm = norm._replace(offset=offset)
        assert torch.equal(in_order(x, matrix, norm), in_order(norm(x), plain))
    gate_up = torch.randn(3, 640).half()
    assert torch.equal(in_order(gate_up, matrix, gated=True), in_order(silu_and_mul(gate_up), plain))


def test_half_precision():
    matrix = stored("int4 f16 32 zeros", 40, 256)
    x = torch.randn(9, 256, dtype=torch.float16)
    out = torch.empty(9, 40, dtype=torch.float16)
    run_tiles(Product(in_order(x, matrix), matrix, None, out), TilesConfig(16, 1, 4, 2, 2))
    want = x.float() @ linear.twin(torch.eye(256), matrix)
    assert float((out.float() - want).norm() / want.norm()) < 2e-3


def test_input_features_are_divided_where_tiles_leave_multiprocessors_idle(monkeypatch):
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 132)
    device = torch.device("cpu")
    few, wide = stored("int4 f16 128", 512, 4096), stored("int4 f16 128", 33280, 128)
    assert [kernels.tiles_config(tokens, few, device).parts for tokens in (17, 64, 65, 192)] == [4, 4, 4, 4]
    assert [kernels.tiles_config(tokens, wide, device).parts for tokens in (17, 64, 192)] == [1, 1, 1]


@pytest.mark.parametrize("form", ["int4 f32 64 zeros", "int4 f16 32", "e2m1 e8m0 32", "e2m1 e4m3 16"])
def test_weights_are_rounded_once(form):
    """A scale that the activations' dtype doesn't hold multiplies in float32, as the twin does it."""
    matrix = stored(form, 40, 128)
    if matrix.scales.dtype == torch.uint8:  # from 2 ** -25, which float16 makes 0, to 2 ** 16, which it makes infinite
        matrix = matrix._replace(scales=(torch.arange(160).view(40, 4) % 42 + 102).to(torch.uint8))
        matrix = matrix._replace(codes=torch.where(matrix.scales.repeat_interleave(16, 1) > 137, 0x10, matrix.codes))
    eye = torch.eye(128, dtype=torch.float16)
    out = torch.empty(128, 40, dtype=torch.float16)
    run_tiles(Product(in_order(eye, matrix), matrix, None, out), TilesConfig(32, 1, 4, 2))
    assert torch.equal(out, linear.twin(eye, matrix)) and out.isfinite().all()
