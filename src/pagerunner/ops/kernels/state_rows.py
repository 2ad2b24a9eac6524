"""What the kernels of recurrent layers share."""

from __future__ import annotations

import triton
import triton.language as tl

from pagerunner.ops.state_rows import StateRows

NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def softplus(x):
    """`log(1 + e^x)`, accurate for every x."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    small = tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.where(x > 20.0, x, small)


@triton.jit
def state_entry(table, slots, row, table_stride):
    """The row's page table entry, int64."""
    slot = tl.load(slots + row).to(tl.int64)
    return tl.load(table + slot * table_stride)


@triton.jit
def next_save(save_end, at, stop):
    """The token before which save `at` wants the state, or one that never comes."""
    return tl.load(save_end + at, mask=at < stop, other=NO_TOKEN)


def save_arguments(rows: StateRows) -> tuple[object, ...]:
    """Start, end and target tensors, and whether there are any; without saves any tensors will do."""
    if rows.saves is None:
        return rows.query_start_R1, rows.query_start_R1, rows.query_start_R1, False
    return (*rows.saves, True)
