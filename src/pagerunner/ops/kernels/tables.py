"""Kernels of ops/tables.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import blocks

BLOCK = 256


@triton.jit(do_not_specialize=["count"])
def _write_entries(table, places_N, entries_N, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = i < count
    place = tl.load(places_N + i, mine, 0)
    tl.store(table + place, tl.load(entries_N + i, mine, 0), mine)


def write_entries(table: torch.Tensor, places_N: torch.Tensor, entries_N: torch.Tensor) -> None:
    """See ops/tables.py."""
    count = places_N.shape[0]
    _write_entries[(blocks(count, BLOCK),)](table, places_N, entries_N, count, BLOCK=BLOCK)
