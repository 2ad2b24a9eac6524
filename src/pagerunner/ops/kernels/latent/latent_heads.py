"""From a projection's raw output to latent attention's queries and stored vectors, in one launch. Twins: `ops/latent_heads.py`.

Rounding is that of separate kernels: each step's result is rounded to the model's dtype. Shape letters: see the twins; BT tokens
and BC latent elements of a program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pagerunner.batch import WritePlaces
from pagerunner.ops.kernels.latent.latent_store import page_arguments, page_scale, page_sizes, scale_stride
from pagerunner.ops.kernels.launch import blocks, dependent, padded, start_next, wait_turn
from pagerunner.ops.kernels.paged.paged_heads import magnitude, quantise
from pagerunner.ops.latent_heads import LatentPrep


@triton.jit
def _turn(row, angles, tokens, real, HALF: tl.constexpr, HP: tl.constexpr, PAIRS: tl.constexpr):
    """Rotated rotary parts at `row` [X, 1] of `tokens` [X], of which some are `real`: places of their elements [1, 2 HP], which of
    them exist [X, 2 HP], and what they become [X, 2 HP].

    Elements are read and written as they lie, and are taken apart into pairs in registers.
    """
    X: tl.constexpr = tokens.shape[0]
    cos_ptr, sin_ptr, angle_token = angles
    dtype = row.dtype.element_ty
    at, half_P = tl.arange(0, 2 * HP), tl.arange(0, HP)
    if PAIRS:
        inside = real[:, None] & (at < 2 * HALF)[None, :]
    else:
        inside = real[:, None] & (at % HP < HALF)[None, :]
        at = tl.where(at < HP, at, at - HP + HALF)
    angle = tokens.to(tl.int64)[:, None] * angle_token + half_P[None, :]
    mask = real[:, None] & (half_P < HALF)[None, :]
    cos = tl.load(cos_ptr + angle, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle + HALF, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(row + at[None, :], mask=inside, other=0.0).to(tl.float32)
    if PAIRS:
        first, second = tl.split(tl.reshape(x, (X, HP, 2)))
    else:
        first, second = tl.split(tl.permute(tl.reshape(x, (X, 2, HP)), (0, 2, 1)))
    crossed = second * sin
    if PAIRS:
        crossed = crossed.to(dtype).to(tl.float32)
    both = tl.join(
        (first * cos).to(dtype).to(tl.float32) - crossed, (second * cos).to(dtype).to(tl.float32) + first * sin
    )
    if not PAIRS:
        both = tl.permute(both, (0, 2, 1))
    return at[None, :], inside, tl.reshape(both, (X, 2 * HP)).to(dtype)


@triton.jit
def _absorb(
    q_ptr, keys_ptr, out_ptr, angles, program, num_tokens, num_heads, q_token, q_head, keys_head, out_token, out_head,
    N: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, NP: tl.constexpr, HP: tl.constexpr, BT: tl.constexpr,
    BC: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BC latent elements of BT tokens' queries of one head. The first such program also rotates these queries."""
    parts: tl.constexpr = (C + BC - 1) // BC
    part, head = program % parts, (program // parts) % num_heads
    tokens = program // (parts * num_heads) * BT + tl.arange(0, BT)
    there = tokens < num_tokens
    n, c = tl.arange(0, NP), part * BC + tl.arange(0, BC)
    keys_at = keys_ptr + head.to(tl.int64) * keys_head + n[:, None] * C + c[None, :]
    keys = tl.load(keys_at, mask=(n < N)[:, None] & (c < C)[None, :], other=0.0)
    wait_turn(PDL)
    start_next(PDL)  # `sparse_latents._absorb_kernel` hasn't until now
    row = q_ptr + tokens.to(tl.int64)[:, None] * q_token + head * q_head
    q = tl.load(row + n[None, :], mask=there[:, None] & (n < N)[None, :], other=0.0)
    if BT < 16:
        carried = tl.sum(q.to(tl.float32)[:, :, None] * keys.to(tl.float32)[None, :, :], 1)
    else:
        carried = tl.dot(q, keys, input_precision=PRECISION)
    out = out_ptr + tokens.to(tl.int64)[:, None] * out_token + head.to(tl.int64) * out_head + c[None, :]
    tl.store(out, carried.to(out_ptr.dtype.element_ty), mask=there[:, None] & (c < C)[None, :])
    if part == 0:
        at, inside, turned = _turn(row + N, angles, tokens, there, HALF, HP, PAIRS)
        tl.debug_barrier()  # the whole program has read them
        tl.store(row + N + at, turned, mask=inside)


@triton.jit
def _ready(
    vectors, weight, angles, token, eps,
    C: tl.constexpr, HALF: tl.constexpr, CP: tl.constexpr, HP: tl.constexpr, PAIRS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """One token's vector, ready to be stored: its latent [CP]; of its rotary part [1, 2 HP] places, which exist, and elements."""
    c, one = tl.arange(0, CP), tl.arange(0, 1)
    vectors_ptr, vector_token = vectors
    dtype = vectors_ptr.dtype.element_ty
    row = vectors_ptr + token.to(tl.int64) * vector_token
    x = tl.load(row + c, mask=c < C, other=0.0).to(tl.float32)
    x *= 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) * (1.0 / C) + eps)
    if OFFSET:
        x = (x + x * weight).to(dtype)
    else:
        x = (x.to(dtype).to(tl.float32) * weight).to(dtype)
    at, inside, turned = _turn(row + C + one[:, None], angles, token + one, one == 0, HALF, HP, PAIRS)
    return x, at, inside, turned


