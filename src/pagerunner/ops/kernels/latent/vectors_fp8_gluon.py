"""The attention of `kernels/latent/vectors_gluon.py` to windows and slots in e4m3, which a Hopper program makes numbers of while it multiplies.

A tile has keys of one kind: the step's own vectors, or what is in pages, the window and behind it slots in one list. So of 128 + 512 keys in pages each of ten tiles is full.
Vectors are copied to where products read them. Codes, scales and rotary parts are copied, too. While a tile's weights meet its vectors, the next tile's codes become numbers in shared memory. So they are read from
memory once, in the bytes that they have there: 584 a slot of DeepSeek-V4 instead of 1,024. A token of a window is stored as a slot is.

A slot is 448 codes of 7 blocks, and 64 rotary elements of the queries' type. A block's scale is a power of two, kept as the byte of its exponent. There isn't room in
shared memory for all codes of a tile beside two tiles of numbers: the last block's are kept in registers, four in a word until they become numbers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from pagerunner.ops.kernels.latent.latent_gluon import numbers_of_codes
from pagerunner.ops.kernels.latent.vectors_gluon import (
    BN,
    COPIED,
    HELD,
    KEYS,
    _copy,
    _copy_queries,
    _end,
    _first_numbers,
    _laid,
    _nothing,
    _number,
    _of_scores,
    _part,
    _score,
    _scores_of,
    _span,
    _tiles,
    _weigh,
)
from pagerunner.ops.kernels.launch import start_next, wait_turn

LOW = gl.constexpr(gl.BlockedLayout([1, 16], [2, 16], [8, 1], [1, 0]))
"""A slot's first 256 codes as they are copied, the next 128, rotary parts, and scales."""
HIGH = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [8, 1], [1, 0]))
TURNED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
FEW = gl.constexpr(gl.BlockedLayout([1, 8], [32, 1], [8, 1], [1, 0]))
NUMBERS_HIGH = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
"""Numbers of codes, and the same by blocks that share a scale."""
SCALED_LOW = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 4, 8], [8, 1, 1], [2, 1, 0]))
SCALED_HIGH = gl.constexpr(gl.BlockedLayout([1, 1, 8], [2, 2, 8], [8, 1, 1], [2, 1, 0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 1, [1, 0]))
SCALES = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
PAIRS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
"""`HELD` by words of two numbers."""
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def _last(programs):
    """A slot's last 64 codes, four in a word. Of what a cluster's programs have, Triton joins only what is laid out like this."""
    registers, lanes = [[0, 1], [0, 2]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[8, 0], [16, 0], [32, 0]], [[0, 0]] if programs > 1 else [], [64, 16]
    )


@gluon.jit
def _factors(scales):
    """Bytes of exponents as numbers. A byte is a bfloat16's exponent."""
    return (scales.to(gl.int16) << 7).to(gl.bfloat16, bitcast=True)


