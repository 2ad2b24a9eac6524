"""Tokens from logits that lie divided among ranks; see `ops/vocab_pick.py`. Runs and tiles are those of `kernels/sampling/sample.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import blocks, dependent, padded, start_next_and_wait
from pagerunner.ops.kernels.sampling import sample as whole
from pagerunner.ops.kernels.sampling.sample import _LOG2_E, _LOWEST, _NOT_FINITE, _SEED, _TEMPERATURE, _WORDS
from pagerunner.ops.vocab_pick import DrawnRows


@triton.jit(do_not_specialize=["first_id"])
def _keys_kernel(logits_ptr, out_ptr, first_id, vocab, row_stride, TILE: tl.constexpr, PDL: tl.constexpr):
    """A tile of a row. A tile behind the rank's last id has a key below all others."""
    start_next_and_wait(PDL)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    mask = ids < vocab
    x = tl.load(logits_ptr + row * row_stride + ids, mask=mask, other=float("-inf")).to(tl.float32)
    key = tl.where(mask, whole._key(x), _LOWEST)
    top = tl.max(key, 0)
    first = tl.min(tl.where(key == top, ids, 2147483647), 0) + first_id
    tl.store(
        out_ptr + row * tl.num_programs(1) + tile, top.to(tl.int64) * 4294967296 + (4294967295 - first.to(tl.int64))
    )


