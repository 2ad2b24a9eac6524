"""Products of 17 to 256 tokens with a weight matrix; see `ops/linear.py`.

Reading the weights bounds these too, but one program for each block of features leaves most of the device idle where the
matrix is small: there the inputs are divided between programs as well (SPLIT). Each leaves its sums in memory, and the
last one to do so adds all of them up, always in the same order.

While their predecessor still runs, programs bring their weights into the cache (`kernels/launch.py`).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagerunner.ops.kernels.launch import blocks, dependent
from pagerunner.ops.kernels.linear_parts import NO_NORM, OFFSET_NORM, PLAIN_NORM, norm_weight, silu_gate
from pagerunner.ops.linear import Norm

MAX_TILES = 4096  # of a product whose inputs are divided


@triton.jit
def _prefetch(w_ptr, rows_O, live, first, K: tl.constexpr, PER: tl.constexpr, BN: tl.constexpr):
    """Ask for these rows' inputs [first, first + PER) to be brought into the second-level cache, by lines of 64 numbers."""
    LINES: tl.constexpr = triton.next_power_of_2((PER + 63) // 64)
    line = tl.arange(0, LINES) * 64
    wanted = live[:, None] & ((line < PER) & (first + line < K))[None, :]
    # a line that isn't wanted is asked for again, instead of one outside the matrix
    offset = tl.where(wanted, rows_O[:, None].to(tl.int64) * K + first + line[None, :], first)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [(w_ptr + offset).to(tl.int64)], tl.int32, False, 1
    )


