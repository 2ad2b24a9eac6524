"""The sum of a token's experts, the addition to the residual stream, the norm behind it, and its rounding to 8 bits, in one launch.

See `ops/pair_sums.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import blocks, dependent, padded, start_next, wait_turn
from pagerunner.ops.kernels.linear import linear, linear_many
from pagerunner.ops.kernels.linear.linear_parts import NO_NORM, norm_kind, norm_weight, normed
from pagerunner.ops.kernels.quantize import store_numbers
from pagerunner.ops.linear import Norm
from pagerunner.ops.pair_sums import PairSums
from pagerunner.ops.quantize import GROUP, LARGEST, Quantized, Rounded
from pagerunner.ops.stored import Stored


@triton.jit
def _in_order(keys, A: tl.constexpr):
    """A tuple of A numbers, sorted: in each of A turns, neighbours trade places where they have to."""
    for turn in tl.static_range(A):
        after = ()
        for a in tl.static_range(A):
            if a % 2 == turn % 2 and a + 1 < A:
                after = after + (tl.minimum(keys[a], keys[a + 1]),)
            elif a % 2 != turn % 2 and a > 0:
                after = after + (tl.maximum(keys[a - 1], keys[a]),)
            else:
                after = after + (keys[a],)
        keys = after
    return keys


NONE = tl.constexpr(2**30)
"""Numbers of `pairs_in_order` from this one on are of pairs without an expert."""


@triton.jit
def pairs_in_order(experts_ptr, token, A: tl.constexpr, BA: tl.constexpr):
    """A token's A pairs in the order of their experts' numbers. Modulo BA, a power of two, a number is the pair's place among the token's."""
    keys = ()
    for a in tl.static_range(A):
        expert = tl.load(experts_ptr + token * A + a).to(tl.int32)
        keys = keys + (tl.where(expert < 0, NONE + a, expert * BA + a),)  # an expert may be there several times
    return _in_order(keys, A)


@triton.jit
def _total(pairs_ptr, experts_ptr, token, cols, inside, K: tl.constexpr, A: tl.constexpr, BA: tl.constexpr):
    """The sum of a token's pairs in the order of their experts' numbers, float32. All are loaded before the first is added."""
    keys = pairs_in_order(experts_ptr, token, A, BA)
    acc = tl.zeros(cols.shape, tl.float32)
    for a in tl.static_range(A):
        pair = token * A + keys[a] % BA
        acc += tl.load(pairs_ptr + pair * K + cols, mask=inside & (keys[a] < NONE), other=0.0).to(tl.float32)
    return acc


@triton.jit(do_not_specialize=["scale_column"])
def _pairs_kernel(pairs_ptr, experts_ptr, x_ptr, norm_ptr, out_ptr, scales_ptr, x_row, scale_column, eps, K: tl.constexpr, BLOCK: tl.constexpr,
                  WIDE: tl.constexpr, A: tl.constexpr, BA: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr,
                  ROUND: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One token, of at most BLOCK features. ADD: to what `x` holds. ROUND: the norm's numbers of 8 bits, WIDE of which share a scale."""
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, BLOCK // WIDE)
    cols = (groups[:, None] * WIDE + tl.arange(0, WIDE)[None, :])[None, :, :]
    inside = cols < K
    weight = cols
    if NORM != NO_NORM:
        weight = norm_weight(norm_ptr, cols, inside, NORM)
    wait_turn(PDL)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    place = x_ptr + token * x_row + cols
    if ADD:
        old = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    x = _total(pairs_ptr, experts_ptr, token, cols, inside, K, A, BA).to(dtype)
    if ADD:
        x = (old + x.to(tl.float32)).to(dtype)
    tl.store(place, x, mask=inside)
    if NORM != NO_NORM:
        y = normed(x.to(tl.float32), weight, eps, K, NORM, dtype)
        if ROUND:
            one, there = token + tl.arange(0, 1), tl.arange(0, 1) == 0
            store_numbers(y, one, there, groups, cols, inside, out_ptr, scales_ptr, scale_column, K, WIDE, MOST)
        else:
            tl.store(out_ptr + token * K + cols, y.to(dtype), mask=inside)


def _run(
    x_TD: torch.Tensor,
    pairs: PairSums,
    out_TD: torch.Tensor,
    norm: Norm | None = None,
    rounded: Rounded | None = None,
    *,
    add: bool = True,
) -> torch.Tensor:
    """Launch `_pairs_kernel`. `out` takes what the norm makes of the sum; the scales of its numbers are returned, [T, G] float32."""
    if x_TD.stride(1) != 1:
        raise ValueError("The residual must be dense in its features.")
    (tokens, features), active = x_TD.shape, pairs.experts_TA.shape[1]
    block = max(GROUP, padded(features))
    grouped = rounded is not None and rounded.grouped
    groups = 0 if rounded is None else blocks(features, GROUP) if grouped else 1
    scales_GT = torch.empty(groups, tokens, dtype=torch.float32, device=x_TD.device)
    if x_TD.numel():
        _pairs_kernel[(tokens,)](
            pairs.out_PD, pairs.experts_TA, x_TD, x_TD if norm is None else norm.weight_I, out_TD, scales_GT, x_TD.stride(0),
            tokens, 0.0 if norm is None else norm.eps, K=features, BLOCK=block, WIDE=GROUP if grouped else block, A=active,
            BA=padded(active), ADD=add, NORM=norm_kind(norm), ROUND=rounded is not None,
            MOST=0.0 if rounded is None else LARGEST[rounded.dtype],
            # 8 numbers for each thread, of which it holds some for every pair
            num_warps=min(32, max(4, block // 256)), **dependent(x_TD.device),
        )  # fmt: skip
    return scales_GT.t()


def sum_pairs(out_TD: torch.Tensor, pairs: PairSums, *, add: bool) -> None:
    """Write the sums into `out`, or add them."""
    _run(out_TD, pairs, out_TD, add=add)


def add_pairs_(residual_TD: torch.Tensor, pairs: PairSums) -> None:
    """See `ops/pair_sums.py`."""
    sum_pairs(residual_TD, pairs, add=True)


def add_pairs_norm_(residual_TD: torch.Tensor, pairs: PairSums, norm: Norm) -> torch.Tensor:
    """See `ops/pair_sums.py`."""
    out_TD = torch.empty_like(residual_TD, memory_format=torch.contiguous_format)
    _run(residual_TD, pairs, out_TD, norm)
    return out_TD


def add_pairs_norm_linear_(
    residual_TD: torch.Tensor,
    pairs: PairSums,
    norm: Norm,
    weight_OD: torch.Tensor | Stored,
    bias_O: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ops/pair_sums.py`."""
    how = None if isinstance(weight_OD, torch.Tensor) else linear_many.rounding_of(residual_TD, weight_OD)
    if how is None or isinstance(weight_OD, torch.Tensor):
        return linear.linear(add_pairs_norm_(residual_TD, pairs, norm), weight_OD, bias_O)
    codes_TD = torch.empty(residual_TD.shape, dtype=how.dtype, device=residual_TD.device)
    scales_TG = _run(residual_TD, pairs, codes_TD, norm, how)
    return linear_many.product_of(Quantized(codes_TD, scales_TG), weight_OD, bias_O, residual_TD.dtype)
