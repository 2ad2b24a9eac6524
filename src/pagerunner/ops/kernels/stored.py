"""Unpacks a stored matrix, and the steps of it that other kernels share; see `ops/stored.py`. As there, in float32 with one rounding at the end."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagerunner.ops.kernels.launch import blocks, dependent
from pagerunner.ops.stored import RUN, Stored, Stored4

HALF_RUN = tl.constexpr(RUN // 2)


@triton.jit
def scale_numbers(raw):
    """Scales in float32; bytes are e8m0."""
    if raw.dtype == tl.uint8:
        bits = raw.to(tl.uint32) << 23
        bits = tl.where(raw == 0, 0x00400000, tl.where(raw == 255, 0x7FC00000, bits))
        return bits.to(tl.uint32).to(tl.float32, bitcast=True)
    return raw.to(tl.float32)


@triton.jit
def e2m1_numbers(codes):
    """Codes 0..15 of e2m1 in float32: sign, exponent and mantissa in place, and the exponents' difference as a factor."""
    wide = codes.to(tl.uint32)
    return (((wide & 8) << 28) | ((wide & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126


@triton.jit
def _dense8_kernel(codes_ptr, scales_ptr, out_ptr, features, K: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr,
                   BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BN rows and BK columns of 8-bit codes. BO x BI of them share a scale."""
    if PDL:
        gdc_launch_dependents()
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
    if PDL:
        gdc_wait()
    tl.store(out_ptr + place, y, mask=inside)


@triton.jit
def _dense4_kernel(codes_ptr, scales_ptr, zeros_ptr, factors_ptr, out_ptr, features, K: tl.constexpr, G: tl.constexpr,
                   E2M1: tl.constexpr, ZEROS: tl.constexpr, FACTORS: tl.constexpr, BN: tl.constexpr,
                   BK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BN rows and BK columns of 4-bit codes, G of which share a scale."""
    if PDL:
        gdc_launch_dependents()
    rows = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    places = tl.program_id(1) * (BK // 2) + tl.arange(0, BK // 2)
    live = rows < features
    inside = live[:, None] & (places < K // 2)[None, :]
    both = tl.load(codes_ptr + rows[:, None] * (K // 2) + places[None, :], mask=inside, other=0)
    low_cols = places // HALF_RUN * (2 * HALF_RUN) + places % HALF_RUN
    if FACTORS:
        factor = tl.load(factors_ptr + rows, mask=live, other=0.0)[:, None]
    if PDL:
        gdc_wait()
    for half in tl.static_range(2):
        codes = (both >> (4 * half)) & 15
        cols = low_cols + half * HALF_RUN
        group = rows[:, None] * (K // G) + (cols // G)[None, :]
        scale = scale_numbers(tl.load(scales_ptr + group, mask=inside, other=0.0))
        if FACTORS:
            scale *= factor
        if E2M1:
            numbers = e2m1_numbers(codes)
        elif ZEROS:
            numbers = codes.to(tl.float32) - tl.load(zeros_ptr + group, mask=inside, other=0).to(tl.float32)
        else:
            numbers = codes.to(tl.float32) - 8.0
        y = (numbers * scale).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + rows[:, None] * K + cols[None, :], y, mask=inside)


def unpack(stored: Stored, out_OI: torch.Tensor, rows: slice = slice(None)) -> None:
    """Write the output features `rows` of a stored matrix into `out`, whole rows of a dense matrix in a float dtype."""
    first, last, _ = rows.indices(stored.shape[0])
    features, inputs = last - first, stored.shape[1]
    if isinstance(stored, Stored4):
        high, wide = 8, 1024
        factors, zeros = stored.rows, stored.zeros
        _dense4_kernel[(blocks(features, high), blocks(inputs, wide))](
            stored.codes[rows], stored.scales[rows], stored.codes if zeros is None else zeros[rows],
            stored.codes if factors is None else factors[rows], out_OI, features, K=inputs, G=stored.group,
            E2M1=stored.numbers == "e2m1", ZEROS=zeros is not None, FACTORS=factors is not None, BN=high, BK=wide,
            num_warps=4, **dependent(out_OI.device),
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
