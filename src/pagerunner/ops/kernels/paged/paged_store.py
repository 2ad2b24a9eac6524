"""Heads of a projection's output, prepared and stored into pages: norm, rotary positions, page write, fp8.

Program (t, part) has part 0: token t's keys, part 1: its values, others: some of its query heads. A head is handled as
two halves, which are the pairs that rotate. Keys and values for fp8 pages with scales of their own are `paged_runs`' work.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.batch import KVPages, WritePlaces
from pagerunner.ops.kernels.launch import blocks, dependent, padded, start_next_and_wait
from pagerunner.ops.kernels.linear.linear_parts import NO_NORM
from pagerunner.ops.kernels.paged.paged_heads import FP8_MAX, divided, fp8_type, head_norm, normed, turned
from pagerunner.ops.kernels.paged.paged_runs import store_runs_
from pagerunner.ops.paged_attention import HeadPrep

_QUERY_BLOCK = 16  # query heads of one program
_SMALL_QUERY_BLOCK = 32  # if a head has at most _SMALL_HEAD elements
_SMALL_HEAD = 64


@triton.jit
def _heads(
    source, token, first, count, prep,
    ROWS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Heads [first, first + count) of a token, normed and rotated: two halves [ROWS, HALF_P] float32.

    `source`: a projection's output, and its strides by token and by head. `prep`: the norm's weight, its epsilon, and the angles.
    """
    ptr, stride_t, stride_h = source
    norm_ptr, eps, cos_ptr, sin_ptr, stride_rope = prep
    head = first + tl.arange(0, ROWS)
    d = tl.arange(0, HALF_P)
    there = (head < first + count)[:, None]
    low_mask = there & (d < HALF)[None, :]
    high_mask = there & (d < D - HALF)[None, :]
    at = ptr + tl.cast(token, tl.int64) * stride_t + head[:, None] * stride_h + d[None, :]
    low = tl.load(at, mask=low_mask, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=high_mask, other=0.0).to(tl.float32)
    if NORM != NO_NORM:
        low, high = normed(low, high, norm_ptr, eps, D, HALF, HALF_P, NORM)
    if ROPE:
        angle = tl.cast(token, tl.int64) * stride_rope + d
        cos_low = tl.load(cos_ptr + angle, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
        cos_high = tl.load(cos_ptr + angle + HALF, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
        sin_low = tl.load(sin_ptr + angle, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
        sin_high = tl.load(sin_ptr + angle + HALF, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
        low, high = turned(low, high, cos_low, cos_high, sin_low, sin_high)
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
def _store_token(
    source, page, prep, scale_ptr, entry_ptr, offset_ptr, token, K,
    ROWS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, NORM: tl.constexpr,
    ROPE: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr,
):  # fmt: skip
    """Store a token's heads into its page, if it has a page; and back to where they came from, rounded as the page holds them.

    `page`: all pages, and their strides by entry, slot and head. In fp8 the checkpoint has a scale for each of the layer's heads.
    """
    ptr, stride_t, stride_h = source
    page_ptr, page_se, page_ss, page_sh = page
    dtype: tl.constexpr = ptr.dtype.element_ty
    if FP8 is not None:
        head = tl.arange(0, ROWS)
        scale = tl.load(scale_ptr + head, mask=head < K, other=0.0)
    low, high = _heads(source, token, 0, K, prep, ROWS, D, HALF, HALF_P, NORM, ROPE)
    entry = tl.load(entry_ptr + token)
    low, high = low.to(dtype), high.to(dtype)
    if FP8 is None:
        low, high = low.to(page_ptr.dtype.element_ty), high.to(page_ptr.dtype.element_ty)
    else:
        low = divided(low.to(tl.float32), scale[:, None], FP8_MAX, FP8)
        high = divided(high.to(tl.float32), scale[:, None], FP8_MAX, FP8)
    if entry >= 0:
        slot = page_ptr + entry * page_se + tl.load(offset_ptr + token) * page_ss
        if FP8 is None:
            _put(slot, low, high, K, page_sh, ROWS, D, HALF, HALF_P)
        else:
            codes_low, codes_high = low.to(tl.uint8, bitcast=True), high.to(tl.uint8, bitcast=True)
            _put(slot, codes_low, codes_high, K, page_sh, ROWS, D, HALF, HALF_P)
    own = ptr + tl.cast(token, tl.int64) * stride_t
    if FP8 is not None:
        low, high = low.to(tl.float32) * scale[:, None], high.to(tl.float32) * scale[:, None]
        _put(own, low, high, K, stride_h, ROWS, D, HALF, HALF_P)
    elif NORM != NO_NORM or ROPE or (dtype != page_ptr.dtype.element_ty):
        _put(own, low.to(dtype), high.to(dtype), K, stride_h, ROWS, D, HALF, HALF_P)


@triton.jit
def _prepare_kernel(
    q_ptr, q_st, q_sh, k_ptr, k_st, k_sh, v_ptr, v_st, v_sh,
    cos_ptr, sin_ptr, stride_rope, q_norm_ptr, k_norm_ptr, eps,
    kp_ptr, kp_se, kp_ss, kp_sh, vp_ptr, vp_se, vp_ss, vp_sh, scales_ptr,
    entry_ptr, offset_ptr,
    H: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, QUERY_BLOCK: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr,
    DV: tl.constexpr, HALF_V: tl.constexpr, HALF_VP: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr,
    QUERIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """With QUERIES, only these."""
    start_next_and_wait(PDL)
    # a token's parts are adjacent: they lie side by side in memory, and have the same angles
    PARTS: tl.constexpr = (H + QUERY_BLOCK - 1) // QUERY_BLOCK + (0 if QUERIES else 2)
    token = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS + (2 if QUERIES else 0)
    k_prep = (k_norm_ptr, eps, cos_ptr, sin_ptr, stride_rope)
    if part >= 2:
        first = (part - 2) * QUERY_BLOCK
        count = tl.minimum(H - first, QUERY_BLOCK)
        low, high = _heads(
            (q_ptr, q_st, q_sh), token, first, count, (q_norm_ptr, eps, cos_ptr, sin_ptr, stride_rope),
            QUERY_BLOCK, D, HALF, HALF_P, NORM, ROPE,
        )  # fmt: skip
        at = q_ptr + tl.cast(token, tl.int64) * q_st + first * q_sh
        _put(at, low, high, count, q_sh, QUERY_BLOCK, D, HALF, HALF_P)
    elif part == 0:
        _store_token(
            (k_ptr, k_st, k_sh), (kp_ptr, kp_se, kp_ss, kp_sh), k_prep, scales_ptr, entry_ptr, offset_ptr,
            token, K, ROWS, D, HALF, HALF_P, NORM, ROPE, FP8, FP8_MAX,
        )  # fmt: skip
    else:
        _store_token(
            (v_ptr, v_st, v_sh), (vp_ptr, vp_se, vp_ss, vp_sh), k_prep, scales_ptr + K, entry_ptr, offset_ptr,
            token, K, ROWS, DV, HALF_V, HALF_VP, False, False, FP8, FP8_MAX,
        )  # fmt: skip


def prepare_split_heads_(
    q: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, prep: HeadPrep | None, pages: KVPages, write: WritePlaces
) -> None:
    """`prepare_heads_` of queries, keys and values, or without `prep` `store_kv_`."""
    num_tokens, num_kv_heads, dim = k.shape
    dim_v = v.shape[2]
    if num_tokens == 0:
        return
    num_heads = 0 if q is None else q.shape[1]
    runs = pages.scales is not None and not pages.static
    if runs:
        store_runs_(k, v, prep, pages, write)
        if q is None:
            return
    fp8 = fp8_type(pages.k.dtype)
    kp, vp = (x if fp8 is None else x.view(torch.uint8) for x in (pages.k, pages.v))
    scales = k if pages.scales is None else pages.scales
    norm = head_norm(prep)
    q_norm, k_norm = (prep.q_norm_D, prep.k_norm_D) if prep is not None and norm else (k, k)
    cos, sin = (k, k) if prep is None else prep.angles
    query_block = min(_SMALL_QUERY_BLOCK if dim <= _SMALL_HEAD else _QUERY_BLOCK, padded(max(num_heads, 1)))
    half, half_v = (dim + 1) // 2, (dim_v + 1) // 2
    _prepare_kernel[(num_tokens * (blocks(num_heads, query_block) + (0 if runs else 2)),)](
        k if q is None else q, *((0, 0) if q is None else q.stride()[:2]), k, *k.stride()[:2], v, *v.stride()[:2],
        cos, sin, cos.stride(0), q_norm, k_norm, 0.0 if prep is None else prep.eps,
        kp, *kp.stride()[:3], vp, *vp.stride()[:3], scales,
        *write,
        num_heads, num_kv_heads, padded(num_kv_heads), query_block, dim, half, padded(half), dim_v, half_v, padded(half_v),
        norm, prep is not None, fp8, FP8_MAX.get(pages.k.dtype, 0.0), runs,
        num_warps=4, **dependent(k.device),
    )  # fmt: skip


def store_kv_(k_TKD: torch.Tensor, v_TKV: torch.Tensor, pages: KVPages, write: WritePlaces) -> None:
    """See the twin."""
    prepare_split_heads_(None, k_TKD, v_TKV, None, pages, write)


def prepare_heads_(qkv_TND: torch.Tensor, prep: HeadPrep, pages: KVPages, write: WritePlaces) -> None:
    """See the twin."""
    prepare_split_heads_(*prep.split(qkv_TND), prep, pages, write)
