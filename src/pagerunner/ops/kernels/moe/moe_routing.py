"""Choosing experts, and ordering pairs of token and expert by expert; see `ops/routing.py`.

Up to `_MOST_AT_ONCE` scores are one program: it chooses, counts each expert's pairs and places them. More scores are two launches: each
program chooses for some tokens and counts, then it places their pairs behind those that other programs have counted.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagerunner.ops import numerics
from pagerunner.ops.kernels.launch import blocks, dependent, padded, start_next, start_next_and_wait, wait_turn
from pagerunner.ops.routing import TILE_PAIRS, Here, Routes, Routing, Tiles, counts_experts, touched_experts

SOFTMAX, SIGMOID, SQRT_SOFTPLUS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_KINDS = {"softmax": SOFTMAX.value, "sigmoid": SIGMOID.value, "sqrtsoftplus": SQRT_SOFTPLUS.value}
_MOST_AT_ONCE = 2048  # scores of a program that places pairs, too
_FEWEST, _MOST, _BLOCKS = 1024, 8192, 128  # scores of one program of several, and about how many of them there are
_COUNTS, _MANY_COUNTS = 4096, 16384  # that a program adds up at a time: of few tokens there are fewer
_FEW_BLOCKS = 256  # tokens up to which a program has fewer scores: few programs' counts are read by all others
TAKEN = tl.constexpr(-(2**31))
TILE = tl.constexpr(TILE_PAIRS)


@triton.jit
def note_touched(touched_ptr, count):
    """One call that reads so many experts."""
    tl.atomic_add(touched_ptr, count.to(tl.int64))
    tl.atomic_add(touched_ptr + 1, count.to(tl.int64) * 0 + 1)


@triton.jit
def _store_tiles(tiles_ptr, experts, starts, counts, E: tl.constexpr, ALL: tl.constexpr, BA: tl.constexpr):
    """Which expert has a tile of TILE pairs, the tile's first pair and the end of the expert's, for 2 ALL tiles; and zeros [8 ALL] to count in.

    The expert is E where there are fewer tiles. Where there are more, nobody reads tiles, and they aren't stored. ALL is E times the ranks.
    """
    every = tl.arange(0, BA)
    own = (counts + TILE - 1) // TILE
    first = tl.cumsum(own, 0) - own
    for i in tl.static_range(2):
        place = i * ALL + every
        tl.store(tiles_ptr + place, tl.full((BA,), E, tl.int32), mask=(every < ALL) & (place >= tl.sum(own, 0)))
    for i in range(tl.where(tl.sum(own, 0) <= 2 * ALL, tl.max(own, 0), 0)):
        tile = first + i
        there = (experts < E) & (i < own)
        tl.store(tiles_ptr + tile, experts, mask=there)
        tl.store(tiles_ptr + 2 * ALL + tile, starts + i * TILE, mask=there)
        tl.store(tiles_ptr + 4 * ALL + tile, starts + counts, mask=there)
    for i in tl.static_range(8):
        tl.store(tiles_ptr + (6 + i) * ALL + every, tl.zeros((BA,), tl.int32), mask=every < ALL)


@triton.jit
def _score(logits, inside, KIND: tl.constexpr):
    """Scores of float32 logits [tokens, experts]."""
    if KIND == SOFTMAX:
        logits = tl.where(inside[None, :], logits, float("-inf"))
        raised = tl.exp(logits - tl.max(logits, 1)[:, None])
        return raised / tl.sum(raised, 1)[:, None]
    elif KIND == SIGMOID:
        return 1.0 / (1.0 + tl.exp(-logits))
    else:
        return tl.sqrt_rn(tl.maximum(logits, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(logits))))


@triton.jit
def _keys(choice, inside):
    """32-bit keys that are ordered as the float32 numbers are. Experts that there aren't have the least key, TAKEN.

    NaN counts as a number, so that there are always enough experts to choose from.
    """
    bits = choice.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(inside[None, :], tl.maximum(bits, TAKEN + 1), TAKEN)


@triton.jit
def _number(keys):
    """The float32 number of a key."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _is_best(keys, experts):
    """Where each token's largest key stands, and that key; of equal keys the first expert's. Two reductions of 32 bits, as the device has for a warp."""
    best = tl.max(keys, 1)
    first = tl.min(tl.where(keys == best[:, None], experts[None, :], 2147483647), 1)
    return experts[None, :] == first[:, None], best


