"""Kernels of ops/drafting.py, each one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.batch import SlotState, TableSet
from pagerunner.ops.drafting import PassTensors
from pagerunner.ops.kernels.launch import blocks

BLOCK = 128


@triton.jit(do_not_specialize=["tokens"])
def _next_tokens(
    token_ids_T, row_T, positions_T, slots_R, last_tokens, lengths, out_T, tokens, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < tokens
    row = tl.load(row_T + i, inside, -1)
    real = row >= 0
    slot = tl.load(slots_R + row, real, 0)
    last = tl.load(last_tokens + slot, real, 0)
    computed = tl.load(lengths + slot, real, 0)
    follows = tl.load(token_ids_T + i + 1, i + 1 < tokens, 0)
    position = tl.load(positions_T + i, inside, 0)
    found = tl.where(position + 1 < computed, follows, last)
    tl.store(out_T + i, tl.where(real, found, 0), inside)


def next_tokens(
    token_ids_T: torch.Tensor, row_T: torch.Tensor, positions_T: torch.Tensor, slots_R: torch.Tensor, state: SlotState
) -> torch.Tensor:
    """See ops/drafting.py."""
    out_T, count = torch.empty_like(token_ids_T), token_ids_T.shape[0]
    _next_tokens[(blocks(count, BLOCK),)](
        token_ids_T, row_T, positions_T, slots_R, state.tokens, state.lengths, out_T, count, BLOCK=BLOCK
    )
    return out_T


@triton.jit(do_not_specialize=["slot_stride", "count", "ahead", "last_position", "max_rows", "num_slots"])
def _build_pass(
    slots, slot_stride, lengths, entries, ends, shapes, positions_S, row_S, slots_S, query_start_S1, seq_lens_S, write_entry_GS,
    write_offset_GS, count, ahead, last_position, max_rows, num_slots, GROUPS: tl.constexpr, OWN: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    slot = tl.load(slots + i * slot_stride, inside, -1)
    real = slot >= 0
    own = tl.maximum(slot, 0)
    wanted = tl.minimum(tl.load(lengths + own, real, 0) - 1 + ahead, last_position)
    end = tl.full((BLOCK,), 4611686018427387904, tl.int64)
    for group in tl.static_range(GROUPS):
        if (OWN >> group) & 1:
            end = tl.minimum(end, tl.load(ends + group * num_slots.to(tl.int64) + own, real, 0))
    stored = real & (wanted < end)
    position = tl.where(real, tl.maximum(tl.minimum(wanted, end - 1), 0), 0)
    every = tl.arange(0, ROOM)
    rows = tl.sum((tl.load(slots + every * slot_stride, every < count, -1) >= 0).to(tl.int32))
    tl.store(query_start_S1 + i, tl.minimum(i, rows), i <= count)
    tl.store(positions_S + i, position, inside)
    tl.store(row_S + i, tl.where(real, i, -1), inside)
    tl.store(slots_S + i, own.to(tl.int32), inside)
    tl.store(seq_lens_S + i, tl.where(real, position + 1, 0).to(tl.int32), inside)
    for group in tl.static_range(GROUPS):
        table = tl.load(shapes + group * 3)
        width = tl.load(shapes + group * 3 + 1)
        page_tokens = tl.load(shapes + group * 3 + 2)
        entry = tl.load(entries + table + own * width + position // page_tokens % width, stored, -1)
        out = group * max_rows.to(tl.int64) + i
        tl.store(write_entry_GS + out, entry, inside)
        tl.store(write_offset_GS + out, position % page_tokens, inside)


def build_pass(
    slots_S: torch.Tensor,
    ahead: int,
    last_position: int,
    tables: TableSet,
    groups: tuple[int, ...],
    state: SlotState,
    out: PassTensors,
) -> None:
    """See ops/drafting.py."""
    count = slots_S.shape[0]
    num_groups, max_rows = out.write_entry_GS.shape
    _build_pass[(blocks(count + 1, BLOCK),)](
        slots_S, slots_S.stride(0), state.lengths, tables.entries, tables.ends_GN, tables.shapes, out.positions_S, out.row_S, out.slots_S,
        out.query_start_S1, out.seq_lens_S, out.write_entry_GS, out.write_offset_GS, count, ahead, last_position, max_rows,
        tables.ends_GN.shape[1], GROUPS=num_groups, OWN=sum(1 << group for group in groups), ROOM=triton.next_power_of_2(count), BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["slot_stride", "count", "place"])
def _store_drafts(drafts, slots_S, slot_stride, drafts_S, count, place, DRAFTS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_S + i * slot_stride, i < count, -1)
    tl.store(drafts + slot * DRAFTS + place, tl.load(drafts_S + i, i < count, 0), slot >= 0)


def store_drafts(slots_S: torch.Tensor, drafts_S: torch.Tensor, place: int, state: SlotState) -> None:
    """See ops/drafting.py."""
    count = slots_S.shape[0]
    _store_drafts[(blocks(count, BLOCK),)](
        state.drafts, slots_S, slots_S.stride(0), drafts_S, count, place, DRAFTS=state.drafts.shape[1], BLOCK=BLOCK
    )
