"""Products with a weight matrix for a few tokens; see `ops/linear.py`. Others are `linear_held.py`'s, `linear_dense.py`'s and cuBLAS's.

`_rows_kernel` (one token): every program holds whole rows of the weights, multiplies and sums in float32 registers.
`_few_kernel` (up to 16): the same with matrix units. Norms are applied around the sum: `sum(w * norm_weight * x) / rms(x)`,
so that x is read once. Both start to read weights before their predecessor has ended (`kernels/launch.py`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from pagerunner.ops import numerics
from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.kernels.launch import blocks, dependent, padded, start_next, wait_turn
from pagerunner.ops.kernels.linear import linear_dense, linear_held, linear_many, linear_stored
from pagerunner.ops.kernels.linear.linear_parts import NO_NORM, Product, held, norm_kind, norm_weight, put, silu_gate
from pagerunner.ops.kernels.lora.lora import (
    TILE,
    look,
    row_own,
    row_place,
    row_ranks,
    row_sum,
    row_words,
    shrink_beside,
    token_inner,
)
from pagerunner.ops.linear import Norm, joins_few
from pagerunner.ops.lora import COPIES, SMALL_STEP, Blocks, Fused, WorkList
from pagerunner.ops.stored import Stored


@triton.jit
def _blocks_of(places, product, feature, GATED: tl.constexpr, STARTS: tl.constexpr, WIDE: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Which of a layer's products has an output feature, its first feature and how many it has, and where its blocks of B lie, and up's."""
    part, begin, size = 0, 0, STARTS[1]
    for later in tl.static_range(1, 1 if GATED else len(STARTS) - 1):
        if feature >= STARTS[later]:
            part, begin, size = later, STARTS[later], STARTS[later + 1] - STARTS[later]
    place = row_place(places, product + part, WIDE, BLOCKS, TILE)
    up_place = place
    if GATED:
        up_place = row_place(places, product + 1, WIDE, BLOCKS, TILE)
    return part, begin, size, place, up_place


