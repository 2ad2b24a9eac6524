"""Products with rounded inputs against what their rounded numbers stand for, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from helpers import interpreter_floats
from helpers.borders import set_borders
from helpers.stored_cases import dequantized, stored
from pagerunner.ops import numerics
from pagerunner.ops.kernels.linear import linear_many as many
from pagerunner.ops.kernels.linear import linear_rounded as kernels
from pagerunner.ops.kernels.linear.linear_rounded import Rounded, RoundedConfig, product, rounding, run_rounded
from pagerunner.ops.linear import Norm, norm_linear_silu, silu_linear_add_
from pagerunner.ops.quantize import quantize, silu_quantize
from pagerunner.ops.stored import Stored8, dense

interpreter_floats.install()
E4M3 = torch.float8_e4m3fn


def matrix_of(form: str, outputs: int, inputs: int, high: int = 128) -> Stored8:
    """A matrix whose products may round their input; `high` is the height of its blocks."""
    matrix = stored(form, outputs, inputs)
    assert isinstance(matrix, Stored8)
    if matrix.block[0] > 1:
        scales = torch.rand(-(-outputs // high), matrix.scales.shape[1]) * 0.01 + 0.001
        return matrix._replace(scales=scales, block=(high, 128), activations="block")
    return matrix._replace(activations="token")


def close(got, want, within=1e-5):
    assert got.shape == want.shape
    assert float((got.float() - want.float()).norm() / want.float().norm()) < within


@pytest.mark.parametrize(("form", "high"), [("fp8 row", 1), ("int8 row", 1), ("fp8 block", 128), ("fp8 block", 64)])
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(37, 72, 256), (5, 192, 576), (18, 40, 144)])
def test_the_kernel_multiplies_what_the_numbers_stand_for(form, high, tokens, outputs, inputs):
    matrix = matrix_of(form, outputs, inputs, high)
    how = rounding(matrix)
    assert how is not None
    x = quantize(torch.randn(tokens, inputs), how.dtype, grouped=how.grouped)
    want, bias = dequantized(x) @ dense(matrix, torch.float32).t(), torch.randn(outputs)
    for parts, add, high, wide in ((1, False, 16, 32), (3, True, 24, 48)):
        got = torch.randn(tokens, outputs + 4)[:, :outputs]
        expected = want + bias + (got if add else 0)
        run_rounded(x, matrix, bias, got, grouped=how.grouped, add=add, config=RoundedConfig(high, wide, 4, 2, parts))
        close(got, expected)


def test_which_products_round_and_how():
    assert rounding(matrix_of("fp8 row", 32, 64)) == Rounded(E4M3, grouped=False)
    assert rounding(matrix_of("int8 row", 32, 64)) == Rounded(torch.int8, grouped=False)
    assert rounding(matrix_of("fp8 block", 192, 576)) == Rounded(E4M3, grouped=True)
    assert rounding(matrix_of("fp8 row", 32, 64)._replace(activations="none")) is None
    assert rounding(matrix_of("fp8 row", 32, 72)) is None, "bulk copies take rows of whole 16 bytes"
    grouped = stored("int8 group 32", 32, 64)
    assert isinstance(grouped, Stored8) and rounding(grouped._replace(activations="token")) is None


@pytest.mark.parametrize("tokens", [66, 68])
def test_what_cublas_is_given(monkeypatch, tokens):
    given = {}

    def scaled(x, x_scales, weight, w_scales, x_recipe, w_recipe, dtype):
        given.update(x=x, x_scales=x_scales, w_scales=w_scales, recipes=(x_recipe, w_recipe))
        by_group = x_scales.repeat_interleave(128, 1)[:, : x.shape[1]]
        by_block = w_scales.t()[:, : x.shape[1] // 128].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return ((x.float() * by_group) @ (weight.float() * by_block[: weight.shape[0]]).t()).to(dtype)

    monkeypatch.setattr(kernels, "_scaled", scaled)
    set_borders(monkeypatch, "products", library_tiles=0)
    matrix = matrix_of("fp8 block", 192, 640)
    x = quantize(torch.randn(tokens, 640), E4M3, grouped=True)
    got = product(x, matrix, None, torch.bfloat16)
    close(got, dequantized(x) @ dense(matrix, torch.float32).t(), 4e-3)
    assert given["x"].shape == (68, 640), "tokens come in fours"
    assert given["x_scales"].shape == (68, 5) and given["x_scales"].stride() == (1, 68)
    assert given["w_scales"].shape == (8, 2) and given["w_scales"].stride() == (1, 8)
    assert [str(recipe).rpartition(".")[2] for recipe in given["recipes"]] == ["BlockWise1x128", "BlockWise128x128"]


@pytest.mark.parametrize("form", ["fp8 row", "int8 row", "fp8 block"])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_many_tokens_round_and_those_of_few_do_not(monkeypatch, form, bias):
    monkeypatch.setattr(kernels, "rounded_config", lambda *shape, **how: RoundedConfig(64, 64, 4, 2))
    matrix, norm = matrix_of(form, 96, 256), Norm(torch.rand(256).half(), 1e-6)
    bias_O = torch.randn(96).half() if bias else None
    how = rounding(matrix)
    assert how is not None

    def want(x, before=None):
        if x.shape[0] >= numerics.FAST.products.rounded_tokens:
            x = dequantized(quantize(x, how.dtype, grouped=how.grouped, norm=before))
        elif before is not None:
            x = before(x)
        return x.float() @ dense(matrix, torch.float32).t() + (0 if bias_O is None else bias_O.float())

    for tokens in (numerics.FAST.products.rounded_tokens, numerics.FAST.products.rounded_tokens - 1):
        x, residual = torch.randn(tokens, 256).half(), torch.randn(tokens, 96).half()
        close(many.linear(x, matrix, bias_O), want(x), 2e-3)
        close(many.linear(x, matrix, bias_O, norm), want(x, norm), 2e-3)
        expected = residual.float() + want(x)
        many.linear_add_(x, matrix, residual, bias_O)
        close(residual, expected, 2e-3)
        gate, up = want(x, norm).chunk(2, 1)
        got = norm_linear_silu.kernel(x, norm, matrix, bias_O)
        close(got, torch.nn.functional.silu(gate) * up, 4e-3)


def test_the_gate_is_part_of_rounding():
    matrix = matrix_of("fp8 row", 96, 128)
    gate_up, residual = torch.randn(40, 256).bfloat16(), torch.randn(40, 96).bfloat16()
    x = dequantized(silu_quantize(gate_up, E4M3))
    want = residual.float() + x @ dense(matrix, torch.float32).t()
    silu_linear_add_.kernel(gate_up, matrix, residual)
    close(residual, want, 4e-3)
    # Half precision, as Triton 3.6's interpreter keeps bfloat16 as uint16: casts are right, but `create_dot` and every sum take the bits as whole
    # numbers. Example: tl.dot of two 16 x 16 tiles of randn in bfloat16 is 2.5e11 off, by the norm of the difference.
    gate_up, residual = gate_up.half(), torch.randn(40, 96).half()
    plain = residual.clone()
    silu_linear_add_.kernel(gate_up, matrix._replace(activations="none"), residual)
    silu_linear_add_.twin(gate_up, matrix, plain)
    close(residual, plain, 4e-3)


def test_bfloat16_goes_through_cublas(monkeypatch):
    monkeypatch.setattr(kernels, "run_rounded", None)
    matrix = matrix_of("fp8 row", 96, 256)
    x = torch.randn(kernels.MOST_ALONE + 1, 256).bfloat16()
    rounded = quantize(x, E4M3)
    close(many.linear(x, matrix), dequantized(rounded) @ dense(matrix, torch.float32).t(), 4e-3)


def test_no_tokens_and_float32():
    matrix = matrix_of("int8 row", 96, 256)
    x = torch.randn(70, 256)
    close(many.linear(x, matrix), x @ dense(matrix, torch.float32).t())
    assert product(quantize(x[:0], torch.int8), matrix, None, torch.float32).shape == (0, 96)
