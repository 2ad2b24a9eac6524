"""Attention to slots in e4m3 that an indexer has chosen, on Hopper, in Gluon: some warps make numbers of codes while others multiply them.

`kernels/latent/latent_decode.py` says what a slice is. A unit is a token with up to 16 heads, and its keys are the slots chosen for it. More heads leave no registers for warps that only make numbers
(`kernels/latent/latent_gluon.py`). Four groups of warps work at once:

* Copiers bring codes, scales and rotary parts of 32 slots, as they are, into one of three rooms.
* Two groups of makers have half of each tile of 64 slots. They read a room, and leave numbers in one of two tiles.
* Adders multiply a tile's numbers by the queries, and add them with their weights, from where they lie.

So no register of those who make numbers waits for memory.

Numbers are 2^60 times too small in tiles: a code's bits are a number of bfloat16 that is 2^120 times too small, and one product with 2^60 times the scale makes up for half of it. Of each four
elements of a latent the second one lies behind the third one there, so a word of codes becomes two words of numbers in fewer steps. Queries are ordered alike, and results are put where they belong.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)
from triton.runtime.jit import constexpr_function

from pagerunner.ops.kernels.latent.latent_gluon import (
    LOWEST,
    OPERAND,
    _entries,
    _leave,
    _none_yet,
    _queries,
    _read_queries,
    _scores,
    _scores_layout,
    _slots,
    _soften,
    _weigh,
)
from pagerunner.ops.kernels.latent.latent_pairs_gluon import _piece, _unit
from pagerunner.ops.kernels.launch import start_next, wait_turn
from pagerunner.ops.kernels.paged.paged_prefill_gluon import barriers

UP = gl.constexpr(2.0**60)
"""By how much numbers in tiles are too small."""
N = gl.constexpr(64)
"""Keys of a tile."""
H = gl.constexpr(16)
"""Queries of a program."""
COPIERS, MAKERS, ADDERS = gl.constexpr(4), gl.constexpr(4), gl.constexpr(4)
"""Warps of each group. There are two groups of makers."""
ROWS = gl.constexpr(32)
"""Slots that are copied, and become numbers, at once: half a tile."""
STAGES = gl.constexpr(3)
"""Rooms of as many slots."""
SWAPPED = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 2, [1, 0]))
"""A block's 128 codes of slots. Eight threads read half of a slot's, and halves of every other one are swapped, so that sixteen don't meet in a bank."""
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
G = gl.constexpr(4)
"""Blocks of a latent that have a scale each."""
PAIRS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
"""A tile by words of two numbers."""


@constexpr_function
def _in_turn(words: int, warps: int) -> gl.BlockedLayout:
    """Words of vectors, so many for each thread. All layouts of a group have the same vectors in a thread."""
    return gl.BlockedLayout([1, words], [4, 8], [warps, 1], [1, 0])


