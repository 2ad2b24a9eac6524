"""From logits to tokens in three launches; see `ops/sample.py`.

The vocabulary is cut into runs of RUN consecutive tokens, tiles of many runs.

1. `_runs_kernel`, a program for each row and tile, reads the logits. Of a greedy row it finds the tile's best token. Of a
   row that draws it finds each run's largest logit and the sum of the run's weights.
2. `_choose_kernel`, a program for each row, works on the results of the first: about 1,200 pairs of numbers for a vocabulary of
   151,936. Without filters it inverts the running sum of the runs, and then the running sum inside the run that was hit. With
   filters it looks for candidates first. The k-th largest of the runs' largest logits is a lower bound of the k-th largest logit.
   So the k tokens can only be in about k runs, and only these runs are read again.
3. `_search_kernel`, a program for each row, has nothing to do for most rows. Candidates may not suffice: a nucleus of more than
   some hundred tokens, a large top-k, many ties. Then the program searches the whole row for the bound, four values at a time.

Logits are compared as integers in the floats' order ("keys"). A row's token doesn't depend on the rows beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import blocks, dependent, padded, start_next_and_wait
from pagerunner.ops.sample import MIN_P, SEED, TEMPERATURE, TOP_K, TOP_P, WORDS, SlotSettings

RUN = 128  # tokens of a run
TILE = 4096  # tokens that a program of the first kernel reads
MOST_K = (
    128  # the largest top-k that is looked for among candidates; for top-p alone, the number of runs that are looked at
)
LISTED = 256  # runs in which candidates may be
CANDIDATES = 512  # tokens at most
SEARCHED = 4096  # tokens read at a time where a whole row is searched

_LOWEST = tl.constexpr(-2147483648)  # below every key
_NOT_FINITE = tl.constexpr(-2139095041)  # the key of -infinity
_LOG2_E = tl.constexpr(1.4426950408889634)
_SEED, _TOP_K, _TOP_P, _WORDS = tl.constexpr(SEED), tl.constexpr(TOP_K), tl.constexpr(TOP_P), tl.constexpr(WORDS)
_TEMPERATURE, _MIN_P = tl.constexpr(TEMPERATURE), tl.constexpr(MIN_P)


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
def _peak(key):
    """The float32 of a key, 0 where it isn't finite."""
    value = _value(key)
    return tl.where(value - value == 0.0, value, 0.0)


@triton.jit
def uniform_of(seed, position):
    """float64 in [0, 1) of an int64 seed and an int64 position: see `ops/philox.py`."""
    zero = (position * 0).to(tl.uint32)
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    word_0, word_1, _, _ = tl.philox(seed, low, high, zero, zero)
    whole = (word_0 >> 5).to(tl.float64) * 67108864.0 + (word_1 >> 6).to(tl.float64)
    return whole * 1.1102230246251565e-16


@triton.jit
def _weight(x, base, scale, mask, min_p):
    """exp((x - base) / temperature), 0 where masked or dropped by min-p; `scale` is log2(e) / temperature."""
    weight = tl.exp2((x - base) * scale)
    return tl.where(mask & (weight >= min_p), weight, 0.0)


