"""Vectors into pages of latents. Twin: `pagerunner.ops.latent_attention.store_latent_`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import padded


@triton.jit
def _store(
    vectors, pages, entries, offsets, vector_stride, page_stride, slot_stride, L: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0)
    entry = tl.load(entries + token)
    if entry < 0:
        return
    at = tl.arange(0, BLOCK)
    value = tl.load(vectors + token.to(tl.int64) * vector_stride + at, mask=at < L)
    target = pages + entry * page_stride + tl.load(offsets + token) * slot_stride + at
    tl.store(target, value.to(pages.dtype.element_ty), mask=at < L)


def store_latent_(
    vectors_TL: torch.Tensor, pages_EXL: torch.Tensor, write_entry_T: torch.Tensor, write_offset_T: torch.Tensor
) -> None:
    """See the twin."""
    tokens, size = vectors_TL.shape
    strides = (vectors_TL.stride(0), pages_EXL.stride(0), pages_EXL.stride(1))
    block = padded(size)
    _store[(tokens,)](vectors_TL, pages_EXL, write_entry_T, write_offset_T, *strides, size, block, num_warps=2)
