"""What tells weights from all others: a digest of every byte that was loaded, taken where the bytes are.

A file's digest wouldn't do. A directory may have changed since it was read, and weights may have come from a trainer. Samples wouldn't do either:
a fine-tune for new tokens changes a few rows of the embeddings alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from pagerunner.life import LIFE

_WORDS = 2**20  # of a piece: 4 MiB, and as much again four times while it is summed
_CACHED_WORDS = 2**15  # summed at once on a CPU: 128 KiB, and what they become, stay in its cache
_LOW_BITS = 2**32 - 1


def weights_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """32 hexadecimal digits, equal for equal bytes under equal names in equal forms.

    Words of 32 bits are multiplied by fixed random numbers of 64 bits and added, two sums for each piece. So any change of a piece's words goes unnoticed
    with a chance of about 2^-64 (Dietzfelbinger: Universal hashing via integer arithmetic without primes). The sums of all pieces are hashed by SHA-256. An
    adversary who may choose weights can find equal sums; who may do that can choose the tokens anyway.
    """
    digest, sums = hashlib.sha256(), []
    factors: torch.Tensor | None = None
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        if factors is None:
            factors = _factors(tensor.device)
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        sums += [_sums(piece, factors) for piece in raw.split(4 * _WORDS)]
        LIFE.moved()
    if sums:
        digest.update(torch.stack(sums).cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


def _factors(device: torch.device) -> torch.Tensor:
    """Random numbers [2, words] of 64 bits, the same in every process. Their lowest bits are set, so that a single change always shows."""
    known = torch.Generator().manual_seed(20)
    lowest = -(2**63)
    return (torch.empty(2, _WORDS, dtype=torch.int64).random_(lowest, None, generator=known) | 1).to(device)


def _sums(piece: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Both sums of bytes [n]."""
    if rest := len(piece) % 4:
        piece = torch.cat([piece, piece.new_zeros(4 - rest)])
    words = piece.view(torch.int32)
    at_once = _CACHED_WORDS if piece.device.type == "cpu" else _WORDS
    parts = zip(words.split(at_once), factors[:, : len(words)].split(at_once, 1), strict=True)
    return torch.stack([((part.to(torch.int64) & _LOW_BITS) * some).sum(1) for part, some in parts]).sum(0)
