"""Attention over chosen latents, and slots with scales of their own. Twins: `pagerunner.ops.sparse_latents`.

A program has a block of one token's heads and a part of its chosen slots. Slots are the products' long side: 64 slots' vectors meet all
the block's heads, and the latents of 64 slots, turned, meet the heads' weights. So a block of 16 heads, which is what a rank of eight
has, fills the tensor cores' instructions as 64 heads do. A token's parts are merged by the kernel that carries results back to values
(`kernels/latent/latent_decode.py`). How many parts there are doesn't depend on lengths.

Latents in fp8 have a scale for each block of elements. It is a power of two, so numbers are exact in bfloat16.

Scores are in units of log2. Shape letters: see the twin; BN slots of a tile, BH heads of a program.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pagerunner.batch import StepRows, WritePlaces
from pagerunner.ops import sparse_latents as op
from pagerunner.ops.kernels.latent import latent_heads, latent_wide
from pagerunner.ops.kernels.latent.latent_decode import LOWEST, Partial, Schedule, _numbers, run_schedule, run_values
from pagerunner.ops.kernels.launch import (
    blocks,
    dependent,
    multiprocessors,
    padded,
    start_next,
    start_next_and_wait,
    wait_turn,
)
from pagerunner.ops.kernels.linear.linear_wide import say_kernel
from pagerunner.ops.kernels.paged.paged_heads import FP8_MAX, fitting_scale, fp8_type, magnitude, quantise
from pagerunner.ops.latent_heads import LatentPrep
from pagerunner.ops.sparse_latents import Latents

MOST_PARTS = 16
PLAIN_BYTES = 2**26  # of slots in fp8 that become numbers at once: those of 58,254 tokens of DeepSeek-V3.2
PLAIN_READS = 8  # how often tokens of a step read each of them then, on average, at least
UNIT_TILES = 3  # which a token's beginning and end take as long as (docs/performance/latents.md)


@triton.jit
def _tile(
    codes_at, rope_at, scales_at, live, c, p, q_type: tl.constexpr,
    C: tl.constexpr, P: tl.constexpr, G: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr, FP8: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """Latents [BN, BC] and rotary parts [BN, BP] of slots."""
    latent = tl.load(codes_at[:, None] + c[None, :], mask=live[:, None] & (c < C)[None, :], other=0)
    rope = tl.load(rope_at[:, None] + p[None, :], mask=live[:, None] & (p < P)[None, :], other=0)
    if FP8 is None:
        latent = latent.to(q_type)
    else:
        wide: tl.constexpr = tl.float32 if q_type == tl.float16 else q_type  # scales may be less than any float16
        g = tl.arange(0, G)
        scales = tl.load(scales_at[:, None] + g[None, :], mask=live[:, None], other=0.0).to(wide)
        numbers = tl.reshape(_numbers(latent, wide, FP8, COMPILED), (BN, G, BC // G)) * scales[:, :, None]
        latent = tl.reshape(numbers, (BN, BC)).to(q_type)
    return latent, rope.to(q_type)


@triton.jit(do_not_specialize=["splits", "chosen_stride", "width"])
def _chosen_kernel(
    q_latent, q_rope, codes, rope, scales, chosen, whole, parts, found, row_ptr, position_ptr, slots_ptr, table, splits,
    num_heads, scale, qc_token, qc_head, qp_token, qp_head, codes_page, codes_slot, rope_page, rope_slot, scale_page,
    scale_slot, table_stride, whole_token, whole_head, chosen_stride, width,
    PAGE: tl.constexpr, C: tl.constexpr, P: tl.constexpr, G: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr, FP8: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, COMPILED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BH heads of a token, and one of `splits` parts of its slots.

    SPLIT: the results go to `parts` [T * splits, 2, H, C] and `found` [T * splits, 2, H], as `_values_kernel` reads them; a part without
    slots is zeros that count nothing. Otherwise they go to `whole`.
    """
    wait_turn(PDL)
    start_next(PDL)  # the next kernel reads where parts are before its own wait
    token, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    h, n, c, p = tl.program_id(1) * BH + tl.arange(0, BH), tl.arange(0, BN), tl.arange(0, BC), tl.arange(0, BP)
    in_h = h < num_heads
    row = tl.load(row_ptr + token)
    row_table = table + tl.load(slots_ptr + row, mask=row >= 0, other=0).to(tl.int64) * table_stride
    own = chosen + token * chosen_stride
    count = tl.minimum(tl.load(position_ptr + token, mask=row >= 0, other=-1).to(tl.int32) + 1, width)
    per = tl.cdiv(tl.cdiv(count, BN), splits) * BN
    first = split * per
    last = tl.minimum(first + per, count)
    q_low = tl.load(
        q_latent + token * qc_token + (h.to(tl.int64) * qc_head)[:, None] + c[None, :],
        mask=in_h[:, None] & (c < C)[None, :], other=0.0,
    )  # fmt: skip
    q_turned = tl.load(
        q_rope + token * qp_token + (h * qp_head)[:, None] + p[None, :],
        mask=in_h[:, None] & (p < P)[None, :],
        other=0.0,
    )
    most = tl.full((BH,), LOWEST, dtype=tl.float32)
    total = tl.zeros((BH,), dtype=tl.float32)
    sums = tl.zeros((BC, BH), dtype=tl.float32)
    # a tile's slots and their pages are looked up while the tile before is computed
    slot = tl.load(own + first + n, mask=first + n < last, other=0)
    entry = tl.load(row_table + slot // PAGE, mask=first + n < last, other=0)
    for at in range(first, last, BN):
        live = at + n < last
        inside = slot % PAGE
        latent, turned = _tile(
            codes + entry * codes_page + inside * codes_slot, rope + entry * rope_page + inside * rope_slot,
            scales + entry * scale_page + inside * scale_slot, live, c, p, q_low.dtype, C, P, G, BC, BN, FP8, COMPILED,
        )  # fmt: skip
        slot = tl.load(own + at + BN + n, mask=at + BN + n < last, other=0)
        entry = tl.load(row_table + slot // PAGE, mask=at + BN + n < last, other=0)
        scores = tl.dot(latent, tl.trans(q_low), input_precision=PRECISION)
        scores = tl.dot(turned, tl.trans(q_turned), scores, input_precision=PRECISION) * scale
        scores = tl.where(live[:, None], scores, LOWEST)
        larger = tl.maximum(most, tl.max(scores, 0))
        shrink = tl.exp2(most - larger)
        weights = tl.where(live[:, None], tl.exp2(scores - larger[None, :]), 0.0)
        total = total * shrink + tl.sum(weights, 0)
        sums = tl.dot(tl.trans(latent), weights.to(latent.dtype), sums * shrink[None, :], input_precision=PRECISION)
        most = larger
    some = tl.where(total > 0, total, 1.0)
    result = sums / some[None, :]
    there = (c < C)[:, None] & in_h[None, :]
    if SPLIT:
        place = ((token * splits + split) * 2 + (split == 0)) * num_heads + h
        tl.store(parts + place[None, :] * C + c[:, None], result, mask=there)
        tl.store(found + place, tl.where(total > 0, most + tl.log2(some), LOWEST), mask=in_h)
    else:
        target = whole + token * whole_token + h.to(tl.int64)[None, :] * whole_head + c[:, None]
        tl.store(target, result.to(whole.dtype.element_ty), mask=there)


@triton.jit
def _store_latent(latent, codes, scales, C: tl.constexpr, G: tl.constexpr, X: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr):  # fmt: skip
    """A latent [G, X] into its slot: G blocks of C // G elements, padded to X."""
    g, x = tl.arange(0, G), tl.arange(0, X)
    scale = fitting_scale(tl.max(magnitude(latent), 1), FP8_MAX)
    latent = quantise(latent, scale[:, None], FP8_MAX, FP8).to(tl.uint8, bitcast=True)
    tl.store(codes + g[:, None] * (C // G) + x[None, :], latent, mask=(x < C // G)[None, :])
    tl.store(scales + g, scale)


@triton.jit
def _store_key(key, codes, scale_at, D: tl.constexpr, BD: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr):
    """An indexer key into its page."""
    d = tl.arange(0, BD)
    key = tl.load(key + d, mask=d < D, other=0.0).to(tl.float32)
    if FP8 is None:
        tl.store(codes + d, key.to(codes.dtype.element_ty), mask=d < D)
    else:
        scale = fitting_scale(tl.max(magnitude(key), 0), FP8_MAX)
        tl.store(codes + d, quantise(key, scale, FP8_MAX, FP8).to(tl.uint8, bitcast=True), mask=d < D)
        tl.store(scale_at, scale)


@triton.jit
def _store_kernel(
    vectors, keys, codes, rope, scales, index, index_scales, entries, offsets, vector_stride, key_stride, codes_page, codes_slot,
    rope_page, rope_slot, scale_page, scale_slot, index_page, index_slot, index_scale_page, index_scale_slot,
    C: tl.constexpr, P: tl.constexpr, G: tl.constexpr, D: tl.constexpr, X: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr,
    FP8: tl.constexpr, FP8_MAX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token's vector and indexer key."""
    start_next_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    entry = tl.load(entries + token)
    if entry >= 0:
        offset = tl.load(offsets + token)
        g, x, p = tl.arange(0, G), tl.arange(0, X), tl.arange(0, BP)
        vector = vectors + token * vector_stride
        latent = tl.load(vector + g[:, None] * (C // G) + x[None, :], mask=(x < C // G)[None, :], other=0.0)
        _store_latent(latent.to(tl.float32), codes + entry * codes_page + offset * codes_slot, scales + entry * scale_page + offset * scale_slot, C, G, X, FP8, FP8_MAX)  # fmt: skip
        turned = tl.load(vector + C + p, mask=p < P, other=0.0)
        tl.store(rope + entry * rope_page + offset * rope_slot + p, turned.to(rope.dtype.element_ty), mask=p < P)
        _store_key(keys + token * key_stride, index + entry * index_page + offset * index_slot, index_scales + entry * index_scale_page + offset * index_scale_slot, D, BD, FP8, FP8_MAX)  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "absorbing"])
def _absorb_kernel(
    q_ptr, vectors, norm_ptr, cos_ptr, sin_ptr, up_ptr, out_ptr, keys, codes, rope, scales, index, index_scales, entries, offsets, num_tokens, num_heads,
    absorbing, eps, q_token, q_head, vector_stride, angle_token, up_head, out_token, out_head, key_stride, codes_page, codes_slot, rope_page, rope_slot,
    scale_page, scale_slot, index_page, index_slot, index_scale_page, index_scale_slot,
    N: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, NP: tl.constexpr, CP: tl.constexpr, HP: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
    PAIRS: tl.constexpr, OFFSET: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    FP8: tl.constexpr, FP8_MAX: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `latent_heads._absorb_kernel`: `absorbing` programs for queries, then one for each token's vector and indexer key.

    The next launch starts when all before this one is complete: it makes scores of older keys (`choose_slots`, `beside`).
    """
    program, angles = tl.program_id(0), (cos_ptr, sin_ptr, angle_token)
    if program < absorbing:
        latent_heads._absorb(
            q_ptr, up_ptr, out_ptr, angles, program, num_tokens, num_heads, q_token, q_head, up_head,
            out_token, out_head, N, C, HALF, NP, HP, BT, BC, PAIRS, PRECISION, PDL,
        )  # fmt: skip
    else:
        token, c = (program - absorbing).to(tl.int64), tl.arange(0, CP)
        weight = tl.load(norm_ptr + c, mask=c < C, other=0.0).to(tl.float32)
        wait_turn(PDL)
        start_next(PDL)
        entry = tl.load(entries + token)
        if entry >= 0:
            offset = tl.load(offsets + token)
            x, at, inside, turned = latent_heads._ready((vectors, vector_stride), weight, angles, token, eps, C, HALF, CP, HP, PAIRS, OFFSET)  # fmt: skip
            latent_at = codes + entry * codes_page + offset * codes_slot
            if FP8 is None:
                tl.store(latent_at + c, x.to(codes.dtype.element_ty), mask=c < C)
            else:
                _store_latent(tl.reshape(x.to(tl.float32), (G, CP // G)), latent_at, scales + entry * scale_page + offset * scale_slot, C, G, CP // G, FP8, FP8_MAX)  # fmt: skip
            slot = rope + entry * rope_page + offset * rope_slot
            tl.store(slot + at, turned.to(rope.dtype.element_ty), mask=inside)
            _store_key(keys + token * key_stride, index + entry * index_page + offset * index_slot, index_scales + entry * index_scale_page + offset * index_scale_slot, D, BD, FP8, FP8_MAX)  # fmt: skip


def absorb_slots_(
    q_THD: torch.Tensor,
    vectors_TL: torch.Tensor,
    prep: LatentPrep,
    up_HNC: torch.Tensor,
    keys_TI: torch.Tensor,
    pages: Latents,
    keys_ESI: torch.Tensor,
    key_scales_ES: torch.Tensor | None,
    write: WritePlaces,
) -> torch.Tensor:
    """See the twin."""
    (tokens, heads, size), latent, (codes, rope, scales) = q_THD.shape, up_HNC.shape[-1], pages
    groups, fp8, index = 1, None, keys_ESI
    if scales is None or key_scales_ES is None:
        scales, key_scales_ES = codes, codes[..., 0]
    else:
        groups, fp8 = scales.shape[-1], fp8_type(codes.dtype)
        if latent != padded(latent) or groups != padded(groups):
            return op.absorb_slots_.twin(
                q_THD, vectors_TL, prep, up_HNC, keys_TI, pages, keys_ESI, key_scales_ES, write
            )
        codes, index = codes.view(torch.uint8), keys_ESI.view(torch.uint8)
    out_THC = torch.empty(heads, tokens, latent, dtype=q_THD.dtype, device=q_THD.device).transpose(0, 1)
    config, sizes = latent_heads.absorb_config(tokens), latent_heads._sizes(prep, size, latent)
    absorbing = heads * blocks(latent, config.latents) * blocks(tokens, config.tokens)
    if tokens:
        _absorb_kernel[(absorbing + tokens,)](
            q_THD, vectors_TL, prep.norm.weight_I, *prep.angles, up_HNC, out_THC, keys_TI, codes, rope, scales, index, key_scales_ES, *write,
            tokens, heads, absorbing, prep.norm.eps, *q_THD.stride()[:2], vectors_TL.stride(0), prep.angles.cos_T1D.stride(0), up_HNC.stride(0),
            *out_THC.stride()[:2], keys_TI.stride(0), *codes.stride()[:2], *rope.stride()[:2], *scales.stride()[:2], *index.stride()[:2],
            *key_scales_ES.stride(), **sizes, NP=max(16, padded(sizes["N"])), BT=config.tokens, BC=config.latents, G=groups, D=keys_TI.shape[-1],
            BD=padded(keys_TI.shape[-1]), FP8=fp8, FP8_MAX=FP8_MAX.get(pages.latent_ESC.dtype, 0.0),
            PRECISION="tf32x3" if q_THD.dtype == torch.float32 else "tf32", num_warps=config.warps, **dependent(q_THD.device),
        )  # fmt: skip
    return out_THC


def store_slots_(
    vectors_TL: torch.Tensor,
    keys_TI: torch.Tensor,
    pages: Latents,
    keys_ESI: torch.Tensor,
    key_scales_ES: torch.Tensor,
    write: WritePlaces,
) -> None:
    """See the twin."""
    latent, scales = pages.latent_ESC, pages.scales_ESG
    assert scales is not None
    codes, index, size, groups = (
        latent.view(torch.uint8),
        keys_ESI.view(torch.uint8),
        latent.shape[-1],
        scales.shape[-1],
    )
    rope, keys = pages.rope_ESP.shape[-1], keys_TI.shape[-1]
    _store_kernel[(vectors_TL.shape[0],)](
        vectors_TL, keys_TI, codes, pages.rope_ESP, scales, index, key_scales_ES, *write,
        vectors_TL.stride(0), keys_TI.stride(0), *codes.stride()[:2], *pages.rope_ESP.stride()[:2], *scales.stride()[:2],
        *index.stride()[:2], *key_scales_ES.stride(),
        C=size, P=rope, G=groups, D=keys, X=padded(size // groups), BP=padded(rope), BD=padded(keys),
        FP8=fp8_type(latent.dtype), FP8_MAX=FP8_MAX[latent.dtype], num_warps=4, **dependent(vectors_TL.device),
    )  # fmt: skip


class Tiles(NamedTuple):
    """Heads of a program, slots of a tile, warps, stages, and programs of a multiprocessor."""

    heads: int
    slots: int
    warps: int
    stages: int
    programs: int


def chosen_tiles(heads: int, item: int, fp8: bool) -> Tiles:
    """`item`: bytes of a query's element. Latents of 512 elements are what these are made for.

    `fp8` slots take tiles of 32. With 64, ptxas 12.8 loses the place of an operand (docs/performance/compiler-faults.md), and registers are kept in memory.
    """
    if item == 4:
        return Tiles(16, 16, 8, 1, 1)
    block = min(64, max(16, padded(heads)))
    return Tiles(block, 32, 8, 3, 1) if fp8 else Tiles(block, 64, 8, 2, 1)


def split_count(tokens: int, heads: int, slots: int, device: torch.device, tiles: Tiles) -> int:
    """Parts of a token's slots: about as many programs as the device has room for."""
    programs = multiprocessors(device) * tiles.programs // (tokens * blocks(heads, tiles.heads))
    return max(1, min(programs, MOST_PARTS, blocks(slots, 2 * tiles.slots)))


def run_chosen(
    q_THC: torch.Tensor,
    q_THP: torch.Tensor,
    pages: Latents,
    table_SW: torch.Tensor,
    rows: StepRows,
    chosen_TK: torch.Tensor,
    scale: float,
    splits: int,
    tiles: Tiles,
) -> Partial:
    """Launch `_chosen_kernel`."""
    (tokens, heads, latent), rope, device = q_THC.shape, q_THP.shape[-1], q_THC.device
    whole_THC = torch.empty(heads, tokens, latent, dtype=q_THC.dtype, device=device).transpose(0, 1)
    several = tokens * splits if splits > 1 else 0
    parts = torch.empty(several, 2, heads, latent, dtype=torch.float32, device=device)
    found = torch.empty(several, 2, heads, dtype=torch.float32, device=device)
    codes, turned, scales = pages
    fp8, groups = fp8_type(codes.dtype), 1
    if scales is None:
        scales = codes
    else:
        codes, groups = codes.view(torch.uint8), scales.shape[-1]
    _chosen_kernel[(tokens, blocks(heads, tiles.heads), splits)](
        q_THC, q_THP, codes, turned, scales, chosen_TK, whole_THC, parts, found, rows.row_T, rows.positions_T, rows.slots_R, table_SW, splits,
        heads, scale / math.log(2), *q_THC.stride()[:2], *q_THP.stride()[:2], *codes.stride()[:2], *turned.stride()[:2],
        *scales.stride()[:2], table_SW.stride(0), *whole_THC.stride()[:2], chosen_TK.stride(0), chosen_TK.shape[1],
        PAGE=codes.shape[1], C=latent, P=rope, G=groups, BC=max(16, padded(latent)),
        BP=max(16, padded(rope)), BH=tiles.heads, BN=tiles.slots, FP8=fp8, SPLIT=splits > 1,
        PRECISION="tf32x3" if q_THC.dtype == torch.float32 else "tf32",
        COMPILED=os.environ.get("TRITON_INTERPRET") != "1", num_warps=tiles.warps, num_stages=tiles.stages,
        **dependent(device),
    )  # fmt: skip
    return Partial(whole_THC, parts, found)


@triton.jit(do_not_specialize=["width"])
def _plain_kernel(
    codes, rope, scales, out, lengths_ptr, slots_ptr, table, width, codes_page, codes_slot, rope_page, rope_slot, scale_page, scale_slot, table_stride,
    PAGE: tl.constexpr, C: tl.constexpr, P: tl.constexpr, G: tl.constexpr, BN: tl.constexpr, FP8: tl.constexpr, COMPILED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN slots of a row as numbers, of which `out` has room for `width` a row."""
    start_next_and_wait(PDL)
    row, c, p = tl.program_id(1), tl.arange(0, C), tl.arange(0, P)
    kind: tl.constexpr = out.dtype.element_ty if COMPILED else tl.float32  # the interpreter doesn't multiply bfloat16
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    live, inside = n < tl.load(lengths_ptr + row), n % PAGE
    entry = tl.load(table + tl.load(slots_ptr + row).to(tl.int64) * table_stride + n // PAGE, mask=live, other=0)
    latent, turned = _tile(
        codes + entry * codes_page + inside * codes_slot, rope + entry * rope_page + inside * rope_slot,
        scales + entry * scale_page + inside * scale_slot, live, c, p, kind, C, P, G, C, BN, FP8, COMPILED,
    )  # fmt: skip
    at = out + (row.to(tl.int64) * width + n)[:, None] * (C + P)
    tl.store(at + c[None, :], latent.to(out.dtype.element_ty), mask=live[:, None])
    tl.store(at + C + p[None, :], turned.to(out.dtype.element_ty), mask=live[:, None])


def _plain(
    pages: Latents, table_SW: torch.Tensor, rows: StepRows, dtype: torch.dtype
) -> tuple[Latents, torch.Tensor, StepRows]:
    """Slots of the step's rows as numbers, in pages and a table of their own. They take the same room whatever there is, which a start has taken, too."""
    codes, turned, scales = pages
    assert scales is not None
    page, latent, rope = *codes.shape[1:], turned.shape[-1]
    count, each = rows.slots_R.shape[0], blocks(rows.max_seq_len, page)
    room = torch.empty(PLAIN_BYTES // dtype.itemsize, dtype=dtype, device=codes.device)
    out_EXL = room[: count * each * page * (latent + rope)].view(count * each, page, latent + rope)
    held = codes.view(torch.uint8)
    _plain_kernel[(blocks(each * page, 16), count)](
        held, turned, scales, out_EXL, rows.seq_lens_R, rows.slots_R, table_SW, each * page, *held.stride()[:2], *turned.stride()[:2], *scales.stride()[:2],
        table_SW.stride(0), PAGE=page, C=latent, P=rope, G=scales.shape[-1], BN=16, FP8=fp8_type(codes.dtype),
        COMPILED=os.environ.get("TRITON_INTERPRET") != "1", num_warps=4, **dependent(codes.device),
    )  # fmt: skip
    own = replace(rows, slots_R=torch.arange(count, dtype=rows.slots_R.dtype, device=codes.device))
    return (
        Latents(out_EXL[..., :latent], out_EXL[..., latent:]),
        torch.arange(count * each, device=codes.device).view(count, each),
        own,
    )


def _makes_plain(pages: Latents, rows: StepRows, tokens: int, heads: int, most: int) -> bool:
    """Whether so many tokens read slots in fp8 so often that these become numbers once. Up to 16 queries take as long by codes."""
    if pages.scales_ESG is None or heads <= 16:
        return False
    page, size = pages.latent_ESC.shape[1:]
    slots = rows.slots_R.shape[0] * blocks(rows.max_seq_len, page) * page
    return tokens * most > PLAIN_READS * slots and slots * (size + pages.rope_ESP.shape[-1]) * 2 <= PLAIN_BYTES


def chosen_values(
    q_THC: torch.Tensor,
    q_THP: torch.Tensor,
    pages: Latents,
    table_SW: torch.Tensor,
    rows: StepRows,
    chosen_TK: torch.Tensor,
    scale: float,
    up_HVC: torch.Tensor,
    scratch: dict[Any, Any],
) -> torch.Tensor:
    """See the twin."""
    tokens, heads, size = q_THC.shape
    gluon = latent_wide.serves(q_THC, q_THP, pages)
    name = "latent_gluon" if pages.scales_ESG is None or heads > 16 else "latent_codes_gluon"
    say_kernel("chosen latents", name, gluon, q_THC.device, heads, size, q_THC.dtype, pages.latent_ESC.dtype)
    if gluon:
        wide_tiles, most = latent_wide.wide_tiles(heads), chosen_TK.shape[1]
        if _makes_plain(pages, rows, tokens, heads, most):
            pages, table_SW, rows = _plain(pages, table_SW, rows, q_THC.dtype)
        slices = min(latent_wide.slice_count(tokens, heads, q_THC.device), tokens * blocks(most, wide_tiles.keys))
        schedule = scratch.get(("wide", slices, most))
        # the choice was the last launch, and waited for all before it, among them an earlier layer's schedule
        early = schedule is not None and rows.max_seq_len > most
        if schedule is None:
            # slices of decode have about as many units each
            extra = UNIT_TILES if tokens >= 4 * slices else 0
            schedule = run_schedule(rows, slices, wide_tiles, stride=1, most=most, extra=extra)
            scratch["wide", slices, most] = schedule
        wide = latent_wide.run_wide(q_THC, q_THP, pages, table_SW, rows, scale, schedule, 1, chosen_TK, early)
        return run_values(wide, schedule, rows, up_HVC, one_by_one=True)
    tiles = chosen_tiles(heads, q_THC.dtype.itemsize, pages.scales_ESG is not None)
    splits = split_count(tokens, heads, chosen_TK.shape[1], q_THC.device, tiles)
    schedule = scratch.get(("parts", tokens, splits))
    if schedule is None:
        first_T = torch.arange(tokens, dtype=torch.int32, device=q_THC.device) * splits
        part_T2 = torch.stack((first_T, torch.full_like(first_T, splits)), 1)
        schedule = scratch["parts", tokens, splits] = Schedule(first_T, part_T2, first_T)
    partial = run_chosen(q_THC, q_THP, pages, table_SW, rows, chosen_TK, scale, splits, tiles)
    return run_values(partial, schedule, rows, up_HVC, one_by_one=True)
