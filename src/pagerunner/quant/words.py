"""Small whole numbers that lie several in a word of 32 bits.

The first number lies in a word's lowest bits. Example: the word 0x76543210 holds the 4-bit numbers 0, 1, 2, 3, 4, 5, 6, 7.
"""

from __future__ import annotations

import torch

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word of AWQ the 4-bit numbers of eight output features lie: 0x75316420 holds 0 to 7 in their order."""


def numbers_of(words: torch.Tensor, bits: int, dimension: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """The numbers of `bits` (4 or 8) in int32 `words`, uint8. `dimension` becomes 32 / `bits` times as long.

    Number i of a word lies at place `places[i]`, i if there are none.
    """
    count = 32 // bits
    pieces = [(words >> bits * place & (1 << bits) - 1).to(torch.uint8) for place in places or range(count)]
    axis = dimension % words.dim()
    return torch.stack(pieces, axis + 1).flatten(axis, axis + 1)


def words_for(numbers: int, bits: int) -> int:
    """How many words hold so many numbers."""
    return -(-numbers * bits // 32)
