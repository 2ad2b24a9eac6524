"""Rotary positions; see `ops/rope.py`. Rounding is the twins'."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import blocks, dependent, padded, start_next, start_next_and_wait, wait_turn
from pagerunner.ops.rope import RopeAngles


@triton.jit(do_not_specialize=["num_tokens"])
def _angles_kernel(positions_ptr, frequencies_ptr, cos_ptr, sin_ptr, num_tokens, scale,
                   HALF: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    start_next(PDL)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    pairs = tl.arange(0, BLOCK)
    frequencies = tl.load(frequencies_ptr + pairs, mask=pairs < HALF, other=0.0)
    wait_turn(PDL)
    positions = tl.load(positions_ptr + tokens, mask=tokens < num_tokens, other=0).to(tl.float32)
    angle = positions[:, None] * frequencies[None, :]
    cos, sin = tl.cos(angle) * scale, tl.sin(angle) * scale
    mask = (tokens < num_tokens)[:, None] & (pairs < HALF)[None, :]
    place = tokens.to(tl.int64)[:, None] * (2 * HALF) + pairs[None, :]
    out_type = cos_ptr.dtype.element_ty
    tl.store(cos_ptr + place, cos.to(out_type), mask=mask)
    tl.store(cos_ptr + place + HALF, cos.to(out_type), mask=mask)
    tl.store(sin_ptr + place, (-sin).to(out_type), mask=mask)
    tl.store(sin_ptr + place + HALF, sin.to(out_type), mask=mask)


@triton.jit(do_not_specialize=["num_heads"])
def _turn_kernel(x_ptr, cos_ptr, sin_ptr, num_heads, x_token, x_head, angle_token,
                 HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr,
                 PDL: tl.constexpr):  # fmt: skip
    """HEADS heads of one token, in place."""
    start_next_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pairs = tl.arange(0, BLOCK)
    inside = pairs < HALF
    mask = (heads < num_heads)[:, None] & inside[None, :]
    cos = tl.load(cos_ptr + token * angle_token + pairs, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * angle_token + HALF + pairs, mask=inside, other=0.0).to(tl.float32)[None, :]
    row = x_ptr + token * x_token + (heads * x_head)[:, None]
    if PAIRS:
        first_place, second_place = row + 2 * pairs[None, :], row + 2 * pairs[None, :] + 1
    else:
        first_place, second_place = row + pairs[None, :], row + pairs[None, :] + HALF
    first = tl.load(first_place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(second_place, mask=mask, other=0.0).to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    if PAIRS:
        crossed = (second * sin).to(dtype).to(tl.float32)
    else:
        crossed = second * sin
    new_first = (first * cos).to(dtype).to(tl.float32) - crossed
    new_second = (second * cos).to(dtype).to(tl.float32) + first * sin
    tl.store(first_place, new_first.to(dtype), mask=mask)
    tl.store(second_place, new_second.to(dtype), mask=mask)


def rope_angles(
    positions_T: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float, dtype: torch.dtype
) -> RopeAngles:
    """See `ops/rope.py`."""
    tokens, half = positions_T.shape[0], inverse_frequencies.shape[0]
    both = torch.empty(2, tokens, 1, 2 * half, dtype=dtype, device=positions_T.device)
    angles = RopeAngles(both[0], both[1])
    if tokens:
        block = padded(half)
        size = max(1, min(16, 1024 // block))
        _angles_kernel[(blocks(tokens, size),)](
            positions_T.contiguous(), inverse_frequencies, angles.cos_T1D, angles.sin_T1D, tokens, float(scale),
            HALF=half, TOKENS=size, BLOCK=block, **dependent(positions_T.device),
        )  # fmt: skip
    return angles


def _turn(x_TND: torch.Tensor, angles: RopeAngles, *, pairs: bool) -> None:
    if not x_TND.numel():
        return
    if x_TND.stride(-1) != 1:
        raise ValueError("Rotary positions are applied in place and need dense heads.")
    tokens, num_heads, dim = x_TND.shape
    block = padded(dim // 2)
    size = min(padded(num_heads), max(1, 2048 // block))
    _turn_kernel[(tokens, blocks(num_heads, size))](
        x_TND, angles.cos_T1D, angles.sin_T1D, num_heads, x_TND.stride(0), x_TND.stride(1), angles.cos_T1D.stride(0),
        HALF=dim // 2, HEADS=size, BLOCK=block, PAIRS=pairs, **dependent(x_TND.device),
    )  # fmt: skip


def rope_(x_TND: torch.Tensor, angles: RopeAngles) -> None:
    """See `ops/rope.py`."""
    _turn(x_TND, angles, pairs=False)


def rope_pairs_(x_TND: torch.Tensor, angles: RopeAngles) -> None:
    """See `ops/rope.py`."""
    _turn(x_TND, angles, pairs=True)
