"""What a step's rows become on the device: token ids, positions, page table entries to write to.

A step arrives as integers packed into one int64 tensor, see `PackedRows`. Shape letters: R rows, T tokens, S sampled
rows, G memory groups, N slots, W table columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from pagerunner.ops.dispatch import gpu_kernel
from pagerunner.ops.native import batch as native

TABLE, WIDTH, PAGE_TOKENS = 0, 1, 2  # columns of `TableSet.shapes`


def even(count: int) -> int:
    """Room for `count` integers of 8 bytes such that what follows is aligned to 16 bytes."""
    return (count + 1) & ~1


class PackedRows(NamedTuple):
    """Where a step's rows are in its packed tensor. The fields count real rows and tokens, and rows and tokens with padding.

    The sections from index 0 on: slots [R]; first positions [R], where -1 means the length that the slot has on the device; query
    starts [R + 1]; token ids [T], where -1 means the slot's last token and -2, -3, ... its first draft, its second one, and so on; the
    tokens' rows [T], which are left out if every row has one token. Each section begins at an even index.

    With a `stride` all rows generate, and each has so many padded tokens: its last token, its drafts, and padding. The sections of tokens are left out then.
    """

    rows: int
    tokens: int
    padded_rows: int
    padded_tokens: int
    one_token: bool
    stride: int = 0

    @property
    def starts(self) -> int:
        """Index of the first positions."""
        return even(self.rows + 1)

    @property
    def query_start(self) -> int:
        """Index of the query starts."""
        return 2 * even(self.rows + 1)

    @property
    def token_ids(self) -> int:
        """Index of the token ids."""
        return 3 * even(self.rows + 1)

    @property
    def token_rows(self) -> int:
        """Index of the tokens' rows."""
        return 3 * even(self.rows + 1) + even(self.tokens)

    @property
    def size(self) -> int:
        """Integers in all."""
        of_tokens = 0 if self.stride else 1 if self.one_token else 2
        return 3 * even(self.rows + 1) + even(self.tokens) * of_tokens


@dataclass(frozen=True, slots=True)
class TableSet:
    """The page tables of all groups, one after another: [slots, W] int64 each, in one flat tensor.

    `shapes` [G, 3] int64: where the group's table begins, its W, and the tokens of a page. `ends_GN`, the end of `entries`: before which position each slot's tokens
    have pages, by group.
    """

    entries: torch.Tensor
    shapes: torch.Tensor
    ends_GN: torch.Tensor


