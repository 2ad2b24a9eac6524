"""Products of many tokens with stored matrices on the device, against float32."""

from __future__ import annotations

import pytest
import torch

from helpers.stored_cases import dequantized, stored
from pagerunner.ops import numerics
from pagerunner.ops.kernels.stored import unpack
from pagerunner.ops.linear import Norm, linear, linear_add_, norm_linear, norm_linear_silu
from pagerunner.ops.quantize import quantize, silu_quantize
from pagerunner.ops.stored import Stored, Stored8, dense

FORMS = [
    "fp8 row", "fp8 block", "int8 row", "int8 group 128", "int4 bf16 128", "int4 f16 64 zeros", "int4 f16 32 zeros", "int4 f32 all",
    "e2m1 e8m0 32", "e2m1 e4m3 16 rows",
]  # fmt: skip
SIZES = [(1024, 2048), (576, 1536), (192, 2816)]


def on_device(matrix: Stored, **more: str) -> Stored:
    """The matrix on the device, with other fields."""
    moved = {name: value.cuda() for name, value in matrix._asdict().items() if isinstance(value, torch.Tensor)}
    return matrix._replace(**moved, **more)


def close(got: torch.Tensor, want: torch.Tensor, within: float = 6e-3) -> None:
    """By the norm of the difference; NaN never passes."""
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert got.shape == want.shape and error < within, error


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("outputs", "inputs"), [*SIZES, (2880, 2880)])
def test_unpacking_is_exact(form: str, outputs: int, inputs: int) -> None:
    if ("128" in form and inputs % 128) or ("64" in form and inputs % 64):
        inputs = 2816
    matrix = on_device(stored(form, outputs, inputs))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        out = torch.full((outputs, inputs), float("nan"), dtype=dtype, device="cuda")
        unpack(matrix, out)
        assert torch.equal(out, dense(matrix, dtype))


ROUNDED = ["fp8 row", "fp8 block", "int8 row"]  # with all others, activations stay as they are


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("form", "activations"), [*((form, "none") for form in FORMS), *((form, "rounded") for form in ROUNDED)]
)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("tokens", [17, 64, 65, 192, 301, 2100])
def test_products(form: str, outputs: int, inputs: int, tokens: int, activations: str, dtype: torch.dtype) -> None:
    matrix = on_device(stored(form, outputs, inputs))
    if activations == "rounded":
        assert isinstance(matrix, Stored8)
        matrix = matrix._replace(activations="block" if "block" in form else "token")
    full = dense(matrix, torch.float32).double()
    x, norm = (
        torch.randn(tokens, inputs, device="cuda").to(dtype),
        Norm(torch.rand(inputs, device="cuda").to(dtype), 1e-6),
    )
    bias, residual = (torch.randn(n, outputs, device="cuda").to(dtype) for n in (1, tokens))

    def seen(before: Norm | None = None) -> torch.Tensor:
        if activations == "rounded":
            return dequantized(quantize(x, matrix.codes.dtype, grouped="block" in form, norm=before)).double()
        return (x if before is None else before(x)).double()

    close(linear(x, matrix), seen() @ full.t())
    close(norm_linear(x, norm, matrix, bias[0]), seen(norm) @ full.t() + bias)
    gate, up = (seen(norm) @ full.t()).chunk(2, 1)
    close(norm_linear_silu(x, norm, matrix), torch.nn.functional.silu(gate) * up, 1.2e-2)
    want = residual.double() + seen() @ full.t()
    linear_add_(x, matrix, residual)
    close(residual, want)


@pytest.mark.parametrize("form", ["fp8 row", "int8 row", "fp8 block"])
@pytest.mark.parametrize(("outputs", "inputs"), [(24_576, 512), (14_336, 256), (4096, 4096), (2624, 1040)])
@pytest.mark.parametrize("tokens", [2, 5, 9, 16, 17, 31, 33, 96, 140, 193, 200, 256, 257])
def test_rounded_products_of_wide_matrices(form: str, outputs: int, inputs: int, tokens: int) -> None:
    """Every tile there is, with as many features as it has for wide matrices."""
    matrix = on_device(stored(form, outputs, inputs))._replace(activations="token")
    x = torch.randn(tokens, inputs, device="cuda").bfloat16()
    want = dequantized(quantize(x, matrix.codes.dtype, grouped=form == "fp8 block")) @ dense(matrix, torch.float32).t()
    close(linear(x, matrix), want)


@pytest.mark.parametrize("tokens", [3, 72])
def test_whole_rounds_and_what_is_left_of_them(tokens: int) -> None:
    """Gate and up of Qwen3-32B: two launches, of which the second adds up parts."""
    matrix = on_device(stored("fp8 block", 51_200, 5120))._replace(activations="block")
    x = torch.randn(tokens, 5120, device="cuda").bfloat16()
    want = dequantized(quantize(x, matrix.codes.dtype, grouped=True)) @ dense(matrix, torch.float32).t()
    close(linear(x, matrix), want)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("features", [4096, 12288, 2880, 192])
def test_rounding(dtype: torch.dtype, grouped: bool, features: int) -> None:
    x = (torch.randn(37, 2 * features, device="cuda") * torch.logspace(-2, 2, 37, device="cuda")[:, None]).bfloat16()
    norm = Norm(torch.rand(features, device="cuda").bfloat16(), 1e-6)
    for got, want in (
        (quantize(x[:, :features], dtype, grouped=grouped), quantize.twin(x[:, :features], dtype, grouped=grouped)),
        (
            quantize(x[:, :features], dtype, grouped=grouped, norm=norm),
            quantize.twin(x[:, :features], dtype, grouped=grouped, norm=norm),
        ),
        (silu_quantize(x, dtype, grouped=grouped), silu_quantize.twin(x, dtype, grouped=grouped)),
    ):
        # a rounding of bfloat16 before the largest
        torch.testing.assert_close(got.scales, want.scales, rtol=1e-2, atol=0)
        close(dequantized(got), dequantized(want), 5e-3)
        assert (got.codes.float() != want.codes.float()).float().mean() < 0.05


def test_few_tokens_are_not_rounded() -> None:
    matrix = on_device(stored("fp8 row", 512, 1024), activations="token")
    x = torch.randn(numerics.FAST.products.early_tokens - 1, 1024, device="cuda").bfloat16()
    close(linear(x, matrix), x.double() @ dense(matrix, torch.float32).double().t(), 4e-3)
