"""Scores of experts for a step's tokens, with the norm before them or without it; see `ops/routing.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from pagerunner.ops import numerics
from pagerunner.ops.kernels.launch import blocks, dependent, padded, start_next, wait_turn
from pagerunner.ops.kernels.linear.linear_parts import NO_NORM, PLAIN_NORM, norm_kind, norm_weight
from pagerunner.ops.linear import Norm
from pagerunner.ops.routing import few_tokens

_MOST_FEATURES = 2048  # of which a program holds 16 experts' weights and 8 tokens at a time


@triton.jit(do_not_specialize=["num_tokens"])
def _logits_kernel(x_ptr, other_ptr, norm_ptr, w_ptr, bias_ptr, stream_ptr, normed_ptr, logits_ptr, num_tokens, num_experts, x_stride,
                   other_stride, eps, K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
                   NORM: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BN experts of BT tokens. A token's first program stores what the norm makes of it.

    ADD: `other` is added to the residual stream. The first program stores the sum too. It has a place of its own, as other programs still read
    what it is made of.
    """
    start_next(PDL)
    experts = tl.program_id(0) * BN + tl.arange(0, BN)
    tokens = tl.program_id(1) * BT + tl.arange(0, BT)
    live, valid = experts < num_experts, tokens < num_tokens
    cols = tl.arange(0, BK)
    inside = cols < K
    w = tl.load(w_ptr + experts[:, None] * K + cols[None, :], mask=live[:, None] & inside[None, :], other=0.0)
    if NORM != NO_NORM:
        weight = norm_weight(norm_ptr, cols, inside, NORM)
    bias = tl.zeros((BN,), tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + experts, mask=live, other=0.0).to(tl.float32)
    wait_turn(PDL)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    rows = tokens.to(tl.int64)[:, None]
    there = valid[:, None] & inside[None, :]
    x = tl.load(x_ptr + rows * x_stride + cols[None, :], mask=there, other=0.0)
    if ADD:
        other = tl.load(other_ptr + rows * other_stride + cols[None, :], mask=there, other=0.0)
        x = (x.to(tl.float32) + other.to(tl.float32)).to(dtype)
        if tl.program_id(0) == 0:
            tl.store(stream_ptr + rows * K + cols[None, :], x, mask=there)
    x = x.to(tl.float32)
    if NORM != NO_NORM:
        x *= (1.0 / tl.sqrt_rn(tl.sum(x * x, 1) * (1.0 / K) + eps))[:, None]
        if NORM == PLAIN_NORM:  # it rounds before it multiplies by its weight (kernels/norm.py)
            x = x.to(dtype).to(tl.float32)
        normed = (x * weight[None, :]).to(dtype)
        if tl.program_id(0) == 0:
            tl.store(normed_ptr + rows * K + cols[None, :], normed, mask=there)
        x = normed.to(tl.float32)
    logits = tl.sum(w.to(tl.float32)[None, :, :] * x[:, None, :], 2) + bias[None, :]
    tl.store(logits_ptr + rows * num_experts + experts[None, :], logits, mask=valid[:, None] & live[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _tile_logits_kernel(x_ptr, other_ptr, norm_ptr, w_ptr, bias_ptr, stream_ptr, normed_ptr, logits_ptr, num_tokens, num_experts, x_stride,
                        other_stride, eps, K: tl.constexpr, BK: tl.constexpr, S: tl.constexpr, BT: tl.constexpr,
                        BN: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
                        PDL: tl.constexpr):  # fmt: skip
    """As `_logits_kernel`, by the matrix units: the S warps divide the features between them, BK each."""
    start_next(PDL)
    experts = tl.program_id(0) * BN + tl.arange(0, BN)
    tokens = tl.program_id(1) * BT + tl.arange(0, BT)
    live, valid = experts < num_experts, tokens < num_tokens
    cols = tl.arange(0, S)[:, None] * BK + tl.arange(0, BK)[None, :]
    inside = cols < K
    w = tl.load(
        w_ptr + experts[None, :, None] * K + cols[:, None, :], mask=live[None, :, None] & inside[:, None, :], other=0.0
    )
    weight = norm_weight(norm_ptr, cols, inside, NORM)
    bias = tl.zeros((BN,), tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + experts, mask=live, other=0.0).to(tl.float32)
    wait_turn(PDL)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    rows = tokens.to(tl.int64)[None, None, :]
    there = inside[:, :, None] & valid[None, None, :]
    x = tl.load(x_ptr + rows * x_stride + cols[:, :, None], mask=there, other=0.0)
    mine = there & ((cols // 128 % tl.num_programs(0)) == tl.program_id(0))[:, :, None]
    if ADD:
        other = tl.load(other_ptr + rows * other_stride + cols[:, :, None], mask=there, other=0.0)
        x = (x.to(tl.float32) + other.to(tl.float32)).to(dtype)
        tl.store(stream_ptr + rows * K + cols[:, :, None], x, mask=mine)
    y = x.to(tl.float32)
    factors = 1.0 / tl.sqrt_rn(tl.sum(tl.sum(y * y, 1), 0) * (1.0 / K) + eps)
    y *= factors[None, None, :]
    if NORM == PLAIN_NORM:  # it rounds before it multiplies by its weight (kernels/norm.py)
        y = y.to(dtype).to(tl.float32)
    y = (y * weight[:, :, None]).to(dtype)
    tl.store(normed_ptr + rows * K + cols[:, :, None], y, mask=mine)
    logits = tl.sum(tl.dot(w, y, input_precision="ieee"), 0) + bias[:, None]
    place = logits_ptr + tokens.to(tl.int64)[None, :] * num_experts + experts[:, None]
    tl.store(place, logits, mask=live[:, None] & valid[None, :])


class LogitsConfig(NamedTuple):
    """Tokens and experts of a program, its warps, and whether the matrix units multiply."""

    tokens: int
    experts: int
    warps: int
    tile: bool = False


def logits_config(tokens: int, features: int, experts: int, dtype: torch.dtype) -> LogitsConfig | None:
    """The program of the logits' kernel, by measurement (docs/performance/experts.md). None: a norm and cuBLAS are faster."""
    borders = numerics.FAST.router
    if tokens and borders.are_few(tokens, experts):
        return LogitsConfig(1, 2 if tokens == 1 else 4, 4)
    if 0 < tokens <= borders.most_tokens and dtype.itemsize == 2 and features <= _MOST_FEATURES:
        return LogitsConfig(8, 16, 8, True)
    return None


def run_logits(
    x_TD: torch.Tensor,
    norm: Norm | None,
    weight_ED: torch.Tensor,
    bias_E: torch.Tensor | None,
    other_TD: torch.Tensor | None = None,
    *,
    program: LogitsConfig,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch `_logits_kernel`: the stream, its norm, and the logits."""
    (tokens, features), experts = x_TD.shape, weight_ED.shape[0]
    normed_TD = x_TD if norm is None else torch.empty(tokens, features, dtype=x_TD.dtype, device=x_TD.device)
    stream_TD = x_TD if other_TD is None else torch.empty_like(normed_TD)
    other = x_TD if other_TD is None else other_TD
    logits_TE = torch.empty(tokens, experts, dtype=torch.float32, device=x_TD.device)
    kernel, how = _logits_kernel, {"BK": padded(features)}
    if program.tile:
        kernel, how = _tile_logits_kernel, {"S": program.warps, "BK": max(16, padded(features) // program.warps)}
    kernel[(blocks(experts, program.experts), blocks(tokens, program.tokens))](
        x_TD, other, x_TD if norm is None else norm.weight_I, weight_ED, x_TD if bias_E is None else bias_E, stream_TD,
        normed_TD, logits_TE, tokens, experts, x_TD.stride(0), other.stride(0), 0.0 if norm is None else norm.eps,
        K=features, BT=program.tokens, BN=program.experts, NORM=norm_kind(norm), ADD=other_TD is not None,
        BIAS=bias_E is not None, num_warps=program.warps, **how, **dependent(x_TD.device),
    )  # fmt: skip
    return stream_TD, normed_TD, logits_TE


def _program(x_TD: torch.Tensor, weight_ED: torch.Tensor) -> LogitsConfig | None:
    if x_TD.stride(1) != 1 or x_TD.dtype != weight_ED.dtype or not weight_ED.is_contiguous():
        return None
    return logits_config(*x_TD.shape, weight_ED.shape[0], x_TD.dtype)


def norm_expert_logits(
    x_TD: torch.Tensor,
    norm: Norm,
    weight_ED: torch.Tensor,
    bias_E: torch.Tensor | None = None,
    other_TD: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `ops/routing.py`."""
    program = _program(x_TD, weight_ED)
    if program is not None and (other_TD is None or other_TD.stride(1) == 1):
        return run_logits(x_TD, norm, weight_ED, bias_E, other_TD, program=program)
    normed_TD = norm(x_TD) if other_TD is None else norm.add_(other_TD, x_TD)
    return x_TD, normed_TD, expert_logits(normed_TD, weight_ED, bias_E)


def expert_logits(
    x_TD: torch.Tensor, weight_ED: torch.Tensor, bias_E: torch.Tensor | None = None, *, fixed: bool = False
) -> torch.Tensor:
    """See `ops/routing.py`."""
    program = _program(x_TD, weight_ED) if few_tokens(x_TD.shape[0]) and not fixed else None
    if program is not None:
        return run_logits(x_TD, None, weight_ED, bias_E, program=program)[2]
    if x_TD.dtype == torch.float32:
        logits_TE = F.linear(
            x_TD, weight_ED
        )  # with a bias torch would call another library, which divides sums by the number of tokens
    else:
        logits_TE = torch.mm(x_TD, weight_ED.t(), out_dtype=torch.float32)
    return logits_TE if bias_E is None else logits_TE.add_(bias_E)
