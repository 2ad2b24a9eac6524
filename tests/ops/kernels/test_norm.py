"""Norm kernels against their twins, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from pagerunner.layers.norm import OffsetRMSNorm
from pagerunner.layers.sublayer import ResidualStream
from pagerunner.ops import norm

DTYPES = [torch.float32, torch.float16]


def heads(tokens: int, total: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Some heads of a wider projection: neither tokens nor the whole are dense."""
    return torch.randn(tokens, total, dim).to(dtype)[:, 1:-1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("shape", [(1, 20), (5, 64), (3, 1)])
def test_plain_norms(offset, shape, dtype):
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    torch.testing.assert_close(
        norm.rms_norm.kernel(x, weight, 1e-3, offset), norm.rms_norm.twin(x, weight, 1e-3, offset)
    )


@pytest.mark.parametrize("offset", [False, True])
def test_norms_of_heads_inside_a_projection(offset):
    x, weight = heads(3, 5, 6, torch.float32), torch.rand(6)
    got = norm.rms_norm.kernel(x, weight, 1e-6, offset)
    assert got.is_contiguous()
    torch.testing.assert_close(got, norm.rms_norm.twin(x, weight, 1e-6, offset))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [False, True])
def test_norms_that_add(offset, dtype):
    x, residual, weight = torch.randn(3, 20).to(dtype), torch.randn(3, 20).to(dtype), torch.rand(20).to(dtype)
    residuals = [residual.clone(), residual.clone()]
    op, how = norm.add_rms_norm_, (weight, 1e-6, offset)
    got, want = op.kernel(x, residuals[0], *how), op.twin(x, residuals[1], *how)
    assert torch.equal(*residuals) and not torch.equal(residuals[0], residual)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [False, True])
def test_norms_that_add_a_norm(offset, dtype):
    x, residual = torch.randn(2, 3, 20).to(dtype)
    before, weight = torch.rand(2, 20).to(dtype)
    residuals = [residual.clone() for _ in range(4)]
    op, how = norm.add_normed_rms_norm_, (weight, 1e-3, offset)
    got, want = op.kernel(x, before, residuals[0], *how), op.twin(x, before, residuals[1], *how)
    apart = norm.add_rms_norm_(norm.rms_norm(x, before, 1e-3, offset), residuals[2], *how)
    assert torch.equal(op(x, before, residuals[3], *how), apart) and torch.equal(residuals[3], residuals[2])
    torch.testing.assert_close(residuals[0], residuals[1])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [False, True])
def test_head_norms_leave_their_neighbours(offset, dtype):
    q_weight, k_weight, qkv = torch.rand(6).to(dtype), torch.rand(6).to(dtype), torch.randn(3, 5, 6).to(dtype)
    got, want = qkv.clone(), qkv.clone()
    norm.qk_norm_.kernel(got[:, :4], q_weight, k_weight, 3, 1e-6, offset)
    norm.qk_norm_.twin(want[:, :4], q_weight, k_weight, 3, 1e-6, offset)
    torch.testing.assert_close(got, want)
    assert torch.equal(got[:, 4], qkv[:, 4])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [norm.rms_norm_then_gate, norm.gate_then_rms_norm], ids=lambda op: op.__name__)
def test_gated_norms(op, dtype):
    x, gate, weight = torch.randn(3, 3, 6).to(dtype), heads(3, 5, 6, dtype), torch.rand(6).to(dtype)
    torch.testing.assert_close(op.kernel(x, gate, weight, 1e-6), op.twin(x, gate, weight, 1e-6))


def test_no_tokens_and_layouts_that_cannot_be_written():
    assert norm.rms_norm.kernel(torch.empty(0, 8), torch.ones(8), 1e-6).shape == (0, 8)
    with pytest.raises(ValueError, match="in place"):
        norm.add_rms_norm_.kernel(torch.ones(4, 4), torch.ones(4, 4).t(), torch.ones(4), 1e-6)


def test_a_pending_norm_is_applied_whoever_takes_what_is_pending():
    weight, eps = torch.rand(20), 1e-6
    own = OffsetRMSNorm(20, eps, torch.float32)
    own.weights["weight"] = weight
    x, pending = torch.randn(2, 3, 20)
    want = x + norm.rms_norm.twin(pending, weight, eps, True)
    for take in (
        lambda s: s.whole(),
        copied,
        lambda s: s.x_TD + s.take_pending(),
        lambda s: (s.normed(own), s.x_TD)[1],
    ):
        stream = ResidualStream(x.clone())
        stream.pending_TD, stream.pending_norm = pending.clone(), own
        torch.testing.assert_close(take(stream), want)
        assert stream.pending_norm is None


def copied(stream: ResidualStream) -> torch.Tensor:
    out = torch.empty_like(stream.x_TD)
    stream.copy_to(out)
    return out
