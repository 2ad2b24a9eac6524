"""Products of many tokens whose input is rounded to 8 bits, as the weights are (`ops/quantize.py`); see `ops/linear.py`.

On Hopper `linear_eight.py` has up to 160 tokens. Of more, cuBLAS serves e4m3: with a scale for each token and each output feature, and with scales for
128 features of a token and for 128 x 128 weights. The kernel of this file serves the rest: int8, and blocks of other heights.

Shape letters: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from pagerunner.ops import numerics
from pagerunner.ops.kernels.launch import blocks, dependent, multiprocessors, start_next, wait_turn
from pagerunner.ops.kernels.linear import linear_eight
from pagerunner.ops.kernels.linear.linear_parts import halves, store_or_add, tile_of
from pagerunner.ops.kernels.linear.linear_sums import PART_INPUTS, add_parts
from pagerunner.ops.quantize import GROUP, Quantized
from pagerunner.ops.quantize import Rounded as Rounded
from pagerunner.ops.quantize import rounding as rounding
from pagerunner.ops.stored import Stored8

_ROWS, _GROUPS, _BLOCKS = F.ScalingType.RowWise, F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128


@triton.jit
def _loaded(first_desc, more_desc, row, k, FIRST: tl.constexpr, MORE: tl.constexpr):
    """Codes of FIRST rows, and of MORE behind them where there are such."""
    blocks = (first_desc.load([row, k]),)
    if MORE:
        blocks = blocks + (more_desc.load([row + FIRST, k]),)
    return blocks


@triton.jit
def _numbers(first, FIRST: tl.constexpr, MORE: tl.constexpr):
    """The numbers of the rows that `_loaded` loads."""
    found = (first + tl.arange(0, FIRST),)
    if MORE:
        found = found + (first + FIRST + tl.arange(0, MORE),)
    return found


@triton.jit
def _scales(ptr, rows, most, stride, BLOCK: tl.constexpr):
    """Scales of blocks of rows."""
    found = ()
    for i in tl.static_range(len(rows)):
        found = found + (tl.load(ptr + (tl.where(rows[i] < most, rows[i], 0) // BLOCK).to(tl.int64) * stride),)
    return found


@triton.jit
def rounded_sums(x_desc, more_desc, w_desc, w_more_desc, x_scales_ptr, w_scales_ptr, row, feature, num_tokens, num_features,
                 first, last, token_stride, group_stride, K: tl.constexpr, BO: tl.constexpr, GROUPED: tl.constexpr, BT: tl.constexpr,
                 MORE: tl.constexpr, BN: tl.constexpr, BN_MORE: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Sums [features, tokens] of the input features from `first` to before `last`, BK at a time, with all scales; float32.

    One for each block of features and of tokens, the tokens' blocks in turn.
    """
    dtype: tl.constexpr = tl.int32 if x_desc.dtype == tl.int8 else tl.float32
    COLUMNS: tl.constexpr = (K + BK - 1) // BK if GROUPED else 1
    tokens, features = _numbers(row, BT, MORE), _numbers(feature, BN, BN_MORE)
    if not GROUPED:
        w_scales = _scales(w_scales_ptr, features, num_features, 1, BO)
        x_scales = _scales(x_scales_ptr, tokens, num_tokens, token_stride, 1)
    sums = ()
    for i in tl.static_range(len(features)):
        for j in tl.static_range(len(tokens)):
            sums = sums + (tl.zeros((features[i].shape[0], tokens[j].shape[0]), tl.float32 if GROUPED else dtype),)
    for k in range(first, last, BK):
        xs = _loaded(x_desc, more_desc, row, k, BT, MORE)
        ws = _loaded(w_desc, w_more_desc, feature, k, BN, BN_MORE)
        if GROUPED:
            x_scales = _scales(x_scales_ptr + k // BK * group_stride, tokens, num_tokens, token_stride, 1)
            w_scales = _scales(w_scales_ptr + k // BK, features, num_features, COLUMNS, BO)
        after = ()
        for i in tl.static_range(len(features)):
            for j in tl.static_range(len(tokens)):
                acc = sums[i * len(tokens) + j]
                if GROUPED:
                    product = tl.dot(ws[i], xs[j].T, out_dtype=dtype).to(tl.float32)
                    acc += product * (w_scales[i][:, None] * x_scales[j][None, :])
                else:
                    acc = tl.dot(ws[i], xs[j].T, acc, out_dtype=dtype)
                after = after + (acc,)
        sums = after
    if not GROUPED:
        after = ()
        for i in tl.static_range(len(features)):
            for j in tl.static_range(len(tokens)):
                acc = sums[i * len(tokens) + j].to(tl.float32)
                after = after + (acc * (w_scales[i][:, None] * x_scales[j][None, :]),)
        sums = after
    return sums


@triton.jit
def finish_tile(y, bias_ptr, y_ptr, tokens, features, num_tokens, num_features, y_stride, ADD: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """Store sums [features, tokens], with the bias, or add them."""
    live = features < num_features
    inside = live[:, None] & (tokens < num_tokens)[None, :]
    if BIAS:
        y += tl.load(bias_ptr + features, mask=live, other=0.0).to(tl.float32)[:, None]
    y_ptr += tokens.to(tl.int64)[None, :] * y_stride + features[:, None]
    store_or_add(y_ptr, y, inside, ADD)


@triton.jit(do_not_specialize=["num_tokens", "steps", "token_stride", "group_stride"])
def _rounded_kernel(x_desc, more_desc, w_desc, w_more_desc, x_scales_ptr, w_scales_ptr, bias_ptr, y_ptr, num_tokens,
                    num_features, steps, token_stride, group_stride, y_stride, K: tl.constexpr, BO: tl.constexpr,
                    GROUPED: tl.constexpr, BT: tl.constexpr, MORE: tl.constexpr, BN: tl.constexpr, BN_MORE: tl.constexpr,
                    BK: tl.constexpr, DONE: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
                    PDL: tl.constexpr):  # fmt: skip
    """BN + BN_MORE output features of BT + MORE tokens. BK input features at a time; with GROUPED they share scales.

    `steps` times BK input features. DONE: these are all, and `y` takes the outputs; otherwise it takes one sum after another, [parts, T, O] float32.
    """
    start_next(PDL)
    token_tile, feature_tile = tile_of(tl.program_id(0), num_tokens, num_features, BT + MORE, BN + BN_MORE, 8)
    first = tl.program_id(1) * steps * BK
    last = tl.minimum(first + steps * BK, K)
    row, feature = token_tile * (BT + MORE), feature_tile * (BN + BN_MORE)
    tokens, features = _numbers(row, BT, MORE), _numbers(feature, BN, BN_MORE)
    wait_turn(PDL)
    sums = rounded_sums(x_desc, more_desc, w_desc, w_more_desc, x_scales_ptr, w_scales_ptr, row, feature, num_tokens,
                        num_features, first, last, token_stride, group_stride, K, BO, GROUPED, BT, MORE, BN, BN_MORE, BK)  # fmt: skip
    if not DONE:
        y_ptr += tl.program_id(1) * num_tokens.to(tl.int64) * y_stride
    for i in tl.static_range(len(features)):
        for j in tl.static_range(len(tokens)):
            finish_tile(sums[i * len(tokens) + j], bias_ptr, y_ptr, tokens[j], features[i], num_tokens, num_features, y_stride,
                        ADD, DONE and BIAS)  # fmt: skip


def product(
    x: Quantized,
    weight_OI: Stored8,
    bias_O: torch.Tensor | None,
    dtype: torch.dtype,
    residual_TO: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias` in `dtype`, [T, O]; or the residual, to which it is added. The input has scales as `rounding` says."""
    grouped = x.scales.shape[1] > 1 or weight_OI.block[0] > 1
    tokens, device = x.codes.shape[0], x.codes.device
    if linear_eight.serves(tokens, weight_OI, dtype, device, grouped=grouped):
        out_TO = (
            torch.empty(tokens, weight_OI.shape[0], dtype=dtype, device=device) if residual_TO is None else residual_TO
        )
        linear_eight.run_eight(x, weight_OI, bias_O, out_TO, grouped=grouped, add=residual_TO is not None)
        return out_TO
    if _cublas_serves(x.codes.shape[0], weight_OI, dtype, grouped):
        out_TO = cublas(x, weight_OI, dtype, grouped)
        if bias_O is not None:
            out_TO.add_(bias_O)
        return out_TO if residual_TO is None else residual_TO.add_(out_TO)
    add = residual_TO is not None
    if residual_TO is None:
        residual_TO = torch.empty(x.codes.shape[0], weight_OI.shape[0], dtype=dtype, device=x.codes.device)
    run_rounded(x, weight_OI, bias_O, residual_TO, grouped=grouped, add=add)
    return residual_TO


def _cublas_serves(tokens: int, weight_OI: Stored8, dtype: torch.dtype, grouped: bool) -> bool:
    """Whether cuBLAS has such a product, and is faster than `_rounded_kernel` (docs/performance/stored-weights.md)."""
    features, inputs = weight_OI.shape
    if weight_OI.codes.dtype != torch.float8_e4m3fn or features % 16 or dtype != torch.bfloat16:
        return False
    if not grouped:
        return tokens > (MOST_ALONE if features <= MOST_WIDE else 192)
    if weight_OI.block != (GROUP, GROUP) or inputs % GROUP:
        return False
    borders, tiles = numerics.FAST.products, blocks(tokens, 64) * blocks(features, 128)
    return tokens > borders.library_tokens and tiles > borders.library_tiles


def cublas(x: Quantized, weight_OI: Stored8, dtype: torch.dtype, grouped: bool) -> torch.Tensor:
    """cuBLAS's product, where it has one."""
    if not grouped:
        return _scaled(x.codes, x.scales, weight_OI.codes, weight_OI.scales.t(), _ROWS, _ROWS, dtype)
    tokens = x.codes.shape[0]
    codes, scales = x
    if tokens % 4:  # cuBLAS wants a scale's tokens beside each other in whole pieces of 16 bytes
        codes = F.pad(codes.view(torch.uint8), (0, 0, 0, -tokens % 4)).view(codes.dtype)
        scales = F.pad(scales.t(), (0, -tokens % 4)).t()
    w_scales = weight_OI.scales
    if w_scales.shape[1] % 4:
        w_scales = F.pad(w_scales, (0, -w_scales.shape[1] % 4))
    return _scaled(codes, scales, weight_OI.codes, w_scales.t(), _GROUPS, _BLOCKS, dtype)[:tokens]


def _scaled(
    x: torch.Tensor, x_scales: torch.Tensor, weight_OI: torch.Tensor, w_scales: torch.Tensor, x_recipe: F.ScalingType,
    w_recipe: F.ScalingType, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    # fast accumulation is for scales of rows; with blocks, each block's sum is added in float32
    fast = x_recipe is _ROWS
    return F.scaled_mm(
        x, weight_OI.t(), x_scales, x_recipe, w_scales, w_recipe, output_dtype=dtype, use_fast_accum=fast
    )


class RoundedConfig(NamedTuple):
    """Tokens and output features of a tile, its warps, how many blocks of 128 input features are in flight, parts of the input features.

    Sizes that aren't powers of two are sums of two: 160 = 128 + 32.
    """

    tokens: int
    features: int
    warps: int
    stages: int
    parts: int = 1


ALONE_SIZES = 32, 64, 96, 128, 160, 192, 256
MOST_ALONE = ALONE_SIZES[-1]
"""Up to so many tokens are one tile's, unless scales are those of blocks, whose sums take twice the registers."""
STAGE_BYTES = 222 * 1024
"""Of a multiprocessor's memory, for what is on its way."""
MOST_WIDE = 25_344
"""Up to so many output features, each multiprocessor has at most one tile of 192 of them: they are 132 times 192."""


def rounded_config(tokens: int, features: int, inputs: int, device: torch.device, *, grouped: bool) -> RoundedConfig:
    """The tile, by measurement (docs/performance/stored-weights.md)."""
    places = multiprocessors(device)
    if tokens > MOST_ALONE or grouped:
        if blocks(tokens, 128) * blocks(features, 128) > 264:
            return RoundedConfig(128, 128, 8, 4)
        programs = blocks(tokens, 64) * blocks(features, 128)
        parts = (places if _alone(tokens, features, device) else 2 * places) // programs
        return RoundedConfig(64, 128, 4, 4 if programs <= places else 3, max(1, min(parts, inputs // PART_INPUTS)))
    high = next(size for size in ALONE_SIZES if tokens <= size)
    widths = (64, 128, 192) if high > 128 else (64,)
    wide = min(widths, key=lambda wide: (_rounds(features, wide, places) * wide, -wide))
    programs = blocks(features, wide)
    parts = max(1, min(places // programs, inputs // PART_INPUTS))
    if wide > 64:
        return RoundedConfig(high, wide, 8, min(4, STAGE_BYTES // ((high + wide) * GROUP)), parts)
    each = min(3, blocks(programs * parts, places))  # programs that a multiprocessor has at a time
    return RoundedConfig(high, wide, 4, min(8, STAGE_BYTES // each // ((high + wide) * GROUP)), parts)


def _rounds(features: int, wide: int, places: int) -> int:
    """How many tiles of so many features the busiest multiprocessor has."""
    return blocks(blocks(features, wide), places)


def _alone(tokens: int, features: int, device: torch.device) -> bool:
    """Whether each multiprocessor has one program of the sums, and not two: few tiles, which are cut into the more parts."""
    return 2 * blocks(tokens, 64) * blocks(features, 128) <= multiprocessors(device)


def kernels_of(tokens: int, weight_OI: Stored8, dtype: torch.dtype, device: torch.device, *, grouped: bool) -> Hashable:
    """What decides which kernels `product` launches for so many tokens; None where cuBLAS serves.

    With more tokens the parts become fewer, but once: from one program on a multiprocessor to two there may be more parts again. So a
    number of parts may come back, and `runner/kernel_counts.py` needs answers that don't: they say on which side the number stands.
    Example: 1536 output features of 8960 inputs in blocks on 132 multiprocessors take 3 parts up to 192 tokens, 2 up to 320, 3 up to 448, and 2.
    """
    if linear_eight.serves(tokens, weight_OI, dtype, device, grouped=grouped):
        return linear_eight.kernels_of(tokens, weight_OI, device)
    if _cublas_serves(tokens, weight_OI, dtype, grouped):
        return None
    features, inputs = weight_OI.shape
    config = rounded_config(tokens, features, inputs, device, grouped=grouped)
    return tokens <= MOST_ALONE, _alone(tokens, features, device), config


def run_rounded(
    x: Quantized, weight_OI: Stored8, bias_O: torch.Tensor | None, out_TO: torch.Tensor, *, grouped: bool, add: bool = False,
    config: RoundedConfig | None = None,
) -> None:  # fmt: skip
    """Launch `_rounded_kernel`: write the product into `out`, or add it."""
    tokens, inputs = x.codes.shape
    features = weight_OI.shape[0]
    if not out_TO.numel():
        return
    config = config or rounded_config(tokens, features, inputs, out_TO.device, grouped=grouped)
    steps = blocks(blocks(inputs, GROUP), config.parts)
    parts = blocks(inputs, steps * GROUP)
    done = parts == 1
    sums_PTO = out_TO if done else torch.empty(parts, tokens, features, dtype=torch.float32, device=out_TO.device)
    descriptors, constants = tiles_of(x.codes, weight_OI.codes, config)
    _rounded_kernel[(blocks(tokens, config.tokens) * blocks(features, config.features), parts)](
        *descriptors, x.scales, weight_OI.scales,
        x.scales if bias_O is None else bias_O, sums_PTO, tokens, features, steps, x.scales.stride(0),
        x.scales.stride(1), sums_PTO.stride(-2), K=inputs, BO=weight_OI.block[0], GROUPED=grouped, BK=GROUP,
        DONE=done, ADD=add and done, BIAS=bias_O is not None and done,
        num_warps=config.warps, num_stages=config.stages, **constants, **dependent(out_TO.device),
    )  # fmt: skip
    if not done:
        add_parts(sums_PTO, bias_O, out_TO, add=add)


def tiles_of(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, config: RoundedConfig
) -> tuple[tuple[TensorDescriptor, ...], dict[str, int]]:
    """Descriptors of a tile's blocks of tokens and of features, and their sizes."""
    sizes = *halves(config.tokens), *halves(config.features)
    codes = x_TI, x_TI, weight_OI, weight_OI
    made = (TensorDescriptor.from_tensor(one, [size or 8, GROUP]) for one, size in zip(codes, sizes, strict=True))
    return tuple(made), dict(zip(("BT", "MORE", "BN", "BN_MORE"), sizes, strict=True))
