"""Experts' products with 4-bit weights of few to some dozens of pairs of an expert; see `ops/moe.py` and `kernels/operands.py`.

Weights are the first operand, so a tile has 64 rows of weights or more, and 16 pairs or more. Codes become numbers in the registers
from which the matrix units take them. The first product's tiles have gates and ups in neighbouring registers of a thread, and write their
results in the order that the second product reads.

Shape letters as in `ops/moe.py`; N rows of a tile, M its pairs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pagerunner.ops.activation import GatedActivation
from pagerunner.ops.kernels.activation import CLAMPED_SWIGLU
from pagerunner.ops.kernels.codes import E2M1, GROUP_SCALES, INT4, ROW_SCALES, STEP_SCALES, spread, uses_words
from pagerunner.ops.kernels.launch import blocks, dependent, has_dependent_launch, padded, start_next_and_wait
from pagerunner.ops.kernels.moe.moe_joint import most_tiles
from pagerunner.ops.kernels.moe.moe_tiles import find_tile, finish, kind_of, stored_args
from pagerunner.ops.kernels.operands import (
    PIECE,
    arranged,
    column_at,
    ended,
    lifted_scales,
    must_end,
    nibbles_numbers,
    operand,
    raised,
    row_places,
)
from pagerunner.ops.kernels.stored import HELD_BY, scale_numbers
from pagerunner.ops.routing import Routes
from pagerunner.ops.stored import Stored4


@triton.jit
def _rows_of(first, local, ups, GATED: tl.constexpr, KIND: tl.constexpr):
    """Features and rows of weights of a tile's rows `local`. Of 16 rows of the first product's, 8 are gates and 8 their ups, by places."""
    if GATED:
        features = column_at(first + local // 16 * 8 + local % 8)
        rows = features * (2 if KIND == CLAMPED_SWIGLU else 1) + local // 8 % 2 * ups
    else:
        features = first + local
        rows = features
    return features, rows


@triton.jit
def _group_values(place, live, first, HIGH: tl.constexpr, K: tl.constexpr, G: tl.constexpr):
    """Scales or zero points [N, 4] of the low or the high nibbles of four runs, from column `first` on."""
    runs = first // 32 + tl.arange(0, 4)
    groups = runs * 2 + (1 if HIGH else 0) if G == 16 else runs // (G // 32)
    return tl.load(place[:, None] + groups[None, :], mask=live[:, None] & (runs * 32 < K)[None, :], other=0.0)


@triton.jit
def _finished(numbers, scales, zeros, dtype: tl.constexpr, FORM: tl.constexpr, ZEROS: tl.constexpr, SCALES: tl.constexpr,
              RAISED: tl.constexpr):  # fmt: skip
    """Numbers of one nibble of each byte without their zero points, and with scales if these are those of groups."""
    if FORM == INT4:
        if ZEROS:
            numbers -= spread((zeros.to(tl.float32) + 128.0).to(dtype), 16)
        else:
            numbers -= tl.full((1, 1), 136.0, dtype)
    if SCALES == GROUP_SCALES:
        numbers *= spread(lifted_scales(scales, dtype, RAISED), 16)
    return numbers


@triton.jit
def _add(acc, x_place, low, high, step_scales, SCALES: tl.constexpr, WARPS: tl.constexpr, JOINT: tl.constexpr):
    """`acc` and the products of a step, both halves as one if JOINT; these times the step's scales where there are such."""
    low, high = operand(low, WARPS), operand(high, WARPS)
    product = tl.zeros(acc.shape, tl.float32) if SCALES == STEP_SCALES else acc
    if JOINT:
        both = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [low.shape[0], 128])
        product = tl.dot(both, tl.load(x_place), product, input_precision="ieee")
    else:
        product = tl.dot(low, tl.load(x_place), product, input_precision="ieee")
        product = tl.dot(high, tl.load(x_place + 64), product, input_precision="ieee")
    if SCALES == STEP_SCALES:
        product = acc + product * scale_numbers(step_scales)[:, None]
    return product