@dataclass(frozen=True, slots=True)
class SlotState:
    """What the device alone knows of each slot at once: steps read it here, not from the host.

    `tokens` int64 [N]: the last token. `lengths` int64 [N]: its position, which is the number of tokens that pages have. `accepted`
    int32 [N]: how many drafts were right in the last step that sampled for the slot. `drafts` int64 [N, K]: guesses of the tokens after the last one, -1 for none.
    There is one element more than there are slots. The last one belongs to no slot.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    accepted: torch.Tensor
    drafts: torch.Tensor

    @classmethod
    def empty(cls, max_num_seqs: int, device: torch.device | str, num_drafts: int = 0) -> SlotState:
        """State of so many slots, with room for `num_drafts` drafts of each."""
        count = max_num_seqs + 1
        tokens, lengths = torch.zeros((2, count), dtype=torch.int64, device=device)
        accepted = torch.zeros(count, dtype=torch.int32, device=device)
        return cls(tokens, lengths, accepted, torch.full((count, num_drafts), -1, dtype=torch.int64, device=device))

    def store(self, slots_S: torch.Tensor, tokens_S: torch.Tensor, positions_S: torch.Tensor) -> None:
        """See `store_tokens`."""
        store_tokens(slots_S, tokens_S, positions_S, self)


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What `build_rows` fills; larger than any step. Types as in StepRows and GroupBatch of pagerunner.batch.

    `sample_slots` int64 are by row, or by token where rows have drafts at a stride; -1 in padding.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    row_T: torch.Tensor
    slots_R: torch.Tensor
    sample_slots: torch.Tensor
    query_start_R1: torch.Tensor
    seq_lens_R: torch.Tensor
    accepted_R: torch.Tensor
    write_entry_GT: torch.Tensor
    write_offset_GT: torch.Tensor

    @staticmethod
    def num_bytes(rows: int, tokens: int, groups: int, num_drafts: int = 0) -> int:
        """Bytes of `empty`."""
        places = rows * (1 + num_drafts)
        tokens = max(tokens, places)
        return tokens * (8 + 8 + 4 + 16 * groups) + rows * (4 + 4 + 4) + 8 * places + (rows + 1) * 4

    @classmethod
    def empty(cls, rows: int, tokens: int, groups: int, device: torch.device, num_drafts: int = 0) -> StepTensors:
        """Tensors for up to `rows` rows and `tokens` tokens of a step, and rows with so many drafts."""
        places = rows * (1 + num_drafts)
        tokens = max(tokens, places)

        def make(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            token_ids_T=make(torch.int64, tokens),
            positions_T=make(torch.int64, tokens),
            row_T=make(torch.int32, tokens),
            slots_R=make(torch.int32, rows),
            sample_slots=make(torch.int64, places),
            query_start_R1=make(torch.int32, rows + 1),
            seq_lens_R=make(torch.int32, rows),
            accepted_R=make(torch.int32, rows),
            write_entry_GT=make(torch.int64, groups, tokens),
            write_offset_GT=make(torch.int64, groups, tokens),
        )


@gpu_kernel("batch")
def build_rows(packed: torch.Tensor, where: PackedRows, tables: TableSet, state: SlotState, out: StepTensors) -> None:
    """Fill the first `padded_rows` rows and `padded_tokens` tokens of `out`.

    A row of padding has slot 0, no tokens, length 0, and the number of tokens as its query start. A token of padding has id 0,
    position 0 and row -1, and is written to entry -1. At a stride the padding of a row is behind its tokens. A draft that isn't there has id 0. Of rows whose first position comes from the host, `accepted` is -1.
    """
    if where.stride:
        _build_strided(packed, where, tables, state, out)
        return
    rows, tokens, padded_rows, padded_tokens, one_token, _ = where
    slots, starts = packed[:rows], packed[where.starts : where.starts + rows]
    out.accepted_R[:rows] = state.accepted.index_select(0, slots).masked_fill_(starts >= 0, -1)
    starts = torch.where(starts < 0, state.lengths.index_select(0, slots), starts)
    query_start = packed[where.query_start : where.query_start + rows + 1]
    ids = packed[where.token_ids : where.token_ids + tokens]
    if one_token:
        token_slots, positions = slots, starts
        out.row_T[:tokens] = query_start[:-1]
    else:
        row_of = packed[where.token_rows : where.token_rows + tokens]
        token_slots = slots.index_select(0, row_of)
        positions = (starts - query_start[:-1]).index_select(0, row_of)
        positions += torch.arange(tokens, device=packed.device)
        out.row_T[:tokens] = row_of
    out.slots_R[:rows] = slots
    out.sample_slots[:rows] = slots
    out.query_start_R1[: rows + 1] = query_start
    out.seq_lens_R[:rows] = starts + query_start.diff()
    out.positions_T[:tokens] = positions
    out.token_ids_T[:tokens] = torch.where(ids < 0, state.tokens.index_select(0, token_slots), ids)
    if not one_token and (num_drafts := state.drafts.shape[1]):
        drafts = state.drafts.view(-1).take(token_slots * num_drafts + (-2 - ids).clamp(0, num_drafts - 1))
        out.token_ids_T[:tokens] = torch.where(ids < -1, drafts.clamp_(min=0), out.token_ids_T[:tokens])
    first_G1, width_G1, page_tokens_G1 = tables.shapes.T.unsqueeze(-1).unbind(0)
    columns_GT = positions // page_tokens_G1 % width_G1
    flat_GT = columns_GT.addcmul_(token_slots.expand_as(columns_GT), width_G1).add_(first_G1)
    out.write_entry_GT[:, :tokens] = tables.entries.take(flat_GT)
    out.write_offset_GT[:, :tokens] = positions % page_tokens_G1
    if padded_rows > rows:
        out.slots_R[rows:padded_rows] = 0
        out.sample_slots[rows:padded_rows] = -1
        out.seq_lens_R[rows:padded_rows] = 0
        out.accepted_R[rows:padded_rows] = 0
        out.query_start_R1[rows + 1 : padded_rows + 1] = tokens
    if padded_tokens > tokens:
        out.row_T[tokens:padded_tokens] = -1
        for tensor in (out.token_ids_T, out.positions_T, *out.write_offset_GT):
            tensor[tokens:padded_tokens] = 0
        out.write_entry_GT[:, tokens:padded_tokens] = -1


def _build_strided(
    packed: torch.Tensor, where: PackedRows, tables: TableSet, state: SlotState, out: StepTensors
) -> None:
    rows, padded_rows, width = where.rows, where.padded_rows, where.stride
    slots, places = packed[:rows], torch.arange(width, device=packed.device)
    counts = packed[where.query_start : where.query_start + rows + 1].diff()
    starts = state.lengths.index_select(0, slots)
    for tensor in (out.slots_R, out.seq_lens_R, out.accepted_R):
        tensor[:padded_rows] = 0
    out.slots_R[:rows], out.seq_lens_R[:rows] = slots, starts + counts
    out.accepted_R[:rows] = state.accepted.index_select(0, slots)
    out.query_start_R1[: padded_rows + 1] = torch.arange(padded_rows + 1, device=packed.device) * width
    there = torch.zeros(padded_rows, width, dtype=torch.bool, device=packed.device)
    there[:rows] = places < counts[:, None]

    def put(target: torch.Tensor, values_RW: torch.Tensor, padding: int) -> None:
        view = target[: padded_rows * width].view(padded_rows, width)
        view.fill_(padding)
        view[:rows] = torch.where(there[:rows], values_RW, padding).to(target.dtype)

    positions = starts[:, None] + places
    drafts = state.drafts.index_select(0, slots)[:, : width - 1].clamp(min=0)
    put(out.token_ids_T, torch.cat((state.tokens.index_select(0, slots)[:, None], drafts), 1), 0)
    put(out.positions_T, positions, 0)
    put(out.row_T, torch.arange(rows, device=packed.device)[:, None].expand(-1, width), -1)
    put(out.sample_slots, slots[:, None].expand(-1, width), -1)
    for group, (first, columns, page_tokens) in enumerate(tables.shapes.tolist()):
        at = (first + slots * columns)[:, None] + positions // page_tokens % columns
        put(out.write_entry_GT[group], tables.entries.take(at), -1)
        put(out.write_offset_GT[group], positions % page_tokens, 0)


build_rows.on_cpu(native.build_rows)


@gpu_kernel("batch")
def store_tokens(slots_S: torch.Tensor, tokens_S: torch.Tensor, positions_S: torch.Tensor, state: SlotState) -> None:
    """The slots' last tokens are these now, sampled after the tokens at `positions`; no draft was accepted. Slots of -1 are left out."""
    own_S = slots_S % state.tokens.shape[0]
    state.tokens.index_copy_(0, own_S, tokens_S)
    state.lengths.index_copy_(0, own_S, positions_S + 1)
    state.accepted.index_fill_(0, own_S, 0)