@triton.jit
def _store_run(
    vectors, weight, angles, pages, places, token, entry, num_tokens, eps,
    C: tl.constexpr, HALF: tl.constexpr, CP: tl.constexpr, HP: tl.constexpr, PAIRS: tl.constexpr, OFFSET: tl.constexpr,
    PAGE: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """All of the step's tokens of an fp8 page at once. They begin with `token`, and are at most RUN."""
    c = tl.arange(0, CP)[None, :]
    vectors_ptr, vector_token = vectors
    pages_ptr, page_stride, slot_stride, scales_ptr, scale_stride = pages
    entry_ptr, offset_ptr = places
    dtype = vectors_ptr.dtype.element_ty
    tokens = token + tl.arange(0, RUN)
    there = tl.load(entry_ptr + tokens, mask=tokens < num_tokens, other=-1) == entry
    mask = there[:, None] & (c < C)
    row = vectors_ptr + tokens.to(tl.int64)[:, None] * vector_token
    x = tl.load(row + c, mask=mask, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) * (1.0 / C) + eps)
    x *= tl.where(there, inverse, 0.0)[:, None]
    if OFFSET:
        x = x + x * weight[None, :]
    else:
        x = x.to(dtype).to(tl.float32) * weight[None, :]
    x = x.to(dtype).to(tl.float32)
    at, inside, turned = _turn(row + C, angles, tokens, there, HALF, HP, PAIRS)
    turned = tl.where(inside, turned.to(tl.float32), 0.0)
    largest = tl.maximum(tl.max(tl.max(magnitude(x), 1), 0), tl.max(tl.max(magnitude(turned), 1), 0))
    page = pages_ptr + entry * page_stride
    scale = page_scale(page, scales_ptr + entry * scale_stride, slot_stride, largest, C + 2 * HALF, PAGE, FP8, FP8_MAX)
    slot = page + tl.load(offset_ptr + tokens, mask=there, other=0)[:, None] * slot_stride
    tl.store(slot + c, quantise(x, scale, FP8_MAX, FP8).to(tl.uint8, bitcast=True), mask=mask)
    codes = quantise(turned, scale, FP8_MAX, FP8).to(tl.uint8, bitcast=True)
    tl.store(slot + C + at, codes, mask=inside)


