"""Parts of wider rows as rows of their own. Shape letters: T tokens, G groups, n elements of a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagerunner.ops.native import recurrent


def side_by_side(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Parts [T, G, n], each of a size of its own, one behind another: [T, sum of G * n]."""
    if recurrent.serves(*parts):
        return recurrent.side_by_side(parts)
    flat = [part.flatten(1) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat, 1)
