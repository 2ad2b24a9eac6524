"""Hyper-connections in two launches for each sublayer. Twins: `pagerunner.ops.streams`.

1. `_numbers_kernel` adds what the sublayer before has left, stores the streams, and multiplies its part of the features. Each part leaves
   sums for all numbers of a token, and the sum of squares.
2. `_gates_kernel` adds these up. One program of a token mixes what is read and norms it, another one does Sinkhorn's steps meanwhile.

Streams are rounded once, when they are stored. All else is float32.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import blocks, dependent, multiprocessors, padded, row_warps, start_next, wait_turn
from pagerunner.ops.linear import Norm
from pagerunner.ops.streams import Gates, Left, StreamWeights

BLOCK_TOKENS = 16  # of a matrix product, at least
MANY_TOKENS = 64  # of a product where weights would be read too often otherwise
BLOCK_FEATURES = 32
BLOCK_PARTS = 64
FEW = 256  # tokens, each of which has a program for Sinkhorn's steps
PROGRAMS = 8  # of a multiprocessor, some at once: the last ones don't leave it idle for long


@triton.jit
def _tile(pointer, step, mask, N: tl.constexpr):
    """N tiles, `step` from each to the next: all are on their way together."""
    tiles = ()
    for j in tl.static_range(N):
        tiles = tiles + (tl.load(pointer + j * step, mask=mask, other=0.0),)
    return tiles


@triton.jit
def _product(weights, x, sums, EXACT: tl.constexpr):
    """sums + weights @ x. EXACT: `x` is numbers of half precision, which tf32 holds, so weights alone are divided: into 11 bits and the rest."""
    if EXACT:
        high = (weights.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        sums = tl.dot(high, x, sums, input_precision="tf32")
        sums = tl.dot(weights - high, x, sums, input_precision="tf32")
    else:
        sums = tl.dot(weights, x, sums, input_precision="tf32x3")
    return sums


@triton.jit(do_not_specialize=["num_tokens", "num_parts"])
def _numbers_kernel(
    streams, y, out_gates, among, fn, whole, partial, num_tokens, num_parts, features, size,
    M: tl.constexpr, X: tl.constexpr, BX: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, ADD: tl.constexpr,
    ONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Features [part * size, (part + 1) * size) of all streams of BT tokens. `partial` [T, parts, BX]: sums by number, squares last.

    ONE: BD features are a part, so their weights are on their way while the kernel before runs.
    """
    start_next(PDL)
    part = tl.program_id(1)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    there = token < num_tokens
    at_T = token.to(tl.int64) * (M * features)
    x = tl.arange(0, BM)
    fn_at, in_x = fn + x[:, None] * (M * features), (x < X)[:, None]
    if ONE:
        own = (part * BD + tl.arange(0, BD))[None, :]
        weights = _tile(fn_at + own, features, (own < features) & in_x, M)
    wait_turn(PDL)
    out, shares = (), ()
    if ADD:
        out = _tile(out_gates + token * M, 1, there, M)
        shares = _tile(among + token * (M * M), 1, there, M * M)
    sums = tl.zeros((BM, BT), tl.float32)
    squares = tl.zeros((BT,), tl.float32)
    for first in range(part * size, tl.minimum((part + 1) * size, features), BD):
        d = first + tl.arange(0, BD)
        mask = there[:, None] & (d < features)[None, :]
        at = at_T[:, None] + d[None, :]
        held = _tile(streams + at, features, mask, M)
        if ADD:
            result = tl.load(y + token.to(tl.int64)[:, None] * features + d[None, :], mask=mask, other=0.0)
        for j in tl.static_range(M):
            if ADD:
                new = out[j][:, None] * result.to(tl.float32)
                for i in tl.static_range(M):
                    new += shares[i * M + j][:, None] * held[i].to(tl.float32)
                stored = new.to(whole.dtype.element_ty)
                tl.store(whole + at + j * features, stored, mask=mask)
            else:
                stored = held[j]
            number = stored.to(tl.float32)
            if ONE:
                weight = weights[j]
            else:
                weight = tl.load(fn_at + j * features + d[None, :], mask=in_x & (d < features)[None, :], other=0.0)
            sums = _product(weight, tl.trans(number), sums, stored.dtype != tl.float32)
            squares += tl.sum(number * number, 1)
    place = partial + (token.to(tl.int64) * num_parts + part) * BX
    tl.store(place[None, :] + x[:, None], sums, mask=there[None, :] & in_x)
    tl.store(place + BX - 1, squares, mask=there)


