"""Every op's torch twin against the formula written out."""

from __future__ import annotations

import pytest
import torch

from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.norm import add_rms_norm_, qk_norm_, rms_norm
from pagerunner.ops.pages import gather_slots, slot_layout, slot_rows, write_slots
from pagerunner.ops.rope import rope_, rope_angles

DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]


def plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("size", [1, 20, 768])
def test_rms_norm(dtype: torch.dtype, bound: float, size: int) -> None:
    x, weight = torch.randn(5, size).to(dtype), torch.rand(size).to(dtype)
    got = rms_norm(x, weight, 1e-3)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), plain_norm(x, weight, 1e-3), atol=bound, rtol=bound)


def test_rms_norm_of_zeros_and_of_float16_beyond_its_square() -> None:
    assert rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).eq(0).all()
    x = torch.full((1, 64), 3000.0, dtype=torch.float16)
    torch.testing.assert_close(rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-6), torch.ones_like(x))


def test_add_rms_norm_updates_the_residual() -> None:
    x, residual, weight = torch.randn(3, 16), torch.randn(3, 16), torch.rand(16)
    total = x + residual
    got = add_rms_norm_(x, residual, weight, 1e-6)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(got.double(), plain_norm(total, weight, 1e-6), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
def test_qk_norm_takes_each_heads_own_weight_and_leaves_its_neighbours(dtype: torch.dtype, bound: float) -> None:
    qkv = torch.randn(4, 7, 16).to(dtype)
    before = qkv.clone()
    q_weight, k_weight = torch.rand(16).to(dtype), torch.rand(16).to(dtype)
    qk_norm_(qkv[:, :5], q_weight, k_weight, 3, 1e-6)
    want = torch.cat((plain_norm(before[:, :3], q_weight, 1e-6), plain_norm(before[:, 3:5], k_weight, 1e-6)), 1)
    torch.testing.assert_close(qkv[:, :5].double(), want, atol=bound, rtol=bound)
    assert torch.equal(qkv[:, 5:], before[:, 5:])


@pytest.mark.parametrize("dim", [2, 20, 64])
def test_rope_turns_pairs_of_halves(dim: int) -> None:
    positions, frequencies = torch.tensor([0, 3, 1000]), torch.rand(dim // 2)
    qkv = torch.randn(3, 5, dim)
    before = qkv.double()
    rope_(qkv[:, :4], rope_angles(positions, frequencies, 1.5, torch.float32))
    angle = (positions.unsqueeze(-1) * frequencies).double().unsqueeze(1)
    a, b = before[:, :4].chunk(2, -1)
    want = torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1) * 1.5
    torch.testing.assert_close(qkv[:, :4].double(), want, atol=1e-4, rtol=1e-4)
    assert torch.equal(qkv[:, 4].double(), before[:, 4])


def test_silu_and_mul() -> None:
    x = torch.randn(3, 10)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(silu_and_mul(x), gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize("gap", [0, 3, 24])
def test_slots_are_written_and_gathered_wherever_pages_lie(gap: int) -> None:
    tokens, heads, dim = 4, 2, 6
    stride = 2 * tokens * heads * dim + gap
    pool = torch.full((5 * stride + 11,), float("nan"))
    pages = pool.as_strided((5, tokens, heads, dim), (stride, heads * dim, dim, 1), 11)
    layout = slot_layout(pages)
    assert layout.rows_per_token * layout.unit == heads * dim
    entries, offsets, values = torch.tensor([4, 0, 2]), torch.tensor([3, 0, 1]), torch.randn(3, heads, dim)
    rows = slot_rows(entries, offsets, layout)
    write_slots(pages, rows, values, layout)
    assert torch.equal(pages[entries, offsets], values)
    assert int(pool.isnan().sum()) == pool.numel() - values.numel()
    space = torch.empty(3 * layout.rows_per_token, layout.unit)
    assert torch.equal(gather_slots(pages, rows, layout, torch.float32, space), values)
