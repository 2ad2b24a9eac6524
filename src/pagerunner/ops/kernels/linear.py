"""Products with a weight matrix for a few tokens; see `ops/linear.py`. Larger ones are cuBLAS's.

`_rows_kernel` (up to 4 tokens): every program holds whole rows of the weights, multiplies and sums in float32 registers.
The norm is applied around the sum: `sum(w * norm_weight * x) / rms(x)`, so that x is read once.
`_tile_kernel` (up to 64): the weights are the left operand of the matrix units, whose tiles are taller than wide.
Both start to read weights before their predecessor has ended (`kernels/launch.py`).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.kernels.launch import blocks, dependent, padded
from pagerunner.ops.linear import Norm

NO_NORM, PLAIN_NORM, OFFSET_NORM = 0, 1, 2


@triton.jit
def _norm_weight(norm_ptr, cols, mask, NORM: tl.constexpr):
    weight = tl.load(norm_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if NORM == 2:
        weight += 1.0
    return weight


@triton.jit
def _finish(acc, up, square, bias_ptr, y_ptr, row, y_stride, rows_O, live, num_features, eps,
            K: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """Sum up one token's products, and store them with whatever follows; casts are where the twin has them."""
    out_type = y_ptr.dtype.element_ty
    y = tl.sum(acc, 1)
    if NORM != 0:
        scale = 1.0 / tl.sqrt_rn(tl.sum(square, 0) * (1.0 / K) + eps)
        y *= scale
    if BIAS:
        y += tl.load(bias_ptr + rows_O, mask=live, other=0.0).to(tl.float32)
    y = y.to(out_type)
    if GATED:
        u = tl.sum(up, 1)
        if NORM != 0:
            u *= scale
        if BIAS:
            u += tl.load(bias_ptr + num_features + rows_O, mask=live, other=0.0).to(tl.float32)
        gate = y.to(tl.float32)
        gate = (gate / (1.0 + tl.exp(-gate))).to(out_type).to(tl.float32)
        y = (gate * u.to(out_type).to(tl.float32)).to(out_type)
    place = y_ptr + row * y_stride + rows_O
    if ADD:
        y = (tl.load(place, mask=live, other=0.0).to(tl.float32) + y.to(tl.float32)).to(out_type)
    tl.store(place, y, mask=live)


