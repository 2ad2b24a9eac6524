"""Heads of a projection's output, prepared and stored into pages: norm, rotary positions, page write, fp8, in one launch.

Program (t, part) has part 0: token t's keys, part 1: its values, others: some of its query heads. A head is handled as
two halves, which are the pairs that rotate. In pages with scales of their own, the program of the first of adjacent
tokens that go to one page handles all of that page's tokens, and so needs no atomics. Scales are [entries, 2, K].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagerunner.ops.fp8 import ROOM as SCALE_ROOM
from pagerunner.ops.kernels.launch import blocks, dependent, padded
from pagerunner.ops.paged_attention import HeadPrep, PagedKV

FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_QUERY_BLOCK = 8  # query heads of one program
_RESCALED = 8192  # numbers of a page that are multiplied at once when its scale grows
ROOM = tl.constexpr(SCALE_ROOM)


@triton.jit
def fitting_scale(largest, FP8_MAX: tl.constexpr):
    """As ops.fp8.fitting_scale: the smallest power of two, from the float's exponent bits."""
    bits = tl.math.div_rn(largest, FP8_MAX).to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits + 0x7FFFFF) >> 23, 1)
    return tl.where(largest > 0, (exponent << 23).to(tl.float32, bitcast=True), 0.0)


@triton.jit
def grown_scale(old, largest, FP8_MAX: tl.constexpr):
    """As ops.fp8.grown_scale."""
    fitting = fitting_scale(largest, FP8_MAX)
    return tl.where(fitting > old, fitting * ROOM, old)


@triton.jit
def quantise(x, scale, FP8_MAX: tl.constexpr, FP8: tl.constexpr):
    """As ops.fp8.to_fp8."""
    divided = tl.math.div_rn(x, tl.where(scale > 0, scale, 1.0) + tl.zeros_like(x))
    return tl.minimum(tl.maximum(divided, -FP8_MAX), FP8_MAX).to(FP8)


