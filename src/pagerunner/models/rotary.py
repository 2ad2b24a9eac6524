"""A model's rotary embedding: its frequencies, and the angles of one step.

Formulas: default and linear as in RoFormer (arXiv 2104.09864) and its position interpolation (arXiv 2306.15595); llama3
as published with Llama 3.1; yarn as in arXiv 2309.00071. All in float32, so that angles agree with the reference
implementation's at every position.
"""

from __future__ import annotations

import math

import torch

from pagerunner.models.configs.base import RopeConfig
from pagerunner.ops.rope import RopeAngles, rope_angles


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair, [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        return _llama3(base, rope)
    if rope.kind == "yarn":
        return _yarn(base, rope, head_dim)
    return base


def _llama3(base: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / base
    rotations = rope.original_length / wavelength
    if rope.high_freq_factor == rope.low_freq_factor:  # nothing lies between (Llama-4-Scout)
        blend = (rotations > rope.low_freq_factor).float()
    else:
        blend = ((rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - blend) * base / rope.factor + blend * base


def _yarn(base: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Pairs that turn more than `beta_fast` times in the trained length are kept, below `beta_slow` stretched."""

    def pair_with(rotations: float) -> float:
        return head_dim * math.log(rope.original_length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return base / rope.factor * stretched + base * (1 - stretched)


class Rotary:
    """Computes a step's angles from its positions. Holds constants only, no weights."""

    def __init__(self, rope: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.inverse_frequencies = inverse_frequencies(rope, head_dim).to(device)
        self.scale = rope.scale
        self.dtype = dtype

    def __call__(self, positions_T: torch.Tensor) -> RopeAngles:
        """The angles of each token's position."""
        return rope_angles(positions_T, self.inverse_frequencies, self.scale, self.dtype)
