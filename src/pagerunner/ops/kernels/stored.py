"""Unpacks a stored matrix, and the steps of it that other kernels share; see `ops/stored.py`. As there, in float32 with one rounding at the end."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.codes import form_of, numbers4, uses_words
from pagerunner.ops.kernels.launch import blocks, dependent, multiprocessors, start_next, start_next_and_wait, wait_turn
from pagerunner.ops.stored import Stored, Stored4, Stored8

HELD_BY = {
    torch.bfloat16: (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8),
    torch.float16: (torch.float16, torch.float8_e4m3fn),
}
"""Dtypes of scales whose every number is one of the key's dtype. Products of such a scale and a code are rounded once in that dtype, too."""

PIECES = 256
"""Pieces of 8 bytes of 4-bit codes that a program unpacks at a time: two for each of its threads."""
BESIDE = 2
"""Programs of 4 warps and 32 registers a thread that fit a multiprocessor beside a kernel of 8 warps and 224 registers a thread."""


@triton.jit
def scale_numbers(raw):
    """Scales in float32; bytes are e8m0."""
    if raw.dtype == tl.uint8:
        bits = raw.to(tl.uint32) << 23
        bits = tl.where(raw == 0, 0x00400000, tl.where(raw == 255, 0x7FC00000, bits))
        return bits.to(tl.uint32).to(tl.float32, bitcast=True)
    return raw.to(tl.float32)


