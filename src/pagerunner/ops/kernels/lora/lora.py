"""Kernels of ops/lora.py: a work list once a step, and two launches for the products of a layer; the second has the gate behind gate and up inside.
Those beside a product of up to 64 tokens are in `kernels/lora/lora_gluon.py`, and `A x` of prompts in `kernels/lora/lora_many.py`.

A program of `_shrink` has a tile of tokens, a block of ranks and, with few tiles, one piece of the input features. With many it sums the
pieces itself, each from zero and in the same order, so without a norm the bits are the same. Nothing is added atomically.

What such small kernels take is waiting, not bytes. So both read what is known before their turn comes: where blocks lie, the blocks, and in
`_expand` the output of the layer. Pieces are loaded at once. A step has a bound of tiles, and may use few of them: programs of others end before their turn,
so they hold up nobody. Example: 256 tokens may need 76 tiles with 64 adapters, and need 16 with one.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.activation import WORDS
from pagerunner.ops.kernels.launch import blocks as blocks_of
from pagerunner.ops.kernels.launch import dependent, start_next, start_next_and_wait, wait_turn
from pagerunner.ops.kernels.linear.linear_dense import STEP as STEP_COLUMNS
from pagerunner.ops.kernels.linear.linear_dense import DenseConfig
from pagerunner.ops.kernels.linear.linear_parts import NO_NORM, Product, norm_kind, norm_weight, silu_gate
from pagerunner.ops.kernels.lora import lora_many
from pagerunner.ops.linear import Norm
from pagerunner.ops.lora import (
    FEW_TILES,
    OUTPUTS,
    PIECE,
    SMALL_STEP,
    SPREAD_TILES,
    TILE,
    WIDE_OUTPUTS,
    Blocks,
    Fused,
    PairLists,
    WorkList,
    most_tiles,
    tile_tokens,
)
from pagerunner.ops.lora import pair_lists as _pair_lists_op

MOST_PAIRS = 1024
"""Pairs up to which each looks at all others; more are sorted."""
WARPS = 4  # of a program of `_shrink`, each with its share of a piece
SHARE = tl.constexpr(32)
"""Features of a warp that are multiplied at once."""
SHRINK_WARPS, STEP, LONG_PIECE = 2, 128, 1024
"""Warps of a program of `A x` beside a product, features of each that are multiplied at once, and the program's. Few programs have room beside a product, and each first asks where its block lies."""
EXPAND_WARPS = 2
"""Warps of a program of B behind it. A warp has 256 outputs, so it asks for 8 KB at once."""


