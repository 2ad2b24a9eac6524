"""Experts of one token; see `ops/moe.py`. Two kernels, whose time is that of reading the weights of the token's experts.

`_up_kernel` computes what the experts' activations make of gates and ups. `_down_kernel` computes the weighted sum of their outputs and
adds it to the residual stream. `_up_kernel` lets it start only after its own wait. So the experts are chosen by then, and `_down_kernel` reads
the first weights while `_up_kernel` still runs. Every program multiplies whole rows of weights, and sums in float32 registers.

What all tokens pass beside their experts is part of both. Its gates and ups come first: they are the same for every token, so they are on
their way from memory while the experts are still being chosen.

Shape letters as in `ops/moe.py`; L matrices of a tile (gate and up, or the token's experts), N rows of each, K columns.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.activation import CLAMPED_SWIGLU, gated
from pagerunner.ops.kernels.codes import DENSE, E2M1, INT4, ROW_SCALES, numbers4, numbers8, spread
from pagerunner.ops.kernels.launch import blocks, dependent, padded, start_next, wait_turn
from pagerunner.ops.kernels.moe.moe_tiles import kind_of, stored_args
from pagerunner.ops.kernels.stored import scale_numbers
from pagerunner.ops.moe import ExpertWeights, Shared
from pagerunner.ops.routing import Routes


@triton.jit
def _group_values(ptr, rows_LN, live_LN, first, K: tl.constexpr, G: tl.constexpr, BK: tl.constexpr, EACH: tl.constexpr):
    """Scales or zero points of the columns `first`, `first` + EACH and so on, up to BK of them, [L, N, BK / EACH]."""
    columns = first + tl.arange(0, BK // EACH) * EACH
    mask = live_LN[:, :, None] & (columns < K)[None, None, :]
    return tl.load(ptr + rows_LN[:, :, None] * ((K + G - 1) // G) + (columns // G)[None, None, :], mask=mask, other=0.0)


@triton.jit
def load_codes(w_ptr, rows_LN, live_LN, first, K: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr):
    """Codes of BK columns from `first` on, [L, N, BK], or half as many bytes. `rows` count over all experts."""
    PER: tl.constexpr = 2 if FORM == INT4 or FORM == E2M1 else 1  # codes in a byte
    at = first // PER + tl.arange(0, BK // PER)
    mask = live_LN[:, :, None] & (at < K // PER)[None, None, :]
    return tl.load(w_ptr + rows_LN[:, :, None] * (K // PER) + at[None, None, :], mask=mask, other=0)


@triton.jit
def _nibbles(codes, s_ptr, z_ptr, rows_LN, live_LN, first, HIGH: tl.constexpr, K: tl.constexpr, G: tl.constexpr,
             BK: tl.constexpr, FORM: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr):  # fmt: skip
    """Numbers of the high or the low nibbles in float32, with the scales of groups."""
    numbers = numbers4(codes, HIGH, tl.bfloat16 if WORDS else tl.float32, FORM, WORDS).to(tl.float32)
    start = first + 16 if HIGH else first
    if ZEROS:
        zeros = _group_values(z_ptr, rows_LN, live_LN, start, K, G, BK, 32).to(tl.float32) - 8.0
        numbers -= spread(zeros, 16)
    if SCALES != ROW_SCALES:
        scales = scale_numbers(_group_values(s_ptr, rows_LN, live_LN, start, K, G, BK, 32))
        numbers *= spread(scales, 16)
    return numbers


@triton.jit
def add_columns(acc, codes, x_ptr, x_rows_L, s_ptr, z_ptr, rows_LN, scale_rows_LN, live_LN, first, K: tl.constexpr, G: tl.constexpr,
                BK: tl.constexpr, FORM: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr):  # fmt: skip
    """`acc` and the products of BK columns' numbers with the inputs that belong to them."""
    if FORM == INT4 or FORM == E2M1:
        i = tl.arange(0, BK // 2)
        cols = first + i // 16 * 32 + i % 16
        x_place = x_ptr + x_rows_L[:, None] * K + cols[None, :]
        low = tl.load(x_place, mask=(cols < K)[None, :], other=0.0).to(tl.float32)
        high = tl.load(x_place + 16, mask=(cols < K)[None, :], other=0.0).to(tl.float32)
        acc += (
            _nibbles(codes, s_ptr, z_ptr, rows_LN, live_LN, first, False, K, G, BK, FORM, WORDS, SCALES, ZEROS)
            * low[:, None, :]
        )
        acc += (
            _nibbles(codes, s_ptr, z_ptr, rows_LN, live_LN, first, True, K, G, BK, FORM, WORDS, SCALES, ZEROS)
            * high[:, None, :]
        )
    else:
        cols = first + tl.arange(0, BK)
        x = tl.load(x_ptr + x_rows_L[:, None] * K + cols[None, :], mask=(cols < K)[None, :], other=0.0).to(tl.float32)
        if FORM == DENSE:
            numbers = codes.to(tl.float32)
        else:
            numbers = numbers8(codes, tl.float32, FORM, False)
            if SCALES != ROW_SCALES:
                numbers *= spread(_group_values(s_ptr, scale_rows_LN, live_LN, first, K, G, BK, 128), 128)
        acc += numbers * x[:, None, :]
    return acc


@triton.jit
def row_products(codes, x_ptr, x_rows_L, w_ptr, s_ptr, z_ptr, r_ptr, experts_L, rows_LN, live_LN, OUTPUTS: tl.constexpr, K: tl.constexpr,
                 G: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr, WORDS: tl.constexpr,
                 SCALES: tl.constexpr, ZEROS: tl.constexpr, FACTORS: tl.constexpr):  # fmt: skip
    """Rows [L, N] of the experts' matrices times inputs, float32 [L, N]. `codes` are the first BK columns."""
    all_rows = experts_L[:, None] * OUTPUTS + rows_LN
    scale_rows = experts_L[:, None] * ((OUTPUTS + BO - 1) // BO) + rows_LN // BO
    acc = tl.zeros(codes.shape, tl.float32)
    for step in tl.static_range((K + BK - 1) // BK):
        if step > 0:
            codes = load_codes(w_ptr, all_rows, live_LN, step * BK, K, BK, FORM)
        acc = add_columns(acc, codes, x_ptr, x_rows_L, s_ptr, z_ptr, all_rows, scale_rows, live_LN, step * BK, K, G, BK, FORM,
                          WORDS, SCALES, ZEROS)  # fmt: skip
    y = tl.sum(acc, 2)
    if SCALES == ROW_SCALES and FORM != DENSE:
        y *= scale_numbers(tl.load(s_ptr + scale_rows, mask=live_LN, other=0.0))
    if FACTORS:
        y *= tl.load(r_ptr + all_rows, mask=live_LN, other=0.0)
    return y


@triton.jit
def _gated_rows(x_ptr, weight_ptr, w_ptr, s_ptr, z_ptr, r_ptr, bias_ptr, out_ptr, ids, features, limit, SHARED: tl.constexpr,
                N: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr, WORDS: tl.constexpr, G: tl.constexpr,
                BO: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, FACTORS: tl.constexpr, BIAS: tl.constexpr,
                KIND: tl.constexpr, WEIGH: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """What the activation makes of some of the N inner features of the matrix `ids`, twice the same. SHARED: it is read before the wait."""
    step: tl.constexpr = 2 if KIND == CLAMPED_SWIGLU else 1
    ups: tl.constexpr = 1 if KIND == CLAMPED_SWIGLU else N
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    both = tl.arange(0, 2)
    live = (features < N)[None, :] & (ids >= 0)[:, None]  # an expert that isn't here has number -1
    rows = features[None, :] * step + both[:, None] * ups
    all_rows = ids[:, None] * (2 * N) + rows
    codes = load_codes(w_ptr, all_rows, live, 0, K, BK, FORM)
    if SHARED:
        wait_turn(PDL)
        start_next(PDL)
    y = row_products(codes, x_ptr, both * 0, w_ptr, s_ptr, z_ptr, r_ptr, ids, rows, live, 2 * N, K, G, BO, BK, FORM, WORDS,
                     SCALES, ZEROS, FACTORS)  # fmt: skip
    if WEIGH:
        y *= tl.load(weight_ptr)
    if BIAS:
        y += tl.load(bias_ptr + all_rows, mask=live, other=0.0).to(tl.float32)
    y = y.to(dtype).to(tl.float32)
    gate = tl.sum(tl.where((both == 0)[:, None], y, 0.0), 0)
    up = tl.sum(tl.where((both == 1)[:, None], y, 0.0), 0)
    tl.store(out_ptr + features, gated(gate, up, limit, KIND, dtype), mask=features < N)


@triton.jit
def _up_kernel(x_ptr, experts_ptr, weights_ptr, w_ptr, s_ptr, z_ptr, r_ptr, sw_ptr, ss_ptr, sz_ptr, sr_ptr, bias_ptr, out_ptr, limit,
               A: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SHARED: tl.constexpr,
               SN: tl.constexpr, SG: tl.constexpr, FORM: tl.constexpr, WORDS: tl.constexpr, G: tl.constexpr, BO: tl.constexpr,
               SCALES: tl.constexpr, ZEROS: tl.constexpr, FACTORS: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr,
               WEIGH: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BN of the N inner features of one of the token's A experts; or SN of the SHARED ones, whose results stand behind those of the experts."""
    PROGRAMS: tl.constexpr = (N + BN - 1) // BN
    ROUNDS: tl.constexpr = (SHARED + PROGRAMS * SN - 1) // (PROGRAMS * SN)
    turn = tl.program_id(1)
    no_id = tl.zeros((2,), tl.int64)
    if SHARED and turn < ROUNDS:
        some = (turn * PROGRAMS + tl.program_id(0)) * SN + tl.arange(0, SN)
        _gated_rows(x_ptr, weights_ptr, sw_ptr, ss_ptr, sz_ptr, sr_ptr, bias_ptr, out_ptr + A * N, no_id, some, limit, True, SHARED,
                    K, BK, FORM, WORDS, SG, BO, SCALES, ZEROS, FACTORS, False, KIND, False, PDL)  # fmt: skip
    else:
        wait_turn(PDL)
        start_next(PDL)  # now, as the next kernel reads the experts' numbers before it waits
        pair = turn - ROUNDS
        features = tl.program_id(0) * BN + tl.arange(0, BN)
        ids = tl.load(experts_ptr + pair + no_id).to(tl.int64)
        _gated_rows(x_ptr, weights_ptr + pair, w_ptr, s_ptr, z_ptr, r_ptr, bias_ptr, out_ptr + pair * N, ids, features, limit, False, N,
                    K, BK, FORM, WORDS, G, BO, SCALES, ZEROS, FACTORS, BIAS, KIND, WEIGH, PDL)  # fmt: skip


@triton.jit
def _down_kernel(x_ptr, experts_ptr, weights_ptr, w_ptr, s_ptr, z_ptr, r_ptr, sw_ptr, ss_ptr, sz_ptr, sr_ptr, bias_ptr, out_ptr,
                 A: tl.constexpr, BA: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                 SHARED: tl.constexpr, SG: tl.constexpr, SBK: tl.constexpr, FORM: tl.constexpr, WORDS: tl.constexpr,
                 G: tl.constexpr, BO: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, FACTORS: tl.constexpr,
                 BIAS: tl.constexpr, WEIGH: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BN of the N features of the weighted sum over the token's experts. ADD: to what `out` holds.

    SHARED: inner features of what all tokens pass, SBK at a time. Its output comes first.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    index = tl.arange(0, BA)
    ids = tl.load(experts_ptr + index, mask=index < A, other=0).to(tl.int64)
    weights = tl.load(weights_ptr + index, mask=index < A, other=0.0)
    features = tl.program_id(0) * BN + tl.arange(0, BN)
    live = (features < N)[None, :] & ((index < A) & (ids >= 0))[:, None]
    rows = tl.broadcast_to(features[None, :], [BA, BN])
    all_rows = ids[:, None] * N + rows
    codes = load_codes(w_ptr, all_rows, live, 0, K, BK, FORM)
    bias = tl.zeros((BA, BN), tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + all_rows, mask=live, other=0.0).to(tl.float32)
    no_id = tl.zeros((1,), tl.int64)
    own_live = (features < N)[None, :]
    if SHARED:
        own_codes = load_codes(sw_ptr, no_id[:, None] + features[None, :], own_live, 0, SHARED, SBK, FORM)
    wait_turn(PDL)
    start_next(PDL)
    old = tl.zeros((BN,), tl.float32)
    if ADD:
        old = tl.load(out_ptr + features, mask=features < N, other=0.0).to(tl.float32)
    if SHARED:
        own = row_products(own_codes, x_ptr + A * K, no_id, sw_ptr, ss_ptr, sz_ptr, sr_ptr, no_id, features[None, :], own_live, N,
                           SHARED, SG, BO, SBK, FORM, WORDS, SCALES, ZEROS, FACTORS)  # fmt: skip
        old = (old + tl.sum(own, 0)).to(dtype).to(tl.float32)
    y = row_products(codes, x_ptr, tl.minimum(index, A - 1), w_ptr, s_ptr, z_ptr, r_ptr, ids, rows, live, N, K, G, BO, BK, FORM,
                     WORDS, SCALES, ZEROS, FACTORS) + bias  # fmt: skip
    if WEIGH:
        y *= weights[:, None]
    y = tl.sum(tl.where(live, y, 0.0), 0).to(dtype).to(tl.float32)
    tl.store(out_ptr + features, (old + y).to(dtype), mask=features < N)


class OneConfig(NamedTuple):
    """A block: rows of each matrix, input features, and warps."""

    rows: int
    inputs: int
    warps: int


@functools.cache
def up_config(inputs: int, form: int) -> OneConfig:
    """The block for `_up_kernel`, by measurement (docs/performance/experts.md)."""
    if form in (2, 3):
        return OneConfig(4, min(1024, max(32, padded(inputs))), 4)
    return OneConfig(4 if padded(inputs) == inputs else 2, min(2048, max(32, padded(inputs))), 4)


@functools.cache
def down_config(inputs: int, form: int, shared: bool) -> OneConfig:
    """The block for `_down_kernel`, by measurement (docs/performance/experts.md)."""
    if form in (2, 3):
        return OneConfig(2, min(512, max(32, padded(inputs))), 4)
    return OneConfig(4, min(256, max(32, padded(inputs))), 8 if shared and form == DENSE.value else 4)


def one_token(
    x_1D: torch.Tensor,
    routes: Routes,
    experts: ExpertWeights,
    out_1D: torch.Tensor,
    shared: Shared | None = None,
    *,
    add: bool,
    configs: tuple[OneConfig, OneConfig] | None = None,
) -> torch.Tensor:
    """The experts of one token, and `shared`, which is stored as they are (`moe_joint.joins`)."""
    gate_up, down, activation, gate_up_bias, down_bias, weigh_inputs = experts
    _, features, inner = down.shape
    active = routes.experts_TA.shape[1]
    chosen = routes.experts_TA, routes.weights_TA
    wide = 0 if shared is None else shared.down_DS.shape[1]
    inner_X = x_1D.new_empty(active * inner + wide)
    (*tensors, _, _), form = stored_args(gate_up, x_1D.dtype)
    (*beside, _, _), own = stored_args(gate_up if shared is None else shared.gate_up_2SD, x_1D.dtype)
    config = configs[0] if configs else up_config(features, form["FORM"])
    programs, rows = blocks(inner, config.rows), max(1, config.rows // 2)  # so few stay in registers until the wait
    _up_kernel[(programs, blocks(wide, programs * rows) + active)](
        x_1D, *chosen, *tensors, *beside, x_1D if gate_up_bias is None else gate_up_bias, inner_X, activation.limit, A=active,
        N=inner, K=features, BN=config.rows, BK=config.inputs, SHARED=wide, SN=rows, SG=own["G"], BIAS=gate_up_bias is not None,
        KIND=kind_of(activation), WEIGH=weigh_inputs, num_warps=config.warps, **form, **dependent(x_1D.device),
    )  # fmt: skip
    (*tensors, _, _), form = stored_args(down, x_1D.dtype)
    (*beside, _, _), own = stored_args(down if shared is None else shared.down_DS, x_1D.dtype)
    config = configs[1] if configs else down_config(inner, form["FORM"], shared is not None)
    _down_kernel[(blocks(features, config.rows),)](
        inner_X, *chosen, *tensors, *beside, x_1D if down_bias is None else down_bias, out_1D, A=active, BA=padded(active),
        N=features, K=inner, BN=config.rows, BK=config.inputs, SHARED=wide, SG=own["G"], SBK=8 * config.inputs,
        BIAS=down_bias is not None, WEIGH=not weigh_inputs, ADD=add, num_warps=config.warps, **form, **dependent(x_1D.device),
    )  # fmt: skip
    return out_1D
