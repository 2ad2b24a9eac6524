"""`ops.batch.build_rows` by the CPU kernels."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch

from pagerunner.ops.native.calls import STEP, call, operand
from pagerunner.ops.native.library import library

if TYPE_CHECKING:
    from pagerunner.ops.batch import PackedRows, SlotState, StepTensors, TableSet

_STEP = struct.Struct("17P13q")  # Step in native/small.h
_I32, _I64 = torch.int32, torch.int64


def build_rows(packed: torch.Tensor, where: PackedRows, tables: TableSet, state: SlotState, out: StepTensors) -> None:
    """See `ops.batch.build_rows`, of rows without a stride. Raises IndexError for a slot or a page table entry that isn't there; nothing is
    written then.
    """
    if packed.device.type != "cpu" or library() is None or where.stride:
        return NotImplemented
    groups, (num_slots, num_drafts) = tables.shapes.shape[0], state.drafts.shape
    operands = (
        operand("a packed step", packed, dtype=_I64),
        operand("page tables", tables.entries, dtype=_I64),
        operand("the tables' shapes", tables.shapes, None, 3, dense=2, dtype=_I64),
        operand("last tokens", state.tokens, num_slots, dtype=_I64),
        operand("slots' lengths", state.lengths, num_slots, dtype=_I64),
        operand("slots' accepted drafts", state.accepted, num_slots, dtype=_I32),
        operand("slots' drafts", state.drafts, dense=2, dtype=_I64),
        operand("token ids", out.token_ids_T, dtype=_I64),
        operand("positions", out.positions_T, dtype=_I64),
        operand("tokens' rows", out.row_T, dtype=_I32),
        operand("slots", out.slots_R, dtype=_I32),
        operand("sampled slots", out.sample_slots, dtype=_I64),
        operand("query starts", out.query_start_R1, dtype=_I32),
        operand("lengths", out.seq_lens_R, dtype=_I32),
        operand("accepted drafts", out.accepted_R, dtype=_I32),
        operand("write entries", out.write_entry_GT, groups, None, dtype=_I64),
        operand("write offsets", out.write_offset_GT, groups, out.write_entry_GT.shape[1], dtype=_I64),
    )
    if out.write_offset_GT.stride(0) != out.write_entry_GT.stride(0):
        raise ValueError(
            f"write entries and offsets are read with the same strides; they are {list(out.write_entry_GT.stride())} and "
            f"{list(out.write_offset_GT.stride())}"
        )
    if packed.shape[0] < where.size:
        raise ValueError(f"a step of {where} has {where.size} numbers; they are {list(packed.shape)}")
    for name, tensor, count in (
        ("token ids", out.token_ids_T, where.padded_tokens),
        ("positions", out.positions_T, where.padded_tokens),
        ("tokens' rows", out.row_T, where.padded_tokens),
        ("write entries", out.write_entry_GT[0], where.padded_tokens),
        ("slots", out.slots_R, where.padded_rows),
        ("sampled slots", out.sample_slots, where.padded_rows),
        ("query starts", out.query_start_R1, where.padded_rows + 1),
        ("lengths", out.seq_lens_R, where.padded_rows),
        ("accepted drafts", out.accepted_R, where.padded_rows),
    ):
        if tensor.shape[0] < count:
            raise ValueError(f"a step of {where} takes {count} {name}; there is room for {list(tensor.shape)}")
    token_rows = -1 if where.one_token else where.token_rows
    places = where.starts, where.query_start, where.token_ids, token_rows, groups, out.write_entry_GT.stride(0)
    counts = where.rows, where.tokens, where.padded_rows, where.padded_tokens
    call(STEP, _STEP, operands, *counts, *places, num_slots, tables.entries.shape[0], num_drafts)