@gluon.jit
def _panel(smem, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Some of a tile's elements: 64 of all its keys lie together. Triton has no slices of what a cluster's programs have."""
    PANELS: gl.constexpr = smem.shape[1] // COUNT
    return smem._reinterpret(smem.dtype, [PANELS, BN, COUNT], _laid(HELD, gl.num_ctas())).index(FIRST // COUNT)


@gluon.jit
def _words(smem, FIRST: gl.constexpr):
    """64 of all elements of a tile, as words of two."""
    return _panel(smem, FIRST, 64)._reinterpret(gl.int32, [BN, 32], _laid(PAIRS, gl.num_ctas()))


@gluon.jit
def _pairs_of_codes(words, factors):
    """Numbers of four codes in a word, times two equal factors in a word. What is done to a code is as in `numbers_of_codes`.

    That takes codes apart, which a thread would do as soon as it has asked for them, and wait for memory in each tile.
    """
    return gl.inline_asm_elementwise(
        """{ .reg .b32 p, q, a, b, m; mov.b32 m, 0x7b807b80;
        prmt.b32 p, 0, $2, 0x5140; prmt.b32 q, 0, $2, 0x7362;
        and.b32 a, p, 0x80008000; shr.u32 b, p, 4; lop3.b32 a, b, 0x07F007F0, a, 0xEA; mul.rn.bf16x2 a, a, m; mul.rn.bf16x2 $0, a, $3;
        and.b32 a, q, 0x80008000; shr.u32 b, q, 4; lop3.b32 a, b, 0x07F007F0, a, 0xEA; mul.rn.bf16x2 a, a, m; mul.rn.bf16x2 $1, a, $3; }""",
        "=r,=r,r,r", [words, factors], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _convert(
    codes, scales, target, FIRST: gl.constexpr, COUNT: gl.constexpr, NUMBERS: gl.constexpr, SCALED: gl.constexpr
):
    """Make numbers of the codes of COUNT blocks from FIRST on, all at once: the compiler has a barrier before each store to `target`."""
    numbers = gl.reshape(numbers_of_codes(codes.load(NUMBERS)), [BN, COUNT, 64])
    block = FIRST + gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(2, SCALED)))
    words = scales.load(gl.SliceLayout(1, gl.SliceLayout(2, SCALED)))
    factors = _factors((words[:, None] >> (block * 8)[None, :]) & 255)
    numbers = gl.convert_layout(numbers, SCALED, assert_trivial=True) * gl.expand_dims(factors, 2)
    numbers = gl.convert_layout(gl.reshape(numbers, [BN, COUNT * 64]), NUMBERS, assert_trivial=True)
    _panel(target, FIRST * 64, COUNT * 64).store(numbers)


@gluon.jit
def _make_numbers(room, last, target):
    """Make numbers of a tile's codes."""
    low, high, scales, _ = room
    _convert(low, scales, target, 0, 4, _laid(COPIED, gl.num_ctas()), _laid(SCALED_LOW, gl.num_ctas()))  # fmt: skip
    _convert(high, scales, target, 4, 2, _laid(NUMBERS_HIGH, gl.num_ctas()), _laid(SCALED_HIGH, gl.num_ctas()))  # fmt: skip
    exponents = ((scales.load(gl.SliceLayout(1, _last(gl.num_ctas()))) >> 48) & 255).to(gl.int32)[:, None]
    pairs = gl.join(*_pairs_of_codes(last, (exponents << 7) | (exponents << 23)))
    _words(target, 384).store(gl.reshape(pairs, [BN, 32]))


@gluon.jit
def _room():
    """Where a tile's first 256 codes are copied to, the next 128, scales, and where its slots begin."""
    low = gl.allocate_shared_memory(gl.uint8, [BN, 256], _laid(PLAIN, gl.num_ctas()))
    high = gl.allocate_shared_memory(gl.uint8, [BN, 128], _laid(PLAIN, gl.num_ctas()))
    scales = gl.allocate_shared_memory(gl.int64, [BN], _laid(LINE, gl.num_ctas()))
    return low, high, scales, gl.allocate_shared_memory(gl.int64, [BN], _laid(LINE, gl.num_ctas()))


@gluon.jit
def _own_tiles(part, num_parts, stop, C: gl.constexpr):
    """Where a part's tiles begin, how far they are from each other, and where they end: in turns where parts choose, so that each has some of the window, or in one piece."""
    if C:
        return part * BN, num_parts * BN, stop
    else:
        per = gl.cdiv(gl.cdiv(stop, BN), num_parts) * BN
        begin = gl.minimum(part * per, stop)
        return begin, BN, gl.minimum(begin + per, stop)


@gluon.jit
def _shares(new, seen, count):
    """Where what is in pages begins among keys, behind its window slots, and where these end, if the first `new` are of the step itself."""
    padded = gl.cdiv(new, BN) * BN  # what is in pages begins with a tile of its own
    return padded, seen - new + padded, count - new + padded


@gluon.jit
def _entry(tables, number, key, seen, padded, least, PAGE: gl.constexpr, SLOT_PAGE: gl.constexpr):
    """The pages of keys, of which those from `padded` to `seen` are the window's; -1: none."""
    own, position = key < seen, gl.maximum(least + key - padded, 0)
    place = gl.where(
        own, tables[0] + position // PAGE % tables[2], tables[1] + gl.maximum(number, 0) // SLOT_PAGE % tables[3]
    )
    return gl.load(place, mask=gl.where(own, key >= padded, number >= 0), other=-1)


@gluon.jit
def _at(places, window, slots, UNIT: gl.constexpr, COPY: gl.constexpr):
    """Where a tile's slots begin in parts of which a number has UNIT bytes, by rows of a copy; a column of them, and which are there."""
    at = places.load(gl.SliceLayout(1, COPY))
    held = gl.where((at & 1) != 0, window, slots) + (at & -16) // UNIT
    return gl.multiple_of(held, 16)[:, None], (at >= 0)[:, None]


@gluon.jit
def _bring_codes(k_smem, room, window, slots, number, entry, key, stop, seen, padded, least, PAGE: gl.constexpr,
                 SLOT_PAGE: gl.constexpr):  # fmt: skip
    """Begin to bring a tile of what is in pages: its last codes as numbers of threads, and which are there. What isn't there is zeros.

    `window` and `slots` are codes, rotary parts, scales, and strides of codes and of scales. The lowest bit of a place says that it is the window's.
    """
    low, high, few, places = room
    own, position = key < seen, gl.maximum(least + key - padded, 0)
    live, inside = (entry >= 0) & (key < stop), gl.where(own, position % PAGE, gl.maximum(number, 0) % SLOT_PAGE)
    at = entry * (gl.where(own, window[3], slots[3]) * 16) + inside * (gl.where(own, window[4], slots[4]) * 16)
    places.store(gl.where(live, gl.where(own, at + 1, at), -16))
    gl.thread_barrier()
    at, there = _at(places, window[0], slots[0], 1, _laid(LOW, gl.num_ctas()))
    x = gl.arange(0, 256, gl.SliceLayout(0, _laid(LOW, gl.num_ctas())))[None, :]
    async_copy.async_copy_global_to_shared(low, at + x, mask=there)
    at, there = _at(places, window[0], slots[0], 1, _laid(HIGH, gl.num_ctas()))
    x = gl.arange(0, 128, gl.SliceLayout(0, _laid(HIGH, gl.num_ctas())))[None, :]
    async_copy.async_copy_global_to_shared(high, at + (x + 256), mask=there)
    at, there = _at(places, window[1], slots[1], 2, _laid(TURNED, gl.num_ctas()))
    x = gl.arange(0, 64, gl.SliceLayout(0, _laid(TURNED, gl.num_ctas())))[None, :]
    async_copy.async_copy_global_to_shared(_panel(k_smem, 448, 64), at + x, mask=there)
    at = entry * (gl.where(own, window[5], slots[5]) * 8) + inside * (gl.where(own, window[6], slots[6]) * 8)
    at = gl.multiple_of(gl.where(own, window[2], slots[2]) + at, 8).to(gl.pointer_type(gl.int64), bitcast=True)
    async_copy.async_copy_global_to_shared(few, at, mask=live)
    WORDS: gl.constexpr = gl.pointer_type(gl.int32)
    codes = (window[0].to(WORDS, bitcast=True), slots[0].to(WORDS, bitcast=True))
    at, there = _at(places, *codes, 4, _last(gl.num_ctas()))
    x = gl.arange(0, 16, gl.SliceLayout(0, _last(gl.num_ctas())))[None, :]
    return gl.load(at + (x + 96), mask=there, other=0), live


@gluon.jit
def _bring(k_smem, room, last, q_at, vectors, window, slots, number, entry, key, tile, stop, seen, padded, least, own, vector_stride,
           PAGE: gl.constexpr, SLOT_PAGE: gl.constexpr, NEW: gl.constexpr, D: gl.constexpr):  # fmt: skip
    """Begin to bring a tile of either kind. `own`: the token of the first of the step's vectors that is seen, and how many there are."""
    if NEW:
        if tile < padded:  # one that isn't there is read as the token's query, whose numbers are finite
            live = key < gl.minimum(stop, own[1])
            place = gl.where(live, vectors + (own[0] + key).to(gl.int64) * vector_stride, q_at)
            _copy(k_smem, place, D)
        else:
            last, live = _bring_codes(k_smem, room, window, slots, number, entry, key, stop, seen, padded, least, PAGE,
                                      SLOT_PAGE)  # fmt: skip
    else:
        last, live = _bring_codes(k_smem, room, window, slots, number, entry, key, stop, seen, padded, least, PAGE,
                                  SLOT_PAGE)  # fmt: skip
    async_copy.commit_group()
    return last, live


@gluon.jit(
    do_not_specialize=["num_heads", "num_parts", "early", "window_width", "slot_width", "chosen", "chosen_stride"]
)
def vectors_kernel(q, vectors, window, window_rope, window_scales, codes, rope, scales, chosen_ptr, sinks, cos, sin, out, parts, found, row_ptr, position_ptr, start_ptr, slots_ptr,
                   window_table, slot_table, num_heads, num_parts, early, scale, window_width, slot_width, chosen, q_token, q_head, vector_stride,
                   window_page, window_slot, window_scale_page, window_scale_slot, page_stride, slot_stride, scale_page, scale_slot, chosen_stride,
                   angle_stride, window_table_stride, slot_table_stride, scored, scored_stride, WINDOW: gl.constexpr, RATIO: gl.constexpr, PAGE: gl.constexpr,
                   SLOT_PAGE: gl.constexpr, D: gl.constexpr, P: gl.constexpr, SPLIT: gl.constexpr, NEW: gl.constexpr, CHOSEN: gl.constexpr,
                   TOP_K: gl.constexpr, C: gl.constexpr, ONE: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """One of a token's parts of keys, 64 heads. Strides of what is in pages are in 16 bytes, those of scales in 8."""
    start_next(PDL)
    if early == 0:
        wait_turn(PDL)
    token, part = _part(num_parts)
    block = gl.program_id(1) * 64
    q_at = q + token * q_token + block * q_head
    q_smem, k_smem, p_smem = _tiles(q.dtype.element_ty, D)
    room = _room()
    _copy_queries(q_smem, q_at, num_heads - block, q_head, D)
    slot, least, start, first, seen, count = _span(
        row_ptr, position_ptr, start_ptr, slots_ptr, token, chosen, WINDOW, RATIO, NEW, CHOSEN, ONE
    )
    own = (first + start, least + seen - start)
    complete = (least + seen) // RATIO if RATIO > 0 else 0
    padded, seen, stop = _shares(own[1], seen, count)
    begin, step, stop = _own_tiles(part, num_parts, stop, C)
    window_table += slot * window_table_stride
    tables = (window_table, slot_table + slot * slot_table_stride, window_width, slot_width)
    chosen_ptr += token * chosen_stride
    held = (window, window_rope, window_scales, window_page, window_slot, window_scale_page, window_scale_slot)
    slots = (codes, rope, scales, page_stride, slot_stride, scale_page, scale_slot)
    last = gl.zeros([BN, 16], gl.int32, _last(gl.num_ctas()))
    key = begin + gl.arange(0, BN, _laid(KEYS, gl.num_ctas()))
    if begin + BN > seen:
        wait_turn(PDL)
    number = _number(chosen_ptr, key, seen, stop, CHOSEN and C == 0)
    entry = _entry(tables, number, key, seen, padded, least, PAGE, SLOT_PAGE)
    score = _scores_of(scored + token * scored_stride, scored_stride, C, PDL)
    now = 1 if C else 0
    last, live = _bring(k_smem.index(now), room, last, q_at, vectors, held, slots, number, entry, key, begin, stop,
                        seen, padded, least, own, vector_stride, PAGE, SLOT_PAGE, NEW, D)  # fmt: skip
    wait_turn(PDL)  # the window's tile is on its way
    key = key + step
    number, after = _first_numbers(chosen_ptr, score, complete, key, step, seen, stop, CHOSEN, TOP_K, C)
    entry = _entry(tables, number, key, seen, padded, least, PAGE, SLOT_PAGE)
    async_copy.wait_group(0)
    gl.thread_barrier()
    if begin >= padded:
        _make_numbers(room, last, k_smem.index(now))
    fence_async_shared()
    gl.thread_barrier()
    last, next_live = _bring(k_smem.index(1 - now), room, last, q_at, vectors, held, slots, number, entry, key,
                             begin + step, stop, seen, padded, least, own, vector_stride, PAGE, SLOT_PAGE, NEW, D)  # fmt: skip
    key, number = key + step, after
    after = _number(chosen_ptr, key + step, seen, stop, CHOSEN)
    entry = _entry(tables, number, key, seen, padded, least, PAGE, SLOT_PAGE)
    most, sums, acc = _nothing(D)
    for tile in range(begin, stop, step):
        scores = _score(q_smem, k_smem.index(now))
        live = _of_scores(live)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        most, sums, shrink = _weigh(scores, p_smem, most, sums, live, scale)
        fence_async_shared()
        gl.thread_barrier()
        acc = warpgroup_mma(p_smem, k_smem.index(now), acc * shrink, is_async=True)
        async_copy.wait_group(0)
        gl.thread_barrier()
        if (tile + step >= padded) & (tile + step < stop):
            _make_numbers(room, last, k_smem.index(1 - now))
        fence_async_shared()
        acc = warpgroup_mma_wait(0, deps=(acc,))
        gl.thread_barrier()  # both groups have used the tile, and the next one is there
        live = next_live
        if tile + 2 * step < stop:
            last, next_live = _bring(k_smem.index(now), room, last, q_at, vectors, held, slots, number, entry, key,
                                     tile + 2 * step, stop, seen, padded, least, own, vector_stride, PAGE, SLOT_PAGE, NEW, D)  # fmt: skip
        key, number = key + step, after
        after = _number(chosen_ptr, key + step, seen, stop, CHOSEN)
        entry = _entry(tables, number, key, seen, padded, least, PAGE, SLOT_PAGE)
        now = 1 - now
    async_copy.wait_group(0)
    _end(out, parts, found, sinks, cos, sin, token, part, num_parts, block, num_heads, angle_stride, most, sums, acc, stop > begin, D, P,
         SPLIT)  # fmt: skip
