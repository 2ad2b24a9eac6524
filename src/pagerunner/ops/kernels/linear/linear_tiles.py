"""Products of 17 to some hundred tokens with a stored matrix (`ops/stored.py`), whose codes are converted in registers.

A program computes a tile of output features and tokens. The weights are the matrix units' first operand, which may lie in registers. So a code goes
from memory through shared memory into the register that is multiplied, and is never written as a number.

**The order of the inputs.** A thread reads 16 neighbouring bytes of a row. The matrix units want other columns of it: of 16 columns, thread
q of four holds 2 q, 2 q + 1, 2 q + 8 and 2 q + 9. A sum doesn't depend on its order. So codes stay where they are, and the inputs are put
into the order in which codes come (`in_order`). Example: the first 16 columns that are multiplied are 0 to 3, 32 to 35, 64 to 67 and 96 to
99 of 4-bit codes. Output features change places too: `_features` says which.

Scales of rows and of blocks multiply sums, in float32. Scales of groups multiply numbers: in the activations' dtype if that holds every
such scale, as bfloat16 holds those of bfloat16 and e8m0, else in float32. With few tiles the input features are divided among several
programs, whose sums `linear_sums.py` adds in their order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from pagerunner.ops.kernels.codes import GROUP_SCALES, INT4, ROW_SCALES, STEP_SCALES, numbers4, numbers8, spread
from pagerunner.ops.kernels.launch import blocks, dependent, multiprocessors, padded, row_warps, start_next, wait_turn
from pagerunner.ops.kernels.linear.linear_parts import (
    NO_NORM,
    Product,
    halves,
    norm_kind,
    norm_weight,
    store_or_add,
    tile_of,
    token_inputs,
)
from pagerunner.ops.kernels.linear.linear_sums import PART_INPUTS, add_parts
from pagerunner.ops.kernels.operands import ended, must_end
from pagerunner.ops.kernels.stored import HELD_BY, operands_of, scale_numbers
from pagerunner.ops.linear import Norm
from pagerunner.ops.stored import RUN, Stored, Stored8

FITTED_TOKENS = 192
"""Up to so many tokens, tiles follow the number of tokens."""
BYTES = 64
"""Bytes of a row that a step takes: 16 for each of four threads."""
WORD = {8: tl.uint8, 16: tl.uint16, 32: tl.uint32, 64: tl.uint64}


@triton.jit
def _columns(place, PER: tl.constexpr, PAIRS: tl.constexpr):
    """The input features that are multiplied at these places; PER codes are in a byte. PAIRS: of four neighbouring bytes, 0 and 2 come first."""
    step, half, quad, pair = place // 16 % 4, place // 8 % 2, place // 2 % 4, place % 2
    within = 4 * step + 2 * pair + half if PAIRS else 4 * step + 2 * half + pair
    if PER == 2:
        within += 16 * (place // 64 % 2)
    return place // (64 * PER) * (64 * PER) + 16 * PER * quad + within


@triton.jit
def _order_kernel(x_ptr, norm_ptr, out_ptr, x_row, eps, K: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
                  PER: tl.constexpr, PAIRS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One token, of at most BLOCK features; zeros from K to PADDED."""
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    cols = _columns(place, PER, PAIRS)
    inside = cols < K
    weight = cols
    if NORM != NO_NORM:
        weight = norm_weight(norm_ptr, cols, inside, NORM)
    wait_turn(PDL)
    x = token_inputs(x_ptr + token * x_row, weight, cols, inside, eps, K, NORM, GATED)
    tl.store(out_ptr + token * PADDED + place, x.to(out_ptr.dtype.element_ty), mask=place < PADDED)


@triton.jit
def _features(place, W: tl.constexpr):
    """The rows of codes that the W warps multiply at these places: a warp reads 8 neighbouring rows, twice, and multiplies 16."""
    return place // 8 % 2 * (8 * W) + place // 16 * 8 + place % 8


