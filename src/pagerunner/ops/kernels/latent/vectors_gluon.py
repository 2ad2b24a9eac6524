"""Attention to vectors and slots of `kernels/latent/vectors_attention.py` for heads of 512 on Hopper, in Gluon: Triton's language with layouts that the program chooses.

A program has 64 heads of a token; what a tile has beyond a rank's heads is left out at the end. Both groups of four warps work on each tile of keys: a group computes the scores of half of its keys, and the sums of half
of their elements. Triton places chained products so that both groups compute all scores. Keys are copied into shared memory once, where they are the
second operand of both products; the next tile's are on their way meanwhile.

Window and slots are one list of keys: first the window, then slots. So a tile may have some of either, and of 128 + 512 keys each of ten tiles is full.
A token's parts have tiles in turn, so each has some of the window, which it brings while slots are still being chosen.

Two parts of a token may be a cluster: two programs that run at the same time and write to each other's shared memory (`num_ctas=2`). Triton knows of it that layouts are
the same in both; each has numbers of its own. At the end either gives the other one half of its heads, in 16 bits, and completes the other half, so nothing is left to be merged.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from pagerunner.ops.kernels.latent.vectors_attention import LOG2_E, LOWEST
from pagerunner.ops.kernels.latent.vectors_choice_gluon import choose_best, just_chosen, places_of
from pagerunner.ops.kernels.launch import start_next, wait_turn

HELD = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
"""How matrix units want queries, keys and weights to lie in shared memory."""
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
"""Vectors as they are copied: a warp copies half of one at a time, 16 bytes a lane."""
BN = gl.constexpr(64)
"""Keys of a tile."""
KEYS = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
OWN = gl.constexpr(gl.DistributedLinearLayout([[0, 1], [0, 8], [0, 16], [0, 32], [0, 64], [0, 128]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0], [0, 256]], [[0, 0]], [32, 512]))  # fmt: skip
"""Half of the heads' sums, 8 of each 16, where a thread of a cluster has them anyway."""
HELD_STATS = gl.constexpr(32 * 512 * 2)
"""Where in shared memory a cluster's programs leave the scores' statistics: behind half of the sums."""
HELD_BARRIER = gl.constexpr(HELD_STATS + 256 * 8)
"""Where they count the bytes that have come: behind the statistics of 256 threads."""


@gluon.constexpr_function
def _laid(layout, programs):
    """A layout that each program of a cluster has for itself."""
    if programs == 1:
        return layout
    rank = getattr(layout, "rank", None) or len(layout.order)
    return layout.__class__(**(vars(layout) | {"cga_layout": [[0] * rank]}))


@gluon.constexpr_function
def _told(programs):
    """Two numbers of each of 64 queries, as a product has their rows."""
    registers, lanes = [[0, 1], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[16, 0], [32, 0], [0, 0]], [[0, 0]] if programs > 1 else [], [64, 2]
    )


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
    rows = gl.convert_layout(place, gl.SliceLayout(1, _laid(COPIED, gl.num_ctas())))
    at = gl.multiple_of(rows, 16)[:, None] + gl.arange(0, D, gl.SliceLayout(0, _laid(COPIED, gl.num_ctas())))[None, :]
    async_copy.async_copy_global_to_shared(smem, at)


