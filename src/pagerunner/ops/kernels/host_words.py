"""Kernels of ops/host_words.py.

Both are one kernel for all dtypes, sizes and addresses, so none is compiled while requests run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.driver import driver

from pagerunner.ops.ahead import rehearsing
from pagerunner.ops.kernels.launch import blocks, dependent, start_next, wait_turn

BLOCK = 512  # words: 64 KiB are 32 programs, each thread of which has four words on their way


@triton.jit(
    do_not_specialize=["size", "size_2"], do_not_specialize_on_alignment=["source", "target", "source_2", "target_2"]
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


_compiled: dict[tuple[int, bool], Any] = {}
"""By device and FROM_HOST, once launched. Triton takes longer to find a kernel by its arguments than to launch it, and here they choose nothing."""


def _launch(device: torch.device, from_host: bool, *pairs: tuple[torch.Tensor, ...]) -> None:
    """Copy words from the first to the second tensor of one or two pairs."""
    for one, other in pairs:
        alike = one.dtype == other.dtype and one.shape == other.shape
        assert not one.nbytes % 4, f"{one.nbytes} bytes are not whole words"
        assert alike and one.is_contiguous() and other.is_contiguous(), (one.dtype, other.dtype, one.shape, other.shape)
    (source, target), (source_2, target_2) = pairs[0], pairs[-1]
    size, size_2 = source.nbytes // 4, source_2.nbytes // 4
    grid, place = (blocks(max(size, size_2), BLOCK), len(pairs), 1), (device.index, from_host)
    kernel = _compiled.get(place)
    if kernel is not None and not rehearsing():
        stream, no_hook = driver.active.get_current_stream(device.index), None
        kernel.run(
            *grid, stream, kernel.function, kernel.packed_metadata, no_hook, no_hook, no_hook,
            source.data_ptr(), target.data_ptr(), size, source_2.data_ptr(), target_2.data_ptr(), size_2, from_host, BLOCK, None,
        )  # fmt: skip
        return
    source, target, source_2, target_2 = (one.view(torch.int32) for one in (source, target, source_2, target_2))
    kernel = _copy_words[grid](
        source, target, size, source_2, target_2, size_2, FROM_HOST=from_host, BLOCK=BLOCK, **dependent(device)
    )
    if not rehearsing():
        _compiled[place] = kernel


def from_host(there: torch.Tensor, here: torch.Tensor) -> None:
    """See ops/host_words.py."""
    if rehearsing():  # torch's operators take indices from what comes
        there.copy_(here, non_blocking=True)
    _launch(there.device, True, (here, there))


def to_host(there: torch.Tensor, here: torch.Tensor, *more: torch.Tensor) -> None:
    """See ops/host_words.py."""
    _launch(there.device, False, (there, here), *((more,) if more else ()))
