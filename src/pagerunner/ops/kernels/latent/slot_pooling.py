"""Slots pooled from a ring of inputs, and what makes vectors in pages of them. Twins: `pagerunner.ops.slot_pooling`.

A step of few tokens is one launch: the program of a row and some channels pools the slots that the row completes, then writes its state. It alone
reads and writes these channels of the row. Longer rows have a program for each slot, and then one for each row's state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from pagerunner.batch import StatePages, WritePlaces
from pagerunner.ops.kernels.latent.indexer_heads import mixed_vector
from pagerunner.ops.kernels.latent.vectors_attention import Stored, ready, store_coded
from pagerunner.ops.kernels.launch import blocks, dependent, padded, start_next, start_next_and_wait, wait_turn
from pagerunner.ops.kernels.paged.paged_heads import FP8_MAX
from pagerunner.ops.kernels.recurrent.state_rows import (
    row_arguments,
    row_tokens,
    save_arguments,
    save_token,
    saves_of,
    state_entry,
)
from pagerunner.ops.linear import Norm
from pagerunner.ops.rope import RopeAngles
from pagerunner.ops.slot_pooling import Pooling
from pagerunner.ops.sparse_latents import Latents
from pagerunner.ops.state_rows import StateRows

BLOCK_CHANNELS = 32
WARPS = 4
BLOCK_PLACES = 64  # tokens of a slot whose inputs are on their way together


@triton.jit
def _inputs(ring, position, channel, mask, W: tl.constexpr, C: tl.constexpr, JOURNAL: tl.constexpr):
    """A row's inputs at positions [BW, 1], float32; see `_Ring` of the twin. `ring`: where new inputs, those before and drafts are; the row's
    first token, its position, and the first position that the state doesn't hold.
    """
    x, x_stride, state, journal, first, start, base = ring
    new = position >= start
    token = tl.cast(first, tl.int64) + position - start
    value = tl.load(x + token * x_stride + channel, mask=mask & new, other=0.0).to(tl.float32)
    held = tl.load(state + (position + W) % W * C + channel, mask=mask & (position < base), other=0.0)
    value = tl.where(new, value, held)
    if JOURNAL > 0:
        draft = mask & (position >= base) & (position < start)
        value += tl.load(journal + (position - base) * C + channel, mask=draft, other=0.0)
    return value


@triton.jit
def _half(ring, bias, sums, place, before, channel, inside, last, RATIO: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
          JOURNAL: tl.constexpr):  # fmt: skip
    """Take some of a slot's tokens into the running softmax: those at `place` [BW, 1] of the slot that is `before` slots before.

    `sums`: the largest gate, the sum of weights, and that of weighted values.
    """
    most, total, found = sums
    position = last - RATIO * (before + 1) + 1 + place
    mask = (place < RATIO) & (position >= 0) & inside
    value = _inputs(ring, position, channel, mask, W, C, JOURNAL)
    gate = _inputs(ring, position, C // 2 + channel, mask, W, C, JOURNAL)
    gate += tl.load(bias + place * (C // 2) + channel, mask=mask, other=0.0)
    gate = tl.where(mask, gate, float("-inf"))
    larger = tl.maximum(most, tl.max(gate, 0))
    shrink = tl.exp(most - larger)
    weight = tl.exp(gate - larger[None, :])
    return larger, total * shrink + tl.sum(weight, 0), found * shrink + tl.sum(weight * value, 0)


@triton.jit
def _slot(ring, bias, out, block, last, D: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr, JOURNAL: tl.constexpr,
          BC: tl.constexpr, BW: tl.constexpr):  # fmt: skip
    """BC elements of the slot whose last token is at position `last`."""
    W: tl.constexpr = 2 * RATIO if OVERLAP else RATIO
    C: tl.constexpr = 4 * D if OVERLAP else 2 * D
    element = block * BC + tl.arange(0, BC)
    channel, inside = element[None, :], (element < D)[None, :]
    sums = (tl.full((BC,), -1.0e30, tl.float32), tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32))
    for at in range(0, RATIO, BW):
        place = (at + tl.arange(0, BW))[:, None]
        if OVERLAP:
            sums = _half(ring, bias, sums, place, 1, channel, inside, last, RATIO, W, C, JOURNAL)
        own = channel + D if OVERLAP else channel
        sums = _half(ring, bias, sums, place, 0, own, inside, last, RATIO, W, C, JOURNAL)
    _, total, found = sums
    tl.store(out + element, found / tl.where(total > 0, total, 1.0), mask=element < D)


@triton.jit
def _keep(ring, target, block, upto, least, mask, D: tl.constexpr, W: tl.constexpr, STRIPS: tl.constexpr, JOURNAL: tl.constexpr,
          BC: tl.constexpr, BW: tl.constexpr):  # fmt: skip
    """Write to `target` a ring of what comes before position `upto`, and not before `least`."""
    element = block * BC + tl.arange(0, BC)
    oldest = tl.maximum(upto - W, least)
    for at in range(0, upto - oldest, BW):
        position = (oldest + at + tl.arange(0, BW))[:, None]
        there = mask & (position < upto) & (element < D)[None, :]
        for strip in tl.static_range(STRIPS):
            channel = strip * D + element[None, :]
            value = _inputs(ring, position, channel, there, W, STRIPS * D, JOURNAL)
            tl.store(target + (position + W) % W * (STRIPS * D) + channel, value, mask=there)


@triton.jit
def _row(
    pooling, out, row, block, pages, where, saves, out_stride,
    D: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr, JOURNAL: tl.constexpr, HAS_SAVES: tl.constexpr,
    OUTPUTS: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """BC elements of one pooling of a row: with OUTPUTS its slots, then the states to save, its own, and its drafts."""
    x, x_stride, states, journals, bias = pooling
    table, table_stride, slots, state_stride, journal_stride = pages
    _, _, positions, _ = where
    save_start, save_position, save_target = saves
    W: tl.constexpr = 2 * RATIO if OVERLAP else RATIO
    STRIPS: tl.constexpr = 4 if OVERLAP else 2
    first, end, certain, replayed, _ = row_tokens(*where, row, JOURNAL)
    if first < end:
        entry = state_entry(table, slots, row, table_stride)
        state, journal = states + entry * state_stride, journals + entry * journal_stride
        start = tl.cast(tl.load(positions + first), tl.int32)
        ring = (x, x_stride, state, journal, first, start, start - replayed)
        if OUTPUTS:
            for token in range(first, end):
                last = start + token - first
                if (last + 1) % RATIO == 0:
                    own = out + tl.cast(token, tl.int64) * out_stride
                    _slot(ring, bias, own, block, last, D, RATIO, OVERLAP, JOURNAL, BC, BW)
        at, stop, shift = saves_of(save_start, positions, row, first, end, HAS_SAVES)
        for save in range(at, stop):
            upto = save_token(save_position, save, stop, shift, certain)
            there = (upto > first - replayed) & (upto <= certain)
            target = states + tl.load(save_target + save) // 4
            _keep(ring, target, block, start + upto - first, -W, there, D, W, STRIPS, JOURNAL, BC, BW)
        tl.debug_barrier()  # all is read before the row's own state changes
        _keep(ring, state, block, start + certain - first, start - replayed, True, D, W, STRIPS, JOURNAL, BC, BW)
        if JOURNAL > 0:
            tl.debug_barrier()
            element = block * BC + tl.arange(0, BC)
            for token in range(certain, tl.minimum(end, certain + JOURNAL)):
                for strip in tl.static_range(STRIPS):
                    channel = strip * D + element
                    value = tl.load(x + tl.cast(token, tl.int64) * x_stride + channel, mask=element < D, other=0.0)
                    target = journal + (token - certain) * (STRIPS * D) + channel
                    tl.store(target, value.to(tl.float32), mask=element < D)


@triton.jit
def _rows_kernel(
    x, states, journals, bias, x_2, states_2, journals_2, bias_2, out, table, slots, query_start, seq_lens, positions, accepted,
    save_start, save_position, save_target, x_stride, x_2_stride, state_stride, journal_stride, table_stride, out_stride,
    D: tl.constexpr, D_2: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr, JOURNAL: tl.constexpr, HAS_SAVES: tl.constexpr,
    OUTPUTS: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program for a row and BC elements of the first pooling, and behind these for BC elements of the second."""
    start_next_and_wait(PDL)
    row, block = tl.program_id(0), tl.program_id(1)
    pages = (table, table_stride, slots, state_stride, journal_stride)
    where, saves = (query_start, seq_lens, positions, accepted), (save_start, save_position, save_target)
    parts: tl.constexpr = (D + BC - 1) // BC
    if block < parts:
        pooling = (x, x_stride, states, journals, bias)
        _row(
            pooling, out, row, block, pages, where, saves, out_stride, D, RATIO, OVERLAP, JOURNAL, HAS_SAVES, OUTPUTS, BC, BW
        )  # fmt: skip
    elif D_2 > 0:
        pooling = (x_2, x_2_stride, states_2, journals_2, bias_2)
        _row(
            pooling, out + D, row, block - parts, pages, where, saves, out_stride,
            D_2, RATIO, OVERLAP, JOURNAL, HAS_SAVES, OUTPUTS, BC, BW,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _tokens_kernel(
    x, states, journals, bias, x_2, states_2, journals_2, bias_2, out, table, slots, query_start, positions, accepted, row_T,
    num_tokens, x_stride, x_2_stride, state_stride, journal_stride, table_stride, out_stride,
    D: tl.constexpr, D_2: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr, JOURNAL: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `_rows_kernel`, a program for each RATIO tokens, which computes their slots alone: one, or several of short rows."""
    start_next_and_wait(PDL)
    block = tl.program_id(1)
    token_T = tl.program_id(0) * RATIO + tl.arange(0, BT)
    inside = (tl.arange(0, BT) < RATIO) & (token_T < num_tokens)
    completes = (tl.load(positions + token_T, mask=inside, other=0) + 1) % RATIO == 0
    done = inside & completes & (tl.load(row_T + token_T, mask=inside, other=-1) >= 0)
    token = tl.min(tl.where(done, token_T, num_tokens), 0)
    for _ in range(tl.sum(done.to(tl.int32), 0)):
        row = tl.load(row_T + token)
        last = tl.cast(tl.load(positions + token), tl.int32)
        first = tl.load(query_start + row)
        start = tl.cast(tl.load(positions + first), tl.int32)
        base = start
        if JOURNAL > 0:
            base -= tl.maximum(tl.minimum(tl.load(accepted + row), JOURNAL), 0)
        entry = state_entry(table, slots, row, table_stride)
        own = out + token.to(tl.int64) * out_stride
        parts: tl.constexpr = (D + BC - 1) // BC
        if block < parts:
            ring = (x, x_stride, states + entry * state_stride, journals + entry * journal_stride, first, start, base)
            _slot(ring, bias, own, block, last, D, RATIO, OVERLAP, JOURNAL, BC, BW)
        elif D_2 > 0:
            ring = (
                x_2,
                x_2_stride,
                states_2 + entry * state_stride,
                journals_2 + entry * journal_stride,
                first,
                start,
                base,
            )
            _slot(ring, bias_2, own + D, block - parts, last, D_2, RATIO, OVERLAP, JOURNAL, BC, BW)
        token = tl.min(tl.where(done & (token_T > token), token_T, num_tokens), 0)


def pool_slots(
    positions_T: torch.Tensor, poolings: Sequence[Pooling], memory: StatePages, rows: StateRows, overlap: bool
) -> torch.Tensor:
    """See the twin."""
    step, ratio = rows.step, poolings[0].bias.shape[0]
    sizes = [pooling.bias.shape[1] // (2 if overlap else 1) for pooling in poolings]
    out_TX = torch.empty(step.num_tokens, sum(sizes), dtype=torch.float32, device=positions_T.device)
    drafts = memory.journal[0].shape[1] if memory.journal and step.accepted_R is not None else 0
    arguments = [
        (pooling.x_TC, state, journal, pooling.bias)
        for pooling, state, journal in zip(poolings, memory.states, memory.journal or memory.states, strict=True)
    ]
    where, _ = row_arguments(rows, positions_T)
    start, _, position, target, has_saves = save_arguments(rows)
    strides = (
        *(arguments[at][0].stride(0) for at in (0, -1)), memory.states[0].stride(0),
        memory.journal[0].stride(0) if drafts else 0, rows.page_table.stride(0), out_TX.stride(0),
    )  # fmt: skip
    given = (*arguments[0], *arguments[-1], out_TX, rows.page_table)
    both = {
        "D": sizes[0],
        "D_2": sizes[1] if len(sizes) > 1 else 0,
        "RATIO": ratio,
        "OVERLAP": overlap,
        "JOURNAL": drafts,
    }
    tiles = {"BC": BLOCK_CHANNELS, "BW": min(BLOCK_PLACES, padded(ratio)), **dependent(positions_T.device)}
    programs = sum(blocks(size, BLOCK_CHANNELS) for size in sizes)
    if not rows.few:
        slots, query_start, _, positions, accepted = where
        _tokens_kernel[(blocks(step.num_tokens, ratio), programs)](
            *given, slots, query_start, positions, accepted, step.row_T, step.num_tokens, *strides, **both, BT=padded(ratio), **tiles,
            num_warps=WARPS,
        )  # fmt: skip
    _rows_kernel[(step.num_rows, programs)](
        *given, *where, start, position, target, *strides, **both, HAS_SAVES=has_saves, OUTPUTS=rows.few, **tiles, num_warps=WARPS
    )  # fmt: skip
    return out_TX


@triton.jit
def _finish(
    pooled, weight, angles, page, rope, scales, eps, root, D: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """Norm and rotate one slot's vector, and store it at `page`; `angles` are where its token's cosines and sines are.

    FP8: C elements become codes, each BLOCK with a scale, and the others go to `rope`. If MIXED isn't 0, all 2**MIXED are mixed before.
    """
    element = (2 * tl.arange(0, BD // 2)[:, None] + tl.arange(0, 2)[None, :])[None, :, :]
    inside = element < D
    dtype = weight.dtype.element_ty
    x = tl.load(pooled + element, mask=inside, other=0.0).to(dtype).to(tl.float32)
    factor = tl.load(weight + element, mask=inside, other=0.0).to(tl.float32)
    y = ready(x, factor, *angles, eps, D, P, BD, dtype)
    if FP8 is None:
        tl.store(page + element, y.to(page.dtype.element_ty), mask=inside)
    else:
        if MIXED > 0:
            y = mixed_vector(tl.reshape(y, (BD,)).to(tl.float32), root, BD, MIXED).to(dtype)
        store_coded(y, page, rope, scales, True, D, BD, C, BLOCK, FP8, FP8_MAX)


@triton.jit
def _store_kernel(
    pooled, weight, page, rope, scales, weight_2, page_2, scales_2, cos, sin, positions, entries, offsets, pooled_stride,
    angle_stride, page_stride, slot_stride, rope_page, rope_slot, scale_page, scale_slot, page_2_stride, slot_2_stride, scale_2_page,
    scale_2_slot, eps, eps_2, root,
    D: tl.constexpr, D_2: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, BD_2: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_2: tl.constexpr, RATIO: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr, MIXED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    wait_turn(PDL)
    last = tl.load(positions + token)
    entry = tl.load(entries + token)
    if (entry >= 0) & ((last + 1) % RATIO == 0):
        slot = tl.load(offsets + token) // RATIO
        row, angle = pooled + token * pooled_stride, token * angle_stride
        if tl.program_id(1) == 0:
            place = page + entry * page_stride + slot * slot_stride
            rope += entry * rope_page + slot * rope_slot
            scales += entry * scale_page + slot * scale_slot
            _finish(
                row, weight, (cos + angle, sin + angle), place, rope, scales, eps, root, D, P, BD, C, BLOCK, FP8, FP8_MAX, 0
            )  # fmt: skip
        elif D_2 > 0:
            place_2 = page_2 + entry * page_2_stride + slot * slot_2_stride
            scales_2 += entry * scale_2_page + slot * scale_2_slot
            _finish(
                row + D, weight_2, (cos + angle, sin + angle), place_2, rope, scales_2, eps_2, root,
                D_2, P, BD_2, D_2, BLOCK_2, FP8, FP8_MAX, MIXED,
            )  # fmt: skip


def store_slots_(
    pooled_TX: torch.Tensor,
    norms: Sequence[Norm],
    pages: Sequence[torch.Tensor | Latents],
    angles: RopeAngles,
    positions_T: torch.Tensor,
    write: WritePlaces,
    ratio: int,
    mixed: bool = False,
) -> None:
    """See the twin."""
    if not pooled_TX.shape[0]:
        return
    sizes = [norm.weight_I.shape[0] for norm in norms]
    first, second = Stored.of(pages[0]), Stored.of(pages[-1])
    norm, norm_2, (cos, sin) = norms[0], norms[-1], angles
    _store_kernel[(pooled_TX.shape[0], len(pages))](
        pooled_TX, norm.weight_I, *first[:3], norm_2.weight_I, second.codes, second.scales, cos, sin, positions_T, *write,
        pooled_TX.stride(0), cos.stride(0), *first.strides, *second.codes.stride()[:2], *second.scales.stride()[:2],
        norm.eps, norm_2.eps, sizes[-1] ** -0.5,
        D=sizes[0], D_2=sizes[1] if len(sizes) > 1 else 0, P=cos.shape[-1], BD=padded(sizes[0]), BD_2=padded(sizes[-1]),
        **first.sizes, BLOCK_2=padded(second.sizes["BLOCK"]), RATIO=ratio, FP8_MAX=FP8_MAX.get(first.dtype, 0.0),
        MIXED=sizes[-1].bit_length() - 1 if mixed else 0, num_warps=4, **dependent(pooled_TX.device),
    )  # fmt: skip
