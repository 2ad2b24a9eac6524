"""Attention to vectors and slots of `kernels/vectors_attention.py` for heads of 512 on Hopper, in Gluon: Triton's language with layouts that the program chooses.

A program has 64 heads of a token; what a tile has beyond a rank's heads is left out at the end. Both groups of four warps work on each tile of keys: a group computes the scores of half of its keys, and the sums of half
of their elements. Triton places chained products so that both groups compute all scores. Keys are copied into shared memory once, where they are the
second operand of both products; the next tile's are on their way meanwhile.

Window and slots are one list of keys: first the window, then slots. So a tile may have some of either, and of 128 + 512 keys each of ten tiles is full.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from pagerunner.ops.kernels.launch import start_next, wait_turn
from pagerunner.ops.kernels.vectors_attention import LOG2_E, LOWEST

HELD = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
"""How matrix units want queries, keys and weights to lie in shared memory."""
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
"""Vectors as they are copied: a warp copies half of one at a time, 16 bytes a lane."""
BN = gl.constexpr(64)
"""Keys of a tile."""
KEYS = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))


@gluon.jit
def _number(chosen_ptr, key, seen, count, CHOSEN: gl.constexpr):
    """Which slots are keys `key`, of which the first `seen` are the window's; -1: none."""
    number = gl.where(key < count, key - seen, -1)
    if CHOSEN:
        number = gl.load(chosen_ptr + number, mask=number >= 0, other=-1)
    return number


@gluon.jit
def _entry(window_table, slot_table, number, key, seen, least, start, window_width, slot_width, PAGE: gl.constexpr, SLOT_PAGE: gl.constexpr):  # fmt: skip
    """The pages of keys; -1: none, or a vector of the step itself."""
    position = least + key
    own = key < seen
    place = gl.where(
        own,
        window_table + position // PAGE % window_width,
        slot_table + gl.maximum(number, 0) // SLOT_PAGE % slot_width,
    )
    return gl.load(place, mask=gl.where(own, position < start, number >= 0), other=-1)


@gluon.jit
def _place(q_at, vectors, window, slots, number, entry, key, seen, least, start, first, vector_stride, window_stride, window_slot, page_stride,
           page_slot, PAGE: gl.constexpr, SLOT_PAGE: gl.constexpr, NEW: gl.constexpr):  # fmt: skip
    """Where keys lie, and which are there. One that isn't is read as the token's query, whose numbers are finite."""
    position, number = least + key, gl.maximum(number, 0)
    held = gl.where(
        key < seen,
        window + entry * window_stride + position % PAGE * window_slot,
        slots + entry * page_stride + number % SLOT_PAGE * page_slot,
    )
    live = entry >= 0
    if NEW:
        new = (key < seen) & (position >= start)
        held = gl.where(new, vectors + (first + position).to(gl.int64) * vector_stride, held)
        live = live | new
    return gl.where(live, held, q_at), live


@gluon.jit
def _copy(smem, place, D: gl.constexpr):
    """Begin to bring a tile of keys."""
    rows = gl.convert_layout(place, gl.SliceLayout(1, COPIED))
    at = gl.multiple_of(rows, 16)[:, None] + gl.arange(0, D, gl.SliceLayout(0, COPIED))[None, :]
    async_copy.async_copy_global_to_shared(smem, at)


