"""Experts of a few tokens with 4-bit weights; see `ops/moe.py`. Codes go from memory straight into the matrix units' registers, as in
`kernels/linear/linear_packed.py`, whose words this file uses: a *piece* is what a row and its token are cut into, 8 of each.

Every pair of a token and an expert is a product of its own, of one token. So the pairs need no order. Two tokens that chose the same expert
read its weights twice.

`_up_kernel` computes what the activation makes of one pair's gates and ups. `_down_kernel` computes the weighted sum of a token's experts and
adds it to the residual stream. `_up_kernel` lets it start only after its own wait. So the experts are chosen by then, and `_down_kernel` reads the
first weights while `_up_kernel` still runs.

Shape letters as in `ops/moe.py`; B segments or experts at a time, one for each warp, N pieces of rows.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pagerunner.ops import numerics
from pagerunner.ops.kernels.activation import CLAMPED_SWIGLU, gated
from pagerunner.ops.kernels.codes import E2M1
from pagerunner.ops.kernels.launch import blocks, dependent, padded, start_next, wait_turn
from pagerunner.ops.kernels.linear.linear_packed import (
    RUNS,
    SEGMENT,
    add_step,
    all_loaded,
    has_words,
    load_inputs,
    load_step,
    own_pieces,
    reads,
)
from pagerunner.ops.kernels.moe.moe_tiles import kind_of, stored_args
from pagerunner.ops.moe import ExpertWeights
from pagerunner.ops.routing import Routes
from pagerunner.ops.stored import Stored, Stored4

PIECES = tl.constexpr(8)
"""What a row and a token are cut into: as many as the smallest product of the matrix units has columns."""

_STEP = 1024  # inputs of the pieces of one segment each


@triton.jit
def _columns(segment):
    """Columns [R, 8, B, 1, 8] of the inputs that belong to a product's second operand, where the pieces' segments [B] begin."""
    column = (tl.arange(0, RUNS) * 32)[:, None, None, None, None] + (segment * SEGMENT)[None, None, :, None, None]
    return (
        column
        + (tl.arange(0, PIECES) * SEGMENT)[None, :, None, None, None]
        + tl.arange(0, 8)[None, None, None, None, :]
    )


@triton.jit
def _places(segment):
    """Bytes [8, B, 1, C] of a row that belong to a product's first operand, where the pieces' segments [B] begin."""
    BYTES: tl.constexpr = SEGMENT // 2
    at = (segment * BYTES)[None, :, None, None] + (tl.arange(0, PIECES) * BYTES)[:, None, None, None]
    return at + tl.arange(0, BYTES)[None, None, None, :]


@triton.jit
def _segments(first, BN: tl.constexpr, FORM: tl.constexpr):
    """Segments of BN pieces of rows, the first of which are `first` [B], as `load_step` wants them: [8, B, BN / 8] of e2m1, else [B, BN]."""
    if FORM == E2M1:
        segments = first[None, :, None] + (tl.arange(0, PIECES)[:, None] + tl.zeros((1, BN // 8), tl.int32))[:, None, :]
    else:
        segments = first[:, None] + (tl.arange(0, BN) % PIECES)[None, :]
    return segments


@triton.jit
def _up_rows(tile, local, features, F: tl.constexpr, KIND: tl.constexpr):
    """Rows of the matrix that are `local` rows of a tile: F gates, then their ups. Beyond the last feature they are the last one's."""
    feature = tl.minimum(tile * F + local % F, features - 1)
    return feature * 2 + local // F if KIND == CLAMPED_SWIGLU else feature + local // F * features


@triton.jit
def _expert(experts_ptr, token, slot, mask, A: tl.constexpr):
    """A token's expert; for padding, which has none, and whose weights are 0, the first token's, which is read anyway."""
    first = tl.load(experts_ptr + slot, mask=mask, other=0)
    own = tl.load(experts_ptr + token * A + slot, mask=mask, other=0)
    return tl.maximum(tl.where(own < 0, first, own), 0).to(tl.int64)


