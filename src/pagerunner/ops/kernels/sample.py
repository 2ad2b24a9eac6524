"""From logits to tokens; see `ops/sample.py`.

Logits are compared as integers in the floats' order. A random row is read three times, in blocks side by side: for its
best logit; for each block's weight and a histogram of its logits' distances from the best; and, where top-k or top-p apply,
to copy aside, in order, the logits down to a distance that certainly holds the threshold. One program per row then finds
the threshold by bisection, each step of which moves to a value that the row holds, and the token. A row so flat that too
many logits would be copied is searched where it stands, which takes longer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import blocks, padded
from pagerunner.ops.sample import Filters

ROW_BLOCK = 4096  # of logits, for kernels with several programs per row
DRAW_BLOCK = 4096
KEPT = 8192
BUCKETS = tl.constexpr(128)
PER_UNIT = tl.constexpr(8.0)  # buckets to a unit of scaled logits; the last bucket has no lower end


@triton.jit
def _key(x):
    """int32 in the order of float32 x; NaN is the largest, and both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == x, bits, 0x7FFFFFFF)


@triton.jit
def _value(key):
    """The float32 of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _greedy_blocks_kernel(logits_ptr, found_ptr, vocab, row_stride, BLOCK: tl.constexpr):
    """The best of BLOCK logits: key in the upper half, the token's complement in the lower, so the lowest id wins."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    mask = ids < vocab
    x = tl.load(logits_ptr + row * row_stride + ids, mask=mask, other=0.0).to(tl.float32)
    both = _key(x).to(tl.int64) * 4294967296 + (4294967295 - ids.to(tl.int64))
    both = tl.where(mask, both, -9223372036854775808)
    tl.store(found_ptr + row * tl.num_programs(1) + block, tl.max(both, 0))


@triton.jit(do_not_specialize=["num_blocks"])
def _greedy_kernel(found_ptr, tokens_ptr, best_ptr, num_blocks, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    found = tl.load(found_ptr + row * num_blocks + index, mask=index < num_blocks, other=-9223372036854775808)
    best = tl.max(found, 0)
    tl.store(tokens_ptr + row, 4294967295 - (best & 4294967295))
    tl.store(best_ptr + row, _value((best >> 32).to(tl.int32)))


@triton.jit
def _scaled(place, mask, base, temperature):
    """The filters' scale: 0 for the best token; -infinity where masked."""
    x = tl.load(place, mask=mask, other=0.0)
    return tl.where(mask, tl.div_rn(x - base, temperature), float("-inf"))


@triton.jit
def _mass(source, count, base, temperature, bound, min_p, BLOCK: tl.constexpr):
    """The weight, float64, of the tokens at or above the key `bound` that min-p leaves."""
    index = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, count, BLOCK):
        mask = first + index < count
        scaled = _scaled(source + first + index, mask, base, temperature)
        weight = tl.exp(scaled)
        weight = tl.where(mask & (_key(scaled) >= bound) & (weight >= min_p), weight, 0.0)
        acc += weight.to(tl.float64)
    return tl.sum(acc, 0)


@triton.jit
def _search(source, count, base, temperature, low, high, top_k, budget, BLOCK: tl.constexpr):
    """Narrow [low, high] around the largest key at or above which stand `top_k` tokens that weigh `budget`.

    It holds for `low`. Ends when both are one.
    """
    index = tl.arange(0, BLOCK)
    while low < high:
        middle = ((low.to(tl.int64) + high.to(tl.int64) + 1) >> 1).to(tl.int32)
        numbers = tl.zeros((BLOCK,), tl.int32)
        masses = tl.zeros((BLOCK,), tl.float64)
        above = tl.full((BLOCK,), 2147483647, tl.int32)
        below = tl.full((BLOCK,), -2147483648, tl.int32)
        for first in range(0, count, BLOCK):
            mask = first + index < count
            scaled = _scaled(source + first + index, mask, base, temperature)
            key = _key(scaled)
            is_above = mask & (key >= middle)
            numbers += is_above.to(tl.int32)
            masses += tl.where(is_above, tl.exp(scaled), 0.0).to(tl.float64)
            above = tl.where(is_above, tl.minimum(above, key), above)
            below = tl.where(mask & (key < middle), tl.maximum(below, key), below)
        if (tl.sum(numbers, 0) >= top_k) & (tl.sum(masses, 0) >= budget):
            low = tl.min(above, 0)
        else:
            high = tl.max(below, 0)
    return low