@triton.jit
def _sums(x_place, w_ptr, s_ptr, z_ptr, rows, live, final_rows, final_live, columns, K: tl.constexpr, G: tl.constexpr,
          FORM: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, RAISED: tl.constexpr, WARPS: tl.constexpr,
          JOINT: tl.constexpr, WAIT: tl.constexpr):  # fmt: skip
    """Rows of words of 4-bit codes times inputs, float32 [N, M]. Scales of the next step are read during this one.

    `rows` and `live` (whether there is such a row) are those of loaded rows, the others those of the result's. A row has `columns` scales.
    """
    at = tl.arange(0, 16)
    w_place = w_ptr + rows[:, None].to(tl.int64) * (K // 8) + at[None, :]
    s_place, z_place = s_ptr + rows.to(tl.int64) * columns, z_ptr + rows.to(tl.int64) * columns
    final_place = s_ptr + final_rows.to(tl.int64) * columns
    acc = tl.zeros((rows.shape[0], x_place.shape[1]), tl.float32)
    dtype: tl.constexpr = x_place.dtype.element_ty
    scales = _group_values(s_place, live, 0, False, K, G) if SCALES == GROUP_SCALES else 0
    more_scales = _group_values(s_place, live, 0, True, K, G) if SCALES == GROUP_SCALES and G < 32 else scales
    zeros = _group_values(z_place, live, 0, False, K, G) if ZEROS else 0
    more_zeros = _group_values(z_place, live, 0, True, K, G) if ZEROS and G < 32 else zeros
    step_scales = tl.load(final_place, mask=final_live, other=0.0) if SCALES == STEP_SCALES else 0
    for first in range(0, K, 128):
        codes = tl.load(w_place + first // 8, mask=live[:, None] & (at < (K - first) // 8)[None, :], other=0)
        now, more_now, zeros_now, more_zeros_now, step_now = scales, more_scales, zeros, more_zeros, step_scales
        ahead = first + 128
        if SCALES == GROUP_SCALES:
            scales = _group_values(s_place, live, ahead, False, K, G)
            more_scales = _group_values(s_place, live, ahead, True, K, G) if G < 32 else scales
        if ZEROS:
            zeros = _group_values(z_place, live, ahead, False, K, G)
            more_zeros = _group_values(z_place, live, ahead, True, K, G) if G < 32 else zeros
        if SCALES == STEP_SCALES:
            step_scales = tl.load(final_place + ahead // G, mask=final_live & (ahead < K), other=0.0)
        low, high = nibbles_numbers(codes, dtype, FORM)
        low = _finished(low, now, zeros_now, dtype, FORM, ZEROS, SCALES, RAISED)
        high = _finished(high, more_now, more_zeros_now, dtype, FORM, ZEROS, SCALES, RAISED)
        acc = _add(acc, x_place + first, low, high, step_now, SCALES, WARPS, JOINT)
        if WAIT:
            acc = ended(acc)
    return acc


@triton.jit
def _whole_factors(acc, s_ptr, r_ptr, rows, live, SCALES: tl.constexpr, FACTORS: tl.constexpr, RAISED: tl.constexpr):
    """`acc` [N, M] times what multiplies whole rows."""
    if SCALES == ROW_SCALES:
        acc *= scale_numbers(tl.load(s_ptr + rows, mask=live, other=0.0))[:, None]
    if SCALES != GROUP_SCALES and RAISED:
        power: tl.constexpr = 2.0**RAISED
        acc *= power
    if FACTORS:
        acc *= tl.load(r_ptr + rows, mask=live, other=0.0)[:, None]
    return acc


@triton.jit
def _gates_and_ups(acc):
    """The gates [M, N / 2] of a tile [N, M], and its ups."""
    both = tl.permute(tl.reshape(acc, [acc.shape[0] // 16, 2, 8, acc.shape[1]]), (0, 2, 3, 1))
    gate, up = tl.split(both)
    shape: tl.constexpr = [acc.shape[0] // 2, acc.shape[1]]
    return tl.trans(tl.reshape(gate, shape)), tl.trans(tl.reshape(up, shape))


@triton.jit(do_not_specialize=["active", "columns"])
def _codes_kernel(x_ptr, w_ptr, s_ptr, z_ptr, r_ptr, w_expert, s_expert, columns, bias_ptr, weights_ptr, order_ptr, starts_ptr,
                  out_ptr, active, limit, E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr,
                  OUT: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FORM: tl.constexpr,
                  G: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, FACTORS: tl.constexpr,
                  RAISED: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr,
                  WEIGH: tl.constexpr, LIFT: tl.constexpr, WARPS: tl.constexpr, JOINT: tl.constexpr,
                  WAIT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BN rows of weights times BM pairs of one expert, whose inputs are arranged. A row of weights has `columns` scales.

    The first product (GATED) reads tokens' rows and stores what the activation makes of BN / 2 gates and ups, in expert order and arranged.
    The second product reads these rows and stores pairs in the tokens' order. Rows of inputs have WIDE places, those of the result OUT.
    """
    start_next_and_wait(PDL)
    step: tl.constexpr = 2 if KIND == CLAMPED_SWIGLU else 1
    ups: tl.constexpr = 1 if KIND == CLAMPED_SWIGLU else N
    outputs: tl.constexpr = 2 * N if GATED else N
    WIDTH: tl.constexpr = BN // 2 if GATED else BN
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    expert, first_row, last_row = find_tile(starts_ptr, tl.program_id(0), E, BE, BM)
    if expert < E:
        pair_rows = first_row + tl.arange(0, BM)
        valid = pair_rows < last_row
        pairs = tl.load(order_ptr + pair_rows, mask=valid, other=0)
        source = (pairs // active if GATED else tl.where(valid, pair_rows, 0)).to(tl.int64)
        first = tl.program_id(1) * WIDTH
        features, rows = _rows_of(first, row_places(BN, WARPS), ups, GATED, KIND)
        live = features < N
        features, final_rows = _rows_of(first, tl.arange(0, BN), ups, GATED, KIND)
        final_live = features < N
        wide = expert.to(tl.int64)
        w, s, z = w_ptr + wide * w_expert, s_ptr + wide * s_expert, z_ptr + wide * s_expert
        x_place = x_ptr + source[None, :] * WIDE + tl.arange(0, 128 if JOINT else 64)[:, None]
        acc = _sums(x_place, w, s, z, rows, live, final_rows, final_live, columns, K, G, FORM, SCALES, ZEROS, RAISED, WARPS,
                    JOINT, WAIT)  # fmt: skip
        acc = _whole_factors(acc, s, r_ptr + expert * outputs, final_rows, final_live, SCALES, FACTORS, RAISED)
        places = first + tl.arange(0, WIDTH)
        if GATED:
            gate, up = _gates_and_ups(acc)
            features = column_at(places)
        else:
            gate, up = tl.trans(acc), tl.trans(acc)
            features = places
        y = finish(gate, up, bias_ptr + expert * outputs, weights_ptr, pairs, valid, features * step if GATED else features,
                   features < N, ups, limit, dtype, BIAS, GATED, KIND, WEIGH)  # fmt: skip
        if LIFT:
            lift: tl.constexpr = 2.0**LIFT
            y = (y.to(tl.float32) * lift).to(dtype)
        target = (pair_rows if GATED else pairs).to(tl.int64)
        tl.store(out_ptr + target[:, None] * OUT + places[None, :], y, mask=valid[:, None] & (places < OUT)[None, :])


class CodesConfig(NamedTuple):
    """A tile: pairs, rows of weights, its warps, how many blocks of 128 columns are in flight, and whether a block is one product or two.

    One product for the high and one for the low nibbles let the second half's numbers be made beside the first half's product. One product for
    both is waited for once. It is faster where tiles are full (docs/performance/experts.md).
    """

    pairs: int
    rows: int
    warps: int
    stages: int
    joint: bool = False


def codes_config(pairs: int, experts: int, form: int) -> CodesConfig:
    """The tile for so many pairs and codes of this format, by measurement (docs/performance/experts.md)."""
    each = pairs / experts
    if each <= 10:
        return CodesConfig(16, 128, 8, 4)
    if (
        form == E2M1.value and each <= 96
    ):  # where other choices change, too: the warm-up needs no further number of tokens
        return CodesConfig(32, 128, 8, 4, joint=True)
    return CodesConfig(32, 128, 8, 4) if each <= 36 else CodesConfig(64, 256, 8, 3)


def reads_codes(x: torch.Tensor, weights: Stored4) -> bool:
    """Whether these kernels serve such weights here: with activations in bfloat16, on Hopper."""
    if x.device.type == "cuda" and not (has_dependent_launch(x.device) and uses_words(x.dtype)):
        return False
    inside = weights.group % PIECE and weights.group < weights.shape[-1]
    return not inside or _held(weights, x.dtype)


class CodesProduct(NamedTuple):
    """What one of the two products takes: the weights, their bias [E, O], and their kernel's constants."""

    tensors: tuple[Any, ...]
    constants: dict[str, Any]
    bias_EO: torch.Tensor | None
    shape: tuple[int, ...]

    @classmethod
    def of(cls, weights: Stored4, bias_EO: torch.Tensor | None, dtype: torch.dtype) -> CodesProduct:
        """For activations of this dtype."""
        (codes, *tensors, w_expert, s_expert), constants = stored_args(weights, dtype)
        del constants["WORDS"], constants["BO"]
        inputs = weights.shape[-1]
        if constants["SCALES"] == STEP_SCALES.value and _held(weights, dtype):
            constants["SCALES"] = GROUP_SCALES.value
        constants["RAISED"] = raised(constants["FORM"])
        own = codes.view(torch.uint32), *tensors, w_expert // 4, s_expert, blocks(inputs, constants["G"])
        return cls(own, constants, bias_EO, weights.shape)


def _held(weights: Stored4, dtype: torch.dtype) -> bool:
    """Whether every scale of these 4-bit codes is a number of `dtype`, so that numbers times scales are rounded once."""
    return dtype == torch.float32 or weights.scales.dtype in HELD_BY.get(dtype, ())


def codes_products(
    x_TD: torch.Tensor,
    gate_up: CodesProduct,
    down: CodesProduct,
    routes: Routes,
    activation: GatedActivation,
    *,
    weigh_inputs: bool,
    configs: tuple[CodesConfig, CodesConfig] | None = None,
) -> torch.Tensor:
    """Both products, [P, D] in the tokens' order."""
    assert routes.order_P is not None and routes.starts_E1 is not None, "the pairs have no order"
    experts, features, inner = down.shape
    pairs, active = routes.order_P.shape[0], routes.experts_TA.shape[1]
    first, second = configs or (
        codes_config(routes.expected, experts, gate_up.constants["FORM"]),
        codes_config(routes.expected, experts, down.constants["FORM"]),
    )
    inner_PI = x_TD.new_empty(pairs, blocks(inner, PIECE) * PIECE)
    out_PD = x_TD.new_empty(pairs, features)
    x_TD = arranged(x_TD, gate_up.constants["FORM"])
    common = {"E": experts, "BE": padded(experts), "WAIT": must_end()} | dependent(x_TD.device)
    chosen = routes.weights_TA, routes.order_P, routes.starts_E1
    bias = x_TD if gate_up.bias_EO is None else gate_up.bias_EO
    _codes_kernel[(most_tiles(pairs, experts, first.pairs), blocks(inner_PI.shape[1], first.rows // 2))](
        x_TD, *gate_up.tensors, bias, *chosen, inner_PI, active, activation.limit, N=inner, K=features, BM=first.pairs,
        BN=first.rows, BIAS=gate_up.bias_EO is not None, GATED=True, KIND=kind_of(activation), WEIGH=weigh_inputs,
        WIDE=x_TD.shape[1], OUT=inner_PI.shape[1], LIFT=down.constants["RAISED"], WARPS=first.warps, num_warps=first.warps, num_stages=first.stages, JOINT=first.joint,
        **gate_up.constants, **common,
    )  # fmt: skip
    bias = x_TD if down.bias_EO is None else down.bias_EO
    _codes_kernel[(most_tiles(pairs, experts, second.pairs), blocks(features, second.rows))](
        inner_PI, *down.tensors, bias, *chosen, out_PD, active, 0.0, N=features, K=inner, BM=second.pairs, BN=second.rows,
        BIAS=down.bias_EO is not None, GATED=False, KIND=0, WEIGH=not weigh_inputs, WIDE=inner_PI.shape[1], OUT=features, LIFT=0, WARPS=second.warps,
        num_warps=second.warps, num_stages=second.stages, JOINT=second.joint, **down.constants, **common,
    )  # fmt: skip
    return out_PD
