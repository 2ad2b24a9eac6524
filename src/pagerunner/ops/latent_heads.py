"""From a projection's raw output to latent attention: norms, rotary positions, the latents' place in pages, absorbed queries.

Shape letters: T tokens, H heads, D query head size (N without rotary positions, then P rotary ones), C latent size, L vector
size (C + P), E page table entries, X slots of a page.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagerunner.batch import WritePlaces
from pagerunner.ops.dispatch import gpu_kernel
from pagerunner.ops.latent_attention import store_latent_
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


@gpu_kernel("latent.latent_heads")
def prepare_latent_heads_(
    q_THD: torch.Tensor,
    vectors_TL: torch.Tensor,
    prep: LatentPrep,
    pages_EXL: torch.Tensor,
    write: WritePlaces,
    scales_E: torch.Tensor | None = None,
) -> None:
    """Make queries and vectors of raw ones, in place, and store the vectors in pages. Tokens whose entry is -1 are not stored.

    fp8 pages have `scales`, which grow. The vectors beside them are undefined afterwards.
    """
    prep.apply_(q_THD, vectors_TL)
    store_latent_(vectors_TL, pages_EXL, write, scales_E)


@gpu_kernel("latent.latent_heads")
def absorb_latent_heads_(
    q_THD: torch.Tensor,
    vectors_TL: torch.Tensor,
    prep: LatentPrep,
    keys_HNC: torch.Tensor,
    pages_EXL: torch.Tensor,
    write: WritePlaces,
    scales_E: torch.Tensor | None = None,
    most_of_page: int = 0,
) -> torch.Tensor:
    """As `prepare_latent_heads_`; the result is q's first N elements in the latent space, `q @ keys`, [T, H, C].

    The vectors are undefined afterwards. The result's memory is one head after another. `most_of_page`: no page gets more of the step's
    tokens (0: not known).
    """
    prepare_latent_heads_.twin(q_THD, vectors_TL, prep, pages_EXL, write, scales_E)
    return torch.bmm(q_THD[..., : keys_HNC.shape[1]].transpose(0, 1), keys_HNC).transpose(0, 1)