@triton.jit
def _inside(source, count, chosen, base, temperature, bound, min_p, left, BLOCK: tl.constexpr):
    """The place in the block at `chosen` whose span of the running weights holds `left`."""
    index = tl.arange(0, BLOCK)
    mask = chosen + index < count
    scaled = _scaled(source + chosen + index, mask, base, temperature)
    weight = tl.exp(scaled)
    weight = tl.where(mask & (_key(scaled) >= bound) & (weight >= min_p), weight, 0.0).to(tl.float64)
    hit = (tl.cumsum(weight, 0) > left) & (weight > 0.0)
    place = tl.min(tl.where(hit, index, BLOCK), 0)
    if place == BLOCK:  # the running sum ended a rounding below the block's sum
        place = tl.max(tl.where(weight > 0.0, index, 0), 0)
    return chosen + place


@triton.jit
def _invert(source, count, base, temperature, bound, min_p, uniform, BLOCK: tl.constexpr):
    """The place whose span of the running weights holds `uniform` of their sum."""
    total = _mass(source, count, base, temperature, bound, min_p, BLOCK)
    target = tl.minimum(uniform * total, total * 0.9999999999999999)
    index = tl.arange(0, BLOCK)
    before, left, done = total * 0.0, total * 0.0, count * 0
    chosen, last, room = count * 0, count * 0, total * 0.0
    for first in range(0, count, BLOCK):
        mask = first + index < count
        scaled = _scaled(source + first + index, mask, base, temperature)
        weight = tl.exp(scaled)
        weight = tl.where(mask & (_key(scaled) >= bound) & (weight >= min_p), weight, 0.0).to(tl.float64)
        mass = tl.sum(weight, 0)
        if (done == 0) & (mass > 0.0):
            last, room = first + count * 0, target - before
            if before + mass > target:
                chosen, left, done = first + count * 0, target - before, done + 1
        before += mass
    if done == 0:  # the blocks' sums, added in another order, fell short of the target by a rounding
        chosen, left = last, room
    return _inside(source, count, chosen, base, temperature, bound, min_p, left, BLOCK)


@triton.jit
def _best(found_ptr, row, num_blocks, BLOCKS: tl.constexpr):
    """The row's largest logit from its blocks' best."""
    index = tl.arange(0, BLOCKS)
    found = tl.load(found_ptr + row * num_blocks + index, mask=index < num_blocks, other=-9223372036854775808)
    return _value((tl.max(found, 0) >> 32).to(tl.int32))


@triton.jit
def _filters(row, best, temperature_ptr, min_p_ptr, TEMPERATURE: tl.constexpr, MIN_P: tl.constexpr):
    """What the row's logits are measured from (0 where its best isn't finite), its temperature and its min-p."""
    base = tl.where(best - best == 0.0, best, 0.0)
    temperature = base * 0.0 + 1.0
    if TEMPERATURE:
        temperature = tl.load(temperature_ptr + row)
    min_p = base * 0.0
    if MIN_P:
        min_p = tl.load(min_p_ptr + row)
    return base, temperature, min_p


@triton.jit
def _cuts(row, vocab, best, top_k_ptr, top_p_ptr):
    """The row's top-k (0 where off) and top-p, and whether each is on."""
    top_k = tl.load(top_k_ptr + row)
    top_k = tl.where(top_k < vocab, top_k, 0).to(tl.int32)
    top_p = tl.load(top_p_ptr + row)
    finite = best - best == 0.0
    return top_k, top_p, finite & (top_k > 0), finite & (top_p <= 1.0)


@triton.jit
def _bucket(scaled):
    return tl.where(scaled > -(BUCKETS - 1) / PER_UNIT, -scaled * PER_UNIT, BUCKETS - 1).to(tl.int32)