@gluon.jit
def _back(x, cos, sin, D: gl.constexpr, P: gl.constexpr):
    """Results [64, D], turned back. A thread has both numbers of a pair."""
    one, two = gl.split(gl.reshape(x, (64, D // 2, 2)))
    pair = gl.arange(0, D // 2, gl.SliceLayout(0, one.type.layout)) - (D - P) // 2
    c = gl.load(cos + pair, mask=pair >= 0, other=1.0).to(gl.float32)[None, :]
    s = gl.load(sin + P // 2 + pair, mask=pair >= 0, other=0.0).to(gl.float32)[None, :]
    return gl.convert_layout(gl.reshape(gl.join(one * c + two * s, two * c - one * s), (64, D)), x.type.layout)


@gluon.jit
def _finish(out, sinks, cos, sin, block, num_heads, most, total, acc, D: gl.constexpr, P: gl.constexpr):
    """Give sinks their share, turn results back, and store them."""
    head = block + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    sink = gl.load(sinks + head, mask=head < num_heads, other=0.0).to(gl.float32) * LOG2_E
    larger = gl.maximum(most, sink)
    shrink = gl.exp2(most - larger)
    y = _back(acc * (shrink / (total * shrink + gl.exp2(sink - larger)))[:, None], cos, sin, D, P)
    y = gl.convert_layout(y.to(out.dtype.element_ty), COPIED)  # 16 bytes a lane
    own = block + gl.arange(0, 64, gl.SliceLayout(1, COPIED))
    d = gl.arange(0, D, gl.SliceLayout(0, COPIED))
    gl.store(out + own[:, None] * D + d[None, :], y, mask=(own < num_heads)[:, None])


@gluon.jit
def _leave(parts, found, head, there, most, total, acc, some, D: gl.constexpr):
    """Leave a part's result, normalised, and the log-sum-exp of its scores."""
    seen = total != 0  # what is no number is left as it is
    total = gl.where(seen, total, 1.0)
    gl.store(found + head, gl.where(seen, most + gl.log2(total), LOWEST), mask=there)
    if some:
        d = gl.arange(0, D, gl.SliceLayout(0, SUMS))
        gl.store(parts + head[:, None] * D + d[None, :], acc * (1.0 / total)[:, None], mask=there[:, None])


@gluon.jit
def _end(out, parts, found, sinks, cos, sin, token, part, num_parts, block, num_heads, angle_stride, most, sums, acc, some, D: gl.constexpr,
         P: gl.constexpr, SPLIT: gl.constexpr):  # fmt: skip
    """Store a token's results, or what a part of its keys leaves to be merged."""
    gl.thread_barrier()  # from here on, shared memory is anybody's
    total = gl.convert_layout(gl.sum(sums, 1), gl.SliceLayout(1, SUMS))
    most = gl.convert_layout(most, gl.SliceLayout(1, SUMS))
    if not SPLIT:
        angle = token * angle_stride
        _finish(out + token * num_heads * D, sinks, cos + angle, sin + angle, block, num_heads, most, total, acc, D, P)
    else:
        base = (token * num_parts + part) * num_heads
        head = block + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
        _leave(parts + base * D, found + base, head, head < num_heads, most, total, acc, some, D)


@gluon.jit
def _copy_queries(q_smem, q_at, left, q_head, D: gl.constexpr):
    """Begin to bring 64 heads' queries; those behind the last of `left` are its."""
    head = gl.minimum(gl.arange(0, 64, gl.SliceLayout(1, COPIED)), left - 1)
    async_copy.async_copy_global_to_shared(
        q_smem, q_at + head[:, None] * q_head + gl.arange(0, D, gl.SliceLayout(0, COPIED))[None, :]
    )


@gluon.jit
def _score(q_smem, k_smem):
    """Begin the scores of a tile of keys."""
    return warpgroup_mma(
        q_smem, k_smem.permute((1, 0)), gl.zeros((64, BN), gl.float32, SCORES), use_acc=False, is_async=True
    )


@gluon.jit
def _weigh(scores, p_smem, most, sums, live, scale):
    """Take a tile's scores into the running softmax, and leave its weights in shared memory. `sums` are those of weights by key of a tile."""
    live = gl.convert_layout(live, gl.SliceLayout(0, SCORES))[None, :]
    scores = gl.where(live, scores * scale, LOWEST)
    larger = gl.maximum(most, gl.max(scores, 1))
    shrink = gl.exp2(most - larger)
    weights = gl.where(live, gl.exp2(scores - larger[:, None]), 0.0)
    p_smem.store(weights.to(p_smem.dtype))
    sums = sums * shrink[:, None] + weights
    return larger, sums, gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]


@gluon.jit
def _span(row_ptr, position_ptr, start_ptr, slots_ptr, token, chosen, WINDOW: gl.constexpr, RATIO: gl.constexpr, NEW: gl.constexpr,
          CHOSEN: gl.constexpr):  # fmt: skip
    """A token's slot of page tables, its window's first position and the first that is in no page, where the step's vectors begin, keys of the window, and all."""
    row = gl.load(row_ptr + token)
    end = gl.where(row >= 0, gl.load(position_ptr + token).to(gl.int32) + 1, 0)
    row = gl.maximum(row, 0)
    slot = gl.load(slots_ptr + row).to(gl.int64)
    least = gl.maximum(end - WINDOW, 0)
    start = end
    first = end
    if NEW:
        first = gl.load(start_ptr + row)
        own = gl.load(position_ptr + first).to(gl.int32)
        start = gl.maximum(gl.minimum(own, end), least)
        first = first - own
    seen = end - least
    count = seen
    if RATIO > 0:
        complete = end // RATIO
        if CHOSEN:
            complete = gl.minimum(complete, chosen)
        count = seen + complete
    return slot, least, start, first, seen, count


@gluon.jit(
    do_not_specialize=["num_heads", "num_parts", "early", "window_width", "slot_width", "chosen", "chosen_stride"]
)
def vectors_kernel(q, vectors, window, slot_pages, chosen_ptr, sinks, cos, sin, out, parts, found, row_ptr, position_ptr, start_ptr, slots_ptr,
                   window_table, slot_table, num_heads, num_parts, early, scale, window_width, slot_width, chosen, q_token, q_head, vector_stride,
                   window_stride, window_slot, page_stride, page_slot, chosen_stride, angle_stride, window_table_stride,
                   slot_table_stride, WINDOW: gl.constexpr, RATIO: gl.constexpr, PAGE: gl.constexpr, SLOT_PAGE: gl.constexpr,
                   D: gl.constexpr, P: gl.constexpr, SPLIT: gl.constexpr, NEW: gl.constexpr,
                   CHOSEN: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """One of a token's parts of keys, 64 heads. SPLIT: there are several. NEW: rows have several tokens, whose vectors may have no page.

    `early`: the kernel before has started this one when all before it was complete, and leaves nothing but chosen numbers.
    """
    start_next(PDL)
    if early == 0:
        wait_turn(PDL)
    token, part = (gl.program_id(0) // num_parts).to(gl.int64), gl.program_id(0) % num_parts
    block = gl.program_id(1) * 64
    slot, least, start, first, seen, count = _span(
        row_ptr, position_ptr, start_ptr, slots_ptr, token, chosen, WINDOW, RATIO, NEW, CHOSEN
    )
    per = (gl.cdiv(count, BN) + num_parts - 1) // num_parts
    begin = gl.minimum(part * per * BN, count)
    stop = gl.minimum(begin + per * BN, count)
    window_table += slot * window_table_stride
    slot_table += slot * slot_table_stride
    chosen_ptr += token * chosen_stride
    q_at = q + token * q_token + block * q_head

    q_smem = gl.allocate_shared_memory(q.dtype.element_ty, [64, D], HELD)
    k_smem = gl.allocate_shared_memory(q.dtype.element_ty, [2, BN, D], HELD)
    p_smem = gl.allocate_shared_memory(q.dtype.element_ty, [64, BN], HELD)
    _copy_queries(q_smem, q_at, num_heads - block, q_head, D)
    key = begin + gl.arange(0, BN, KEYS)
    if begin + 2 * BN > seen:  # of the first two tiles, slots too
        wait_turn(PDL)
    number = _number(chosen_ptr, key, seen, stop, CHOSEN)
    after = _number(chosen_ptr, key + BN, seen, stop, CHOSEN)
    entry = _entry(window_table, slot_table, number, key, seen, least, start, window_width, slot_width, PAGE, SLOT_PAGE)
    place, live = _place(
        q_at, vectors, window, slot_pages, number, entry, key, seen, least, start, first, vector_stride, window_stride, window_slot, page_stride,
        page_slot, PAGE, SLOT_PAGE, NEW,
    )  # fmt: skip
    live = live & (key < stop)
    _copy(k_smem.index(0), place, D)
    async_copy.commit_group()
    number = after
    entry = _entry(window_table, slot_table, number, key + BN, seen, least, start, window_width, slot_width, PAGE, SLOT_PAGE)  # fmt: skip
    wait_turn(PDL)
    most = gl.full((64,), LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
    sums = gl.zeros((64, BN), gl.float32, SCORES)
    acc = gl.zeros((64, D), gl.float32, SUMS)
    slot_now = 0
    for tile in range(begin, stop, BN):
        # The next tile's pages are known by now, and the numbers of the tile behind it are on their way.
        key = key + BN
        after = _number(chosen_ptr, key + BN, seen, stop, CHOSEN)
        place, next_live = _place(
            q_at, vectors, window, slot_pages, number, entry, key, seen, least, start, first, vector_stride, window_stride, window_slot,
            page_stride, page_slot, PAGE, SLOT_PAGE, NEW,
        )  # fmt: skip
        next_live = next_live & (key < stop)
        if tile + BN < stop:
            _copy(k_smem.index(1 - slot_now), place, D)
        async_copy.commit_group()
        async_copy.wait_group(1)
        fence_async_shared()
        gl.thread_barrier()
        scores = warpgroup_mma_wait(0, deps=(_score(q_smem, k_smem.index(slot_now)),))
        most, sums, shrink = _weigh(scores, p_smem, most, sums, live, scale)
        fence_async_shared()
        gl.thread_barrier()
        acc = warpgroup_mma(p_smem, k_smem.index(slot_now), acc * shrink, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        gl.thread_barrier()  # both groups have used the tile
        number, live = after, next_live
        entry = _entry(
            window_table, slot_table, number, key + BN, seen, least, start, window_width, slot_width, PAGE, SLOT_PAGE
        )
        slot_now = 1 - slot_now
    async_copy.wait_group(0)
    _end(out, parts, found, sinks, cos, sin, token, part, num_parts, block, num_heads, angle_stride, most, sums, acc, stop > begin, D, P,
         SPLIT)  # fmt: skip