@gluon.jit
def _angles(x, cos, sin, D: gl.constexpr, P: gl.constexpr):
    """By what results like `x` are turned back: cosines and sines of their pairs."""
    one, _ = gl.split(gl.reshape(x, (x.shape[0], D // 2, 2)))
    pair = gl.arange(0, D // 2, gl.SliceLayout(0, one.type.layout)) - (D - P) // 2
    c = gl.load(cos + pair, mask=pair >= 0, other=1.0).to(gl.float32)[None, :]
    return c, gl.load(sin + P // 2 + pair, mask=pair >= 0, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def _back(x, c, s, D: gl.constexpr):
    """Results of some heads, turned back. A thread has both numbers of a pair."""
    one, two = gl.split(gl.reshape(x, (x.shape[0], D // 2, 2)))
    return gl.convert_layout(gl.reshape(gl.join(one * c + two * s, two * c - one * s), (x.shape[0], D)), x.type.layout)


@gluon.jit
def _finish(out, sinks, cos, sin, block, num_heads, most, total, acc, D: gl.constexpr, P: gl.constexpr):
    """Give sinks their share, turn results back, and store them."""
    head = block + gl.arange(0, 64, gl.SliceLayout(1, _laid(SUMS, gl.num_ctas())))
    sink = gl.load(sinks + head, mask=head < num_heads, other=0.0).to(gl.float32) * LOG2_E
    larger = gl.maximum(most, sink)
    shrink = gl.exp2(most - larger)
    c, s = _angles(acc, cos, sin, D, P)
    y = _back(acc * (shrink / (total * shrink + gl.exp2(sink - larger)))[:, None], c, s, D)
    y = gl.convert_layout(y.to(out.dtype.element_ty), _laid(COPIED, gl.num_ctas()))  # 16 bytes a lane
    own = block + gl.arange(0, 64, gl.SliceLayout(1, _laid(COPIED, gl.num_ctas())))
    d = gl.arange(0, D, gl.SliceLayout(0, _laid(COPIED, gl.num_ctas())))
    gl.store(out + own[:, None] * D + d[None, :], y, mask=(own < num_heads)[:, None])


@gluon.jit
def _leave(parts, found, head, there, most, total, acc, some, D: gl.constexpr):
    """Leave a part's result, normalised, and the log-sum-exp of its scores."""
    seen = total != 0  # what is no number is left as it is
    total = gl.where(seen, total, 1.0)
    gl.store(found + head, gl.where(seen, most + gl.log2(total), LOWEST), mask=there)
    if some:
        d = gl.arange(0, D, gl.SliceLayout(0, _laid(SUMS, gl.num_ctas())))
        gl.store(parts + head[:, None] * D + d[None, :], acc * (1.0 / total)[:, None], mask=there[:, None])


@gluon.jit
def _rank():
    """Which of a cluster's programs this one is."""
    return gl.inline_asm_elementwise("mov.u32 $0, %cluster_ctarank;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _part(num_parts):
    """A program's token, and which part of its keys."""
    if gl.num_ctas() > 1:
        return gl.program_id(0).to(gl.int64), _rank()
    else:
        return (gl.program_id(0) // num_parts).to(gl.int64), gl.program_id(0) % num_parts


@gluon.jit
def _meet(counter):
    """Both programs of a cluster have come so far, have read all of shared memory that they will, and count what is written to it: a barrier that released what threads have written would wait for all
    memory, twice."""
    gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 p, thread, 0;
        @p mbarrier.init.shared::cta.b64 [$1], 1; @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], 34816; @p fence.mbarrier_init.release.cluster;
        fence.acq_rel.cta; barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned; mov.b32 $0, 0; }""",
        "=r,r", [counter], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _await(counter):
    """All that the other program gives has come."""
    gl.inline_asm_elementwise(
        """{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], 0; @!p bra AGAIN; mov.b32 $0, 0; }""",
        "=r,r", [counter], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _halves(x, rank):
    """Heads of a tile: those that this program of a cluster completes, and those of the other one. `x` [64] or [64, D]; a thread has both."""
    if len(x.shape) == 1:
        one, two = gl.split(gl.permute(gl.reshape(x, (4, 2, 8)), (0, 2, 1)))
        one = gl.convert_layout(gl.reshape(one, (32,)), gl.SliceLayout(1, OWN), assert_trivial=True)
        two = gl.convert_layout(gl.reshape(two, (32,)), gl.SliceLayout(1, OWN), assert_trivial=True)
    else:
        one, two = gl.split(gl.permute(gl.reshape(x, (4, 2, 8, x.shape[1])), (0, 2, 3, 1)))
        one = gl.convert_layout(gl.reshape(one, (32, x.shape[1])), OWN, assert_trivial=True)
        two = gl.convert_layout(gl.reshape(two, (32, x.shape[1])), OWN, assert_trivial=True)
    return gl.where(rank == 0, one, two), gl.where(rank == 0, two, one)


@gluon.jit
def _power(largest):
    """The k whose 2^k brings a number just below 2^15, as far as there is one, and 2^k."""
    k = gl.minimum(141 - (largest.to(gl.int32, bitcast=True) >> 23), 100)
    return k.to(gl.float32), ((k + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _threads(x):
    """Elements of 32 rows by the threads that have them: 2 groups of 4 have 32 pairs each."""
    return gl.reshape(x, (32, 2, 32, 4, 2))


@gluon.jit
def _of_threads(x, like):
    """A number of each of 32 heads, for all threads that have some of it; `like` has one of each thread."""
    SLICE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, like.type.layout))
    return gl.convert_layout(x, SLICE, assert_trivial=True)[:, None, None]


@gluon.jit
def _shortened(most, total, acc):
    """What is given away, with sums in 16 bits. A thread's are times 2^k, so that none is too large and the largest ones have all digits: as scores are in units of log2, k is taken off the largest score.

    Example: sums of up to 3 are times 2^13, and come as numbers of up to 24,576 with 11 digits."""
    x = _threads(acc)
    k, factor = _power(gl.max(gl.max(gl.abs(x), 4), 2))
    x = (x * factor[:, :, None, :, None]).to(gl.float16)
    x = gl.convert_layout(gl.reshape(x, (32, acc.shape[1])), OWN, assert_trivial=True)
    return _of_threads(most, k) - k, _of_threads(total, k) * factor, x


@gluon.jit
def _swap(rank, most, total, acc, D: gl.constexpr):
    """Give the cluster's other program what it completes, and take from it what this one does. Each thread writes to its counterpart.

    Nothing else is in shared memory meanwhile, in both programs: nothing is converted between threads.
    """
    thread = gl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)
    own = gl.inline_asm_elementwise("mov.u32 $0, global_smem;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)
    far = gl.inline_asm_elementwise("mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", [own, 1 - rank], dtype=gl.int32, is_pure=True, pack=1)  # fmt: skip
    d = gl.arange(0, D, gl.SliceLayout(0, OWN))[None, :]
    at = gl.full((32, D), 0, gl.int32, OWN) + (thread * 16 + d % 256 // 32 * 4096)
    few = gl.full(most.shape, HELD_STATS, gl.int32, most.type.layout) + thread * 8
    _meet(own + HELD_BARRIER)
    gl.inline_asm_elementwise(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [$2], {$18, $19, $20, $21}, [$10]; mov.b32 $0, 0; mov.b32 $1, 0;",
        "=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", [far + at, far + HELD_BARRIER, acc], dtype=gl.int8, is_pure=False, pack=8,
    )  # fmt: skip
    gl.inline_asm_elementwise(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [$1], {$3, $4}, [$2]; mov.b32 $0, 0;",
        "=r,r,r,f,f", [far + few, far + HELD_BARRIER, most, total], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    _await(own + HELD_BARRIER)
    acc = gl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [own + at], dtype=gl.float16, is_pure=False, pack=8,
    )  # fmt: skip
    most, total = gl.inline_asm_elementwise(
        "ld.shared.v2.f32 {$0, $1}, [$2];", "=f,=f,r",
        [own + few], dtype=(gl.float32, gl.float32), is_pure=False, pack=1,
    )  # fmt: skip
    return most, total, acc


@gluon.jit
def _store(out, x, there):
    """Store rows of half numbers, 16 bytes a lane, from each program of a cluster: Triton stores of one of them what it takes for the same."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b64 p, $2, 0; @p st.global.v4.b32 [$2], {$10, $11, $12, $13}; mov.b32 $0, 0; mov.b32 $1, 0; }",
        "=r,=r,l,l,l,l,l,l,l,l,r,r,r,r", [gl.where(there, out.to(gl.int64, bitcast=True), 0), x], dtype=gl.int8, is_pure=False, pack=8,
    )  # fmt: skip


@gluon.jit
def _complete(out, sinks, cos, sin, block, num_heads, most, total, acc, D: gl.constexpr, P: gl.constexpr):
    """Merge a cluster's parts: this program's half of the heads."""
    rank = _rank()
    most, far_most = _halves(most, rank)
    total, far_total = _halves(total, rank)
    acc, far = _halves(acc, rank)
    head = gl.arange(0, 32, gl.SliceLayout(1, OWN))
    head = block + head // 8 * 16 + rank * 8 + head % 8
    sink = gl.load(sinks + head, mask=head < num_heads, other=0.0).to(gl.float32) * LOG2_E
    c, s = _angles(acc, cos, sin, D, P)  # on their way while sums are swapped
    far_most, far_total, far = _swap(rank, *_shortened(far_most, far_total, far), D)
    most, sink = _of_threads(most, far_most), _of_threads(sink, far_most)
    larger = gl.maximum(gl.maximum(most, far_most), sink)
    shrink, far_shrink = gl.exp2(most - larger), gl.exp2(far_most - larger)
    whole = 1.0 / (_of_threads(total, far_most) * shrink + far_total * far_shrink + gl.exp2(sink - larger))
    own = (shrink * whole)[:, :, None, :, None]
    y = _threads(acc) * own + _threads(far.to(gl.float32)) * (far_shrink * whole)[:, :, None, :, None]
    y = _back(gl.convert_layout(gl.reshape(y, (32, D)), OWN, assert_trivial=True), c, s, D)
    gl.thread_barrier()  # all that was given has been read
    ROWS: gl.constexpr = _laid(COPIED, gl.num_ctas())
    y = gl.convert_layout(y.to(out.dtype.element_ty), ROWS)
    own = gl.arange(0, 32, gl.SliceLayout(1, ROWS))
    own = block + own // 8 * 16 + rank * 8 + own % 8
    _store(out + own[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, ROWS))[None, :], y, (own < num_heads)[:, None])


@gluon.jit
def _end(out, parts, found, sinks, cos, sin, token, part, num_parts, block, num_heads, angle_stride, most, sums, acc, some, D: gl.constexpr,
         P: gl.constexpr, SPLIT: gl.constexpr):  # fmt: skip
    """Store a token's results, or what a part of its keys leaves to be merged."""
    gl.thread_barrier()  # from here on, shared memory is anybody's
    total = gl.convert_layout(gl.sum(sums, 1), gl.SliceLayout(1, _laid(SUMS, gl.num_ctas())))
    most = gl.convert_layout(most, gl.SliceLayout(1, _laid(SUMS, gl.num_ctas())))
    if gl.num_ctas() > 1:
        angle = token * angle_stride
        _complete(out + token * num_heads * D, sinks, cos + angle, sin + angle, block, num_heads, most, total, acc, D, P)  # fmt: skip
    elif not SPLIT:
        angle = token * angle_stride
        _finish(out + token * num_heads * D, sinks, cos + angle, sin + angle, block, num_heads, most, total, acc, D, P)
    else:
        base = (token * num_parts + part) * num_heads
        head = block + gl.arange(0, 64, gl.SliceLayout(1, _laid(SUMS, gl.num_ctas())))
        _leave(parts + base * D, found + base, head, head < num_heads, most, total, acc, some, D)


@gluon.jit
def _copy_queries(q_smem, q_at, left, q_head, D: gl.constexpr):
    """Begin to bring 64 heads' queries; those behind the last of `left` are its."""
    head = gl.minimum(gl.arange(0, 64, gl.SliceLayout(1, _laid(COPIED, gl.num_ctas()))), left - 1)
    d = gl.arange(0, D, gl.SliceLayout(0, _laid(COPIED, gl.num_ctas())))[None, :]
    async_copy.async_copy_global_to_shared(q_smem, q_at + head[:, None] * q_head + d)


@gluon.jit
def _tiles(kind: gl.constexpr, D: gl.constexpr):
    """Where queries, two tiles of keys and a tile's weights lie."""
    q_smem = gl.allocate_shared_memory(kind, [64, D], _laid(HELD, gl.num_ctas()))
    k_smem = gl.allocate_shared_memory(kind, [2, BN, D], _laid(HELD, gl.num_ctas()))
    return q_smem, k_smem, gl.allocate_shared_memory(kind, [64, BN], _laid(HELD, gl.num_ctas()))


@gluon.jit
def _nothing(D: gl.constexpr):
    """The running softmax before any key, and no sums."""
    most = gl.full((64,), LOWEST, gl.float32, gl.SliceLayout(1, _laid(SCORES, gl.num_ctas())))
    sums = gl.zeros((64, BN), gl.float32, _laid(SCORES, gl.num_ctas()))
    return most, sums, gl.zeros((64, D), gl.float32, _laid(SUMS, gl.num_ctas()))


@gluon.jit
def _score(q_smem, k_smem):
    """Begin the scores of a tile of keys."""
    scores = gl.zeros((64, BN), gl.float32, _laid(SCORES, gl.num_ctas()))
    return warpgroup_mma(q_smem, k_smem.permute((1, 0)), scores, use_acc=False, is_async=True)


@gluon.jit
def _of_scores(live):
    """Which keys of a tile are there, as its scores lie: before these are waited for."""
    return gl.convert_layout(live.to(gl.int32), gl.SliceLayout(0, _laid(SCORES, gl.num_ctas())))[None, :] != 0


@gluon.jit
def _largest(scores):
    """The largest score of each query. The two groups of warps tell each other theirs and wait once."""
    SLICE: gl.constexpr = gl.SliceLayout(1, _laid(SCORES, gl.num_ctas()))
    largest = gl.max(gl.reshape(scores, (64, 2, BN // 2)), 2)
    largest = gl.max(gl.convert_layout(largest, _told(gl.num_ctas())), 1)
    return gl.convert_layout(largest, SLICE, assert_trivial=True)


@gluon.jit
def _weigh(scores, p_smem, most, sums, live, scale):
    """Take a tile's scores into the running softmax, and leave its weights in shared memory. `sums` are those of weights by key of a tile."""
    scores = gl.where(live, scores * scale, LOWEST)
    larger = gl.maximum(most, _largest(scores))
    shrink = gl.exp2(most - larger)
    weights = gl.where(live, gl.exp2(scores - larger[:, None]), 0.0)
    p_smem.store(weights.to(p_smem.dtype))
    sums = sums * shrink[:, None] + weights
    return larger, sums, gl.convert_layout(shrink, gl.SliceLayout(1, _laid(SUMS, gl.num_ctas())))[:, None]


@gluon.jit
def _span(row_ptr, position_ptr, start_ptr, slots_ptr, token, chosen, WINDOW: gl.constexpr, RATIO: gl.constexpr, NEW: gl.constexpr,
          CHOSEN: gl.constexpr, ONE: gl.constexpr):  # fmt: skip
    """A token's slot of page tables, its window's first position and the first that is in no page, where the step's vectors begin, keys of the window, and all."""
    row = gl.load(row_ptr + token)
    if ONE:  # token t belongs to row t, so no load waits for another
        slot = gl.load(slots_ptr + token).to(gl.int64)
    end = gl.where(row >= 0, gl.load(position_ptr + token).to(gl.int32) + 1, 0)
    row = gl.maximum(row, 0)
    if not ONE:
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


@gluon.jit
def _scores_of(scored, stride, C: gl.constexpr, PDL: gl.constexpr):
    """A token's scores, asked for when it is this kernel's turn: they don't wait for what is asked for later."""
    if C:
        wait_turn(PDL)
        return gl.load(scored + places_of(C), mask=places_of(C) < stride, other=0.0)
    else:
        return 0.0


@gluon.jit
def _first_numbers(
    chosen_ptr, score, complete, key, step, seen, stop, CHOSEN: gl.constexpr, TOP_K: gl.constexpr, C: gl.constexpr
):
    """Numbers of the second tile's slots and of the third's, which a cluster may have to choose before."""
    if C:
        choose_best(chosen_ptr, score, complete, C, TOP_K)
        number, after = just_chosen(key - seen, key < stop), just_chosen(key + step - seen, key + step < stop)
        gl.thread_barrier()
        return number, after
    else:
        return _number(chosen_ptr, key, seen, stop, CHOSEN), _number(chosen_ptr, key + step, seen, stop, CHOSEN)


@gluon.jit(
    do_not_specialize=["num_heads", "num_parts", "early", "window_width", "slot_width", "chosen", "chosen_stride"]
)
def vectors_kernel(q, vectors, window, slot_pages, chosen_ptr, sinks, cos, sin, out, parts, found, row_ptr, position_ptr, start_ptr, slots_ptr,
                   window_table, slot_table, num_heads, num_parts, early, scale, window_width, slot_width, chosen, q_token, q_head, vector_stride,
                   window_stride, window_slot, page_stride, page_slot, chosen_stride, angle_stride, window_table_stride,
                   slot_table_stride, scored, scored_stride, WINDOW: gl.constexpr, RATIO: gl.constexpr, PAGE: gl.constexpr, SLOT_PAGE: gl.constexpr,
                   D: gl.constexpr, P: gl.constexpr, SPLIT: gl.constexpr, NEW: gl.constexpr,
                   CHOSEN: gl.constexpr, TOP_K: gl.constexpr, C: gl.constexpr, ONE: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """One of a token's parts of keys, 64 heads. SPLIT: there are several, which another launch merges. NEW: rows have several tokens, whose vectors may have no page.
    C: the programs of a token's cluster choose TOP_K of at most so many slots, whose scores are `scored`; 0: others have chosen.

    `early`: the kernel before has started this one when all before it was complete, and leaves nothing but chosen numbers or scores.
    """
    start_next(PDL)
    if early == 0:
        wait_turn(PDL)
    token, part = _part(num_parts)
    block = gl.program_id(1) * 64
    q_at = q + token * q_token + block * q_head
    q_smem, k_smem, p_smem = _tiles(q.dtype.element_ty, D)
    _copy_queries(q_smem, q_at, num_heads - block, q_head, D)
    slot, least, start, first, seen, stop = _span(
        row_ptr, position_ptr, start_ptr, slots_ptr, token, chosen, WINDOW, RATIO, NEW, CHOSEN, ONE
    )
    begin, step = part * BN, num_parts * BN
    window_table += slot * window_table_stride
    slot_table += slot * slot_table_stride
    chosen_ptr += token * chosen_stride
    key = begin + gl.arange(0, BN, _laid(KEYS, gl.num_ctas()))
    if begin + BN > seen:  # slots, too
        wait_turn(PDL)
    number = _number(chosen_ptr, key, seen, stop, CHOSEN and C == 0)  # of a row with a choice only the window's
    entry = _entry(window_table, slot_table, number, key, seen, least, start, window_width, slot_width, PAGE, SLOT_PAGE)
    score = _scores_of(scored + token * scored_stride, scored_stride, C, PDL)
    place, live = _place(
        q_at, vectors, window, slot_pages, number, entry, key, seen, least, start, first, vector_stride, window_stride, window_slot, page_stride,
        page_slot, PAGE, SLOT_PAGE, NEW,
    )  # fmt: skip
    live = live & (key < stop)
    now = 1 if C else 0  # the first tile is empty, for a choice
    _copy(k_smem.index(now), place, D)
    async_copy.commit_group()
    wait_turn(PDL)  # the window's tile is on its way
    key = key + step
    complete = (least + seen) // RATIO if RATIO > 0 else 0
    number, after = _first_numbers(chosen_ptr, score, complete, key, step, seen, stop, CHOSEN, TOP_K, C)
    entry = _entry(window_table, slot_table, number, key, seen, least, start, window_width, slot_width, PAGE, SLOT_PAGE)
    most, sums, acc = _nothing(D)
    for tile in range(begin, stop, step):
        # The next tile's pages are known by now, and the numbers of the tile behind it.
        place, next_live = _place(
            q_at, vectors, window, slot_pages, number, entry, key, seen, least, start, first, vector_stride, window_stride, window_slot,
            page_stride, page_slot, PAGE, SLOT_PAGE, NEW,
        )  # fmt: skip
        next_live = next_live & (key < stop)
        if tile + step < stop:
            _copy(k_smem.index(1 - now), place, D)
        async_copy.commit_group()
        async_copy.wait_group(1)
        fence_async_shared()  # it waits for loads, too, so look-ups are behind it
        gl.thread_barrier()
        scores = _score(q_smem, k_smem.index(now))
        key, number = key + step, after
        after = _number(chosen_ptr, key + step, seen, stop, CHOSEN)
        entry = _entry(
            window_table, slot_table, number, key, seen, least, start, window_width, slot_width, PAGE, SLOT_PAGE
        )
        live = _of_scores(live)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        most, sums, shrink = _weigh(scores, p_smem, most, sums, live, scale)
        fence_async_shared()
        gl.thread_barrier()
        acc = warpgroup_mma(p_smem, k_smem.index(now), acc * shrink, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        gl.thread_barrier()  # both groups have used the tile
        live, now = next_live, 1 - now
    async_copy.wait_group(0)
    _end(out, parts, found, sinks, cos, sin, token, part, num_parts, block, num_heads, angle_stride, most, sums, acc, stop > begin, D, P,
         SPLIT)  # fmt: skip
