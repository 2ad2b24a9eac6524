"""From logits to tokens; see `ops/sample.py`.

Logits are compared as integers in the floats' order. The random kernel has one program per row, which reads the row a
handful of times: thresholds are found by bisection, each step of which moves to a value that the row holds, and as soon as
few enough values are left they are copied aside and the search goes on among those.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import blocks, padded
from pagerunner.ops.sample import Filters
from pagerunner.ops.sample import draw as draw_op

GREEDY_BLOCK = 4096
FEWEST_ROWS = 8  # one program reads a whole row: below this, torch's kernels spread over the device are faster
KEPT, DRAW_BLOCK = 8192, 4096


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
def _search(source, count, base, temperature, low, high, number, top_k, budget, enough, BLOCK: tl.constexpr):
    """Narrow [low, high] around the largest key at or above which stand `top_k` tokens that weigh `budget`.

    It holds for `low`, where `number` tokens stand; both are keys of the row. Stops when both are one, or at `enough`.
    """
    index = tl.arange(0, BLOCK)
    while (low < high) & (number > enough):
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
        total = tl.sum(numbers, 0)
        if (total >= top_k) & (tl.sum(masses, 0) >= budget):
            low = tl.min(above, 0)
            number = total
        else:
            high = tl.max(below, 0)
    return low, high, number


@triton.jit
def _copy_aside(source, count, base, temperature, bound, values_ptr, ids_ptr, BLOCK: tl.constexpr):
    """The scaled logits at or above the key `bound`, and their ids, in the order of the vocabulary."""
    index = tl.arange(0, BLOCK)
    place = count * 0
    for first in range(0, count, BLOCK):
        mask = first + index < count
        scaled = _scaled(source + first + index, mask, base, temperature)
        kept = (mask & (_key(scaled) >= bound)).to(tl.int32)
        target = place + tl.cumsum(kept, 0) - kept
        tl.store(values_ptr + target, scaled, mask=kept != 0)
        tl.store(ids_ptr + target, first + index, mask=kept != 0)
        place += tl.sum(kept, 0)
    tl.debug_barrier()


@triton.jit
def _invert(source, count, base, temperature, bound, min_p, uniform, BLOCK: tl.constexpr):
    """The place whose span of the running weights holds `uniform` of their sum."""
    total = _mass(source, count, base, temperature, bound, min_p, BLOCK)
    target = tl.minimum(uniform * total, total * 0.9999999999999999)
    index = tl.arange(0, BLOCK)
    before, chosen, left, done = total * 0.0, count * 0, total * 0.0, count * 0
    last, room = count * 0, total * 0.0
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
    mask = chosen + index < count
    scaled = _scaled(source + chosen + index, mask, base, temperature)
    weight = tl.exp(scaled)
    weight = tl.where(mask & (_key(scaled) >= bound) & (weight >= min_p), weight, 0.0).to(tl.float64)
    hit = (tl.cumsum(weight, 0) > left) & (weight > 0.0)
    inside = tl.min(tl.where(hit, index, BLOCK), 0)
    if inside == BLOCK:
        inside = tl.max(tl.where(weight > 0.0, index, 0), 0)
    return chosen + inside


@triton.jit
def _draw_kernel(logits_ptr, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, uniform_ptr, values_ptr, ids_ptr,
                 tokens_ptr, best_ptr, vocab, row_stride, TEMPERATURE: tl.constexpr, MIN_P: tl.constexpr,
                 TRUNCATE: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One row, from its logits to its token."""
    row = tl.program_id(0).to(tl.int64)
    source = logits_ptr + row * row_stride
    index = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), -2147483648, tl.int32)
    for first in range(0, vocab, BLOCK):
        mask = first + index < vocab
        key = _key(tl.load(source + first + index, mask=mask, other=0.0))
        highest = tl.maximum(highest, tl.where(mask, key, -2147483648))
    best = _value(tl.max(highest, 0))
    tl.store(best_ptr + row, best)
    finite = best - best == 0.0
    base = tl.where(finite, best, 0.0)
    temperature = base * 0.0 + 1.0
    if TEMPERATURE:
        temperature = tl.load(temperature_ptr + row)
    min_p = base * 0.0
    if MIN_P:
        min_p = tl.load(min_p_ptr + row)
    uniform = tl.load(uniform_ptr + row)
    low = tl.full((), -2139095041, tl.int32)  # the key of -infinity
    count = vocab + low * 0
    aside = count * 0
    if TRUNCATE:
        top_k = tl.load(top_k_ptr + row)
        top_k = tl.where(top_k < vocab, top_k, 0).to(tl.int32)
        top_p = tl.load(top_p_ptr + row)
        cut_k, cut_p = finite & (top_k > 0), finite & (top_p <= 1.0)
        high, number = low * 0, count
        if cut_k | cut_p:
            budget = base.to(tl.float64) * 0.0
            if cut_p & (top_k == 0):
                budget = top_p * _mass(source, count, base, temperature, low, min_p, BLOCK)
            low, high, number = _search(source, count, base, temperature, low, high, number, top_k, budget, KEPT, BLOCK)
            if number <= KEPT:
                _copy_aside(source, count, base, temperature, low, values_ptr + row * KEPT, ids_ptr + row * KEPT, BLOCK)
                source, count, aside = values_ptr + row * KEPT, number, aside + 1
                base, temperature = base * 0.0, base * 0.0 + 1.0
                low, high, number = _search(
                    source, count, base, temperature, low, high, number, top_k, budget, 0, BLOCK
                )
            if cut_p & (top_k > 0):
                budget = top_p * _mass(source, count, base, temperature, low, min_p, BLOCK)
                low, high, number = _search(
                    source, count, base, temperature, low, low * 0, number, top_k * 0, budget, 0, BLOCK
                )
    place = _invert(source, count, base, temperature, low, min_p, uniform, BLOCK)
    token = tl.minimum(place, vocab - 1)
    if aside != 0:
        token = tl.load(ids_ptr + row * KEPT + place)
    tl.store(tokens_ptr + row, token.to(tl.int64))


