"""Kernels of ops/host_words.py.

Both are one kernel for all dtypes, sizes and addresses, so none is compiled while requests run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.ahead import rehearsing
from pagerunner.ops.kernels.launch import blocks, dependent, start_next, wait_turn

BLOCK = 512  # words: 64 KiB are 32 programs, each thread of which has four words on their way


@triton.jit(
    do_not_specialize=["size", "size_2"],
    do_not_specialize_on_alignment=["source", "target", "source_2", "target_2"],
)
def _copy_words(
    source, target, size, source_2, target_2, size_2, FROM_HOST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    start_next(PDL)
    if tl.program_id(1) == 1:
        source, target, size = source_2, target_2, size_2
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if FROM_HOST:  # a constant, written before the launch. Volatile: a cache may have what was there before
        words = tl.load(source + at, at < size, volatile=True)
        wait_turn(PDL)
    else:
        wait_turn(PDL)
        words = tl.load(source + at, at < size)
    tl.store(target + at, words, at < size)


def _words(there: torch.Tensor, here: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert there.dtype == here.dtype and there.numel() == here.numel(), (
        f"{there.dtype} {there.shape}, {here.dtype} {here.shape}"
    )
    assert there.is_contiguous() and here.is_contiguous(), f"strides {there.stride()}, {here.stride()}"
    return there.view(torch.int32), here.view(torch.int32)


def from_host(there: torch.Tensor, here: torch.Tensor) -> None:
    """See ops/host_words.py."""
    if rehearsing():  # torch's operators take indices from what comes
        there.copy_(here, non_blocking=True)
    target, source = _words(there, here)
    size = source.numel()
    _copy_words[(blocks(size, BLOCK), 1)](
        source, target, size, source, target, 0, FROM_HOST=True, BLOCK=BLOCK, **dependent(there.device)
    )


def to_host(
    there: torch.Tensor, here: torch.Tensor, there_2: torch.Tensor | None = None, here_2: torch.Tensor | None = None
) -> None:
    """See ops/host_words.py."""
    source, target = source_2, target_2 = _words(there, here)
    size, size_2 = source.numel(), 0
    if there_2 is not None and here_2 is not None:
        source_2, target_2 = _words(there_2, here_2)
        size_2 = source_2.numel()
    _copy_words[(blocks(max(size, size_2), BLOCK), 2 if size_2 else 1)](
        source, target, size, source_2, target_2, size_2, FROM_HOST=False, BLOCK=BLOCK, **dependent(there.device)
    )
