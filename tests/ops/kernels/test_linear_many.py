"""Products of many tokens with stored matrices against their twins, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from helpers import interpreter_floats
from helpers.borders import set_borders
from helpers.effort import by_days
from helpers.stored_cases import stored
from pagerunner.ops.kernels.linear import linear_many as many
from pagerunner.ops.kernels.linear.linear_tiles import run_tiles
from pagerunner.ops.kernels.stored import unpack
from pagerunner.ops.linear import Norm, linear, linear_add_, norm_linear, norm_linear_silu, silu_linear_add_
from pagerunner.ops.stored import Stored4, Stored8, dense
from pagerunner.ops.unpacked import tile_tokens

interpreter_floats.install()
FORMS = [
    "fp8 row", "fp8 block", "int8 row", "int4 bf16 128", "int4 f16 32 zeros", "int4 f32 all", "e2m1 e8m0 32",
    "e2m1 e4m3 16 rows",
]  # fmt: skip


@pytest.mark.parametrize(
    ("form", "sizes"), by_days([*FORMS, "int4 f16 64", "int4 bf16 all zeros"], [(192, 576), (9, 1152)])
)
def test_a_matrix_is_unpacked_to_the_bit(form, sizes):
    outputs, inputs = sizes
    if "128" in form and inputs % 128:
        inputs = 640
    matrix = stored(form, outputs, inputs)
    for dtype in (torch.float32, torch.float16):
        out = torch.full((outputs, inputs), float("nan"), dtype=dtype)
        unpack(matrix, out)
        assert torch.equal(out, dense(matrix, dtype))
    first = 128 if outputs > 128 else 0
    out = torch.full((outputs - first, inputs), float("nan"))
    unpack(matrix, out, slice(first, outputs))
    assert torch.equal(out, dense(matrix, torch.float32)[first:])


def test_every_byte_unpacks_to_the_bit():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(1, 256)
    for matrix in (
        Stored8(codes, torch.tensor([[0.37]]), (1, 256)),
        Stored8(torch.arange(-128, 128, dtype=torch.int8).reshape(1, 256), torch.tensor([[0.37]]), (1, 256)),
        Stored4(torch.arange(256, dtype=torch.uint8).reshape(1, 256), torch.full((1, 16), 120, dtype=torch.uint8), 32, "e2m1"),
        Stored4(torch.arange(256, dtype=torch.uint8).reshape(16, 16), torch.arange(16, dtype=torch.uint8).reshape(16, 1) * 17, 32, "e2m1"),
        Stored4(torch.arange(256, dtype=torch.uint8).reshape(1, 256), torch.full((1, 4), 0.37), 128, "int4"),
    ):  # fmt: skip
        out = torch.zeros(matrix.shape)
        unpack(matrix, out)
        torch.testing.assert_close(out, dense(matrix, torch.float32), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("form", "bias", "tokens"), by_days(FORMS, [False, True], [67, 1, 0]))
def test_products(monkeypatch, form, bias, tokens):
    monkeypatch.setattr(many, "UNPACKED_BYTES", 128 * 256 * 4)  # two products of 67 tokens
    set_borders(monkeypatch, "products", parted_tokens=60)
    matrix = stored(form, 192, 256)
    x, bias_O = torch.randn(tokens, 256), torch.randn(192) if bias else None
    want = linear.twin(x, matrix, bias_O)
    close(many.linear(x, matrix, bias_O), want)
    residual = torch.randn(tokens, 192)
    expected = residual + want
    many.linear_add_(x, matrix, residual, bias_O)
    close(residual, expected)
    norm = Norm(torch.rand(256), 1e-6)
    close(many.linear(x, matrix, bias_O, norm), norm_linear.twin(x, norm, matrix, bias_O))


@pytest.mark.parametrize(("high", "outputs", "parts"), [(256, 520, 3), (100, 260, 1), (3, 500, 2), (600, 520, 1)])
def test_no_part_cuts_blocks_that_share_scales(monkeypatch, high, outputs, parts):
    monkeypatch.setattr(many, "UNPACKED_BYTES", 1)
    set_borders(monkeypatch, "products", parted_tokens=60)
    torch.manual_seed(high)
    codes, scales = torch.randn(outputs, 96).to(torch.float8_e4m3fn), torch.rand(-(-outputs // high), 3)
    matrix, x = Stored8(codes, scales, (high, 32)), torch.randn(67, 96)
    assert len(list(many._parts(matrix, x.dtype, 67))) == parts
    close(many.linear(x, matrix), linear.twin(x, matrix))


@pytest.mark.parametrize("tokens", [0, 1, 17])
@pytest.mark.parametrize("form", ["fp8 row", "fp8 block", "int4 f16 32 zeros"])
def test_any_number_of_tokens_in_half_precision(form, tokens):
    matrix, x = stored(form, 64, 256), torch.randn(tokens, 256).half()
    if isinstance(matrix, Stored8):
        matrix = matrix._replace(activations="token" if matrix.block[0] == 1 else "block")
    norm, residual = Norm(torch.rand(256).half(), 1e-6), torch.ones(tokens, 64).half()
    assert linear.kernel(x, matrix).shape == norm_linear.kernel(x, norm, matrix).shape == (tokens, 64)
    assert norm_linear_silu.kernel(x, norm, matrix).shape == (tokens, 32)
    linear_add_.kernel(x, matrix, residual)
    silu_linear_add_.kernel(x.repeat(1, 2), matrix, residual)
    assert residual.isfinite().all()


@pytest.mark.parametrize("form", ["int4 f16 64 zeros", "fp8 row", "int4 f16 96"])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_half_precision_go_by_tiles_where_groups_fit(monkeypatch, form, bias):
    seen = []
    monkeypatch.setattr(many, "run_tiles", lambda *args, **more: (seen.append(args), run_tiles(*args, **more)))
    matrix = stored(form, 48, 192)
    x, bias_O, residual = (
        torch.randn(70, 192).half(),
        torch.randn(48).half() if bias else None,
        torch.randn(70, 48).half(),
    )
    want = x.float() @ dense(matrix, torch.float32).t() + (0 if bias_O is None else bias_O.float())
    assert float((many.linear(x, matrix, bias_O).float() - want).norm() / want.norm()) < 3e-3
    want += residual.float()
    many.linear_add_(x, matrix, residual, bias_O)
    assert float((residual.float() - want).norm() / want.norm()) < 3e-3
    assert bool(seen) is (form != "int4 f16 96")
    seen.clear()
    many.linear(torch.randn(tile_tokens(matrix) + 1, 192).half(), matrix)
    assert not seen


def close(got, want):
    assert got.shape == want.shape
    assert float((got - want).norm()) <= 1e-5 * float(want.norm())
