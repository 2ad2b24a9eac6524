"""Products of few tokens with 8-bit codes against their twins, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from helpers.stored_cases import stored
from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.kernels.linear import linear_bytes as kernels
from pagerunner.ops.kernels.linear import linear_stored
from pagerunner.ops.kernels.linear.linear_parts import Product
from pagerunner.ops.linear import Norm, linear, norm_linear, norm_linear_silu
from pagerunner.ops.stored import Stored8, dense

BLOCKS = [(1, 16, 2, 1), (1, 32, 1, 2), (2, 16, 4, 4), (3, 32, 2, 1), (7, 16, 2, 2), (16, 32, 2, 1)]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    assert (got - want).norm() < 1e-5 * want.norm()


@pytest.mark.parametrize("block", BLOCKS)
def test_products(block):
    """Some pieces have no input, the last block has rows that aren't there, the last step has inputs that aren't there."""
    tokens, *config = block
    matrix, x, bias = stored("fp8 row", 38, 1104), torch.randn(tokens, 1109)[:, 1:-4], torch.randn(38)
    assert isinstance(matrix, Stored8) and kernels.fits(x[:1], matrix)
    how = {"config": kernels.PackedConfig(*config)}
    want = linear.twin(x, matrix, bias)
    close(kernels.run_bytes(Product(x, matrix, bias, torch.full((tokens, 38), float("nan"))), **how), want)
    residual = torch.randn(tokens, 39)[:, 1:]
    expected = residual + want
    close(kernels.run_bytes(Product(x, matrix, bias, residual, add=True), **how), expected)
    norm = Norm(torch.rand(1104) + 0.5, 1e-2, offset=tokens % 2 == 0)
    close(
        kernels.run_bytes(Product(x, matrix, bias, torch.empty(tokens, 38), norm), **how),
        norm_linear.twin(x, norm, matrix, bias),
    )
    if config[0] // max(1, 8 // tokens) >= 2:
        got = kernels.run_bytes(Product(x, matrix, bias, torch.empty(tokens, 19), gated=True), **how)
        close(got, silu_and_mul.twin(want))


@pytest.mark.parametrize("inputs", [16, 48, 80, 576])
@pytest.mark.parametrize("tokens", [1, 3])
def test_inputs_that_segments_do_not_divide(inputs, tokens):
    x = torch.randn(tokens, inputs)
    matrix = stored("fp8 row", 6, inputs)
    assert isinstance(matrix, Stored8) and kernels.fits(x[:1], matrix)
    close(kernels.run_bytes(Product(x, matrix, None, torch.empty(tokens, 6))), linear.twin(x, matrix))


def test_every_code_at_every_place():
    codes = ((torch.arange(256)[:, None] + torch.arange(64)) % 256).to(torch.uint8).view(torch.float8_e4m3fn)
    matrix = Stored8(codes, torch.ones(256, 1), (1, 64))
    got = torch.cat(
        [kernels.run_bytes(Product(x, matrix, None, torch.empty(16, 256))) for x in torch.eye(64).split(16)]
    )
    want = dense(matrix, torch.float32).t()
    real = ~want.isnan().any(0)
    assert torch.equal(got[:, real], want[:, real]) and int(real.sum()) >= 128


def test_what_it_serves():
    x = torch.randn(1, 256)
    assert not kernels.fits(x, stored("fp8 block 8x32", 8, 256)) and not kernels.fits(x, stored("int4 f16 128", 8, 256))
    assert not kernels.fits(x, stored("int8 row", 8, 256)) and not kernels.fits(x, stored("fp8 group 64", 8, 256))
    assert not kernels.fits(torch.randn(2, 256), stored("fp8 row", 8, 256)), "it is slower"
    assert not kernels.fits(torch.randn(1, 200), stored("fp8 row", 8, 200))


def test_products_of_a_token_take_it(monkeypatch):
    for name in ("run_few", "linear_row"):
        monkeypatch.setattr(linear_stored, name, None)
    matrix, norm = stored("fp8 row", 40, 192), Norm(torch.rand(192) + 0.5, 1e-2)
    x = torch.randn(1, 192)
    close(linear.kernel(x, matrix), linear.twin(x, matrix))
    close(norm_linear.kernel(x, norm, matrix), norm_linear.twin(x, norm, matrix))
    close(norm_linear_silu.kernel(x, norm, matrix), norm_linear_silu.twin(x, norm, matrix))
