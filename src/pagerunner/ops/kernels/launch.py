"""How kernels are launched: programmatic dependent launch where the device has it.

A kernel that is launched dependently may start while its predecessor still runs. It does four things in order:

1. It lets its own successor start.
2. It reads constants only, such as weights, and stores nothing.
3. It waits until its predecessor has finished and written everything.
4. It does its work.

Every kernel waits like this, so order is kept across any number of kernels.

A kernel may let its successor start only after its own wait (step 3 before step 1). Then all earlier kernels have ended when the
successor starts, and before its own wait the successor may also read what they have written. Example: the second product of a token's
experts reads which experts these are, and their first weights (`kernels/moe/moe_one.py`). Decode attention does this in every layer. So in
all layers but the first it reads the step's schedule, and keys of earlier steps, before its wait (`kernels/paged/paged_few.py`).
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether kernels on this device may start before their predecessor has ended: Hopper and later."""
    if device.type != "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors the device has. A small number for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one program may have; Hopper's for the interpreter."""
    if device.type != "cuda":
        return 227 * 1024
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def dependent(device: torch.device) -> dict[str, Any]:
    """The launch arguments `PDL` (of the kernel, for the functions below) and `launch_pdl` (of the launch)."""
    if has_dependent_launch(device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@triton.jit
def start_next(PDL: tl.constexpr):
    """Step 1: the next kernel may start."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_turn(PDL: tl.constexpr):
    """Step 3: from here on, everything that earlier kernels have written can be read."""
    if PDL:
        gdc_wait()


@triton.jit
def start_next_and_wait(PDL: tl.constexpr):
    """Steps 1 and 3, of a kernel with no constants to read between them."""
    start_next(PDL)
    wait_turn(PDL)


def blocks(count: int, size: int) -> int:
    """How many blocks of `size` hold `count` elements."""
    return -(-count // size)


def padded(size: int) -> int:
    """The power of two that a block needs to hold `size` elements; 0 for none."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


def row_warps(block: int) -> int:
    """Warps of a program that has a row of so many numbers in registers: at most 32 for each thread."""
    return 4 if block <= 2048 else 8 if block <= 8192 else 16