@triton.jit
def _sums(partial, token, there, num_parts, BX: tl.constexpr, BS: tl.constexpr):
    """What all parts have of the numbers of tokens [N], [N, BX]. BS parts are on their way together."""
    some = tl.arange(0, BS)[None, :, None]
    at = partial + (token.to(tl.int64) * num_parts * BX)[:, None, None] + tl.arange(0, BX)[None, None, :]
    mask = there[:, None, None]
    total = tl.sum(tl.load(at + some * BX, mask=mask & (some < num_parts), other=0.0), 1)
    for first in range(BS, num_parts, BS):
        part = first + some
        total += tl.sum(tl.load(at + part * BX, mask=mask & (part < num_parts), other=0.0), 1)
    return total


@triton.jit
def _read_streams(
    streams, partial, base, scale, factor, x, token, num_parts, features, eps, numbers_eps, norm_eps,
    M: tl.constexpr, BX: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """A token's mixture of its `streams`, normed, to `x`."""
    d, number = tl.arange(0, BD), tl.arange(0, BX)
    inside = d < features
    held = _tile(streams + d, features, inside, M)
    numbers = tl.sum(_sums(partial, token + tl.arange(0, 1), tl.full((1,), True, tl.int1), num_parts, BX, BS), 0)
    mean = tl.sum(tl.where(number == BX - 1, numbers, 0.0), 0) / (M * features)
    inverse = 1.0 / tl.sqrt_rn(mean + numbers_eps)
    mixed = tl.zeros((BD,), tl.float32)
    for j in tl.static_range(M):
        own = tl.sum(tl.where(number == j, numbers, 0.0), 0)
        logit = own * inverse * tl.load(scale) + tl.load(base + j)
        mixed += (1.0 / (1.0 + tl.exp(-logit)) + eps) * held[j].to(tl.float32)
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
    partial, sums, base, scale, out_gates, among, block, num_tokens, num_parts, features, iterations, eps, numbers_eps,
    M: tl.constexpr, BX: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Where BT tokens' results go, to `out_gates`, and Sinkhorn's steps for what goes `among` streams.

    A thread has all of a token's numbers, which come to it by way of `sums` [T, BX]: so no step waits for other threads.
    """
    token, number = block * BT + tl.arange(0, BT), tl.arange(0, BX)[None, :]
    there = token < num_tokens
    place = sums + token[:, None] * BX + number
    tl.store(place, _sums(partial, token, there, num_parts, BX, BS), mask=there[:, None])
    tl.debug_barrier()
    own = sums + token * BX
    inverse = 1.0 / tl.sqrt_rn(tl.load(own + BX - 1, mask=there, other=1.0) / (M * features) + numbers_eps)
    for j in tl.static_range(M):
        logit = tl.load(own + M + j, mask=there, other=0.0) * inverse * tl.load(scale + 1) + tl.load(base + M + j)
        tl.store(out_gates + token * M + j, 2.0 / (1.0 + tl.exp(-logit)), mask=there)
    shares = ()
    for i in tl.static_range(M):
        row = ()
        for j in tl.static_range(M):
            logit = tl.load(own + 2 * M + i * M + j, mask=there, other=0.0) * inverse * tl.load(scale + 2)
            row = row + (logit + tl.load(base + 2 * M + i * M + j),)
        most = row[0]
        for j in tl.static_range(1, M):
            most = tl.maximum(most, row[j])
        weights = ()
        for j in tl.static_range(M):
            weights = weights + (tl.exp(row[j] - most),)
        total = 1.0 / _total(weights, 0, 1, M)
        for j in tl.static_range(M):
            shares = shares + (weights[j] * total + eps,)
    shares = _balance(shares, eps, False, M)
    for _ in range(iterations - 1):
        shares = _balance(_balance(shares, eps, True, M), eps, False, M)
    for k in tl.static_range(M * M):
        tl.store(among + token * (M * M) + k, shares[k], mask=there)


@triton.jit
def _total(numbers, first: tl.constexpr, step: tl.constexpr, N: tl.constexpr):
    """The sum of N of a tuple's numbers."""
    total = numbers[first]
    for k in tl.static_range(1, N):
        total += numbers[first + k * step]
    return total


@triton.jit
def _balance(shares, eps, ROWS: tl.constexpr, M: tl.constexpr):
    """A matrix [M, M], a tuple, whose rows (or columns) are divided by their sums."""
    inverses = ()
    for k in tl.static_range(M):
        inverses = inverses + (1.0 / (_total(shares, k * M if ROWS else k, 1 if ROWS else M, M) + eps),)
    balanced = ()
    for i in tl.static_range(M):
        for j in tl.static_range(M):
            balanced = balanced + (shares[i * M + j] * inverses[i if ROWS else j],)
    return balanced


@triton.jit(do_not_specialize=["num_tokens", "num_parts", "iterations"])
def _gates_kernel(
    whole, partial, sums, base, scale, weight, x, out_gates, among, num_tokens, num_parts, features, iterations, eps, numbers_eps,
    norm_eps,
    M: tl.constexpr, BX: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program for each token that reads its streams, and behind these (in a sublayer) one for BT tokens: where their results go."""
    start_next(PDL)
    token = tl.program_id(0)
    d = tl.arange(0, BD)
    factor = tl.load(weight + d, mask=d < features, other=0.0).to(tl.float32)
    wait_turn(PDL)
    if token < num_tokens:
        at = token.to(tl.int64) * features
        _read_streams(
            whole + at * M, partial, base, scale, factor, x + at, token, num_parts, features, eps, numbers_eps, norm_eps,
            M, BX, BD, BS, OFFSET,
        )  # fmt: skip
    else:
        _share_out(
            partial, sums, base, scale, out_gates, among, token - num_tokens, num_tokens, num_parts, features, iterations, eps,
            numbers_eps, M, BX, max(1, BS // BT), BT,
        )  # fmt: skip


class Sizes(NamedTuple):
    """Tokens of a product's block, features of a part, how many parts there are, how many of them a program adds at once, and tokens of one that does Sinkhorn's steps."""

    block: int
    size: int
    parts: int
    added: int
    together: int


def _sizes(tokens: int, features: int, device: torch.device) -> Sizes:
    """There is about a program for each multiprocessor, or several."""
    many = tokens > FEW
    block = MANY_TOKENS if many else BLOCK_TOKENS
    wanted = max(1, multiprocessors(device) * (PROGRAMS if many else 1) // max(1, blocks(tokens, block)))
    size = max(BLOCK_FEATURES, padded(blocks(features, wanted)))
    parts = blocks(features, size)
    return Sizes(block, size, parts, min(BLOCK_PARTS, padded(parts)), 64 if many else 1)


def enter_sublayer_kernels(tokens: int, features: int, device: torch.device) -> Hashable:
    """See `Op.kernels_for`."""
    sizes = _sizes(tokens, features, device)
    return sizes.block, sizes.size == BLOCK_FEATURES, sizes.added


def _launch(
    streams_TMD: torch.Tensor, left: Left | None, weights: StreamWeights, norm: Norm, iterations: int
) -> tuple[torch.Tensor, torch.Tensor, Gates]:
    tokens, count, features = streams_TMD.shape
    numbers, device = weights.fn_XF.shape[0], streams_TMD.device
    width, (block, size, parts, added, together) = max(16, padded(numbers + 1)), _sizes(tokens, features, device)
    streams_TMD = streams_TMD.contiguous()
    whole_TMD = streams_TMD if left is None else torch.empty_like(streams_TMD)
    sizes = [tokens * parts * width, tokens * width, tokens * count, tokens * count * count]
    partial, sums, out, among = torch.empty(sum(sizes), dtype=torch.float32, device=device).split(sizes)
    x_TD = streams_TMD.new_empty(tokens, features)
    given = (streams_TMD, streams_TMD, streams_TMD) if left is None else (left.y_TD.contiguous(), *left.gates)
    launch = dependent(device)
    if tokens:
        _numbers_kernel[(blocks(tokens, block), parts)](
            streams_TMD, *given, weights.fn_XF, whole_TMD, partial, tokens, parts, features, size,
            M=count, X=numbers, BX=width, BM=max(64, width), BT=block, BD=BLOCK_FEATURES, ADD=left is not None, ONE=size == BLOCK_FEATURES,
            num_warps=4, num_stages=1, **launch,
        )  # fmt: skip
        _gates_kernel[(tokens + (blocks(tokens, together) if iterations else 0),)](
            whole_TMD, partial, sums, weights.base_X, weights.scale, norm.weight_I, x_TD, out, among, tokens, parts, features,
            iterations, weights.eps, weights.norm_eps, norm.eps,
            M=count, BX=width, BD=padded(features), BS=added, BT=together,
            OFFSET=norm.offset, num_warps=row_warps(padded(features)), **launch,
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
