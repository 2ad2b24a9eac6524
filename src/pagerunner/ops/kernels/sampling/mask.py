"""Kernels of ops/mask.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit(do_not_specialize=["vocab"])
def _allow_bits(logits_SV, rows_N, bits_NW, vocab, row_stride, mask_stride, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bits_NW + n * mask_stride + token // 32, token < vocab, -1)
    blocked = ((word >> (token % 32)) & 1) == 0
    row = tl.load(rows_N + n)
    tl.store(logits_SV + row * row_stride + token, float("-inf"), blocked & (token < vocab))


def allow_bits(logits_SV: torch.Tensor, rows_N: torch.Tensor, bits_NW: torch.Tensor) -> None:
    """See ops/mask.py."""
    vocab = logits_SV.shape[1]
    grid = (rows_N.shape[0], triton.cdiv(vocab, BLOCK))
    _allow_bits[grid](logits_SV, rows_N, bits_NW, vocab, logits_SV.stride(0), bits_NW.stride(0), BLOCK=BLOCK)
