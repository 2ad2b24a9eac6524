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
    cos = tl.load(cos_ptr + token * angle_token + pairs, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * angle_token + HALF + pairs, mask=inside, other=0.0).to(tl.float32)[None, :]
    row = x_ptr + token * x_token + (heads * x_head)[:, None]
    dtype = x_ptr.dtype.element_ty
    if PAIRS:  # lanes read and write pairs whole: every second number alone would be a load of two bytes
        numbers = tl.arange(0, 2 * BLOCK)
        place, kept = row + numbers[None, :], (heads < num_heads)[:, None] & (numbers < 2 * HALF)[None, :]
        both = tl.load(place, mask=kept, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (HEADS, BLOCK, 2)))
        new_first = (first * cos).to(dtype).to(tl.float32) - (second * sin).to(dtype).to(tl.float32)
        new_second = (second * cos).to(dtype).to(tl.float32) + first * sin
        turned = tl.reshape(tl.join(new_first, new_second), (HEADS, 2 * BLOCK))
        tl.store(place, turned.to(dtype), mask=kept)
    else:
        first_place, mask = row + pairs[None, :], (heads < num_heads)[:, None] & inside[None, :]
        first = tl.load(first_place, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(first_place + HALF, mask=mask, other=0.0).to(tl.float32)
        new_first = (first * cos).to(dtype).to(tl.float32) - second * sin
        new_second = (second * cos).to(dtype).to(tl.float32) + first * sin
        tl.store(first_place, new_first.to(dtype), mask=mask)
        tl.store(first_place + HALF, new_second.to(dtype), mask=mask)


@triton.jit
def _temper_kernel(q_ptr, positions_ptr, numbers, q_token, floor, scale, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_next_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    steps = tl.floor(tl.math.div_rn(tl.load(positions_ptr + token).to(tl.float32) + 1, floor))
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place, inside = q_ptr + token * q_token + at, at < numbers
    q = tl.load(place, mask=inside).to(tl.float32) * (tl.log(1 + steps) * scale + 1)
    tl.store(place, q.to(q_ptr.dtype.element_ty), mask=inside)


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


def temper(q_THD: torch.Tensor, positions_T: torch.Tensor, floor: float, scale: float) -> torch.Tensor:
    """See `ops/rope.py`; in place."""
    tokens, heads, dim = q_THD.shape
    if q_THD.stride(1) != dim or q_THD.stride(2) != 1:
        raise ValueError(
            "Queries that grow with their position are changed in place and need heads one behind another."
        )
    if tokens:
        block = min(padded(heads * dim), 2048)
        _temper_kernel[(tokens, blocks(heads * dim, block))](
            q_THD, positions_T, heads * dim, q_THD.stride(0), float(floor), float(scale),
            BLOCK=block, **dependent(q_THD.device),
        )  # fmt: skip
    return q_THD
