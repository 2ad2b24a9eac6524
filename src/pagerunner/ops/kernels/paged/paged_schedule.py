"""What the attention kernels of a step need to know about its rows, computed once a step on the device.

Rows with one new token are units of `paged_decode`, rows of strided batches those of `paged_drafts`, rows with more tokens are blocks of
`paged_prefill`. Shape letters: T tokens, R rows, U units.
"""

from __future__ import annotations

import triton
import triton.language as tl

# of a part, if a whole turn of programs is to have one: merging takes as long as a few tiles
LEAST_TILES = tl.constexpr(8)
MOST_PARTS = tl.constexpr(64)  # of a block, because merging takes time too


@triton.jit
def _agree(table_ptr, table_st, slots_ptr, lengths_ptr, slot0, column, num_rows, BLOCK: tl.constexpr):
    """How many of 16 columns from `column` on, counted until the first that differs, are equal in all rows."""
    columns = column + tl.arange(0, 16)
    wanted = tl.load(table_ptr + tl.cast(slot0, tl.int64) * table_st + columns)
    differs = tl.zeros([16], tl.int32)
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        there = (row < num_rows) & (tl.load(lengths_ptr + row, mask=row < num_rows, other=0) > 0)
        slot = tl.load(slots_ptr + row, mask=there, other=0).to(tl.int64)
        entry = tl.load(table_ptr + slot[:, None] * table_st + columns[None, :], mask=there[:, None], other=0)
        differs += tl.sum((there[:, None] & (entry != wanted[None, :])).to(tl.int32), 0)
    first = tl.min(tl.where(differs > 0, tl.arange(0, 16), 16), 0)
    return first


