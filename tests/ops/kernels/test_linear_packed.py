"""Products of few tokens with 4-bit codes against their twins, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from helpers.effort import by_days
from helpers.stored_cases import stored
from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.kernels.linear import linear_packed as kernels
from pagerunner.ops.kernels.linear import linear_stored
from pagerunner.ops.kernels.linear.linear_parts import Product
from pagerunner.ops.linear import Norm, linear, linear_add_, norm_linear_silu
from pagerunner.ops.stored import Stored4, dense, pack4

FORMS = [
    "int4 f16 128", "int4 bf16 384", "int4 f16 all", "int4 f16 128 zeros", "int4 f16 all zeros", "e2m1 e8m0 32",
    "e2m1 e4m3 16 rows",
]  # fmt: skip
BLOCKS = [(1, 16, 2, 1), (1, 32, 1, 2), (2, 16, 4, 4), (3, 32, 2, 1), (7, 16, 2, 2), (16, 32, 2, 1)]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    assert (got - want).norm() < 1e-5 * want.norm()


@pytest.mark.parametrize(("form", "block"), by_days(FORMS, BLOCKS, each=2))
def test_products(form, block, monkeypatch):
    """Some pieces have no input, the last block has rows that aren't there, the last step has inputs that aren't there."""
    tokens, *config = block
    monkeypatch.setattr(kernels, "packed_config", lambda *shape: kernels.PackedConfig(*config))
    monkeypatch.setattr(linear_stored, "MAX_TOKENS_FLOAT32", 16)  # otherwise they are not this kernel's
    torch.manual_seed(tokens)
    matrix, x = stored(form, 38, 1152), torch.randn(tokens, 1157)[:, 1:-4]
    assert kernels.fits(x, matrix)
    bias = torch.randn(38)
    want = linear.twin(x, matrix, bias)
    close(linear.kernel(x, matrix, bias), want)
    residual = torch.randn(tokens, 39)[:, 1:]
    expected = residual + want
    linear_add_.kernel(x, matrix, residual, bias)
    close(residual, expected)
    if config[0] // max(1, 8 // tokens) >= 2:
        norm = Norm(torch.randn(1152), 1e-2)
        close(norm_linear_silu.kernel(x, norm, matrix, bias), norm_linear_silu.twin(x, norm, matrix, bias))


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("inputs", [32, 96, 576])
def test_inputs_that_segments_do_not_divide(inputs, tokens, monkeypatch):
    monkeypatch.setattr(linear_stored, "MAX_TOKENS_FLOAT32", 16)
    torch.manual_seed(inputs)
    x = torch.randn(tokens, inputs)
    for form in ("e2m1 e8m0 32", "int4 f16 all zeros"):
        matrix = stored(form, 6, inputs)
        close(linear.kernel(x, matrix), linear.twin(x, matrix))


@pytest.mark.parametrize("numbers", ["int4", "e2m1"])
def test_every_code_and_every_scale_byte(numbers):
    """Each at every place of a run."""
    codes = (torch.arange(128)[:, None] + torch.arange(32)).to(torch.uint8) % 16
    scales = torch.arange(63, 191, dtype=torch.uint8)[:, None]
    matrix = Stored4(pack4(codes), scales, 32, numbers)
    got = torch.cat(
        [kernels.run_packed(Product(x, matrix, None, torch.empty(16, 128))) for x in torch.eye(32).split(16)]
    )
    assert torch.equal(got, dense(matrix, torch.float32).t())
    broken = matrix._replace(scales=torch.full_like(scales, 255))
    assert not kernels.run_packed(Product(torch.ones(1, 32), broken, None, torch.empty(1, 128))).isfinite().any()


def test_a_large_input_costs_the_others_nothing():
    """What a code counts from is taken off the segment's sum; an input of 30,000 leaves float32's error only."""
    torch.manual_seed(6)
    matrix, x = stored("int4 f16 128", 16, 512), torch.randn(1, 512)
    x[0, 7] = 30000.0
    got = kernels.run_packed(Product(x, matrix, None, torch.empty(1, 16)))
    want = x.double() @ dense(matrix, torch.float64).t()
    assert ((got - want).abs() < 1e-6 * 30000).all()


def test_what_it_serves():
    x = torch.randn(1, 256)
    for form in ("int4 f16 64", "e2m1 f16 32", "e2m1 e8m0 64", "int8 row"):
        assert not kernels.fits(x, stored(form, 4, 256)), form
    assert kernels.fits(x, stored("int4 f16 128", 4, 256))
    assert not kernels.fits(torch.randn(17, 256), stored("int4 f16 128", 4, 256))


def test_the_gate_is_applied_to_its_own_feature(monkeypatch):
    monkeypatch.setattr(linear_stored, "run_few", lambda *_, **__: 1 / 0)
    torch.manual_seed(8)
    matrix, x = stored("int4 f16 128", 2 * 21, 256), torch.randn(2, 256)
    got = linear_stored.run(Product(x, matrix, None, torch.empty(2, 21), gated=True))
    close(got, silu_and_mul(x @ dense(matrix, torch.float32).t()))
