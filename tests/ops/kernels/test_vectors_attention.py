"""Attention to a window's vectors and slots: kernels against their twins in Triton's interpreter, and twins against a dense computation."""

from __future__ import annotations

import pytest
import torch

from helpers.vectors_cases import CASES, Case, densely, inputs
from pagerunner.ops.linear import Norm
from pagerunner.ops.rope import RopeAngles
from pagerunner.ops.vectors_attention import prepare_vectors_, vectors_attention

pytest.importorskip("triton")
from pagerunner.ops.kernels import vectors_attention as kernels  # noqa: E402


@pytest.mark.parametrize("programs", [1, 300], ids=["whole", "parts"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention(case: Case, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: programs)
    tiles = kernels.attention_tiles
    monkeypatch.setattr(kernels, "attention_tiles", lambda *of: tiles(*of)._replace(keys=16))
    arguments, told = inputs(case)
    tolerance = 3e-5 if case.dtype == torch.float32 else 3e-3
    want = vectors_attention.twin(*arguments)
    torch.testing.assert_close(want, densely(arguments, told, case), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(vectors_attention.kernel(*arguments), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("pages", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "size", "rotary"), [(3, 24, 8), (9, 16, 16), (1, 12, 2)])
def test_preparing(heads: int, size: int, rotary: int, pages: torch.dtype) -> None:
    q, vectors = torch.randn(5, heads, size + 4)[..., :size], torch.randn(5, size + 7)[:, 7:]
    angle = torch.rand(5, 1, rotary // 2)
    angles = RopeAngles(torch.cat([angle.cos()] * 2, -1), torch.cat((-angle.sin(), angle.sin()), -1))
    where = torch.tensor([2, -1, 0, 2, 1]), torch.tensor([0, 1, 2, 1, 0])
    found = []
    for op in (prepare_vectors_.kernel, prepare_vectors_.twin):
        mine = q.clone(), vectors.clone(), torch.full((3, 3, size), float("nan")).to(pages)
        torch.manual_seed(1)
        op(*mine[:2], Norm(torch.rand(size), 1e-3), angles, mine[2], *where)
        found.append(mine)
    assert int(found[1][2].isfinite().all(-1).sum()) == 4
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True, rtol=2e-3 if pages == torch.float16 else 1e-5, atol=1e-3)
