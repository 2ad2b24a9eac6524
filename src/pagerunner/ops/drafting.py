"""What a drafter's passes work on, made on the device from what it knows of each slot.

Shape letters: T tokens of the step, R rows, S rows that go on, G memory groups, N slots, K drafts of a slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagerunner.ops.batch import SlotState, TableSet
from pagerunner.ops.dispatch import gpu_kernel


@dataclass(frozen=True, slots=True)
class PassTensors:
    """The rows of a pass, each of one token. Types as in StepRows and GroupBatch of pagerunner.batch. Larger than any pass; all passes use it in turn."""

    positions_S: torch.Tensor
    row_S: torch.Tensor
    slots_S: torch.Tensor
    query_start_S1: torch.Tensor
    seq_lens_S: torch.Tensor
    write_entry_GS: torch.Tensor
    write_offset_GS: torch.Tensor

    @staticmethod
    def num_bytes(rows: int, groups: int) -> int:
        """Bytes of `empty`."""
        return rows * (8 + 4 * 3 + 16 * groups) + (rows + 1) * 4

    @classmethod
    def empty(cls, rows: int, groups: int, device: torch.device) -> PassTensors:
        """Tensors for up to `rows` rows."""

        def make(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            positions_S=make(torch.int64, rows),
            row_S=make(torch.int32, rows),
            slots_S=make(torch.int32, rows),
            query_start_S1=make(torch.int32, rows + 1),
            seq_lens_S=make(torch.int32, rows),
            write_entry_GS=make(torch.int64, groups, rows),
            write_offset_GS=make(torch.int64, groups, rows),
        )


@gpu_kernel("sampling.drafting")
def next_tokens(
    token_ids_T: torch.Tensor, row_T: torch.Tensor, positions_T: torch.Tensor, slots_R: torch.Tensor, state: SlotState
) -> torch.Tensor:
    """The token behind each of a step's tokens, int64 [T], once the slots know what the step has led to.

    A slot's last token is the one behind its last computed token. Tokens after that were drafts that weren't right; they get the last token, too, as nobody
    reads what becomes of them. Padding gets 0.
    """
    slot_T = slots_R.long()[row_T.clamp(min=0)]
    follows_T = torch.cat((token_ids_T[1:], token_ids_T.new_zeros(1)))
    found_T = torch.where(positions_T + 1 < state.lengths[slot_T], follows_T, state.tokens[slot_T])
    return found_T.masked_fill_(row_T < 0, 0)


@gpu_kernel("sampling.drafting")
def build_pass(
    slots_S: torch.Tensor,
    ahead: int,
    last_position: int,
    tables: TableSet,
    groups: tuple[int, ...],
    state: SlotState,
    out: PassTensors,
) -> None:
    """Fill the first S rows of `out`: a token for each slot, `ahead` places behind its last computed one, but not behind `last_position`.

    Slots of -1 are padding, behind all others: rows of length 0, tokens of row -1. The pass has layers in `groups`. A token without a page of its slot in one of them
    isn't stored (entry -1), and is at the last position that has one: entries behind a slot's pages may be missing, so nobody may read there.
    """
    count = slots_S.shape[0]
    real_S = slots_S >= 0
    own_S = slots_S.clamp(min=0)
    wanted_S = (state.lengths[own_S] - 1 + ahead).clamp(max=last_position)
    ends_S = tables.ends_GN[list(groups)].amin(0)[own_S]
    stored_S = real_S & (wanted_S < ends_S)
    positions_S = torch.minimum(wanted_S, ends_S - 1).clamp(min=0).mul_(real_S)
    rows = torch.arange(count + 1, dtype=torch.int32, device=slots_S.device)
    out.positions_S[:count] = positions_S
    out.row_S[:count] = torch.where(real_S, rows[:-1], -1)
    out.slots_S[:count] = own_S
    out.query_start_S1[: count + 1] = torch.minimum(rows, real_S.sum())
    out.seq_lens_S[:count] = torch.where(real_S, positions_S + 1, 0)
    for group, (first, width, page_tokens) in enumerate(tables.shapes.tolist()):
        entries_S = tables.entries[first + own_S * width + positions_S // page_tokens % width]
        out.write_entry_GS[group, :count] = torch.where(stored_S, entries_S, -1)
        out.write_offset_GS[group, :count] = positions_S % page_tokens


@gpu_kernel("sampling.drafting")
def store_drafts(slots_S: torch.Tensor, drafts_S: torch.Tensor, place: int, state: SlotState) -> None:
    """The slots' drafts number `place`, from 0 on, are these. Slots of -1 are left out."""
    state.drafts[:, place].index_copy_(0, slots_S % state.drafts.shape[0], drafts_S)
