"""Wide tiles of int4 on the device, against float32."""

from __future__ import annotations

import pytest
import torch

from helpers.stored_cases import stored
from pagerunner.ops.kernels.linear import linear_wide
from pagerunner.ops.kernels.linear.linear_parts import Product
from pagerunner.ops.kernels.linear.linear_tiles import in_order
from pagerunner.ops.kernels.linear.linear_wide import WideConfig
from pagerunner.ops.linear import linear, linear_add_
from pagerunner.ops.stored import Stored, dense

pytestmark = pytest.mark.skipif(
    not linear_wide.has_gluon(torch.device("cuda", 0)), reason="another device or version of Triton than was measured"
)
CASES = [
    ("int4 bf16 128", 1000, 2048), ("int4 bf16 128 zeros", 1536, 4096), ("int4 f16 128 zeros", 192, 2816), ("int4 f16 128", 48, 384),
    ("int4 bf16 256", 208, 2048), ("int4 bf16 all", 2880, 2880), ("int4 bf16 all zeros", 576, 160), ("int4 bf16 128", 128, 12_288),
    ("int4 bf16 32", 208, 2880), ("int4 f16 64", 576, 1088), ("int4 bf16 64 zeros", 208, 2880), ("int4 f16 32 zeros", 576, 1088), ("e2m1 e8m0 32", 1000, 2880), ("e2m1 e4m3 16 rows", 1536, 4096), ("e2m1 e4m3 16", 48, 160),
    ("fp8 row", 1000, 2064), ("fp8 block", 1536, 4096), ("int8 row", 576, 160), ("int8 group 128", 208, 2816), ("int8 group 256", 48, 12_288), ("int8 group 32", 208, 2880), ("int8 group 64", 576, 1088), ("fp8 block 8x32", 48, 416),
]  # fmt: skip


