"""Kernels of ops/batch.py. Everything a step's rows need is one launch, whatever the number of groups."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.batch import PackedRows, SlotState, StepTensors, TableSet
from pagerunner.ops.kernels.launch import blocks

BLOCK = 128


@triton.jit(do_not_specialize=["rows", "tokens", "padded_rows", "padded_tokens", "max_tokens"])
def _build_rows(
    packed, entries, shapes, last_tokens, lengths, accepted, drafts, token_ids_T, positions_T, row_T, slots_R, sample_slots,
    query_start_R1, seq_lens_R, accepted_R, write_entry_GT, write_offset_GT, rows, tokens, padded_rows, padded_tokens, max_tokens,
    GROUPS: tl.constexpr, DRAFTS: tl.constexpr, ONE_TOKEN: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    section = (rows + 2) // 2 * 2
    starts, query_start = packed + section, packed + 2 * section
    ids, token_rows = packed + 3 * section, packed + 3 * section + (tokens + 1) // 2 * 2

    real = i < rows
    slot = tl.load(packed + i, real, 0)
    start = tl.load(starts + i, real, 0)
    here = start < 0  # the device knows it
    start = tl.where(here, tl.load(lengths + slot, here, 0), start)
    first = tl.load(query_start + i, i <= rows, tokens)
    after = tl.load(query_start + i + 1, real, tokens)
    tl.store(slots_R + i, slot.to(tl.int32), i < padded_rows)
    if STRIDE:
        tl.store(query_start_R1 + i, i * STRIDE, i <= padded_rows)
    else:
        tl.store(sample_slots + i, tl.where(real, slot, -1), i < padded_rows)
        tl.store(query_start_R1 + i, first.to(tl.int32), i <= padded_rows)
    tl.store(seq_lens_R + i, tl.where(real, start + after - first, 0).to(tl.int32), i < padded_rows)
    tl.store(accepted_R + i, tl.load(accepted + slot, here, tl.where(real, -1, 0)), i < padded_rows)

    mine = i < tokens
    inside = i < padded_tokens
    if STRIDE:
        row, place = i // STRIDE, i % STRIDE
        theirs = row < rows
        count = tl.load(query_start + row + 1, theirs, 0) - tl.load(query_start + row, theirs, 0)
        mine = theirs & (place < count)
        token_slot = tl.load(packed + row, mine, 0)
        position = tl.load(lengths + token_slot, mine, 0) + place
        token = tl.load(last_tokens + token_slot, mine & (place == 0), 0)
        draft = tl.load(drafts + token_slot * DRAFTS + place - 1, mine & (place > 0), 0)
        token = tl.where(place == 0, token, tl.maximum(draft, 0))
        tl.store(sample_slots + i, tl.where(mine, token_slot, -1), inside)
    elif ONE_TOKEN:
        row = i.to(tl.int64)
        token_slot, position = slot, start
    else:
        row = tl.load(token_rows + i, mine, 0)
        token_slot = tl.load(packed + row, mine, 0)
        start = tl.load(starts + row, mine, 0)
        start = tl.where(start < 0, tl.load(lengths + token_slot, start < 0, 0), start)
        position = start + i - tl.load(query_start + row, mine, 0)
    position = tl.where(mine, position, 0)
    if not STRIDE:
        token = tl.load(ids + i, mine, 0)
        last = tl.load(last_tokens + token_slot, mine & (token < 0), 0)
        if DRAFTS and not ONE_TOKEN:
            draft = tl.load(drafts + token_slot * DRAFTS - 2 - token, mine & (token < -1), 0)
            last = tl.where(token < -1, tl.maximum(draft, 0), last)
        token = tl.where(token < 0, last, token)
    tl.store(row_T + i, tl.where(mine, row, -1).to(tl.int32), inside)
    tl.store(positions_T + i, position, inside)
    tl.store(token_ids_T + i, token, inside)
    for group in tl.static_range(GROUPS):
        table = tl.load(shapes + group * 3)
        width = tl.load(shapes + group * 3 + 1)
        page_tokens = tl.load(shapes + group * 3 + 2)
        column = position // page_tokens % width
        entry = tl.load(entries + table + token_slot * width + column, mine, -1)
        out = group * max_tokens.to(tl.int64) + i
        tl.store(write_entry_GT + out, entry, inside)
        tl.store(write_offset_GT + out, position % page_tokens, inside)


def build_rows(packed: torch.Tensor, where: PackedRows, tables: TableSet, state: SlotState, out: StepTensors) -> None:
    """See ops/batch.py."""
    count = max(where.padded_rows + 1, where.padded_tokens)
    groups, max_tokens = out.write_entry_GT.shape
    _build_rows[(blocks(count, BLOCK),)](
        packed, tables.entries, tables.shapes, state.tokens, state.lengths, state.accepted, state.drafts, out.token_ids_T,
        out.positions_T, out.row_T, out.slots_R, out.sample_slots, out.query_start_R1, out.seq_lens_R, out.accepted_R,
        out.write_entry_GT, out.write_offset_GT, where.rows, where.tokens, where.padded_rows, where.padded_tokens, max_tokens,
        GROUPS=groups, DRAFTS=state.drafts.shape[1], ONE_TOKEN=where.one_token, STRIDE=where.stride, BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _store_tokens(last_tokens, lengths, accepted, slots_S, tokens_S, positions_S, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_S + i, i < count, -1)
    tl.store(last_tokens + slot, tl.load(tokens_S + i, i < count, 0), slot >= 0)
    tl.store(lengths + slot, tl.load(positions_S + i, i < count, 0) + 1, slot >= 0)
    tl.store(accepted + slot, tl.zeros_like(slot).to(tl.int32), slot >= 0)


def store_tokens(slots_S: torch.Tensor, tokens_S: torch.Tensor, positions_S: torch.Tensor, state: SlotState) -> None:
    """See ops/batch.py."""
    count = slots_S.shape[0]
    _store_tokens[(blocks(count, BLOCK),)](
        state.tokens, state.lengths, state.accepted, slots_S, tokens_S, positions_S, count, BLOCK=BLOCK
    )
