"""See `ops/logsumexp.py`: a program for each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(x_ptr, out_ptr, x_row, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, size, BLOCK):
        x = tl.load(x_ptr + row * x_row + first + columns, mask=first + columns < size, other=float("-inf"))
        new = tl.maximum(most, x, propagate_nan=tl.PropagateNan.ALL)
        base = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(most - base) + tl.exp(x - base)
        most = new
    highest = tl.max(most, 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    tl.store(out_ptr + row, highest + tl.log(tl.sum(total * tl.exp(most - highest), 0)))


def row_logsumexp(x_LV: torch.Tensor) -> torch.Tensor:
    """See the twin."""
    x_LV = x_LV.float() if x_LV.stride(1) == 1 else x_LV.float().contiguous()
    out_L = torch.empty(x_LV.shape[0], dtype=torch.float32, device=x_LV.device)
    if x_LV.shape[0]:
        _kernel[(x_LV.shape[0],)](x_LV, out_L, x_LV.stride(0), x_LV.shape[1], BLOCK=2048, num_warps=8)
    return out_L
