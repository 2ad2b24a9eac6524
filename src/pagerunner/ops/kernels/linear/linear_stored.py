"""Products of up to 16 tokens with a stored matrix (`ops/stored.py`), whose codes are converted in registers.

`_few_kernel` multiplies with matrix units. The input features are divided into segments, each of which lies in one group of every row. So a
segment's sums are multiplied by a row's scale once, in float32, and codes are converted exactly. Scales of whole rows multiply at the end.
A zero point z of a group takes z - 8 times the sum of the segment's inputs off a segment's sums.

In bfloat16, `kernels/linear/linear_packed.py` serves most forms of 4 bits, in float16 int4, and `kernels/linear/linear_bytes.py` one token of e4m3 with scales of rows. One token of
other 8 bits is `kernels/linear/linear_row.py`'s. Gate, addition and early start are those of `kernels/linear/linear.py`. The norm before a product
is a kernel of its own: inside, every program would repeat it, and that took longer (docs/performance/stored-weights.md).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.kernels.codes import GROUP_SCALES, INT4, ROW_SCALES, STEP_SCALES, numbers4, numbers8
from pagerunner.ops.kernels.launch import blocks, dependent, padded, start_next, wait_turn
from pagerunner.ops.kernels.linear import linear_bytes, linear_packed, linear_row
from pagerunner.ops.kernels.linear.linear_parts import Product, held, put, silu_gate
from pagerunner.ops.kernels.stored import operands_of, scale_numbers
from pagerunner.ops.stored import RUN, Stored, Stored4, Stored8


@triton.jit
def _inputs(source, done, KP: tl.constexpr, EVEN: tl.constexpr):
    """Inputs behind the first `done`, of a piece of a token each, [B, C, M]."""
    x_ptr, k, tokens, pieces, num_tokens, x_stride = source
    k += done
    inside = (tokens < num_tokens)[None, None, :] & (EVEN | (k < KP))[:, :, None]
    place = x_ptr + tokens[None, None, :] * x_stride + k[:, :, None] + (pieces * KP)[None, None, :]
    return tl.load(place, mask=inside, other=0.0)


@triton.jit
def _group_values(ptr, first, rows, pieces, column, COLUMNS: tl.constexpr, P: tl.constexpr, BO: tl.constexpr):
    """Scales or zero points of pieces of rows [N] in some columns [B], [B, N]."""
    LAST: tl.constexpr = max(COLUMNS // P, 1) - 1
    column = tl.minimum(column, LAST)  # in place of a mask: what is read twice is multiplied by inputs of 0
    place = ((first + rows) // BO) * COLUMNS + pieces * (COLUMNS // P)
    return tl.load(ptr + place[None, :] + column[:, None])


@triton.jit
def _weights(w_ptr, s_ptr, z_ptr, first, rows, pieces, at, segment, K: tl.constexpr, G: tl.constexpr, BO: tl.constexpr,
             BK: tl.constexpr, ROW: tl.constexpr, P: tl.constexpr, EVEN: tl.constexpr, SCALES: tl.constexpr,
             ZEROS: tl.constexpr):  # fmt: skip
    """Bytes `at` [B, C] of pieces of rows [N] from `first` on, [B, N, C]; their scales and zero points, [B, N] where there are some.

    With scales of groups, which are those of half runs, the low nibbles' come before the high ones'.
    """
    COLUMNS: tl.constexpr = (K + G - 1) // G
    place = (w_ptr + first.to(tl.int64) * ROW) + (rows * ROW + pieces * (ROW // P))[None, :, None] + at[:, None, :]
    if EVEN:
        codes = tl.load(place)
    else:
        codes = tl.load(place, mask=(at < ROW // P)[:, None, :], other=0)
    column = segment * BK // G
    scales, zeros = column, column
    if SCALES != ROW_SCALES:
        scales = _group_values(s_ptr, first, rows, pieces, column, COLUMNS, P, BO)
    if ZEROS:
        zeros = _group_values(z_ptr, first, rows, pieces, column, COLUMNS, P, BO)
    high_scales, high_zeros = scales, zeros
    if SCALES == GROUP_SCALES:
        high_scales = _group_values(s_ptr, first, rows, pieces, column + 1, COLUMNS, P, BO)
        if ZEROS:
            high_zeros = _group_values(z_ptr, first, rows, pieces, column + 1, COLUMNS, P, BO)
    return codes, scales, high_scales, zeros, high_zeros


@triton.jit
def _off_zeros(product, x, zeros, ZEROS: tl.constexpr):
    """Products [B, N, M] of numbers that count from 8, made those of numbers that count from `zeros` [B, N]."""
    if ZEROS:
        sums = tl.sum(x.to(tl.float32), 1)
        product -= (zeros.to(tl.float32) - 8.0)[:, :, None] * sums[:, None, :]
    return product


@triton.jit
def _add_product(
    acc, weights, x, x_high, FORM: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr
):
    """`acc` [B, N, M] and the products of some segments [B]."""
    codes, scales, high_scales, zeros, high_zeros = weights
    if FORM < INT4:
        numbers = numbers8(codes, x.dtype, FORM, WORDS)
        if SCALES == ROW_SCALES:
            acc = tl.dot(numbers, x, acc, input_precision="ieee")
        else:
            acc += tl.dot(numbers, x, input_precision="ieee") * scale_numbers(scales)[:, :, None]
    else:
        low = numbers4(codes, False, x.dtype, FORM, WORDS)
        high = numbers4(codes, True, x.dtype, FORM, WORDS)
        if SCALES == ROW_SCALES:
            acc = tl.dot(high, x_high, tl.dot(low, x, acc, input_precision="ieee"), input_precision="ieee")
            acc = _off_zeros(_off_zeros(acc, x, zeros, ZEROS), x_high, zeros, ZEROS)
        else:
            product = _off_zeros(tl.dot(low, x, input_precision="ieee"), x, zeros, ZEROS)
            if SCALES == GROUP_SCALES:
                acc += product * scale_numbers(scales)[:, :, None]
                product = tl.zeros(acc.shape, tl.float32)
            product = _off_zeros(tl.dot(high, x_high, product, input_precision="ieee"), x_high, high_zeros, ZEROS)
            acc += product * scale_numbers(high_scales)[:, :, None]
    return acc


@triton.jit
def _pair(matrix, done, K: tl.constexpr, G: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, P: tl.constexpr, PER: tl.constexpr,
          EVEN: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, GATED: tl.constexpr):  # fmt: skip
    """`_weights` of rows behind `done` input features, and those of the up projection that belong to them."""
    w_ptr, s_ptr, z_ptr, first, first_up, rows, pieces, at, segment = matrix
    ROW: tl.constexpr = K // PER
    at += done // PER
    segment += done // BK
    weights = _weights(w_ptr, s_ptr, z_ptr, first, rows, pieces, at, segment, K, G, BO, BK, ROW, P, EVEN, SCALES, ZEROS)
    ups = weights
    if GATED:
        ups = _weights(w_ptr, s_ptr, z_ptr, first_up, rows, pieces, at, segment, K, G, BO, BK, ROW, P, EVEN, SCALES, ZEROS)  # fmt: skip
    return weights, ups


@triton.jit
def _add_step(acc, up, pair, source, done, KP: tl.constexpr, EVEN: tl.constexpr, FORM: tl.constexpr, WORDS: tl.constexpr,
              SCALES: tl.constexpr, ZEROS: tl.constexpr, GATED: tl.constexpr):  # fmt: skip
    """The sums of products, and those of one step."""
    x = _inputs(source, done, KP, EVEN)
    x_high = x
    if FORM >= INT4:
        x_high = _inputs(source, done + 16, KP, EVEN)
    acc = _add_product(acc, pair[0], x, x_high, FORM, WORDS, SCALES, ZEROS)
    if GATED:
        up = _add_product(up, pair[1], x, x_high, FORM, WORDS, SCALES, ZEROS)
    return acc, up


@triton.jit
def _factor(s_ptr, r_ptr, rows, SCALES: tl.constexpr, FACTORS: tl.constexpr):
    """What multiplies rows' sums."""
    factor = tl.full((rows.shape[0],), 1.0, tl.float32)
    if SCALES == ROW_SCALES:
        factor = scale_numbers(tl.load(s_ptr + rows))
    if FACTORS:
        factor *= tl.load(r_ptr + rows)
    return factor


