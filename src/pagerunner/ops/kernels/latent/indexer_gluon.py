"""Scores of an indexer over paged keys for rows of one token on Hopper, in Gluon. What is computed is as in `kernels/latent/indexer.py`.

Triton's kernel asks for keys when a program's queries have come and lie in shared memory, in fp8 also when they have become codes. Here the first two tiles of keys are asked for beside the queries.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from pagerunner.ops.kernels.latent.indexer import border
from pagerunner.ops.kernels.launch import start_next, wait_turn
from pagerunner.ops.kernels.paged.paged_heads import fitting_scale, quantise

BN = gl.constexpr(128)
"""Slots of a tile."""
STAGES = gl.constexpr(3)
KEYS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
PICKED = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
"""A token's slots when it chooses."""
QUERY = gl.constexpr(gl.BlockedLayout([1, 32], [8, 4], [4, 1], [1, 0]))
"""Queries that become codes: four threads have one."""


@gluon.constexpr_function
def _copied(item):
    """Keys and queries as they are copied, 16 bytes a lane."""
    return gl.BlockedLayout([1, 16 // item], [4 // item, 8 * item], [4, 1], [1, 0])


@gluon.constexpr_function
def _sums(heads, item):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, heads, 32 // item])


@gluon.jit
def _entry(table, key, last, PAGE: gl.constexpr):
    """Pages of slots; 0 where there is none."""
    return gl.load(table + key // PAGE, mask=key < last, other=0)


@gluon.jit
def _copy(smem, keys_ptr, entry, key, page_stride, slot_stride, PAGE: gl.constexpr, D: gl.constexpr, ITEM: gl.constexpr):  # fmt: skip
    """Begin to bring a tile of keys."""
    LAYOUT: gl.constexpr = _copied(ITEM)
    place = gl.convert_layout(entry * page_stride + key % PAGE * slot_stride, gl.SliceLayout(1, LAYOUT))
    at = keys_ptr + gl.multiple_of(place, 16)[:, None] + gl.arange(0, D, gl.SliceLayout(0, LAYOUT))[None, :]
    async_copy.async_copy_global_to_shared(smem, at)


@gluon.jit
def _key_scale(scales_ptr, entry, key, last, scale_page, scale_slot, PAGE: gl.constexpr, FP8: gl.constexpr):
    """Scales of a tile's keys."""
    if FP8:
        return gl.load(scales_ptr + entry * scale_page + key % PAGE * scale_slot, mask=key < last, other=0.0)
    else:
        return 1.0


@gluon.jit
def _rounded(plain, codes, FP8_MAX: gl.constexpr, FP8: gl.constexpr):
    """Make codes of queries, which have been copied before two other groups. Their scales."""
    async_copy.wait_group(2)
    gl.thread_barrier()
    q = plain.load(QUERY).to(gl.float32)
    scale = fitting_scale(gl.max(gl.abs(q), 1), FP8_MAX)
    codes.store(quantise(q, scale[:, None], FP8_MAX, FP8))
    return scale


@gluon.jit
def _summed(dots, weights, scale, SCALED: gl.constexpr):
    """Scores of a tile, summed as in `indexer._score`, to the bit."""
    dots = gl.reshape(gl.maximum(dots, 0.0) * weights[None, :], (BN, 1, dots.shape[1]))
    score = gl.convert_layout(gl.reshape(gl.sum(dots, 2), (BN,)), KEYS)
    if SCALED:
        score *= scale
    return gl.where(score == 0.0, 0.0, score)  # a zero has one sign


@gluon.jit
def _both(one, other):
    return one + other


@gluon.jit
def _choose(own, part, parts, seen, TOP_K: gl.constexpr, C: gl.constexpr):
    """Store a token's slots, if all its programs have left their scores. `own`: its scores, slots, and counter."""
    scores, chosen, counter = own
    x = gl.arange(0, C, PICKED)
    if seen <= TOP_K:
        if part == 0:
            gl.store(chosen + x, gl.where(x < seen, x, -1), mask=x < TOP_K)
    else:
        gl.thread_barrier()  # all of the program's scores are stored before it is counted
        if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1:
            gl.store(counter, 0)
            # Four at a time; a row's scores end with whole tiles.
            score = gl.load(scores + x, mask=x // 4 * 4 < seen, other=0.0)
            above, equal, need = border(score, x < seen, seen, TOP_K, C)
            sums = gl.associative_scan(gl.where(above, 1, gl.where(equal, 65536, 0)), 0, _both)
            larger, same = sums & 0xFFFF, sums >> 16
            gl.store(chosen + (larger + gl.minimum(same, need) - 1), x, mask=above | (equal & (same <= need)))


ANYWHERE = ["row_ptr", "position_ptr", "chosen_ptr", "counter_ptr"]  # a part of a step begins at any of its tokens


@gluon.jit(do_not_specialize=["parts", "early"], do_not_specialize_on_alignment=ANYWHERE)
def scores_kernel(
    q_ptr, weights_ptr, keys_ptr, scales_ptr, scores_ptr, chosen_ptr, counter_ptr, row_ptr, position_ptr, slots_ptr, table_ptr, parts, early,
    q_token, q_head, weights_token, page_stride, slot_stride, scale_page, scale_slot, table_stride, scores_stride,
    J: gl.constexpr, D: gl.constexpr, BJ: gl.constexpr, PAGE: gl.constexpr, RATIO: gl.constexpr, TOP_K: gl.constexpr, C: gl.constexpr,
    FP8: gl.constexpr, FP8_MAX: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A token, and one of `parts` parts of the slots that it sees. `early`: see `indexer_one.run_one`. C: slots that a token sees at most, of which the program that ends
    last chooses, or 0: none does. `counter` [T] is zeros, and is left so.
    """
    if early == 0:
        wait_turn(PDL)
        start_next(PDL)  # attention that chooses itself begins with what is complete by now
    token, part = gl.program_id(0).to(gl.int64), gl.program_id(1)
    slot, row = gl.load(slots_ptr + token).to(gl.int64), gl.load(row_ptr + token)
    position = gl.load(position_ptr + token)  # no load waits for another
    seen = gl.where(row >= 0, (position + 1) // RATIO, 0).to(gl.int32)
    per = gl.cdiv(gl.cdiv(seen, BN), parts) * BN
    first = part * per
    last = gl.where(seen > TOP_K, gl.minimum(first + per, seen), first)
    table = table_ptr + slot * table_stride
    key = first + gl.arange(0, BN, KEYS)
    entry, second = _entry(table, key, last, PAGE), _entry(table, key + BN, last, PAGE)
    third = _entry(table, key + 2 * BN, last, PAGE)
    if early == 1 or first + 2 * BN >= seen:  # the newest slot is of the launch before
        wait_turn(PDL)
    if early == 1:
        start_next(PDL)
    KIND: gl.constexpr = FP8 if FP8 is not None else q_ptr.dtype.element_ty
    ITEM: gl.constexpr = 1 if FP8 is not None else 2
    HELD: gl.constexpr = gl.NVMMASharedLayout(128, 8 * ITEM, 2)
    SUMS: gl.constexpr = _sums(BJ, ITEM)
    if FP8 is not None:
        keys_ptr = keys_ptr.to(gl.pointer_type(FP8), bitcast=True)
    q_smem = gl.allocate_shared_memory(KIND, [BJ, D], HELD)
    k_smem = gl.allocate_shared_memory(KIND, [STAGES, BN, D], HELD)
    column = gl.arange(0, BJ, gl.SliceLayout(0, SUMS))  # what comes by loads is asked for before what comes by copies
    weights = gl.load(weights_ptr + token * weights_token + column, mask=column < J, other=0.0).to(gl.float32)
    scale = _key_scale(scales_ptr, entry, key, last, scale_page, scale_slot, PAGE, FP8 is not None)
    after = _key_scale(scales_ptr, second, key + BN, last, scale_page, scale_slot, PAGE, FP8 is not None)
    head = gl.arange(0, BJ, gl.SliceLayout(1, _copied(2)))
    q_at = q_ptr + token * q_token + (head * q_head)[:, None] + gl.arange(0, D, gl.SliceLayout(0, _copied(2)))[None, :]
    plain = q_smem
    if FP8 is not None:
        plain = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [BJ, D], gl.NVMMASharedLayout(128, 16, 2))
    async_copy.async_copy_global_to_shared(plain, q_at, mask=(head < J)[:, None])
    async_copy.commit_group()
    if first < last:
        _copy(k_smem.index(0), keys_ptr, entry, key, page_stride, slot_stride, PAGE, D, ITEM)
    async_copy.commit_group()
    if first + BN < last:
        _copy(k_smem.index(1), keys_ptr, second, key + BN, page_stride, slot_stride, PAGE, D, ITEM)
    async_copy.commit_group()
    if FP8 is not None:
        weights *= gl.convert_layout(_rounded(plain, q_smem, FP8_MAX, FP8), gl.SliceLayout(0, SUMS))
    now, free = 0, 2
    for at in range(first, last, BN):
        async_copy.wait_group(1)
        fence_async_shared()
        gl.thread_barrier()  # all have used the tile before
        dots = gl.zeros((BN, BJ), gl.float32, SUMS)
        dots = warpgroup_mma(k_smem.index(now), q_smem.permute((1, 0)), dots, use_acc=False, is_async=True)
        # the fence waits for loads, which come behind what was asked for before
        following = _entry(table, key + 3 * BN, last, PAGE)
        if at + 3 * BN >= seen:
            wait_turn(PDL)
        later = _key_scale(scales_ptr, third, key + 2 * BN, last, scale_page, scale_slot, PAGE, FP8 is not None)
        if at + 2 * BN < last:
            _copy(k_smem.index(free), keys_ptr, third, key + 2 * BN, page_stride, slot_stride, PAGE, D, ITEM)
        async_copy.commit_group()
        dots = warpgroup_mma_wait(0, deps=(dots,))
        score = _summed(dots, weights, scale, FP8 is not None)
        gl.store(scores_ptr + token * scores_stride + key, score, mask=key < last)
        key, scale, after, third = key + BN, after, later, following
        now, free = gl.where(now == STAGES - 1, 0, now + 1), gl.where(free == STAGES - 1, 0, free + 1)
    async_copy.wait_group(0)
    wait_turn(PDL)
    start_next(PDL)
    if C:
        own = scores_ptr + token * scores_stride, chosen_ptr + token * TOP_K, counter_ptr + token
        _choose(own, part, parts, seen, TOP_K, C)