@triton.jit
def _weigh_kernel(logits_ptr, temperature_ptr, min_p_ptr, found_ptr, masses_ptr, histograms_ptr, vocab, num_blocks,
                  row_stride, TEMPERATURE: tl.constexpr, MIN_P: tl.constexpr, TRUNCATE: tl.constexpr,
                  BLOCKS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The weight of BLOCK logits that min-p leaves, and how many of them are in each bucket."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = _best(found_ptr, row, num_blocks, BLOCKS)
    base, temperature, min_p = _filters(row, best, temperature_ptr, min_p_ptr, TEMPERATURE, MIN_P)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    mask = ids < vocab
    scaled = _scaled(logits_ptr + row * row_stride + ids, mask, base, temperature)
    weight = tl.exp(scaled)
    weight = tl.where(mask & (weight >= min_p), weight, 0.0)
    place = row * num_blocks + block
    tl.store(masses_ptr + place, tl.sum(weight.to(tl.float64), 0))
    if TRUNCATE:
        counts = tl.histogram(_bucket(scaled), BUCKETS, mask=mask)
        tl.store(histograms_ptr + place * BUCKETS + tl.arange(0, BUCKETS), counts)


@triton.jit
def _collect_kernel(logits_ptr, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, found_ptr, masses_ptr,
                    histograms_ptr, counts_ptr, values_ptr, ids_ptr, vocab, num_blocks, row_stride,
                    TEMPERATURE: tl.constexpr, MIN_P: tl.constexpr, KEPT: tl.constexpr, BLOCKS: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    """Copy aside those of BLOCK logits that may be above the row's threshold; `counts` is -1 where that isn't done."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = _best(found_ptr, row, num_blocks, BLOCKS)
    base, temperature, min_p = _filters(row, best, temperature_ptr, min_p_ptr, TEMPERATURE, MIN_P)
    top_k, top_p, cut_k, cut_p = _cuts(row, vocab, best, top_k_ptr, top_p_ptr)
    buckets, blocks = tl.arange(0, BUCKETS), tl.arange(0, BLOCKS)
    place = (row * num_blocks + blocks)[:, None] * BUCKETS + buckets[None, :]
    histograms = tl.load(histograms_ptr + place, mask=(blocks < num_blocks)[:, None], other=0)
    numbers = tl.sum(histograms, 0)
    running = tl.cumsum(numbers, 0)
    last = tl.sum((running < top_k).to(tl.int32), 0)
    if cut_p & (top_k == 0):
        mass = tl.sum(tl.load(masses_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=0.0), 0)
        least = tl.exp((buckets + 1).to(tl.float32) * (-1.0 / PER_UNIT)).to(tl.float64) * numbers.to(tl.float64)
        last = tl.sum((tl.cumsum(least, 0) < top_p * mass * 1.00001).to(tl.int32), 0)
    count = tl.sum(tl.where(buckets <= last, numbers, 0), 0)
    use = (cut_k | cut_p) & (last < BUCKETS - 1) & (count <= KEPT)
    if block == 0:
        tl.store(counts_ptr + row, tl.where(use, count, -1))
    if use:
        earlier = (blocks < block)[:, None] & (buckets <= last)[None, :]
        start = tl.sum(tl.sum(tl.where(earlier, histograms, 0), 1), 0)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        mask = ids < vocab
        scaled = _scaled(logits_ptr + row * row_stride + ids, mask, base, temperature)
        kept = (mask & (_bucket(scaled) <= last)).to(tl.int32)
        target = row * KEPT + start + tl.cumsum(kept, 0) - kept
        tl.store(values_ptr + target, scaled, mask=kept != 0)
        tl.store(ids_ptr + target, ids, mask=kept != 0)


@triton.jit
def _draw_kernel(logits_ptr, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, uniform_ptr, found_ptr, masses_ptr,
                 counts_ptr, values_ptr, ids_ptr, tokens_ptr, best_ptr, vocab, num_blocks, row_stride,
                 TEMPERATURE: tl.constexpr, MIN_P: tl.constexpr, TRUNCATE: tl.constexpr, KEPT: tl.constexpr,
                 BLOCKS: tl.constexpr, ROW_BLOCK: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One row's token."""
    row = tl.program_id(0).to(tl.int64)
    best = _best(found_ptr, row, num_blocks, BLOCKS)
    tl.store(best_ptr + row, best)
    base, temperature, min_p = _filters(row, best, temperature_ptr, min_p_ptr, TEMPERATURE, MIN_P)
    uniform = tl.load(uniform_ptr + row)
    blocks = tl.arange(0, BLOCKS)
    masses = tl.load(masses_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=0.0)
    total = tl.sum(masses, 0)
    source = logits_ptr + row * row_stride
    low = tl.full((), -2139095041, tl.int32)  # the key of -infinity
    count = vocab + low * 0
    token = count * 0
    cut = low != low
    if TRUNCATE:
        top_k, top_p, cut_k, cut_p = _cuts(row, vocab, best, top_k_ptr, top_p_ptr)
        cut = cut_k | cut_p
        if cut:
            budget = tl.where(cut_p & (top_k == 0), top_p * total, 0.0)
            kept = tl.load(counts_ptr + row)
            if kept >= 0:
                source, count = values_ptr + row * KEPT, kept
                base, temperature = base * 0.0, base * 0.0 + 1.0
            low = _search(source, count, base, temperature, low, low * 0, top_k, budget, BLOCK)
            if cut_k & cut_p:
                budget = top_p * _mass(source, count, base, temperature, low, min_p, BLOCK)
                low = _search(source, count, base, temperature, low, low * 0, top_k * 0, budget, BLOCK)
            token = _invert(source, count, base, temperature, low, min_p, uniform, BLOCK)
            if kept >= 0:
                token = tl.load(ids_ptr + row * KEPT + token)
    if not cut:
        target = tl.minimum(uniform * total, total * 0.9999999999999999)
        running = tl.cumsum(masses, 0)
        hit = (running > target) & (masses > 0.0)
        block = tl.min(tl.where(hit, blocks, BLOCKS), 0)
        if block == BLOCKS:
            block = tl.max(tl.where(masses > 0.0, blocks, 0), 0)
        left = target - tl.sum(tl.where(blocks == block, running - masses, 0.0), 0)
        token = _inside(source, count, block * ROW_BLOCK, base, temperature, low, min_p, left, ROW_BLOCK)
    tl.store(tokens_ptr + row, tl.minimum(token, vocab - 1).to(tl.int64))


def _blocks_best(logits_SV: torch.Tensor) -> torch.Tensor:
    """Each block's best logit and token, [S, blocks] int64."""
    rows, vocab = logits_SV.shape
    count = blocks(vocab, ROW_BLOCK)
    found = torch.empty(rows, count, dtype=torch.int64, device=logits_SV.device)
    _greedy_blocks_kernel[(rows, count)](logits_SV, found, vocab, logits_SV.stride(0), BLOCK=ROW_BLOCK)
    return found


def greedy(logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops/sample.py`."""
    rows = logits_SV.shape[0]
    tokens_S = torch.empty(rows, dtype=torch.int64, device=logits_SV.device)
    best_S = torch.empty(rows, dtype=torch.float32, device=logits_SV.device)
    if rows:
        found = _blocks_best(logits_SV if logits_SV.stride(1) == 1 else logits_SV.contiguous())
        count = found.shape[1]
        _greedy_kernel[(rows,)](found, tokens_S, best_S, count, BLOCK=padded(count), num_warps=1)
    return tokens_S, best_S


def draw(logits_NV: torch.Tensor, filters: Filters, uniform_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops/sample.py`."""
    rows, vocab = logits_NV.shape
    device = logits_NV.device
    tokens_N = torch.empty(rows, dtype=torch.int64, device=device)
    best_N = torch.empty(rows, dtype=torch.float32, device=device)
    if not rows:
        return tokens_N, best_N
    logits_NV = logits_NV if logits_NV.stride(1) == 1 else logits_NV.contiguous()
    stride, truncate, unused = logits_NV.stride(0), filters.top_k_N is not None, uniform_N
    temperature = unused if filters.temperature_N is None else filters.temperature_N
    min_p = unused if filters.min_p_N is None else filters.min_p_N
    top_k = unused if filters.top_k_N is None else filters.top_k_N
    top_p = unused if filters.top_p_N is None else filters.top_p_N
    found = _blocks_best(logits_NV)
    count = found.shape[1]
    masses = torch.empty(rows, count, dtype=torch.float64, device=device)
    kept, width = (KEPT, BUCKETS.value) if truncate else (1, 1)
    histograms = torch.empty(rows, count, width, dtype=torch.int32, device=device)
    counts, ids = (
        torch.empty(rows, dtype=torch.int32, device=device),
        torch.empty(rows, kept, dtype=torch.int32, device=device),
    )
    values = torch.empty(rows, kept, dtype=torch.float32, device=device)
    which = {"TEMPERATURE": filters.temperature_N is not None, "MIN_P": filters.min_p_N is not None}
    sizes = {"BLOCKS": padded(count), **which}
    _weigh_kernel[(rows, count)](
        logits_NV, temperature, min_p, found, masses, histograms, vocab, count, stride,
        TRUNCATE=truncate, BLOCK=ROW_BLOCK, **sizes,
    )  # fmt: skip
    if truncate:
        _collect_kernel[(rows, count)](
            logits_NV, temperature, min_p, top_k, top_p, found, masses, histograms, counts, values, ids, vocab, count,
            stride, KEPT=KEPT, BLOCK=ROW_BLOCK, **sizes,
        )  # fmt: skip
    _draw_kernel[(rows,)](
        logits_NV, temperature, min_p, top_k, top_p, uniform_N, found, masses, counts, values, ids, tokens_N, best_N,
        vocab, count, stride,
        TRUNCATE=truncate, KEPT=KEPT, ROW_BLOCK=ROW_BLOCK, BLOCK=DRAW_BLOCK, num_warps=16, **sizes,
    )  # fmt: skip
    return tokens_N, best_N