@gluon.jit
def pairs_of_codes(words, factors):
    """Numbers of four e4m3 codes in a word, times two equal factors in a word: the first and the third, and the second and the fourth, as nothing has to be moved then."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 a, b;
        shl.b32 a, $2, 4; shl.b32 b, $2, 8; and.b32 a, a, 0x07F007F0; lop3.b32 a, b, 0x80008000, a, 0xEA; mul.rn.bf16x2 $0, a, $3;
        shr.u32 b, $2, 4; and.b32 b, b, 0x07F007F0; lop3.b32 b, $2, 0x80008000, b, 0xEA; mul.rn.bf16x2 $1, b, $3; }""",
        "=r,=r,r,r", [words, factors], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def mixed(numbers):
    """Of each four numbers the second one behind the third one, as `pairs_of_codes` leaves them."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;",
        "=r,=r,r,r",
        [numbers],
        dtype=numbers.dtype,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _twice(factors):
    """Scales as words of two equal numbers, half of what codes are too small."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 a; mul.f32 a, $1, 0f5D800000; cvt.rn.bf16x2.f32 $0, a, a; }",
        "=r,r",
        [factors],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _bring(raw, met, pages, strides, chosen, unit_ptr, slice_ptr, table, table_stride, chosen_stride, PAGE: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """The warps that copy slots as they are. Pages of a piece are looked up while the one before is copied, its slots one more piece ahead."""
    codes, rope, scales = pages
    raw_codes, raw_rope, raw_scales = raw
    full, empty = met
    page_stride, slot_stride = strides
    n = gl.arange(0, ROWS, gl.SliceLayout(1, _in_turn(4, COPIERS)))
    word = gl.arange(0, 32, gl.SliceLayout(0, _in_turn(4, COPIERS)))[None, :]
    x = gl.arange(0, 64, gl.SliceLayout(0, _in_turn(8, COPIERS)))[None, :]
    few = gl.arange(0, G, gl.SliceLayout(0, _in_turn(4, COPIERS)))[None, :]
    tile, stop, unit = _piece(slice_ptr)
    stage, phase = 0, 1
    while tile < stop:
        first, length, row, end, upto = _unit(unit_ptr, unit, stop)
        tile = gl.maximum(tile, first)
        wait_turn(PDL)
        start_next(PDL)
        if upto > tile:
            own, row_table = chosen + unit.to(gl.int64) * chosen_stride, table + row.to(gl.int64) * table_stride
            at, last = (tile - first) * N, (upto - first) * N
            # pages of two pieces are looked up while two are copied, and slots of two more: nothing that is on its way is moved to another register, which would wait for it
            inside, entries, later = (), (), ()
            for i in gl.static_range(2):
                slot = _slots(own, at + i * ROWS + n, length, True)
                inside, entries = inside + (slot % PAGE * slot_stride,), entries + (_entries(row_table, slot, PAGE),)
                later = later + (_slots(own, at + (i + 2) * ROWS + n, length, True),)
            for key in range(at, last, N):
                places, following = (), ()
                for i in gl.static_range(2):
                    places = places + (entries[i].to(gl.int64) * page_stride + inside[i],)
                inside, entries = (), ()
                for i in gl.static_range(2):
                    inside, entries = (
                        inside + (later[i] % PAGE * slot_stride,),
                        entries + (_entries(row_table, later[i], PAGE),),
                    )
                    following = following + (_slots(own, key + (i + 4) * ROWS + n, length, True),)
                later = following
                for i in gl.static_range(2):
                    place = places[i]
                    turned = gl.convert_layout(place, gl.SliceLayout(1, _in_turn(8, COPIERS)), assert_trivial=True)
                    mbarrier.wait(empty.index(stage), phase)
                    for g in gl.static_range(G):
                        async_copy.async_copy_global_to_shared(
                            raw_codes[g].index(stage), codes + (place * 4)[:, None] + (g * 32 + word)
                        )
                    async_copy.async_copy_global_to_shared(raw_rope.index(stage), rope + (turned * 8)[:, None] + x)
                    async_copy.async_copy_global_to_shared(raw_scales.index(stage), scales + (place * 4)[:, None] + few)
                    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                    stage += 1
                    if stage == STAGES:
                        stage, phase = 0, phase ^ 1
            tile = upto
        unit += 1
    wait_turn(PDL)  # without tiles, too
    start_next(PDL)


@gluon.jit
def _convert(words, scales, latents, first: gl.constexpr):
    """Make numbers of codes, for slots from `first` on of a tile."""
    even, odd = gl.split(gl.reshape(_twice(scales), [ROWS, 2, 2]))
    even, odd = gl.split(even), gl.split(odd)
    made = ()
    for g in gl.static_range(G):
        factor = odd[g // 2] if g % 2 else even[g // 2]
        factor = gl.convert_layout(factor, gl.SliceLayout(1, _in_turn(2, MAKERS)), assert_trivial=True)
        pairs = gl.join(*pairs_of_codes(words[g], factor[:, None]))
        made = made + (gl.reshape(pairs, [ROWS, 64]),)
    made = gl.join(gl.join(made[0], made[2]), gl.join(made[1], made[3]))
    # all at once: the compiler has a barrier before each store to a buffer
    latents._reinterpret(gl.int32, [N, 4 * N], PAIRS).slice(first, ROWS).store(
        gl.reshape(gl.permute(made, (0, 2, 3, 1)), [ROWS, 4 * N])
    )


@gluon.jit
def _make(HALF: gl.constexpr, rooms, raw, met, raw_met, unit_ptr, slice_ptr):
    """Warps that make numbers of half of each tile."""
    k_latent, k_rope = rooms
    raw_codes, raw_rope, raw_scales = raw
    full, empty = met
    brought, taken = raw_met
    tile, stop, unit = _piece(slice_ptr)
    stage, phase, turn = HALF, 0, 0
    while tile < stop:
        first, _, _, _, upto = _unit(unit_ptr, unit, stop)
        tile = gl.maximum(tile, first)
        for _ in range(tile, upto):
            into = turn & 1
            mbarrier.wait(brought.index(stage), phase)
            words = ()
            for g in gl.static_range(G):
                words = words + (raw_codes[g].index(stage).load(_in_turn(2, MAKERS)),)
            turned, scales = (
                raw_rope.index(stage).load(_in_turn(8, MAKERS)),
                raw_scales.index(stage).load(_in_turn(4, MAKERS)),
            )
            gl.thread_barrier()
            mbarrier.arrive(taken.index(stage))
            mbarrier.wait(empty.index(into), turn >> 1 & 1 ^ 1)
            k_rope.index(into).slice(HALF * ROWS, ROWS).store(turned)
            _convert(words, scales, k_latent.index(into), HALF * ROWS)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(full.index(into))
            turn += 1
            stage += 2
            if stage >= STAGES:
                stage, phase = stage - STAGES, phase ^ 1
        tile = gl.maximum(tile, upto)
        unit += 1


@gluon.jit
def _multiply(rooms, met, queries, whole, parts, found, unit_ptr, slice_ptr, num_heads, scale, whole_token, whole_head):  # fmt: skip
    """The warps that multiply."""
    k_latent, k_rope = rooms
    full, empty = met
    q_latent, q_rope, qc_token, qc_head, qp_token, qp_head = queries
    C: gl.constexpr = k_latent.shape[2]
    dtype: gl.constexpr = k_rope.dtype
    q_low, q_turned = gl.allocate_shared_memory(dtype, [H, C], OPERAND), gl.allocate_shared_memory(dtype, [H, N], OPERAND)  # fmt: skip
    p_shared = gl.allocate_shared_memory(dtype, [H, N], OPERAND)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [ADDERS, 1], [1, 0])
    NARROW: gl.constexpr = _in_turn(8, ADDERS)
    first_query, results = gl.program_id(1) * H, (whole, whole_token, whole_head, parts, found)
    tile, stop, unit = _piece(slice_ptr)
    turn = 0
    while tile < stop:
        first, length, _, end, upto = _unit(unit_ptr, unit, stop)
        tile = gl.maximum(tile, first)
        if upto > tile:
            gl.thread_barrier()  # all have read the unit before
            at, there = _queries(q_low, q_latent, unit, first_query, num_heads, qc_token, qc_head, 1, WIDE)
            q_low.store(mixed(gl.load(at, mask=there, other=0.0)))
            _read_queries(q_turned, q_rope, unit, first_query, num_heads, qp_token, qp_head, 1, NARROW)
            # As much as the scores of latents are too small.
            q_turned.store((q_turned.load(NARROW).to(gl.float32) * (1.0 / UP)).to(dtype))
            fence_async_shared()
            gl.thread_barrier()
            most, total, sums = _none_yet(scale, C, H)
            sees = gl.full([H], length, gl.int32, gl.SliceLayout(0, _scores_layout(H, ADDERS)))
            for start in range((tile - first) * N, (upto - first) * N, N):
                stage = turn & 1
                latents = k_latent.index(stage)
                mbarrier.wait(full.index(stage), turn >> 1 & 1)
                scores = _scores(q_low, q_turned, latents, k_rope.index(stage), H)
                scores = warpgroup_mma_wait(0, deps=(scores,))
                weights, most, total, sums = _soften(scores, most, total, sums, start, sees, length, scale * UP, LOWEST / UP, H)  # fmt: skip
                acc = _weigh(weights.to(dtype), latents, p_shared, sums, H)
                sums = warpgroup_mma_wait(0, deps=(acc,))
                gl.thread_barrier()
                mbarrier.arrive(empty.index(stage))
                turn += 1
            _leave(
                sums, total, most, unit, tile == first, upto == end, first_query, num_heads, results, UP, C, 1, H, True
            )
            tile = upto
        unit += 1


@gluon.jit(do_not_specialize=["num_heads", "chosen_stride", "early"])
def codes_kernel(q_latent, q_rope, pages, rope, scales, chosen, whole, parts, found, unit_ptr, slice_ptr, table, num_heads, scale, qc_token, qc_head, qp_token,
                 qp_head, page_stride, slot_stride, table_stride, chosen_stride, whole_token, whole_head, early,
                 PAGE: gl.constexpr, C: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """One slice of a token's queries; see `latent_decode._slices_kernel`. C elements of a latent. Strides of pages and slots are counted in 16 bytes, and those of codes, scales and rotary parts are the same."""
    if early == 0:
        wait_turn(PDL)
    dtype: gl.constexpr = q_latent.dtype.element_ty
    k_latent = gl.allocate_shared_memory(dtype, [2, N, C], OPERAND)
    k_rope = gl.allocate_shared_memory(dtype, [2, N, N], OPERAND)
    raw_codes = ()
    for _g in gl.static_range(G):
        raw_codes = raw_codes + (gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, 32], SWAPPED),)
    raw_rope = gl.allocate_shared_memory(dtype, [STAGES, ROWS, 64], PLAIN)
    raw_scales = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS, G], PLAIN)
    rooms, met = (k_latent, k_rope), (barriers(2, 2), barriers(2, 1))
    raw, raw_met = (raw_codes, raw_rope, raw_scales), (barriers(STAGES, COPIERS * 32), barriers(STAGES, 1))
    fence_async_shared()
    held = pages.to(gl.pointer_type(gl.int32), bitcast=True), rope, scales
    strides = page_stride, slot_stride
    queries = q_latent, q_rope, qc_token, qc_head, qp_token, qp_head
    gl.warp_specialize([
        (_multiply, (rooms, met, queries, whole, parts, found, unit_ptr, slice_ptr, num_heads, scale, whole_token, whole_head)),
        (_make, (0, rooms, raw, met, raw_met, unit_ptr, slice_ptr)),
        (_make, (1, rooms, raw, met, raw_met, unit_ptr, slice_ptr)),
        (_bring, (raw, raw_met, held, strides, chosen, unit_ptr, slice_ptr, table, table_stride, chosen_stride, PAGE, PDL)),
    ], [MAKERS, MAKERS, COPIERS], [112, 112, 80])  # fmt: skip
