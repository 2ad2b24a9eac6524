"""The step's own tokens in decode attention: prepares their heads, scores their keys, and stores their keys and values.

A program that has the token of a row reads its key and value from the projection, since its page may not hold them yet. With
fp8 pages it also writes them, and converts what the page held if the head's scale grows. Shape letters: see
`kernels.paged_decode`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagerunner.ops.kernels.linear.linear_parts import NO_NORM, norm_weight
from pagerunner.ops.kernels.paged.paged_heads import divided, grown_scale
from pagerunner.ops.kernels.paged.paged_tiles import LOG2E, softcapped


@triton.jit
def prepared(
    at, mask, norm_ptr, angle, cos_ptr, sin_ptr, eps, D: tl.constexpr, DP: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """Heads [rows, DP] from `at` [rows, 1], normed and rotated, float32.

    Each element is rotated with its pair's other element.
    """
    d = tl.arange(0, DP)
    other = (d + D // 2) % D
    inside = (d < D)[None, :]
    x = tl.load(at + d[None, :], mask=mask & inside, other=0.0).to(tl.float32)
    pair = tl.load(at + other[None, :], mask=mask & inside, other=0.0).to(tl.float32)
    if NORM != NO_NORM:
        inverse = tl.math.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = x * inverse * norm_weight(norm_ptr, d, d < D, NORM)[None, :]
        pair = pair * inverse * norm_weight(norm_ptr, other, d < D, NORM)[None, :]
    cos = tl.load(cos_ptr + angle + d, mask=d < D, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle + d, mask=d < D, other=0.0).to(tl.float32)
    return x * cos[None, :] + pair * sin[None, :]


@triton.jit
def _score(wide_q, key, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores [M] of queries [M, DP] and one key [DP]."""
    score = tl.sum(wide_q * key[None, :], 1) * scale
    if SOFTCAP:
        score = softcapped(score, softcap)
    return score * LOG2E