@triton.jit
def _heads(
    ptr, token, stride_t, stride_h, first, count, norm_ptr, eps, cos_ptr, sin_ptr, stride_rope,
    ROWS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Heads [first, first + count) of a token, normed and rotated: two halves [ROWS, HALF_P] float32."""
    head = first + tl.arange(0, ROWS)
    d = tl.arange(0, HALF_P)
    there = (head < first + count)[:, None]
    low_mask = there & (d < HALF)[None, :]
    high_mask = there & (d < D - HALF)[None, :]
    at = ptr + tl.cast(token, tl.int64) * stride_t + head[:, None] * stride_h + d[None, :]
    low = tl.load(at, mask=low_mask, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=high_mask, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(low * low + high * high, 1) / D
        inverse = tl.math.rsqrt(squares + eps)[:, None]
        low = low * inverse * tl.load(norm_ptr + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
        high = high * inverse * tl.load(norm_ptr + HALF + d, mask=d < D - HALF, other=0.0).to(tl.float32)[None, :]
    if ROPE:
        angle = tl.cast(token, tl.int64) * stride_rope + d
        cos_low = tl.load(cos_ptr + angle, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
        cos_high = tl.load(cos_ptr + angle + HALF, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
        sin_low = tl.load(sin_ptr + angle, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
        sin_high = tl.load(sin_ptr + angle + HALF, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
        turned = low * cos_low + high * sin_low
        high = high * cos_high + low * sin_high
        low = turned
    return low, high


@triton.jit
def _put(
    ptr, low, high, count, stride_h, ROWS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr
):
    head = tl.arange(0, ROWS)
    d = tl.arange(0, HALF_P)
    there = (head < count)[:, None]
    at = ptr + head[:, None] * stride_h + d[None, :]
    tl.store(at, low.to(ptr.dtype.element_ty), mask=there & (d < HALF)[None, :])
    tl.store(at + HALF, high.to(ptr.dtype.element_ty), mask=there & (d < D - HALF)[None, :])


@triton.jit
def _put_fp8(
    ptr, low, high, count, stride_h, ROWS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr
):
    _put(ptr, low.to(tl.uint8, bitcast=True), high.to(tl.uint8, bitcast=True), count, stride_h, ROWS, D, HALF, HALF_P)


@triton.jit
def _put_quantised(
    ptr, stride_t, stride_h, page_ptr, page_se, page_ss, page_sh, entry, offset_ptr, token, low, high, scale, K,
    ROWS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, FP8: tl.constexpr,
    FP8_MAX: tl.constexpr,
):  # fmt: skip
    """A token's heads into its page, if it has one, and back to where they came from as the page holds them."""
    scale = scale[:, None]
    low8 = quantise(low.to(ptr.dtype.element_ty).to(tl.float32), scale, FP8_MAX, FP8)
    high8 = quantise(high.to(ptr.dtype.element_ty).to(tl.float32), scale, FP8_MAX, FP8)
    if entry >= 0:
        slot = page_ptr + entry * page_se + tl.load(offset_ptr + token) * page_ss
        _put_fp8(slot, low8, high8, K, page_sh, ROWS, D, HALF, HALF_P)
    own = ptr + tl.cast(token, tl.int64) * stride_t
    _put(own, low8.to(tl.float32) * scale, high8.to(tl.float32) * scale, K, stride_h, ROWS, D, HALF, HALF_P)


@triton.jit
def _rescale_page(
    page_ptr, stride_s, stride_h, factor, K, PAGE: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr,
):  # fmt: skip
    """By the heads' factors [ROWS]. SLOTS slots at once: one after the other, each would be waited for."""
    row = tl.arange(0, SLOTS * ROWS)
    d = tl.arange(0, HALF_P)
    head = row % ROWS
    factor = tl.reshape(tl.broadcast_to(factor[None, :], [SLOTS, ROWS]), [SLOTS * ROWS])[:, None]
    for first in range(0, PAGE, SLOTS):
        slot = first + row // ROWS
        at = page_ptr + (slot * stride_s + head * stride_h)[:, None] + d[None, :]
        there = ((head < K) & (slot < PAGE))[:, None]
        low = tl.load(at, mask=there & (d < HALF)[None, :], other=0).to(FP8, bitcast=True).to(tl.float32)
        high = tl.load(at + HALF, mask=there & (d < D - HALF)[None, :], other=0).to(FP8, bitcast=True).to(tl.float32)
        low = tl.minimum(tl.maximum(low * factor, -FP8_MAX), FP8_MAX).to(FP8)
        high = tl.minimum(tl.maximum(high * factor, -FP8_MAX), FP8_MAX).to(FP8)
        tl.store(at, low.to(tl.uint8, bitcast=True), mask=there & (d < HALF)[None, :])
        tl.store(at + HALF, high.to(tl.uint8, bitcast=True), mask=there & (d < D - HALF)[None, :])


@triton.jit
def _store_page_tokens(
    ptr, stride_t, stride_h, page_ptr, page_se, page_ss, page_sh, scale_ptr, scale_se, norm_ptr, eps, cos_ptr, sin_ptr,
    stride_rope, entry_ptr, offset_ptr, token, num_tokens, K,
    ROWS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, NORM: tl.constexpr,
    ROPE: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr, PAGE: tl.constexpr, SLOTS: tl.constexpr,
    STATIC: tl.constexpr,
):  # fmt: skip
    """All tokens from `token` on that go to its page (or `token` alone, if it goes to none), in fp8 with a scale for each
    head; nothing if the one before goes there too.
    """
    head = tl.arange(0, ROWS)
    scale_ptr += head
    entry = tl.load(entry_ptr + token)
    leads = True
    if STATIC:
        scale = tl.load(scale_ptr, mask=head < K, other=0.0)
        old = scale
    else:
        before = tl.load(entry_ptr + tl.maximum(token - 1, 0))
        leads = (token == 0) | (entry < 0) | (before != entry)
        old = tl.load(scale_ptr + entry * scale_se, mask=(head < K) & (entry >= 0), other=0.0)
    end = token + 1
    low, high = _heads(  # before `leads` is known, so that it isn't waited for
        ptr, token, stride_t, stride_h, 0, K, norm_ptr, eps, cos_ptr, sin_ptr, stride_rope,
        ROWS, D, HALF, HALF_P, NORM, ROPE,
    )  # fmt: skip
    low = low.to(ptr.dtype.element_ty).to(tl.float32)
    high = high.to(ptr.dtype.element_ty).to(tl.float32)
    if leads:
        if not STATIC:
            largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1)
            more = (entry >= 0) & (tl.load(entry_ptr + end, mask=end < num_tokens, other=-2) == entry)
            while more:
                x_low, x_high = _heads(
                    ptr, end, stride_t, stride_h, 0, K, norm_ptr, eps, cos_ptr, sin_ptr, stride_rope,
                    ROWS, D, HALF, HALF_P, NORM, ROPE,
                )  # fmt: skip
                x_low = x_low.to(ptr.dtype.element_ty).to(tl.float32)
                x_high = x_high.to(ptr.dtype.element_ty).to(tl.float32)
                largest = tl.maximum(largest, tl.max(tl.maximum(tl.abs(x_low), tl.abs(x_high)), 1))
                end += 1
                more = tl.load(entry_ptr + end, mask=end < num_tokens, other=-2) == entry
            scale = grown_scale(old, largest, FP8_MAX)
            if entry >= 0:
                grown = scale > old
                if tl.max(grown.to(tl.int32), 0) > 0:
                    if tl.max((grown & (old > 0)).to(tl.int32), 0) > 0:
                        factor = tl.math.div_rn(old, tl.where(scale > 0, scale, 1.0))
                        _rescale_page(
                            page_ptr + entry * page_se, page_ss, page_sh, factor, K,
                            PAGE, SLOTS, ROWS, D, HALF, HALF_P, FP8, FP8_MAX,
                        )  # fmt: skip
                        tl.debug_barrier()
                    tl.store(scale_ptr + entry * scale_se, scale, mask=grown & (head < K))
        _put_quantised(
            ptr, stride_t, stride_h, page_ptr, page_se, page_ss, page_sh, entry, offset_ptr, token, low, high, scale, K,
            ROWS, D, HALF, HALF_P, FP8, FP8_MAX,
        )  # fmt: skip
        for t in range(token + 1, end):
            x_low, x_high = _heads(
                ptr, t, stride_t, stride_h, 0, K, norm_ptr, eps, cos_ptr, sin_ptr, stride_rope,
                ROWS, D, HALF, HALF_P, NORM, ROPE,
            )  # fmt: skip
            _put_quantised(
                ptr, stride_t, stride_h, page_ptr, page_se, page_ss, page_sh, entry, offset_ptr, t, x_low, x_high,
                scale, K, ROWS, D, HALF, HALF_P, FP8, FP8_MAX,
            )  # fmt: skip