@triton.jit
def _vector(
    vectors, norm_ptr, angles, pages, places, token, num_tokens, eps,
    C: tl.constexpr, HALF: tl.constexpr, CP: tl.constexpr, HP: tl.constexpr, PAIRS: tl.constexpr, OFFSET: tl.constexpr,
    PAGE: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr, RUN: tl.constexpr, KEEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token's vector into its page. KEEP: it also replaces the raw one.

    Into fp8 pages go all of the step's tokens of a page, if this is the first of them, because they decide its scale together.
    They don't replace the raw ones. RUN: at once, because no page gets more of them; 1: one after another.

    `vectors`: where they are and their stride. `angles`: cosines, sines and their stride. `pages`: where they are, strides of entries and slots, and where
    scales are and their stride. `places`: entries and offsets of all tokens.
    """
    c, one = tl.arange(0, CP), tl.arange(0, 1)
    pages_ptr, page_stride, slot_stride, scales_ptr, scale_stride = pages
    entry_ptr, offset_ptr = places
    weight = tl.load(norm_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    wait_turn(PDL)
    entry = tl.load(entry_ptr + token)
    if FP8 is None:
        x, at, inside, turned = _ready(vectors, weight, angles, token, eps, C, HALF, CP, HP, PAIRS, OFFSET)
        if KEEP:
            vectors_ptr, vector_token = vectors
            row = vectors_ptr + token.to(tl.int64) * vector_token
            tl.debug_barrier()  # the whole program has read the raw vector
            tl.store(row + c, x, mask=c < C)
            tl.store(row + C + one[:, None] + at, turned, mask=inside)
        if entry >= 0:
            slot = pages_ptr + entry * page_stride + tl.load(offset_ptr + token) * slot_stride
            held = pages_ptr.dtype.element_ty
            tl.store(slot + c, x.to(held), mask=c < C)
            tl.store(slot + C + one[:, None] + at, turned.to(held), mask=inside)
    else:
        before = tl.load(entry_ptr + token - 1, mask=token > 0, other=-1)
        begins = (entry >= 0) & (entry != before)
        if RUN > 1:
            if begins:
                _store_run(
                    vectors, weight, angles, pages, places, token, entry, num_tokens, eps,
                    C, HALF, CP, HP, PAIRS, OFFSET, PAGE, FP8, FP8_MAX, RUN,
                )  # fmt: skip
        elif begins:
            largest = 0.0
            end = token
            following = entry
            while following == entry:
                x, at, inside, turned = _ready(vectors, weight, angles, end, eps, C, HALF, CP, HP, PAIRS, OFFSET)
                latent = tl.max(magnitude(x.to(tl.float32)), 0)
                rotary = tl.max(tl.max(magnitude(turned.to(tl.float32)), 1), 0)
                largest = tl.maximum(largest, tl.maximum(latent, rotary))
                end += 1
                following = tl.load(entry_ptr + end, mask=end < num_tokens, other=-1)
            page = pages_ptr + entry * page_stride
            scale = page_scale(
                page, scales_ptr + entry * scale_stride, slot_stride, largest, C + 2 * HALF, PAGE, FP8, FP8_MAX
            )
            each = token
            while each < end:
                x, at, inside, turned = _ready(vectors, weight, angles, each, eps, C, HALF, CP, HP, PAIRS, OFFSET)
                slot = page + tl.load(offset_ptr + each) * slot_stride
                codes = quantise(x.to(tl.float32), scale, FP8_MAX, FP8).to(tl.uint8, bitcast=True)
                tl.store(slot + c, codes, mask=c < C)
                codes = quantise(turned.to(tl.float32), scale, FP8_MAX, FP8).to(tl.uint8, bitcast=True)
                tl.store(slot + C + one[:, None] + at, codes, mask=inside)
                each += 1


@triton.jit(do_not_specialize=["num_tokens", "absorbing"])
def _absorb_kernel(
    q_ptr, vectors_ptr, norm_ptr, cos_ptr, sin_ptr, keys_ptr, out_ptr, pages_ptr, scales_ptr, entry_ptr,
    offset_ptr, num_tokens, num_heads, absorbing, eps, q_token, q_head, vector_token, keys_head, out_token, out_head,
    page_stride, slot_stride, scale_stride, angle_token,
    N: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, NP: tl.constexpr, CP: tl.constexpr, HP: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, PAIRS: tl.constexpr, OFFSET: tl.constexpr, PAGE: tl.constexpr,
    FP8: tl.constexpr, FP8_MAX: tl.constexpr, RUN: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`absorbing` programs for queries, then one for each token's vector."""
    start_next(PDL)
    program = tl.program_id(0)
    angles = (cos_ptr, sin_ptr, angle_token)
    if program < absorbing:
        _absorb(
            q_ptr, keys_ptr, out_ptr, angles, program, num_tokens, num_heads, q_token, q_head, keys_head,
            out_token, out_head, N, C, HALF, NP, HP, BT, BC, PAIRS, PRECISION, PDL,
        )  # fmt: skip
    else:
        pages = (pages_ptr, page_stride, slot_stride, scales_ptr, scale_stride)
        _vector(
            (vectors_ptr, vector_token), norm_ptr, angles, pages, (entry_ptr, offset_ptr), program - absorbing, num_tokens, eps,
            C, HALF, CP, HP, PAIRS, OFFSET, PAGE, FP8, FP8_MAX, RUN, False, PDL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "num_heads"])
