"""Products of many tokens whose input is rounded to 8 bits, as the weights are (`ops/quantize.py`); see `ops/linear.py`.

cuBLAS serves e4m3: with a scale for each token and each output feature, and with scales for 128 features of a token and for 128 x 128 weights. Our
kernel serves the rest: int8, and blocks of other heights.

Shape letters: T tokens, I input features, O output features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from pagerunner.ops.kernels.launch import blocks, dependent, multiprocessors
from pagerunner.ops.kernels.linear_parts import tile_of
from pagerunner.ops.kernels.linear_sums import PART_INPUTS, add_parts
from pagerunner.ops.quantize import GROUP, Quantized
from pagerunner.ops.quantize import Rounded as Rounded
from pagerunner.ops.quantize import rounding as rounding
from pagerunner.ops.stored import Stored8

FEW_TOKENS, FEW_TILES = 32, 64  # with more of both, cuBLAS is faster where it has such a product
_ROWS, _GROUPS, _BLOCKS = F.ScalingType.RowWise, F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128


@triton.jit(do_not_specialize=["num_tokens", "num_features", "steps", "token_stride", "group_stride"])
def _rounded_kernel(x_desc, w_desc, x_scales_ptr, w_scales_ptr, bias_ptr, y_ptr, num_tokens, num_features, steps, token_stride,
                    group_stride, y_stride, K: tl.constexpr, BO: tl.constexpr, GROUPED: tl.constexpr, BT: tl.constexpr,
                    BN: tl.constexpr, BK: tl.constexpr, DONE: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
                    PDL: tl.constexpr):  # fmt: skip
    """BN output features of BT tokens. BK input features at a time; with GROUPED they share scales.

    `steps` times BK input features. DONE: these are all, and `y` takes the outputs; otherwise it takes one sum after another, [parts, T, O] float32.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token_tile, feature_tile = tile_of(num_tokens, num_features, BT, BN, 8)
    tokens = token_tile * BT + tl.arange(0, BT)
    features = feature_tile * BN + tl.arange(0, BN)
    valid, live = tokens < num_tokens, features < num_features
    w_scales_ptr += (tl.where(live, features, 0) // BO) * ((K + BK - 1) // BK if GROUPED else 1)
    x_scales_ptr += tl.where(valid, tokens, 0).to(tl.int64) * token_stride
    dtype: tl.constexpr = tl.int32 if x_desc.dtype == tl.int8 else tl.float32
    acc = tl.zeros((BT, BN), tl.float32 if GROUPED else dtype)
    first = tl.program_id(1) * steps * BK
    for k in range(first, tl.minimum(first + steps * BK, K), BK):
        x = x_desc.load([token_tile * BT, k])
        w = w_desc.load([feature_tile * BN, k])
        if GROUPED:
            x_scales = tl.load(x_scales_ptr + k // BK * group_stride)
            w_scales = tl.load(w_scales_ptr + k // BK)
            acc += tl.dot(x, w.T, out_dtype=dtype).to(tl.float32) * (x_scales[:, None] * w_scales[None, :])
        else:
            acc = tl.dot(x, w.T, acc, out_dtype=dtype)
    y = acc.to(tl.float32)
    if not GROUPED:
        y *= tl.load(x_scales_ptr)[:, None] * tl.load(w_scales_ptr)[None, :]
    inside = valid[:, None] & live[None, :]
    if DONE:
        if BIAS:
            y += tl.load(bias_ptr + features, mask=live, other=0.0).to(tl.float32)[None, :]
    else:
        y_ptr += tl.program_id(1) * num_tokens.to(tl.int64) * y_stride
    y_ptr += tokens.to(tl.int64)[:, None] * y_stride + features[None, :]
    y = y.to(y_ptr.dtype.element_ty)
    if ADD:
        y = (tl.load(y_ptr, mask=inside, other=0.0).to(tl.float32) + y.to(tl.float32)).to(y.dtype)
    tl.store(y_ptr, y, mask=inside)


def product(
    x: Quantized,
    weight_OI: Stored8,
    bias_O: torch.Tensor | None,
    dtype: torch.dtype,
    residual_TO: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias` in `dtype`, [T, O]; or the residual, to which it is added. The input has scales as `rounding` says."""
    grouped = x.scales.shape[1] > 1 or weight_OI.block[0] > 1
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
    """Whether cuBLAS has such a product, and is faster than `_rounded_kernel` (docs/performance.md)."""
    if weight_OI.codes.dtype != torch.float8_e4m3fn or weight_OI.shape[0] % 16 or dtype != torch.bfloat16:
        return False
    if grouped and (weight_OI.block != (GROUP, GROUP) or weight_OI.shape[1] % GROUP):
        return False
    return tokens > FEW_TOKENS and blocks(tokens, 64) * blocks(weight_OI.shape[0], 128) > FEW_TILES


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
    """Tokens and output features of a tile, its warps, how many blocks of 128 input features are in flight, and parts of the input features."""

    tokens: int
    features: int
    warps: int
    stages: int
    parts: int = 1


def rounded_config(tokens: int, features: int, inputs: int, device: torch.device) -> RoundedConfig:
    """The tile, by measurement (docs/performance.md)."""
    if blocks(tokens, 128) * blocks(features, 128) > 264:
        return RoundedConfig(128, 128, 8, 4)
    programs, places = blocks(tokens, 64) * blocks(features, 128), multiprocessors(device)
    parts = (places if _alone(tokens, features, device) else 2 * places) // programs
    return RoundedConfig(64, 128, 4, 4 if programs <= places else 3, max(1, min(parts, inputs // PART_INPUTS)))


def _alone(tokens: int, features: int, device: torch.device) -> bool:
    """Whether each multiprocessor has one program of the sums, and not two: few tiles, which are cut into the more parts."""
    return 2 * blocks(tokens, 64) * blocks(features, 128) <= multiprocessors(device)


def kernels_of(
    tokens: int, weight_OI: Stored8, dtype: torch.dtype, device: torch.device, *, grouped: bool
) -> tuple[bool, RoundedConfig] | None:
    """What decides which kernels `product` launches for so many tokens; None where cuBLAS serves.

    With more tokens the parts become fewer, but once: from one program on a multiprocessor to two there may be more parts again. So a
    number of parts may come back, and `runner/kernel_counts.py` needs answers that don't: they say on which side the number stands.
    Example: 1536 output features of 8960 inputs on 132 multiprocessors take 3 parts up to 192 tokens, 2 up to 320, 3 up to 448, and 2.
    """
    if _cublas_serves(tokens, weight_OI, dtype, grouped):
        return None
    features, inputs = weight_OI.shape
    return _alone(tokens, features, device), rounded_config(tokens, features, inputs, device)


def run_rounded(
    x: Quantized,
    weight_OI: Stored8,
    bias_O: torch.Tensor | None,
    out_TO: torch.Tensor,
    *,
    grouped: bool,
    add: bool = False,
    config: RoundedConfig | None = None,
) -> None:
    """Launch `_rounded_kernel`: write the product into `out`, or add it."""
    tokens, inputs = x.codes.shape
    features = weight_OI.shape[0]
    if not out_TO.numel():
        return
    config = config or rounded_config(tokens, features, inputs, out_TO.device)
    steps = blocks(blocks(inputs, GROUP), config.parts)
    parts = blocks(inputs, steps * GROUP)
    done = parts == 1
    sums_PTO = out_TO if done else torch.empty(parts, tokens, features, dtype=torch.float32, device=out_TO.device)
    _rounded_kernel[(blocks(tokens, config.tokens) * blocks(features, config.features), parts)](
        TensorDescriptor.from_tensor(x.codes, [config.tokens, GROUP]),
        TensorDescriptor.from_tensor(weight_OI.codes, [config.features, GROUP]), x.scales, weight_OI.scales,
        x.scales if bias_O is None else bias_O, sums_PTO, tokens, features, steps, x.scales.stride(0),
        x.scales.stride(1), sums_PTO.stride(-2), K=inputs, BO=weight_OI.block[0], GROUPED=grouped, BT=config.tokens,
        BN=config.features, BK=GROUP, DONE=done, ADD=add and done, BIAS=bias_O is not None and done,
        num_warps=config.warps, num_stages=config.stages, **dependent(out_TO.device),
    )  # fmt: skip
    if not done:
        add_parts(sums_PTO, bias_O, out_TO, add=add)
