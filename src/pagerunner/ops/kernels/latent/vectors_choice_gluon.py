"""The choice of slots in the programs of attention to them (`kernels/latent/vectors_gluon.py`), by scores of the launch before. In Gluon, for Hopper.

Both programs of a token's cluster choose, as nobody has to be waited for then. Meanwhile queries and the window are on their way. If the launch before chose, attention's programs would
have no room on its multiprocessors until then.

What is chosen is also left in shared memory, from where the first tiles' numbers are read. Tiles of keys lie at its beginning, since they are the largest of what is allocated, and the first tile is still empty.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pagerunner.ops.kernels.latent.indexer import in_order, narrowed, thirds

HELD_COUNTS = gl.constexpr(64)
"""Bytes in which warps leave what they have counted, before the chosen numbers."""


@gluon.constexpr_function
def _picked(count):
    """The layout of a token's slots when it chooses: neighbours are a thread's."""
    return gl.BlockedLayout([count // 256], [32], [8], [0], [[0]])


@gluon.jit
def _own():
    """Where this program's shared memory begins."""
    return gl.inline_asm_elementwise("mov.u32 $0, global_smem;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _note(chosen, place, number, there):
    """Store chosen numbers from both programs, which read their own (see `vectors_gluon._store`); and in shared memory."""
    at = gl.where(there, (chosen + place).to(gl.int64, bitcast=True), 0)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b64 p, $1, 0; @p st.global.b32 [$1], $2; @p st.shared.b32 [$3], $2; mov.b32 $0, 0; }",
        "=r,l,r,r", [at, number, _own() + HELD_COUNTS + place * 4], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def just_chosen(place, there):
    """Numbers that `choose_best` has chosen, -1 where nothing is. Until shared memory is anybody's again."""
    own = _own() + HELD_COUNTS + gl.where(there, place, 0) * 4
    number = gl.inline_asm_elementwise("ld.shared.b32 $0, [$1];", "=r,r", [own], dtype=gl.int32, is_pure=False, pack=1)
    return gl.where(there, number, -1)


@gluon.jit
def _both(one, other):
    return one + other


@gluon.jit
def _total(x, room):
    """The sum of `x`, of which each thread of 8 warps has one. Threads wait for each other once; in a sum of Triton's thrice."""
    gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 all, thread, at; redux.sync.add.s32 all, $1, 0xffffffff; mov.u32 thread, %tid.x;
        and.b32 at, thread, 31; setp.eq.u32 p, at, 0; shr.u32 at, thread, 3; add.u32 at, at, $2; @p st.shared.b32 [at], all; mov.b32 $0, 0; }""",
        "=r,r,r", [x, room], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    gl.thread_barrier()
    return gl.inline_asm_elementwise(
        """{ .reg .b32 a<8>; ld.shared.v4.b32 {a0, a1, a2, a3}, [$1]; ld.shared.v4.b32 {a4, a5, a6, a7}, [$1+16];
        add.s32 a0, a0, a1; add.s32 a2, a2, a3; add.s32 a4, a4, a5; add.s32 a6, a6, a7; add.s32 a0, a0, a2; add.s32 a4, a4, a6; add.s32 $0, a0, a4; }""",
        "=r,r", [room], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def places_of(C: gl.constexpr):
    """Slots in the layout of their choice."""
    return gl.arange(0, C, _picked(C))


@gluon.jit
def choose_best(chosen, score, count, C: gl.constexpr, TOP_K: gl.constexpr):
    """Store the best TOP_K of `count` slots, at most C, in ascending order, of equal ones the first; -1 behind the last one. Of as few as TOP_K all are, whatever their scores."""
    x = places_of(C)
    live = x < count
    key, low, high = in_order(score, live)
    if count <= TOP_K:
        high = low
    over, room = 0, _own()
    while low < high:
        lower, upper = thirds(low, high)
        counts = gl.where(key >= upper, 65537, gl.where(key >= lower, 1, 0))
        counts = _total(gl.sum(gl.reshape(counts, (256, C // 256)), 1), room)
        low, high, over = narrowed(low, high, over, lower, upper, counts & 0xFFFF, counts >> 16, TOP_K)
        room ^= 32  # not where others may still read
    above, equal = live & (key > low), live & (key == low)
    sums = gl.associative_scan(gl.where(above, 1, gl.where(equal, 65536, 0)), 0, _both)
    larger, same = sums & 0xFFFF, sums >> 16
    need = TOP_K - over
    kept = above | (equal & (same <= need))
    behind = (x >= count) & (x < TOP_K)
    _note(chosen, gl.where(kept, larger + gl.minimum(same, need) - 1, x), gl.where(kept, x, -1), kept | behind)
    gl.thread_barrier()
