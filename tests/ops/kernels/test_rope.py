"""Rotary kernels against their twins, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from pagerunner.ops.rope import rope_, rope_angles, rope_pairs_, temper


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_angles(dtype, scale):
    positions, frequencies = torch.tensor([0, 3, 70_000]), torch.rand(5)
    got = rope_angles.kernel(positions, frequencies, scale, dtype)
    want = rope_angles.twin(positions, frequencies, scale, dtype)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.is_contiguous()
        torch.testing.assert_close(a, b, atol=1e-3 if dtype == torch.float16 else 1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("op", [rope_, rope_pairs_], ids=lambda op: op.__name__)
@pytest.mark.parametrize(("heads", "dim", "turned"), [(1, 6, 6), (5, 8, 4), (3, 2, 2)])
def test_heads_are_turned_in_place(op, heads, dim, turned, dtype):
    angles = rope_angles.twin(torch.tensor([2, 9]), torch.rand(turned // 2), 1.0, dtype)
    x = torch.randn(2, heads + 1, dim).to(dtype)
    got, want = x.clone(), x.clone()
    op.kernel(got[:, :heads, dim - turned :], angles)
    op.twin(want[:, :heads, dim - turned :], angles)
    torch.testing.assert_close(got, want)
    assert torch.equal(got[:, heads], x[:, heads])
    assert torch.equal(got[..., : dim - turned], x[..., : dim - turned])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_queries_grow_with_their_position_in_place(dtype):
    """8192 tokens are a step in which they grow; numbers behind the queries, as keys are, stay."""
    x, positions = torch.randn(5, 9, 24).to(dtype), torch.tensor([0, 8190, 8191, 30_000, 1_000_000])
    got = x.clone()
    want = temper.twin(x[:, :7], positions, 8192.0, 0.1)
    assert temper.kernel(got[:, :7], positions, 8192.0, 0.1).data_ptr() == got.data_ptr()
    torch.testing.assert_close(got[:, :7], want)
    assert torch.equal(got[:2, :7], x[:2, :7]) and not torch.equal(got[2:, :7], x[2:, :7])
    assert torch.equal(got[:, 7:], x[:, 7:])
    with pytest.raises(ValueError, match="one behind another"):
        temper.kernel(torch.randn(2, 4, 6)[:, ::2], positions[:2], 8192.0, 0.1)


def test_no_tokens():
    angles = rope_angles.kernel(torch.empty(0, dtype=torch.int64), torch.rand(4), 1.0, torch.float32)
    assert angles.cos_T1D.shape == (0, 1, 8)
    rope_.kernel(torch.empty(0, 2, 8), angles)