@triton.jit
def _up_kernel(x_ptr, experts_ptr, weights_ptr, w_ptr, s_ptr, z_ptr, r_ptr, w_expert, s_expert, bias_ptr, out_ptr, limit,
               A: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STEPS: tl.constexpr, G: tl.constexpr, B: tl.constexpr,
               BN: tl.constexpr, AHEAD: tl.constexpr, FORM: tl.constexpr, WORDS: tl.constexpr, ZEROS: tl.constexpr,
               FACTORS: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, WEIGH: tl.constexpr,
               PDL: tl.constexpr):  # fmt: skip
    """BN / 16 of the N inner features of one pair. B segments of its K inputs are one of STEPS steps; AHEAD steps are in flight."""
    wait_turn(PDL)
    start_next(PDL)  # now, as the next kernel reads the experts' numbers before it waits
    F: tl.constexpr = BN // PIECES // 2
    tile, pair = tl.program_id(0), tl.program_id(1)
    expert = _expert(experts_ptr, pair // A, pair % A, True, A)
    w_ptr += expert * w_expert
    s_ptr += expert * s_expert
    z_ptr += expert * s_expert
    first_row = expert * (2 * N)
    segment = tl.arange(0, B) * PIECES
    rows = _up_rows(tile, tl.arange(0, BN // 8), N, F, KIND)
    w_rows = w_ptr + (rows.to(tl.int64) * (K // 2))[None, None, :, None]
    if FORM == E2M1:
        own_rows = rows[None, None, :]
    else:
        own_rows = _up_rows(tile, tl.arange(0, BN) // PIECES, N, F, KIND)[None, :]
    matrix = (w_rows, _places(segment), s_ptr, z_ptr, own_rows, _segments(segment, BN, FORM))
    steps = ()
    for i in tl.static_range(min(AHEAD, STEPS)):
        steps = steps + (load_step(matrix, i, K, G, PIECES, B, FORM, WORDS, ZEROS),)
    column = _columns(segment)
    source = (x_ptr + pair // A * K + column, column, column >= 0)
    NEAR: tl.constexpr = min(AHEAD, STEPS) if FORM == E2M1 else 1  # steps whose inputs are in flight
    inputs = ()
    for i in tl.static_range(NEAR):
        inputs = inputs + (load_inputs(source, i, K, PIECES, B),)
    rows = first_row + _up_rows(tile, tl.arange(0, 2 * F), N, F, KIND)
    if FACTORS:
        factors = tl.load(r_ptr + rows)
    if BIAS:
        biases = tl.load(bias_ptr + rows).to(tl.float32)
    if FORM == E2M1:
        inputs = all_loaded(inputs, pair >> 31, WORDS)
    acc = tl.zeros((B, BN, PIECES), tl.float32)
    for i in tl.static_range(STEPS):
        acc = add_step(acc, steps[i], inputs[i], FORM, WORDS, ZEROS)
        if i + AHEAD < STEPS:
            steps = steps + (load_step(matrix, i + AHEAD, K, G, PIECES, B, FORM, WORDS, ZEROS),)
        if i + NEAR < STEPS:
            inputs = inputs + (load_inputs(source, i + NEAR, K, PIECES, B),)
    y = tl.reshape(own_pieces(acc, PIECES), (2 * F,))
    if FORM == E2M1 and WORDS:
        y *= 4611686018427387904.0  # 2 ** 62
    if FACTORS:
        y *= factors
    if WEIGH:
        y *= tl.load(weights_ptr + pair)
    if BIAS:
        y += biases
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gate, up = tl.split(tl.trans(tl.reshape(y.to(dtype).to(tl.float32), (2, F))))
    features = tile * F + tl.arange(0, F)
    tl.store(out_ptr + pair * N + features, gated(gate, up, limit, KIND, dtype), mask=features < N)


@triton.jit
def _experts_step(matrix, first_rows, step, K: tl.constexpr, G: tl.constexpr, FORM: tl.constexpr, WORDS: tl.constexpr,
                  ZEROS: tl.constexpr):  # fmt: skip
    """A step of the experts whose first rows are `first_rows` [B]."""
    w_ptr, s_ptr, z_ptr, own, rows = matrix
    zero = tl.zeros(first_rows.shape, tl.int32)
    w_rows = w_ptr + (first_rows[:, None] + own[None, :])[None, :, :, None] * (K // 2)
    if FORM == E2M1:
        own_rows = (first_rows[:, None] + own[None, :])[None, :, :]
    else:
        own_rows = first_rows[:, None] + rows[None, :]
    one = (w_rows, _places(zero), s_ptr, z_ptr, own_rows, _segments(zero, rows.shape[0], FORM))
    return load_step(one, step, K, G, PIECES, 1, FORM, WORDS, ZEROS)


@triton.jit
def _down_kernel(x_ptr, experts_ptr, weights_ptr, w_ptr, s_ptr, z_ptr, r_ptr, bias_ptr, out_ptr, out_stride, A: tl.constexpr,
                 BA: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STEPS: tl.constexpr, G: tl.constexpr,
                 B: tl.constexpr, BN: tl.constexpr, AHEAD: tl.constexpr, FORM: tl.constexpr, WORDS: tl.constexpr,
                 ZEROS: tl.constexpr, FACTORS: tl.constexpr, BIAS: tl.constexpr, WEIGH: tl.constexpr,
                 ADD: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BN / 8 of the N features of the weighted sum over one token's A experts, B at a time, in STEPS steps each.

    AHEAD steps are in flight. ADD: to what `out` holds.
    """
    ALL: tl.constexpr = STEPS * (A // B)
    NEAR: tl.constexpr = STEPS if FORM == E2M1 else 1  # steps whose inputs are in flight
    F: tl.constexpr = BN // PIECES
    tile, token = tl.program_id(0), tl.program_id(1)
    weights_ptr += token * A
    rows = tl.minimum(tile * F + tl.arange(0, BN) // PIECES, N - 1)
    own = tl.minimum(tile * F + tl.arange(0, BN // 8), N - 1)
    matrix = (w_ptr, s_ptr, z_ptr, own, rows)
    some = tl.arange(0, B)
    first_rows = ()
    for turn in tl.static_range(A // B):
        first_rows = first_rows + (_expert(experts_ptr, token, turn * B + some, True, A) * N,)
    steps = ()  # all of the first B experts, then those of the next B
    for i in tl.static_range(min(AHEAD, ALL)):
        steps = steps + (_experts_step(matrix, first_rows[i // STEPS], i % STEPS, K, G, FORM, WORDS, ZEROS),)
    features = tile * F + tl.arange(0, F)
    inside = features < N
    biases = tl.zeros((F,), tl.float32)
    if BIAS:
        index = tl.arange(0, BA)
        ids = _expert(experts_ptr, token, index, index < A, A)
        there = (index < A)[:, None] & inside[None, :]
        values = tl.load(bias_ptr + ids[:, None] * N + features[None, :], mask=there, other=0.0).to(tl.float32)
        if WEIGH:
            values *= tl.load(weights_ptr + index, mask=index < A, other=0.0)[:, None]
        biases = tl.sum(values, 0)
    wait_turn(PDL)
    start_next(PDL)
    place = out_ptr + token * out_stride + features
    if ADD:
        old = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    column = _columns(some * 0)
    total = tl.zeros((B, BN, PIECES), tl.float32)
    for turn in tl.static_range(A // B):
        acc = tl.zeros((B, BN, PIECES), tl.float32)
        pairs = token * A + turn * B + some
        source = (x_ptr + pairs[None, None, :, None, None] * K + column, column, column >= 0)
        inputs = ()
        for k in tl.static_range(NEAR):
            inputs = inputs + (load_inputs(source, k, K, PIECES, 1),)
        if FORM == E2M1:
            inputs = all_loaded(inputs, token >> 31, WORDS)
        for k in tl.static_range(STEPS):
            acc = add_step(acc, steps[turn * STEPS + k], inputs[k], FORM, WORDS, ZEROS)
            if turn * STEPS + k + AHEAD < ALL:
                own_rows = first_rows[(turn * STEPS + k + AHEAD) // STEPS]
                steps = steps + (_experts_step(matrix, own_rows, (k + AHEAD) % STEPS, K, G, FORM, WORDS, ZEROS),)
            if k + NEAR < STEPS:
                inputs = inputs + (load_inputs(source, k + NEAR, K, PIECES, 1),)
        if WEIGH:
            acc *= tl.load(weights_ptr + turn * B + some)[:, None, None]
        if FACTORS:
            acc *= tl.load(r_ptr + first_rows[turn][:, None] + rows[None, :])[:, :, None]
        total += acc
    y = tl.reshape(own_pieces(total, PIECES), (F,))
    if FORM == E2M1 and WORDS:
        y *= 4611686018427387904.0  # 2 ** 62
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    y = (y + biases).to(dtype)
    if ADD:
        y = (old + y.to(tl.float32)).to(dtype)
    tl.store(place, y, mask=inside)


class PairsConfig(NamedTuple):
    """A block: pieces of rows, warps (segments of the inputs for `_up_kernel`, experts for `_down_kernel`), and steps in flight."""

    rows: int
    warps: int
    ahead: int


@functools.cache
def up_config(inputs: int) -> PairsConfig:
    """The block for `_up_kernel`, as of the few-row products of one token (`linear_packed.packed_config`)."""
    return PairsConfig(64, 4, 2) if inputs > 8192 else PairsConfig(32, 1, 4)


@functools.cache
def down_config(inputs: int, active: int) -> PairsConfig:
    """The block for `_down_kernel`: as many experts at a time as divide those of a token."""
    return PairsConfig(32, min(8, active & -active), 4)


def few_pairs(tokens: int, experts: int, pairs: int) -> bool:
    """Whether `pairs_products` is the fastest for so many tokens, of which so many `pairs` are these experts'.

    It serves any number, but reads an expert once for each of its pairs. With half a pair for each, experts are read 1.2 times.
    """
    return tokens == 1 or 0 < pairs <= numerics.FAST.experts.packed * experts


def packs(dtype: torch.dtype, gate_up: torch.Tensor | Stored, down: torch.Tensor | Stored) -> bool:
    """Whether `pairs_products` serves these weights with activations of this dtype."""
    if not isinstance(gate_up, Stored4) or not isinstance(down, Stored4):
        return False
    return reads(gate_up, dtype) and reads(down, dtype)


def _args(weights: torch.Tensor | Stored, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tensors, constants = stored_args(weights, dtype)
    assert isinstance(weights, Stored4), "`packs` says so"
    words = {"WORDS": has_words(weights, dtype)}
    return tensors, words | {name: constants[name] for name in ("FORM", "G", "ZEROS", "FACTORS")}


def pairs_products(
    x_TD: torch.Tensor,
    routes: Routes,
    experts: ExpertWeights,
    out_TD: torch.Tensor,
    *,
    add: bool,
    configs: tuple[PairsConfig, PairsConfig] | None = None,
) -> torch.Tensor:
    """The experts of a few tokens, written into `out` or added to it."""
    gate_up, down, activation, gate_up_bias, down_bias, weigh_inputs = experts
    _, features, inner = down.shape
    tokens, active = routes.experts_TA.shape
    chosen = routes.experts_TA, routes.weights_TA
    inner_PI = x_TD.new_empty(tokens * active, inner)
    first, second = configs or (up_config(features), down_config(inner, active))
    tensors, form = _args(gate_up, x_TD.dtype)
    _up_kernel[(blocks(inner, first.rows // 16), tokens * active)](
        x_TD, *chosen, *tensors, x_TD if gate_up_bias is None else gate_up_bias, inner_PI, activation.limit, A=active, N=inner,
        K=features, STEPS=blocks(features, first.warps * _STEP), B=first.warps, BN=first.rows, AHEAD=first.ahead, BIAS=gate_up_bias is not None,
        KIND=kind_of(activation), WEIGH=weigh_inputs, num_warps=first.warps, **form, **dependent(x_TD.device),
    )  # fmt: skip
    (*tensors, _, _), form = _args(down, x_TD.dtype)
    _down_kernel[(blocks(features, second.rows // 8), tokens)](
        inner_PI, *chosen, *tensors, x_TD if down_bias is None else down_bias, out_TD, out_TD.stride(0), A=active,
        BA=padded(active), N=features, K=inner, STEPS=blocks(inner, _STEP), B=second.warps, BN=second.rows, AHEAD=second.ahead,
        BIAS=down_bias is not None, WEIGH=not weigh_inputs, ADD=add, num_warps=second.warps, **form,
        **dependent(x_TD.device),
    )  # fmt: skip
    return out_TD
