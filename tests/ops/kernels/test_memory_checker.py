"""The memory checker of this folder's tests finds what a kernel touches outside of its tensors."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a card compute-sanitizer does this")


@triton.jit
def _copy(source, target, count, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(target + offsets, tl.load(source + offsets, mask=offsets < count), mask=offsets < count)


@pytest.mark.parametrize(("read", "written", "kind"), [(15, 16, "load"), (16, 15, "store"), (1, 16, "load")])
def test_what_is_touched_outside_of_every_tensor_is_found(read: int, written: int, kind: str) -> None:
    source, target = torch.ones(read), torch.zeros(written)
    with pytest.raises(Exception, match=f"a {kind} of {16 - min(read, written)} elements outside of every tensor"):
        _copy[(1,)](source, target, 16, BLOCK=16)


@pytest.mark.parametrize("count", [0, 1, 15])
def test_what_is_masked_is_not_touched(count: int) -> None:
    source, target = torch.ones(count + 1)[:count], torch.zeros(15)
    _copy[(1,)](source, target, count, BLOCK=16)
    assert target.sum() == count
