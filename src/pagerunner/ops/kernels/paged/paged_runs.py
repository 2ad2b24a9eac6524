"""Stores keys and values into fp8 pages with scales of their own. All tokens of the step that go to a page decide its scale.

Program (b, part) has one head of the PAGE_P tokens from b * PAGE_P on. It stores two sets of tokens:

* The tokens that are alone on their pages, all at once.
* For each page whose first token of this step is among the PAGE_P tokens: all tokens of the step that go to that page, at once.

So each page has one program, and no atomics are needed. Parts are the heads' keys, then the heads' values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.batch import KVPages, WritePlaces
from pagerunner.ops.kernels.launch import blocks, dependent, padded, start_next_and_wait
from pagerunner.ops.kernels.linear.linear_parts import NO_NORM
from pagerunner.ops.kernels.paged.paged_heads import (
    FP8_MAX,
    fp8_type,
    grown_scale,
    head_norm,
    normed,
    rescale_page,
    turned,
)
from pagerunner.ops.paged_attention import HeadPrep


@triton.jit
def _load(source, token, there, prep, D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr):  # fmt: skip
    """One head of the tokens that are `there` [N], normed, rotated, and rounded as the projection is.

    `source`: where the head is in the projection's output, and the stride of tokens. `prep`: the norm's weight, its epsilon, and the angles.
    Returns two halves [N, HALF_P] float32, and each token's largest magnitude [N].
    """
    ptr, stride_t = source
    norm_ptr, eps, cos_ptr, sin_ptr, stride_rope = prep
    d = tl.arange(0, HALF_P)[None, :]
    low_mask = there[:, None] & (d < HALF)
    token = tl.cast(token, tl.int64)[:, None]
    at = ptr + token * stride_t + d
    low = tl.load(at, mask=low_mask, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=there[:, None] & (d < D - HALF), other=0.0).to(tl.float32)
    if NORM != NO_NORM:
        low, high = normed(low, high, norm_ptr, eps, D, HALF, HALF_P, NORM)
    if ROPE:
        angle = token * stride_rope + d
        cos_low = tl.load(cos_ptr + angle, mask=low_mask, other=0.0).to(tl.float32)
        cos_high = tl.load(cos_ptr + angle + HALF, mask=low_mask, other=0.0).to(tl.float32)
        sin_low = tl.load(sin_ptr + angle, mask=low_mask, other=0.0).to(tl.float32)
        sin_high = tl.load(sin_ptr + angle + HALF, mask=low_mask, other=0.0).to(tl.float32)
        low, high = turned(low, high, cos_low, cos_high, sin_low, sin_high)
    low = low.to(ptr.dtype.element_ty).to(tl.float32)
    high = high.to(ptr.dtype.element_ty).to(tl.float32)
    return low, high, tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1)


@triton.jit
def _quantised(x, inverse, FP8_MAX: tl.constexpr, FP8: tl.constexpr):
    """As ops.fp8.to_fp8, by a power of two's inverse."""
    return tl.minimum(tl.maximum(x * inverse, -FP8_MAX), FP8_MAX).to(FP8)


@triton.jit
def _put(at, low, high, there, D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr):
    """Halves [N, HALF_P] to the places `at` [N]."""
    d = tl.arange(0, HALF_P)[None, :]
    tl.store(at[:, None] + d, low, mask=there[:, None] & (d < HALF))
    tl.store(at[:, None] + d + HALF, high, mask=there[:, None] & (d < D - HALF))


@triton.jit
def _store_tile(
    source, token, page, page_ss, offset_ptr, low, high, scale, inverse, there, stored,
    D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr,
):  # fmt: skip
    """Store halves of tokens [N], rounded as pages hold them.

    Tokens that are `stored` go into the slots of their pages. Tokens that are `there` also go back to where they came from. The
    page's pointer, the scale and its inverse are one value for all tokens, or one for each.
    """
    ptr, stride_t = source
    low = _quantised(low, inverse, FP8_MAX, FP8)
    high = _quantised(high, inverse, FP8_MAX, FP8)
    slot = page + tl.load(offset_ptr + token, mask=stored, other=0) * page_ss
    _put(slot, low.to(tl.uint8, bitcast=True), high.to(tl.uint8, bitcast=True), stored, D, HALF, HALF_P)
    low, high = low.to(tl.float32) * scale, high.to(tl.float32) * scale
    TO: tl.constexpr = ptr.dtype.element_ty
    _put(ptr + tl.cast(token, tl.int64) * stride_t, low.to(TO), high.to(TO), there, D, HALF, HALF_P)


