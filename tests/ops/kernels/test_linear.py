"""Products for few tokens against their twins, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from pagerunner.ops.kernels.linear import linear as kernels
from pagerunner.ops.kernels.linear.linear_parts import Product
from pagerunner.ops.linear import Norm, linear, linear_add_, norm_linear, norm_linear_silu

TOKENS = [1, 2, 3, 4, 7]


usual_config = kernels.rows_config


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Several blocks in each direction, the last ones partly empty."""
    monkeypatch.setattr(kernels, "rows_config", lambda inputs, outputs, gated: kernels.RowsConfig(4, 16, 4))
    monkeypatch.setattr(kernels, "_fits", lambda x, weight, **_: x.shape[0] <= 16 and weight.is_contiguous())
    monkeypatch.setattr(kernels, "few_config", lambda *shape: kernels.FewConfig(16, 16, 2, 2))


def tensors(tokens: int, inputs: int, features: int, dtype: torch.dtype, bias: bool):
    torch.manual_seed(tokens * 100 + features)
    x = torch.randn(tokens, inputs + 3)[:, 1:-2].to(dtype)
    weight, bias_O = torch.randn(features, inputs).to(dtype), torch.randn(features).to(dtype)
    return x, weight, bias_O if bias else None


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "features"), [(40, 9), (16, 1)])
def test_products(tokens, inputs, features, bias):
    x, weight, bias_O = tensors(tokens, inputs, features, torch.float32, bias)
    want = linear.twin(x, weight, bias_O)
    torch.testing.assert_close(linear.kernel(x, weight, bias_O), want, atol=1e-5, rtol=1e-5)
    residual = torch.randn(tokens, features + 1)[:, 1:]
    expected = residual + want
    linear_add_.kernel(x, weight, residual, bias_O)
    torch.testing.assert_close(residual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("offset", [False, True])
def test_a_norm_before_and_a_gate_behind(tokens, bias, offset):
    x, weight, bias_O = tensors(tokens, 40, 18, torch.float32, bias)
    norm = Norm(torch.randn(40), 1e-2, offset)
    torch.testing.assert_close(
        norm_linear.kernel(x, norm, weight, bias_O), norm_linear.twin(x, norm, weight, bias_O), atol=1e-4, rtol=1e-4
    )
    for before in (norm, None):
        got, want = norm_linear_silu.kernel(x, before, weight, bias_O), norm_linear_silu.twin(x, before, weight, bias_O)
        assert got.shape == (tokens, 9)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tokens", [1, 3, 6])
def test_half_precision_stays_within_a_rounding(tokens):
    x, weight, bias_O = tensors(tokens, 24, 10, torch.float16, True)
    norm = Norm(torch.rand(24).to(torch.float16), 1e-6)
    for got, want in (
        (linear.kernel(x, weight, bias_O), linear.twin(x, weight, bias_O)),
        (norm_linear_silu.kernel(x, norm, weight, bias_O), norm_linear_silu.twin(x, norm, weight, bias_O)),
    ):
        assert got.dtype == torch.float16
        torch.testing.assert_close(got, want, atol=2e-2, rtol=5e-3)


def test_nothing_beyond_the_last_feature_is_touched():
    x, weight, _ = tensors(1, 16, 9, torch.float32, False)
    around = torch.full((1, 16), 7.0)
    kernels.run_rows(Product(x, weight, None, around[:, :9]))
    assert around[0, 9:].eq(7).all()


def test_what_these_kernels_do_not_read_goes_to_the_library(monkeypatch):
    monkeypatch.setattr(kernels, "run_rows", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(kernels, "run_few", lambda *_, **__: 1 / 0)
    x, weight, _ = tensors(65, 16, 9, torch.float32, False)
    torch.testing.assert_close(linear.kernel(x, weight), x @ weight.t())
    residual = torch.zeros(65, 9)
    linear_add_.kernel(x, weight, residual)
    torch.testing.assert_close(residual, x @ weight.t())
    torch.testing.assert_close(linear.kernel(x[:1], weight.t().contiguous().t()), x[:1] @ weight.t())


def test_blocks_of_one_token_are_filled() -> None:
    """Two ranks divide 12,288 inputs into 6,144, of which two blocks of 4,096 would leave a quarter of the threads without work."""
    found = {inputs: usual_config(inputs, 4096, False).inputs for inputs in (4096, 5120, 6144, 9728, 12288, 14336)}
    assert found == {4096: 4096, 5120: 2048, 6144: 2048, 9728: 2048, 12288: 4096, 14336: 4096}
    assert usual_config(6144, 4096, False) == (4, 2048, 4) and usual_config(6144, 4096, True).inputs == 4096
    assert usual_config(3072, 4096, False) == (4, 1024, 2) and usual_config(3072, 4096, True).inputs == 2048, (
        "three blocks of 1,024, not one and a half of 2,048"
    )
    assert usual_config(4096, 3072, True) == (1, 1024, 1) and usual_config(4096, 6144, True).inputs == 4096, (
        "four ranks' gates"
    )