def on_device(form: str, outputs: int, inputs: int) -> Stored:
    return stored(form, outputs, inputs, device="cuda")


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The difference's norm as a share; NaN stays NaN."""
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize(("form", "outputs", "inputs"), CASES)
@pytest.mark.parametrize("tokens", [1, 2, 9, 17, 48, 72, 96, 133, 160, 192, 250])
def test_products(form: str, outputs: int, inputs: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the operation, with a bias, and added; outputs that nobody wrote would be NaN."""
    matrix = on_device(form, outputs, inputs)
    dtype = torch.float16 if " f16" in form or form == "int8 row" else torch.bfloat16
    assert linear_wide.reads(dtype, matrix)
    monkeypatch.setattr(linear_wide, "SMALL_WEIGHTS", 0)
    x, bias = torch.randn(tokens, inputs, device="cuda", dtype=dtype), torch.randn(outputs, device="cuda", dtype=dtype)
    want = x.float() @ dense(matrix, dtype).float().T
    torch.full(
        (tokens, 2 * outputs), float("nan"), device="cuda", dtype=torch.float32
    )  # what is allocated next holds NaN
    assert error(linear(x, matrix, bias), want + bias.float()) < 4e-3
    wider = torch.randn(tokens, outputs + 64, device="cuda", dtype=dtype)
    old = wider.clone()
    linear_add_(x, matrix, wider[:, :outputs])
    assert error(wider[:, :outputs], want + old[:, :outputs].float()) < 4e-3
    assert torch.equal(wider[:, outputs:], old[:, outputs:]), "nothing beside the outputs is written"


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize(("tokens", "parts"), [(32, 1), (64, 3), (96, 5), (160, 1), (192, 4)])
def test_tiles_and_parts(tokens: int, parts: int, groups: int) -> None:
    matrix = on_device("int4 bf16 128 zeros", 1000, 4096)
    x = torch.randn(tokens + 7, 4096, device="cuda", dtype=torch.bfloat16)
    out = torch.full((tokens + 7, 1000), float("nan"), device="cuda", dtype=torch.bfloat16)
    config = WideConfig(tokens, groups, parts)
    linear_wide.run_wide(Product(in_order(x, matrix, pairs=True), matrix, None, out), config)
    assert error(out, x.float() @ dense(matrix, torch.bfloat16).float().T) < 4e-3


@pytest.mark.parametrize(
    ("form", "inputs"), [("int4 bf16 128", 896), ("int4 f16 128 zeros", 384), ("int4 bf16 all", 2880)]
)
@pytest.mark.parametrize(("tokens", "parts"), [(32, 1), (160, 2)])
def test_what_lies_behind_the_scales_is_not_read(form: str, inputs: int, tokens: int, parts: int) -> None:
    """The last of an even number of steps may have no columns. NaN times their zeros would be NaN."""
    matrix = on_device(form, 200, inputs)
    dtype = torch.float16 if " f16" in form else torch.bfloat16
    behind = torch.full((matrix.scales.numel() + 64,), float("nan"), device="cuda", dtype=dtype)
    behind[:-64] = matrix.scales.flatten()
    guarded = matrix._replace(scales=behind[:-64].view_as(matrix.scales))
    x, out = (
        torch.randn(tokens, inputs, device="cuda", dtype=dtype),
        torch.empty(tokens, 200, device="cuda", dtype=dtype),
    )
    linear_wide.run_wide(Product(in_order(x, guarded, pairs=True), guarded, None, out), WideConfig(tokens, 2, parts))
    assert error(out, x.float() @ dense(matrix, dtype).float().T) < 4e-3


@pytest.mark.parametrize(("outputs", "inputs", "tokens"), [(12_288, 28_672, 192), (8192, 49_152, 250)])
def test_long_rows_with_zero_points(outputs: int, inputs: int, tokens: int) -> None:
    """As down projections of Mistral-Large and Qwen1.5-110B in AWQ, whose rows have more scales than shared memory holds beside two steps."""
    matrix = on_device("int4 bf16 128 zeros", 200, inputs)
    x = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16)
    whole = matrix._replace(codes=torch.empty(outputs, inputs // 2, dtype=torch.uint8, device="meta"))
    config = linear_wide.wide_config(tokens, whole, x.device)
    out = torch.empty(tokens, 200, device="cuda", dtype=torch.bfloat16)
    linear_wide.run_wide(Product(in_order(x, matrix, pairs=True), matrix, None, out), config)
    assert error(out, x.float() @ dense(matrix, torch.bfloat16).float().T) < 4e-3


@pytest.mark.parametrize(
    "form",
    [
        "int4 bf16 128",
        "int4 bf16 32",
        "int4 bf16 64 zeros",
        "e2m1 e8m0 32",
        "e2m1 e4m3 16",
        "int8 group 128",
        "fp8 block",
    ],
)
def test_weights_are_exact(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One input feature at a time: each output is a weight, which is rounded once."""
    monkeypatch.setattr(linear_wide, "SMALL_WEIGHTS", 0)
    matrix = on_device(form, 256, 256)
    if form.startswith("int8"):  # a scale that was a number of 16 bits
        matrix = matrix._replace(scales=matrix.scales.half().float())
    eye = torch.eye(256, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(linear(eye, matrix), dense(matrix, torch.bfloat16).T)


@pytest.mark.parametrize("form", ["int4 bf16 128 zeros", "e2m1 e4m3 16 rows", "int8 group 128"])
def test_whole_rounds_and_what_is_left_of_them(form: str) -> None:
    """Two launches, of which the second adds up parts."""
    matrix = on_device(form, 25_600, 4096)
    x, bias = torch.randn(72, 4096, device="cuda").bfloat16(), torch.randn(25_600, device="cuda").bfloat16()
    if torch.cuda.get_device_properties(0).multi_processor_count == 132:
        assert [rows.start for rows in linear_wide.pieces(72, matrix, x.device)] == [0, 25_344]
    want = x.float() @ dense(matrix, torch.bfloat16).float().T + bias.float()
    assert error(linear(x, matrix, bias), want) < 4e-3
    residual = torch.randn(72, 25_600, device="cuda").bfloat16()
    want += residual.float()
    linear_add_(x, matrix, residual, bias)
    assert error(residual, want) < 4e-3


def test_repeated_products_are_the_same() -> None:
    matrix = on_device("int4 bf16 128", 6144, 4096)
    x = torch.randn(160, 4096, device="cuda", dtype=torch.bfloat16)
    first = linear(x, matrix)
    assert all(torch.equal(linear(x, matrix), first) for _ in range(50))
