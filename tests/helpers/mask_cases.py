"""What ops/mask.py must do, on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch


def check_allow_bits(op: Callable[..., None], vocab: int, spare_words: int, device: str = "cpu") -> None:
    """Every token of every row against Python's own bits; rows without a mask stay."""
    generator = torch.Generator().manual_seed(vocab)
    logits_SV = torch.randn((5, vocab), generator=generator)
    words = -(-vocab // 32) + spare_words
    bits_NW = torch.randint(-(2**31), 2**31, (3, words), generator=generator, dtype=torch.int64).to(torch.int32)
    bits_NW[2] = 0
    rows = [4, 0, 3]
    want = logits_SV.clone()
    for row, words_W in zip(rows, bits_NW.tolist(), strict=True):
        for token in range(vocab):
            if not (words_W[token // 32] >> (token % 32)) & 1:
                want[row, token] = float("-inf")
    got = logits_SV.to(device)
    op(got, torch.tensor(rows, device=device), bits_NW.to(device))
    assert torch.equal(got.cpu(), want)