@triton.jit
def _tokens_kernel(
    keys_ptr, tokens_ptr, best_ptr, vocab, parts, RANKS: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row."""
    start_next_and_wait(PDL)
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    rank, part = tl.arange(0, PADDED)[:, None], tl.arange(0, PARTS)[None, :]
    at = (rank * rows + row) * parts + part
    keys = tl.load(keys_ptr + at, mask=(rank < RANKS) & (part < parts), other=-9223372036854775808)
    key = tl.max(tl.max(keys, 1), 0)
    tl.store(tokens_ptr + row, tl.minimum(4294967295 - (key & 4294967295), vocab - 1))
    tl.store(best_ptr + row, whole._value((key >> 32).to(tl.int32)))


@triton.jit
def _mass_kernel(
    best_ptr, slots_ptr, scales_ptr, tops_ptr, sums_ptr, out_ptr, num_runs, RUNS: tl.constexpr, PDL: tl.constexpr
):
    """One row: the runs' weights together."""
    start_next_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    best = tl.load(best_ptr + row)
    scale = _LOG2_E / tl.load(scales_ptr + tl.load(slots_ptr + row) * 2 * _WORDS + _TEMPERATURE)
    run = tl.arange(0, RUNS)
    tops = tl.load(tops_ptr + row * num_runs + run, mask=run < num_runs, other=_LOWEST)
    mass = tl.sum(whole._run_masses(tops, sums_ptr + row * num_runs, run, num_runs, best, scale), 0)
    tl.store(out_ptr + row, tl.where(best - best == 0.0, mass, 0.0))


@triton.jit(do_not_specialize=["rank", "first_id"])
def _draw_kernel(
    logits_ptr, best_ptr, slots_ptr, positions_ptr, words_ptr, scales_ptr, masses_ptr, tops_ptr, sums_ptr, out_ptr, rank,
    first_id, vocab, row_stride, num_runs, RANKS: tl.constexpr, PADDED: tl.constexpr, RUNS: tl.constexpr,
    RUN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row."""
    start_next_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot, best = tl.load(slots_ptr + row), tl.load(best_ptr + row)
    ranks = tl.arange(0, PADDED)
    masses = tl.load(masses_ptr + ranks * tl.num_programs(0) + row, mask=ranks < RANKS, other=0.0)
    uniform = whole.uniform_of(tl.load(words_ptr + slot * _WORDS + _SEED), tl.load(positions_ptr + row) + 1)
    owner, inside = whole._invert(masses, ranks, uniform, PADDED)
    token = owner * 0
    if (owner == rank) & (best - best == 0.0):
        scale = _LOG2_E / tl.load(scales_ptr + slot * 2 * _WORDS + _TEMPERATURE)
        run = tl.arange(0, RUNS)
        tops = tl.load(tops_ptr + row * num_runs + run, mask=run < num_runs, other=_LOWEST)
        runs = whole._run_masses(tops, sums_ptr + row * num_runs, run, num_runs, best, scale)
        source = logits_ptr + row * row_stride
        token = first_id + whole._from_runs(source, runs, run, vocab, best, scale, _NOT_FINITE, 0.0, inside, RUN, RUNS)
    tl.store(out_ptr + row, token.to(tl.int64))


def _dense(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def best_keys(logits_SO: torch.Tensor, first_id: int, widest: int) -> torch.Tensor:
    """See `ops/vocab_pick.py`. A part is a tile."""
    logits_SO, device = _dense(logits_SO), logits_SO.device
    (rows, vocab), parts = logits_SO.shape, blocks(widest, whole.TILE)
    keys_SP = torch.empty(rows, parts, dtype=torch.int64, device=device)
    if rows:
        _keys_kernel[(rows, parts)](
            logits_SO, keys_SP, first_id, vocab, logits_SO.stride(0), TILE=whole.TILE, **dependent(device)
        )
    return keys_SP


def tokens_of_keys(keys_RSP: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops/vocab_pick.py`."""
    (ranks, rows, parts), device = keys_RSP.shape, keys_RSP.device
    tokens_S = torch.empty(rows, dtype=torch.int64, device=device)
    best_S = torch.empty(rows, dtype=torch.float32, device=device)
    if rows:
        _tokens_kernel[(rows,)](
            keys_RSP, tokens_S, best_S, vocab_size, parts, RANKS=ranks, PADDED=padded(ranks), PARTS=padded(parts),
            **dependent(device),
        )  # fmt: skip
    return tokens_S, best_S


def own_mass(logits_NO: torch.Tensor, rows: DrawnRows) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """See `ops/vocab_pick.py`. The runs' largest logits and weights are kept."""
    logits_NO, device, scales = _dense(logits_NO), logits_NO.device, rows.settings.scales
    (count, vocab), tiles = logits_NO.shape, blocks(logits_NO.shape[1], whole.TILE)
    runs = tiles * (whole.TILE // whole.RUN)
    tops = torch.empty(count, runs, dtype=torch.int32, device=device)
    sums = torch.empty(count, runs, dtype=torch.float32, device=device)
    masses_N = torch.empty(count, dtype=torch.float64, device=device)
    whole._runs_kernel[(count, tiles)](
        logits_NO, rows.slots_N, scales, masses_N.view(torch.int64), tops, sums, vocab, logits_NO.stride(0), RUN=whole.RUN,
        TILE=whole.TILE, **dependent(device),
    )  # fmt: skip
    _mass_kernel[(count,)](
        rows.best_N,
        rows.slots_N,
        scales,
        tops,
        sums,
        masses_N,
        runs,
        RUNS=padded(runs),
        num_warps=8,
        **dependent(device),
    )
    return masses_N, (tops, sums)


def own_draw(
    logits_NO: torch.Tensor,
    rows: DrawnRows,
    masses_RN: torch.Tensor,
    own: tuple[torch.Tensor, ...],
    rank: int,
    first_id: int,
) -> torch.Tensor:
    """See `ops/vocab_pick.py`."""
    (logits_NO, (tops, sums), ranks), (best_N, slots_N, positions_N, settings) = (
        (_dense(logits_NO), own, len(masses_RN)),
        rows,
    )
    tokens_N = torch.empty(len(best_N), dtype=torch.int64, device=logits_NO.device)
    _draw_kernel[(len(best_N),)](
        logits_NO, best_N, slots_N, positions_N, settings.words, settings.scales, masses_RN, tops, sums, tokens_N, rank, first_id,
        logits_NO.shape[1], logits_NO.stride(0), tops.shape[1], RANKS=ranks, PADDED=padded(ranks), RUNS=padded(tops.shape[1]),
        RUN=whole.RUN, num_warps=8, **dependent(logits_NO.device),
    )  # fmt: skip
    return tokens_N
