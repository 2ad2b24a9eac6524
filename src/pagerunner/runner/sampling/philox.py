"""Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as
1, 2, 3" (SC 2011): a keyed bijection of 128-bit counters, so number i of a stream needs no state and no predecessor.

A token's uniform depends on the request's seed (the key) and the token's absolute position (the counter) alone.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Ten rounds over int64 tensors that hold unsigned 32-bit words; shapes broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The 64-bit product may wrap to a negative int64; its bits are right, and the mask undoes the sign extension.
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        high_0, low_0 = (product_0 >> 32) & _MASK, product_0 & _MASK
        high_1, low_1 = (product_1 >> 32) & _MASK, product_1 & _MASK
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One float64 in [0, 1) with 53 random bits per (seed, position).

    Both arguments are int64 and broadcast; seeds use all 64 bits. Key: seed (low, high); counter: (position low,
    position high, 0, 0).
    """
    zero = torch.zeros_like(positions)
    counter = (positions & _MASK, (positions >> 32) & _MASK, zero, zero)
    word_0, word_1, _, _ = philox4x32(counter, (seeds & _MASK, (seeds >> 32) & _MASK))
    return ((word_0 >> 5) * (1 << 26) + (word_1 >> 6)).to(torch.float64) * 2.0**-53


class UniformStream:
    """The uniforms of one seed by position, computed in blocks on the host: a token costs a list look-up."""

    __slots__ = ("_block", "_seed", "_start")

    BLOCK = 64

    def __init__(self, seed: int) -> None:
        self._seed = torch.tensor(seed, dtype=torch.int64)
        self._start = 0
        self._block: list[float] = []

    def at(self, position: int) -> float:
        """The uniform of `position`."""
        offset = position - self._start
        if not 0 <= offset < len(self._block):
            self._start, offset = position, 0
            positions = torch.arange(position, position + self.BLOCK, dtype=torch.int64)
            self._block = uniforms(self._seed, positions).tolist()
        return self._block[offset]
