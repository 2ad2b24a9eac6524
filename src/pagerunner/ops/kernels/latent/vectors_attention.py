"""Attention to a window's vectors and slots in one pass, and what prepares it. Twins: `pagerunner.ops.vectors_attention`.

All heads of a token share its keys, and these are values too. So a program has one token's heads, reads a tile of keys once, and multiplies it twice.
Few tokens don't fill the device; then the keys of each are divided among several programs, and a second kernel merges their parts. A token's keys are
at most the window and the slots that are chosen (128 + 512 in DeepSeek-V4-Flash), whatever the length of its sequence.

Scores are in units of log2. Shape letters: see the twin; BN keys of a tile, HC half of a vector's elements, padded.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pagerunner.batch import StepRows, WritePlaces
from pagerunner.ops.indexer import width_of
from pagerunner.ops.kernels.latent.indexer import run_scores
from pagerunner.ops.kernels.latent.latent_decode import _numbers
from pagerunner.ops.kernels.latent.vectors_stored import Stored
from pagerunner.ops.kernels.launch import blocks, dependent, multiprocessors, padded, start_next_and_wait
from pagerunner.ops.kernels.linear.linear_wide import has_gluon, say_kernel
from pagerunner.ops.kernels.paged.paged_heads import FP8_MAX, fitting_scale, magnitude, quantise
from pagerunner.ops.linear import Norm
from pagerunner.ops.rope import RopeAngles
from pagerunner.ops.sparse_latents import Latents
from pagerunner.ops.vectors_attention import Choice, Slots, Window

LOWEST = tl.constexpr(-1.0e30)  # a score that nothing reaches: finite, so that its differences are finite
LOG2_E = tl.constexpr(1.4426950408889634)
HEADS_OF_A_PROGRAM = 8  # that are normed and rotated
MOST_PARTS = 32  # of a token


@triton.jit
def ready(x, factor, cos, sin, eps, D: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, dtype: tl.constexpr):
    """Vectors [N, BD / 2, 2], normed, times `factor`, and their last P elements rotated; rounded as separate operations round."""
    y = x * (1.0 / tl.sqrt_rn(tl.sum(tl.sum(x * x, 2), 1) * (1.0 / D) + eps))[:, None, None]
    first, second = tl.split((y.to(dtype).to(tl.float32) * factor).to(dtype).to(tl.float32))
    pair = (tl.arange(0, BD // 2) - (D - P) // 2)[None, :]
    mask = (pair >= 0) & (pair < P // 2)
    c = tl.load(cos + pair, mask=mask, other=1.0).to(tl.float32)
    s = tl.load(sin + P // 2 + pair, mask=mask, other=0.0).to(tl.float32)
    crossed = (second * s).to(dtype).to(tl.float32)
    turned = (first * c).to(dtype).to(tl.float32) - crossed
    return tl.join(turned, (second * c).to(dtype).to(tl.float32) + first * s).to(dtype)


@triton.jit
def store_coded(
    y, page, rope, scales, there, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr,
):  # fmt: skip
    """Store a vector of BD elements if it is `there`: C become codes at `page`, each BLOCK with a scale, and the others of D go to `rope`.

    Returns the places of elements [BD / BLOCK, BLOCK], and what is stored of them.
    """
    numbers = tl.reshape(y, (BD // BLOCK, BLOCK)).to(tl.float32)
    g = tl.arange(0, BD // BLOCK)
    element = g[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    scale = fitting_scale(tl.max(magnitude(numbers), 1), FP8_MAX)
    codes = quantise(numbers, scale[:, None], FP8_MAX, FP8)
    tl.store(page + element, codes.to(tl.uint8, bitcast=True), mask=(element < C) & there)
    if scales.dtype.element_ty == tl.uint8:
        tl.store(scales + g, (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), mask=(g * BLOCK < C) & there)
    else:
        tl.store(scales + g, scale, mask=(g * BLOCK < C) & there)
    turned = numbers.to(rope.dtype.element_ty)
    tl.store(rope + element - C, turned, mask=(element >= C) & (element < D) & there)
    return element, tl.where(element < C, codes.to(tl.float32) * scale[:, None], turned.to(tl.float32))


@triton.jit(do_not_specialize=["num_heads"])
def _prepare_kernel(
    q, vectors, weight, cos, sin, pages, rope, scales, entries, offsets, num_heads, q_token, q_head, vector_stride, angle_stride, page_stride,
    slot_stride, rope_page, rope_slot, scale_page, scale_slot, eps,
    D: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, HB: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr,
    FP8_MAX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """HB heads of a token's queries; behind these its vector."""
    start_next_and_wait(PDL)
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype = q.dtype.element_ty
    element = (2 * tl.arange(0, BD // 2)[:, None] + tl.arange(0, 2)[None, :])[None, :, :]
    inside = element < D
    cos += token * angle_stride
    sin += token * angle_stride
    if block < tl.num_programs(1) - 1:
        head = (block * HB + tl.arange(0, HB))[:, None, None]
        at = q + token * q_token + head * q_head + element
        mask = inside & (head < num_heads)
        x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, ready(x, 1.0, cos, sin, eps, D, P, BD, dtype), mask=mask)
    else:
        own = vectors + token * vector_stride
        vector = tl.load(own + element, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(weight + element, mask=inside, other=0.0).to(tl.float32)
        held = ready(vector, factor, cos, sin, eps, D, P, BD, dtype)
        entry, place = tl.load(entries + token), tl.load(offsets + token)
        page = pages + entry * page_stride + place * slot_stride
        if FP8 is None:
            held = held.to(pages.dtype.element_ty)
            tl.store(own + element, held.to(dtype), mask=inside)
            tl.store(page + element, held, mask=inside & (entry >= 0))
        else:
            rope += entry * rope_page + place * rope_slot
            scales += entry * scale_page + place * scale_slot
            among, stored = store_coded(held, page, rope, scales, entry >= 0, D, BD, C, BLOCK, FP8, FP8_MAX)
            tl.store(own + among, stored.to(dtype), mask=among < D)


def prepare_vectors_(
    q_THD: torch.Tensor,
    vectors_TD: torch.Tensor,
    norm: Norm,
    angles: RopeAngles,
    pages: torch.Tensor | Latents,
    write: WritePlaces,
) -> None:
    """See the twin."""
    (tokens, heads, size), held = q_THD.shape, Stored.of(pages)
    if tokens:
        _prepare_kernel[(tokens, blocks(heads, HEADS_OF_A_PROGRAM) + 1)](
            q_THD, vectors_TD, norm.weight_I, *angles, *held[:3], *write, heads, *q_THD.stride()[:2],
            vectors_TD.stride(0), angles.cos_T1D.stride(0), *held.strides, norm.eps,
            D=size, P=angles.cos_T1D.shape[-1], BD=padded(size), HB=HEADS_OF_A_PROGRAM, **held.sizes,
            FP8_MAX=FP8_MAX.get(held.dtype, 0.0), num_warps=4, **dependent(q_THD.device),
        )  # fmt: skip


@triton.jit
def _coded(
    codes, rope, scales, live, dtype: tl.constexpr, OFFSET: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
    HC: tl.constexpr, BN: tl.constexpr, FP8: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Elements [OFFSET, OFFSET + HC) of slots, of which C are in fp8, each BLOCK with a scale, and the others behind them at `rope`."""
    wide: tl.constexpr = tl.float32 if dtype == tl.float16 else dtype  # scales may be less than any float16
    c, g = (OFFSET + tl.arange(0, HC))[None, :], (OFFSET // BLOCK + tl.arange(0, HC // BLOCK))[None, :]
    held = tl.load(codes[:, None] + c, mask=live[:, None] & (c < C), other=0)
    factor = tl.load(scales[:, None] + g, mask=live[:, None] & (g < C // BLOCK), other=0)
    if factor.dtype == tl.uint8:  # exponents
        factor = (factor.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    factor = factor.to(wide)
    x = tl.reshape(_numbers(held, wide, FP8, COMPILED), (BN, HC // BLOCK, BLOCK)) * factor[:, :, None]
    x = tl.reshape(x, (BN, HC)).to(dtype)
    if OFFSET + HC > C:
        mask = live[:, None] & (c >= C) & (c < D)
        x += tl.load(rope[:, None] + (c - C), mask=mask, other=0.0).to(dtype)
    return x


@triton.jit
def _vectors(base, live, dtype: tl.constexpr, OFFSET: tl.constexpr, D: tl.constexpr, HC: tl.constexpr):
    """Elements [OFFSET, OFFSET + HC) of vectors."""
    c = (OFFSET + tl.arange(0, HC))[None, :]
    return tl.load(base[:, None] + c, mask=live[:, None] & (c < D), other=0.0).to(dtype)


@triton.jit
def _take(q_low, q_high, most, total, low, high, k_low, k_high, live, scale, PRECISION: tl.constexpr):
    """Take a tile of keys, of which some are `live`, into the running softmax."""
    scores = tl.dot(q_low, tl.trans(k_low), input_precision=PRECISION)
    scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision=PRECISION) * scale
    scores = tl.where(live[None, :], scores, LOWEST)
    larger = tl.maximum(most, tl.max(scores, 1))
    shrink = tl.exp2(most - larger)
    weights = tl.where(live[None, :], tl.exp2(scores - larger[:, None]), 0.0)
    total = total * shrink + tl.sum(weights, 1)
    weights = weights.to(k_low.dtype)
    low = tl.dot(weights, k_low, low * shrink[:, None], input_precision=PRECISION)
    high = tl.dot(weights, k_high, high * shrink[:, None], input_precision=PRECISION)
    return larger, total, low, high


@triton.jit
def _entries(chosen_ptr, table, index, count, first, width, page, among, CHOSEN: tl.constexpr):
    """Vectors `index` of a segment of `count`: their numbers in the sequence, their pages, and which of them are there.

    CHOSEN: they are `among` those that were chosen, if this segment is of such.
    """
    live = index < count
    number = first + index
    if CHOSEN:
        number = tl.where(among, tl.load(chosen_ptr + index, mask=live & among, other=-1), number)
        live = live & (number >= 0)
        number = tl.maximum(number, 0)
    entry = tl.load(table + number // page % width, mask=live, other=-1)
    return number, entry, live & (entry >= 0)


@triton.jit
def _paged(
    q_low, q_high, most, total, low, high, pages, rope, scales, chosen_ptr, table, begin, stop, count, first, scale, width,
    page_stride, slot_stride, rope_page, rope_slot, scale_page, scale_slot, page, among,
    CHOSEN: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, HC: tl.constexpr,
    BN: tl.constexpr, FP8: tl.constexpr, COMPILED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take tiles [begin, stop) of a segment in pages. A tile's pages are on their way while the tile before is computed."""
    index = begin * BN + tl.arange(0, BN)
    number, entry, live = _entries(chosen_ptr, table, index, count, first, width, page, among, CHOSEN)
    for _ in range(begin, stop):
        held, place = live, number % page
        base = pages + entry * page_stride + place * slot_stride
        if FP8 is None:
            k_low, k_high = _vectors(base, held, q_low.dtype, 0, D, HC), _vectors(base, held, q_low.dtype, HC, D, HC)
        else:
            turned, factors = (
                rope + entry * rope_page + place * rope_slot,
                scales + entry * scale_page + place * scale_slot,
            )
            k_low = _coded(base, turned, factors, held, q_low.dtype, 0, D, C, BLOCK, HC, BN, FP8, COMPILED)
            k_high = _coded(base, turned, factors, held, q_low.dtype, HC, D, C, BLOCK, HC, BN, FP8, COMPILED)
        index += BN
        number, entry, live = _entries(chosen_ptr, table, index, count, first, width, page, among, CHOSEN)
        most, total, low, high = _take(q_low, q_high, most, total, low, high, k_low, k_high, held, scale, PRECISION)
    return most, total, low, high


@triton.jit
def _own(
    q_low, q_high, most, total, low, high, vectors, vector_stride, begin, stop, count, scale,
    D: tl.constexpr, HC: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take tiles [begin, stop) of `count` vectors of the step itself."""
    for tile in range(begin, stop):
        at = tile * BN + tl.arange(0, BN)
        base, live = vectors + at.to(tl.int64) * vector_stride, at < count
        k_low, k_high = _vectors(base, live, q_low.dtype, 0, D, HC), _vectors(base, live, q_low.dtype, HC, D, HC)
        most, total, low, high = _take(q_low, q_high, most, total, low, high, k_low, k_high, live, scale, PRECISION)
    return most, total, low, high


@triton.jit
def _back(x, cos, sin, N: tl.constexpr, OFFSET: tl.constexpr, HC: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    """Elements [OFFSET, OFFSET + HC) of N results, turned back."""
    if (OFFSET + HC > D - P) & (OFFSET < D):
        pair = (tl.arange(0, HC // 2) + OFFSET // 2 - (D - P) // 2)[None, :]
        mask = (pair >= 0) & (pair < P // 2)
        c = tl.load(cos + pair, mask=mask, other=1.0).to(tl.float32)
        s = tl.load(sin + P // 2 + pair, mask=mask, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, (N, HC // 2, 2)))
        x = tl.reshape(tl.join(first * c + second * s, second * c - first * s), (N, HC))
    return x


@triton.jit
def _finish(
    out, sinks, cos, sin, head, in_h, most, total, low, high,
    D: tl.constexpr, P: tl.constexpr, HC: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Give sinks their share, turn the result back, and write it to a token's `out`."""
    c = tl.arange(0, HC)[None, :]
    sink = tl.load(sinks + head, mask=in_h, other=0.0).to(tl.float32) * LOG2_E
    larger = tl.maximum(most, sink)
    shrink = tl.exp2(most - larger)
    share = (shrink / (total * shrink + tl.exp2(sink - larger)))[:, None]
    at = out + head[:, None] * D + c
    low = _back(low * share, cos, sin, BH, 0, HC, D, P)
    high = _back(high * share, cos, sin, BH, HC, HC, D, P)
    tl.store(at, low.to(out.dtype.element_ty), mask=in_h[:, None] & (c < D))
    tl.store(at + HC, high.to(out.dtype.element_ty), mask=in_h[:, None] & (HC + c < D))


@triton.jit
def _leave(parts, found, head, in_h, some, most, total, low, high, D: tl.constexpr, HC: tl.constexpr):
    """Leave a part's result, normalised, and the log-sum-exp of its scores. Without `some` keys there is only the latter."""
    c = tl.arange(0, HC)[None, :]
    there = total != 0  # what is no number is left as it is
    total = tl.where(there, total, 1.0)
    tl.store(found + head, tl.where(there, most + tl.log2(total), LOWEST), mask=in_h)
    if some:
        at, share = parts + head[:, None] * D + c, (1.0 / total)[:, None]
        tl.store(at, low * share, mask=in_h[:, None] & (c < D))
        tl.store(at + HC, high * share, mask=in_h[:, None] & (HC + c < D))


@triton.jit(do_not_specialize=["num_heads", "window_width", "slot_width", "chosen", "chosen_stride", "num_parts"])
def _attend_kernel(
    q, vectors, window, window_rope, window_scales, slot_pages, slot_rope, slot_scales, chosen_ptr, sinks, cos, sin, out, parts, found, row_ptr, position_ptr, start_ptr, slots_ptr,
    window_table, slot_table, num_heads, num_parts, scale, window_width, slot_width, chosen, q_token, q_head, vector_stride,
    window_stride, window_slot, window_rope_page, window_rope_slot, window_scale_page, window_scale_slot, page_stride, page_slot, rope_page,
    rope_slot, scale_page, scale_slot, chosen_stride, angle_stride, window_table_stride, slot_table_stride,
    WINDOW: tl.constexpr, RATIO: tl.constexpr, PAGE: tl.constexpr, SLOT_PAGE: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    C: tl.constexpr, BLOCK: tl.constexpr, HC: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr,
    NEW: tl.constexpr, CHOSEN: tl.constexpr, FP8: tl.constexpr, COMPILED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One of a token's parts of keys, BH heads. SPLIT: there are several. NEW: rows have several tokens, whose vectors may have no page.

    The keys are three segments: of the window what is in pages and what is the step's own, and slots.
    """
    start_next_and_wait(PDL)
    token, part = (tl.program_id(0) // num_parts).to(tl.int64), tl.program_id(0) % num_parts
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    c, in_h = tl.arange(0, HC)[None, :], head < num_heads
    row = tl.load(row_ptr + token)
    end = tl.where(row >= 0, tl.load(position_ptr + token).to(tl.int32) + 1, 0)
    row = tl.maximum(row, 0)
    slot, q_at = tl.load(slots_ptr + row).to(tl.int64), q + token * q_token + (head * q_head)[:, None] + c
    q_low = tl.load(q_at, mask=in_h[:, None] & (c < D), other=0.0)
    q_high = tl.load(q_at + HC, mask=in_h[:, None] & (HC + c < D), other=0.0)
    least = tl.maximum(end - WINDOW, 0)
    start = end
    if NEW:
        own = tl.load(start_ptr + row)
        own_position = tl.load(position_ptr + own).to(tl.int32)
        start = tl.maximum(tl.minimum(own_position, end), least)
    complete = 0
    if RATIO > 0:
        complete = end // RATIO
        if CHOSEN:
            complete = tl.minimum(complete, chosen)
    past_tiles, new_tiles, slot_tiles = tl.cdiv(start - least, BN), tl.cdiv(end - start, BN), tl.cdiv(complete, BN)
    per = tl.cdiv(past_tiles + new_tiles + slot_tiles, num_parts)
    begin = part * per
    stop = begin + per
    most, total = tl.full((BH,), LOWEST, tl.float32), tl.zeros((BH,), tl.float32)
    low, high = tl.zeros((BH, HC), tl.float32), tl.zeros((BH, HC), tl.float32)
    before = past_tiles + new_tiles
    if (FP8 is None) | (RATIO == 0):
        most, total, low, high = _paged(
            q_low, q_high, most, total, low, high, window, window_rope, window_scales, chosen_ptr, window_table + slot * window_table_stride, begin,
            tl.minimum(stop, past_tiles), start - least, least, scale, window_width, window_stride, window_slot, window_rope_page,
            window_rope_slot, window_scale_page, window_scale_slot, PAGE, False, False, D, C, BLOCK, HC, BN, FP8, COMPILED, PRECISION,
        )  # fmt: skip
    else:  # codes become numbers in one place of the program: two don't have enough registers
        for segment in range(2):
            among = segment == 1
            pages, rope, scales, table = window, window_rope, window_scales, window_table + slot * window_table_stride
            if among:
                pages, rope, scales, table = slot_pages, slot_rope, slot_scales, slot_table + slot * slot_table_stride
            most, total, low, high = _paged(
                q_low, q_high, most, total, low, high, pages, rope, scales, chosen_ptr + token * chosen_stride, table,
                tl.where(among, tl.maximum(begin - before, 0), begin), tl.where(among, tl.minimum(stop - before, slot_tiles), tl.minimum(stop, past_tiles)),
                tl.where(among, complete, start - least), tl.where(among, 0, least), scale, tl.where(among, slot_width, window_width),
                tl.where(among, page_stride, window_stride), tl.where(among, page_slot, window_slot), tl.where(among, rope_page, window_rope_page),
                tl.where(among, rope_slot, window_rope_slot), tl.where(among, scale_page, window_scale_page),
                tl.where(among, scale_slot, window_scale_slot), tl.where(among, SLOT_PAGE, PAGE), among, CHOSEN, D, C, BLOCK, HC, BN, FP8, COMPILED, PRECISION,
            )  # fmt: skip
    if NEW:
        first = vectors + (own + start - own_position).to(tl.int64) * vector_stride
        most, total, low, high = _own(
            q_low, q_high, most, total, low, high, first, vector_stride, tl.maximum(begin - past_tiles, 0),
            tl.minimum(stop - past_tiles, new_tiles), end - start, scale, D, HC, BN, PRECISION,
        )  # fmt: skip
    if (FP8 is None) & (RATIO > 0):
        most, total, low, high = _paged(
            q_low, q_high, most, total, low, high, slot_pages, slot_rope, slot_scales, chosen_ptr + token * chosen_stride,
            slot_table + slot * slot_table_stride, tl.maximum(begin - before, 0), tl.minimum(stop - before, slot_tiles), complete, 0, scale, slot_width, page_stride, page_slot, rope_page, rope_slot, scale_page,
            scale_slot, SLOT_PAGE, True, CHOSEN, D, C, BLOCK, HC, BN, FP8, COMPILED, PRECISION,
        )  # fmt: skip
    if not SPLIT:
        angle = token * angle_stride
        out += token * num_heads * D
        _finish(out, sinks, cos + angle, sin + angle, head, in_h, most, total, low, high, D, P, HC, BH)
    else:
        place = (token * num_parts + part) * num_heads
        _leave(parts + place * D, found + place, head, in_h, stop > begin, most, total, low, high, D, HC)


@triton.jit(do_not_specialize=["num_heads", "num_parts"])
def _merge_kernel(
    parts, found, sinks, cos, sin, out, num_heads, num_parts, angle_stride,
    D: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, HB: tl.constexpr, BP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """HB heads of a token: its parts, at most BP, and the sinks as one softmax, turned back."""
    start_next_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HB + tl.arange(0, HB)
    in_h = head < num_heads
    d = tl.arange(0, BD)[None, :]
    part = tl.arange(0, BP)[:, None]
    place = (token * num_parts + part) * num_heads + head[None, :]
    lse = tl.load(found + place, mask=(part < num_parts) & in_h[None, :], other=LOWEST)
    sink = tl.load(sinks + head, mask=in_h, other=0.0).to(tl.float32) * LOG2_E
    most = tl.maximum(tl.max(lse, 0), sink)
    total = tl.sum(tl.exp2(lse - most[None, :]), 0) + tl.exp2(sink - most)
    x = tl.zeros((HB, BD), tl.float32)
    for each in tl.static_range(BP):
        at = (token * num_parts + each) * num_heads + head
        own = tl.load(found + at, mask=in_h & (each < num_parts), other=LOWEST)
        mask = (in_h & (own > LOWEST))[:, None] & (d < D)
        x += tl.load(parts + at[:, None] * D + d, mask=mask, other=0.0) * (tl.exp2(own - most) / total)[:, None]
    x = _back(x, cos + token * angle_stride, sin + token * angle_stride, HB, 0, BD, D, P)
    tl.store(
        out + (token * num_heads + head)[:, None] * D + d, x.to(out.dtype.element_ty), mask=in_h[:, None] & (d < D)
    )


class Tiles(NamedTuple):
    """Heads and keys of a tile, its warps and stages."""

    heads: int
    keys: int
    warps: int
    stages: int


GLUON_TILES, GLUON_SIZE = Tiles(64, 64, 8, 2), 512  # of `kernels/latent/vectors_gluon.py`
GLUON_HEADS = 16  # fewer leave most of a tile's 64 queries empty
GLUON_PARTS = (448, 64)  # of a vector in fp8: codes in blocks of 64, and rotary elements
MANY_HEADS = 32  # fewer with numbers in pages go by Triton's kernel in prompts and large batches, as its programs share a multiprocessor
MANY_TOKENS = 129  # of a batch that is large
CLUSTER = 2  # so many parts of a token write to each other's shared memory, and merge themselves
LEAST_SCORED, MOST_SCORED = 1024, 4096  # slots that a cluster chooses among itself: 4 a thread, and 16
FEW_TOKENS = 32  # whose keys may be in parts of one tile


def attention_tiles(heads: int, exact: bool) -> Tiles:
    """For so many heads; `exact` in float32."""
    if exact:
        return Tiles(16, 32, 8, 1)
    block = min(64, max(16, padded(heads)))
    return Tiles(block, 32, 4 if block == 16 else 8, 3)


@functools.cache
def _gluon(fp8: bool) -> Any:
    """The module in Gluon. It isn't imported with Triton versions that may not have what it names."""
    return importlib.import_module("pagerunner.ops.kernels." + ("vectors_fp8_gluon" if fp8 else "vectors_gluon"))


def _is_new(rows: StepRows) -> bool:
    """Whether rows have several tokens, whose vectors may be in no page."""
    return not rows.one_token and not rows.stride


def by_gluon(q_THD: torch.Tensor, window: Window, slots: Slots | None) -> bool:
    """Whether kernels in Gluon take this: heads and vectors of their sizes, of one type of two bytes but for pages in e4m3, and aligned."""
    (_, heads, size), dtype = q_THD.shape, q_THD.dtype
    held, pages = window.pages, window.pages if slots is None else slots.pages
    if heads < GLUON_HEADS or size != GLUON_SIZE or dtype.itemsize != 2 or isinstance(held, Latents) != isinstance(pages, Latents):  # fmt: skip
        return False
    parts = [q_THD, window.vectors_TD]  # copies bring 16 bytes each
    for one in (held, pages):
        if isinstance(one, Latents) and not _codes_by_gluon(one, dtype):
            return False
        parts.append(one.rope_ESP if isinstance(one, Latents) else one)
    for part in parts:
        if part.dtype != dtype or part.data_ptr() % 16 or any(step % 8 for step in part.stride()[:-1]):
            return False
    return has_gluon(q_THD.device)


def _codes_by_gluon(pages: Latents, dtype: torch.dtype) -> bool:
    """Whether `kernels/latent/vectors_fp8_gluon.py` reads these slots: e4m3 with bytes of scales, in strides that their rotary parts have, too."""
    codes, rope, scales = pages
    if scales is None or scales.itemsize != 1 or codes.dtype != torch.float8_e4m3fn or dtype != torch.bfloat16:
        return False
    if (codes.shape[-1], rope.shape[-1]) != GLUON_PARTS or scales.shape[-1] < GLUON_PARTS[0] // GLUON_PARTS[1]:
        return False
    if any(one != 2 * other for one, other in zip(codes.stride()[:2], rope.stride()[:2], strict=True)):
        return False
    steps = [*(step % 16 for step in codes.stride()[:2]), *(step % 8 for step in scales.stride()[:2])]
    return not any(steps) and codes.data_ptr() % 16 == 0 and scales.data_ptr() % 8 == 0


def _parts(tokens: int, heads: int, keys: int, tiles: Tiles, device: torch.device) -> int:
    """Into how many parts a token's `keys` (at most) are divided. Two that merge themselves, and may choose, take less time than three."""
    programs = multiprocessors(device) // max(1, tokens * blocks(heads, tiles.heads))
    most = blocks(keys, tiles.keys)
    if tiles is GLUON_TILES and tokens > FEW_TOKENS:
        most //= 3  # a part of fewer tiles takes less time than merging it
    parts = max(1, min(programs, most, MOST_PARTS))
    return CLUSTER if tiles is GLUON_TILES and tokens > FEW_TOKENS and parts > CLUSTER else parts


def takes_choice(q_THD: torch.Tensor, window: Window, slots: Slots, rows: StepRows) -> bool:
    """Whether the programs of a token's cluster choose its slots by scores that are there. A token that has a choice has a full tile in its window for each of them.

    It goes by how long a sequence may become, not by how long the step's are, so that an engine has one such kernel.
    """
    if not isinstance(slots.chosen, Choice) or not rows.one_token or q_THD.shape[1] > GLUON_TILES.heads:
        return False
    top_k = slots.chosen.top_k
    full = top_k * slots.ratio >= window.size == CLUSTER * GLUON_TILES.keys
    return full and top_k < _most_slots(slots) <= MOST_SCORED


def _most_slots(slots: Slots) -> int:
    """Of a sequence."""
    return slots.table_SW.shape[1] * Stored.of(slots.pages).codes.shape[1]


def _launch_gluon(
    q_THD: torch.Tensor, window: Window, slots: Slots | None, rows: StepRows, scale: float, sinks_H: torch.Tensor, angles: RopeAngles,
    out_THD: torch.Tensor, partial: torch.Tensor, found: torch.Tensor, parts: int,
) -> None:  # fmt: skip
    (tokens, heads, size), held = q_THD.shape, Stored.of(window.pages)
    pages, table, ratio, chosen, early = (window.pages, window.table_SW, 0, None, False) if slots is None else slots
    fp8, stored = isinstance(pages, Latents), Stored.of(pages)
    kinds = [[part.codes, part.rope, part.scales.view(torch.uint8)] if fp8 else [part.codes] for part in (held, stored)]
    steps = [part.steps if fp8 else part.strides[:2] for part in (held, stored)]
    cluster = parts if parts == CLUSTER else 1
    scored, top_k, most = sinks_H.view(1, -1), 0, 0
    if slots is not None and isinstance(chosen, Choice):
        by, top_k, most = chosen, chosen.top_k, max(LEAST_SCORED, padded(_most_slots(slots)))
        scored = run_scores(
            by.q_TJI, by.weights_TJ, top_k, by.pages_ESI, table, rows, ratio, by.scales_ES, early="scored" in by.scratch
        )
        by.scratch["scored"] = True
        chosen, early = torch.empty(tokens, top_k, dtype=torch.int32, device=q_THD.device), True
    picked = rows.row_T if chosen is None else chosen
    _gluon(fp8).vectors_kernel[(tokens * parts // cluster, blocks(heads, GLUON_TILES.heads))](
        q_THD, window.vectors_TD, *kinds[0], *kinds[1], picked, sinks_H, *angles, out_THD, partial, found, rows.row_T, rows.positions_T,
        rows.query_start_R1, rows.slots_R, window.table_SW, table, heads, parts, int(early), scale / math.log(2), window.table_SW.shape[1],
        table.shape[1], 0 if chosen is None else chosen.shape[1], *q_THD.stride()[:2], window.vectors_TD.stride(0), *steps[0], *steps[1],
        picked.stride(0), angles.cos_T1D.stride(0), window.table_SW.stride(0), table.stride(0), scored, scored.stride(0),
        WINDOW=window.size, RATIO=ratio, PAGE=held.codes.shape[1], SLOT_PAGE=stored.codes.shape[1], D=size, P=angles.cos_T1D.shape[-1],
        SPLIT=parts > cluster, NEW=_is_new(rows), CHOSEN=chosen is not None, TOP_K=top_k, C=most, ONE=rows.one_token,
        num_warps=GLUON_TILES.warps, num_ctas=cluster, **dependent(q_THD.device),
    )  # fmt: skip


def vectors_attention(
    q_THD: torch.Tensor,
    window: Window,
    slots: Slots | None,
    rows: StepRows,
    scale: float,
    sinks_H: torch.Tensor,
    angles: RopeAngles,
) -> torch.Tensor:
    """See the twin."""
    (tokens, heads, size), device = q_THD.shape, q_THD.device
    out_THD = torch.empty(tokens, heads, size, dtype=q_THD.dtype, device=device)
    if not tokens:
        return out_THD
    pages, table, ratio, chosen = (window.pages, window.table_SW, 0, None) if slots is None else slots[:4]
    own, others = Stored.of(window.pages), Stored.of(pages)
    of = "windows" if slots is None else f"windows and slots of {slots.ratio} tokens"
    gluon = by_gluon(q_THD, window, slots)
    if gluon and heads < MANY_HEADS and not isinstance(pages, Latents) and (tokens >= MANY_TOKENS or _is_new(rows)):
        gluon, of = False, of + " in prompts and large batches"
    say_kernel(
        of,
        "vectors_fp8_gluon" if isinstance(pages, Latents) else "vectors_gluon",
        gluon,
        device,
        heads,
        size,
        q_THD.dtype,
        others.dtype,
    )
    tiles = GLUON_TILES if gluon else attention_tiles(heads, q_THD.dtype == torch.float32)
    seen = window.size
    if ratio:
        most = width_of(rows, ratio)
        seen += min(most, chosen.top_k) if isinstance(chosen, Choice) else most if chosen is None else chosen.shape[1]
    parts = _parts(tokens, heads, min(seen, rows.max_seq_len + 1), tiles, device)
    if slots is not None and not (gluon and parts == CLUSTER and takes_choice(q_THD, window, slots, rows)):
        slots = slots.choose(rows)
        chosen = slots.chosen
    left = parts > 1 and not (gluon and parts == CLUSTER)  # to be merged
    space = torch.empty(tokens * parts * heads * (size + 1) if left else 1, dtype=torch.float32, device=device)
    found, partial = space[: tokens * parts * heads], space[tokens * parts * heads if left else 0 :]
    launch = dependent(device)
    if gluon:
        _launch_gluon(q_THD, window, slots, rows, scale, sinks_H, angles, out_THD, partial, found, parts)
    else:
        assert not isinstance(chosen, Choice)
        picked = rows.row_T if chosen is None else chosen
        _attend_kernel[(tokens * parts, blocks(heads, tiles.heads))](
            q_THD, window.vectors_TD, *own[:3], *others[:3], picked, sinks_H, *angles, out_THD, partial, found, rows.row_T, rows.positions_T,
            rows.query_start_R1, rows.slots_R, window.table_SW, table, heads, parts, scale / math.log(2), window.table_SW.shape[1], table.shape[1], 0 if chosen is None else chosen.shape[1], *q_THD.stride()[:2],
            window.vectors_TD.stride(0), *own.strides, *others.strides, picked.stride(0),
            angles.cos_T1D.stride(0), window.table_SW.stride(0), table.stride(0),
            WINDOW=window.size, RATIO=ratio, PAGE=own[0].shape[1], SLOT_PAGE=others[0].shape[1], D=size, **others.sizes,
            COMPILED=os.environ.get("TRITON_INTERPRET") != "1",
            P=angles.cos_T1D.shape[-1], HC=max(16, padded(size) // 2), BH=tiles.heads, BN=tiles.keys, SPLIT=parts > 1,
            NEW=_is_new(rows), CHOSEN=chosen is not None,
            PRECISION="tf32x3" if q_THD.dtype == torch.float32 else "tf32", num_warps=tiles.warps, num_stages=tiles.stages, **launch,
        )  # fmt: skip
    if left:
        block = 1 if tokens * heads <= 1024 else 4
        _merge_kernel[(tokens, blocks(heads, block))](
            partial, found, sinks_H, *angles, out_THD, heads, parts, angles.cos_T1D.stride(0),
            D=size, P=angles.cos_T1D.shape[-1], BD=padded(size), HB=block, BP=padded(parts), num_warps=4, **launch,
        )  # fmt: skip
    return out_THD
