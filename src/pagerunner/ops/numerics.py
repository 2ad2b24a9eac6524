"""The order of sums that doesn't depend on a step: what kernels of engines with `batch_invariant` read.

Whoever changes a number here changes bits, but not that they are the same for every step.
"""

from __future__ import annotations

from typing import NamedTuple


class FixedOrder(NamedTuple):
    """Attention's keys of a piece, at absolute positions; rows of a tile, heads of tokens, and its keys; the same in float32."""

    piece: int = 256
    query_rows: int = 64
    keys: int = 64
    exact_rows: int = 32
    exact_keys: int = 32


FIXED = FixedOrder()