@triton.jit
def _store_token(
    ptr, stride_t, stride_h, page_ptr, page_se, page_ss, page_sh, norm_ptr, eps, cos_ptr, sin_ptr, stride_rope,
    entry_ptr, offset_ptr, token, K,
    ROWS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, NORM: tl.constexpr,
    ROPE: tl.constexpr,
):  # fmt: skip
    low, high = _heads(
        ptr, token, stride_t, stride_h, 0, K, norm_ptr, eps, cos_ptr, sin_ptr, stride_rope,
        ROWS, D, HALF, HALF_P, NORM, ROPE,
    )  # fmt: skip
    low = low.to(ptr.dtype.element_ty).to(page_ptr.dtype.element_ty)
    high = high.to(ptr.dtype.element_ty).to(page_ptr.dtype.element_ty)
    entry = tl.load(entry_ptr + token)
    if entry >= 0:
        slot = page_ptr + entry * page_se + tl.load(offset_ptr + token) * page_ss
        _put(slot, low, high, K, page_sh, ROWS, D, HALF, HALF_P)
    if NORM or ROPE or (ptr.dtype.element_ty != page_ptr.dtype.element_ty):
        own = ptr + tl.cast(token, tl.int64) * stride_t
        _put(own, low.to(ptr.dtype.element_ty), high.to(ptr.dtype.element_ty), K, stride_h, ROWS, D, HALF, HALF_P)


