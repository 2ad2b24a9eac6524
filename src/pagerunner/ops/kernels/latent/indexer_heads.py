"""An indexer's queries, keys and weights in one launch. Twins: `pagerunner.ops.indexer_heads`.

A program has some heads of a token; the first one has its key and weights, too. An element of the Hadamard matrix is 1 if its row's and
column's numbers have an even number of bits in common, and else -1.

Shape letters: see the twins; D for I.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.indexer_heads import MeanNorm
from pagerunner.ops.kernels.launch import blocks, dependent, padded, start_next_and_wait
from pagerunner.ops.rope import RopeAngles

HEADS = 16  # of a program


@triton.jit
def _signs(BI: tl.constexpr):
    """The Hadamard matrix [BI, BI] in float32, of at most 2^8 rows."""
    i = tl.arange(0, BI)
    common = i[:, None] & i[None, :]
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    return 1.0 - 2.0 * (common & 1).to(tl.float32)


@triton.jit
def mixed_vector(x, root, SIZE: tl.constexpr, LOG: tl.constexpr):
    """One vector [SIZE] times the Hadamard matrix and `root`, by sums and differences as the twin makes them; SIZE is 2**LOG."""
    x = x * root
    for at in tl.static_range(LOG):
        halves = tl.permute(tl.reshape(x, (SIZE >> (at + 1), 2, 1 << at)), (0, 2, 1))
        first, second = tl.split(halves)
        x = tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 2, 1)), (SIZE,))
    return x


@triton.jit
def _turned(x, across, cos, sin, dtype: tl.constexpr):
    """Rotated; `across` is the other element of each pair. Rounded as `kernels/rope.py` does."""
    return ((x * cos).to(dtype).to(tl.float32) + across * sin).to(dtype)


@triton.jit
def _heads_kernel(
    q_ptr, keys_ptr, weights_ptr, gain_ptr, bias_ptr, cos_ptr, sin_ptr, q_out, keys_out, weights_out,
    q_token, q_head, key_token, weights_token, angle_token, eps, scale, root,
    J: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, HEADS: tl.constexpr,
    MIXED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """HEADS heads of a token. `root` is D**-0.5."""
    start_next_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, BI)
    inside, rotary = i < D, i < P
    across = tl.where(i < P // 2, i + P // 2, i - P // 2)
    dtype = q_out.dtype.element_ty
    cos = tl.load(cos_ptr + token * angle_token + i, mask=rotary, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * angle_token + i, mask=rotary, other=0.0).to(tl.float32)
    q_at = q_ptr + token * q_token + (head * q_head)[:, None]
    there = (head < J)[:, None]
    q = tl.load(q_at + i[None, :], mask=there & inside[None, :], other=0.0).to(tl.float32)
    q_across = tl.load(q_at + across[None, :], mask=there & rotary[None, :], other=0.0).to(tl.float32)
    q = _turned(q, q_across, cos[None, :], sin[None, :], dtype)
    if MIXED:
        q = (tl.dot(q, _signs(BI).to(dtype), input_precision=PRECISION) * root).to(dtype)
    tl.store(q_out + (token * J + head)[:, None] * D + i[None, :], q, mask=there & inside[None, :])
    if tl.program_id(1) == 0:
        key_at = keys_ptr + token * key_token
        key = tl.load(key_at + i, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(key, 0) / D
        spread = tl.where(inside, key - mean, 0.0)
        inverse = tl.math.rsqrt(tl.sum(spread * spread, 0) / D + eps)
        gain = tl.load(gain_ptr + i, mask=inside, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + i, mask=inside, other=0.0).to(tl.float32)
        key = (spread * inverse * gain + bias).to(dtype).to(tl.float32)
        key_across = tl.load(key_at + across, mask=rotary, other=0.0).to(tl.float32)
        gain = tl.load(gain_ptr + across, mask=rotary, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + across, mask=rotary, other=0.0).to(tl.float32)
        key_across = ((key_across - mean) * inverse * gain + bias).to(dtype).to(tl.float32)
        key = _turned(key, key_across, cos, sin, dtype)
        if MIXED:
            key = (tl.sum(key.to(tl.float32)[:, None] * _signs(BI), 0) * root).to(dtype)
        tl.store(keys_out + token * D + i, key, mask=inside)
        j = tl.arange(0, BJ)
        weights = tl.load(weights_ptr + token * weights_token + j, mask=j < J, other=0.0).to(tl.float32)
        tl.store(weights_out + token * J + j, weights * scale, mask=j < J)


def indexer_heads(
    q_TJI: torch.Tensor,
    keys_TI: torch.Tensor,
    weights_TJ: torch.Tensor,
    norm: MeanNorm,
    angles: RopeAngles,
    scale: float,
    mixed: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the twin."""
    tokens, heads, size = q_TJI.shape
    cos, sin = angles
    q_out, keys_out = q_TJI.new_empty(q_TJI.shape), keys_TI.new_empty(keys_TI.shape)
    weights_out = weights_TJ.new_empty(weights_TJ.shape, dtype=torch.float32)
    _heads_kernel[(tokens, blocks(heads, HEADS))](
        q_TJI, keys_TI, weights_TJ, norm.weight_I, norm.bias_I, cos, sin, q_out, keys_out, weights_out,
        *q_TJI.stride()[:2], keys_TI.stride(0), weights_TJ.stride(0), cos.stride(0), norm.eps, scale, size**-0.5,
        J=heads, D=size, P=cos.shape[-1], BI=max(16, padded(size)), BJ=padded(heads), HEADS=HEADS, MIXED=mixed,
        PRECISION="tf32x3" if q_TJI.dtype == torch.float32 else "tf32", num_warps=8 if mixed else 4, **dependent(q_TJI.device),
    )  # fmt: skip
    return q_out, keys_out, weights_out