@triton.jit
def _finish(acc, up, square, old, norm_ptr, bias_ptr, place, rows_O, num_features, inside, live, eps, K: tl.constexpr,
            NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """From sums to results, which are stored."""
    dtype: tl.constexpr = place.dtype.element_ty
    if NORM != 0:
        scale = (1.0 / tl.sqrt_rn(square * (1.0 / K) + eps))[:, None]
        acc *= scale
    if BIAS:
        acc += tl.load(bias_ptr + rows_O, mask=live, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if NORM != 0:
            up *= scale
        if BIAS:
            up += tl.load(bias_ptr + num_features + rows_O, mask=live, other=0.0).to(tl.float32)[None, :]
        acc = silu_gate(acc, up, dtype)
    y = acc.to(dtype)
    if ADD:
        y = (old + y.to(tl.float32)).to(dtype)
    tl.store(place, y, mask=inside)


@triton.jit
def _all_parts(part_ptr, up_part, square_part, tile, SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
               NORM: tl.constexpr, GATED: tl.constexpr):  # fmt: skip
    """The sums of a tile over all parts of the inputs, in their order. From the second-level cache: the first-level
    one may hold what was there before.
    """
    m = tl.arange(0, BM)
    within = m[:, None] * BN + tl.arange(0, BN)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    up = acc
    square = tl.zeros((BM,), tl.float32)
    for other in tl.static_range(SPLIT):
        at = (tile * SPLIT + other) * BM
        acc += tl.load(part_ptr + at * BN + within, cache_modifier=".cg")
        if GATED:
            up += tl.load(up_part + at * BN + within, cache_modifier=".cg")
        if NORM != 0:
            square += tl.load(square_part + at + m, cache_modifier=".cg")
    return acc, up, square


@triton.jit(do_not_specialize=["num_tokens", "num_features"])
def _many_kernel(x_ptr, norm_ptr, w_ptr, bias_ptr, y_ptr, part_ptr, counter_ptr, num_tokens, num_features, x_stride,
                 y_stride, eps, K: tl.constexpr, SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                 BK: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
                 PDL: tl.constexpr):  # fmt: skip
    """BN features of BM tokens, of one of SPLIT parts of the inputs; with GATED also the BN features that belong to them
    further down. `part`: [tiles, SPLIT, BM, BN] float32, the same again if GATED, then [tiles, SPLIT, BM] of squares;
    `counter` [tiles]: zeros, before and after.
    """
    if PDL:
        gdc_launch_dependents()
    PER: tl.constexpr = (K + BK * SPLIT - 1) // (BK * SPLIT) * BK
    split = tl.program_id(1)
    first = split * PER
    m = tl.arange(0, BM)
    n = tl.arange(0, BN)
    rows_O = tl.program_id(0) * BN + n
    live = rows_O < num_features
    tokens = tl.program_id(2) * BM + m
    valid = tokens < num_tokens
    up_ptr = w_ptr + num_features.to(tl.int64) * K
    if PDL:
        _prefetch(w_ptr, rows_O, live, first, K, PER, BN)
        if GATED:
            _prefetch(up_ptr, rows_O, live, first, K, PER, BN)
        gdc_wait()
    place = y_ptr + tokens.to(tl.int64)[:, None] * y_stride + rows_O[None, :]
    inside = valid[:, None] & live[None, :]
    old = 0.0
    if ADD and SPLIT == 1:  # now: behind the sum it would be waited for
        old = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    cols = tl.arange(0, BK)
    x_place = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + first + cols[None, :]
    w_offset = rows_O[:, None].to(tl.int64) * K + first + cols[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    up = acc
    square = tl.zeros((BM,), tl.float32)
    for start in range(0, PER, BK):
        if K % (BK * SPLIT) == 0:
            x_mask, w_mask = valid[:, None], live[:, None]
        else:
            here = (first + start + cols < K)[None, :]
            x_mask, w_mask = valid[:, None] & here, live[:, None] & here
        w = tl.load(w_ptr + w_offset + start, mask=w_mask, other=0.0)
        x = tl.load(x_place + start, mask=x_mask, other=0.0)
        if NORM != 0:
            k = first + start + cols
            wide = x.to(tl.float32)
            square += tl.sum(wide * wide, 1)
            x = (wide * norm_weight(norm_ptr, k, k < K, NORM)[None, :]).to(w.dtype)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        if GATED:
            u = tl.load(up_ptr + w_offset + start, mask=w_mask, other=0.0)
            up = tl.dot(x, tl.trans(u), up, input_precision="ieee")
    if SPLIT == 1:
        _finish(acc, up, square, old, norm_ptr, bias_ptr, place, rows_O, num_features, inside, live, eps, K, NORM, GATED,
                ADD, BIAS)  # fmt: skip
    else:
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        up_part = part_ptr + tl.num_programs(0) * tl.num_programs(2) * SPLIT * BM * BN
        square_part = up_part + (tl.num_programs(0) * tl.num_programs(2) * SPLIT * BM * BN if GATED else 0)
        own = (tile * SPLIT + split) * BM
        within = m[:, None] * BN + n[None, :]
        tl.store(part_ptr + own * BN + within, acc)
        if GATED:
            tl.store(up_part + own * BN + within, up)
        if NORM != 0:
            tl.store(square_part + own + m, square)
        tl.debug_barrier()
        before = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if before == SPLIT - 1:
            tl.store(counter_ptr + tile, 0)
            latest = old
            if ADD:
                latest = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            acc, up, square = _all_parts(part_ptr, up_part, square_part, tile, SPLIT, BM, BN, NORM, GATED)
            _finish(acc, up, square, latest, norm_ptr, bias_ptr, place, rows_O, num_features, inside, live, eps, K, NORM,
                    GATED, ADD, BIAS)  # fmt: skip


class ManyConfig(NamedTuple):
    """Tokens, output features and input features of a block, how many programs divide the inputs between them, the warps
    of a program, how many blocks are in flight, and whether a norm before the product is part of its kernel.
    """

    tokens: int
    features: int
    inputs: int
    split: int
    warps: int
    stages: int
    norm: bool = True


MIN_MANY = 17
# Blocks by (inputs, output features, gated): up to how many tokens, which one; None stands for cuBLAS, which has all that
# isn't here. The kernel has not been measured on a device yet; `scripts/bench_kernels.py --sections many` prints what to
# put here.
CHOSEN: dict[tuple[int, int, bool], tuple[tuple[int, ManyConfig | None], ...]] = {}


@functools.cache
def many_config(tokens: int, inputs: int, features: int, gated: bool) -> ManyConfig | None:
    """The block for `_many_kernel`, by measurement; None where cuBLAS is as fast, or was never compared."""
    if tokens < MIN_MANY:
        return None
    for most, config in CHOSEN.get((inputs, features, gated), ()):
        if tokens <= most:
            return config
    return None


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    """Zeros, which every launch leaves as it finds them; launches come one after another."""
    with torch.inference_mode(False):
        return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def run_many(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    out_TO: torch.Tensor,
    norm: Norm | None = None,
    *,
    gated: bool = False,
    add: bool = False,
    config: ManyConfig,
) -> torch.Tensor:
    """Launch `_many_kernel`.

    Raises:
        ValueError: `config` divides inputs of more than MAX_TILES tiles.
    """
    if norm is not None and not config.norm:
        x_TI, norm = norm(x_TI), None
    tokens, inputs = x_TI.shape
    features = out_TO.shape[1]
    grid = blocks(features, config.features), config.split, blocks(tokens, config.tokens)
    part, counters = x_TI, x_TI
    if config.split > 1:
        tiles = grid[0] * grid[2]
        if tiles > MAX_TILES:
            raise ValueError(f"{tiles} tiles with divided inputs are more than {MAX_TILES}; use larger blocks.")
        counters = _counters(x_TI.device)
        sums = config.tokens * (config.features * (2 if gated else 1) + (0 if norm is None else 1))
        part = torch.empty(tiles * config.split * sums, dtype=torch.float32, device=x_TI.device)
    _many_kernel[grid](
        x_TI,
        x_TI if norm is None else norm.weight_I,
        weight_OI,
        x_TI if bias_O is None else bias_O,
        out_TO,
        part,
        counters,
        tokens,
        features,
        x_TI.stride(0),
        out_TO.stride(0),
        0.0 if norm is None else norm.eps,
        K=inputs,
        SPLIT=config.split,
        BM=config.tokens,
        BN=config.features,
        BK=config.inputs,
        NORM=NO_NORM if norm is None else OFFSET_NORM if norm.offset else PLAIN_NORM,
        GATED=gated,
        ADD=add,
        BIAS=bias_O is not None,
        num_warps=config.warps,
        num_stages=config.stages,
        **dependent(x_TI.device),
    )
    return out_TO
