"""Hyper-connections in two launches for each sublayer. Twins: `pagerunner.ops.streams`.

1. `_numbers_kernel` adds what the sublayer before has left, stores the streams, and multiplies its part of the features. Each part leaves
   sums for all numbers of a token, and the sum of squares.
2. `_gates_kernel` adds these up. One program of a token mixes what is read and norms it, another one does Sinkhorn's steps meanwhile.

Streams are rounded once, when they are stored. All else is float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import blocks, dependent, multiprocessors, padded, row_warps, start_next, wait_turn
from pagerunner.ops.linear import Norm
from pagerunner.ops.streams import Gates, Left, StreamWeights

BLOCK_TOKENS = 16  # of a matrix product, at least
BLOCK_FEATURES = 32
BLOCK_PARTS = 64


@triton.jit(do_not_specialize=["num_tokens", "num_parts"])
def _numbers_kernel(
    streams, y, out_gates, among, fn, whole, partial, num_tokens, num_parts, features, size,
    M: tl.constexpr, X: tl.constexpr, BX: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Features [part * size, (part + 1) * size) of all streams of BT tokens. `partial` [T, parts, BX]: sums by number, squares last."""
    start_next(PDL)
    wait_turn(PDL)
    part = tl.program_id(1)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    there = token < num_tokens
    at_T = token.to(tl.int64) * (M * features)
    x = tl.arange(0, BX)
    sums = tl.zeros((BT, BX), tl.float32)
    squares = tl.zeros((BT,), tl.float32)
    for first in range(part * size, tl.minimum((part + 1) * size, features), BD):
        d = first + tl.arange(0, BD)
        inside = d < features
        mask = there[:, None] & inside[None, :]
        if ADD:
            result = tl.load(y + token.to(tl.int64)[:, None] * features + d[None, :], mask=mask, other=0.0).to(
                tl.float32
            )
        for j in tl.static_range(M):
            if ADD:
                new = tl.load(out_gates + token * M + j, mask=there, other=0.0)[:, None] * result
                for i in tl.static_range(M):
                    share = tl.load(among + token * (M * M) + i * M + j, mask=there, other=0.0)
                    held = tl.load(streams + at_T[:, None] + i * features + d[None, :], mask=mask, other=0.0)
                    new += share[:, None] * held.to(tl.float32)
                stored = new.to(whole.dtype.element_ty)
                tl.store(whole + at_T[:, None] + j * features + d[None, :], stored, mask=mask)
                held = stored.to(tl.float32)
            else:
                held = tl.load(streams + at_T[:, None] + j * features + d[None, :], mask=mask, other=0.0).to(tl.float32)
            place = fn + x[None, :] * (M * features) + j * features + d[:, None]
            weight = tl.load(place, mask=inside[:, None] & (x < X)[None, :], other=0.0)
            sums = tl.dot(held, weight, sums, input_precision="tf32x3")
            squares += tl.sum(held * held, 1)
    place = partial + (token.to(tl.int64)[:, None] * num_parts + part) * BX + x[None, :]
    tl.store(place, tl.where((x == BX - 1)[None, :], squares[:, None], sums), mask=there[:, None])


@triton.jit
def _sums(partial, token, num_parts, columns, there, BX: tl.constexpr, BS: tl.constexpr):
    """What all parts have of a token's numbers `columns` [1, ..], of which some are `there`; [..]. BS parts are on their way together."""
    some = tl.arange(0, BS)
    if len(columns.shape) == 2:
        some = some[:, None]
    else:
        some = some[:, None, None]
    base = partial + token.to(tl.int64) * num_parts * BX
    total = tl.sum(tl.load(base + some * BX + columns, mask=there & (some < num_parts), other=0.0), 0)
    for first in range(BS, num_parts, BS):
        part = first + some
        total += tl.sum(tl.load(base + part * BX + columns, mask=there & (part < num_parts), other=0.0), 0)
    return total