@triton.jit(do_not_specialize=["rows", "most", "size"])
def _work_list(
    adapters_R, query_start_R1, tokens_WX, slots_W, places, own_places, rows, most, size,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr, EACH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile, and EACH of the `size` places of the only tile's adapter."""
    start_next_and_wait(PDL)
    w = tl.program_id(0)
    r = tl.arange(0, ROWS)
    own = tl.load(adapters_R + r, r < rows, -1)
    first = tl.load(query_start_R1 + r, r < rows, 0)
    lens = tl.where(own >= 0, tl.load(query_start_R1 + r + 1, r < rows, 0) - first, 0)
    s = tl.arange(0, SLOTS)
    counts = tl.sum(tl.where(own[None, :] == s[:, None], lens[None, :], 0), 1)
    tiles = (counts + most - 1) // most
    slot = tl.sum((tl.cumsum(tiles, 0) <= w).to(tl.int32), 0)
    before = tl.sum(tl.where(s < slot, tiles, 0), 0)
    mine = tl.where(own == slot, lens, 0)
    ends = tl.cumsum(mine, 0)
    i = tl.arange(0, TILE)
    place = (w - before) * most + i
    inside = (i < most)[:, None] & ((ends - mine)[None, :] <= place[:, None])
    inside = inside & (place[:, None] < ends[None, :])
    token = tl.sum(tl.where(inside, (first - ends + mine)[None, :] + place[:, None], 0), 1)
    found = tl.sum(inside.to(tl.int32), 1) > 0
    tl.store(tokens_WX + w * TILE + i, tl.where(found, token, -1))
    tl.store(slots_W + w, tl.where(slot < SLOTS, slot, -1))
    p = tl.program_id(1) * EACH + tl.arange(0, EACH)
    place = tl.load(places + slot.to(tl.int64) * size + p, (p < size) & (slot < SLOTS), -1)
    tl.store(own_places + p, place, p < size)


def work_list(
    adapters_R: torch.Tensor, query_start_R1: torch.Tensor, tokens: int, slots: int, places: torch.Tensor | None = None
) -> WorkList:
    """See ops/lora.py."""
    most = tile_tokens(tokens)
    count, rows = most_tiles(tokens, slots, most), len(adapters_R)
    tokens_WX = torch.empty(count, TILE, dtype=torch.int32, device=adapters_R.device)
    slots_W = torch.empty(count, dtype=torch.int32, device=adapters_R.device)
    own = None if places is None or tokens != 1 else torch.empty_like(places[0])
    if count:
        size = 0 if own is None else own.numel()
        sizes = {
            "ROWS": triton.next_power_of_2(rows),
            "SLOTS": triton.next_power_of_2(slots),
            "TILE": TILE,
            "EACH": 1024,
        }
        _work_list[(count, max(1, blocks_of(size, 1024)))](
            adapters_R, query_start_R1, tokens_WX, slots_W, slots_W if own is None else places, slots_W if own is None else own,
            rows, most, size, **sizes, **dependent(adapters_R.device), num_warps=8,
        )  # fmt: skip
    return WorkList(tokens_WX, slots_W, own)


@triton.jit
def _pair_keys(experts_TA, slots_T, pair, pairs, active, products, none, experts, ALONE: tl.constexpr):
    """The pairs' experts, `experts` for none, and their slots among those of slots and experts."""
    expert = tl.load(experts_TA + pair, pair < pairs, -1).to(tl.int32)
    slot = tl.load(slots_T + pair // active, pair < pairs, -1).to(tl.int32)
    there = (expert >= 0) & (slot >= 0)
    return tl.where(there | ALONE & (expert >= 0), expert, experts), tl.where(there, slot * products + 3 * expert, none)


@triton.jit(do_not_specialize=["pairs", "products", "none", "experts"])
def _pair_lists(
    experts_TA, slots_T, own_TA, tokens_WX, pairs_WX, slots_W, order_P, starts_E1, pairs, active, products, none, experts,
    ALONE: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS pairs, each of which finds its place among all; behind the pairs, the experts find where theirs begin. A slot's tiles begin where its pairs would in the
    order of slots; so no two slots have one tile, and none has to know how many tiles the slots before it have."""
    start_next_and_wait(PDL)
    p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside, i = p < pairs, tl.arange(0, TILE)
    expert, key = _pair_keys(experts_TA, slots_T, p, pairs, active, products, none, experts, ALONE)
    expert = tl.where(inside, expert, p - pairs)
    first, rank, count = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32)
    start, place = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32)
    for at in range(0, pairs, STEP):
        q = at + tl.arange(0, STEP)
        whose, other = _pair_keys(experts_TA, slots_T, q, pairs, active, products, none, experts, ALONE)
        real, before = (q < pairs)[None, :], q[None, :] < p[:, None]
        same = (other[None, :] == key[:, None]) & real
        first += tl.sum((other[None, :] < key[:, None]).to(tl.int32), 1)
        rank += tl.sum((same & before).to(tl.int32), 1)
        count += tl.sum(same.to(tl.int32), 1)
        start += tl.sum(((whose[None, :] < expert[:, None]) & real).to(tl.int32), 1)
        place += tl.sum(((whose[None, :] == expert[:, None]) & real & before).to(tl.int32), 1)
    tl.store(order_P + start + place, p, inside)
    tl.store(starts_E1 + p - pairs, start, (p >= pairs) & (p <= pairs + experts))
    there = key < none
    tl.store(own_TA + p, tl.where(expert < experts, expert, -1), inside)
    to = (first + rank // TILE) * TILE + rank % TILE
    tl.store(pairs_WX + to, p, there)
    tl.store(tokens_WX + to, p // active, there)
    # Each pair also sees to the tile that has the number of its own place: what it lacks.
    used = there & (rank * TILE < count)
    tl.store(slots_W + first + rank, tl.where(used, key, -1), inside)
    empty = inside[:, None] & ((used == 0)[:, None] | (rank[:, None] * TILE + i[None, :] >= count[:, None]))
    lacks = (first + rank)[:, None] * TILE + i[None, :]
    tl.store(pairs_WX + lacks, -1, empty)
    tl.store(tokens_WX + lacks, -1, empty)


def pair_lists(
    experts_TA: torch.Tensor,
    slots_T: torch.Tensor,
    products: int,
    none: int,
    tiles: int,
    experts: int,
    *,
    alone: bool = False,
) -> PairLists:
    """See ops/lora.py."""
    pairs, active = experts_TA.numel(), experts_TA.shape[1]
    if pairs > MOST_PAIRS or not pairs:
        return _pair_lists_op.twin(experts_TA, slots_T, products, none, tiles, experts, alone=alone)
    experts_TA, device = experts_TA.contiguous(), experts_TA.device
    own_TA, slots_W = torch.empty_like(experts_TA), torch.empty(pairs, dtype=torch.int32, device=device)
    order_P, starts_E1 = torch.empty_like(slots_W), slots_W.new_empty(experts + 1)
    tokens_WX, pairs_WX = torch.empty(2, pairs, TILE, dtype=torch.int32, device=device).unbind()
    _pair_lists[(blocks_of(pairs + experts + 1, 32),)](
        experts_TA, slots_T, own_TA, tokens_WX, pairs_WX, slots_W, order_P, starts_E1, pairs, active, products, none, experts,
        ALONE=alone, ROWS=32, STEP=64, TILE=TILE, **dependent(device),
    )  # fmt: skip
    return PairLists(own_TA, WorkList(tokens_WX, slots_W), WorkList(pairs_WX, slots_W), order_P, starts_E1)


@triton.jit
def _kept(x):
    """`x` in registers until here. Left to itself, the compiler moves all parts of an operand to shared memory at once."""
    if WORDS:
        PACK: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        y = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=PACK)
    else:
        y = x
    return y


@triton.jit(do_not_specialize=["first"])
def _shrink(
    x_TI, x_stride, norm_ptr, tokens_WX, slots_W, places, pool, inner, inputs, first, products, pieces,
    BLOCKS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, S: tl.constexpr, K: tl.constexpr, SPREAD: tl.constexpr,
    NORM: tl.constexpr, KNOWN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if not KNOWN:
        wait_turn(PDL)
    w, own, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots_W + w)
    # Programs of the first tile wait in any case, so this kernel doesn't end before the one before.
    if (slot < 0) & (w > 0):
        return
    place = tl.load(
        places + (((slot * products + first + own // BLOCKS) * BLOCKS + own % BLOCKS) * 2).to(tl.int64), slot >= 0, -1
    )
    i = tl.arange(0, TILE)
    tokens = tl.load(tokens_WX + w * TILE + i)
    features = piece * (S * K) + tl.arange(0, S)[:, None] * K + tl.arange(0, min(SHARE, K))[None, :]
    a_place = pool + tl.multiple_of(place, TILE) + features[:, :, None] + i[None, None, :] * inputs
    x_place = x_TI + tokens.to(tl.int64)[None, :, None] * x_stride + features[:, None, :]
    valid = (tokens >= 0)[None, :, None]
    ROWS: tl.constexpr = TILE if NORM == NO_NORM else TILE + 1
    to = inner + ((piece * tl.num_programs(0) + w).to(tl.int64) * PARTS * BLOCKS + own) * ROWS * TILE + i
    SHARES: tl.constexpr = (K + SHARE - 1) // SHARE
    acc = tl.zeros([S, TILE, TILE], tl.float32)  # warps divide the features between them
    if SPREAD:
        a, weight, x = (), (), ()
        for share in tl.static_range(SHARES):
            there = features < inputs - share * SHARE
            a = a + (tl.load(a_place + share * SHARE, (there & (place >= 0))[:, :, None], 0.0),)
            if NORM != NO_NORM:
                weight = weight + (norm_weight(norm_ptr, features + share * SHARE, there, NORM),)
        # The next kernel starts when all before this one have ended: it may read what they have written before its own wait.
        wait_turn(PDL)
        start_next(PDL)
        if place < 0:
            return
        for share in tl.static_range(SHARES):
            there = features < inputs - share * SHARE
            x = x + (tl.load(x_place + share * SHARE, there[:, None, :] & valid, 0.0),)
        own_x, own_a = (), ()  # all is on its way before anything is moved between threads
        for share in tl.static_range(SHARES):
            own_x, own_a = own_x + (_kept(x[share]),), own_a + (_kept(a[share]),)
        square = tl.zeros([TILE], tl.float32)
        for share in tl.static_range(SHARES):
            part = own_x[share]
            if NORM != NO_NORM:
                wide = part.to(tl.float32)
                square += tl.sum(tl.sum(wide * wide, 2), 0)
                part = (wide * weight[share][:, None, :]).to(a[0].dtype)
            acc = tl.dot(_kept(part), _kept(own_a[share]), acc, input_precision="ieee")
        if NORM != NO_NORM:
            tl.store(to + TILE * TILE, square / inputs)
        total = tl.sum(acc, 0)
    else:
        wait_turn(PDL)
        start_next(PDL)
        if place < 0:
            return
        total = tl.zeros([TILE, TILE], tl.float32)
        for at in range(0, pieces * (S * K), S * K):
            acc = tl.zeros([S, TILE, TILE], tl.float32)
            for share in tl.static_range(SHARES):
                inside = features < inputs - at - share * SHARE
                x = tl.load(x_place + at + share * SHARE, inside[:, None, :] & valid, 0.0)
                a = tl.load(a_place + at + share * SHARE, inside[:, :, None], 0.0)
                acc = tl.dot(x, a, acc, input_precision="ieee")
            total += tl.sum(acc, 0)
    tl.store(to[None, :] + i[:, None] * TILE, total)


@functools.cache
def _gluon() -> Any:
    """The module of the kernels beside a product. It isn't imported with Triton versions that may not have what it names."""
    return importlib.import_module("pagerunner.ops.kernels.lora.lora_gluon")


def shrink_beside(
    product: Product, work: WorkList, adapters: Blocks, layer: Fused, sums_POT: torch.Tensor | None, config: DenseConfig
) -> torch.Tensor:
    """`shrink` beside a product, which lets it start when all before have ended. Further programs add up the sums that the product leaves, and are ready when it ends."""
    x_TI, _, bias_O, out_TO, _, _, add = product
    (tokens, inputs), outputs, tiles = x_TI.shape, out_TO.shape[1], len(work.slots_W)
    _, products, per_product, _ = adapters.places.shape
    pieces, own = blocks_of(inputs, LONG_PIECE), layer.parts * per_product
    inner = torch.empty(pieces, tiles, layer.parts, per_product, TILE, TILE, dtype=torch.float32, device=x_TI.device)
    sums: torch.Tensor = inner if sums_POT is None else sums_POT
    parts, features, size = (0, 0, SMALL_STEP) if sums_POT is None else sums_POT.shape
    more = blocks_of(blocks_of(outputs, 512 // size), tiles * own) if parts else 0
    _gluon().shrink_kernel[(tiles, own, pieces + more)](
        x_TI, x_TI.stride(0), *work[:2], adapters.places, adapters.pool, inner, inputs, layer.first, products, pieces, sums,
        x_TI if bias_O is None else bias_O, out_TO, out_TO.stride(0), tokens, outputs, features, config.rows, blocks_of(inputs, STEP_COLUMNS), config.steps,
        BLOCKS=per_product, PARTS=layer.parts, K=LONG_PIECE, STEP=STEP, S=SHRINK_WARPS, EVEN=inputs % LONG_PIECE == 0, BT=size, SUMS=parts, ADD=add,
        BIAS=bias_O is not None, **dependent(x_TI.device), num_warps=SHRINK_WARPS,
    )  # fmt: skip
    return inner


def shrink(
    x_TI: torch.Tensor, work: WorkList, blocks: Blocks, layer: Fused, norm: Norm | None = None, *, known: bool = False
) -> torch.Tensor:
    """See ops/lora.py."""
    tiles, inputs = len(work.slots_W), x_TI.shape[1]
    _, products, per_product, _ = blocks.places.shape
    pieces = blocks_of(inputs, PIECE)
    spread = tiles <= SPREAD_TILES
    if not spread and norm is not None:
        x_TI, norm = norm(x_TI), None
    if not spread and lora_many.serves(tiles, blocks):
        return lora_many.shrink(x_TI, work, blocks, layer)
    rows = TILE if norm is None else TILE + 1
    shape = pieces if spread else 1, tiles, layer.parts, per_product, rows, TILE
    inner = torch.empty(shape, dtype=torch.float32, device=x_TI.device)
    if tiles:
        sizes = {"BLOCKS": per_product, "PARTS": layer.parts, "TILE": TILE, "S": WARPS, "K": PIECE // WARPS}
        _shrink[(tiles, layer.parts * per_product, shape[0])](
            x_TI, x_TI.stride(0), x_TI if norm is None else norm.weight_I, *work[:2], blocks.places, blocks.pool, inner, inputs, layer.first,
            products, pieces, **sizes, SPREAD=spread, NORM=norm_kind(norm), KNOWN=known, **dependent(x_TI.device), num_warps=WARPS,
        )  # fmt: skip
    return inner


@triton.jit
def as_summed(x):
    """`x`, whose terms the compiler can't rearrange for what uses it before it adds them. Before a product each would go through shared memory."""
    if WORDS:
        y = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1)
    else:
        y = x
    return y


@triton.jit
def row_place(places, product, WIDE: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """Where the blocks of B lie of a product of one token's adapter, for each of WIDE ranks; -1 for those that aren't there."""
    ranks = tl.arange(0, WIDE)
    return tl.load(places + product * (BLOCKS * 2) + 1 + ranks // TILE * 2, ranks < BLOCKS * TILE, -1)


@triton.jit
def row_ranks(pool, place, size, feature, end, BN: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr):
    """B of one token's adapter for BN output features of a product, [BN, WIDE ranks], zeros for those that aren't there. `place` is `row_place`'s.

    There are no fewer ranks than a program has threads, and each feature's are a load of their own. So a thread has all features of a rank, as it has them of its
    part of the product's own sums.
    """
    b = tl.zeros([BN, WIDE], pool.dtype.element_ty)
    at = pool + place + tl.arange(0, WIDE) % TILE * size + feature
    for each in tl.static_range(BN):
        of_feature = tl.load(at + each, (place >= 0) & (feature + each < end), 0.0)
        b = tl.where((tl.arange(0, BN) == each)[:, None], of_feature[None, :], b)
    return b


@triton.jit
def token_inner(
    x_ptr, norm_ptr, words, turn, places, pool, first, program,
    K: tl.constexpr, BK: tl.constexpr, RANKS: tl.constexpr, NORM: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
    COPIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`A (x * weight)` of one token and RANKS ranks, into words that say which turn's they are. Without an adapter it is 0."""
    own, ranks, cols = program * RANKS // TILE, program * RANKS % TILE + tl.arange(0, RANKS), tl.arange(0, BK)
    place = tl.multiple_of(tl.load(places + (first * BLOCKS + own) * 2), TILE)
    at = pool + place + ranks[:, None] * K + cols[None, :]
    STEPS: tl.constexpr = (K + BK - 1) // BK
    a = ()
    for step in tl.static_range(STEPS):
        a = a + (tl.load(at + step * BK, (place >= 0) & (step * BK + cols < K)[None, :], 0.0),)
    if NORM != NO_NORM:
        weight = norm_weight(norm_ptr, cols, cols < K, NORM)
    wait_turn(PDL)
    acc = tl.zeros((RANKS, BK), tl.float32)
    for step in tl.static_range(STEPS):
        k = step * BK + cols
        x = tl.load(x_ptr + k, k < K, 0.0).to(tl.float32)
        if NORM != NO_NORM:
            if step > 0:
                weight = norm_weight(norm_ptr, k, k < K, NORM)
            x *= weight
        acc += a[step].to(tl.float32) * x[None, :]
    h = tl.sum(acc, 1).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    to = tl.arange(0, COPIES)[:, None] * (PARTS * BLOCKS * TILE) + own * TILE + ranks[None, :]
    tl.store(words + to, tl.zeros([COPIES, RANKS], tl.int64) + (h | (turn.to(tl.int64) << 32))[None, :])


@triton.jit
def row_words(
    words, program, part, WIDE: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, COPIES: tl.constexpr
):  # fmt: skip
    """Where a program finds a product's words. Programs share the copies out among them, so that few ask for the same."""
    return words + (program % COPIES * PARTS + part) * (BLOCKS * TILE) + tl.arange(0, WIDE)


@triton.jit
def look(at, turn, WIDE: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """What is there now. Words that nobody writes are the turn's."""
    return tl.load(at, tl.arange(0, WIDE) < BLOCKS * TILE, turn.to(tl.int64) << 32, volatile=True)


@triton.jit
def row_own(acc, WIDE: tl.constexpr):
    """Each thread's own sums of `acc` [features, inputs], in the order in which it adds them without an adapter: [features, WIDE]."""
    if acc.shape[1] >= WIDE:
        EACH: tl.constexpr = min(8, acc.shape[1] // WIDE)
        acc = tl.reshape(acc, [acc.shape[0], acc.shape[1] // WIDE // EACH, WIDE, EACH])
        acc = tl.permute(acc, (0, 2, 1, 3))
        own = tl.sum(tl.reshape(acc, [acc.shape[0], WIDE, acc.shape[2] * EACH]), 2)
    else:
        own = tl.where((tl.arange(0, WIDE) == 0)[None, :], tl.sum(acc, 1)[:, None], 0.0)
    return as_summed(own)  # else the compiler has these sums behind the wait for words


@triton.jit
def row_sum(own, b, at, seen, turn):
    """The sums of all threads' own ones and of what an adapter adds to them. Each thread waits until its own words are the turn's, so threads meet once.

    A thread adds its ranks' share to its own sums first: another sum over threads took as long as memory takes for a tenth of the weights.
    """
    if WORDS:
        h = tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b64 w; .reg .b32 h; mov.b64 w, $2; AGAIN: mov.b64 {$0, h}, w; setp.eq.u32 p, h, $3; "
            "@p bra DONE; ld.volatile.global.b64 w, [$1]; bra AGAIN; DONE: }",
            "=r,l,l,r", [at.to(tl.int64), seen, turn], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        h = seen.to(tl.int32)
    return tl.sum(own + b.to(tl.float32) * h.to(tl.float32, bitcast=True)[None, :], 1)


@triton.jit
def _tile_added(
    inner, w, part, place, b, own, b_place, eps, step, inside,
    PIECES: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, OUTPUTS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """`B (A x)` of a tile's tokens for some outputs of a product, whose first block `b` of B is there. `own` is where places of its blocks are."""
    ROWS: tl.constexpr = TILE + 1 if NORM else TILE
    i = tl.arange(0, TILE)
    inner += ((w * PARTS + part) * BLOCKS).to(tl.int64) * ROWS * TILE
    acc = tl.zeros([TILE, OUTPUTS], tl.float32)
    for block in range(BLOCKS):
        if block > 0:
            place = tl.load(own + block * 2, place >= 0, -1)  # the first block is there if any is
            b = tl.load(b_place + tl.multiple_of(place, TILE), inside & (place >= 0), 0.0)
        if place >= 0:
            mine = inner + block * ROWS * TILE
            flat = tl.zeros([TILE * TILE], tl.float32)
            square = tl.zeros([TILE], tl.float32)
            for piece in tl.static_range(PIECES):
                flat += tl.load(mine + piece * step + tl.arange(0, TILE * TILE))
                if NORM:
                    square += tl.load(mine + piece * step + TILE * TILE + i)
            h = tl.reshape(as_summed(flat), [TILE, TILE])
            if NORM:
                h *= (1.0 / tl.sqrt_rn(square + eps))[:, None]
            acc = tl.dot(h.to(b.dtype), b, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["first"])
def _expand(
    y_TO, y_stride, inner, eps, tokens_WX, slots_W, places, pool, tiles_N5, first, products,
    PIECES: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, OUTPUTS: tl.constexpr, ALIGN: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    tile = tiles_N5 + tl.program_id(1) * 5
    part, at, column = tl.load(tile), tl.multiple_of(tl.load(tile + 1), ALIGN), tl.multiple_of(tl.load(tile + 2), ALIGN)
    count, outputs = tl.multiple_of(tl.load(tile + 3), ALIGN), tl.multiple_of(tl.load(tile + 4), ALIGN)
    w = tl.program_id(0)
    slot = tl.load(slots_W + w)
    if (slot < 0) & (w > 0):  # as in `_shrink`
        return
    i, o = tl.arange(0, TILE), tl.arange(0, OUTPUTS)
    tokens = tl.load(tokens_WX + w * TILE + i)
    own = places + (((slot * products + first + part) * BLOCKS) * 2 + 1).to(tl.int64)
    place = tl.load(own, slot >= 0, -1)
    y = y_TO + tokens.to(tl.int64)[:, None] * y_stride + column + o[None, :]
    there = (tokens >= 0)[:, None] & (o < count)[None, :] & (place >= 0)
    base = tl.load(y, there, 0.0)
    b_place = pool + i[:, None] * outputs + at + o[None, :]
    b = tl.load(b_place + tl.multiple_of(place, TILE), (o < count)[None, :] & (place >= 0), 0.0)
    wait_turn(PDL)
    if place < 0:
        return
    step = tl.num_programs(0).to(tl.int64) * PARTS * BLOCKS * (TILE + 1 if NORM else TILE) * TILE
    inside = (o < count)[None, :]
    acc = _tile_added(
        inner, w, part, place, b, own, b_place, eps, step, inside, PIECES, BLOCKS, PARTS, TILE, OUTPUTS, NORM
    )
    tl.store(y, (base.to(tl.float32) + acc).to(base.dtype), there)


@triton.jit(do_not_specialize=["first", "tiles", "num_tokens"])
def _expand_silu(
    out_TO, y_TO, y_stride, inner, eps, tokens_WX, slots_W, places, pool, own_R, row_T, first, products, tiles, num_tokens, features,
    PIECES: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr, OUTPUTS: tl.constexpr, NORM: tl.constexpr, EACH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Programs of tiles have the tokens with an adapter, those behind them the others, by their places. EACH: token t is row t's."""
    start_next(PDL)
    w = tl.program_id(0)
    i, o = tl.arange(0, TILE), tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = (o < features)[None, :]
    slot = tl.load(slots_W + w, w < tiles, -1)
    if (slot < 0) & (w > 0) & (w < tiles):  # as in `_shrink`
        return
    tokens = tl.load(tokens_WX + w * TILE + i, w < tiles, -1)
    if w >= tiles:
        tokens = (w - tiles) * TILE + i
        row = tokens
        if not EACH:
            row = tl.load(row_T + tokens, tokens < num_tokens, -1)
        adapter = tl.load(own_R + row, (row >= 0) & (tokens < num_tokens), -1)
        tokens = tl.where((adapter < 0) & (tokens < num_tokens), tokens, -1)
    own = places + ((slot * products + first) * BLOCKS * 2 + 1).to(tl.int64)
    up_own = own + BLOCKS * 2
    place, up_place = tl.load(own, slot >= 0, -1), tl.load(up_own, slot >= 0, -1)
    at, there = tokens.to(tl.int64)[:, None], (tokens >= 0)[:, None] & inside
    gate = tl.load(y_TO + at * y_stride + o[None, :], there, 0.0)
    up = tl.load(y_TO + at * y_stride + features + o[None, :], there, 0.0)
    b_place = pool + i[:, None] * features + o[None, :]
    b = tl.load(b_place + tl.multiple_of(place, TILE), inside & (place >= 0), 0.0)
    up_b = tl.load(b_place + tl.multiple_of(up_place, TILE), inside & (up_place >= 0), 0.0)
    wait_turn(PDL)
    dtype: tl.constexpr = y_TO.dtype.element_ty
    step = tiles.to(tl.int64) * 2 * BLOCKS * (TILE + 1 if NORM else TILE) * TILE
    y = gate.to(tl.float32)
    y += _tile_added(inner, w, 0, place, b, own, b_place, eps, step, inside, PIECES, BLOCKS, 2, TILE, OUTPUTS, NORM)
    u = up.to(tl.float32)
    u += _tile_added(
        inner, w, 1, up_place, up_b, up_own, b_place, eps, step, inside, PIECES, BLOCKS, 2, TILE, OUTPUTS, NORM
    )
    tl.store(out_TO + at * features + o[None, :], silu_gate(y, u, dtype).to(dtype), there)


def expand_warps(outputs: int) -> int:
    """Warps of a program of `_expand` with so many outputs: 64 sums a thread at most."""
    return 4 if outputs <= 128 else 8


def expand_(
    y_TO: torch.Tensor,
    inner: torch.Tensor,
    work: WorkList,
    blocks: Blocks,
    layer: Fused,
    norm: Norm | None = None,
    *,
    beside: bool = False,
) -> None:
    """See ops/lora.py."""
    pieces, tiles, _, _, rows, _ = inner.shape
    _, products, per_product, _ = blocks.places.shape
    tiles_N5, outputs = (layer.tiles_N5, OUTPUTS) if tiles <= FEW_TILES else (layer.wide_N5, WIDE_OUTPUTS)
    if beside:
        warps = 2 if outputs == OUTPUTS else EXPAND_WARPS
        units = outputs // (64 * warps)
        _gluon().expand_kernel[(tiles, len(tiles_N5))](
            y_TO, y_TO.stride(0), inner, *work[:2], blocks.places, blocks.pool, tiles_N5, layer.first, products, PIECES=pieces, BLOCKS=per_product,
            PARTS=layer.parts, UNITS=units, WARPS=warps, ALIGN=TILE if layer.aligned else 1, **dependent(y_TO.device), num_warps=warps,
        )  # fmt: skip
    elif tiles:
        sizes = {"PIECES": pieces, "BLOCKS": per_product, "PARTS": layer.parts, "TILE": TILE, "OUTPUTS": outputs}
        _expand[(tiles, len(tiles_N5))](
            y_TO, y_TO.stride(0), inner, 0.0 if norm is None else norm.eps, *work[:2], blocks.places, blocks.pool, tiles_N5, layer.first,
            products, **sizes, ALIGN=TILE if layer.aligned else 1, NORM=rows > TILE, **dependent(y_TO.device),
            num_warps=expand_warps(outputs),
        )  # fmt: skip


def expand_silu(
    y_T2O: torch.Tensor, inner: torch.Tensor, work: WorkList, blocks: Blocks, layer: Fused, own_R: torch.Tensor, row_T: torch.Tensor | None,
    norm: Norm | None = None,
) -> torch.Tensor:  # fmt: skip
    """See ops/lora.py."""
    pieces, tiles, _, _, rows, _ = inner.shape
    tokens, features = y_T2O.shape[0], y_T2O.shape[1] // 2
    _, products, per_product, _ = blocks.places.shape
    out_TO = y_T2O.new_empty(tokens, features)
    outputs = OUTPUTS if tiles <= FEW_TILES else WIDE_OUTPUTS // 2
    if tokens:
        _expand_silu[(tiles + blocks_of(tokens, TILE), blocks_of(features, outputs))](
            out_TO, y_T2O, y_T2O.stride(0), inner, 0.0 if norm is None else norm.eps, *work[:2], blocks.places, blocks.pool, own_R,
            own_R if row_T is None else row_T, layer.first, products, tiles, tokens, features, PIECES=pieces, BLOCKS=per_product, TILE=TILE,
            OUTPUTS=outputs, NORM=rows > TILE, EACH=row_T is None, **dependent(y_T2O.device), num_warps=expand_warps(outputs),
        )  # fmt: skip
    return out_TO