@triton.jit
def _ranks_and_words(
    pool, place, up_place, size, feature, end, words, program, part, turn, BN: tl.constexpr, GATED: tl.constexpr, WIDE: tl.constexpr,
    BLOCKS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """B for a program's features, where it finds `A x`, and what is there now; and the same of up."""
    b = row_ranks(pool, place, size, feature, end, BN, WIDE, TILE)
    at = row_words(words, program, part, WIDE, BLOCKS, PARTS, TILE, COPIES)
    up_b, up_at = b, at
    if GATED:
        up_b = row_ranks(pool, up_place, size, feature, end, BN, WIDE, TILE)
        up_at = row_words(words, program, 1, WIDE, BLOCKS, PARTS, TILE, COPIES)
    seen = look(at, turn, WIDE, BLOCKS, TILE)
    up_seen = seen
    if GATED:
        up_seen = look(up_at, turn, WIDE, BLOCKS, TILE)
    return b, at, seen, up_b, up_at, up_seen


@triton.jit
def _row_features(x_ptr, norm_ptr, w_ptr, bias_ptr, y_ptr, num_features, eps, program, words, turn, places, pool, product,
                  K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
                  PDL: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr, STARTS: tl.constexpr, WIDE: tl.constexpr, COPIES: tl.constexpr):  # fmt: skip
    """BN output features of one token, or gates with the ups that belong to them. See `_rows_kernel`."""
    rows_O = program * BN + tl.arange(0, BN)
    live = rows_O < num_features
    cols = tl.arange(0, BK)
    w_place = w_ptr + rows_O[:, None].to(tl.int64) * K + cols[None, :]
    up_w_place = w_place + num_features.to(tl.int64) * K
    mask = live[:, None] & (cols < K)[None, :]
    first_w = tl.load(w_place, mask=mask, other=0.0)
    first_up = first_w
    if GATED:
        first_up = tl.load(up_w_place, mask=mask, other=0.0)
    if NORM != NO_NORM:
        weight = norm_weight(norm_ptr, cols, cols < K, NORM)
    if BIAS:
        bias = tl.load(bias_ptr + rows_O, mask=live, other=0.0).to(tl.float32)
    if BIAS and GATED:
        up_bias = tl.load(bias_ptr + num_features + rows_O, mask=live, other=0.0).to(tl.float32)
    if BLOCKS:
        part, begin, size, place, up_place = _blocks_of(
            places, product, program * BN, GATED, STARTS, WIDE, BLOCKS, TILE
        )
    wait_turn(PDL)
    first_x = tl.load(x_ptr + cols, mask=cols < K, other=0.0)
    if BLOCKS:  # behind the wait: before it the compiler puts what waits for places in front of the weights
        b, at, seen, up_b, up_at, up_seen = _ranks_and_words(
            pool, place, up_place, size, program * BN - begin, num_features - begin, words, program, part, turn, BN, GATED, WIDE, BLOCKS, len(STARTS) - 1, TILE, COPIES,
        )  # fmt: skip
    old = held(y_ptr + rows_O, live, ADD)
    acc, square = tl.zeros((BN, BK), tl.float32), tl.zeros((BK,), tl.float32)
    up = acc
    for step in tl.static_range((K + BK - 1) // BK):
        k = step * BK + cols
        inside = k < K
        if step == 0:
            w, u = first_w, first_up
        else:
            mask = live[:, None] & inside[None, :]
            w = tl.load(w_place + step * BK, mask=mask, other=0.0)
            u = w
            if GATED:
                u = tl.load(up_w_place + step * BK, mask=mask, other=0.0)
        x = first_x.to(tl.float32)
        if step > 0:
            x = tl.load(x_ptr + k, mask=inside, other=0.0).to(tl.float32)
        if NORM != NO_NORM:
            if step > 0:
                weight = norm_weight(norm_ptr, k, inside, NORM)
            square += x * x
            x *= weight
        acc += w.to(tl.float32) * x[None, :]
        if GATED:
            up += u.to(tl.float32) * x[None, :]
    if BLOCKS:
        own = row_own(acc, WIDE)
        if GATED:
            up_own = row_own(up, WIDE)
        y = row_sum(own, b, at, seen, turn)
    else:
        y = tl.sum(acc, 1)
    scale = 1.0
    if NORM != NO_NORM:
        scale = 1.0 / tl.sqrt_rn(tl.sum(square, 0) * (1.0 / K) + eps)
        y *= scale
    if BIAS:
        y += bias
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    if GATED:
        if BLOCKS:
            u = row_sum(up_own, up_b, up_at, up_seen, turn)
        else:
            u = tl.sum(up, 1)
        if NORM != NO_NORM:
            u *= scale
        if BIAS:
            u += up_bias
        y = silu_gate(y, u, dtype)
    put(y_ptr + rows_O, y, old, live, ADD)


@triton.jit(do_not_specialize=["num_features", "product", "turn"])
def _rows_kernel(x_ptr, norm_ptr, w_ptr, bias_ptr, y_ptr, num_features, eps, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                 NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
                 words=None, turn=0, places=None, pool=None, product=0, BLOCKS: tl.constexpr = 0,
                 TILE: tl.constexpr = 0, STARTS: tl.constexpr = (), FIRST: tl.constexpr = 0, RANKS: tl.constexpr = 0,
                 WIDE: tl.constexpr = 0, COPIES: tl.constexpr = 0):  # fmt: skip
    """BN output features of one token. With GATED they are gates, and the BN features of the up projection that belong to them come with them.

    BLOCKS of ranks: with an adapter. The FIRST programs compute `A x`, and the others find it in `words`, when they have their own sums. A device
    begins programs in the order of their numbers, so nobody waits for one that can't begin. STARTS are the first features of the layer's products, and
    its features.
    """
    start_next(PDL)
    program = tl.program_id(0)
    if BLOCKS and program < FIRST:
        token_inner(
            x_ptr, norm_ptr, words, turn, places, pool, product, program, K, BK, RANKS, NORM, BLOCKS, len(STARTS) - 1, TILE, COPIES, PDL,
        )  # fmt: skip
    else:
        _row_features(
            x_ptr, norm_ptr, w_ptr, bias_ptr, y_ptr, num_features, eps, program - FIRST, words, turn, places, pool, product,
            K, BN, BK, NORM, GATED, ADD, BIAS, PDL, BLOCKS, TILE, STARTS, WIDE, COPIES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "num_features"])
def _few_kernel(x_ptr, norm_ptr, w_ptr, bias_ptr, y_ptr, num_tokens, num_features, x_stride, y_stride, eps,
                K: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
                PDL: tl.constexpr):  # fmt: skip
    """BN output features of up to BM tokens.

    With GATED they are gates, and the BN features of the up projection that belong to them come with them.

    The S warps divide the inputs between them: a product with three dimensions, the first of which is summed up at the end.
    """
    start_next(PDL)
    rows_O = tl.program_id(0) * BN + tl.arange(0, BN)
    live = rows_O < num_features
    tokens = tl.arange(0, BM)
    valid = tokens < num_tokens
    inputs = tl.arange(0, S)[:, None] * BK + tl.arange(0, BK)[None, :]
    w_place = w_ptr + rows_O[None, :, None].to(tl.int64) * K + inputs[:, None, :]
    up_place = w_place + num_features.to(tl.int64) * K
    mask = live[None, :, None] & (inputs < K)[:, None, :]
    first_w = tl.load(w_place, mask=mask, other=0.0)
    first_up = first_w
    if GATED:
        first_up = tl.load(up_place, mask=mask, other=0.0)
    if NORM != NO_NORM:
        weight = norm_weight(norm_ptr, inputs, inputs < K, NORM)
    place = y_ptr + tokens[None, :] * y_stride + rows_O[:, None]
    inside_y = live[:, None] & valid[None, :]
    wait_turn(PDL)
    old = held(place, inside_y, ADD)
    x_place = x_ptr + tokens[None, None, :] * x_stride + inputs[:, :, None]
    acc = tl.zeros((S, BN, BM), tl.float32)
    up = acc
    square = tl.zeros((S, BM), tl.float32)
    x = tl.load(x_place, mask=(inputs < K)[:, :, None] & valid[None, None, :], other=0.0)
    if NORM != NO_NORM:
        wide = x.to(tl.float32)
        square += tl.sum(wide * wide, 1)
        x = (wide * weight[:, :, None]).to(first_w.dtype)
    acc = tl.dot(first_w, x, acc, input_precision="ieee")
    if GATED:
        up = tl.dot(first_up, x, up, input_precision="ieee")
    for first in range(S * BK, K, S * BK):
        inside = inputs < K - first
        mask = live[None, :, None] & inside[:, None, :]
        w = tl.load(w_place + first, mask=mask, other=0.0)
        x = tl.load(x_place + first, mask=inside[:, :, None] & valid[None, None, :], other=0.0)
        if NORM != NO_NORM:
            weight = norm_weight(norm_ptr, first + inputs, inside, NORM)
            wide = x.to(tl.float32)
            square += tl.sum(wide * wide, 1)
            x = (wide * weight[:, :, None]).to(w.dtype)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if GATED:
            u = tl.load(up_place + first, mask=mask, other=0.0)
            up = tl.dot(u, x, up, input_precision="ieee")
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    y = tl.sum(acc, 0)
    if NORM != NO_NORM:
        scale = 1.0 / tl.sqrt_rn(tl.sum(square, 0) * (1.0 / K) + eps)
        y *= scale[None, :]
    if BIAS:
        y += tl.load(bias_ptr + rows_O, mask=live, other=0.0).to(tl.float32)[:, None]
    if GATED:
        u = tl.sum(up, 0)
        if NORM != NO_NORM:
            u *= scale[None, :]
        if BIAS:
            u += tl.load(bias_ptr + num_features + rows_O, mask=live, other=0.0).to(tl.float32)[:, None]
        y = silu_gate(y, u, dtype)
    put(place, y, old, inside_y, ADD)


class RowsConfig(NamedTuple):
    """Output features and input features of a block, and its warps."""

    features: int
    inputs: int
    warps: int


class FewConfig(NamedTuple):
    """Output features and, for each warp, input features of a block, its warps, and how many blocks are in flight."""

    features: int
    inputs: int
    warps: int
    stages: int


_ROWS_OF_HALVES = {
    (4096, 3072, False): RowsConfig(8, 1024, 2),
    (2048, 4096, False): RowsConfig(8, 1024, 8),
    (4096, 6144, True): RowsConfig(2, 4096, 8),
}
"""Blocks by inputs, outputs and gates, which were measured for an 8B's products on two ranks: 1.2 to 3 % more tokens a second than by the rule."""


@functools.cache
def rows_config(inputs: int, outputs: int, gated: bool) -> RowsConfig:
    """The block for `_rows_kernel`, by measurement (docs/performance/dense-kernels.md): 64 weights for each thread, in long rows.

    The threads of a block have something to do in at least four of five steps. Example: 6,144 inputs are three blocks of 2,048, as of two blocks of
    4,096 a quarter would be empty. 3,072 are three of 1,024. Few gates have a warp each, or their blocks would be too few.
    """
    if (measured := _ROWS_OF_HALVES.get((inputs, outputs, gated))) is not None:
        return measured
    block = min(4096, padded(inputs + 1) // 2)
    if inputs == 4096 and gated and outputs <= 3072:
        return RowsConfig(1, 1024, 1)
    if inputs == 3072 and not gated:
        return RowsConfig(4, 1024, 2)
    if block == 4096 and not gated and inputs < 0.8 * 4096 * blocks(inputs, 4096):
        return RowsConfig(4, 2048, 4)
    warps = 2 if block <= 1024 else 4 if block == 2048 and inputs <= 3072 or gated else 8
    features = max(1, 64 * 32 * warps // block // (2 if gated else 1))
    return RowsConfig(features, block, warps)


@functools.cache
def few_config(inputs: int, behind_norm: bool) -> FewConfig:
    """The block for `_few_kernel`, by measurement (docs/performance/dense-kernels.md)."""
    return FewConfig(16, min(128 if behind_norm else 256, max(16, padded(inputs) // 4)), 4, 3)


def _fits(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    """Whether a kernel of this file serves these numbers of tokens and weights, and these layouts. cuBLAS serves all others."""
    if not joins_few(x_TI.shape[0], x_TI.dtype, weight_OI.numel()):
        return False
    return x_TI.dim() == 2 and x_TI.stride(1) == 1 and weight_OI.is_contiguous() and x_TI.dtype == weight_OI.dtype


def run_rows(product: Product, config: RowsConfig | None = None) -> torch.Tensor:
    """Launch `_rows_kernel` for one token."""
    x_TI, weight_OI, bias_O, out_TO, norm, gated, add = product
    inputs, features = x_TI.shape[1], out_TO.shape[1]
    config = config or rows_config(inputs, features, gated)
    _rows_kernel[(blocks(features, config.features),)](
        x_TI, x_TI if norm is None else norm.weight_I, weight_OI, x_TI if bias_O is None else bias_O, out_TO,
        features, 0.0 if norm is None else norm.eps, K=inputs, BN=config.features, BK=config.inputs,
        NORM=norm_kind(norm), GATED=gated, ADD=add,
        BIAS=bias_O is not None, num_warps=config.warps, **dependent(x_TI.device),
    )  # fmt: skip
    return out_TO


def first_programs(config: RowsConfig, blocks_of_ranks: int, inputs: int) -> dict[str, int]:
    """Ranks of a program that computes `A x`, as many weights as others have, and how many of these programs so many blocks of ranks need."""
    ranks = min(TILE, 1 << max(0, (64 * 32 * config.warps // inputs).bit_length() - 1))
    return {"RANKS": ranks, "FIRST": blocks_of_ranks * TILE // ranks}


def wide_ranks(config: RowsConfig, blocks_of_ranks: int) -> int:
    """Ranks that a program has room for; see `look`."""
    return max(config.warps * 32, padded(blocks_of_ranks * TILE))


def most_registers(inputs: int, config: RowsConfig, gated: bool) -> int:
    """Of a thread of a product with an adapter: as many as without one, so that as many programs are on their way. Left to itself, ptxas takes up to 122.

    One warp has 168 without, and then stores 184 bytes.
    """
    if config.warps == 1:
        return 200
    if inputs > config.inputs:
        return 96 if gated else 128
    return 72 if gated else 64


def adapted_row_(
    out_TO: torch.Tensor, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, words: torch.Tensor, turn: int,
    work: WorkList, adapters: Blocks, layer: Fused, norm: Norm | None = None, *, gated: bool = False, add: bool = False,
) -> None:  # fmt: skip
    """See `ops/lora.py`."""
    inputs, features = x_TI.shape[1], out_TO.shape[1]
    config = rows_config(inputs, features, gated)
    BN = math.gcd(config.features, *layer.sizes)
    per_product = adapters.places.shape[2]
    first = first_programs(config, layer.parts * per_product, inputs)
    _rows_kernel[(first["FIRST"] + blocks(features, BN),)](
        x_TI, x_TI if norm is None else norm.weight_I, weight_OI, x_TI if bias_O is None else bias_O, out_TO,
        features, 0.0 if norm is None else norm.eps, K=inputs, BN=BN, BK=config.inputs, NORM=norm_kind(norm), GATED=gated, ADD=add,
        BIAS=bias_O is not None, words=words, turn=turn, places=work.places, pool=adapters.pool,
        product=layer.first, BLOCKS=per_product, TILE=TILE, STARTS=tuple(itertools.accumulate(layer.sizes, initial=0)),
        WIDE=wide_ranks(config, per_product), COPIES=COPIES, **first, num_warps=config.warps,
        maxnreg=most_registers(inputs, config, gated), **dependent(x_TI.device),
    )  # fmt: skip


def with_shrink__kernels(tokens: int, x_TI: torch.Tensor, weight_OI: torch.Tensor) -> Hashable:
    """See `Op.kernels_for`: the product's configuration, None if its kernel doesn't let another run beside it."""
    fits = linear_dense.fits(x_TI, weight_OI) and not linear_held.fits(x_TI, weight_OI, False)
    if tokens > SMALL_STEP or not fits:
        return None
    return linear_dense.kernels_of(tokens, x_TI.dtype, weight_OI, x_TI.device)


def with_shrink_(
    out_TO: torch.Tensor, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, work: WorkList, adapters: Blocks,
    layer: Fused, *, add: bool = False,
) -> torch.Tensor:  # fmt: skip
    """See `ops/lora.py`."""
    inner: list[torch.Tensor] = []
    product = Product(x_TI, weight_OI, bias_O, out_TO, add=add)
    linear_dense.run_dense(
        product, beside=lambda sums, config: inner.append(shrink_beside(product, work, adapters, layer, sums, config))
    )
    return inner[0]


def run_few(product: Product, config: FewConfig | None = None) -> torch.Tensor:
    """Launch `_few_kernel` for up to 16 tokens."""
    x_TI, weight_OI, bias_O, out_TO, norm, gated, add = product
    tokens, inputs = x_TI.shape
    features = out_TO.shape[1]
    config = config or few_config(inputs, norm is not None)
    _few_kernel[(blocks(features, config.features),)](
        x_TI, x_TI if norm is None else norm.weight_I, weight_OI, x_TI if bias_O is None else bias_O, out_TO, tokens,
        features, x_TI.stride(0), out_TO.stride(0), 0.0 if norm is None else norm.eps, K=inputs, S=config.warps,
        BM=16, BN=config.features, BK=config.inputs,
        NORM=norm_kind(norm), GATED=gated, ADD=add,
        BIAS=bias_O is not None, num_warps=config.warps, num_stages=config.stages, **dependent(x_TI.device),
    )  # fmt: skip
    return out_TO


def _run(product: Product) -> torch.Tensor:
    return run_rows(product) if product.x_TI.shape[0] == 1 else run_few(product)


def linear_kernels(tokens: int, weight_OI: torch.Tensor | Stored, dtype: torch.dtype, device: torch.device) -> Hashable:
    """See `Op.kernels_for`: what decides which kernels every operation of `ops/linear.py` launches for so many tokens on the device.

    The weights' memory is not read.
    """
    if isinstance(weight_OI, torch.Tensor):
        if linear_held.serves(tokens, dtype, weight_OI, device):
            return "held"  # products with a gate may be `linear_dense`'s, of one tile
        few = min(tokens, 2) if joins_few(tokens, dtype, weight_OI.numel()) else numerics.FAST.products.few_tokens + 1
        return linear_dense.kernels_of(tokens, dtype, weight_OI, device) or few
    if not silu_linear_add__kernels(tokens, weight_OI, dtype, device):
        return padded(tokens)  # blocks are chosen by it
    return linear_many.kernels_of(tokens, dtype, weight_OI, device)


def silu_linear_add__kernels(tokens: int, weight_OI: Stored, dtype: torch.dtype, device: torch.device) -> bool:
    """See `Op.kernels_for`: whether `linear_many` serves so many tokens, which has the gate in the kernel that prepares inputs."""
    few = linear_stored.serves(tokens, dtype, weight_OI)
    return not few or linear_many.takes_few(tokens, dtype, weight_OI, device)


def _few_tokens(
    x_TI: torch.Tensor, weight_OI: torch.Tensor | Stored, gated: bool = False
) -> Callable[[Product], torch.Tensor] | None:
    """What launches the product where a kernel of few tokens serves; None where cuBLAS or `linear_many` does."""
    if isinstance(weight_OI, torch.Tensor):
        if linear_held.fits(x_TI, weight_OI, gated):
            return linear_held.run_held
        if linear_dense.fits(x_TI, weight_OI):
            return linear_dense.run_dense
        return _run if _fits(x_TI, weight_OI) else None
    many = not linear_stored.fits(x_TI, weight_OI) or linear_many.takes_few(x_TI.shape[0], x_TI.dtype, weight_OI, x_TI.device)  # fmt: skip
    return None if many else linear_stored.run


def _product(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor | Stored,
    bias_O: torch.Tensor | None,
    norm: Norm | None = None,
    *,
    gated: bool = False,
) -> torch.Tensor:
    run = _few_tokens(x_TI, weight_OI, gated)
    if run is not None:
        out_TO = x_TI.new_empty(x_TI.shape[0], weight_OI.shape[0] // (2 if gated else 1))
        return run(Product(x_TI, weight_OI, bias_O, out_TO, norm, gated))
    if isinstance(weight_OI, torch.Tensor):
        out_TO = F.linear(x_TI if norm is None else norm(x_TI), weight_OI, bias_O)
    else:
        out_TO = linear_many.linear(x_TI, weight_OI, bias_O, norm)
    return silu_and_mul(out_TO) if gated else out_TO


def linear(x_TI: torch.Tensor, weight_OI: torch.Tensor | Stored, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """See `ops/linear.py`."""
    return _product(x_TI, weight_OI, bias_O)


def linear_parts(x_TI: torch.Tensor, weight_OI: torch.Tensor, norm: Norm | None = None) -> torch.Tensor:
    """See `ops/linear.py`."""
    if _few_tokens(x_TI, weight_OI) is linear_dense.run_dense:
        x_TI, norm = x_TI if norm is None else norm(x_TI), None
        if (sums_PTO := linear_dense.run_parts(x_TI, weight_OI)) is not None:
            return sums_PTO
    return _product(x_TI, weight_OI, None, norm)


def linear_add_(
    x_TI: torch.Tensor, weight_OI: torch.Tensor | Stored, residual_TO: torch.Tensor, bias_O: torch.Tensor | None = None
) -> None:
    """See `ops/linear.py`."""
    run = _few_tokens(x_TI, weight_OI)
    if run is not None and residual_TO.stride(1) == 1:
        run(Product(x_TI, weight_OI, bias_O, residual_TO, add=True))
    elif not isinstance(weight_OI, torch.Tensor):
        linear_many.linear_add_(x_TI, weight_OI, residual_TO, bias_O)
    elif bias_O is None:
        residual_TO.addmm_(x_TI, weight_OI.t())
    else:
        residual_TO.add_(F.linear(x_TI, weight_OI, bias_O))


def silu_linear_add_(
    gate_up_T2I: torch.Tensor,
    weight_OI: torch.Tensor | Stored,
    residual_TO: torch.Tensor,
    bias_O: torch.Tensor | None = None,
) -> None:
    """See `ops/linear.py`."""
    if not isinstance(weight_OI, torch.Tensor) and _few_tokens(gate_up_T2I, weight_OI) is None:
        linear_many.silu_linear_add_(gate_up_T2I, weight_OI, residual_TO, bias_O)
    else:
        linear_add_(silu_and_mul(gate_up_T2I), weight_OI, residual_TO, bias_O)


def norm_linear(
    x_TI: torch.Tensor, norm: Norm, weight_OI: torch.Tensor | Stored, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    """See `ops/linear.py`."""
    return _product(x_TI, weight_OI, bias_O, norm)


def norm_linear_silu(
    x_TI: torch.Tensor, norm: Norm | None, weight_2OI: torch.Tensor | Stored, bias_2O: torch.Tensor | None = None
) -> torch.Tensor:
    """See `ops/linear.py`."""
    return _product(x_TI, weight_2OI, bias_2O, norm, gated=True)