@triton.jit
def _dense8_kernel(codes_ptr, scales_ptr, out_ptr, features, K: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr,
                   BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BN rows and BK columns of 8-bit codes. BO x BI of them share a scale."""
    start_next(PDL)
    rows = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    cols = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = (rows < features)[:, None] & (cols < K)[None, :]
    place = rows[:, None] * K + cols[None, :]
    codes = tl.load(codes_ptr + place, mask=inside, other=0.0)
    per_row: tl.constexpr = (K + BI - 1) // BI
    if BI >= K:
        scale = tl.load(scales_ptr + rows // BO, mask=rows < features, other=0.0)[:, None]
    else:
        scale = tl.load(scales_ptr + (rows // BO)[:, None] * per_row + (cols // BI)[None, :], mask=inside, other=0.0)
    y = (codes.to(tl.float32) * scale).to(out_ptr.dtype.element_ty)
    wait_turn(PDL)
    tl.store(out_ptr + place, y, mask=inside)


@triton.jit
def _groups(runs, G: tl.constexpr, HIGH: tl.constexpr):
    """Which scale the low or the high nibbles of runs have, all rows' runs and scales being counted through."""
    if G == 16:
        groups = runs * 2 + (1 if HIGH else 0)
    else:
        groups = runs // (G // 32)
    return groups


@triton.jit
def _half_of_pieces(codes, s_ptr, z_ptr, factors, runs, inside, HIGH: tl.constexpr, dtype: tl.constexpr, G: tl.constexpr,
                    FORM: tl.constexpr, WORDS: tl.constexpr, HELD: tl.constexpr, ZEROS: tl.constexpr):  # fmt: skip
    """What the low or the high nibbles of pieces [P, 8] stand for. HELD: scales are numbers of `dtype`, so a product in it is rounded once."""
    groups = _groups(runs, G, HIGH)
    numbers_dtype: tl.constexpr = dtype if HELD else tl.float32
    numbers = numbers4(codes, HIGH, numbers_dtype, FORM, WORDS).to(numbers_dtype)
    if ZEROS:
        zeros = tl.load(z_ptr + groups, mask=inside, other=0).to(tl.float32) - 8.0
        numbers -= zeros.to(numbers_dtype)[:, None]
    scales = scale_numbers(tl.load(s_ptr + groups, mask=inside, other=0.0)) * factors
    return (numbers * scales.to(numbers_dtype)[:, None]).to(dtype)


@triton.jit(do_not_specialize=["programs"])
def _dense4_kernel(codes_ptr, scales_ptr, zeros_ptr, factors_ptr, out_ptr, count, programs, K: tl.constexpr, G: tl.constexpr,
                   FORM: tl.constexpr, WORDS: tl.constexpr, HELD: tl.constexpr, ZEROS: tl.constexpr,
                   FACTORS: tl.constexpr, PIECES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """The `count` pieces of whole rows, PIECES at a time. A piece is 8 bytes of 4-bit codes, half a run; G columns share a scale.

    A thread reads a piece and writes 16 bytes of its low nibbles' numbers, then 16 of its high ones'. Two threads' make a whole sector of
    32 bytes, so that nothing goes through shared memory.
    """
    start_next_and_wait(PDL)
    own = tl.arange(0, PIECES)
    byte = tl.arange(0, 8)[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    for first in range(tl.program_id(0) * PIECES, count, programs * PIECES):
        inside = own < count - first
        runs = first // 2 + own // 2
        codes = tl.load(
            codes_ptr + tl.cast(first, tl.int64) * 8 + (own[:, None] * 8 + byte), mask=inside[:, None], other=0
        )
        factors = tl.full((PIECES,), 1.0, tl.float32)
        if FACTORS:
            factors = tl.load(factors_ptr + runs // (K // 32), mask=inside, other=0.0)
        low = _half_of_pieces(
            codes, scales_ptr, zeros_ptr, factors, runs, inside, False, dtype, G, FORM, WORDS, HELD, ZEROS
        )
        high = _half_of_pieces(
            codes, scales_ptr, zeros_ptr, factors, runs, inside, True, dtype, G, FORM, WORDS, HELD, ZEROS
        )
        place = out_ptr + tl.cast(first, tl.int64) * 16 + ((own // 2 * 32 + own % 2 * 8)[:, None] + byte)
        tl.store(place, low, mask=inside[:, None])
        tl.store(place + 16, high, mask=inside[:, None])


def operands_of(
    x_TI: torch.Tensor, stored: Stored, bias_O: torch.Tensor | None
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """What a product's kernel is given of a stored matrix and the bias: tensors, and constants that say what they are.

    Codes, scales, zero points, rows' factors and the bias. The input stands for those that there aren't.
    """
    zeros, factors = (None, None) if isinstance(stored, Stored8) else (stored.zeros, stored.rows)
    tensors = tuple(x_TI if tensor is None else tensor for tensor in (zeros, factors, bias_O))
    constants = {"FORM": form_of(stored), "WORDS": uses_words(x_TI.dtype, form_of(stored)), "ZEROS": zeros is not None,
                 "FACTORS": factors is not None, "BIAS": bias_O is not None}  # fmt: skip
    return (stored.codes, stored.scales, *tensors), constants


def unpack(stored: Stored, out_OI: torch.Tensor, rows: slice = slice(None), *, beside: bool = False) -> None:
    """Write the output features `rows` of a stored matrix into `out`, whole rows of a dense matrix in a float dtype.

    `beside` another kernel that leaves registers for it, 4 bits are unpacked by BESIDE small programs on each multiprocessor, and not early.
    """
    first, last, _ = rows.indices(stored.shape[0])
    features, inputs = last - first, stored.shape[1]
    if isinstance(stored, Stored4):
        factors, zeros = stored.rows, stored.zeros
        held = factors is None and stored.scales.dtype in HELD_BY.get(out_OI.dtype, ())
        group = inputs if stored.group >= inputs else stored.group
        count = features * inputs // 16
        programs = blocks(count, PIECES)
        if beside:
            programs = min(programs, BESIDE * multiprocessors(out_OI.device))
        own = {"PDL": False, "maxnreg": 32} if beside else dependent(out_OI.device)
        _dense4_kernel[(programs,)](
            stored.codes[rows], stored.scales[rows], stored.codes if zeros is None else zeros[rows],
            stored.codes if factors is None else factors[rows], out_OI, count, programs, K=inputs, G=group, FORM=form_of(stored),
            WORDS=uses_words(out_OI.dtype), HELD=held, ZEROS=zeros is not None, FACTORS=factors is not None,
            PIECES=PIECES, num_warps=4, **own,
        )  # fmt: skip
        return
    high, wide = 8, 512
    tall, across = stored.block
    if first % tall:
        raise ValueError(f"Rows from {first} don't begin with a block of {tall}.")
    _dense8_kernel[(blocks(features, high), blocks(inputs, wide))](
        stored.codes[rows], stored.scales[first // tall :], out_OI, features, K=inputs, BO=tall, BI=across, BN=high,
        BK=wide, num_warps=4, **dependent(out_OI.device),
    )  # fmt: skip