@triton.jit
def _queries_kernel(
    q_ptr, weights_ptr, cos_ptr, sin_ptr, q_out, weights_out, q_token, q_head, weights_token, angle_token, scale, root,
    J: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, HEADS: tl.constexpr,
    MIXED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """HEADS heads of a token, whose last P elements are rotated as adjacent pairs, rounded as `kernels/rope.py` does. `root` is D**-0.5."""
    start_next_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, BI)
    dtype = q_out.dtype.element_ty
    place = i - (D - P)
    rotary = (place >= 0) & (place < P)
    mask = (head < J)[:, None] & (i < D)[None, :]
    q_at = q_ptr + token * q_token + (head * q_head)[:, None]
    q = tl.load(q_at + i[None, :], mask=mask, other=0.0)
    across = tl.load(q_at + (i ^ 1)[None, :], mask=mask & rotary[None, :], other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * angle_token + place // 2, mask=rotary, other=1.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * angle_token + P // 2 + place // 2, mask=rotary, other=0.0).to(tl.float32)[None, :]
    own = (q.to(tl.float32) * cos).to(dtype).to(tl.float32)
    first = own - (across * sin).to(dtype).to(tl.float32)
    turned = tl.where((place % 2 == 0)[None, :], first, tl.fma(across, sin + tl.zeros_like(across), own)).to(dtype)
    q = tl.where(rotary[None, :], turned, q)
    if MIXED:
        q = (tl.dot(q, _signs(BI).to(dtype), input_precision=PRECISION) * root).to(dtype)
    tl.store(q_out + (token * J + head)[:, None] * D + i[None, :], q, mask=mask)
    if tl.program_id(1) == 0:
        j = tl.arange(0, BJ)
        weights = tl.load(weights_ptr + token * weights_token + j, mask=j < J, other=0.0).to(tl.float32)
        tl.store(weights_out + token * J + j, weights * scale, mask=j < J)


def indexer_queries(
    q_TJI: torch.Tensor, weights_TJ: torch.Tensor, angles: RopeAngles, scale: float, mixed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the twin."""
    tokens, heads, size = q_TJI.shape
    cos, sin = angles
    q_out, weights_out = q_TJI.new_empty(q_TJI.shape), weights_TJ.new_empty(weights_TJ.shape, dtype=torch.float32)
    if tokens:
        _queries_kernel[(tokens, blocks(heads, HEADS))](
            q_TJI, weights_TJ, cos, sin, q_out, weights_out, *q_TJI.stride()[:2], weights_TJ.stride(0), cos.stride(0), scale, size**-0.5,
            J=heads, D=size, P=cos.shape[-1], BI=max(16, padded(size)), BJ=padded(heads), HEADS=HEADS, MIXED=mixed,
            PRECISION="tf32x3" if q_TJI.dtype == torch.float32 else "tf32", num_warps=8 if mixed else 4, **dependent(q_TJI.device),
        )  # fmt: skip
    return q_out, weights_out