def _prepare_kernel(
    q_ptr, vectors_ptr, norm_ptr, cos_ptr, sin_ptr, pages_ptr, scales_ptr, entry_ptr, offset_ptr, num_tokens, num_heads,
    eps, q_token, q_head, vector_token, page_stride, slot_stride, scale_stride, angle_token,
    N: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, CP: tl.constexpr, HP: tl.constexpr, BH: tl.constexpr,
    PAIRS: tl.constexpr, OFFSET: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One token: its vector, and the rotary parts of all its queries, BH heads at a time."""
    start_next(PDL)
    token = tl.program_id(0)
    angles, pages = (cos_ptr, sin_ptr, angle_token), (pages_ptr, page_stride, slot_stride, scales_ptr, scale_stride)
    _vector(
        (vectors_ptr, vector_token), norm_ptr, angles, pages, (entry_ptr, offset_ptr), token, num_tokens, eps,
        C, HALF, CP, HP, PAIRS, OFFSET, PAGE, FP8, FP8_MAX, 1, True, PDL,
    )  # fmt: skip
    for start in range(0, num_heads, BH):
        heads = start + tl.arange(0, BH)
        row = q_ptr + token.to(tl.int64) * q_token + heads[:, None] * q_head + N
        at, inside, turned = _turn(row, angles, token + heads * 0, heads < num_heads, HALF, HP, PAIRS)
        tl.debug_barrier()  # the whole program has read them
        tl.store(row + at, turned, mask=inside)


MOST_AT_ONCE = 16  # tokens of an fp8 page, for which a program has registers


class AbsorbConfig(NamedTuple):
    """Tokens and latent elements of a program, and its warps."""

    tokens: int
    latents: int
    warps: int


def absorb_config(tokens: int) -> AbsorbConfig:
    """By measurement (docs/performance/latents.md). Matrix units want at least 16 tokens; of many, more share the weights that a program reads."""
    if tokens > 64:
        return AbsorbConfig(64, 128, 8)
    return AbsorbConfig(tokens if tokens <= 2 else 16, 64, 4)


def _sizes(prep: LatentPrep, size: int, latent: int) -> dict[str, Any]:
    """What both kernels are compiled for."""
    half = prep.rotary_dim // 2
    return {
        "N": size - 2 * half,
        "C": latent,
        "HALF": half,
        "CP": padded(latent),
        "HP": padded(half),
        "PAIRS": prep.pairs,
        "OFFSET": prep.norm.offset,
    }


def prepare_latent_heads_(
    q_THD: torch.Tensor,
    vectors_TL: torch.Tensor,
    prep: LatentPrep,
    pages_EXL: torch.Tensor,
    write: WritePlaces,
    scales_E: torch.Tensor | None = None,
) -> None:
    """See the twin."""
    tokens, heads, size = q_THD.shape
    if not tokens:
        return
    sizes = _sizes(prep, size, prep.norm.weight_I.shape[0])
    _prepare_kernel[(tokens,)](
        q_THD, vectors_TL, prep.norm.weight_I, *prep.angles, *page_arguments(pages_EXL, scales_E), *write,
        tokens, heads, prep.norm.eps, *q_THD.stride()[:2], vectors_TL.stride(0), *pages_EXL.stride()[:2],
        scale_stride(scales_E), prep.angles.cos_T1D.stride(0), **sizes, **page_sizes(pages_EXL), BH=min(padded(heads), max(1, 1024 // sizes["HP"])),
        num_warps=4, **dependent(q_THD.device),
    )  # fmt: skip


def absorb_latent_heads_(
    q_THD: torch.Tensor,
    vectors_TL: torch.Tensor,
    prep: LatentPrep,
    keys_HNC: torch.Tensor,
    pages_EXL: torch.Tensor,
    write: WritePlaces,
    scales_E: torch.Tensor | None = None,
    most_of_page: int = 0,
    config: AbsorbConfig | None = None,
) -> torch.Tensor:
    """See the twin."""
    tokens, heads, size = q_THD.shape
    latent = keys_HNC.shape[-1]
    config = config or absorb_config(tokens)
    out_THC = torch.empty(heads, tokens, latent, dtype=q_THD.dtype, device=q_THD.device).transpose(0, 1)
    if not tokens:
        return out_THC
    absorbing = heads * blocks(latent, config.latents) * blocks(tokens, config.tokens)
    sizes = _sizes(prep, size, latent)
    _absorb_kernel[(absorbing + tokens,)](
        q_THD, vectors_TL, prep.norm.weight_I, *prep.angles, keys_HNC, out_THC,
        *page_arguments(pages_EXL, scales_E), *write, tokens, heads, absorbing, prep.norm.eps,
        *q_THD.stride()[:2], vectors_TL.stride(0), keys_HNC.stride(0), *out_THC.stride()[:2], *pages_EXL.stride()[:2],
        scale_stride(scales_E), prep.angles.cos_T1D.stride(0), **sizes, **page_sizes(pages_EXL), NP=max(16, padded(sizes["N"])), BT=config.tokens, BC=config.latents,
        RUN=padded(most_of_page) if 1 < most_of_page <= MOST_AT_ONCE else 1,
        PRECISION="tf32x3" if q_THD.dtype == torch.float32 else "tf32",
        num_warps=config.warps, **dependent(q_THD.device),
    )  # fmt: skip
    return out_THC
