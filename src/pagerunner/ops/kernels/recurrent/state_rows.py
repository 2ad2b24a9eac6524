"""What the kernels of recurrent layers share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import blocks, multiprocessors, shared_memory
from pagerunner.ops.state_rows import StateRows

LISTED = 256  # rows that are looked through at once


@triton.jit
def softplus(x):
    """`log(1 + e^x)`, accurate for every x."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    small = tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.where(x > 20.0, x, small)


@triton.jit
def _add_within_row(begins, sum_before, begins_too, x):
    """Combine two stretches of tokens.

    Each has a flag, whether a row begins in it, and its sum since that beginning.
    """
    return begins | begins_too, tl.where(begins_too != 0, x, sum_before + x)


@triton.jit
def row_sums(x, row, row_T, token, index):
    """Running sums over a block's tokens. A new sum begins where a row begins."""
    before = tl.load(row_T + token - 1, mask=(index > 0) & (row >= 0), other=-1)
    _, total = tl.associative_scan(((before != row).to(tl.int32), x), 0, _add_within_row)
    return total


@triton.jit
def state_entry(table, slots, row, table_stride):
    """The row's page table entry, int64."""
    slot = tl.load(slots + row).to(tl.int64)
    return tl.load(table + slot * table_stride)


@triton.jit
def row_tokens(query_start, seq_lens, positions, accepted, row, JOURNAL: tl.constexpr):
    """A row's tokens: the first one, the one after its last, the one after those whose state it keeps, how many accepted drafts
    come before the first, and whether it takes one token after another. See `ops.state_rows`.
    """
    first = tl.load(query_start + row)
    end = tl.load(query_start + row + 1)
    replayed = 0
    certain = end
    by_one = False
    if JOURNAL > 0:
        there = first < end
        start = tl.cast(tl.load(positions + first, mask=there, other=0), tl.int32)
        end = tl.where(there, first + tl.load(seq_lens + row) - start, end)
        held = tl.minimum(tl.load(accepted + row), JOURNAL)
        by_one = held >= 0
        replayed = tl.where(by_one & (first < end), held, 0)
        certain = tl.where(by_one, tl.minimum(first + 1, end), end)
    return first, end, certain, replayed, by_one


@triton.jit
def row_or_padding(query_start, seq_lens, positions, accepted, row, num_rows, num_tokens, JOURNAL: tl.constexpr):
    """`row_tokens`, and the padding behind a row's tokens as its first and the one after its last. Row R stands for what is behind
    all rows, and has no tokens.
    """
    padding = row == num_rows
    first, end, certain, replayed, by_one = row_tokens(
        query_start, seq_lens, positions, accepted, tl.minimum(row, num_rows - 1), JOURNAL
    )
    room = tl.load(query_start + row + 1, mask=row < num_rows, other=0)
    room = tl.where(padding, num_tokens, room)
    end = tl.where(padding, tl.load(query_start + row), end)
    return tl.where(padding, end, first), end, certain, replayed, by_one, room