@triton.jit
def _shared_tokens(
    table_ptr, table_st, slots_ptr, starts_ptr, lengths_ptr, num_rows, least, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many tokens of leading pages all rows of a step share, and the slot of a row that has these pages.

    0 tokens if reading them once spares fewer than `least` reads of a token.
    """
    rows = 0
    shortest = 0x7FFFFFFF
    any_row = 0
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        length = tl.load(lengths_ptr + row, mask=row < num_rows, other=0)
        past = length + tl.load(starts_ptr + row, mask=row < num_rows, other=0)
        past -= tl.load(starts_ptr + row + 1, mask=row < num_rows, other=0)
        rows += tl.sum((length > 0).to(tl.int32), 0)
        shortest = tl.minimum(shortest, tl.min(tl.where(length > 0, past, 0x7FFFFFFF), 0))
        any_row = tl.maximum(any_row, tl.max(tl.where(length > 0, row, 0), 0))
    slot = tl.load(slots_ptr + any_row)
    pages = 0
    limit = shortest // PAGE // 16 * 16
    if rows < 2 or (rows - 1) * limit * PAGE < least:
        limit = 0
    more = limit > 0
    while more:
        found = _agree(table_ptr, table_st, slots_ptr, lengths_ptr, slot, pages, num_rows, BLOCK)
        pages += found
        more = (found == 16) & (pages < limit)
    shared = pages * PAGE
    if (rows - 1) * shared < least:
        shared = 0
    return shared, slot


@triton.jit
def _block_tiles(starts_ptr, lengths_ptr, row, there, window, chunk, BT: tl.constexpr, BNP: tl.constexpr):
    """Of rows, how many blocks of BT queries each has, and about how many tiles of keys each of its blocks sees."""
    queries = tl.load(starts_ptr + row + 1, mask=there, other=0) - tl.load(starts_ptr + row, mask=there, other=0)
    past = tl.load(lengths_ptr + row, mask=there, other=0) - queries
    oldest = tl.zeros_like(past)
    if chunk > 0:
        oldest = past // chunk * chunk
    elif window > 0:
        oldest = tl.maximum(past - window + 1, 0)
    tiles = tl.cdiv(tl.maximum(past - oldest, 0), BNP) + tl.cdiv(queries, BNP)
    return tl.where(queries > 1, tl.cdiv(queries, BT), 0), tiles


@triton.jit
def _divide_blocks(
    starts_ptr, lengths_ptr, part_ptr, num_rows, window, chunk, slices, BT: tl.constexpr, BNP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Prefix sums of the parts of rows' blocks: see `schedule_kernel`."""
    blocks = 0
    tiles = 0
    if slices > 0:
        for start in range(0, num_rows, BLOCK):
            row = start + tl.arange(0, BLOCK)
            count, of_block = _block_tiles(starts_ptr, lengths_ptr, row, row < num_rows, window, chunk, BT, BNP)
            blocks += tl.sum(count, 0)
            tiles += tl.sum(count * of_block, 0)
    per = tl.maximum(tl.cdiv(tiles, tl.maximum(slices, 1)), 1)
    parts = 0
    if slices > 0:
        for start in range(0, num_rows, BLOCK):
            row = start + tl.arange(0, BLOCK)
            count, of_block = _block_tiles(starts_ptr, lengths_ptr, row, row < num_rows, window, chunk, BT, BNP)
            parts += tl.sum(count * tl.cdiv(of_block, per), 0)
    # a block's last part may be short, and many more parts than wanted come from rounding up
    if (parts > slices) | (per < LEAST_TILES):
        per = tl.maximum(tl.cdiv(tiles, tl.maximum(slices - blocks, 1)), 1)
    parts = 0
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        there = row < num_rows
        count, of_block = _block_tiles(starts_ptr, lengths_ptr, row, there, window, chunk, BT, BNP)
        if slices > blocks:
            count *= tl.minimum(tl.cdiv(of_block, per), MOST_PARTS)
        tl.store(part_ptr + 1 + row, parts + tl.cumsum(count, 0), mask=there)
        parts += tl.sum(count, 0)
    tl.store(part_ptr, 0)


@triton.jit(
    do_not_specialize=["num_units", "num_rows", "num_counters", "window", "chunk", "least", "shared_splits", "entry_tiles", "slices"]
)  # fmt: skip
def schedule_kernel(
    table_ptr, table_st, slots_ptr, starts_ptr, lengths_ptr, row_ptr, position_ptr,
    info_ptr, begin_ptr, unit_ptr, part_ptr, counter_ptr,
    num_units, num_rows, num_counters, window, chunk, least, shared_splits, entry_tiles, slices,
    PAGE: tl.constexpr, BN: tl.constexpr, ALIGN: tl.constexpr, BT: tl.constexpr, BNP: tl.constexpr, OWN: tl.constexpr,
    SHARED: tl.constexpr, LONG: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program. Units are tokens; with a STRIDE they are rows. Unless OWN, all of their tokens are in pages. Those of padding are units too, because a
    program has to write their zeros. `entry_tiles`: see `decode_kernel`. A row's first tile begins at a multiple of ALIGN.

    `begin` [U + 1], `unit` [U, 4]: see `decode_kernel`; `info` [6]: see `shared_kernel`, then `taken` of `gluon_prefill_kernel`; `part` [R + 1]: prefix sums of the
    parts of rows' blocks of BT queries; `counter`: zeros. Blocks' keys are divided so that the step has at most `slices` parts, if it has
    fewer blocks than these. Otherwise each block is one part.
    """
    for start in range(0, num_counters, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(counter_ptr + at, tl.zeros([BLOCK], tl.int32), mask=at < num_counters)
    shared = 0
    slot0 = 0
    if SHARED:
        shared, slot0 = _shared_tokens(
            table_ptr, table_st, slots_ptr, starts_ptr, lengths_ptr, num_rows, least, PAGE, BLOCK
        )
    units = 0
    tiles = 0
    for start in range(0, num_units, BLOCK):
        unit = start + tl.arange(0, BLOCK)
        there = unit < num_units
        token = unit * STRIDE if STRIDE else unit
        row = tl.load(row_ptr + token, mask=there, other=-1)
        real = row >= 0
        short = there
        if LONG:
            queries = tl.load(starts_ptr + row + 1, mask=real, other=1) - tl.load(starts_ptr + row, mask=real, other=0)
            short = there & (queries == 1)
        position = tl.load(position_ptr + token, mask=real, other=0).to(tl.int32)
        slot = tl.load(slots_ptr + row, mask=real, other=-1)
        oldest = tl.zeros([BLOCK], tl.int32) + shared
        if OWN or STRIDE:
            if chunk > 0:
                oldest = position // chunk * chunk
            elif window > 0:
                oldest = tl.maximum(position - window + 1, 0)
        stop = position + 1
        if OWN:
            stop = position
        elif STRIDE:
            stop = tl.load(lengths_ptr + row, mask=real, other=0)
        stop = tl.where(real, stop, oldest)
        count = tl.where(short, tl.maximum(tl.cdiv(stop - oldest // ALIGN * ALIGN, BN), 1) + entry_tiles, 0)
        index = units + tl.cumsum(short.to(tl.int32), 0) - 1
        ends = tiles + tl.cumsum(count, 0)
        tl.store(begin_ptr + index + 1, ends, mask=short)
        tl.store(unit_ptr + index * 4, token, mask=short)
        tl.store(unit_ptr + index * 4 + 1, slot, mask=short)
        tl.store(unit_ptr + index * 4 + 2, oldest, mask=short)
        tl.store(unit_ptr + index * 4 + 3, stop, mask=short)
        units += tl.sum(short.to(tl.int32), 0)
        tiles += tl.sum(count, 0)
    tl.store(begin_ptr, 0)
    tl.store(info_ptr, units)
    tl.store(info_ptr + 1, shared)
    tl.store(info_ptr + 2, tl.where(shared > 0, shared_splits, 0))
    tl.store(info_ptr + 3, slot0)
    tl.store(info_ptr + 4, 0)  # blocks that programs of long rows have taken
    tl.store(info_ptr + 5, 0)
    if LONG:
        # units that aren't there have no tiles
        tl.debug_barrier()
        for start in range(0, num_units, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(begin_ptr + 1 + at, tl.zeros([BLOCK], tl.int32) + tiles, mask=(at >= units) & (at < num_units))
        _divide_blocks(starts_ptr, lengths_ptr, part_ptr, num_rows, window, chunk, slices, BT, BNP, BLOCK)
