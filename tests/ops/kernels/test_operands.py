"""Codes as the first operand of matrix units: which column stands at which place, and what a code stands for there."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.codes import E2M1, INT4
from pagerunner.ops.kernels.operands import PIECE, arranged, lifted_scales, nibbles_numbers, operand, raised, row_places
from pagerunner.ops.stored import Stored4, dense, pack4


@triton.jit
def _operand_kernel(codes_ptr, out_ptr, BN: tl.constexpr, FORM: tl.constexpr, WARPS: tl.constexpr):
    loaded, at, place = row_places(BN, WARPS), tl.arange(0, 16), tl.arange(0, 64)
    codes = tl.load(codes_ptr + loaded[:, None] * 16 + at[None, :])
    low, high = nibbles_numbers(codes, tl.float32, FORM)
    out = out_ptr + tl.arange(0, BN)[:, None] * 128 + place[None, :]
    tl.store(out, operand(low, WARPS))
    tl.store(out + 64, operand(high, WARPS))


@triton.jit
def _scales_kernel(scales_ptr, out_ptr, RAISED: tl.constexpr):
    index = tl.arange(0, 256)
    tl.store(out_ptr + index, lifted_scales(tl.load(scales_ptr + index), tl.float32, RAISED))


@pytest.mark.parametrize("form", [E2M1, INT4])
@pytest.mark.parametrize(("rows", "warps"), [(64, 4), (128, 4), (128, 8), (256, 8)])
def test_numbers_stand_where_arranged_inputs_expect_them(form, rows, warps):
    torch.manual_seed(rows)
    codes = torch.randint(0, 16, (rows, PIECE), dtype=torch.uint8)
    codes[0, :16] = torch.arange(16)
    packed = pack4(codes)
    out = torch.empty(rows, PIECE)
    _operand_kernel[(1,)](packed.view(torch.uint32), out, BN=rows, FORM=form, WARPS=warps)
    stored = Stored4(packed, torch.ones(rows, 1), PIECE, "e2m1" if form == E2M1 else "int4")
    columns = arranged(torch.arange(PIECE, dtype=torch.float32)[None], INT4)[0].long()
    assert sorted(columns.tolist()) == list(range(PIECE))
    got = out * 2.0**126 if form == E2M1 else out - 136
    assert torch.equal(got, dense(stored, torch.float32)[:, columns])


def test_arranged_inputs_end_with_zeros():
    got = arranged(torch.ones(2, 160), E2M1)
    assert got.shape == (2, 256)
    assert (got == 2.0 ** raised(E2M1)).sum(1).tolist() == [160, 160]
    assert (got == 0).sum(1).tolist() == [96, 96]


def test_scales_of_8_bits_are_exact_where_bfloat16_has_room():
    scales, out = torch.arange(256, dtype=torch.uint8), torch.empty(256)
    _scales_kernel[(1,)](scales, out, RAISED=63)
    assert out[1:192].tolist() == [2.0 ** (byte - 64) for byte in range(1, 192)]
    assert not out[192:].isfinite().any()  # of 2 ** 65 and more, and the byte for NaN: seen, not passed over