@triton.jit
def list_long_rows(
    listed, query_start, seq_lens, positions, accepted, num_rows, MOST: tl.constexpr, JOURNAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write how many rows run in blocks, then these rows. A graph has room for many rows, of which few or none are long."""
    count = 0
    for begin in range(0, num_rows, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        first, end, _, _, by_one = row_tokens(
            query_start, seq_lens, positions, accepted, tl.minimum(row, num_rows - 1), JOURNAL
        )
        long = ((row < num_rows) & (end - first > MOST) & (by_one == 0)).to(tl.int32)
        tl.store(listed + count + tl.cumsum(long, 0), row, mask=long != 0)
        count += tl.sum(long, 0)
    tl.store(listed, count)


@triton.jit
def any_of_few(query_start, begin, num_rows, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """Whether this program's are rows of 1 to MOST tokens, or the padding behind all rows: of BLOCK rows from `begin` on, every one in turn."""
    row = begin + tl.arange(0, BLOCK)
    first = tl.load(query_start + row, mask=row < num_rows, other=0)
    count = tl.load(query_start + row + 1, mask=row < num_rows, other=0) - first
    wanted = ((count > 0) & (count <= MOST)) | (row == num_rows)
    mine = (row - begin) % tl.num_programs(2) == tl.program_id(2)
    return tl.max((wanted & mine).to(tl.int32), 0) > 0


@triton.jit
def behind(token, first, replayed, row, num_tokens, JOURNAL: tl.constexpr):
    """Where a token is in inputs that have accepted drafts behind the step's tokens. Drafts are the tokens before `first`."""
    if JOURNAL > 0:
        token = tl.where(token < first, num_tokens + row * JOURNAL + token - (first - replayed), token)
    return token


@triton.jit
def saves_of(save_start, positions, row, first, end, HAS_SAVES: tl.constexpr):
    """Which saves are the row's: the first one, and the one after the last. Also what turns positions into tokens of the step."""
    at = tl.load(save_start + row) if HAS_SAVES else 0
    stop = tl.load(save_start + row + 1) if HAS_SAVES else 0
    shift = first - tl.cast(tl.load(positions + first, mask=first < end, other=0), tl.int32) if HAS_SAVES else 0
    return at, stop, shift


@triton.jit
def save_token(save_position, save, stop, shift, last):
    """The token before which save `save` is; after the row's last save, `last`."""
    position = tl.load(save_position + save, mask=save < stop, other=0)
    return tl.where(save < stop, position + shift, last)


@triton.jit
def save_begin(save_position, save, at, shift, first):
    """The token behind the save before save `save`; for the row's first save, the row's `first` token.

    A loop over saves must not carry this from one to the next: Triton 3.6 doesn't see that an inner loop's bounds read what the outer
    loop carries, and then leaves it as it was before the outer loop. `scripts/check_compiled.py` finds such loops.
    """
    position = tl.load(save_position + save - 1, mask=save > at, other=0)
    return tl.where(save > at, position + shift, first)


@triton.jit
def _entry_of(target, state_stride, ITEM: tl.constexpr):
    return target // (tl.cast(state_stride, tl.int64) * ITEM)


@triton.jit
def saved_entry(save_target, save, stop, own, state_stride, ITEM: tl.constexpr):
    """The page table entry that save `save` goes to, int64; the row's own after the last one.

    The compiler knows the alignment of an entry times the stride. It doesn't know the alignment of a target.
    """
    target = tl.load(save_target + save, mask=save < stop, other=0)
    return tl.where(save < stop, _entry_of(target, state_stride, ITEM), own)


@triton.jit
def keep_state(
    state, held, inside, mask, own, upto, certain, save_position, save_target, saves, state_stride, ITEM: tl.constexpr
):  # fmt: skip
    """Write the state before token `upto` where one of the row's `saves` is, and to the row's page if no certain token is left."""
    at, stop, shift = saves
    for save in range(at, stop + 1):
        if save_token(save_position, save, stop, shift, certain) == upto:
            entry = own
            if save < stop:  # what divides 64 bits is better jumped over
                entry = unfinished_entry(save_target, save, state_stride, ITEM)
            tl.store(state + entry * state_stride + inside, held.to(state.dtype.element_ty), mask=mask)


@triton.jit
def unfinished(
    save_row, save_position, save, query_start, seq_lens, positions, accepted,
    JOURNAL: tl.constexpr, MOST: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The token before which a save is, its row's first token, and whether it lies inside a block of a row of more than MOST."""
    row = tl.load(save_row + save)
    first, end, _, _, by_one = row_tokens(query_start, seq_lens, positions, accepted, row, JOURNAL)
    cut = tl.load(save_position + save) + first - tl.cast(tl.load(positions + first), tl.int32)
    return cut, first, (cut % C != 0) & (end - first > MOST) & (by_one == 0)


@triton.jit
def unfinished_entry(save_target, save, state_stride, ITEM: tl.constexpr):
    """The page table entry, int64, of a save that is there."""
    return _entry_of(tl.load(save_target + save), state_stride, ITEM)


def at_once(rows: StateRows, programs: int, most: int) -> int:
    """How many rows have programs of their own, `programs` each; these take the rows beyond in turn. For each multiprocessor about `most` start,
    or more if so many rows are sure to have tokens: a graph says of its longest row only that it may have all tokens.
    """
    fits = blocks(most * multiprocessors(rows.page_table.device), programs)
    return max(1, min(rows.step.num_rows, max(fits, least_rows(rows))))


def least_rows(rows: StateRows) -> int:
    """How many rows have tokens, at least. Example: 8,100 tokens with at most 300 a row are 27 rows or more."""
    return rows.step.num_tokens // max(rows.step.max_query_len, 1)


def stages(most: int, block: int, device: torch.device) -> int:
    """Blocks whose tiles, `block` bytes each, are held at a time: at most `most`, while a sixth of the memory is left."""
    return max(1, min(most, shared_memory(device) * 5 // 6 // block))


def row_arguments(rows: StateRows, inputs: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], int]:
    """Slots, query starts, lengths, positions and accepted drafts; and the entries of a journal (`StateRows.entries`)."""
    step, entries = rows.step, rows.entries(inputs)
    accepted_R = step.seq_lens_R if step.accepted_R is None else step.accepted_R
    assert not entries or step.accepted_R is not None, "a step with journals says which drafts were accepted"
    return (step.slots_R, step.query_start_R1, step.seq_lens_R, step.positions_T, accepted_R), entries


def save_arguments(rows: StateRows) -> tuple[object, ...]:
    """Start, row, position and target tensors, and whether there are any; without saves any tensors will do."""
    if rows.saves is None:
        return *[rows.step.query_start_R1] * 4, False
    return (*rows.saves, True)