def greedy(logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops/sample.py`."""
    rows, vocab = logits_SV.shape
    device = logits_SV.device
    tokens_S = torch.empty(rows, dtype=torch.int64, device=device)
    best_S = torch.empty(rows, dtype=torch.float32, device=device)
    if not rows:
        return tokens_S, best_S
    if logits_SV.stride(1) != 1:
        logits_SV = logits_SV.contiguous()
    count = blocks(vocab, GREEDY_BLOCK)
    found = torch.empty(rows, count, dtype=torch.int64, device=device)
    _greedy_blocks_kernel[(rows, count)](logits_SV, found, vocab, logits_SV.stride(0), BLOCK=GREEDY_BLOCK)
    _greedy_kernel[(rows,)](found, tokens_S, best_S, count, BLOCK=padded(count), num_warps=1)
    return tokens_S, best_S


def draw(logits_NV: torch.Tensor, filters: Filters, uniform_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops/sample.py`."""
    rows, vocab = logits_NV.shape
    if 0 < rows < FEWEST_ROWS:
        return draw_op.twin(logits_NV, filters, uniform_N)
    device = logits_NV.device
    tokens_N = torch.empty(rows, dtype=torch.int64, device=device)
    best_N = torch.empty(rows, dtype=torch.float32, device=device)
    if not rows:
        return tokens_N, best_N
    truncate = filters.top_k_N is not None
    values = torch.empty(rows, KEPT if truncate else 1, dtype=torch.float32, device=device)
    ids = torch.empty(rows, KEPT if truncate else 1, dtype=torch.int32, device=device)
    unused = uniform_N
    _draw_kernel[(rows,)](
        logits_NV, unused if filters.temperature_N is None else filters.temperature_N,
        unused if filters.min_p_N is None else filters.min_p_N,
        unused if filters.top_k_N is None else filters.top_k_N,
        unused if filters.top_p_N is None else filters.top_p_N, uniform_N, values, ids, tokens_N, best_N, vocab,
        logits_NV.stride(0), TEMPERATURE=filters.temperature_N is not None, MIN_P=filters.min_p_N is not None,
        TRUNCATE=truncate, KEPT=KEPT, BLOCK=DRAW_BLOCK, num_warps=16,
    )  # fmt: skip
    return tokens_N, best_N
