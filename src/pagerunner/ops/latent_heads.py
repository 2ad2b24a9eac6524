"""From a projection's raw output to latent attention: norms and rotary positions.

Shape letters: T tokens, H heads, D query head size (P rotary elements come last), C latent size, L vector size (C + P).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagerunner.ops.linear import Norm
from pagerunner.ops.rope import RopeAngles, rope_, rope_pairs_


class LatentPrep(NamedTuple):
    """What is done to a projection's queries and vectors before attention: the norm of latents, then rotary positions.

    `pairs`: the pairs that rotary positions turn are adjacent elements instead of halves.
    """

    norm: Norm
    angles: RopeAngles
    pairs: bool

    @property
    def rotary_dim(self) -> int:
        """P."""
        return int(self.angles.cos_T1D.shape[-1])

    def apply_(self, q_THD: torch.Tensor, vectors_TL: torch.Tensor) -> None:
        """Make queries and vectors of raw ones, in place."""
        latent = self.norm.weight_I.shape[0]
        vectors_TL[:, :latent] = self.norm(vectors_TL[:, :latent])
        turn = rope_pairs_ if self.pairs else rope_
        turn(q_THD[..., -self.rotary_dim :], self.angles)
        turn(vectors_TL[:, None, latent:], self.angles)
