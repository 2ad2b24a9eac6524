"""Parts of wider rows as rows of their own. Shape letters: T tokens, G groups, n elements of a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagerunner.ops.dispatch import gpu_kernel
from pagerunner.ops.native import recurrent, small


def side_by_side(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Parts [T, G, n], each of a size of its own, one behind another: [T, sum of G * n]."""
    if small.serves(*parts):
        return recurrent.side_by_side(parts)
    flat = [part.flatten(1) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat, 1)


def by_groups(qkvz_TC: torch.Tensor, groups: int, key_dim: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values and output gates [T, G, n] of a projection ordered by G key heads, of `key_dim` queries and keys each."""
    grouped_TGn = qkvz_TC.unflatten(-1, (groups, -1))
    values = grouped_TGn.shape[-1] // 2 - key_dim
    return grouped_TGn.split((key_dim, key_dim, values, values), -1)


@gpu_kernel("side_by_side")
def by_parts(qkvz_TC: torch.Tensor, ba_TR: torch.Tensor, groups: int, key_dim: int) -> torch.Tensor:
    """What two projections ordered by G key heads hold, ordered by parts: queries, keys, values, output gates, rates and decays, [T, C + R].

    A group of the first has `key_dim` queries and keys each, and half of the rest are values, the others gates. A group of the second is half rates, half decays.
    """
    own_TGn = ba_TR.unflatten(-1, (groups, -1))
    return side_by_side((*by_groups(qkvz_TC, groups, key_dim), *own_TGn.chunk(2, -1)))
