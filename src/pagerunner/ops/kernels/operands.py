"""Codes of stored matrices as the first operand of Hopper's matrix units, from memory to the units without a way through shared memory.

A matrix unit wants weights as its first operand in registers: a thread holds, of a row, the columns 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of every 16,
where q is its number among four neighbours. A thread that reads 16 bytes of 4-bit codes holds 32 neighbouring columns instead. A product
doesn't change if the columns of both factors are put in another order. So the weights stay where they are, and the few inputs are put in the
order in which threads hold the weights (`arrange`). A *place* is a position in that order; `column_at` says which column it is.

Rows are permuted, too. `row_places` says which row of a tile each loaded row is: loads give a warp 8 neighbouring rows and the next
warp the next 8; a matrix unit's warp has 16. `operand` puts loaded rows and columns in their places, which costs no instruction.

Conversions leave out the last multiplication: e2m1's bits in place are 2 ** -126 of the number. Half of that factor is in the arranged
inputs (2 ** 63), the other half in the scales. bfloat16 has room for both: inputs up to 2 ** 64, and scales of 2 ** -62 to 2 ** 64.

Shape letters: N rows of weights, K columns.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.codes import E2M1
from pagerunner.ops.kernels.launch import blocks, dependent, start_next_and_wait
from pagerunner.ops.kernels.stored import scale_numbers

PIECE = 128
"""Columns whose order is changed together. Arranged inputs are padded to a multiple with zeros."""


def raised(form: int) -> int:
    """The power of two that arranged inputs are multiplied by."""
    return 63 if form == E2M1.value else 0


def must_end() -> bool:
    """Whether kernels are compiled, so that products have to end with their step: see `ended`."""
    return os.environ.get("TRITON_INTERPRET") != "1"


@triton.jit
def ended(acc):
    """The same, after the products that make it have ended.

    Otherwise the next step's numbers may be written into the registers that a product still reads (`scripts/check_compiled.py`).
    """
    return tl.inline_asm_elementwise("// ended", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def column_at(place):
    """The column at a place of arranged inputs."""
    lane, word, half = (place >> 1) & 3, (place >> 4) & 3, (place >> 6) & 1
    return (place & -128) + lane * 32 + half * 16 + word * 4 + (place & 1) * 2 + ((place >> 3) & 1)


@triton.jit
def row_places(BN: tl.constexpr, WARPS: tl.constexpr):
    """For each loaded row: its row in the tile."""
    r = tl.arange(0, BN)
    return (r // (16 * WARPS) * WARPS + r // 8 % WARPS) * 16 + r // (8 * WARPS) % 2 * 8 + r % 8


@triton.jit
def operand(numbers, WARPS: tl.constexpr):
    """Loaded rows of 64 numbers [N, 64] in their places."""
    BN: tl.constexpr = numbers.shape[0]
    split = tl.reshape(numbers, [BN // (16 * WARPS), 2, WARPS, 8, 4, 4, 2, 2])
    return tl.reshape(tl.permute(split, (0, 2, 1, 3, 5, 6, 4, 7)), [BN, 64])


@triton.jit
def _numbers_of(even, odd, dtype: tl.constexpr):
    """Numbers [N, 64] of words [N, 16] that hold two bfloat16 each: those of bytes 0 and 2 of words of codes, and of bytes 1 and 3."""
    words = tl.join(even, odd)
    if dtype == tl.float32:
        first, second = (words << 16).to(tl.float32, bitcast=True), (words & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        first = (words & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True).to(dtype)
        second = (words >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True).to(dtype)
    return tl.reshape(tl.join(first, second), [even.shape[0], 64])


@triton.jit
def nibbles_numbers(words, dtype: tl.constexpr, FORM: tl.constexpr):
    """Numbers of the low nibbles of words [N, 16], and of the high ones, in `dtype` [N, 64]. Of e2m1 2 ** -126 of the numbers, of int4 128 + n."""
    next = words >> 8
    # a product with two powers of two puts a nibble in two places; the mask leaves the sign of one and the rest of the other
    if FORM == E2M1:
        low, low_odd = ((words & 0x000F000F) * 0x1040) & 0x81C081C0, ((next & 0x000F000F) * 0x1040) & 0x81C081C0
        high, high_odd = ((words & 0x00F000F0) * 0x104) & 0x81C081C0, ((next & 0x00F000F0) * 0x104) & 0x81C081C0
    else:
        low, low_odd = (words & 0x000F000F) | 0x43004300, (next & 0x000F000F) | 0x43004300
        high, high_odd = ((words >> 4) & 0x000F000F) | 0x43004300, ((words >> 12) & 0x000F000F) | 0x43004300
    return _numbers_of(low, low_odd, dtype), _numbers_of(high, high_odd, dtype)


@triton.jit
def lifted_scales(raw, dtype: tl.constexpr, RAISED: tl.constexpr):
    """Scales of 4-bit codes in `dtype`, times 2 ** RAISED."""
    if RAISED and raw.dtype == tl.uint8:
        bits = tl.minimum(raw.to(tl.int16) + RAISED, 255) << 7
        scales = bits.to(tl.int16).to(tl.bfloat16, bitcast=True).to(dtype)
    else:
        power: tl.constexpr = 2.0**RAISED
        scales = (scale_numbers(raw) * power).to(dtype)
    return scales


@triton.jit
def _arrange_kernel(x_ptr, out_ptr, x_row, K: tl.constexpr, WIDE: tl.constexpr, RAISED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    start_next_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = column_at(place)
    power: tl.constexpr = 2.0**RAISED
    x = tl.load(x_ptr + token * x_row + column, mask=column < K, other=0.0).to(tl.float32) * power
    tl.store(out_ptr + token * WIDE + place, x.to(out_ptr.dtype.element_ty), mask=place < WIDE)


def arranged(x_TK: torch.Tensor, form: int) -> torch.Tensor:
    """Inputs in the order that codes of the format want, raised, and padded with zeros to whole pieces."""
    tokens, inputs = x_TK.shape
    wide = blocks(inputs, PIECE) * PIECE
    out = torch.empty(tokens, wide, dtype=x_TK.dtype, device=x_TK.device)
    _arrange_kernel[(tokens, blocks(wide, 1024))](
        x_TK, out, x_TK.stride(0), K=inputs, WIDE=wide, RAISED=raised(form), BLOCK=1024,
        **dependent(x_TK.device),
    )  # fmt: skip
    return out