@triton.jit
def _of_kept_groups(
    keys, experts, GROUPS: tl.constexpr, KEPT: tl.constexpr, SIZE: tl.constexpr, BG: tl.constexpr, BEST: tl.constexpr
):
    """The keys, TAKEN for experts outside each token's KEPT best groups, which count with the sum of their BEST best experts."""
    groups = tl.arange(0, BG)
    best = tl.full((keys.shape[0], BG), TAKEN, tl.int32)
    for g in tl.static_range(GROUPS):
        own = tl.where((experts // SIZE == g)[None, :], keys, TAKEN)
        is_best, first = _is_best(own, experts)
        number = _number(first)
        if BEST == 2:
            number += _number(tl.max(tl.where(is_best, TAKEN, own), 1))
        best = tl.where((groups == g)[None, :], _keys(number[:, None], groups < GROUPS), best)
    kept = tl.zeros((keys.shape[0], BG), tl.int32)
    for _ in tl.static_range(KEPT):
        own, _first = _is_best(best, groups)
        kept = tl.where(own, 1, kept)
        best = tl.where(own, TAKEN, best)
    for g in tl.static_range(GROUPS):
        lost = tl.sum(tl.where((groups == g)[None, :], kept, 0), 1) == 0
        keys = tl.where((experts // SIZE == g)[None, :] & lost[:, None], TAKEN, keys)
    return keys


@triton.jit
def choose(logits, bias_ptr, experts, A: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, KIND: tl.constexpr,
           NORMALISE: tl.constexpr, BIAS: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, BG: tl.constexpr):  # fmt: skip
    """For logits [tokens, experts]: the scores, each expert's place among those chosen or -1, and what a token's scores are divided by."""
    inside = experts < E
    scores = _score(logits, inside, KIND)
    choice = logits
    if BIAS:
        choice = scores + tl.load(bias_ptr + experts, mask=inside, other=0.0)[None, :]
    keys = _keys(choice, inside)
    if KEPT < GROUPS:
        keys = _of_kept_groups(keys, experts, GROUPS, KEPT, E // GROUPS, BG, 2 if BIAS else 1)
    slots = tl.full(logits.shape, -1, tl.int32)
    for a in range(A):
        own, _best = _is_best(keys, experts)
        slots = tl.where(own, a, slots)
        keys = tl.where(own, TAKEN, keys)
    total = tl.full((logits.shape[0],), 1.0, tl.float32)
    if NORMALISE:
        total = tl.sum(tl.where(slots >= 0, scores, 0.0), 1) + 1e-20
    return scores, slots, total


@triton.jit(do_not_specialize=["num_tokens", "first"])
def _route_kernel(logits_ptr, bias_ptr, row_ptr, weights_ptr, experts_ptr, order_ptr, starts_ptr, counts_ptr, touched_ptr, num_tokens, factor, first,
                  A: tl.constexpr, E: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr, KIND: tl.constexpr,
                  NORMALISE: tl.constexpr, BIAS: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
                  BG: tl.constexpr, ORDER: tl.constexpr, COUNT: tl.constexpr, PADS: tl.constexpr, HERE: tl.constexpr, ALL: tl.constexpr,
                  BA: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BT tokens. With ORDER they are all tokens, and their pairs are placed too. Otherwise each expert's pairs are counted.

    Of one token no tiles are stored: its experts have kernels that need none.

    PADS: tokens whose `row` is negative are padding, and go to no expert. HERE: of so many experts from `first` on; others are none.
    """
    start_next_and_wait(PDL)
    tokens = tl.program_id(0) * BT + tl.arange(0, BT)
    experts = tl.arange(0, BE)
    valid = tokens < num_tokens
    there = valid[:, None] & (experts < E)[None, :]
    logits = tl.load(logits_ptr + tokens[:, None] * E + experts[None, :], mask=there, other=0.0)
    scores, slots, total = choose(logits, bias_ptr, experts, A, E, BE, KIND, NORMALISE, BIAS, GROUPS, KEPT, BG)
    chosen = (slots >= 0) & valid[:, None]
    pairs = tokens[:, None] * A + slots
    weights, ids = scores / total[:, None] * factor, tl.broadcast_to(experts[None, :], slots.shape)
    there = chosen
    if PADS:
        there = (slots >= 0) & (tl.load(row_ptr + tokens, mask=valid, other=-1) >= 0)[:, None]
    if HERE < E:
        experts -= first
        there = there & ((experts >= 0) & (experts < HERE))[None, :]
        ids -= first
    if PADS or HERE < E:
        weights, ids = tl.where(there, weights, 0.0), tl.where(there, ids, -1)
    tl.store(weights_ptr + pairs, weights, mask=chosen)
    tl.store(experts_ptr + pairs, ids, mask=chosen)
    chosen = there
    inside = (experts >= 0) & (experts < HERE)
    own = chosen.to(tl.int32)
    counts = tl.sum(own, 0)
    if not ORDER:
        tl.store(counts_ptr + tl.program_id(0) * HERE + experts, counts, mask=inside)
    else:
        starts = tl.cumsum(counts, 0) - counts
        places = starts[None, :] + tl.cumsum(own, 0) - own
        tl.store(order_ptr + places, pairs, mask=chosen)
        tl.store(starts_ptr + experts, starts, mask=inside)
        tl.store(starts_ptr + HERE, tl.sum(counts, 0))
        if BT > 1:
            _store_tiles(starts_ptr + HERE + 1, experts, starts, counts, HERE, ALL, BA)
        if COUNT:
            note_touched(touched_ptr, tl.sum((counts > 0).to(tl.int32), 0))


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"])
def _place_kernel(experts_ptr, counts_ptr, order_ptr, starts_ptr, touched_ptr, num_tokens, num_blocks, A: tl.constexpr, E: tl.constexpr,
                  BT: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr, COUNT: tl.constexpr, ALL: tl.constexpr, BA: tl.constexpr,
                  PDL: tl.constexpr):  # fmt: skip
    """Places the pairs of BT tokens, whose experts differ, behind those of smaller experts and of earlier tokens. The last program stores where experts' pairs begin."""
    wait_turn(PDL)
    start_next(PDL)
    block = tl.program_id(0)
    experts = tl.arange(0, BE)
    inside = experts < E
    index = tl.arange(0, BC)
    tokens = block * BT + tl.arange(0, BT)
    slots = tl.full((BT, BE), -1, tl.int32)
    for a in tl.static_range(A):  # no load waits for another
        ids = tl.load(experts_ptr + tokens * A + a, mask=tokens < num_tokens, other=-1)
        slots = tl.where(ids[:, None] == experts[None, :], a, slots)
    own = (slots >= 0).to(tl.int32)
    total = tl.zeros((BE,), tl.int32)
    before = tl.zeros((BE,), tl.int32)
    for first in range(0, num_blocks, BC):
        there = (first + index < num_blocks)[:, None] & inside[None, :]
        counts = tl.load(counts_ptr + (first + index)[:, None] * E + experts[None, :], mask=there, other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where((first + index < block)[:, None], counts, 0), 0)
    starts = tl.cumsum(total, 0) - total
    if block < num_blocks:
        places = (starts + before)[None, :] + tl.cumsum(own, 0) - own
        tl.store(order_ptr + places, tokens[:, None] * A + slots, mask=slots >= 0)
    else:
        tl.store(starts_ptr + experts, starts, mask=inside)
        tl.store(starts_ptr + E, tl.sum(total, 0))
        _store_tiles(starts_ptr + E + 1, experts, starts, total, E, ALL, BA)
        if COUNT:
            note_touched(touched_ptr, tl.sum((total > 0).to(tl.int32), 0))


@triton.jit
def _weigh_kernel(logits_ptr, chosen_ptr, row_ptr, weights_ptr, experts_ptr, factor, A: tl.constexpr, BA: tl.constexpr, E: tl.constexpr,
                  BE: tl.constexpr, KIND: tl.constexpr, NORMALISE: tl.constexpr, PADS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One token, whose experts are given; they may be the same several times. PADS: see `_route_kernel`; `experts` are stored then."""
    start_next_and_wait(PDL)
    token = tl.program_id(0)
    experts, index = tl.arange(0, BE), tl.arange(0, BA)
    inside = experts < E
    logits = tl.load(logits_ptr + token * E + experts, mask=inside, other=0.0)
    scores = tl.sum(_score(logits[None, :], inside, KIND), 0)
    ids = tl.load(chosen_ptr + token * A + index, mask=index < A, other=0)
    weights = tl.sum(tl.where(ids[:, None] == experts[None, :], scores[None, :], 0.0), 1)
    if NORMALISE:
        weights = weights / (tl.sum(tl.where(index < A, weights, 0.0), 0) + 1e-20)
    weights *= factor
    if PADS:
        there = tl.load(row_ptr + token) >= 0
        weights = tl.where(there, weights, 0.0)
        tl.store(experts_ptr + token * A + index, tl.where(there, ids, -1), mask=index < A)
    tl.store(weights_ptr + token * A + index, weights, mask=index < A)


@triton.jit(do_not_specialize=["num_pairs"])
def _order_kernel(experts_ptr, order_ptr, starts_ptr, touched_ptr, num_pairs, BLOCK: tl.constexpr, COUNT: tl.constexpr,
                  PDL: tl.constexpr):  # fmt: skip
    """Program e places expert e's pairs, in their own order, behind those of all smaller experts."""
    start_next_and_wait(PDL)
    expert = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    smaller = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_pairs, BLOCK):
        mask = first + index < num_pairs
        ids = tl.load(experts_ptr + first + index, mask=mask, other=-1).to(tl.int32)
        smaller += ((ids >= 0) & (ids < expert)).to(tl.int32)
    place = tl.sum(smaller, 0)
    first_place = place
    tl.store(starts_ptr + expert, place)
    for first in range(0, num_pairs, BLOCK):
        mask = first + index < num_pairs
        ids = tl.load(experts_ptr + first + index, mask=mask, other=0).to(tl.int32)
        own = (mask & (ids == expert)).to(tl.int32)
        rank = tl.cumsum(own, 0) - own
        tl.store(order_ptr + place + rank, first + index, mask=own != 0)
        place += tl.sum(own, 0)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts_ptr + expert + 1, place)
    if COUNT:
        tl.atomic_add(touched_ptr, (first_place < place).to(tl.int64))
        tl.atomic_add(touched_ptr + 1, (expert == 0).to(tl.int64))


@triton.jit
def _tiles_kernel(
    starts_ptr, E: tl.constexpr, BE: tl.constexpr, ALL: tl.constexpr, BA: tl.constexpr, PDL: tl.constexpr
):
    """The tiles of pairs whose order is known."""
    start_next_and_wait(PDL)
    experts = tl.arange(0, BE)
    starts = tl.load(starts_ptr + experts, mask=experts < E, other=0)
    ends = tl.load(starts_ptr + 1 + experts, mask=experts < E, other=0)
    _store_tiles(starts_ptr + E + 1, experts, starts, ends - starts, E, ALL, BA)


def kind_of_scores(routing: Routing) -> int:
    """The routing's scores as kernels know them."""
    return _KINDS[routing.scores]


class RouteConfig(NamedTuple):
    """Whether one launch chooses experts and places pairs; the tokens of a program; its warps; programs whose counts are added up at a time."""

    at_once: bool
    rows: int
    warps: int
    counts: int = 0


@functools.cache
def route_config(tokens: int, experts: int) -> RouteConfig:
    """The launch of `_route_kernel`, by measurement (docs/performance/experts.md)."""
    wide = padded(experts)
    at_once = tokens * wide <= _MOST_AT_ONCE
    few = tokens <= _FEW_BLOCKS
    scores = max(_FEWEST // 2 if few else _FEWEST, min(_MOST, padded(tokens * wide // (32 if few else _BLOCKS))))
    rows = padded(max(tokens, 1)) if at_once else max(1, scores // wide)
    counts = 0 if at_once else max(1, (_COUNTS if few else _MANY_COUNTS) // wide)
    return RouteConfig(at_once, rows, 1 if rows == 1 and at_once else 8 if rows > 8 else 4, counts)


def _order_block(pairs: int) -> int:
    return 2048 if pairs > 256 else 256


def route_kernels(tokens: int, experts: int, active: int) -> tuple[RouteConfig, int, bool]:
    """See `Op.kernels_for`."""
    borders = numerics.FAST.router
    ranges = tokens == 1, borders.are_few(tokens, experts), tokens <= borders.most_tokens, tokens <= _FEW_BLOCKS
    return route_config(tokens, experts), _order_block(tokens * active), ranges


def _starts(experts: int, like: torch.Tensor, ranks: int = 1) -> tuple[torch.Tensor, Tiles]:
    """Memory for where experts' pairs begin [E + 1], and behind it for the tiles."""
    every = experts * ranks
    whole = like.new_empty(experts + 14 * every + 1, dtype=torch.int32)
    starts_E1, tiles, counts = whole.split((experts + 1, 6 * every, 8 * every))
    return starts_E1, Tiles(tiles.view(3, -1), counts)


def order_pairs(experts_TA: torch.Tensor, experts: int, ranks: int = 1) -> tuple[torch.Tensor, torch.Tensor, Tiles]:
    """The pairs of each expert, one expert's behind another's [P], where each expert's begin [E + 1], and their tiles. See Routes for `ranks`."""
    order_P = experts_TA.new_empty(experts_TA.numel(), dtype=torch.int32)
    starts_E1, tiles = _starts(experts, experts_TA, ranks)
    pairs = order_P.shape[0]
    _order_kernel[(experts,)](
        experts_TA, order_P, starts_E1, _meter(starts_E1), pairs, BLOCK=_order_block(pairs), COUNT=counts_experts(),
        **dependent(experts_TA.device),
    )  # fmt: skip
    every = experts * ranks
    _tiles_kernel[(1,)](
        starts_E1, E=experts, BE=padded(experts), ALL=every, BA=padded(every), **dependent(experts_TA.device)
    )
    return order_P, starts_E1, tiles


@triton.jit(do_not_specialize=["num_pairs", "first"])
def _own_kernel(weights_ptr, experts_ptr, starts_ptr, own_weights_ptr, own_ptr, tiles_ptr, num_pairs, first, E: tl.constexpr, BE: tl.constexpr,
                ALL: tl.constexpr, BA: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BLOCK pairs. The first program stores the tiles of the experts that are here, too."""
    start_next_and_wait(PDL)
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = pairs < num_pairs
    own = tl.load(experts_ptr + pairs, mask=mask, other=-1) - first
    here = (own >= 0) & (own < E)
    tl.store(
        own_weights_ptr + pairs, tl.where(here, tl.load(weights_ptr + pairs, mask=mask, other=0.0), 0.0), mask=mask
    )
    tl.store(own_ptr + pairs, tl.where(here, own, -1), mask=mask)
    if TILES:
        if tl.program_id(0) == 0:
            experts = tl.arange(0, BE)
            starts = tl.load(starts_ptr + first + experts, mask=experts < E, other=0)
            ends = tl.load(starts_ptr + first + 1 + experts, mask=experts < E, other=0)
            _store_tiles(tiles_ptr, experts, starts, ends - starts, E, ALL, BA)


def own_experts(experts_TA: torch.Tensor, routes: Routes, first: int, count: int, ranks: int) -> Routes:
    """See `ops/routing.py`. Pairs stay in their order, of which the experts that are here have one range."""
    order_P, starts_E1, tiles = routes.order_P, routes.starts_E1, routes.tiles
    weights_TA, experts_TA = routes.weights_TA.contiguous(), experts_TA.contiguous()
    own, own_weights, num_pairs = torch.empty_like(experts_TA), torch.empty_like(weights_TA), experts_TA.numel()
    own_tiles = None if tiles is None else _starts(count * ranks, weights_TA)[1]
    if num_pairs:
        _own_kernel[(blocks(num_pairs, 1024),)](
            weights_TA, experts_TA, own if starts_E1 is None else starts_E1, own_weights, own,
            own if own_tiles is None else own_tiles.places, num_pairs, first, E=count, BE=padded(count),
            ALL=count * ranks, BA=padded(count * ranks), BLOCK=1024, TILES=tiles is not None, **dependent(experts_TA.device),
        )  # fmt: skip
    here = None if starts_E1 is None else starts_E1[first : first + count + 1]
    return Routes(own_weights, own, order_P, here, own_tiles, ranks)


def _meter(other: torch.Tensor) -> torch.Tensor:
    """What kernels count experts in; another tensor of the device where they don't."""
    return touched_experts(other.device) if counts_experts() else other


def route(
    logits_TE: torch.Tensor,
    routing: Routing,
    bias_E: torch.Tensor | None = None,
    chosen_TA: torch.Tensor | None = None,
    row_T: torch.Tensor | None = None,
    here: Here | None = None,
    *,
    fixed: bool = False,
) -> Routes:
    """See `ops/routing.py`."""
    tokens, experts = logits_TE.shape
    active, device = routing.active, logits_TE.device
    logits_TE = logits_TE.float().contiguous()
    weights_TA = logits_TE.new_empty(tokens, active)
    own = {"E": experts, "BE": padded(experts), "KIND": kind_of_scores(routing), "NORMALISE": routing.normalise}
    own |= dependent(device)
    if chosen_TA is not None:
        chosen_TA = chosen_TA.contiguous()
        kept_TA = chosen_TA if row_T is None else torch.empty_like(chosen_TA)
        if tokens:
            _weigh_kernel[(tokens,)](
                logits_TE, chosen_TA, chosen_TA if row_T is None else row_T, weights_TA, kept_TA, routing.factor, A=active,
                BA=padded(active), PADS=row_T is not None, **own,
            )  # fmt: skip
        routes = Routes(weights_TA, kept_TA, *order_pairs(kept_TA, experts))
        return routes if here is None else own_experts(kept_TA, routes, *here)
    first, own_count, ranks = here or Here(0, experts, 1)
    experts_TA = weights_TA.new_empty(tokens, active, dtype=torch.int32)
    order_P = weights_TA.new_empty(tokens * active, dtype=torch.int32)
    starts_E1, tiles = _starts(own_count, weights_TA, ranks)
    touched, counting = _meter(starts_E1), counts_experts()
    at_once, rows, warps, counted = route_config(numerics.FIXED.routed_tokens if fixed else tokens, experts)
    count = blocks(max(tokens, 1), rows)
    counts = order_P if at_once else weights_TA.new_empty(count, own_count, dtype=torch.int32)
    room = {"ALL": own_count * ranks, "BA": padded(own_count * ranks)}
    _route_kernel[(count,)](
        logits_TE, logits_TE if bias_E is None else bias_E, logits_TE if row_T is None else row_T, weights_TA, experts_TA, order_P, starts_E1, counts, touched, tokens,
        routing.factor, first, A=active, BT=rows, BIAS=bias_E is not None, GROUPS=routing.groups, KEPT=routing.kept_groups,
        BG=padded(routing.groups), ORDER=at_once, COUNT=counting, PADS=row_T is not None, HERE=own_count, num_warps=warps, **own, **room,
    )  # fmt: skip
    if not at_once:
        _place_kernel[(count + 1,)](
            experts_TA, counts, order_P, starts_E1, touched, tokens, count, A=active, E=own_count, BT=rows, BE=padded(own_count),
            BC=counted, COUNT=counting, num_warps=4 if counted * padded(experts) <= _COUNTS else 8, **room, **dependent(device),
        )  # fmt: skip
    return Routes(weights_TA, experts_TA, order_P, starts_E1, None if at_once and rows == 1 else tiles, ranks)
