"""Rotary position embedding, "neox" style (halves of a head are the pairs).

Shape letters: T tokens, N heads, D head size.

The angles of a step are computed once from its positions and used by every layer, so there is no table whose size
depends on the model's length.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagerunner.ops.dispatch import gpu_kernel
from pagerunner.ops.native import small


class RopeAngles(NamedTuple):
    """Cosines, and sines with the sign of the rotation in them (first half negative), both [T, 1, D]."""

    cos_T1D: torch.Tensor
    sin_T1D: torch.Tensor


@gpu_kernel("rope")
def rope_angles(
    positions_T: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float, dtype: torch.dtype
) -> RopeAngles:
    """Angles for `positions`; `inverse_frequencies` is [D / 2] float32 and `scale` multiplies both results."""
    angle = positions_T.to(torch.float32).unsqueeze(-1) * inverse_frequencies
    cos, sin = angle.cos(), angle.sin()
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    cos_T1D = torch.cat((cos, cos), -1).unsqueeze(1).to(dtype)
    sin_T1D = torch.cat((-sin, sin), -1).unsqueeze(1).to(dtype)
    return RopeAngles(cos_T1D, sin_T1D)


@rope_angles.on_cpu
def _rope_angles_on_cpu(
    positions_T: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float, dtype: torch.dtype
) -> RopeAngles:
    if dtype != torch.float32 or not small.counts(positions_T) or not small.serves(inverse_frequencies):
        return NotImplemented
    return RopeAngles(*small.rope_angles(positions_T, inverse_frequencies, scale))


@gpu_kernel("rope")
def rope_(x_TND: torch.Tensor, angles: RopeAngles) -> None:
    """Rotate every head of `x` in place by its token's angles."""
    swapped = x_TND.roll(x_TND.shape[-1] // 2, -1)
    x_TND.mul_(angles.cos_T1D).addcmul_(swapped, angles.sin_T1D)


@gpu_kernel("rope")
def rope_pairs_(x_TND: torch.Tensor, angles: RopeAngles) -> None:
    """Rotate every head of `x` in place where its pairs are adjacent elements instead of halves (DeepSeek, GPT-J)."""
    half = x_TND.shape[-1] // 2
    cos, sin = angles.cos_T1D[..., :half], angles.sin_T1D[..., half:]
    even, odd = x_TND[..., 0::2], x_TND[..., 1::2]
    turned = even * cos - odd * sin
    odd.mul_(cos).addcmul_(even, sin)
    even.copy_(turned)


rope_.on_cpu(small.rope_)
rope_pairs_.on_cpu(small.rope_pairs_)


@gpu_kernel("rope")
def temper(q_THD: torch.Tensor, positions_T: torch.Tensor, floor: float, scale: float) -> torch.Tensor:
    """Queries that grow with their position (Llama-4): `q * (log(1 + floor((position + 1) / floor)) * scale + 1)`, [T, H, D].

    The result may stand in the place of `q`.
    """
    steps_T = torch.floor((positions_T.float() + 1) / floor)
    return (q_THD * (torch.log1p(steps_T) * scale + 1)[:, None, None]).to(q_THD.dtype)


temper.on_cpu(small.temper)
