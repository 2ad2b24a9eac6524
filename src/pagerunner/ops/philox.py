"""Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as
1, 2, 3" (SC 2011). It is a keyed bijection of 128-bit counters, so number i of a stream needs no state and no predecessor.

A token's uniform depends on the request's seed (the key) and the token's absolute position (the counter) alone. The
kernels of `ops/kernels/sampling/sample.py` compute the same numbers, bit for bit.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Ten rounds over int64 tensors that hold unsigned 32-bit words; shapes broadcast.

    A round, as in the paper: words 0 and 2 are multiplied to 64 bits, each by a constant. A product's low half is a new
    word, its high half is mixed with another word and the key. Both halves of a round are one tensor, for the CPU's sake.
    """
    c0, c1, c2, c3, k0, k1 = torch.broadcast_tensors(*counter, *key)
    multiplied, mixed = torch.stack((c0, c2)), torch.stack((c1, c3))
    rounds = torch.arange(_ROUNDS, device=c0.device).view(-1, *(1,) * (c0.dim() + 1))
    column = (2, *(1,) * c0.dim())
    multipliers = torch.tensor(_MULTIPLIERS, device=c0.device).view(column)
    keys = torch.stack((k0, k1)) + rounds * torch.tensor(_WEYL, device=c0.device).view(column)
    for keys_of_round in keys.bitwise_and_(_MASK):
        # The 64-bit product may wrap to a negative int64; its bits are right, and the mask undoes the sign extension.
        products = multiplied * multipliers
        multiplied = (products >> 32).bitwise_and_(_MASK).flip(0).bitwise_xor_(mixed).bitwise_xor_(keys_of_round)
        mixed = products.bitwise_and_(_MASK).flip(0)
    return multiplied[0], mixed[0], multiplied[1], mixed[1]


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One float64 in [0, 1) with 53 random bits per (seed, position).

    Both arguments are int64 and broadcast; seeds use all 64 bits. Key: seed (low, high); counter: (position low,
    position high, 0, 0). The number is (word 0 >> 5) * 2^26 + (word 1 >> 6), divided by 2^53.
    """
    zero = torch.zeros_like(positions)
    counter = (positions & _MASK, (positions >> 32) & _MASK, zero, zero)
    word_0, word_1, _, _ = philox4x32(counter, (seeds & _MASK, (seeds >> 32) & _MASK))
    return ((word_0 >> 5) * (1 << 26) + (word_1 >> 6)).to(torch.float64) * 2.0**-53
