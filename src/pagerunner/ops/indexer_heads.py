"""What an indexer compares, from projections: its heads' queries and weights, and its tokens' keys. DeepSeek-V3.2 and V4.

Shape letters: T tokens, J indexer heads, I indexer key size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from pagerunner.batch import LatentPages
from pagerunner.ops.dispatch import gpu_kernel
from pagerunner.ops.rope import RopeAngles, rope_, rope_pairs_

MIXED_SIZES = (16, 32, 64, 128, 256)  # of indexer keys in fp8 that a Hadamard matrix mixes


class MeanNorm(NamedTuple):
    """A norm of mean and variance."""

    weight_I: torch.Tensor
    bias_I: torch.Tensor
    eps: float


@gpu_kernel("latent.indexer_heads")
def indexer_heads(
    q_TJI: torch.Tensor,
    keys_TI: torch.Tensor,
    weights_TJ: torch.Tensor,
    norm: MeanNorm,
    angles: RopeAngles,
    scale: float,
    mixed: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, normed keys, and weights in float32 times `scale`. What is given may be overwritten.

    The first elements of queries and keys are rotated, as halves. With `mixed` both are then multiplied by a Hadamard matrix, as models
    whose keys are kept in fp8 were trained. No score changes by that, but a key that has one large element becomes one of
    equal ones, whose others fp8 doesn't round to nothing. I is a power of two then.
    """
    keys_TI = F.layer_norm(keys_TI, keys_TI.shape[-1:], *norm)
    rotary = angles.cos_T1D.shape[-1]
    rope_(q_TJI[..., :rotary], angles)
    rope_(keys_TI[:, None, :rotary], angles)
    if mixed:
        q_TJI, keys_TI = hadamard(q_TJI), hadamard(keys_TI)
    return q_TJI, keys_TI, weights_TJ.float() * scale


@gpu_kernel("latent.indexer_heads")
def indexer_queries(
    q_TJI: torch.Tensor, weights_TJ: torch.Tensor, angles: RopeAngles, scale: float, mixed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries, and weights in float32 times `scale`, where keys aren't the tokens' own (DeepSeek-V4). What is given may be overwritten.

    The last elements of queries are rotated, as adjacent pairs. `mixed`: see `indexer_heads`.
    """
    rope_pairs_(q_TJI[..., -angles.cos_T1D.shape[-1] :], angles)
    return hadamard(q_TJI) if mixed else q_TJI, weights_TJ.float() * scale


def is_mixed(pages: LatentPages) -> bool:
    """Whether a layer's indexer queries and keys are mixed: where keys are kept in fp8, and a Hadamard matrix of their size is made."""
    keys = pages.indexer
    return keys is not None and pages.indexer_scales is not None and keys.shape[-1] in MIXED_SIZES


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Vectors times the Hadamard matrix of their size I, a power of two, and times I**-0.5: sums and differences, in log2(I) steps."""
    size, made, step = x.shape[-1], x.float() * x.shape[-1] ** -0.5, 1
    while step < size:
        first, second = made.unflatten(-1, (-1, 2, step)).unbind(-2)
        made = torch.stack((first + second, first - second), -2).flatten(-3)
        step *= 2
    return made.to(x.dtype)
