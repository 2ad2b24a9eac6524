"""Activation kernels against their twins, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from pagerunner.ops.activation import clamped_swiglu, gelu_tanh_and_mul, silu_and_mul, softcap_


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("op", [silu_and_mul, gelu_tanh_and_mul], ids=lambda op: op.__name__)
@pytest.mark.parametrize("shape", [(3, 10), (2, 3, 8), (0, 8)])
def test_gates(op, shape, dtype):
    x = (torch.randn(shape) * 3).to(dtype)
    torch.testing.assert_close(op.kernel(x), op.twin(x))


def test_a_gate_of_some_columns():
    x = torch.randn(3, 12)[:, 2:]
    torch.testing.assert_close(silu_and_mul.kernel(x), silu_and_mul.twin(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_clamped_gate(dtype):
    x = (torch.randn(3, 10) * 5).to(dtype)
    x[0, :2] = float("nan")
    torch.testing.assert_close(clamped_swiglu.kernel(x, 2.0), clamped_swiglu.twin(x, 2.0), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_softcap(dtype):
    x = (torch.randn(3, 10) * 50).to(dtype)
    got, want = x.clone(), x.clone()
    assert softcap_.kernel(got, 30.0) is got
    torch.testing.assert_close(got, softcap_.twin(want, 30.0), atol=1e-5, rtol=2e-3 if dtype == torch.float16 else 1e-5)
