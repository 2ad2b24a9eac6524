"""The past of a step's long rows, copied out of fp8 pages into tiles of 128 tokens in the model's dtype.

Every block of a row's queries reads the row's whole past, and would convert it again. Example: 8,192 new tokens in groups of 4 query heads are 256
blocks. So the past is converted once, and the kernel of `paged_prefill_gluon.py` reads the tiles as if they were pages of 128 tokens. Where scales are
powers of two, as those of pages are, conversion to bfloat16 is exact.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagerunner.batch import KVPages
from pagerunner.ops.kernels.launch import blocks, dependent, padded, start_next_and_wait
from pagerunner.ops.kernels.paged.paged_heads import fp8_type
from pagerunner.ops.kernels.paged.paged_tiles import load_tile

SIZE = 128
"""Tokens of a tile."""
MOST_ELEMENTS = 2**26
"""Of keys and values that are copied together. Heads that find no room have their turn later. A layer takes this room whatever its past is: 128 MiB, which
the warm-up has taken too."""


@triton.jit
def _copy(pages_ptr, se, ss, head, scales_ptr, scales_se, entry_N, slot_N, there_N, out_ptr, out_st, D: tl.constexpr, DP: tl.constexpr, FP8: tl.constexpr):  # fmt: skip
    scale_N = tl.load(scales_ptr + entry_N * scales_se, mask=there_N, other=0.0)
    x = load_tile(pages_ptr + head, entry_N * se + slot_N * ss, there_N, D, DP, FP8, tl.float32) * scale_N[:, None]
    d = tl.arange(0, DP)[None, :]
    at = out_ptr + (tl.arange(0, entry_N.shape[0]) * out_st)[:, None] + d
    tl.store(at, x.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["num_rows", "head0"])
def dense_kernel(
    kp_ptr, kp_se, kp_ss, kp_sh, vp_ptr, vp_se, vp_ss, vp_sh, scales_ptr, scales_se, scales_sv, table_ptr, table_st, slots_ptr, starts_ptr,
    lengths_ptr, first_ptr, k_ptr, v_ptr, num_rows, head0, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile, head). Rows with several new tokens have tiles for their past, one row's behind another's: `first` [R] says from which on.
    What a row's last tile has beyond the past are zeros.
    """
    start_next_and_wait(PDL)
    tile, head = tl.program_id(0), tl.program_id(1)
    row, before, counted = 0, 0, 0
    for start in range(0, num_rows, 256):
        i = start + tl.arange(0, 256)
        there = i < num_rows
        new = tl.load(starts_ptr + i + 1, mask=there, other=0) - tl.load(starts_ptr + i, mask=there, other=0)
        count = tl.cdiv(tl.where(new > 1, tl.load(lengths_ptr + i, mask=there, other=0) - new, 0), N)
        ends = counted + tl.cumsum(count, 0)
        if (tile == 0) & (head == 0):
            tl.store(first_ptr + i, ends - count, mask=there)
        earlier = there & (ends <= tile)
        row += tl.sum(earlier.to(tl.int32), 0)
        before += tl.sum(tl.where(earlier, count, 0), 0)
        counted += tl.sum(count, 0)
    if tile < counted:
        n = (tile - before) * N + tl.arange(0, N)
        past = tl.load(lengths_ptr + row) + tl.load(starts_ptr + row) - tl.load(starts_ptr + row + 1)
        there = n < past
        row_table = table_ptr + tl.load(slots_ptr + row).to(tl.int64) * table_st
        entry = tl.load(row_table + n // PAGE, mask=there, other=0)
        out_st = tl.num_programs(1) * D
        at = tile.to(tl.int64) * N * out_st + head * D
        own = head0 + head
        slot, scales_ptr = n % PAGE, scales_ptr + own
        _copy(kp_ptr, kp_se, kp_ss, own * kp_sh, scales_ptr, scales_se, entry, slot, there, k_ptr + at, out_st, D, DP, FP8)  # fmt: skip
        _copy(vp_ptr, vp_se, vp_ss, own * vp_sh, scales_ptr + scales_sv, scales_se, entry, slot, there, v_ptr + at, out_st, D, DP, FP8)  # fmt: skip


class Dense(NamedTuple):
    """Tiles of a step: their numbers, and each row's first one, which the kernel computes."""

    tiles: torch.Tensor
    first_R: torch.Tensor

    @classmethod
    def of(cls, past: tuple[int, ...], num_rows: int, device: torch.device) -> Dense:
        """For rows with so much `past`, which the kernel has still to number."""
        return cls(torch.arange(_tiles(past), device=device), torch.empty(num_rows, dtype=torch.int32, device=device))

    def copy(
        self, pages: KVPages, table: torch.Tensor, rows: tuple[torch.Tensor, ...], heads: slice, room: torch.Tensor
    ) -> KVPages:
        """The past of these heads in `room`, as pages of 128 tokens. `rows`: slots, starts and lengths."""
        assert pages.scales is not None
        dim = pages.k.shape[3]
        size = self.tiles.shape[0], SIZE, heads.stop - heads.start, dim
        k, v = room[: 2 * math.prod(size)].view(2, *size)
        codes = (x.view(torch.uint8) for x in (pages.k, pages.v))
        strides = [value for x in codes for value in (x, *x.stride()[:3])]
        dense_kernel[size[::2]](
            *strides, pages.scales, *pages.scales.stride()[:2], table, table.stride(0), *rows, self.first_R, k, v, self.first_R.shape[0],
            heads.start, N=SIZE, D=dim, DP=padded(dim), PAGE=pages.k.shape[1], FP8=fp8_type(pages.k.dtype), num_warps=4 * blocks(dim, 128), **dependent(table.device),
        )  # fmt: skip
        return KVPages(0, k, v)


def room_for_tiles(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What `Dense.copy` writes to."""
    return torch.empty(MOST_ELEMENTS, dtype=dtype, device=device)


def _tiles(past: tuple[int, ...]) -> int:
    return max(sum(blocks(tokens, SIZE) for tokens in past), 1)


def heads_at_once(past: tuple[int, ...], kv_heads: int, dim: int) -> int:
    """How many heads of keys of `dim` elements there is room for; 0 if not for one."""
    return min(MOST_ELEMENTS // (_tiles(past) * 2 * SIZE * dim), kv_heads)