@triton.jit
def _runs_kernel(
    logits_ptr, slots_ptr, scales_ptr, best_ptr, tops_ptr, sums_ptr, vocab, row_stride,
    RUN: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of a row.

    Greedy rows: an integer with the best token's key in the upper half and the complement of its id in the lower half. So the
    lowest id wins a tie. Rows that draw: for each run the key of its largest logit, and the sum of its weights relative to that
    logit's weight.
    """
    start_next_and_wait(PDL)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    run = tile * (TILE // RUN) + tl.arange(0, TILE // RUN)
    ids = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    mask = ids < vocab
    x = tl.load(logits_ptr + row * row_stride + ids, mask=mask, other=float("-inf")).to(tl.float32)
    key = tl.where(mask, _key(x), _LOWEST)
    temperature = tl.load(scales_ptr + slot * 2 * _WORDS + _TEMPERATURE, mask=slot >= 0, other=0.0)
    if temperature > 0.0:
        tops = tl.max(key, 1)
        weight = tl.exp2((x - _peak(tops)[:, None]) * (_LOG2_E / temperature))
        place = row * tl.num_programs(1) * (TILE // RUN) + run
        tl.store(tops_ptr + place, tops)
        tl.store(sums_ptr + place, tl.sum(weight, 1))
    else:
        top = tl.max(tl.max(key, 1), 0)
        first = tl.min(tl.min(tl.where(key == top, ids, 2147483647), 1), 0)
        both = top.to(tl.int64) * 4294967296 + (4294967295 - first.to(tl.int64))
        tl.store(best_ptr + row * tl.num_programs(1) + tile, both)


@triton.jit
def _invert(weight, index, uniform, SIZE: tl.constexpr):
    """The place whose span of the running weights (float64) holds `uniform` times their sum. Never a place of weight 0.

    Also how far inside its span that point is, in [0, 1)."""
    running = tl.cumsum(weight, 0)
    target = uniform * tl.sum(weight, 0)
    first = tl.min(tl.where((running > target) & (weight > 0.0), index, SIZE), 0)
    last = tl.max(tl.where(weight > 0.0, index, 0), 0)
    place = tl.minimum(first, last)  # a target rounded up to the sum has no place of its own
    here = tl.sum(tl.where(index == place, weight, 0.0), 0)
    before = tl.sum(tl.where(index == place, running, 0.0), 0) - here
    inside = (target - before) / tl.where(here > 0.0, here, 1.0)
    return place, tl.minimum(tl.maximum(inside, 0.0), 0.9999999999999999)


@triton.jit
def _run_masses(tops, sums_ptr, run, num_runs, best, scale):
    """The weights of runs, float64, where the row's best token weighs 1."""
    sums = tl.load(sums_ptr + run, mask=run < num_runs, other=0.0)
    return tl.where(sums > 0.0, sums * tl.exp2((_peak(tops) - best) * scale), 0.0).to(tl.float64)


@triton.jit
def _from_runs(source, masses, run, vocab, best, scale, bound, min_p, uniform, RUN: tl.constexpr, RUNS: tl.constexpr):
    """The token of a uniform, from the runs' masses, in which only tokens at or above the key `bound` count."""
    chosen, inside = _invert(masses, run, uniform, RUNS)
    lane = tl.arange(0, RUN)
    ids = chosen * RUN + lane
    mask = ids < vocab
    x = tl.load(source + ids, mask=mask, other=float("-inf")).to(tl.float32)
    weight = _weight(x, best, scale, mask & (_key(x) >= bound), min_p)
    place, _ = _invert(weight.to(tl.float64), lane, inside, RUN)
    return tl.minimum(chosen * RUN + place, vocab - 1)


@triton.jit
def _lower_bound(tops, best_key, wanted):
    """A key at or above which at least `wanted` runs, and not many more, have their largest logit.

    With fewer than `wanted` such runs, a key below all finite ones.
    """
    low, high = best_key * 0 + _NOT_FINITE + 1, best_key
    number = tl.sum((tops >= low).to(tl.int32), 0)
    while (low < high) & (number > wanted + wanted // 4):
        middle = ((low.to(tl.int64) + high.to(tl.int64) + 1) >> 1).to(tl.int32)
        above = tl.sum((tops >= middle).to(tl.int32), 0)
        if above >= wanted:
            low = middle
            number = above
        else:
            high = middle - 1
    return low


@triton.jit
def _collect(
    source, vocab, tops, run, bound, runs_ptr, values_ptr, ids_ptr,
    RUN: tl.constexpr, LISTED: tl.constexpr, CANDIDATES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Collect the logits at or above the key `bound`, and their ids, in the order of the vocabulary. Returns how many there are.

    A number above CANDIDATES says that some logits, or some runs, were not looked at.
    """
    listed = (tops >= bound).to(tl.int32)
    number = tl.sum(listed, 0)
    count = number * 0 + CANDIDATES + 1
    if number <= LISTED:
        tl.store(runs_ptr + tl.cumsum(listed, 0) - 1, run, mask=listed != 0)
        tl.debug_barrier()
        count = number * 0
        for first in range(0, number * RUN, STEP):
            at = first + tl.arange(0, STEP)
            mask = at < number * RUN
            ids = tl.load(runs_ptr + at // RUN, mask=mask, other=0) * RUN + at % RUN
            mask &= ids < vocab
            x = tl.load(source + ids, mask=mask, other=float("-inf")).to(tl.float32)
            found = (mask & (_key(x) >= bound)).to(tl.int32)
            place = count + tl.cumsum(found, 0) - 1
            there = (found != 0) & (place < CANDIDATES)
            tl.store(values_ptr + place, x, mask=there)
            tl.store(ids_ptr + place, ids, mask=there)
            count += tl.sum(found, 0)
        tl.debug_barrier()
    return count


@triton.jit
def _above(x, values_ptr, count, best, scale, SIZE: tl.constexpr, STEP: tl.constexpr):
    """For each of x, how many of `count` values are larger, and the weight of the larger values."""
    numbers = tl.zeros((SIZE,), tl.int32)
    masses = tl.zeros((SIZE,), tl.float64)
    for first in range(0, count, STEP):
        at = first + tl.arange(0, STEP)
        other = tl.load(values_ptr + at, mask=at < count, other=float("-inf"))
        larger = other[None, :] > x[:, None]
        weight = tl.exp2((other - best) * scale)
        numbers += tl.sum(larger.to(tl.int32), 1)
        masses += tl.sum(tl.where(larger, weight[None, :], 0.0), 1).to(tl.float64)
    return numbers, masses


@triton.jit
def _among_candidates(
    values_ptr, ids_ptr, count, best, scale, min_p, top_k, top_p, uniform, whole, total,
    CANDIDATES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The token of a uniform among the candidates, or -1 if tokens outside the candidates may take part.

    `whole`: all tokens that top-k or min-p keeps are candidates. Otherwise `total` is the weight of all tokens of the row, and
    only top-p may cut. The candidates are the row's largest tokens, so every token larger than a kept token is kept too.
    """
    index = tl.arange(0, CANDIDATES)
    there = index < count
    x = tl.load(values_ptr + index, mask=there, other=float("-inf"))
    weight = _weight(x, best, scale, there, min_p)
    larger, mass_of_larger = _above(x, values_ptr, count, best, scale, CANDIDATES, STEP)
    weight = tl.where((top_k == 0) | (larger < top_k), weight, 0.0)
    mass = tl.sum(weight.to(tl.float64), 0)
    token = count * 0 - 1
    if top_p < 1.0:
        budget = top_p * tl.where(whole, mass, total)
        whole |= mass >= budget
        weight = tl.where((mass_of_larger < budget) | (larger == 0), weight, 0.0)
    if whole:
        place, _ = _invert(weight.to(tl.float64), index, uniform, CANDIDATES)
        token = tl.load(ids_ptr + place)
    return token


@triton.jit
def _pivot(low, high, part: tl.constexpr):
    """A key in (low, high], `part` fifths of the way."""
    way = (high.to(tl.int64) - low.to(tl.int64)) * part
    return (low + (way + 4) // 5).to(tl.int32)


@triton.jit
def _tighten(low, high, pivot, mass, needed):
    """The new bounds, once the tokens at or above the key `pivot` have been weighed, in parts."""
    holds = tl.sum(mass.to(tl.float64), 0) >= needed
    return tl.where(holds, tl.maximum(low, pivot), low), tl.where(holds, high, tl.minimum(high, pivot - 1))


@triton.jit
def _narrow(source, vocab, low, high, needed, best, scale, min_p, weighed, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key such that the row's tokens at or above it weigh `needed`.

    Without `weighed` the tokens are counted instead. The key lies in [low, high], and `low` fulfils the condition. Keys differ
    only in the bits above SHIFT.
    """
    low, high = low >> SHIFT, high >> SHIFT
    index = tl.arange(0, BLOCK)
    needed = tl.cast(needed, tl.float64)
    while low < high:
        first_pivot, second_pivot = _pivot(low, high, 1), _pivot(low, high, 2)
        third_pivot, fourth_pivot = _pivot(low, high, 3), _pivot(low, high, 4)
        first_mass, second_mass = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        third_mass, fourth_mass = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        for first in range(0, vocab, BLOCK):
            mask = first + index < vocab
            x = tl.load(source + first + index, mask=mask, other=float("-inf")).to(tl.float32)
            amount = tl.where(weighed, _weight(x, best, scale, mask, min_p), 1.0)
            key = _key(x) >> SHIFT
            first_mass += tl.where(key >= first_pivot, amount, 0.0)
            second_mass += tl.where(key >= second_pivot, amount, 0.0)
            third_mass += tl.where(key >= third_pivot, amount, 0.0)
            fourth_mass += tl.where(key >= fourth_pivot, amount, 0.0)
        low, high = _tighten(low, high, first_pivot, first_mass, needed)
        low, high = _tighten(low, high, second_pivot, second_mass, needed)
        low, high = _tighten(low, high, third_pivot, third_mass, needed)
        low, high = _tighten(low, high, fourth_pivot, fourth_mass, needed)
    return low << SHIFT


@triton.jit
def _restrict(source, vocab, sums_ptr, num_runs, bound, best, scale, min_p, RUN: tl.constexpr, BLOCK: tl.constexpr):
    """The runs' sums once more, of only the tokens that min-p keeps, at or above the key `bound`."""
    for first in range(0, num_runs, BLOCK // RUN):
        run = first + tl.arange(0, BLOCK // RUN)
        ids = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
        mask = ids < vocab
        x = tl.load(source + ids, mask=mask, other=float("-inf")).to(tl.float32)
        key = tl.where(mask, _key(x), _LOWEST)
        kept = _weight(x, best, scale, key >= bound, min_p) > 0.0
        weight = tl.exp2((x - _peak(tl.max(key, 1))[:, None]) * scale)
        tl.store(sums_ptr + run, tl.sum(tl.where(kept, weight, 0.0), 1), mask=run < num_runs)
    tl.debug_barrier()


@triton.jit
def _filtered(
    source, vocab, tops, run, best, best_key, temperature, total, min_p, top_k, top_p, uniform, runs_ptr, values_ptr,
    ids_ptr, RUN: tl.constexpr, MOST_K: tl.constexpr, LISTED: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """The token of a uniform after min-p, top-k and top-p, or -1 where candidates don't suffice."""
    scale = _LOG2_E / temperature
    few = (top_k > 0) & (top_k <= MOST_K)
    bound = _lower_bound(tops, best_key, tl.where(few, top_k, MOST_K).to(tl.int32))
    whole = few
    if min_p > 0.0:  # min-p keeps tokens above its own bound; the search begins a little below that bound
        floor = _key(best + (tl.log(min_p) - 1e-3) * temperature - tl.abs(best) * 1e-5)
        whole |= floor >= bound
        bound = tl.minimum(tl.maximum(bound, floor), best_key)
    count = _collect(source, vocab, tops, run, bound, runs_ptr, values_ptr, ids_ptr, RUN, LISTED, CANDIDATES, 16 * RUN)
    token = count * 0 - 1
    if count <= CANDIDATES:
        total = tl.where((top_k == 0) & (min_p == 0.0), total, float("inf"))
        token = _among_candidates(
            values_ptr, ids_ptr, count, best, scale, min_p, top_k, top_p, uniform, whole, total, CANDIDATES, 16
        )
    return token


@triton.jit
def _choose_kernel(
    logits_ptr, slots_ptr, positions_ptr, words_ptr, scales_ptr, chances_ptr, best_ptr, tops_ptr, sums_ptr, runs_ptr,
    values_ptr, ids_ptr, out_tokens_ptr, out_best_ptr, vocab, row_stride, num_tiles, num_runs, TILES: tl.constexpr,
    RUNS: tl.constexpr, RUN: tl.constexpr, MOST_K: tl.constexpr, LISTED: tl.constexpr, CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row: from the results of `_runs_kernel` to its token, or -1.

    `scales` and `chances` are `words` as float32 and float64.
    """
    start_next_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    tile = tl.arange(0, TILES)
    best_both = tl.load(best_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=-9223372036854775808)
    temperature = tl.load(scales_ptr + slot * 2 * _WORDS + _TEMPERATURE, mask=slot >= 0, other=0.0)
    if temperature > 0.0:
        source = logits_ptr + row * row_stride
        words = slot * _WORDS
        uniform = uniform_of(tl.load(words_ptr + words + _SEED), tl.load(positions_ptr + row) + 1)
        top_k, top_p = tl.load(words_ptr + words + _TOP_K), tl.load(chances_ptr + words + _TOP_P)
        min_p = tl.load(scales_ptr + 2 * words + _MIN_P)
        run = tl.arange(0, RUNS)
        tops = tl.load(tops_ptr + row * num_runs + run, mask=run < num_runs, other=_LOWEST)
        best_key = tl.max(tops, 0)
        best = _value(best_key)
        token = best_key * 0
        if best - best == 0.0:
            scale = _LOG2_E / temperature
            masses = _run_masses(tops, sums_ptr + row * num_runs, run, num_runs, best, scale)
            if (top_k == 0) & (top_p >= 1.0) & (min_p == 0.0):
                token = _from_runs(source, masses, run, vocab, best, scale, _NOT_FINITE, min_p, uniform, RUN, RUNS)
            else:
                token = _filtered(
                    source, vocab, tops, run, best, best_key, temperature, tl.sum(masses, 0), min_p, top_k, top_p, uniform,
                    runs_ptr + row * LISTED, values_ptr + row * CANDIDATES, ids_ptr + row * CANDIDATES,
                    RUN, MOST_K, LISTED, CANDIDATES,
                )  # fmt: skip
        tl.store(out_tokens_ptr + row, token.to(tl.int64))
        tl.store(out_best_ptr + row, best)
    else:
        both = tl.max(best_both, 0)
        tl.store(out_tokens_ptr + row, 4294967295 - (both & 4294967295))
        tl.store(out_best_ptr + row, _value((both >> 32).to(tl.int32)))


@triton.jit
def _search_kernel(
    logits_ptr, slots_ptr, positions_ptr, words_ptr, scales_ptr, chances_ptr, tops_ptr, sums_ptr, tokens_ptr, best_ptr,
    vocab, row_stride, num_runs, RUNS: tl.constexpr, SHIFT: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A row that got -1 from `_choose_kernel`.

    Finds top-k's bound, then top-p's, in a few passes over all logits of the row.
    """
    start_next_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(tokens_ptr + row) < 0:
        source = logits_ptr + row * row_stride
        words = tl.load(slots_ptr + row) * _WORDS
        temperature, min_p = tl.load(scales_ptr + 2 * words + _TEMPERATURE), tl.load(scales_ptr + 2 * words + _MIN_P)
        top_k, top_p = tl.load(words_ptr + words + _TOP_K), tl.load(chances_ptr + words + _TOP_P)
        best, scale = tl.load(best_ptr + row), _LOG2_E / temperature
        run = tl.arange(0, RUNS)
        sums_ptr += row * num_runs
        tops = tl.load(tops_ptr + row * num_runs + run, mask=run < num_runs, other=_LOWEST)
        bound = (top_k * 0).to(tl.int32) + _NOT_FINITE + 1
        # Tokens so far below the best weigh less than 1 - p all together, so top-p's bound isn't among them.
        depth = tl.log((vocab / tl.maximum(1.0 - top_p, 1e-16)).to(tl.float32)) + 0.1
        deepest = _key(best - depth * temperature - tl.abs(best) * 1e-5)
        for weighed in range(2):
            needed, low, cuts = top_k.to(tl.float64), bound, top_k > 0
            if weighed == 1:
                needed = top_p * tl.sum(_run_masses(tops, sums_ptr, run, num_runs, best, scale), 0)
                low, cuts = tl.minimum(tl.maximum(bound, deepest), _key(best)), top_p < 1.0
            if cuts:
                found = _narrow(source, vocab, low, _key(best), needed, best, scale, min_p, weighed == 1, SHIFT, BLOCK)
                bound = tl.maximum(bound, found)
            if cuts | ((weighed == 0) & (min_p > 0.0)):
                _restrict(source, vocab, sums_ptr, num_runs, bound, best, scale, min_p, RUN, BLOCK)
        uniform = uniform_of(tl.load(words_ptr + words + _SEED), tl.load(positions_ptr + row) + 1)
        masses = _run_masses(tops, sums_ptr, run, num_runs, best, scale)
        token = _from_runs(source, masses, run, vocab, best, scale, bound, min_p, uniform, RUN, RUNS)
        tl.store(tokens_ptr + row, token.to(tl.int64))


_SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # bits of a key in which no two logits differ


def sample(
    logits_SV: torch.Tensor, slots_S: torch.Tensor, positions_S: torch.Tensor, settings: SlotSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops/sample.py`."""
    rows, vocab = logits_SV.shape
    device = logits_SV.device
    tokens_S = torch.empty(rows, dtype=torch.int64, device=device)
    best_S = torch.empty(rows, dtype=torch.float32, device=device)
    if not rows:
        return tokens_S, best_S
    if logits_SV.stride(1) != 1:
        logits_SV = logits_SV.contiguous()
    tiles = blocks(vocab, TILE)
    runs = tiles * (TILE // RUN)
    best = torch.empty(rows, tiles, dtype=torch.int64, device=device)
    tops, listed, ids = torch.empty(rows * (runs + LISTED + CANDIDATES), dtype=torch.int32, device=device).split(
        [rows * runs, rows * LISTED, rows * CANDIDATES]
    )
    sums, values = torch.empty(rows * (runs + CANDIDATES), dtype=torch.float32, device=device).split(
        [rows * runs, rows * CANDIDATES]
    )
    _runs_kernel[(rows, tiles)](
        logits_SV, slots_S, settings.scales, best, tops, sums, vocab, logits_SV.stride(0), RUN=RUN, TILE=TILE,
        **dependent(device),
    )  # fmt: skip
    shared = (logits_SV, slots_S, positions_S, settings.words, settings.scales, settings.words.view(torch.float64))
    _choose_kernel[(rows,)](
        *shared, best, tops, sums, listed, values, ids, tokens_S, best_S, vocab, logits_SV.stride(0), tiles, runs,
        TILES=padded(tiles), RUNS=padded(runs), RUN=RUN, MOST_K=MOST_K, LISTED=LISTED, CANDIDATES=CANDIDATES,
        num_warps=8, **dependent(device),
    )  # fmt: skip
    _search_kernel[(rows,)](
        *shared, tops, sums, tokens_S, best_S, vocab, logits_SV.stride(0), runs, RUNS=padded(runs),
        SHIFT=_SHIFTS[logits_SV.dtype], RUN=RUN, BLOCK=SEARCHED, num_warps=16, **dependent(device),
    )  # fmt: skip
    return tokens_S, best_S