@triton.jit
def _store_alone(
    source, pages, prep, entry, offset_ptr, token, alone,
    D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
    FP8: tl.constexpr, FP8_MAX: tl.constexpr, PAGE: tl.constexpr, PAGE_P: tl.constexpr,
):  # fmt: skip
    """All tokens [PAGE_P] at once that have no page, or whose page gets no other token of this step."""
    page_ptr, page_se, page_ss, scale_ptr, scale_se = pages
    t = tl.arange(0, PAGE_P)
    stored = alone & (entry >= 0)
    low, high, largest = _load(source, token, alone, prep, D, HALF, HALF_P, NORM, ROPE)
    scale_at = scale_ptr + entry * scale_se
    old = tl.load(scale_at, mask=stored, other=0.0)
    scale = grown_scale(old, largest, FP8_MAX)
    grown = stored & (scale > old)
    converts = grown & (old > 0)
    factors = tl.math.div_rn(old, tl.where(scale > 0, scale, 1.0))
    which = tl.min(tl.where(converts, t, PAGE_P), 0)
    while which < PAGE_P:
        page = tl.sum(tl.where(t == which, entry, 0), 0)
        factor = tl.full([1], 1.0, tl.float32) * tl.sum(tl.where(t == which, factors, 0.0), 0)
        rescale_page(page_ptr + page * page_se, page_ss, 0, factor, 1, PAGE, PAGE_P, 1, D, HALF, HALF_P, FP8, FP8_MAX)
        tl.debug_barrier()
        which = tl.min(tl.where(converts & (t > which), t, PAGE_P), 0)
    tl.store(scale_at, scale, mask=grown)
    scale = scale[:, None]
    inverse = tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), tl.where(scale > 0, scale, 1.0))
    _store_tile(
        source, token, page_ptr + entry * page_se, page_ss, offset_ptr, low, high, scale, inverse, alone, stored,
        D, HALF, HALF_P, FP8, FP8_MAX,
    )  # fmt: skip


@triton.jit
def _store_head(
    source, pages, prep, entry_ptr, offset_ptr, first, num_tokens,
    D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
    FP8: tl.constexpr, FP8_MAX: tl.constexpr, PAGE: tl.constexpr, PAGE_P: tl.constexpr,
):  # fmt: skip
    """A program's work, with pointers to its head. `pages`: all pages, their strides by entry and slot, the scales and their stride."""
    page_ptr, page_se, page_ss, scale_ptr, scale_se = pages
    t = tl.arange(0, PAGE_P)
    token = first + t
    entry = tl.load(entry_ptr + token, mask=token < num_tokens, other=-2)
    before = tl.load(entry_ptr + token - 1, mask=(token > 0) & (token < num_tokens), other=-1)
    after = tl.load(entry_ptr + token + 1, mask=token + 1 < num_tokens, other=-1)
    alone = (entry == -1) | ((entry >= 0) & (entry != before) & (entry != after))
    if tl.max(alone.to(tl.int32), 0) > 0:
        _store_alone(
            source, pages, prep, entry, offset_ptr, token, alone, D, HALF, HALF_P, NORM, ROPE, FP8, FP8_MAX, PAGE, PAGE_P,
        )  # fmt: skip
    begins = (entry >= 0) & (entry != before) & (entry == after)
    at = tl.min(tl.where(begins, t, PAGE_P), 0)
    while at < PAGE_P:
        page = tl.sum(tl.where(t == at, entry, 0), 0)
        run = first + at + t
        there = tl.load(entry_ptr + run, mask=run < num_tokens, other=-1) == page
        low, high, largest = _load(source, run, there, prep, D, HALF, HALF_P, NORM, ROPE)
        old = tl.load(scale_ptr + page * scale_se)
        scale = grown_scale(old, tl.max(largest, 0), FP8_MAX)
        slots = page_ptr + page * page_se
        if scale > old:
            if old > 0:
                factor = tl.full([1], 1.0, tl.float32) * tl.math.div_rn(old, scale)
                rescale_page(slots, page_ss, 0, factor, 1, PAGE, PAGE_P, 1, D, HALF, HALF_P, FP8, FP8_MAX)
                tl.debug_barrier()
            tl.store(scale_ptr + page * scale_se, scale)
        inverse = tl.math.div_rn(1.0, tl.where(scale > 0, scale, 1.0))
        _store_tile(
            source, run, slots, page_ss, offset_ptr, low, high, scale, inverse, there, there, D, HALF, HALF_P, FP8, FP8_MAX,
        )  # fmt: skip
        at = tl.min(tl.where(begins & (t > at), t, PAGE_P), 0)