@triton.jit(do_not_specialize=["num_tokens"])
def _prepare_kernel(
    q_ptr, q_st, q_sh, k_ptr, k_st, k_sh, v_ptr, v_st, v_sh,
    cos_ptr, sin_ptr, stride_rope, q_norm_ptr, k_norm_ptr, eps,
    kp_ptr, kp_se, kp_ss, kp_sh, vp_ptr, vp_se, vp_ss, vp_sh, scales_ptr, scales_se,
    entry_ptr, offset_ptr, num_tokens,
    H: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, QUERY_BLOCK: tl.constexpr, PAGE: tl.constexpr,
    SLOTS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr,
    DV: tl.constexpr, HALF_V: tl.constexpr, HALF_VP: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr, STATIC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    part = tl.program_id(1)
    if part >= 2:
        first = (part - 2) * QUERY_BLOCK
        count = tl.minimum(H - first, QUERY_BLOCK)
        low, high = _heads(
            q_ptr, token, q_st, q_sh, first, count, q_norm_ptr, eps, cos_ptr, sin_ptr, stride_rope,
            QUERY_BLOCK, D, HALF, HALF_P, NORM, ROPE,
        )  # fmt: skip
        at = q_ptr + tl.cast(token, tl.int64) * q_st + first * q_sh
        _put(at, low, high, count, q_sh, QUERY_BLOCK, D, HALF, HALF_P)
    elif FP8 is None:
        if part == 0:
            _store_token(
                k_ptr, k_st, k_sh, kp_ptr, kp_se, kp_ss, kp_sh, k_norm_ptr, eps, cos_ptr, sin_ptr, stride_rope,
                entry_ptr, offset_ptr, token, K, ROWS, D, HALF, HALF_P, NORM, ROPE,
            )  # fmt: skip
        else:
            _store_token(
                v_ptr, v_st, v_sh, vp_ptr, vp_se, vp_ss, vp_sh, k_norm_ptr, eps, cos_ptr, sin_ptr, stride_rope,
                entry_ptr, offset_ptr, token, K, ROWS, DV, HALF_V, HALF_VP, False, False,
            )  # fmt: skip
    elif part == 0:
        _store_page_tokens(
            k_ptr, k_st, k_sh, kp_ptr, kp_se, kp_ss, kp_sh, scales_ptr, scales_se, k_norm_ptr, eps,
            cos_ptr, sin_ptr, stride_rope, entry_ptr, offset_ptr, token, num_tokens, K,
            ROWS, D, HALF, HALF_P, NORM, ROPE, FP8, FP8_MAX, PAGE, SLOTS, STATIC,
        )  # fmt: skip
    else:
        _store_page_tokens(
            v_ptr, v_st, v_sh, vp_ptr, vp_se, vp_ss, vp_sh, scales_ptr + K, scales_se, k_norm_ptr, eps,
            cos_ptr, sin_ptr, stride_rope, entry_ptr, offset_ptr, token, num_tokens, K,
            ROWS, DV, HALF_V, HALF_VP, False, False, FP8, FP8_MAX, PAGE, SLOTS, STATIC,
        )  # fmt: skip


def fp8_type(dtype: torch.dtype) -> tl.dtype | None:
    """Triton's name of an fp8 dtype; None for other dtypes."""
    return {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}.get(dtype)


def _launch(
    q: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    prep: HeadPrep | None,
    pages: PagedKV,
    write_entry_T: torch.Tensor,
    write_offset_T: torch.Tensor,
) -> None:
    num_tokens, num_kv_heads, dim = k.shape
    dim_v = v.shape[2]
    if num_tokens == 0:
        return
    num_heads = 0 if q is None else q.shape[1]
    fp8 = fp8_type(pages.k.dtype)
    kp, vp = (x if fp8 is None else x.view(torch.uint8) for x in (pages.k, pages.v))
    scales = k if pages.scales is None else pages.scales
    norm = prep is not None and prep.q_norm_D is not None
    q_norm, k_norm = (prep.q_norm_D, prep.k_norm_D) if prep is not None and norm else (k, k)
    cos, sin = (k, k) if prep is None else prep.angles
    query_block = min(_QUERY_BLOCK, padded(max(num_heads, 1)))
    page = pages.k.shape[1]
    slots = max(1, min(padded(page), _RESCALED // (padded(num_kv_heads) * padded(max(dim, dim_v)))))
    half, half_v = (dim + 1) // 2, (dim_v + 1) // 2
    _prepare_kernel[(num_tokens, 2 + blocks(num_heads, query_block))](
        k if q is None else q, *((0, 0) if q is None else q.stride()[:2]), k, *k.stride()[:2], v, *v.stride()[:2],
        cos, sin, cos.stride(0), q_norm, k_norm, 0.0 if prep is None else prep.eps,
        kp, *kp.stride()[:3], vp, *vp.stride()[:3], scales, scales.stride(0),
        write_entry_T, write_offset_T, num_tokens,
        num_heads, num_kv_heads, padded(num_kv_heads), query_block, page, slots,
        dim, half, padded(half), dim_v, half_v, padded(half_v),
        norm, prep is not None, fp8, FP8_MAX.get(pages.k.dtype, 0.0), pages.static,
        num_warps=2 if num_kv_heads * dim <= 1024 else 4, **dependent(k.device),
    )  # fmt: skip


def store_kv_(
    k_TKD: torch.Tensor,
    v_TKV: torch.Tensor,
    pages: PagedKV,
    write_entry_T: torch.Tensor,
    write_offset_T: torch.Tensor,
) -> None:
    """See the twin."""
    _launch(None, k_TKD, v_TKV, None, pages, write_entry_T, write_offset_T)


def prepare_heads_(
    qkv_TND: torch.Tensor,
    prep: HeadPrep,
    pages: PagedKV,
    write_entry_T: torch.Tensor,
    write_offset_T: torch.Tensor,
) -> None:
    """See the twin."""
    _launch(*prep.split(qkv_TND), prep, pages, write_entry_T, write_offset_T)
