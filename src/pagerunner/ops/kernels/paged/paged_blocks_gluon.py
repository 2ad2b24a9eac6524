"""Which tiles of keys a block of queries has in `kernels/paged/paged_prefill_gluon.py`: in which order, where they lie, and which of them need masks.

Example: the block with queries 64 to 95 of a row after 300 tokens, with tiles of 128 keys. Its tiles are the new tokens 0 to 127, of which each query sees others; the last 44 of
the past; then its tokens 128 to 255, and 0 to 127. In a window of 100 keys these last ones are none that a query sees, and the end of the past needs a mask for its oldest keys, too.

Shape letters: see `paged_prefill_gluon`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

M = gl.constexpr(128)
"""Rows of a block."""


@gluon.jit
def row_of(part_ptr, part, num_rows):
    """Whose part this is, of prefix sums [R + 1] of the rows' parts."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    row = gl.to_tensor(0)
    for start in range(0, num_rows, 256):
        i = start + gl.arange(0, 256, layout)
        ends = gl.load(part_ptr + 1 + i, mask=i < num_rows, other=0x7FFFFFFF)
        row += gl.sum((ends <= part).to(gl.int32), 0)
    return row


@gluon.jit
def newest_tile(first, num_new, G: gl.constexpr, N: gl.constexpr):
    """The tile of the newest token that a block's queries see."""
    if N % (M // G) == 0:  # a block's queries are in one tile
        tile = first // N
    else:
        tile = (gl.minimum(first + M // G, num_new) - 1) // N
    return tile


@gluon.jit
def oldest_seen(position, reach):
    """The oldest position that a query at `position` sees."""
    window, chunk, _ = reach
    return gl.where(chunk > 0, position // gl.maximum(chunk, 1) * chunk, gl.maximum(position - window + 1, 0))


@gluon.jit
def counts_of(first, num_new, past, reach, G: gl.constexpr, N: gl.constexpr, REACH: gl.constexpr):
    """Tiles of a block: those before its newest tokens' that not all its queries see (0 or 1), of an incomplete end of the past (0 or 1), the newest's number among
    those of new tokens, and all. Then how many of new tokens there are before the newest, and the oldest position that a query sees.
    """
    partial, diagonal = (past % N != 0).to(gl.int32), newest_tile(first, num_new, G, N)
    across = diagonal - first // N
    fresh, old, oldest = diagonal, past // N, 0
    if REACH:
        oldest = oldest_seen(past + first, reach)
        fresh = diagonal - gl.maximum(oldest - past, 0) // N
        old = gl.maximum(old - oldest // N, 0)
        partial = gl.where(oldest < past, partial, 0)
    return across, partial, diagonal, 1 + partial + fresh + old, fresh, oldest


@gluon.jit
def tail_of(first, num_new, past, counts, reach, G: gl.constexpr, N: gl.constexpr):
    """How many of a block's last tiles have keys that not all of its queries reach."""
    across, partial, diagonal, total, fresh, oldest = counts
    last = oldest_seen(past + gl.minimum(first + M // G, num_new) - 1, reach)
    new = gl.maximum(last - past + N - 1, 0) // N - (diagonal - fresh)
    old = (last + N - 1) // N - oldest // N
    return gl.minimum(gl.maximum(new, 0), fresh - across) + gl.minimum(gl.maximum(old, 0), total - 1 - partial - fresh)


@gluon.jit
def share_of(part, parts, counts):
    """The tiles that a part of a block has: the first, and the one behind the last. The first part has all that need masks. A part for which
    there are none has one too, of which it sees nothing: then the last number is 0.
    """
    across, partial, _, total = counts[:4]
    masked, each = 1 + across + partial, (total + parts - 1) // parts
    begin = gl.where(part > 0, gl.minimum(gl.maximum(part * each, masked), total), 0)
    end = gl.minimum(gl.maximum((part + 1) * each, masked), total)
    first = gl.minimum(begin, total - 1)
    return first, gl.maximum(end, first + 1), (begin < end).to(gl.int32)


@gluon.jit
def masks_of(block, query_M, reach, G: gl.constexpr, N: gl.constexpr, DIVIDED: gl.constexpr, REACH: gl.constexpr):
    """Of a block, or of a part of it: the last key of its first tile that each query sees, how many of this tile exist, how many tiles behind it need masks
    because not all queries see them (0 or 1) and as the end of the past (0 or 1), and how many tiles there are. Then the first tile among the block's, the block's `counts_of`, and
    with a REACH how many of the last tiles need masks, and the oldest position that each query sees.
    """
    _, _, num_new, past, first = block[:5]
    counts = counts_of(first, num_new, past, reach, G, N, REACH)
    across, partial, diagonal, total = counts[:4]
    last_M, there = first - diagonal * N + query_M, num_new - diagonal * N
    begin, end = 0, total
    if DIVIDED:
        begin, end, some = share_of(block[5], block[6], counts)
        total = end - begin
        there = gl.where(begin == 0, there, gl.where((partial > 0) & (begin == across + 1), past % N, N))
        last_M = gl.where(block[5] == 0, last_M, some * N - 1)
        across, partial = gl.where(block[5] == 0, across, 0), gl.where(block[5] == 0, partial, 0)
    oldest_M, tail = query_M, 0
    if REACH:
        tail = tail_of(first, num_new, past, counts, reach, G, N) - (counts[3] - end)
        tail = gl.minimum(gl.maximum(tail, 0), total - 1 - across - partial)
        oldest_M = oldest_seen(past + first + query_M, reach)
    return last_M, there, across, partial, total, begin, counts, tail, oldest_M


@gluon.jit
def tile_at(i, counts, past, N: gl.constexpr):
    """Whether a block's i-th tile is of new tokens, and the first of its keys among these or in the past."""
    across, partial, diagonal, _, fresh, _ = counts
    at = i - 1 - gl.where(i > across, partial, 0)
    end = (i == across + 1) & (partial > 0)
    new = (i == 0) | ((at < fresh) & (i > 0) & (end == 0))
    tile = past // N
    if i == 0:
        tile = diagonal
    elif end == 0:
        tile = gl.where(at < fresh, diagonal - 1 - at, past // N - 1 - (at - fresh))
    return new, tile * N


@gluon.jit
def reached(oldest_M, i, counts, past, N: gl.constexpr, REACH: gl.constexpr):
    """The first key of a block's i-th tile that each query reaches."""
    first_M = oldest_M
    if REACH:
        new, start = tile_at(i, counts, past, N)
        first_M = oldest_M - start - gl.where(new, past, 0)
    return first_M


@gluon.jit
def older_in_partial(counts, past, N: gl.constexpr, REACH: gl.constexpr):
    """How many keys of the past's incomplete end no query reaches."""
    count = 0
    if REACH:
        count = gl.maximum(counts[5] - past // N * N, 0)
    return count


@gluon.jit
def older_in_last(end, counts, N: gl.constexpr):
    """How many keys of the last tile before `end` no query reaches. It is one of the past then, and whole."""
    last = (end == counts[3]) & (counts[3] - 1 > counts[1] + counts[4])
    return gl.where(last, counts[5] % N, 0)


@gluon.jit
def rows_of_pieces(row_table, start, past, oldest, width, page_rows, PIECE: gl.constexpr, N: gl.constexpr, PAGE: gl.constexpr, REACH: gl.constexpr):  # fmt: skip
    """Where the pieces of a tile of the past begin in the pages' rows. Beyond the row's last page is that one, and before the one with the `oldest` key that is seen
    that one. All loads are on their way together, and each gives a number to all lanes: to take a page's from another lane takes longer than its copy.
    """
    found = ()
    for piece in gl.static_range(N // PIECE):
        at = start + piece * PIECE
        page = gl.minimum(at // PAGE, (past - 1) // PAGE)
        if REACH:
            page = gl.maximum(page, oldest // PAGE) % width
        row = gl.load(row_table + page, mask=past > 0, other=0).to(gl.int32) * page_rows
        if PAGE != PIECE:
            row += at % PAGE
        found = found + (row,)
    return found
