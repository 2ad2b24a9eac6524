"""Products with stored matrices against their twins, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from helpers.effort import by_days
from helpers.stored_cases import stored
from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.kernels.linear import linear_bytes, linear_packed, linear_row
from pagerunner.ops.kernels.linear import linear_stored as kernels
from pagerunner.ops.kernels.linear.linear_parts import Product
from pagerunner.ops.linear import Norm, linear, linear_add_, norm_linear, norm_linear_silu
from pagerunner.ops.stored import Stored4, Stored8, dense, pack4

BYTES = ["fp8 row", "int8 row", "fp8 block", "fp8 block 8x32", "fp8 group 64"]
FORMS = [
    *BYTES, "int4 f16 32", "int4 bf16 64", "int4 f16 96", "int4 f16 all", "int4 f16 64 zeros", "int4 f16 16 zeros",
    "int4 f16 all zeros", "e2m1 e8m0 32", "e2m1 e4m3 16 rows",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Several blocks in each direction, the last ones partly empty."""
    monkeypatch.setattr(linear_packed, "fits", lambda *_: False)  # test_linear_packed.py
    monkeypatch.setattr(linear_bytes, "fits", lambda *_: False)  # test_linear_bytes.py
    monkeypatch.setattr(kernels, "few_config", lambda *shape: kernels.FewConfig(16, 128, 2, 2))
    monkeypatch.setattr(linear_row, "row_config", lambda *shape: linear_row.RowConfig(4, 128, 4))
    monkeypatch.setattr(kernels, "MAX_TOKENS", 64)
    monkeypatch.setattr(kernels, "MAX_TOKENS_FLOAT32", 64)


def close(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    assert (got.float() - want.float()).norm() < bound * want.float().norm()


SIZES = [(1, 40, 192), (2, 17, 576), (3, 9, 192), (17, 20, 192)]


@pytest.mark.days(3)
@pytest.mark.parametrize(("form", "sizes"), by_days(FORMS, SIZES, each=2))
def test_products(form, sizes):
    tokens, outputs, inputs = sizes
    torch.manual_seed(tokens)
    matrix = stored(form, outputs, inputs)
    x, bias = torch.randn(tokens, inputs + 5)[:, 1:-4], torch.randn(outputs)
    want = linear.twin(x, matrix, bias)
    close(linear.kernel(x, matrix, bias), want, 1e-5)
    residual = torch.randn(tokens, outputs + 1)[:, 1:]
    expected = residual + want
    linear_add_.kernel(x, matrix, residual, bias)
    close(residual, expected, 1e-5)


@pytest.mark.days(3)
@pytest.mark.parametrize(("form", "offset", "tokens"), by_days(FORMS, [False, True], [1, 3]))
def test_a_norm_before_and_a_gate_behind(form, offset, tokens):
    torch.manual_seed(3)
    matrix, x = stored(form, 40, 192), torch.randn(tokens, 192)
    norm, bias = Norm(torch.randn(192), 1e-2, offset), torch.randn(40)
    close(norm_linear.kernel(x, norm, matrix), norm_linear.twin(x, norm, matrix), 1e-5)
    got = norm_linear_silu.kernel(x, norm, matrix, bias)
    close(got, norm_linear_silu.twin(x, norm, matrix, bias), 1e-5)
    assert got.shape == (tokens, 20)


@pytest.mark.parametrize("form", [form for form in BYTES if form.startswith("fp8")])
def test_one_token_of_eight_bits_has_its_norm(form):
    torch.manual_seed(8)
    matrix, x, norm = stored(form, 40, 192), torch.randn(1, 192), Norm(torch.randn(192), 1e-2)
    close(norm_linear.kernel(x, norm, matrix), norm_linear.twin(x, norm, matrix), 1e-5)
    close(norm_linear_silu.kernel(x, norm, matrix), norm_linear_silu.twin(x, norm, matrix), 1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 6])
def test_half_precision_stays_within_a_rounding(form, tokens):
    torch.manual_seed(4)
    matrix, x = stored(form, 40, 192), torch.randn(tokens, 192).half()
    norm = Norm(torch.rand(192).half(), 1e-6)
    exact = Norm(norm.weight_I.float(), 1e-6)
    close(linear.kernel(x, matrix), linear.twin(x.float(), matrix).half(), 1e-3)
    got = norm_linear_silu.kernel(x, norm, matrix)
    close(got, norm_linear_silu.twin(x.float(), exact, matrix).half(), 3e-3)