@triton.jit(do_not_specialize=["num_tokens"])
def _store_runs_kernel(
    k_ptr, k_st, k_sh, v_ptr, v_st, v_sh, cos_ptr, sin_ptr, stride_rope, k_norm_ptr, eps,
    kp_ptr, kp_se, kp_ss, kp_sh, vp_ptr, vp_se, vp_ss, vp_sh, scales_ptr, scales_se, entry_ptr, offset_ptr, num_tokens,
    K: tl.constexpr, PAGE: tl.constexpr, PAGE_P: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr,
    DV: tl.constexpr, HALF_V: tl.constexpr, HALF_VP: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next_and_wait(PDL)
    first = tl.program_id(0) * PAGE_P
    head = tl.program_id(1) % K
    prep = (k_norm_ptr, eps, cos_ptr, sin_ptr, stride_rope)
    if tl.program_id(1) < K:
        _store_head(
            (k_ptr + head * k_sh, k_st), (kp_ptr + head * kp_sh, kp_se, kp_ss, scales_ptr + head, scales_se), prep,
            entry_ptr, offset_ptr, first, num_tokens, D, HALF, HALF_P, NORM, ROPE, FP8, FP8_MAX, PAGE, PAGE_P,
        )  # fmt: skip
    else:
        _store_head(
            (v_ptr + head * v_sh, v_st), (vp_ptr + head * vp_sh, vp_se, vp_ss, scales_ptr + K + head, scales_se), prep,
            entry_ptr, offset_ptr, first, num_tokens, DV, HALF_V, HALF_VP, False, False, FP8, FP8_MAX, PAGE, PAGE_P,
        )  # fmt: skip


def store_runs_(k: torch.Tensor, v: torch.Tensor, prep: HeadPrep | None, pages: KVPages, write: WritePlaces) -> None:
    """`prepare_heads_` (or without `prep` `store_kv_`) of keys and values, for pages with scales of their own."""
    num_tokens, num_kv_heads, dim = k.shape
    dim_v, page = v.shape[2], pages.k.shape[1]
    if pages.scales is None:
        raise TypeError("pages without scales have nothing to scale by")
    kp, vp = pages.k.view(torch.uint8), pages.v.view(torch.uint8)
    k_norm = k if prep is None or prep.k_norm_D is None else prep.k_norm_D
    cos, sin = (k, k) if prep is None else prep.angles
    half, half_v = (dim + 1) // 2, (dim_v + 1) // 2
    tile = padded(page) * 2 * padded(max(half, half_v))
    _store_runs_kernel[(blocks(num_tokens, padded(page)), 2 * num_kv_heads)](
        k, *k.stride()[:2], v, *v.stride()[:2], cos, sin, cos.stride(0), k_norm, 0.0 if prep is None else prep.eps,
        kp, *kp.stride()[:3], vp, *vp.stride()[:3], pages.scales, pages.scales.stride(0),
        *write, num_tokens,
        num_kv_heads, page, padded(page), dim, half, padded(half), dim_v, half_v, padded(half_v),
        head_norm(prep), prep is not None, fp8_type(pages.k.dtype), FP8_MAX[pages.k.dtype],
        num_warps=min(max(tile // 1024, 1), 8), **dependent(k.device),
    )  # fmt: skip
