"""Parts of rows that are ordered by groups; see `ops/side_by_side.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import blocks, dependent, start_next_and_wait


@triton.jit
def _by_parts_kernel(
    qkvz_ptr, ba_ptr, out_ptr, qkvz_row, ba_row, GROUPS: tl.constexpr, KEY: tl.constexpr, VALUES: tl.constexpr, RATES: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of a token's result."""
    start_next_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wide: tl.constexpr = 2 * KEY + 2 * VALUES
    ends: tl.constexpr = GROUPS * wide
    # queries and keys, then values and gates: two parts of the same size each
    behind = cols - 2 * GROUPS * KEY
    part, size = tl.where(behind < 0, cols, behind), tl.where(behind < 0, KEY, VALUES)
    first = tl.where(behind < 0, 0, 2 * KEY) + part // (GROUPS * size) * size
    place = part % (GROUPS * size) // size * wide + first + part % size
    x = tl.load(qkvz_ptr + row * qkvz_row + place, mask=cols < ends, other=0.0)
    own = cols - ends
    place = own % (GROUPS * RATES) // RATES * (2 * RATES) + own // (GROUPS * RATES) * RATES + own % RATES
    last: tl.constexpr = ends + 2 * GROUPS * RATES
    y = tl.load(ba_ptr + row * ba_row + place, mask=(own >= 0) & (cols < last), other=0.0)
    tl.store(out_ptr + row * last + cols, tl.where(own < 0, x, y), mask=cols < last)


def by_parts(qkvz_TC: torch.Tensor, ba_TR: torch.Tensor, groups: int, key_dim: int) -> torch.Tensor:
    """See `ops/side_by_side.py`."""
    assert qkvz_TC.stride(1) == 1 and ba_TR.stride(1) == 1, "a projection's features lie beside each other"
    tokens, columns, block = qkvz_TC.shape[0], qkvz_TC.shape[1] + ba_TR.shape[1], 1024
    out_TC = qkvz_TC.new_empty(tokens, columns)
    if tokens:
        values, rates = qkvz_TC.shape[1] // groups // 2 - key_dim, ba_TR.shape[1] // groups // 2
        _by_parts_kernel[(tokens, blocks(columns, block))](
            qkvz_TC, ba_TR, out_TC, qkvz_TC.stride(0), ba_TR.stride(0), GROUPS=groups, KEY=key_dim, VALUES=values, RATES=rates,
            BLOCK=block, **dependent(qkvz_TC.device),
        )  # fmt: skip
    return out_TC
