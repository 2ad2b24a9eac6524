"""What the kernels of experts' products share: which rows a tile has, its weights in any form, and what becomes of its sums.

Shape letters as in `ops/moe.py`; M pairs, N features and K input features of a tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pagerunner.ops.activation import GatedActivation
from pagerunner.ops.kernels import activation as kinds
from pagerunner.ops.kernels.activation import gated, rounded
from pagerunner.ops.kernels.codes import (
    DENSE,
    E2M1,
    GROUP_SCALES,
    INT4,
    ROW_SCALES,
    STEP_SCALES,
    form_of,
    numbers4,
    numbers8,
    spread,
    uses_words,
)
from pagerunner.ops.kernels.stored import scale_numbers
from pagerunner.ops.moe import STEP, reads_groups
from pagerunner.ops.stored import Stored, Stored8

_KINDS = {
    "silu": kinds.SILU.value,
    "clamped_swiglu": kinds.CLAMPED_SWIGLU.value,
    "limited_silu": kinds.LIMITED_SILU.value,
}


@triton.jit
def find_tile(starts_ptr, tile, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr):
    """A tile's expert, its first row among all pairs in expert order, and where the expert's rows end. The expert is E if there is no such tile."""
    experts = tl.arange(0, BE)
    starts = tl.load(starts_ptr + experts, mask=experts < E, other=0)
    ends = tl.load(starts_ptr + 1 + experts, mask=experts < E, other=0)
    tiles = (ends - starts + BM - 1) // BM
    tiles_end = tl.cumsum(tiles, 0)
    expert = tl.sum(((tiles_end <= tile) & (experts < E)).to(tl.int32), 0)
    own = experts == expert
    first_row = tl.sum(tl.where(own, starts, 0), 0) + (tile - tl.sum(tl.where(own, tiles_end - tiles, 0), 0)) * BM
    return expert, first_row, tl.sum(tl.where(own, ends, 0), 0)


@triton.jit
def _run_values(ptr, rows, live, first, half, K: tl.constexpr, G: tl.constexpr, BK: tl.constexpr):
    """Scales or zero points of the low (half 0) or high (half 1) nibbles of each run, [N, BK / 32]."""
    columns = first + tl.arange(0, BK // 32) * 32 + half * 16
    mask = live[:, None] & (columns < K)[None, :]
    return tl.load(ptr + rows[:, None].to(tl.int64) * (K // G) + (columns // G)[None, :], mask=mask, other=0.0)


@triton.jit
def _half(codes, s_ptr, z_ptr, rows, live, first, zeros, HIGH: tl.constexpr, K: tl.constexpr, G: tl.constexpr,
          BK: tl.constexpr, FORM: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr,
          dtype: tl.constexpr):  # fmt: skip
    """The numbers of one nibble of each byte [N, BK / 2], with scales if these are those of groups."""
    numbers = numbers4(codes, HIGH, dtype, FORM, WORDS)
    half: tl.constexpr = 1 if HIGH else 0
    if SCALES == GROUP_SCALES:
        if ZEROS:
            own = _run_values(z_ptr, rows, live, first, half, K, G, BK).to(tl.float32) - 8.0
            numbers -= spread(own.to(dtype), 16)
        scales = scale_numbers(_run_values(s_ptr, rows, live, first, half, K, G, BK))
        if s_ptr.dtype.element_ty == tl.float16 or s_ptr.dtype.element_ty == tl.float32:  # more than a bfloat16 holds
            numbers = (numbers.to(tl.float32) * spread(scales, 16)).to(dtype)
        else:
            numbers *= spread(scales.to(dtype), 16)
    elif ZEROS:
        numbers -= (zeros.to(tl.float32) - 8.0).to(dtype)[:, None]
    return numbers


@triton.jit
def add_step(acc, x, x_high, w_ptr, s_ptr, z_ptr, rows, live, first, K: tl.constexpr, G: tl.constexpr, BO: tl.constexpr,
             BK: tl.constexpr, FORM: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr):  # fmt: skip
    """`acc` [M, N] and the product of inputs with BK columns of the weights' rows [N], from column `first` on.

    Inputs of 4-bit codes come in two: those of the low nibbles and those of the high ones, [M, BK / 2] each.
    """
    FOUR: tl.constexpr = FORM == INT4 or FORM == E2M1
    WIDE: tl.constexpr = BK // 2 if FOUR else BK
    ROW: tl.constexpr = K // 2 if FOUR else K
    at = (first // 2 if FOUR else first) + tl.arange(0, WIDE)
    place = w_ptr + rows[:, None].to(tl.int64) * ROW + at[None, :]
    codes = tl.load(place, mask=live[:, None] & (at < ROW)[None, :], other=0)
    columns: tl.constexpr = (K + G - 1) // G
    zeros = first
    if SCALES == STEP_SCALES:
        group = (rows // BO).to(tl.int64) * columns + first // G
        scales = scale_numbers(tl.load(s_ptr + group, mask=live, other=0.0))
        if ZEROS:
            zeros = tl.load(z_ptr + group, mask=live, other=0)
    if SCALES == ROW_SCALES and ZEROS:
        zeros = tl.load(z_ptr + rows, mask=live, other=0)
    if FORM == DENSE:
        acc = tl.dot(x, tl.trans(codes), acc, input_precision="ieee")
    elif FOUR:
        low = _half(codes, s_ptr, z_ptr, rows, live, first, zeros, False, K, G, BK, FORM, WORDS, SCALES, ZEROS, x.dtype)
        high = _half(codes, s_ptr, z_ptr, rows, live, first, zeros, True, K, G, BK, FORM, WORDS, SCALES, ZEROS, x.dtype)
        if SCALES == STEP_SCALES:
            product = tl.dot(x, tl.trans(low), input_precision="ieee")
            product = tl.dot(x_high, tl.trans(high), product, input_precision="ieee")
            acc += product * scales[None, :]
        else:
            acc = tl.dot(x, tl.trans(low), acc, input_precision="ieee")
            acc = tl.dot(x_high, tl.trans(high), acc, input_precision="ieee")
    else:
        numbers = tl.trans(numbers8(codes, x.dtype, FORM, WORDS))
        if SCALES == STEP_SCALES:
            acc += tl.dot(x, numbers, input_precision="ieee") * scales[None, :]
        else:
            acc = tl.dot(x, numbers, acc, input_precision="ieee")
    return acc


@triton.jit
def row_factors(
    acc, s_ptr, r_ptr, rows, live, BO: tl.constexpr, FORM: tl.constexpr, SCALES: tl.constexpr, FACTORS: tl.constexpr
):
    """`acc` [M, N] times what multiplies the weights' rows [N] as wholes."""
    if SCALES == ROW_SCALES and FORM != DENSE:
        acc *= scale_numbers(tl.load(s_ptr + rows // BO, mask=live, other=0.0))[None, :]
    if FACTORS:
        acc *= tl.load(r_ptr + rows, mask=live, other=0.0)[None, :]
    return acc


@triton.jit
def finish(acc, up, bias_ptr, weights_ptr, pairs, valid, rows, live, ups, limit, dtype: tl.constexpr, BIAS: tl.constexpr,
           GATED: tl.constexpr, KIND: tl.constexpr, WEIGH: tl.constexpr):  # fmt: skip
    """What a product stores of its sums [M, N], in `dtype`: with biases, the activation, and the pairs' weights.

    `rows` are the weights' rows of the sums; those of the ups are `ups` further.
    """
    if WEIGH:
        weights = tl.load(weights_ptr + pairs, mask=valid, other=0.0)[:, None]
        if GATED:
            acc *= weights
            up *= weights
    if BIAS:
        acc += tl.load(bias_ptr + rows, mask=live, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if BIAS:
            up += tl.load(bias_ptr + rows + ups, mask=live, other=0.0).to(tl.float32)[None, :]
        y = gated(rounded(acc, dtype), rounded(up, dtype), limit, KIND, dtype)
    elif WEIGH:
        y = (acc * weights).to(dtype)
    else:
        y = acc.to(dtype)
    return y


def kind_of(activation: GatedActivation | None) -> int:
    """The activation as kernels know it."""
    return 0 if activation is None else _KINDS[activation.kind]


def serves(weights: torch.Tensor | Stored) -> bool:
    """Whether kernels read the weights of all experts in this form. Otherwise they are unpacked before."""
    if isinstance(weights, torch.Tensor):
        return weights.is_contiguous()
    parts = [part for part in weights if isinstance(part, torch.Tensor)]
    return all(part.is_contiguous() for part in parts) and reads_groups(weights)


def stored_args(weights: torch.Tensor | Stored, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Codes, scales, zero points, rows' factors (any tensor for what there isn't), elements of an expert's codes and scales; the constants."""
    if isinstance(weights, torch.Tensor):
        own = {"FORM": DENSE.value, "WORDS": False, "G": weights.shape[-1], "BO": 1}
        return (weights,) * 4 + (weights.stride(0), 0), own | {
            "SCALES": ROW_SCALES.value,
            "ZEROS": False,
            "FACTORS": False,
        }
    inputs = weights.shape[-1]
    codes = weights.codes.view(torch.uint8)
    if isinstance(weights, Stored8):
        rows, group = weights.block
        zeros = factors = None
    else:
        rows, group = 1, weights.group
        zeros, factors = weights.zeros, weights.rows
    group = min(group, inputs)
    scales = weights.scales.view(torch.uint8) if weights.scales.dtype == torch.float8_e8m0fnu else weights.scales
    scales_at = ROW_SCALES if group == inputs else STEP_SCALES if group % STEP == 0 else GROUP_SCALES
    constants = {
        "FORM": form_of(weights), "WORDS": uses_words(dtype), "G": group, "BO": rows,
        "SCALES": scales_at.value,
        "ZEROS": zeros is not None, "FACTORS": factors is not None,
    }  # fmt: skip
    tensors = codes, scales, codes if zeros is None else zeros, scales if factors is None else factors
    return (*tensors, codes.stride(0), scales.stride(0)), constants
