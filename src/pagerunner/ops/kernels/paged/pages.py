"""Kernels of ops/pages.py: one launch for all pages of a step, 8 bytes at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import blocks

BLOCK = 2048  # words of 8 bytes


@triton.jit(do_not_specialize_on_alignment=["fills_N3"])
def _fill_pages(memory, fills_N3, BLOCK: tl.constexpr):
    row = fills_N3 + tl.program_id(0) * 3
    first, words = tl.load(row) // 8, tl.load(row + 1) // 8
    value = tl.load(row + 2)
    for shift in tl.static_range(3):  # one byte becomes eight
        value = value | (value << (8 << shift))
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(memory + first + at, tl.zeros([BLOCK], tl.int64) + value, at < words)


def fill_pages(memory: torch.Tensor, fills_N3: torch.Tensor, most_bytes: int) -> None:
    """See ops/pages.py."""
    grid = (fills_N3.shape[0], blocks(most_bytes, BLOCK * 8))
    _fill_pages[grid](memory.view(torch.int64), fills_N3, BLOCK=BLOCK)


@triton.jit(do_not_specialize_on_alignment=["copies_N3"])
def _copy_pages(memory, copies_N3, BLOCK: tl.constexpr):
    row = copies_N3 + tl.program_id(0) * 3
    source, target, words = tl.load(row) // 8, tl.load(row + 1) // 8, tl.load(row + 2) // 8
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(memory + target + at, tl.load(memory + source + at, at < words, 0), at < words)


def copy_pages(memory: torch.Tensor, copies_N3: torch.Tensor, most_bytes: int) -> None:
    """See ops/pages.py."""
    grid = (copies_N3.shape[0], blocks(most_bytes, BLOCK * 8))
    _copy_pages[grid](memory.view(torch.int64), copies_N3, BLOCK=BLOCK)
