"""What isn't a number stays none in fp8, in kernels as in their twins: the engine's check of logits finds a broken request by it."""

from __future__ import annotations

import pytest
import torch

from helpers.interpreter_floats import install

triton = pytest.importorskip("triton")
install()
import triton.language as tl  # noqa: E402

from pagerunner.ops.fp8 import fitting_scale, to_fp8  # noqa: E402
from pagerunner.ops.kernels import paged_heads  # noqa: E402


@triton.jit
def _store(x, y, scale, FP8_MAX: tl.constexpr, FP8: tl.constexpr):
    i = tl.arange(0, 4)
    value = tl.load(x + i)
    own = paged_heads.fitting_scale(tl.max(tl.abs(value), 0), FP8_MAX)
    tl.store(y + i, paged_heads.quantise(value, own, FP8_MAX, FP8).to(tl.float32))
    tl.store(scale, own)


@pytest.mark.parametrize("dtype", paged_heads.FP8_MAX)
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_no_number_stays_none(dtype: torch.dtype, broken: float) -> None:
    x, found, scale = torch.tensor([1.0, broken, -3.0, 0.0]), torch.empty(4), torch.empty(1)
    _store[(1,)](x, found, scale, FP8_MAX=paged_heads.FP8_MAX[dtype], FP8=paged_heads.fp8_type(dtype))
    own = fitting_scale(x.abs().amax(), dtype)
    want = to_fp8(x, own, dtype).float() * own
    assert want[1].isnan() and (found * scale)[1].isnan()
    if broken != broken:  # a page's other numbers are what they are
        assert (found * scale).tolist()[::2] == [1.0, -3.0]