@triton.jit
def own_value(
    wide_q, k_at, v_at, angle, cos_ptr, sin_ptr, k_norm_ptr, eps, entry_ptr, offset_ptr, token, pages, scale, softcap,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    FUSED: tl.constexpr, NORM: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The token's own score, [M], and its value, [DVP], as pages hold them; FUSED stores both."""
    kp_ptr, kp_se, kp_ss, vp_ptr, vp_se, vp_ss = pages
    d = tl.arange(0, DP)
    dv = tl.arange(0, DVP)
    v = tl.load(v_at + dv, mask=dv < DV, other=0.0)
    if FUSED:
        one = tl.arange(0, 1)[:, None]
        k = prepared(k_at + one, one == 0, k_norm_ptr, angle, cos_ptr, sin_ptr, eps, D, DP, NORM)
        k = k.to(k_at.dtype.element_ty).to(kp_ptr.dtype.element_ty)
        v = v.to(vp_ptr.dtype.element_ty)
        entry = tl.load(entry_ptr + token)
        if entry >= 0:
            inside = tl.load(offset_ptr + token)
            tl.store(kp_ptr + entry * kp_se + inside * kp_ss + d[None, :], k, mask=(d < D)[None, :])
            tl.store(vp_ptr + entry * vp_se + inside * vp_ss + dv, v, mask=dv < DV)
        k = tl.sum(k.to(tl.float32), 0)
    else:
        k = tl.load(k_at + d, mask=d < D, other=0.0).to(tl.float32)
    return _score(wide_q, k, scale, softcap, SOFTCAP), v.to(tl.float32)


@triton.jit
def _own_codes(
    k_at, v_at, angle, cos_ptr, sin_ptr, k_norm_ptr, eps, scale_ptr, entry,
    K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    NORM: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """A token's key [DP] and value [DVP] of one head in fp8, and the head's scales in its page: before and with the token."""
    dv = tl.arange(0, DVP)
    one = tl.arange(0, 1)[:, None]
    key = prepared(k_at + one, one == 0, k_norm_ptr, angle, cos_ptr, sin_ptr, eps, D, DP, NORM)
    key = tl.sum(key.to(k_at.dtype.element_ty).to(tl.float32), 0)
    value = tl.load(v_at + dv, mask=dv < DV, other=0.0).to(tl.float32)
    if STATIC:
        old_k = tl.load(scale_ptr)
        old_v = tl.load(scale_ptr + K)
        new_k, new_v = old_k, old_v
    else:
        old_k = tl.load(scale_ptr, mask=entry >= 0, other=0.0)
        old_v = tl.load(scale_ptr + K, mask=entry >= 0, other=0.0)
        new_k = grown_scale(old_k, tl.max(tl.abs(key), 0), FP8_MAX)
        new_v = grown_scale(old_v, tl.max(tl.abs(value), 0), FP8_MAX)
    return divided(key, new_k, FP8_MAX, FP8), divided(value, new_v, FP8_MAX, FP8), old_k, new_k, old_v, new_v


@triton.jit
def _store_code(
    page_ptr, stride_s, code, inside, old, new, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    PAGE_P: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """A head's vector into slot `inside` of a page, whose earlier slots are converted if its scale has grown."""
    d = tl.arange(0, DP)
    if not STATIC:
        if (new > old) & (old > 0):
            slot = tl.arange(0, PAGE_P)
            at = page_ptr + slot[:, None] * stride_s + d[None, :]
            mask = (slot < inside)[:, None] & (d < D)[None, :]
            held = tl.load(at, mask=mask, other=0).to(FP8, bitcast=True).to(tl.float32) * tl.math.div_rn(old, new)
            held = tl.minimum(tl.maximum(held, -FP8_MAX), FP8_MAX).to(FP8)
            tl.store(at, held.to(tl.uint8, bitcast=True), mask=mask)
    tl.store(page_ptr + inside * stride_s + d, code.to(tl.uint8, bitcast=True), mask=d < D)


@triton.jit
def with_own_code(
    wide_q, highest, total, acc, k_at, v_at, angle, cos_ptr, sin_ptr, k_norm_ptr, eps, entry, inside, pages, scales_ptr, scales_se,
    scale, softcap,
    K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, PAGE: tl.constexpr,
    PAGE_P: tl.constexpr, NORM: tl.constexpr, SOFTCAP: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr,
    STATIC: tl.constexpr,
):  # fmt: skip
    """Merge the token's own key and value, rounded as pages hold them, with the result over the pages.

    Both are also stored in the token's page.
    """
    kp_ptr, kp_se, kp_ss, vp_ptr, vp_se, vp_ss = pages
    scale_ptr = scales_ptr + entry * scales_se
    k_code, v_code, old_k, new_k, old_v, new_v = _own_codes(
        k_at, v_at, angle, cos_ptr, sin_ptr, k_norm_ptr, eps, scale_ptr, entry,
        K, D, DP, DV, DVP, NORM, FP8, FP8_MAX, STATIC,
    )  # fmt: skip
    if entry >= 0:
        tl.debug_barrier()  # the whole program has read the page
        k_page, v_page = kp_ptr + entry * kp_se, vp_ptr + entry * vp_se
        _store_code(k_page, kp_ss, k_code, inside, old_k, new_k, D, DP, PAGE, PAGE_P, FP8, FP8_MAX, STATIC)
        _store_code(v_page, vp_ss, v_code, inside, old_v, new_v, DV, DVP, PAGE, PAGE_P, FP8, FP8_MAX, STATIC)
        if not STATIC:
            tl.store(scale_ptr, new_k)
            tl.store(scale_ptr + K, new_v)
    key = (k_code.to(tl.float32) * new_k).to(k_at.dtype.element_ty).to(tl.float32)
    value = (v_code.to(tl.float32) * new_v).to(v_at.dtype.element_ty).to(tl.float32)
    score = _score(wide_q, key, scale, softcap, SOFTCAP)
    new = tl.maximum(highest, score)
    shrink = tl.math.exp2(highest - new)
    weight = tl.math.exp2(score - new)
    return new, total * shrink + weight, acc * shrink[:, None] + weight[:, None] * value[None, :]
