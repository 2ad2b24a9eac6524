"""The memory checker that every test of this folder runs under catches what it is for."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
import triton  # noqa: E402 - only where it is installed
import triton.language as tl  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on machines without a GPU")


@triton.jit
def _copy(source, target, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


def test_accesses_inside_tensors_pass() -> None:
    source, target = torch.randn(7), torch.zeros(9)
    _copy[(1,)](source, target, 7, 8)
    assert torch.equal(target[:7], source)


@pytest.mark.parametrize(("source", "target", "kind"), [(6, 7, "load"), (7, 6, "store")])
def test_one_element_too_far_is_noticed(source: int, target: int, kind: str) -> None:
    with pytest.raises(Exception, match=f"a {kind} of 1 elements"):
        _copy[(1,)](torch.randn(source), torch.zeros(target), 7, 8)
