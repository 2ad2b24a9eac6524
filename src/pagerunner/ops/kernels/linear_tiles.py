"""Products of 17 to some hundred tokens with a stored matrix (`ops/stored.py`), whose codes are converted in registers.

A program computes a tile of output features and tokens. The weights are the matrix units' first operand, which may lie in registers. So a code goes
from memory through shared memory into the register that is multiplied, and is never written as a number. Scales of rows and of blocks multiply sums, in
float32. Scales of groups multiply numbers, in the activations' dtype.

With few tiles the input features are divided among several programs, whose sums `_sum_kernel` adds in their order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagerunner.ops.kernels.codes import form_of, numbers4, numbers8, uses_words
from pagerunner.ops.kernels.launch import blocks, dependent, multiprocessors
from pagerunner.ops.kernels.linear_parts import tile_of
from pagerunner.ops.kernels.stored import scale_numbers
from pagerunner.ops.stored import RUN, Stored, Stored8

WHOLE, SUMS, NUMBERS = 0, 1, 2
"""What scales multiply: a row's sum, the sum of each block of input features, or the numbers of each group."""
HALF = tl.constexpr(RUN // 2)


@triton.jit
def _groups(ptr, rows, k, PLUS: tl.constexpr, K: tl.constexpr, G: tl.constexpr, BK: tl.constexpr):
    """Values of the groups that the low nibbles (PLUS 0) or the high ones (PLUS HALF) of BK columns lie in, [rows, groups]."""
    APART: tl.constexpr = max(G, 2 * HALF)  # columns from one group of these nibbles to the next
    COUNT: tl.constexpr = max(BK // APART, 1)
    groups = tl.minimum((k + tl.arange(0, COUNT) * APART + PLUS) // G, K // G - 1)
    return tl.load(ptr + rows[:, None] * (K // G) + groups[None, :])


@triton.jit
def _scales_at(ptr, rows, k, K: tl.constexpr, G: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, SCALES: tl.constexpr,
               HALVES: tl.constexpr):  # fmt: skip
    """What multiplies the numbers, or the sums, of BK columns from `k`: of their low nibbles, and of their high ones. SCALES 0: nothing."""
    if SCALES == 0:
        low = 0.0
    elif SCALES == 1:
        low = tl.load(ptr + rows // BO * ((K + G - 1) // G) + k // G)
    else:
        low = _groups(ptr, rows, k, 0, K, G, BK)
    high = low
    if HALVES and SCALES == 2:
        high = _groups(ptr, rows, k, HALF, K, G, BK)
    return low, high


@triton.jit
def _spread(values, G: tl.constexpr, BK: tl.constexpr):
    """A value for each byte of BK columns, [rows, BK / 2], or for all, [rows, 1]."""
    if G < BK:
        COUNT: tl.constexpr = BK // max(G, 2 * HALF)
        spread = tl.broadcast_to(values[:, :, None], (values.shape[0], COUNT, BK // 2 // COUNT))
        values = tl.reshape(spread, (values.shape[0], BK // 2))
    return values


@triton.jit
def _numbers(pairs, scales, zeros, HIGH: tl.constexpr, G: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr,
             WORDS: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, dtype: tl.constexpr):  # fmt: skip
    """Numbers of one nibble of each byte [rows, BK / 2], less their zero points, times their scales."""
    numbers = numbers4(pairs, HIGH, dtype, FORM, WORDS)
    if ZEROS:
        numbers -= (_spread(zeros, G, BK).to(tl.float32) - 8.0).to(dtype)
    if SCALES == 2:
        numbers *= scale_numbers(_spread(scales, G, BK)).to(dtype)
    return numbers


@triton.jit
def _add8(acc, x_ptr, w_ptr, rows, k, scale, K: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr, WORDS: tl.constexpr,
          SCALES: tl.constexpr):  # fmt: skip
    """`acc` and the product of BK input features of 8-bit codes."""
    cols = k + tl.arange(0, BK)
    if K % BK == 0:
        codes = tl.load(w_ptr + rows[:, None] * K + cols[None, :])
        x = tl.load(x_ptr + cols[:, None])
    else:
        inside = cols < K
        codes = tl.load(w_ptr + rows[:, None] * K + cols[None, :], mask=inside[None, :], other=0)
        x = tl.load(x_ptr + cols[:, None], mask=inside[:, None], other=0.0)
    numbers = numbers8(codes, x.dtype, FORM, WORDS)
    if SCALES == 0:
        acc = tl.dot(numbers, x, acc, input_precision="ieee")
    else:
        acc += tl.dot(numbers, x, input_precision="ieee") * scale[:, None]
    return acc


@triton.jit
def _loads4(x_ptr, w_ptr, rows, k, K: tl.constexpr, BK: tl.constexpr):
    """Bytes of BK input features [rows, BK / 2], and the inputs of their low and of their high nibbles, [BK / 2, tokens]."""
    places = k // 2 + tl.arange(0, BK // 2)
    cols = places // HALF * (2 * HALF) + places % HALF
    if K % BK == 0:
        pairs = tl.load(w_ptr + rows[:, None] * (K // 2) + places[None, :])
        x = tl.load(x_ptr + cols[:, None])
        x_high = tl.load(x_ptr + cols[:, None] + HALF)
    else:
        inside = cols < K
        pairs = tl.load(w_ptr + rows[:, None] * (K // 2) + places[None, :], mask=inside[None, :], other=0)
        x = tl.load(x_ptr + cols[:, None], mask=inside[:, None], other=0.0)
        x_high = tl.load(x_ptr + cols[:, None] + HALF, mask=inside[:, None], other=0.0)
    return pairs, x, x_high


@triton.jit(do_not_specialize=["num_tokens", "num_features", "steps"])
def _tiles_kernel(x_ptr, w_ptr, s_ptr, z_ptr, factors_ptr, bias_ptr, y_ptr, num_tokens, num_features, x_stride, y_stride, steps,
                  K: tl.constexpr, G: tl.constexpr, BO: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
                  BK: tl.constexpr, WHOLE: tl.constexpr, FORM: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr,
                  ZEROS: tl.constexpr, FACTORS: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
                  PDL: tl.constexpr):  # fmt: skip
    """BN output features of BT tokens. `steps` blocks of BK input features, or the WHOLE; otherwise `y` takes one sum after another, [parts, T, O] float32."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token_tile, feature_tile = tile_of(num_tokens, num_features, BT, BN, 8)
    tokens = token_tile * BT + tl.arange(0, BT)
    features = feature_tile * BN + tl.arange(0, BN)
    valid, live = tokens < num_tokens, features < num_features
    rows = tl.where(live, features, 0).to(tl.int64)
    x_ptr += tl.where(valid, tokens, 0).to(tl.int64)[None, :] * x_stride
    first = tl.program_id(1) * steps * BK
    acc = tl.zeros((BN, BT), tl.float32)
    last = tl.minimum(first + steps * BK, K)
    # Groups' scales and zero points are too small for asynchronous copies. They are read a step before they are needed.
    HALVES: tl.constexpr = FORM >= 2 and G < 2 * HALF  # low and high nibbles lie in different groups
    scale, scale_high = _scales_at(s_ptr, rows, first, K, G, BO, BK, SCALES, HALVES)
    zero, zero_high = _scales_at(z_ptr, rows, first, K, G, BO, BK, 2 if ZEROS else 0, HALVES)
    for k in range(first, last, BK):
        after = tl.minimum(k + BK, K - 1) // BK * BK
        scale_now, scale_high_now, zero_now, zero_high_now = scale, scale_high, zero, zero_high
        scale, scale_high = _scales_at(s_ptr, rows, after, K, G, BO, BK, SCALES, HALVES)
        zero, zero_high = _scales_at(z_ptr, rows, after, K, G, BO, BK, 2 if ZEROS else 0, HALVES)
        if FORM < 2:
            acc = _add8(acc, x_ptr, w_ptr, rows, k, scale_now, K, BK, FORM, WORDS, SCALES)
        else:
            pairs, x, x_high = _loads4(x_ptr, w_ptr, rows, k, K, BK)
            low = _numbers(pairs, scale_now, zero_now, False, G, BK, FORM, WORDS, SCALES, ZEROS, x.dtype)
            high = _numbers(pairs, scale_high_now, zero_high_now, True, G, BK, FORM, WORDS, SCALES, ZEROS, x.dtype)
            acc = tl.dot(low, x, acc, input_precision="ieee")
            acc = tl.dot(high, x_high, acc, input_precision="ieee")
    if SCALES == 0:
        acc *= scale_numbers(tl.load(s_ptr + rows))[:, None]
    if FACTORS:
        acc *= tl.load(factors_ptr + rows)[:, None]
    place = tokens.to(tl.int64)[None, :] * y_stride + features[:, None]
    inside_y = live[:, None] & valid[None, :]
    if not WHOLE:
        y_ptr += tl.program_id(1) * num_tokens.to(tl.int64) * y_stride
    elif BIAS:
        acc += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    y = acc.to(y_ptr.dtype.element_ty)
    if ADD:
        y = (tl.load(y_ptr + place, mask=inside_y, other=0.0).to(tl.float32) + y.to(tl.float32)).to(y.dtype)
    tl.store(y_ptr + place, y, mask=inside_y)


@triton.jit(do_not_specialize=["num_tokens"])
def _sum_kernel(sums_ptr, bias_ptr, y_ptr, num_tokens, num_features, y_stride, PARTS: tl.constexpr, BLOCK: tl.constexpr,
                ADD: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BLOCK features of one token: the sum of its parts."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = features < num_features
    acc = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        place = (part * num_tokens + token) * num_features + features
        acc += tl.load(sums_ptr + place, mask=live, other=0.0)
    if BIAS:
        acc += tl.load(bias_ptr + features, mask=live, other=0.0).to(tl.float32)
    y_ptr += token * y_stride
    y = acc.to(y_ptr.dtype.element_ty)
    if ADD:
        y = (tl.load(y_ptr + features, mask=live, other=0.0).to(tl.float32) + y.to(tl.float32)).to(y.dtype)
    tl.store(y_ptr + features, y, mask=live)


class Tiles(NamedTuple):
    """Tokens, output features and input features of a tile; its warps; how many blocks are in flight; parts of the input features."""

    tokens: int
    features: int
    inputs: int
    warps: int
    stages: int
    parts: int = 1


def tiles_for(tokens: int, weight_OI: Stored, device: torch.device) -> Tiles:
    """The tile, by measurement (docs/performance.md): as many parts as multiprocessors would otherwise be idle."""
    features, inputs = weight_OI.shape
    each = 1  # programs that a multiprocessor is to have
    if tokens > 64:
        tiles = Tiles(128, 64, 128, 4, 3)
    elif isinstance(weight_OI, Stored8):
        tiles, each = Tiles(64, 64, 128, 4, 4), 3
    else:
        tiles = Tiles(64, 128, 128, 8, 4)
    programs = blocks(tokens, tiles.tokens) * blocks(features, tiles.features)
    return tiles._replace(parts=max(1, min(each * multiprocessors(device) // programs, inputs // 1024, 4)))


def _scales(stored: Stored, tiles: Tiles) -> int | None:
    """What the scales multiply; None if the kernel can't have such groups."""
    inputs, wide = stored.shape[1], tiles.inputs
    group = stored.block[1] if isinstance(stored, Stored8) else stored.group
    if isinstance(stored, Stored8):
        if group >= inputs:
            return WHOLE if stored.block[0] == 1 else SUMS
        return SUMS if group % wide == 0 else None
    if group == inputs and stored.zeros is None:
        return WHOLE
    fits = group >= inputs or group % wide == 0 or (wide % group == 0 and group >= RUN // 2)
    if not fits or group == inputs:
        return WHOLE if fits else None
    return NUMBERS


def serves(x_TI: torch.Tensor, weight_OI: Stored, tiles: Tiles) -> bool:
    """Whether the kernel computes this product."""
    return x_TI.stride(1) == 1 and weight_OI.codes.is_contiguous() and _scales(weight_OI, tiles) is not None


def run_tiles(
    x_TI: torch.Tensor,
    weight_OI: Stored,
    bias_O: torch.Tensor | None,
    out_TO: torch.Tensor,
    tiles: Tiles,
    *,
    add: bool = False,
) -> None:
    """Write `linear(x)` into `out`, or add it."""
    tokens, inputs = x_TI.shape
    features = weight_OI.shape[0]
    eight = isinstance(weight_OI, Stored8)
    zeros, factors = (None, None) if eight else (weight_OI.zeros, weight_OI.rows)
    steps = blocks(blocks(inputs, tiles.inputs), tiles.parts)
    parts = blocks(inputs, steps * tiles.inputs)
    whole = parts == 1
    sums_PTO = out_TO if whole else torch.empty(parts, tokens, features, dtype=torch.float32, device=x_TI.device)
    pdl = dependent(x_TI.device)
    _tiles_kernel[(blocks(tokens, tiles.tokens) * blocks(features, tiles.features), parts)](
        x_TI, weight_OI.codes.view(torch.uint8), weight_OI.scales, x_TI if zeros is None else zeros,
        x_TI if factors is None else factors, x_TI if bias_O is None else bias_O, sums_PTO, tokens, features,
        x_TI.stride(0), sums_PTO.stride(-2), steps, K=inputs, G=weight_OI.block[1] if eight else weight_OI.group,
        BO=weight_OI.block[0] if eight else 1, BT=tiles.tokens, BN=tiles.features, BK=tiles.inputs,
        WHOLE=whole, FORM=form_of(weight_OI), WORDS=uses_words(x_TI.dtype),
        SCALES=_scales(weight_OI, tiles), ZEROS=zeros is not None, FACTORS=factors is not None,
        ADD=add and whole, BIAS=bias_O is not None and whole, num_warps=tiles.warps, num_stages=tiles.stages, **pdl,
    )  # fmt: skip
    if not whole:
        _sum_kernel[(tokens, blocks(features, 1024))](
            sums_PTO, sums_PTO if bias_O is None else bias_O, out_TO, tokens, features, out_TO.stride(0), PARTS=parts,
            BLOCK=1024, ADD=add, BIAS=bias_O is not None, num_warps=4, **pdl,
        )  # fmt: skip
