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

from pagerunner.ops.kernels.launch import blocks, dependent
from pagerunner.ops.kernels.linear_parts import tile_of
from pagerunner.ops.quantize import GROUP, Quantized
from pagerunner.ops.quantize import Rounded as Rounded
from pagerunner.ops.quantize import rounding as rounding
from pagerunner.ops.stored import Stored8

_ROWS, _GROUPS, _BLOCKS = F.ScalingType.RowWise, F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128


@triton.jit(do_not_specialize=["num_tokens", "num_features", "token_stride", "group_stride"])
def _rounded_kernel(x_desc, w_desc, x_scales_ptr, w_scales_ptr, y_ptr, num_tokens, num_features, token_stride,
                    group_stride, y_stride, K: tl.constexpr, BO: tl.constexpr, GROUPED: tl.constexpr, BT: tl.constexpr,
                    BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BN output features of BT tokens. BK input features at a time; with GROUPED they share scales."""
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
    for k in range(0, K, BK):
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
    place = tokens.to(tl.int64)[:, None] * y_stride + features[None, :]
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=valid[:, None] & live[None, :])


def product(x: Quantized, weight_OI: Stored8, dtype: torch.dtype) -> torch.Tensor:
    """`x @ weight.T` in `dtype`, [T, O]. The input has scales as `rounding` says."""
    features, inputs = weight_OI.shape
    grouped = x.scales.shape[1] > 1 or weight_OI.block[0] > 1
    if x.codes.dtype != torch.float8_e4m3fn or features % 16 or dtype != torch.bfloat16:
        return run_rounded(x, weight_OI, dtype, grouped=grouped)
    if not grouped:
        return _scaled(x.codes, x.scales, weight_OI.codes, weight_OI.scales.t(), _ROWS, _ROWS, dtype)
    if weight_OI.block != (GROUP, GROUP) or inputs % GROUP:
        return run_rounded(x, weight_OI, dtype, grouped=True)
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


class Tiles(NamedTuple):
    """Tokens and output features of a tile, its warps, and how many blocks of 128 input features are in flight."""

    tokens: int
    features: int
    warps: int
    stages: int


def tiles_for(tokens: int, features: int) -> Tiles:
    """The tile, by measurement (docs/performance.md)."""
    return Tiles(64, 128, 4, 4) if blocks(tokens, 128) * blocks(features, 128) <= 264 else Tiles(128, 128, 8, 4)


def run_rounded(
    x: Quantized, weight_OI: Stored8, dtype: torch.dtype, *, grouped: bool, tiles: Tiles | None = None
) -> torch.Tensor:
    """Launch `_rounded_kernel`."""
    tokens, inputs = x.codes.shape
    features = weight_OI.shape[0]
    tiles = tiles or tiles_for(tokens, features)
    out_TO = torch.empty(tokens, features, dtype=dtype, device=x.codes.device)
    if not out_TO.numel():
        return out_TO
    _rounded_kernel[(blocks(tokens, tiles.tokens) * blocks(features, tiles.features),)](
        TensorDescriptor.from_tensor(x.codes, [tiles.tokens, GROUP]),
        TensorDescriptor.from_tensor(weight_OI.codes, [tiles.features, GROUP]), x.scales, weight_OI.scales, out_TO,
        tokens, features, x.scales.stride(0), x.scales.stride(1), features, K=inputs, BO=weight_OI.block[0],
        GROUPED=grouped, BT=tiles.tokens, BN=tiles.features, BK=GROUP, num_warps=tiles.warps, num_stages=tiles.stages,
        **dependent(out_TO.device),
    )  # fmt: skip
    return out_TO
