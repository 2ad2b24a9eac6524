"""Vectors into pages of latents. Twin: `pagerunner.ops.latent_attention.store_latent_`.

An fp8 page has one scale for its vectors. All tokens of a step that go to a page are one after another. So the program of the first
of them stores all of them: no other program touches the page, and no atomics are needed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pagerunner.batch import WritePlaces
from pagerunner.ops.kernels.launch import padded
from pagerunner.ops.kernels.paged.paged_heads import FP8_MAX, fp8_type, grown_scale, magnitude, quantise, rescale_page


def page_arguments(pages_EXL: torch.Tensor, scales_E: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages, as bytes if they are fp8, and their scales; without scales something in their place."""
    if scales_E is None:
        return pages_EXL, pages_EXL
    return pages_EXL.view(torch.uint8), scales_E


def scale_stride(scales_E: torch.Tensor | None) -> int:
    """From a page's scale to the next one's, in elements."""
    return 0 if scales_E is None else scales_E.stride(0)


def page_sizes(pages_EXL: torch.Tensor) -> dict[str, Any]:
    """What kernels are compiled for: the slots of a page, and the fp8 dtype that they are in, if they are."""
    dtype = pages_EXL.dtype
    return {"PAGE": pages_EXL.shape[1], "FP8": fp8_type(dtype), "FP8_MAX": FP8_MAX.get(dtype, 0.0)}


@triton.jit
def page_scale(
    page, scale_at, slot_stride, largest, L: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr
):  # fmt: skip
    """An fp8 page's scale, after it has grown for magnitudes of up to `largest`. The page's older vectors are converted."""
    HALF: tl.constexpr = (L + 1) // 2
    HALF_P: tl.constexpr = triton.next_power_of_2(HALF)
    old = tl.load(scale_at)
    scale = grown_scale(old, largest, FP8_MAX)
    if scale > old:
        if old > 0:
            factor = tl.zeros([1], tl.float32) + tl.math.div_rn(old, scale)
            rescale_page(page, slot_stride, 0, factor, 1, PAGE, 4, 1, L, HALF, HALF_P, FP8, FP8_MAX)
        tl.store(scale_at, scale)
    tl.debug_barrier()  # what is stored next must not be converted
    return scale


@triton.jit(do_not_specialize=["num_tokens"])
def _store(
    vectors, pages, scales, entries, offsets, num_tokens, vector_stride, page_stride, slot_stride, scale_stride,
    L: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    entry = tl.load(entries + token)
    at = tl.arange(0, BLOCK)
    if FP8 is None:
        if entry >= 0:
            value = tl.load(vectors + token.to(tl.int64) * vector_stride + at, mask=at < L)
            target = pages + entry * page_stride + tl.load(offsets + token) * slot_stride + at
            tl.store(target, value.to(pages.dtype.element_ty), mask=at < L)
    else:
        before = tl.load(entries + token - 1, mask=token > 0, other=-1)
        if (entry >= 0) & (entry != before):
            largest = 0.0
            end = token
            following = entry
            while following == entry:
                value = tl.load(vectors + end.to(tl.int64) * vector_stride + at, mask=at < L, other=0.0)
                largest = tl.maximum(largest, tl.max(magnitude(value.to(tl.float32)), 0))
                end += 1
                following = tl.load(entries + end, mask=end < num_tokens, other=-1)
            page = pages + entry * page_stride
            scale = page_scale(page, scales + entry * scale_stride, slot_stride, largest, L, PAGE, FP8, FP8_MAX)
            each = token
            while each < end:
                value = tl.load(vectors + each.to(tl.int64) * vector_stride + at, mask=at < L, other=0.0)
                codes = quantise(value.to(tl.float32), scale, FP8_MAX, FP8).to(tl.uint8, bitcast=True)
                tl.store(page + tl.load(offsets + each) * slot_stride + at, codes, mask=at < L)
                each += 1


def store_latent_(
    vectors_TL: torch.Tensor, pages_EXL: torch.Tensor, write: WritePlaces, scales_E: torch.Tensor | None = None
) -> None:
    """See the twin."""
    tokens, size = vectors_TL.shape
    if tokens:
        _store[(tokens,)](
            vectors_TL, *page_arguments(pages_EXL, scales_E), *write, tokens, vectors_TL.stride(0),
            *pages_EXL.stride()[:2], scale_stride(scales_E), L=size, BLOCK=padded(size), **page_sizes(pages_EXL),
            num_warps=2,
        )  # fmt: skip