@triton.jit(do_not_specialize=["num_tokens", "num_features"])
def _rows_kernel(x_ptr, norm_ptr, w_ptr, bias_ptr, y_ptr, num_tokens, num_features, x_stride, y_stride, eps,
                 K: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr,
                 GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BN output features of M (1, 2 or 4) tokens; with GATED also the BN features that belong to them further down."""
    if PDL:
        gdc_launch_dependents()
    rows_O = tl.program_id(0) * BN + tl.arange(0, BN)
    live = rows_O < num_features
    cols = tl.arange(0, BK)
    w_place = w_ptr + rows_O[:, None].to(tl.int64) * K + cols[None, :]
    up_place = w_place + num_features.to(tl.int64) * K
    first_mask = live[:, None] & (cols < K)[None, :]
    first_w = tl.load(w_place, mask=first_mask, other=0.0)
    first_up = first_w
    if GATED:
        first_up = tl.load(up_place, mask=first_mask, other=0.0)
    if NORM != 0:
        weight = _norm_weight(norm_ptr, cols, cols < K, NORM)
    if PDL:
        gdc_wait()
    acc0 = tl.zeros((BN, BK), tl.float32)
    up0, square0 = acc0, tl.zeros((BK,), tl.float32)
    acc1, up1, square1 = acc0, acc0, square0
    acc2, up2, square2 = acc0, acc0, square0
    acc3, up3, square3 = acc0, acc0, square0
    for step in tl.static_range((K + BK - 1) // BK):
        k = step * BK + cols
        inside = k < K
        if step == 0:
            w = first_w.to(tl.float32)
            u = first_up.to(tl.float32)
        else:
            w = tl.load(w_place + step * BK, mask=live[:, None] & inside[None, :], other=0.0).to(tl.float32)
            u = w
            if GATED:
                u = tl.load(up_place + step * BK, mask=live[:, None] & inside[None, :], other=0.0).to(tl.float32)
            if NORM != 0:
                weight = _norm_weight(norm_ptr, k, inside, NORM)
        x = tl.load(x_ptr + k, mask=inside, other=0.0).to(tl.float32)
        if NORM != 0:
            square0 += x * x
            x *= weight
        acc0 += w * x[None, :]
        if GATED:
            up0 += u * x[None, :]
        if M > 1:
            x = tl.load(x_ptr + x_stride + k, mask=inside & (num_tokens > 1), other=0.0).to(tl.float32)
            if NORM != 0:
                square1 += x * x
                x *= weight
            acc1 += w * x[None, :]
            if GATED:
                up1 += u * x[None, :]
        if M > 2:
            x = tl.load(x_ptr + 2 * x_stride + k, mask=inside & (num_tokens > 2), other=0.0).to(tl.float32)
            if NORM != 0:
                square2 += x * x
                x *= weight
            acc2 += w * x[None, :]
            if GATED:
                up2 += u * x[None, :]
            x = tl.load(x_ptr + 3 * x_stride + k, mask=inside & (num_tokens > 3), other=0.0).to(tl.float32)
            if NORM != 0:
                square3 += x * x
                x *= weight
            acc3 += w * x[None, :]
            if GATED:
                up3 += u * x[None, :]
    _finish(
        acc0, up0, square0, bias_ptr, y_ptr, 0, y_stride, rows_O, live, num_features, eps, K, NORM, GATED, ADD, BIAS
    )
    if M > 1:
        _finish(acc1, up1, square1, bias_ptr, y_ptr, 1, y_stride, rows_O, live & (num_tokens > 1), num_features, eps,
                K, NORM, GATED, ADD, BIAS)  # fmt: skip
    if M > 2:
        _finish(acc2, up2, square2, bias_ptr, y_ptr, 2, y_stride, rows_O, live & (num_tokens > 2), num_features, eps,
                K, NORM, GATED, ADD, BIAS)  # fmt: skip
        _finish(acc3, up3, square3, bias_ptr, y_ptr, 3, y_stride, rows_O, live & (num_tokens > 3), num_features, eps,
                K, NORM, GATED, ADD, BIAS)  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "num_features"])
def _tile_kernel(x_ptr, w_ptr, bias_ptr, y_ptr, num_tokens, num_features, x_stride, y_stride,
                 K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ADD: tl.constexpr,
                 BIAS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BN output features of up to BM tokens."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    rows_O = tl.program_id(0) * BN + tl.arange(0, BN)
    tokens = tl.program_id(1) * BM + tl.arange(0, BM)
    live, valid = rows_O < num_features, tokens < num_tokens
    cols = tl.arange(0, BK)
    w_place = w_ptr + rows_O[:, None].to(tl.int64) * K + cols[None, :]
    x_place = x_ptr + tokens[None, :].to(tl.int64) * x_stride + cols[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    for first in range(0, K, BK):
        inside = cols < K - first
        w = tl.load(w_place + first, mask=live[:, None] & inside[None, :], other=0.0)
        x = tl.load(x_place + first, mask=inside[:, None] & valid[None, :], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + rows_O, mask=live, other=0.0).to(tl.float32)[:, None]
    place = y_ptr + tokens[None, :].to(tl.int64) * y_stride + rows_O[:, None]
    mask = live[:, None] & valid[None, :]
    y = acc.to(y_ptr.dtype.element_ty)
    if ADD:
        y = (tl.load(place, mask=mask, other=0.0).to(tl.float32) + y.to(tl.float32)).to(y_ptr.dtype.element_ty)
    tl.store(place, y, mask=mask)


class RowsConfig(NamedTuple):
    """Output features and input features of a block, and its warps."""

    features: int
    inputs: int
    warps: int


class TileConfig(NamedTuple):
    """Output features and input features of a block, its warps, and how many blocks of weights are in flight."""

    features: int
    inputs: int
    warps: int
    stages: int


MAX_ROWS = 4
MAX_TILE = 16


@functools.cache
def rows_config(tokens: int, inputs: int, gated: bool) -> RowsConfig:
    """The block for `_rows_kernel`, by measurement (docs/performance.md)."""
    block = min(1024, padded(inputs))
    features = 4 if tokens == 1 else 2
    return RowsConfig(max(1, features // 2) if gated else features, block, 4)


@functools.cache
def tile_config(tokens: int, features: int, inputs: int) -> TileConfig:
    """The block for `_tile_kernel`, by measurement (docs/performance.md)."""
    return TileConfig(16 if features < 8192 else 64, min(128, padded(inputs)), 4, 4)


def _fits(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    """Whether the kernels here read these layouts; cuBLAS reads any."""
    return x_TI.dim() == 2 and x_TI.stride(1) == 1 and weight_OI.is_contiguous() and x_TI.dtype == weight_OI.dtype


def run_rows(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    out_TO: torch.Tensor,
    norm: Norm | None = None,
    *,
    gated: bool = False,
    add: bool = False,
    config: RowsConfig | None = None,
) -> torch.Tensor:
    """Launch `_rows_kernel` for 1 to 4 tokens."""
    tokens, inputs = x_TI.shape
    features = out_TO.shape[1]
    width = 1 if tokens == 1 else 2 if tokens == 2 else 4
    config = config or rows_config(width, inputs, gated)
    _rows_kernel[(blocks(features, config.features),)](
        x_TI,
        x_TI if norm is None else norm.weight_I,
        weight_OI,
        x_TI if bias_O is None else bias_O,
        out_TO,
        tokens,
        features,
        x_TI.stride(0),
        out_TO.stride(0),
        0.0 if norm is None else norm.eps,
        K=inputs,
        M=width,
        BN=config.features,
        BK=config.inputs,
        NORM=NO_NORM if norm is None else OFFSET_NORM if norm.offset else PLAIN_NORM,
        GATED=gated,
        ADD=add,
        BIAS=bias_O is not None,
        num_warps=config.warps,
        **dependent(x_TI.device),
    )
    return out_TO


def run_tiles(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    out_TO: torch.Tensor,
    *,
    add: bool = False,
    config: TileConfig | None = None,
) -> torch.Tensor:
    """Launch `_tile_kernel` for any number of tokens."""
    tokens, inputs = x_TI.shape
    features = out_TO.shape[1]
    width = min(64, max(16, padded(tokens)))
    config = config or tile_config(tokens, features, inputs)
    _tile_kernel[(blocks(features, config.features), blocks(tokens, width))](
        x_TI,
        weight_OI,
        x_TI if bias_O is None else bias_O,
        out_TO,
        tokens,
        features,
        x_TI.stride(0),
        out_TO.stride(0),
        K=inputs,
        BM=width,
        BN=config.features,
        BK=config.inputs,
        ADD=add,
        BIAS=bias_O is not None,
        num_warps=config.warps,
        num_stages=config.stages,
        **dependent(x_TI.device),
    )
    return out_TO


def _product(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor | None:
    """The plain product by a kernel of ours, or None where cuBLAS is the better one."""
    tokens = x_TI.shape[0]
    if not 0 < tokens <= MAX_TILE or not _fits(x_TI, weight_OI):
        return None
    out_TO = x_TI.new_empty(tokens, weight_OI.shape[0])
    if tokens <= MAX_ROWS:
        return run_rows(x_TI, weight_OI, bias_O, out_TO)
    return run_tiles(x_TI, weight_OI, bias_O, out_TO)


def linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """See `ops/linear.py`."""
    out_TO = _product(x_TI, weight_OI, bias_O)
    return F.linear(x_TI, weight_OI, bias_O) if out_TO is None else out_TO


def linear_add_(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, residual_TO: torch.Tensor, bias_O: torch.Tensor | None = None
) -> None:
    """See `ops/linear.py`."""
    tokens = x_TI.shape[0]
    if 0 < tokens <= MAX_TILE and _fits(x_TI, weight_OI) and residual_TO.stride(1) == 1:
        run = run_rows if tokens <= MAX_ROWS else run_tiles
        run(x_TI, weight_OI, bias_O, residual_TO, add=True)
    elif bias_O is None:
        residual_TO.addmm_(x_TI, weight_OI.t())
    else:
        residual_TO.add_(F.linear(x_TI, weight_OI, bias_O))


def norm_linear(
    x_TI: torch.Tensor, norm: Norm, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    """See `ops/linear.py`."""
    tokens = x_TI.shape[0]
    if 0 < tokens <= MAX_ROWS and _fits(x_TI, weight_OI):
        return run_rows(x_TI, weight_OI, bias_O, x_TI.new_empty(tokens, weight_OI.shape[0]), norm)
    return linear(norm(x_TI), weight_OI, bias_O)


def norm_linear_silu(
    x_TI: torch.Tensor, norm: Norm, weight_2OI: torch.Tensor, bias_2O: torch.Tensor | None = None
) -> torch.Tensor:
    """See `ops/linear.py`."""
    tokens = x_TI.shape[0]
    if 0 < tokens <= MAX_ROWS and _fits(x_TI, weight_2OI):
        out_TO = x_TI.new_empty(tokens, weight_2OI.shape[0] // 2)
        return run_rows(x_TI, weight_2OI, bias_2O, out_TO, norm, gated=True)
    return silu_and_mul(linear(norm(x_TI), weight_2OI, bias_2O))