@triton.jit
def _own_pieces(acc, P: tl.constexpr):
    """Sums [N / P, M / P] of `acc` [B, N, M], where a piece of a row met the same piece of a token."""
    B: tl.constexpr = acc.shape[0]
    N: tl.constexpr = acc.shape[1]
    M: tl.constexpr = acc.shape[2]
    if P > 1:
        own = (tl.arange(0, N) % P)[:, None] == (tl.arange(0, M) % P)[None, :]
        acc = tl.where(own[None, :, :], acc, 0.0)
        acc = tl.sum(tl.reshape(acc, (B, N, M // P, P)), 3)
    acc = tl.sum(acc, 0)
    if P > 1:
        acc = tl.sum(tl.reshape(acc, (N // P, P, M // P)), 1)
    return acc


@triton.jit
def _finished(acc, factor, bias_ptr, rows, P: tl.constexpr, BIAS: tl.constexpr):
    """Outputs [N / P, M / P] of sums [B, N, M]: times the rows' factors, and the bias."""
    y = _own_pieces(acc, P) * factor[:, None]
    if BIAS:
        y += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    return y


@triton.jit(do_not_specialize=["num_tokens", "num_features"])
def _few_kernel(x_ptr, w_ptr, s_ptr, z_ptr, r_ptr, bias_ptr, y_ptr, num_tokens, num_features, x_stride, y_stride,
                K: tl.constexpr, G: tl.constexpr, BO: tl.constexpr, P: tl.constexpr, B: tl.constexpr, BM: tl.constexpr,
                BN: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr,
                ZEROS: tl.constexpr, FACTORS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
                BIAS: tl.constexpr, WHOLE: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BN / P output features of up to BM / P tokens.

    With GATED they are gates, and the features of the up projection that belong to them come with them.

    Rows of weights and tokens are cut into P pieces of the input features, each of which is a row or a column of the product.
    A step takes B segments of BK input features, which the warps divide between them: a product with three dimensions, the
    first of which is summed up at the end. With AHEAD all weights are on their way before the kernel before has ended.
    """
    start_next(PDL)
    PER: tl.constexpr = 2 if FORM >= INT4 else 1  # codes in a byte
    KP: tl.constexpr = K // P
    STEP: tl.constexpr = B * BK
    STEPS: tl.constexpr = (KP + STEP - 1) // STEP
    EVEN: tl.constexpr = KP % STEP == 0
    w_ptr = w_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    first_row = tl.program_id(0) * (BN // P)
    pieces, piece_M = tl.arange(0, BN) % P, tl.arange(0, BM) % P
    features = first_row + tl.arange(0, BN // P)
    rows, rows_O, live = tl.arange(0, BN) // P, features, features < num_features
    if not WHOLE:  # rows beyond the last are read as the last: their sums aren't stored
        rows = tl.minimum(rows, num_features - 1 - first_row)
        rows_O = tl.minimum(features, num_features - 1)
    tokens_M, tokens_T = tl.arange(0, BM) // P, tl.arange(0, BM // P)
    segment = tl.arange(0, B)
    at = segment[:, None] * (BK // PER) + tl.arange(0, BK // PER)[None, :]  # bytes of a piece
    matrix = (w_ptr, s_ptr, z_ptr, first_row, first_row + num_features, rows, pieces, at, segment)
    pairs = (_pair(matrix, 0, K, G, BO, BK, P, PER, EVEN, SCALES, ZEROS, GATED),)
    if AHEAD:
        for i in tl.static_range(1, STEPS):
            pairs = pairs + (_pair(matrix, i * STEP, K, G, BO, BK, P, PER, EVEN, SCALES, ZEROS, GATED),)
    factor = _factor(s_ptr, r_ptr, rows_O, SCALES, FACTORS)
    if GATED:
        up_factor = _factor(s_ptr, r_ptr, rows_O + num_features, SCALES, FACTORS)
    place = y_ptr + tokens_T[None, :] * y_stride + features[:, None]
    inside_y = live[:, None] & (tokens_T < num_tokens)[None, :]
    wait_turn(PDL)
    old = held(place, inside_y, ADD)
    k = at // 16 * 32 + at % 16 if PER == 2 else at
    acc = tl.zeros((B, BN, BM), tl.float32)
    source = (x_ptr, k, tokens_M, piece_M, num_tokens, x_stride)
    acc, up = _add_step(acc, acc, pairs[0], source, 0, KP, EVEN, FORM, WORDS, SCALES, ZEROS, GATED)
    if AHEAD:
        for i in tl.static_range(1, STEPS):
            acc, up = _add_step(acc, up, pairs[i], source, i * STEP, KP, EVEN, FORM, WORDS, SCALES, ZEROS, GATED)
    else:
        for done in range(STEP, KP, STEP):
            pair = _pair(matrix, done, K, G, BO, BK, P, PER, EVEN, SCALES, ZEROS, GATED)
            acc, up = _add_step(acc, up, pair, source, done, KP, EVEN, FORM, WORDS, SCALES, ZEROS, GATED)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    y = _finished(acc, factor, bias_ptr, rows_O, P, BIAS)
    if GATED:
        y = silu_gate(y, _finished(up, up_factor, bias_ptr, rows_O + num_features, P, BIAS), dtype)
    put(place, y, old, inside_y, ADD)


class FewConfig(NamedTuple):
    """A block: output features and input features of a step, its warps, and how many steps are in flight; 0 for all."""

    features: int
    inputs: int
    warps: int
    stages: int


MAX_TOKENS, MAX_TOKENS_FLOAT32 = 16, 1


class Layout(NamedTuple):
    """How kernels find a stored matrix's scales: input features and output features that share one, where it is applied, and
    the longest segment, a power of two, that lies in one group."""

    group: int
    rows: int
    scales: int
    segment: int


@functools.cache
def layout(stored_8: bool, inputs: int, group: int, rows: int) -> Layout | None:
    """The layout of such a matrix; None for one that these kernels don't read."""
    if group >= inputs and rows == 1:
        return Layout(inputs, 1, ROW_SCALES.value, 128)
    if group == RUN // 2 and not stored_8:
        return Layout(group, rows, GROUP_SCALES.value, RUN)
    segment = min(128, group & -group)
    return Layout(group, rows, STEP_SCALES.value, segment) if segment >= RUN else None


def layout_of(stored: Stored) -> Layout | None:
    """See `layout`."""
    inputs = stored.shape[-1]
    if isinstance(stored, Stored8):
        return layout(True, inputs, stored.block[1], stored.block[0])
    return layout(False, inputs, stored.group, 1)


@functools.cache
def pieces_of(inputs: int, found: Layout, tokens: int) -> int:
    """Into how many pieces input features are cut: those of one token fill the 8 columns of the smallest product."""
    unit = RUN if found.scales != STEP_SCALES.value else math.lcm(RUN, found.group)
    return next(count for count in (8, 4, 2, 1) if count == 1 or (tokens == 1 and inputs % (count * unit) == 0))


@functools.cache
def few_config(inputs: int, features: int, tokens: int, pieces: int, stored_8: bool, gated: bool) -> FewConfig:
    """The block for `_few_kernel`, by measurement (docs/performance/stored-weights.md). `tokens` is a power of two, `pieces` as of `pieces_of`."""
    if tokens == 1:  # a step takes 512 features of each piece; more than three in flight are more than the registers
        return FewConfig(32 if gated or inputs > 4096 else 64, 512, 4, 0 if blocks(inputs // pieces, 512) <= 3 else 3)
    if features >= 12288:
        return FewConfig((32 if gated else 64) if not stored_8 or tokens > 4 else 32, 512, 4, 3)
    if stored_8:
        return FewConfig(16, 512 if tokens > 8 else 1024, 4, 3)
    return FewConfig(16, 1024 if gated else 2048, 4, 3)  # more, if gated, than a multiprocessor's memory


def run_few(product: Product, config: FewConfig | None = None) -> torch.Tensor:
    """Launch `_few_kernel`."""
    x_TI, stored, bias_O, out_TO, _, gated, add = product
    tokens, inputs = x_TI.shape
    features, found = out_TO.shape[1], layout_of(stored)
    assert found is not None
    pieces = pieces_of(inputs, found, padded(tokens))
    config = config or few_config(inputs, features, padded(tokens), pieces, isinstance(stored, Stored8), gated)
    step = min(config.inputs, padded(inputs // pieces))
    segment = min(found.segment, step)
    tensors, constants = operands_of(x_TI, stored, bias_O)
    _few_kernel[(blocks(features * pieces, config.features),)](
        x_TI, *tensors, out_TO, tokens, features, x_TI.stride(0), out_TO.stride(0), K=inputs, G=found.group,
        BO=found.rows, P=pieces, B=step // segment, BM=max(8, padded(tokens)), BN=config.features, BK=segment,
        SCALES=found.scales, GATED=gated, ADD=add, WHOLE=features % (config.features // pieces) == 0,
        AHEAD=config.stages == 0, num_warps=config.warps, num_stages=max(config.stages, 1), **constants,
        **dependent(x_TI.device),
    )  # fmt: skip
    return out_TO


def fits(x_TI: torch.Tensor, stored: Stored) -> bool:
    """Whether the kernels of this file serve this number of tokens, this dtype and this form. `linear_many` serves all others."""
    return x_TI.dim() == 2 and x_TI.stride(1) == 1 and serves(x_TI.shape[0], x_TI.dtype, stored)


def serves(tokens: int, dtype: torch.dtype, stored: Stored) -> bool:
    """`fits` for so many tokens, whose features lie beside each other."""
    if not stored.codes.is_contiguous() or not stored.scales.is_contiguous() or layout_of(stored) is None:
        return False
    return 0 < tokens <= (MAX_TOKENS_FLOAT32 if dtype == torch.float32 else MAX_TOKENS)


def run(product: Product) -> torch.Tensor:
    """Write the product into `out`, or add it, and return it."""
    x_TI, stored, features = product.x_TI, product.weight_OI, product.out_TO.shape[1]
    if isinstance(stored, Stored8) and linear_bytes.fits(x_TI, stored):
        joined = linear_bytes.takes_norm(x_TI.shape[1], features)
        return linear_bytes.run_bytes(product if joined else product.after_norm())
    row = linear_row.fits(x_TI, stored, features)
    joined = row and linear_row.joins(x_TI, stored)
    if not joined:
        product = product.after_norm()
    x_TI = product.x_TI
    if isinstance(stored, Stored4) and linear_packed.fits(x_TI, stored):
        return linear_packed.run_packed(product)
    if not row or not isinstance(stored, Stored8):
        return run_few(product)
    if product.gated and not joined and linear_row.fits(x_TI, stored, stored.shape[0]):
        both = product._replace(out_TO=x_TI.new_empty(1, stored.shape[0]), gated=False)
        return silu_and_mul(linear_row.run_row(both))
    return linear_row.run_row(product)