def test_columns_that_no_block_divides():
    torch.manual_seed(5)
    x = torch.randn(2, 2880)
    for form in ("e2m1 e8m0 32", "fp8 block", "fp8 row"):
        matrix = stored(form, 6, 2880)
        close(kernels.run_few(Product(x, matrix, None, torch.empty(2, 6))), linear.twin(x, matrix), 1e-5)


@pytest.mark.parametrize("numbers", ["int4", "e2m1"])
def test_every_code_and_every_scale_byte(numbers):
    codes = torch.arange(16, dtype=torch.uint8).repeat(2).expand(256, 32)
    matrix = Stored4(pack4(codes), torch.arange(256, dtype=torch.uint8)[:, None], 32, numbers)
    got = kernels.run_few(Product(torch.eye(32)[:16], matrix, None, torch.empty(16, 256))).double()
    assert torch.equal(got[:, :255].t(), dense(matrix, torch.float64)[:255, :16])
    assert got[:, 255].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_every_code_of_eight_bits(dtype):
    codes = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 32).contiguous().view(dtype)
    matrix = Stored8(codes, torch.ones(256, 1), (1, 32))
    got = kernels.run_few(Product(torch.eye(32)[:1], matrix, None, torch.empty(1, 256)))[0]
    want = dense(matrix, torch.float32)[:, 0]
    assert torch.equal(got[~want.isnan()], want[~want.isnan()])


def test_more_tokens_and_other_layouts_are_unpacked(monkeypatch):
    monkeypatch.setattr(kernels, "run_few", lambda *_, **__: 1 / 0)
    matrix, x = stored("fp8 row", 9, 64), torch.randn(65, 64)
    close(linear.kernel(x, matrix), linear.twin(x, matrix), 1e-5)
    odd = stored("fp8 block 3x20", 9, 64)
    close(linear.kernel(x[:1], odd), linear.twin(x[:1], odd), 1e-5)


@pytest.mark.parametrize("form", [form for form in BYTES if "group" not in form])
def test_one_token_of_eight_bits_has_a_kernel_of_its_own(form, monkeypatch):
    monkeypatch.setattr(kernels, "run_few", lambda *_, **__: 1 / 0)
    matrix, x = stored(form, 40, 192), torch.randn(1, 192)
    close(linear.kernel(x, matrix), linear.twin(x, matrix), 1e-5)


def test_one_token_whose_rows_lie_in_two_blocks(monkeypatch):
    monkeypatch.setattr(linear_row, "run_row", lambda *_, **__: 1 / 0)
    torch.manual_seed(6)
    matrix, x = stored("fp8 block 6x32", 36, 192), torch.randn(1, 192)
    close(linear.kernel(x, matrix), linear.twin(x, matrix), 1e-5)
    matrix, norm = stored("fp8 block 8x32", 36, 192), Norm(torch.rand(192), 1e-6)  # 18 gates
    close(norm_linear_silu.kernel(x, norm, matrix), norm_linear_silu.twin(x, norm, matrix), 1e-5)


@pytest.mark.parametrize(
    ("form", "stages", "tokens"),
    by_days(["int4 f16 32", "e2m1 e4m3 16 rows", "fp8 block 8x32", "fp8 row"], [0, 2], [1, 2, 4, 16], each=2),
)
def test_several_steps_whose_weights_are_on_their_way_early_or_not(form, tokens, stages):
    torch.manual_seed(7)
    matrix, x = stored(form, 12, 768), torch.randn(tokens, 768)
    config = kernels.FewConfig(32, 64, 2, stages)
    close(
        kernels.run_few(Product(x, matrix, None, torch.empty(tokens, 12)), config=config), linear.twin(x, matrix), 1e-5
    )
    out = kernels.run_few(Product(x, matrix, None, torch.empty(tokens, 6), gated=True), config=config)
    close(out, silu_and_mul.twin(linear.twin(x, matrix)), 1e-5)


@pytest.mark.parametrize("inputs", range(128, 57344, 1152))
def test_what_a_thread_holds_fits_its_registers(inputs, monkeypatch):
    monkeypatch.undo()
    for gated in (False, True):
        row = linear_row.row_config(inputs, gated)
        rows = row.features * (2 if gated else 1)
        assert inputs / (32 * row.warps) * (1 + rows / 4) <= 192, "numbers of inputs, and words of codes"
        found = kernels.layout_of(stored("int4 f16 64", 1, inputs))
        assert found is not None
        pieces = kernels.pieces_of(inputs, found, 1)
        few = kernels.few_config(inputs, 4096, 1, pieces, False, gated)
        assert few.stages > 0 or inputs / pieces / few.inputs <= 3
