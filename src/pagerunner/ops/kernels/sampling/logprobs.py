"""See `ops/logprobs.py`. Two launches: tiles of all rows, then a program for each row.

The first reads the logits: of a tile its largest, the sum of exponentials beside that, and how many are more likely than the chosen token; and the
largest logit of each run of RUN tokens. The k-th largest of these is a bound that the best k reach, so few runs are read again
(`kernels/sampling/sample.py` looks for top-k alike). Where many are equal, or there are few runs, the best are looked for one after another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import blocks, dependent, padded, start_next_and_wait
from pagerunner.ops.kernels.sampling.sample import CANDIDATES, LISTED, RUN, TILE, _collect, _key, _lower_bound, _value

_LEAST = tl.constexpr(-(2**63))


@triton.jit
def _tiles_kernel(
    logits_ptr, rows_ptr, chosen_ptr, tops_ptr, most_ptr, total_ptr, larger_ptr, vocab, row_stride,
    GATHER: tl.constexpr, RUN: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of a row."""
    start_next_and_wait(PDL)
    number, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + number) if GATHER else number
    source = logits_ptr + row * row_stride
    run = tile * (TILE // RUN) + tl.arange(0, TILE // RUN)
    ids = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    mask = ids < vocab
    own = tl.load(source + tl.load(chosen_ptr + number)).to(tl.float32)
    x = tl.load(source + ids, mask=mask, other=float("-inf")).to(tl.float32)
    place = number * tl.num_programs(1) + tile
    tl.store(
        tops_ptr + place * (TILE // RUN) + tl.arange(0, TILE // RUN), tl.max(tl.where(mask, _key(x), -2147483648), 1)
    )
    most = tl.max(tl.max(x, 1), 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    tl.store(most_ptr + place, most)
    tl.store(total_ptr + place, tl.sum(tl.sum(tl.exp(x - base), 1), 0))
    tl.store(larger_ptr + place, tl.sum(tl.sum((x > own).to(tl.int32), 1), 0))


@triton.jit(do_not_specialize=["k"])
def _report_kernel(
    logits_ptr, rows_ptr, chosen_ptr, tops_ptr, most_ptr, total_ptr, larger_ptr, runs_ptr, values_ptr, ids_ptr, words_ptr, logprobs_ptr, vocab, row_stride,
    k, num_tiles, num_runs, GATHER: tl.constexpr, TILES: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr, LISTED: tl.constexpr,
    CANDIDATES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row: from its tiles to what it reports."""
    start_next_and_wait(PDL)
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + number) if GATHER else number
    source = logits_ptr + row * row_stride
    tile = tl.arange(0, TILES)
    at = number * num_tiles + tile
    most = tl.load(most_ptr + at, mask=tile < num_tiles, other=float("-inf"))
    total = tl.load(total_ptr + at, mask=tile < num_tiles, other=0.0)
    larger = tl.load(larger_ptr + at, mask=tile < num_tiles, other=0)
    base = tl.max(most, 0)
    base = tl.where(base == float("-inf"), 0.0, base)
    whole = base + tl.log(tl.sum(total * tl.exp(most - base), 0))
    own = tl.load(source + tl.load(chosen_ptr + number)).to(tl.float32)
    words, logprobs = words_ptr + number * (1 + k), logprobs_ptr + number * (1 + k)
    tl.store(words, tl.sum(larger, 0) + 1)
    tl.store(logprobs, own - whole)
    if k > 0:
        run = tl.arange(0, RUNS)
        tops = tl.load(tops_ptr + number * num_runs + run, mask=run < num_runs, other=-2147483648)
        bound = _lower_bound(tops, tl.max(tops, 0), k)
        runs, values, ids = runs_ptr + number * LISTED, values_ptr + number * CANDIDATES, ids_ptr + number * CANDIDATES
        count = _collect(source, vocab, tops, run, bound, runs, values, ids, RUN, LISTED, CANDIDATES, 16 * RUN)
        if (count >= k) & (count <= CANDIDATES):
            index = tl.arange(0, CANDIDATES)
            value = tl.load(values + index, mask=index < count, other=float("-inf"))
            key, place = _key(value), tl.zeros((CANDIDATES,), tl.int32)
            for first in range(0, count, 16):  # candidates are in the order of ids
                other = first + tl.arange(0, 16)
                beside = _key(tl.load(values + other, mask=other < count, other=float("-inf")))
                before = (beside[None, :] > key[:, None]) | ((beside[None, :] == key[:, None]) & (other[None, :] < index[:, None]))  # fmt: skip
                place += tl.sum((before & (other < count)[None, :]).to(tl.int32), 1)
            there = (index < count) & (place < k)
            tl.store(words + 1 + place, tl.load(ids + index, mask=there, other=0), mask=there)
            tl.store(logprobs + 1 + place, value - whole, mask=there)
        else:
            last, token = tl.full((), 2**63 - 1, tl.int64), tl.arange(0, BLOCK)
            for nth in range(k):
                found = tl.full((BLOCK,), _LEAST, tl.int64)
                for first in range(0, vocab, BLOCK):
                    mask = first + token < vocab
                    x = tl.load(source + first + token, mask=mask, other=float("-inf")).to(tl.float32)
                    both = _key(x).to(tl.int64) * 4294967296 + (4294967295 - (first + token).to(tl.int64))
                    found = tl.maximum(found, tl.where(mask & (both < last), both, _LEAST))
                last = tl.max(found, 0)
                tl.store(words + 1 + nth, (4294967295 - (last & 4294967295)).to(tl.int32))
                tl.store(logprobs + 1 + nth, _value((last >> 32).to(tl.int32)) - whole)


def gather_logprobs(
    logits_SV: torch.Tensor, rows_L: torch.Tensor | None, chosen_L: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the twin."""
    rows, vocab, device = len(chosen_L), logits_SV.shape[1], logits_SV.device
    if logits_SV.stride(1) != 1:
        logits_SV = logits_SV.contiguous()
    num_top, tiles = min(num_top, vocab), blocks(vocab, TILE)
    runs = tiles * (TILE // RUN)
    words_LX = torch.empty(rows, 1 + num_top, dtype=torch.int32, device=device)
    logprobs_LX = torch.empty(rows, 1 + num_top, dtype=torch.float32, device=device)
    if not rows:
        return words_LX, logprobs_LX
    # parts begin at multiples of 16 bytes, so that no number of rows has a kernel of its own
    sizes = [blocks(rows * size, 4) * 4 for size in (runs, tiles, LISTED, CANDIDATES)]
    tops, larger, listed, ids = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    sizes = [blocks(rows * size, 4) * 4 for size in (tiles, tiles, CANDIDATES)]
    most, total, values = torch.empty(sum(sizes), dtype=torch.float32, device=device).split(sizes)
    given = logits_SV, chosen_L if rows_L is None else rows_L, chosen_L, tops, most, total, larger
    launch = {"GATHER": rows_L is not None, "RUN": RUN, **dependent(device)}
    _tiles_kernel[(rows, tiles)](*given, vocab, logits_SV.stride(0), TILE=TILE, **launch)
    _report_kernel[(rows,)](
        *given, listed, values, ids, words_LX, logprobs_LX, vocab, logits_SV.stride(0), num_top, tiles, runs,
        TILES=padded(tiles), RUNS=padded(runs), LISTED=LISTED, CANDIDATES=CANDIDATES, BLOCK=TILE, num_warps=8, **launch,
    )  # fmt: skip
    return words_LX, logprobs_LX
