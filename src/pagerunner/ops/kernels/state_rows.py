"""What the kernels of recurrent layers share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import shared_memory
from pagerunner.ops.state_rows import StateRows


@triton.jit
def softplus(x):
    """`log(1 + e^x)`, accurate for every x."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    small = tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.where(x > 20.0, x, small)


@triton.jit
def _add_within_row(begins, sum_before, begins_too, x):
    """Combine two stretches of tokens.

    Each has a flag, whether a row begins in it, and its sum since that beginning.
    """
    return begins | begins_too, tl.where(begins_too != 0, x, sum_before + x)


@triton.jit
def row_sums(x, row, row_T, token, index):
    """Running sums over a block's tokens. A new sum begins where a row begins."""
    before = tl.load(row_T + token - 1, mask=(index > 0) & (row >= 0), other=-1)
    _, total = tl.associative_scan(((before != row).to(tl.int32), x), 0, _add_within_row)
    return total


@triton.jit
def state_entry(table, slots, row, table_stride):
    """The row's page table entry, int64."""
    slot = tl.load(slots + row).to(tl.int64)
    return tl.load(table + slot * table_stride)


@triton.jit
def saves_of(save_start, row, HAS_SAVES: tl.constexpr):
    """Which saves are the row's: the first one, and the one after the last."""
    at = tl.load(save_start + row) if HAS_SAVES else 0
    stop = tl.load(save_start + row + 1) if HAS_SAVES else 0
    return at, stop


@triton.jit
def stretch(save_end, save, at, stop, first, end):
    """The tokens from the save before `save` up to save `save`.

    Saves `at` to `stop` divide the tokens from `first` to `end`.
    """
    begin = tl.load(save_end + save - 1, mask=save > at, other=first)
    upto = tl.load(save_end + save, mask=save < stop, other=end)
    return begin, upto


@triton.jit
def _entry_of(target, state_stride, ITEM: tl.constexpr):
    return target // (tl.cast(state_stride, tl.int64) * ITEM)


@triton.jit
def saved_entry(save_target, save, stop, own, state_stride, ITEM: tl.constexpr):
    """The page table entry that save `save` goes to, int64; the row's own after the last one.

    The compiler knows the alignment of an entry times the stride. It doesn't know the alignment of a target.
    """
    target = tl.load(save_target + save, mask=save < stop, other=0)
    return tl.where(save < stop, _entry_of(target, state_stride, ITEM), own)


@triton.jit
def unfinished(save_end, save, query_start, row_T, MOST: tl.constexpr, C: tl.constexpr):
    """The token before which a save is, its row's first token, and whether it lies inside a block of a row of more than MOST."""
    cut = tl.load(save_end + save)
    row = tl.load(row_T + cut - 1)
    first, end = tl.load(query_start + row), tl.load(query_start + row + 1)
    return cut, first, (cut % C != 0) & (end - first > MOST)


@triton.jit
def unfinished_entry(save_target, save, state_stride, ITEM: tl.constexpr):
    """The page table entry, int64, of a save that is there."""
    return _entry_of(tl.load(save_target + save), state_stride, ITEM)


def stages(most: int, block: int, device: torch.device) -> int:
    """Blocks whose tiles, `block` bytes each, are held at a time: at most `most`, while a sixth of the memory is left."""
    return max(1, min(most, shared_memory(device) * 5 // 6 // block))


def save_arguments(rows: StateRows) -> tuple[object, ...]:
    """Start, end and target tensors, and whether there are any; without saves any tensors will do."""
    if rows.saves is None:
        return rows.step.query_start_R1, rows.step.query_start_R1, rows.step.query_start_R1, False
    return (*rows.saves, True)