@triton.jit
def _operand8(numbers, W: tl.constexpr):
    """Numbers [rows, 64] in the order of codes, as the matrix units' first operand."""
    ROWS: tl.constexpr = numbers.shape[0]
    parts = tl.permute(tl.reshape(numbers, (ROWS, 4, 4, 2, 2)), (0, 2, 3, 1, 4))  # quad, step, half, pair
    return tl.reshape(tl.permute(tl.reshape(parts, (2, W, 8, 64)), (1, 0, 2, 3)), (ROWS, 64))


@triton.jit
def _operand4(low, high, W: tl.constexpr):
    """Numbers of low and of high nibbles [rows, 64], as `_operand8` does it; [rows, 128]."""
    ROWS: tl.constexpr = low.shape[0]
    parts = tl.reshape(tl.join(low, high), (ROWS, 4, 4, 2, 2, 2))  # quad, step, half, pair, nibble
    parts = tl.permute(parts, (0, 5, 2, 3, 1, 4))
    return tl.reshape(tl.permute(tl.reshape(parts, (2, W, 8, 128)), (1, 0, 2, 3)), (ROWS, 128))


@triton.jit
def _group_words(ptr, rows, k, K: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, word: tl.constexpr):
    """Values of all groups of 128 columns from `k`, as one word for each row. A word's lowest bits are the first group's."""
    COUNT: tl.constexpr = 128 // G if G < 128 else 1
    ptr = ptr.to(tl.pointer_type(tl.uint8 if BITS == 8 else tl.uint16 if BITS == 16 else tl.uint32), bitcast=True)
    if COUNT == 1:
        words = tl.load(ptr + rows * ((K + G - 1) // G) + k // G)
    elif K % 128 == 0:
        words = tl.load(ptr.to(tl.pointer_type(word), bitcast=True) + rows * (K // 128) + k // 128)
    else:
        words = tl.zeros(rows.shape, word)
        for group in tl.static_range(COUNT):
            value = tl.load(ptr + rows * (K // G) + tl.minimum(k // G + group, K // G - 1))
            words |= value.to(word) << (group * BITS)
    return words


@triton.jit
def _of_quads(words, HIGH: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """A group's value for the low or the high nibbles of each quarter of 128 columns, [rows, 4]; or for all, [rows, 1]."""
    values = words[:, None]
    if G < 128:
        first = 32 * tl.arange(0, 4) + (16 if HIGH else 0)
        values = values >> (first // G * BITS)[None, :].to(words.dtype)
    if BITS == 8:
        values = values.to(tl.uint8)
    elif BITS == 16:
        values = values.to(tl.uint16)
    else:
        values = values.to(tl.uint32)
    return values.to(dtype, bitcast=True)


@triton.jit
def _numbers(pairs, scales, zeros, HIGH: tl.constexpr, G: tl.constexpr, FORM: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr,
             HELD: tl.constexpr, ZEROS: tl.constexpr, s_dtype: tl.constexpr, dtype: tl.constexpr):  # fmt: skip
    """Numbers of one nibble of each byte [rows, 64], less their zero points, times their scales; rounded once."""
    numbers = numbers4(pairs, HIGH, dtype, FORM, WORDS)
    if ZEROS:
        zero = (_of_quads(zeros, HIGH, G, 8, tl.uint8).to(tl.float32) - 8.0).to(dtype)
        numbers -= spread(zero, 16) if G < 128 else zero
    if SCALES == GROUP_SCALES:
        scale = scale_numbers(_of_quads(scales, HIGH, G, s_dtype.primitive_bitwidth, s_dtype))
        if HELD:
            scale = scale.to(dtype)
        scale = spread(scale, 16) if G < 128 else scale
        numbers = (numbers.to(scale.dtype) * scale).to(dtype)
    return numbers


@triton.jit
def _ahead(s_ptr, z_ptr, rows, outs, k, K: tl.constexpr, G: tl.constexpr, BO: tl.constexpr, SCALES: tl.constexpr,
           ZEROS: tl.constexpr, S_WORD: tl.constexpr, Z_WORD: tl.constexpr):  # fmt: skip
    """Scales and zero points of the step at `k`. They are too small for asynchronous copies, and are read a step before they are needed."""
    if SCALES == GROUP_SCALES:
        scale = _group_words(s_ptr, rows, k, K, G, s_ptr.dtype.element_ty.primitive_bitwidth, S_WORD)
    elif SCALES == STEP_SCALES:
        scale = scale_numbers(tl.load(s_ptr + outs // BO * ((K + G - 1) // G) + k // G))
    else:
        scale = k
    zero = scale
    if ZEROS:
        zero = _group_words(z_ptr, rows, k, K, G, 8, Z_WORD)
    return scale, zero


@triton.jit
def _first_operand(codes, scale, zero, W: tl.constexpr, G: tl.constexpr, FORM: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr,
                   HELD: tl.constexpr, ZEROS: tl.constexpr, s_dtype: tl.constexpr, dtype: tl.constexpr):  # fmt: skip
    """Numbers of a step's codes [rows, 64]."""
    if FORM < INT4:
        numbers = _operand8(numbers8(codes, dtype, FORM, WORDS), W)
    else:
        low = _numbers(codes, scale, zero, False, G, FORM, WORDS, SCALES, HELD, ZEROS, s_dtype, dtype)
        high = _numbers(codes, scale, zero, True, G, FORM, WORDS, SCALES, HELD, ZEROS, s_dtype, dtype)
        numbers = _operand4(low, high, W)
    return numbers


@triton.jit
def _add_product(acc, numbers, x, scale, SCALES: tl.constexpr):
    """`acc` and the product of a step's numbers [rows, columns] and inputs [tokens, columns]."""
    if SCALES == STEP_SCALES:
        acc += tl.dot(numbers, x.T, input_precision="ieee") * scale[:, None]
    else:
        acc = tl.dot(numbers, x.T, acc, input_precision="ieee")
    return acc


@triton.jit
def _tile_sums(x_desc, more_desc, w_ptr, s_ptr, z_ptr, row, feature_tile, num_features, first, last, K: tl.constexpr,
              G: tl.constexpr, BO: tl.constexpr, BT: tl.constexpr, MORE: tl.constexpr, R: tl.constexpr, W: tl.constexpr, FORM: tl.constexpr,
              WORDS: tl.constexpr, SCALES: tl.constexpr, HELD: tl.constexpr, S_WORD: tl.constexpr, Z_WORD: tl.constexpr,
              ZEROS: tl.constexpr, WAIT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """R sums [16 W, BT] of the tokens from `row` on, and R [16 W, MORE] of those behind them, where there are such.

    They are over the input features from `first` to before `last`, in steps of 64 bytes. The R products of a step share its inputs, and the
    codes of one are converted while another is multiplied. Before the first inputs it waits for the kernel before.
    """
    PER: tl.constexpr = 2 if FORM >= INT4 else 1
    BK: tl.constexpr = 64 * PER
    BN: tl.constexpr = 16 * W
    ROW: tl.constexpr = K // PER
    dtype: tl.constexpr = x_desc.dtype
    w_ptr = w_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    place = feature_tile * (BN * R) + tl.arange(0, BN)
    moved = feature_tile * (BN * R) + _features(tl.arange(0, BN), W)
    s_dtype: tl.constexpr = s_ptr.dtype.element_ty
    codes_at, rows, outs, sums, more_sums, ahead = (), (), (), (), (), ()
    for r in tl.static_range(R):
        own = tl.minimum(place + r * BN, num_features - 1).to(tl.int64)
        rows = rows + (own,)
        outs = outs + (tl.minimum(moved + r * BN, num_features - 1).to(tl.int64),)
        codes_at = codes_at + (w_ptr + own[:, None] * ROW + tl.arange(0, 64)[None, :],)
        sums = sums + (tl.zeros((BN, BT), tl.float32),)
        if MORE:
            more_sums = more_sums + (tl.zeros((BN, MORE), tl.float32),)
        ahead = ahead + (_ahead(s_ptr, z_ptr, own, outs[r], first, K, G, BO, SCALES, ZEROS, S_WORD, Z_WORD),)
    wait_turn(PDL)
    for k in range(first, last, BK):
        x = x_desc.load([row, k])
        if MORE:
            x_more = more_desc.load([row + BT, k])
        after = tl.minimum(k + BK, (K - 1) // BK * BK)
        next_sums, next_more, next_ahead = (), (), ()
        for r in tl.static_range(R):
            if K % BK == 0:
                codes = tl.load(codes_at[r] + k // PER)
            else:
                inside = k // PER + tl.arange(0, 64) < ROW
                codes = tl.load(codes_at[r] + k // PER, mask=inside[None, :], other=0)
            scale, zero = ahead[r]
            next_ahead = next_ahead + (
                _ahead(s_ptr, z_ptr, rows[r], outs[r], after, K, G, BO, SCALES, ZEROS, S_WORD, Z_WORD),
            )
            numbers = _first_operand(codes, scale, zero, W, G, FORM, WORDS, SCALES, HELD, ZEROS, s_dtype, dtype)
            next_sums = next_sums + (_add_product(sums[r], numbers, x, scale, SCALES),)
            if MORE:
                next_more = next_more + (_add_product(more_sums[r], numbers, x_more, scale, SCALES),)
        sums, more_sums, ahead = next_sums, next_more, next_ahead
        if WAIT:
            next_sums, next_more = (), ()
            for r in tl.static_range(R):
                next_sums = next_sums + (ended(sums[r]),)
                if MORE:
                    next_more = next_more + (ended(more_sums[r]),)
            sums, more_sums = next_sums, next_more
    return sums, more_sums


@triton.jit
def _store_sums(acc, s_ptr, factors_ptr, bias_ptr, y_ptr, tokens, features, num_tokens, num_features, y_stride, SCALES: tl.constexpr,
               FACTORS: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """Store sums [features, tokens] times what multiplies whole rows, and the bias, or add them."""
    outs = tl.minimum(features, num_features - 1).to(tl.int64)
    if SCALES == ROW_SCALES:
        acc *= scale_numbers(tl.load(s_ptr + outs))[:, None]
    if FACTORS:
        acc *= tl.load(factors_ptr + outs)[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + outs).to(tl.float32)[:, None]
    inside = (features < num_features)[:, None] & (tokens < num_tokens)[None, :]
    at = y_ptr + tokens.to(tl.int64)[None, :] * y_stride + features[:, None]
    store_or_add(at, acc, inside, ADD)


@triton.jit(do_not_specialize=["num_tokens", "steps"])
def _tiles_kernel(x_desc, more_desc, w_ptr, s_ptr, z_ptr, factors_ptr, bias_ptr, y_ptr, num_tokens, num_features, y_stride, steps,
                  K: tl.constexpr, G: tl.constexpr, BO: tl.constexpr, BT: tl.constexpr, MORE: tl.constexpr, R: tl.constexpr,
                  W: tl.constexpr, DONE: tl.constexpr, FORM: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr,
                  HELD: tl.constexpr, S_WORD: tl.constexpr, Z_WORD: tl.constexpr, ZEROS: tl.constexpr, FACTORS: tl.constexpr,
                  ADD: tl.constexpr, BIAS: tl.constexpr, WAIT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """R times 16 W output features of BT + MORE tokens.

    `steps` steps of 64 bytes. DONE: these are all, and `y` takes the outputs; otherwise it takes one sum after another,
    [parts, T, O] float32.
    """
    start_next(PDL)
    BK: tl.constexpr = 128 if FORM >= INT4 else 64
    BN: tl.constexpr = 16 * W
    token_tile, feature_tile = tile_of(tl.program_id(0), num_tokens, num_features, BT + MORE, BN * R, 8)
    row = token_tile * (BT + MORE)
    moved = feature_tile * (BN * R) + _features(tl.arange(0, BN), W)
    first = tl.program_id(1) * steps * BK
    sums, more = _tile_sums(x_desc, more_desc, w_ptr, s_ptr, z_ptr, row, feature_tile, num_features, first,
                            tl.minimum(first + steps * BK, K), K, G, BO, BT, MORE, R, W, FORM, WORDS, SCALES, HELD, S_WORD,
                            Z_WORD, ZEROS, WAIT, PDL)  # fmt: skip
    if not DONE:
        y_ptr += tl.program_id(1) * num_tokens.to(tl.int64) * y_stride
    for r in tl.static_range(R):
        _store_sums(sums[r], s_ptr, factors_ptr, bias_ptr, y_ptr, row + tl.arange(0, BT), moved + r * BN, num_tokens, num_features,
                    y_stride, SCALES, FACTORS, ADD, DONE and BIAS)  # fmt: skip
        if MORE:
            _store_sums(more[r], s_ptr, factors_ptr, bias_ptr, y_ptr, row + BT + tl.arange(0, MORE), moved + r * BN, num_tokens,
                        num_features, y_stride, SCALES, FACTORS, ADD, DONE and BIAS)  # fmt: skip


class TilesConfig(NamedTuple):
    """Tokens of a tile; how many times 16 output features for each of its warps; its warps; steps in flight; parts of the input features.

    A number of tokens that isn't a power of two is the sum of two: 160 = 128 + 32.
    """

    tokens: int
    rows: int
    warps: int
    stages: int
    parts: int = 1

    @property
    def features(self) -> int:
        """Output features of a tile."""
        return 16 * self.rows * self.warps


def tiles_config(tokens: int, weight_OI: Stored, device: torch.device) -> TilesConfig:
    """The tile, by measurement (docs/performance/stored-weights.md), and as many parts as fill the multiprocessors with programs."""
    features, inputs = weight_OI.shape
    wide = features >= 16384
    each = 2  # programs that a multiprocessor holds
    if tokens <= 32:
        tiles, each = TilesConfig(32, 2, 4, 3) if wide else TilesConfig(32, 1, 4, 5), 3
    elif tokens <= 64:
        tiles, each = (TilesConfig(64, 2, 4, 3), 3) if wide else (TilesConfig(64, 1, 4, 4), 2)
    elif tokens <= 96:
        tiles = TilesConfig(96, 2, 4, 3) if wide else TilesConfig(96, 1, 4, 3)
    elif tokens <= 128:
        tiles = TilesConfig(128, 1, 8, 3) if wide else TilesConfig(128, 1, 4, 3)
    elif tokens <= 160:
        tiles, each = TilesConfig(160, 1, 8, 4), 1
    elif tokens <= FITTED_TOKENS:
        tiles, each = TilesConfig(192, 1, 8, 3), 1
    else:
        tiles = TilesConfig(128, 1, 8, 3) if wide else TilesConfig(128, 2, 4, 3)
    programs = blocks(tokens, tiles.tokens) * blocks(features, tiles.features)
    return tiles._replace(parts=max(1, min(each * multiprocessors(device) // programs, inputs // PART_INPUTS)))


def _scales(stored: Stored) -> int | None:
    """What the scales multiply; None if the kernel can't have such groups."""
    inputs = stored.shape[1]
    if isinstance(stored, Stored8):
        if stored.block[1] >= inputs:
            return ROW_SCALES.value if stored.block[0] == 1 else STEP_SCALES.value
        return STEP_SCALES.value if stored.block[1] % BYTES == 0 else None
    if stored.group >= inputs and stored.zeros is None:
        return ROW_SCALES.value
    if stored.group < inputs and stored.group % 128 and stored.group not in (RUN // 2, RUN, 2 * RUN):
        return None
    return GROUP_SCALES.value if _word(stored.scales, stored.group) <= 64 else None


def _word(values_OG: torch.Tensor, group: int) -> int:
    """Bits of all groups' values of 128 columns."""
    return 8 * values_OG.itemsize * max(128 // group, 1)


def serves(weight_OI: Stored) -> bool:
    """Whether the kernel reads this matrix."""
    return weight_OI.codes.is_contiguous() and _scales(weight_OI) is not None


def in_order(
    x_TI: torch.Tensor, weight_OI: Stored, norm: Norm | None = None, *, gated: bool = False, pairs: bool = False
) -> torch.Tensor:
    """The inputs, their norm, or `silu(gate) * up` of them, in the order in which the codes come; [T, I or more], with zeros beyond I.

    With `pairs` it is the order of `kernels/linear/linear_wide.py`: one operation makes the numbers of bytes 0 and 2 of a word, so these come first.
    """
    tokens, inputs = x_TI.shape[0], weight_OI.shape[1]
    per = 1 if isinstance(weight_OI, Stored8) else 2
    wide = blocks(inputs, BYTES * per) * BYTES * per
    out_TI = x_TI.new_empty(tokens, wide)
    if not out_TI.numel():
        return out_TI
    block = padded(wide)
    _order_kernel[(tokens,)](
        x_TI, x_TI if norm is None else norm.weight_I, out_TI, x_TI.stride(0),
        0.0 if norm is None else norm.eps,
        K=inputs, PADDED=wide, BLOCK=block, PER=per, PAIRS=pairs,
        NORM=norm_kind(norm), GATED=gated,
        num_warps=row_warps(block),
        **dependent(x_TI.device),
    )  # fmt: skip
    return out_TI


def constants_of(x_TI: torch.Tensor, weight_OI: Stored) -> tuple[dict[str, Any], int]:
    """What `tile_sums` must know of the scales, and the input features of a step."""
    eight = isinstance(weight_OI, Stored8)
    high, group = weight_OI.block if eight else (1, weight_OI.group)
    scales = _scales(weight_OI)
    zeros = None if eight else weight_OI.zeros
    found = {
        "G": group, "BO": high, "SCALES": scales, "HELD": weight_OI.scales.dtype in HELD_BY.get(x_TI.dtype, ()),
        "S_WORD": WORD[_word(weight_OI.scales, group)] if scales == GROUP_SCALES.value else tl.uint8,
        "Z_WORD": tl.uint8 if zeros is None else WORD[_word(zeros, group)], "WAIT": must_end(),
    }  # fmt: skip
    return found, BYTES if eight else 2 * BYTES


def run_tiles(product: Product, config: TilesConfig) -> None:
    """Write `linear(x)` into `out`, or add it. `x` is in the order that `in_order` makes."""
    x_TI, weight_OI, bias_O, out_TO, _, _, add = product
    tokens = x_TI.shape[0]
    features, inputs = weight_OI.shape
    own, wide = constants_of(x_TI, weight_OI)
    steps = blocks(blocks(inputs, wide), config.parts)
    parts = blocks(inputs, steps * wide)
    done = parts == 1
    sums_PTO = out_TO if done else torch.empty(parts, tokens, features, dtype=torch.float32, device=x_TI.device)
    tensors, constants = operands_of(x_TI, weight_OI, bias_O if done else None)
    high, more = halves(config.tokens)
    _tiles_kernel[(blocks(tokens, config.tokens) * blocks(features, config.features), parts)](
        TensorDescriptor.from_tensor(x_TI, [high, wide]), TensorDescriptor.from_tensor(x_TI, [more or 8, wide]), *tensors,
        sums_PTO, tokens, features, sums_PTO.stride(-2), steps, K=inputs, BT=high, MORE=more, R=config.rows, W=config.warps,
        DONE=done,
        ADD=add and done, num_warps=config.warps, num_stages=config.stages, **own, **constants,
        **dependent(x_TI.device),
    )  # fmt: skip
    if not done:
        add_parts(sums_PTO, bias_O, out_TO, add=add)
