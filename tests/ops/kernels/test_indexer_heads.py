"""An indexer's queries, keys and weights: the kernel in Triton's interpreter against its twin."""

from __future__ import annotations

import pytest
import torch

from helpers.interpreter_floats import install
from pagerunner.ops.indexer_heads import MeanNorm, hadamard, indexer_heads, indexer_queries
from pagerunner.ops.rope import rope_angles, rope_pairs_

pytest.importorskip("triton")
install()
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from pagerunner.ops.kernels.latent.indexer_heads import mixed_vector  # noqa: E402


def made(tokens: int, heads: int, size: int, rotary: int, dtype: torch.dtype, mixed: bool) -> tuple[object, ...]:
    """Arguments, of which queries and weights are views with gaps."""
    torch.manual_seed(0)
    q = torch.randn(tokens, heads + 1, size).to(dtype)[:, :heads]
    keys = (3 + 2 * torch.randn(tokens, size + 5)).to(dtype)[:, :size]
    weights = torch.randn(tokens, heads + 3).to(dtype)[:, :heads]
    norm = MeanNorm(torch.rand(size).to(dtype), torch.randn(size).to(dtype), 1e-6)
    angles = rope_angles(torch.arange(tokens) * 7, torch.rand(rotary // 2), 1.0, dtype)
    return q, keys, weights, norm, angles, 0.25, mixed


@pytest.mark.parametrize(
    ("heads", "size", "rotary", "mixed"),
    [(3, 12, 8, False), (16, 16, 16, True), (20, 32, 8, False), (5, 128, 64, False), (5, 128, 64, True)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_any_sizes(heads: int, size: int, rotary: int, dtype: torch.dtype, mixed: bool) -> None:
    found = indexer_heads.kernel(*made(3, heads, size, rotary, dtype, mixed))
    want = indexer_heads.twin(*made(3, heads, size, rotary, dtype, mixed))
    tolerance = 2e-5 if dtype == torch.float32 else 8e-3
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
    assert found[2].dtype == torch.float32


@pytest.mark.parametrize(
    ("heads", "size", "rotary", "mixed"),
    [(3, 12, 8, False), (20, 32, 8, True), (5, 128, 64, False), (5, 128, 64, True)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_queries_whose_keys_are_slots(heads: int, size: int, rotary: int, dtype: torch.dtype, mixed: bool) -> None:
    """Rotated as the separate kernel rotates them, to the bit."""
    q, _, weights, _, angles, scale, _ = made(3, heads, size, rotary, dtype, mixed)
    found = indexer_queries.kernel(q, weights, angles, scale, mixed)
    turned = q.clone()
    rope_pairs_.kernel(turned[..., -rotary:], angles)
    if not mixed:
        assert torch.equal(found[0], turned)
    want = indexer_queries.twin(q, weights, angles, scale, mixed)
    tolerance = 2e-5 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(found[0], want[0], atol=tolerance, rtol=tolerance)
    assert torch.equal(found[1], want[1])


@pytest.mark.parametrize("size", [16, 128])
def test_a_vector_is_mixed_as_the_twin_does(size: int) -> None:
    @triton.jit
    def mix(x, y, root, SIZE: tl.constexpr, LOG: tl.constexpr):
        i = tl.arange(0, SIZE)
        tl.store(y + i, mixed_vector(tl.load(x + i), root, SIZE, LOG))

    x = torch.randn(size)
    y = torch.empty(size)
    mix[(1,)](x, y, size**-0.5, SIZE=size, LOG=size.bit_length() - 1)
    torch.testing.assert_close(y, hadamard(x), atol=1e-6, rtol=1e-6)


def test_mixing_changes_no_product() -> None:
    q, keys, *_ = made(4, 5, 64, 16, torch.float32, True)
    assert isinstance(q, torch.Tensor) and isinstance(keys, torch.Tensor)
    torch.testing.assert_close(hadamard(q) @ hadamard(keys).T, q @ keys.T, atol=1e-4, rtol=1e-4)
    one = torch.zeros(1, 64)
    one[0, 3] = 8.0
    assert hadamard(one).abs().tolist() == [[1.0] * 64]