@triton.jit
def _read_streams(
    streams, base, scale, factor, x, numbers, inverse, features, eps, norm_eps,
    M: tl.constexpr, BX: tl.constexpr, BD: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """A token's mixture of its `streams`, normed, to `x`."""
    d = tl.arange(0, BD)
    inside = d < features
    mixed = tl.zeros((BD,), tl.float32)
    for j in tl.static_range(M):
        number = tl.sum(tl.where(tl.arange(0, BX) == j, numbers, 0.0), 0)
        logit = number * inverse * tl.load(scale) + tl.load(base + j)
        held = tl.load(streams + j * features + d, mask=inside, other=0.0).to(tl.float32)
        mixed += (1.0 / (1.0 + tl.exp(-logit)) + eps) * held
    dtype = x.dtype.element_ty
    mixed = mixed.to(dtype).to(tl.float32)
    y = mixed * (1.0 / tl.sqrt_rn(tl.sum(mixed * mixed, 0) * (1.0 / features) + norm_eps))
    if OFFSET:
        y = y + y * factor
    else:
        y = y.to(dtype).to(tl.float32) * factor
    tl.store(x + d, y.to(dtype), mask=inside)


@triton.jit
def _share_out(
    partial, base, scale, out_gates, among, token, num_parts, inverse, iterations, eps,
    M: tl.constexpr, BM: tl.constexpr, BX: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Where a token's result goes, to `out_gates`, and Sinkhorn's steps for what goes `among` streams."""
    m = tl.arange(0, BM)
    number = _sums(partial, token, num_parts, M + m[None, :], m[None, :] < M, BX, BS) * inverse
    number = number * tl.load(scale + 1) + tl.load(base + M + m, mask=m < M, other=0.0)
    tl.store(out_gates + token * M + m, 2.0 / (1.0 + tl.exp(-number)), mask=m < M)
    row, column = m[:, None], m[None, :]
    real = (row < M) & (column < M)
    place = 2 * M + row * M + column
    logit = _sums(partial, token, num_parts, place[None, :, :], real[None, :, :], BX, BS) * inverse
    logit = logit * tl.load(scale + 2) + tl.load(base + place, mask=real, other=0.0)
    logit = tl.where(column < M, logit, float("-inf"))
    share = tl.exp(logit - tl.max(logit, 1)[:, None])
    share = tl.where(real, share / tl.sum(share, 1)[:, None] + eps, 0.0)
    share = share / (tl.sum(share, 0) + eps)[None, :]
    for _ in range(iterations - 1):
        share = share / (tl.sum(share, 1) + eps)[:, None]
        share = share / (tl.sum(share, 0) + eps)[None, :]
    tl.store(among + token * (M * M) + row * M + column, share, mask=real)


@triton.jit(do_not_specialize=["num_parts", "iterations"])
def _gates_kernel(
    whole, partial, base, scale, weight, x, out_gates, among, num_parts, features, iterations, eps, numbers_eps, norm_eps,
    M: tl.constexpr, BM: tl.constexpr, BX: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token: program 0 of it reads the streams, program 1 (of a sublayer) computes where the result goes."""
    start_next(PDL)
    token = tl.program_id(0)
    d = tl.arange(0, BD)
    factor = tl.load(weight + d, mask=d < features, other=0.0).to(tl.float32)
    wait_turn(PDL)
    number = tl.arange(0, BX)
    numbers = _sums(partial, token, num_parts, number[None, :], number[None, :] < BX, BX, BS)
    mean = tl.sum(tl.where(number == BX - 1, numbers, 0.0), 0) / (M * features)
    inverse = 1.0 / tl.sqrt_rn(mean + numbers_eps)
    if tl.program_id(1) == 0:
        at = token.to(tl.int64) * features
        _read_streams(
            whole + at * M, base, scale, factor, x + at, numbers, inverse, features, eps, norm_eps, M, BX, BD, OFFSET
        )
    else:
        _share_out(partial, base, scale, out_gates, among, token, num_parts, inverse, iterations, eps, M, BM, BX, BS)


def _parts(tokens: int, features: int, device: torch.device) -> tuple[int, int]:
    """Into how many parts features are divided, and how many each has: about a program for each multiprocessor."""
    wanted = max(1, multiprocessors(device) // max(1, blocks(tokens, BLOCK_TOKENS)))
    size = max(BLOCK_FEATURES, padded(blocks(features, wanted)))
    return blocks(features, size), size


def _launch(
    streams_TMD: torch.Tensor, left: Left | None, weights: StreamWeights, norm: Norm, iterations: int
) -> tuple[torch.Tensor, torch.Tensor, Gates]:
    tokens, count, features = streams_TMD.shape
    numbers = weights.fn_XF.shape[0]
    block = max(16, padded(numbers + 1))
    parts, size = _parts(tokens, features, streams_TMD.device)
    streams_TMD = streams_TMD.contiguous()
    whole_TMD = streams_TMD if left is None else torch.empty_like(streams_TMD)
    sizes = [tokens * parts * block, tokens * count, tokens * count * count]
    held = torch.empty(sum(sizes), dtype=torch.float32, device=streams_TMD.device)
    partial, out, among = held.split(sizes)
    x_TD = streams_TMD.new_empty(tokens, features)
    given = (streams_TMD, streams_TMD, streams_TMD) if left is None else (left.y_TD.contiguous(), *left.gates)
    launch = dependent(streams_TMD.device)
    if tokens:
        _numbers_kernel[(blocks(tokens, BLOCK_TOKENS), parts)](
            streams_TMD, *given, weights.fn_XF, whole_TMD, partial, tokens, parts, features, size,
            M=count, X=numbers, BX=block, BT=BLOCK_TOKENS, BD=BLOCK_FEATURES, ADD=left is not None, num_warps=4, **launch,
        )  # fmt: skip
        _gates_kernel[(tokens, 2 if iterations else 1)](
            whole_TMD, partial, weights.base_X, weights.scale, norm.weight_I, x_TD, out, among, parts, features, iterations,
            weights.eps, weights.norm_eps, norm.eps,
            M=count, BM=padded(count), BX=block, BD=padded(features), BS=min(BLOCK_PARTS, padded(parts)), OFFSET=norm.offset,
            num_warps=row_warps(padded(features)), **launch,
        )  # fmt: skip
    return x_TD, whole_TMD, Gates(out.view(tokens, count), among.view(tokens, count, count))


def enter_sublayer(
    streams_TMD: torch.Tensor, left: Left | None, weights: StreamWeights, iterations: int, norm: Norm
) -> tuple[torch.Tensor, torch.Tensor, Gates]:
    """See the twin."""
    return _launch(streams_TMD, left, weights, norm, iterations)


def end_streams(
    streams_TMD: torch.Tensor, left: Left | None, weights: StreamWeights, norm: Norm
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the twin."""
    return _launch(streams_TMD, left, weights, norm, 0)[:2]
