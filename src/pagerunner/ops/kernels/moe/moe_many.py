"""Experts' products of many tokens; see `ops/moe.py`. As many programs as there are multiprocessors walk through all tiles.

Tiles go expert by expert, and within an expert from one block of pairs to the next, so that neighbouring tiles share weights. Weights
travel by bulk copies (the "tensor memory accelerator" of Hopper), and so do the rows of the second product, which stand in expert order.

Matrices of 8-bit floats can be multiplied as they are, with inputs that are rounded to 8 bits, too (`ops/quantize.py`). Other stored matrices
are unpacked before (`kernels/moe/moe_unpacked.py`). Shape letters as in `ops/moe.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from pagerunner.ops import numerics
from pagerunner.ops.activation import GatedActivation
from pagerunner.ops.kernels.activation import CLAMPED_SWIGLU
from pagerunner.ops.kernels.codes import DENSE, E4M3
from pagerunner.ops.kernels.launch import (
    dependent,
    has_dependent_launch,
    multiprocessors,
    padded,
    start_next,
    wait_turn,
)
from pagerunner.ops.kernels.moe.moe_tiles import finish, kind_of
from pagerunner.ops.quantize import Quantized
from pagerunner.ops.routing import Routes
from pagerunner.ops.stored import Stored8


@triton.jit
def _step_scales(place, live, THERE: tl.constexpr, ONE: tl.constexpr):
    """A step's scales of rows of inputs or weights, or the one of all; 1 if steps have none."""
    scales = 1.0
    if THERE:
        scales = tl.load(place) if ONE else tl.load(place, mask=live, other=0.0)
    return scales


@triton.jit
def _add_dot(acc, x, w, x_scales, w_scales, STEPS: tl.constexpr, GROUPED: tl.constexpr, ONE: tl.constexpr):
    """`acc` and the product of a step, times the step's scales where there are such. ONE: all rows of weights share theirs."""
    if STEPS or GROUPED:
        product = tl.dot(x, w.T)
        if STEPS and not ONE:
            product *= w_scales[None, :]
        if GROUPED and STEPS and ONE:
            product *= (x_scales * w_scales)[:, None]
        elif GROUPED:
            product *= x_scales[:, None]
        elif STEPS and ONE:
            product *= w_scales
        acc += product
    else:
        acc = tl.dot(x, w.T, acc, input_precision="ieee")
    return acc


@triton.jit
def _scaled(acc, x_scales, w_scales, live, STEPS: tl.constexpr, GROUPED: tl.constexpr):
    """`acc` times the scales of whole rows."""
    if not STEPS:
        acc *= tl.load(w_scales, mask=live, other=0.0)[None, :]
    if not GROUPED:
        acc *= tl.load(x_scales)[:, None]
    return acc


@triton.jit
def _tile(x_ptr, x_rows, w_matrix, s_ptr, xs_ptr, bias_ptr, weights_ptr, order_ptr, out_ptr, expert, first_row, end,
          first_feature, active, limit, x_column, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
          BK: tl.constexpr, FORM: tl.constexpr, BO: tl.constexpr, STEPS: tl.constexpr, GROUPED: tl.constexpr,
          BIAS: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, WEIGH: tl.constexpr):  # fmt: skip
    """BM pairs of an expert, before row `end`, times BN of its features. See `_many_kernel`."""
    both: tl.constexpr = 2 if GATED else 1
    turns: tl.constexpr = 2 if GATED and not (STEPS or GROUPED) else 1
    wide: tl.constexpr = turns * BN
    step: tl.constexpr = 2 if KIND == CLAMPED_SWIGLU else 1
    ups: tl.constexpr = 1 if KIND == CLAMPED_SWIGLU else N
    scale_rows: tl.constexpr = (both * N + BO - 1) // BO
    columns: tl.constexpr = (K + 127) // 128 if STEPS else 1  # of the weights' scales
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    rows = first_row + tl.arange(0, BM)
    valid = rows < end
    pairs = tl.load(order_ptr + rows, mask=valid, other=0)
    source = (pairs // active if GATED else tl.where(valid, rows, 0)).to(tl.int64)
    s_columns = tl.arange(0, wide)
    s_features = first_feature + s_columns // turns
    s_rows = (s_features * step if GATED else s_features) + s_columns % turns * ups
    s_place = s_ptr + (expert * scale_rows + s_rows // BO) * columns
    up_s_place = s_ptr + (expert * scale_rows + (s_rows + ups) // BO) * columns
    s_live = s_features < N
    ONE: tl.constexpr = STEPS and BO % BN == 0 and (not GATED or KIND != CLAMPED_SWIGLU and N % BO == 0)
    if ONE:
        s_place = s_ptr + (expert * scale_rows + first_feature // BO) * columns
        up_s_place = s_ptr + (expert * scale_rows + (first_feature + ups) // BO) * columns
    xs_place = xs_ptr + source
    x_scales = _step_scales(xs_place, valid, GROUPED, True)
    w_scales = _step_scales(s_place, s_live, STEPS, ONE)
    up_scales = _step_scales(up_s_place, s_live, STEPS and GATED, ONE)
    w_row = expert * (both * N // step) + first_feature
    acc = tl.zeros((BM, wide), tl.float32)
    up = acc
    for first in range(0, K, BK):
        if turns == 2:
            w = tl.reshape(w_matrix.load([expert, first_feature, 0, first]), [wide, BK])
        else:
            w = w_matrix.load([w_row, first])
        if GATED:  # zeros cost the matrix units less power than numbers that nobody reads
            x_place = x_ptr + source[:, None] * K + (first + tl.arange(0, BK))[None, :]
            x = tl.load(x_place, mask=valid[:, None], other=0.0)
        else:
            x = x_rows.load([first_row, first])
        x_now, w_now, up_now = x_scales, w_scales, up_scales
        ahead = tl.minimum(first // 128 + 1, (K - 1) // 128)  # the next step's are on their way during this one
        x_scales = _step_scales(xs_place + ahead * x_column.to(tl.int64), valid, GROUPED, True)
        w_scales = _step_scales(s_place + ahead, s_live, STEPS, ONE)
        up_scales = _step_scales(up_s_place + ahead, s_live, STEPS and GATED, ONE)
        acc = _add_dot(acc, x, w, x_now, w_now, STEPS, GROUPED, ONE)
        if GATED and turns == 1:
            more = w_matrix.load([w_row + N, first] if step == 1 else [w_row, K + first])
            up = _add_dot(up, x, more, x_now, up_now, STEPS, GROUPED, ONE)
    if FORM == E4M3:
        acc = _scaled(acc, xs_place, s_place, s_live, STEPS, GROUPED)
        if GATED and turns == 1:
            up = _scaled(up, xs_place, up_s_place, s_live, STEPS, GROUPED)
    if turns == 2:
        acc, up = tl.split(tl.reshape(acc, [BM, BN, 2]))
    features = first_feature + tl.arange(0, BN)
    live = features < N
    y = finish(acc, up, bias_ptr + expert * both * N, weights_ptr, pairs, valid, features * step if GATED else features, live,
               ups, limit, dtype, BIAS, GATED, KIND, WEIGH)  # fmt: skip
    target = (rows if GATED else pairs).to(tl.int64)
    tl.store(out_ptr + target[:, None] * N + features[None, :], y, mask=valid[:, None] & live[None, :])


@triton.jit(do_not_specialize=["active", "programs", "x_column"])
def _many_kernel(x_ptr, x_rows, x_half, w_matrix, s_ptr, xs_ptr, bias_ptr, weights_ptr, order_ptr, starts_ptr, out_ptr, active,
                 programs, limit, x_column, E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BE: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr, BO: tl.constexpr,
                 STEPS: tl.constexpr, GROUPED: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr,
                 WEIGH: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Tiles of BM pairs of an expert times BN of its N features, as in `kernels/moe/moe.py`. HALF: half as many pairs where there are no more.

    `w_matrix` has gates and ups as [E, N, 2, K], so that a step's tile has them in turns and is one product; other weights as a plain matrix.
    STEPS: scales of BO rows and 128 columns of the weights, else of rows. GROUPED: scales of 128 features of the inputs, else of rows.
    With either, products of steps are scaled before they are added up. They need registers, so gates and ups are two products of a plain
    matrix: all gates of an expert come before all its ups, or a row is a gate and its up.
    """
    wait_turn(PDL)
    start_next(PDL)
    blocks_N: tl.constexpr = (N + BN - 1) // BN
    experts = tl.arange(0, BE)
    starts = tl.load(starts_ptr + experts, mask=experts < E, other=0)
    ends = tl.load(starts_ptr + 1 + experts, mask=experts < E, other=0)
    tiles = (ends - starts + BM - 1) // BM * blocks_N
    tiles_end = tl.cumsum(tiles, 0)
    counts = tiles.to(tl.int64) + 4294967296  # of an expert and of its tiles, so that one sum finds both
    for tile in range(tl.program_id(0), tl.sum(tiles, 0), programs):
        before = tl.sum(tl.where(tiles_end <= tile, counts, 0), 0)
        expert = (before >> 32).to(tl.int32)
        place = tile - before.to(tl.int32)
        start, end = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
        high = (end - start + BM - 1) // BM
        first_row = start + place % high * BM
        first_feature = place // high * BN
        if HALF and end - first_row <= BM // 2:
            _tile(x_ptr, x_half, w_matrix, s_ptr, xs_ptr, bias_ptr, weights_ptr, order_ptr, out_ptr, expert, first_row, end,
                  first_feature, active, limit, x_column, N, K, BM // 2, BN, BK, FORM, BO, STEPS, GROUPED, BIAS, GATED, KIND,
                  WEIGH)  # fmt: skip
        else:
            _tile(x_ptr, x_rows, w_matrix, s_ptr, xs_ptr, bias_ptr, weights_ptr, order_ptr, out_ptr, expert, first_row, end,
                  first_feature, active, limit, x_column, N, K, BM, BN, BK, FORM, BO, STEPS, GROUPED, BIAS, GATED, KIND,
                  WEIGH)  # fmt: skip


class ManyConfig(NamedTuple):
    """A tile: pairs, output features (as many gates as ups count once), inputs, its warps, how many blocks are in flight, and
    programs on a multiprocessor.
    """

    pairs: int
    features: int
    inputs: int
    warps: int
    stages: int
    programs: int


def many_config(pairs: int, experts: int, inputs: int, rounded: bool, gated: bool, blocks: bool = False) -> ManyConfig:
    """The tile by measurement (docs/performance/experts.md). `blocks`: weights of 8 bits of which a step of a tile has one scale."""
    if blocks:
        return ManyConfig(64, 128, 128, 8, 3, 1 if gated else 2)
    if pairs <= numerics.FAST.experts.many * experts:
        if rounded:
            return ManyConfig(64, 128, 128, 4, 3, 1)
        return ManyConfig(64, 128, 64, 8, 4, 1) if gated else ManyConfig(64, 128, 64, 4, 3, 2)
    if rounded:
        return ManyConfig(128, 128 if gated else 256, 128, 8, 3, 1)
    if gated:
        return ManyConfig(128, 128, 64, 8, 4, 1)
    return ManyConfig(128, 128, 64, 8, 3, 2) if inputs < 1024 else ManyConfig(128, 256, 64, 8, 3, 1)


def fits(x: torch.Tensor, weights: torch.Tensor | Stored8) -> bool:
    """Whether the kernel serves such weights here: dense halves or 8-bit floats, in rows of whole blocks, where there are bulk copies."""
    inputs = weights.shape[-1]
    if isinstance(weights, torch.Tensor):
        return weights.dtype == x.dtype and fits_dense(x, inputs) and weights.is_contiguous()
    if x.device.type == "cuda" and not has_dependent_launch(x.device):
        return False
    return weights.codes.dtype == torch.float8_e4m3fn and inputs % 128 == 0 and weights.codes.is_contiguous()


def fits_dense(x: torch.Tensor, inputs: int) -> bool:
    """Whether the kernel serves dense halves in rows of so many inputs here."""
    has_copies = x.device.type != "cuda" or has_dependent_launch(x.device)
    return has_copies and x.dtype.itemsize == 2 and inputs % 64 == 0


def many_product(
    x: torch.Tensor | Quantized,
    weights: torch.Tensor | Stored8,
    bias_EO: torch.Tensor | None,
    routes: Routes,
    activation: GatedActivation | None,
    *,
    weigh: bool,
    dtype: torch.dtype | None = None,
    config: ManyConfig | None = None,
    out: torch.Tensor | None = None,
    registers: int | None = None,
) -> torch.Tensor:
    """The first product if there is an activation, [P, I] in expert order; else the second one, [P, D] in the tokens' order.

    `dtype` is that of the result if it isn't the input's. `out` is where it is written if there is such a tensor. The routes may be those of
    some of the experts: then `starts_E1` are where their pairs begin, and other pairs stay as they are.
    """
    assert routes.order_P is not None and routes.starts_E1 is not None, "the pairs have no order"
    experts, outputs, inputs = weights.shape
    features = outputs if activation is None else outputs // 2
    pairs, active = routes.order_P.shape[0], routes.experts_TA.shape[1]
    rounded = isinstance(x, Quantized)
    in_blocks = isinstance(weights, Stored8) and weights.block == (128, 128)
    in_blocks &= activation is None or not activation.alternating and features % 128 == 0
    config = config or many_config(routes.expected, experts, inputs, rounded, activation is not None, in_blocks)
    codes = weights if isinstance(weights, torch.Tensor) else weights.codes
    numbers = x.codes if isinstance(x, Quantized) else x
    if out is None:
        out = torch.empty(pairs, features, dtype=dtype or numbers.dtype, device=numbers.device)
    own: dict[str, Any] = {"FORM": DENSE.value, "BO": 1, "STEPS": False, "GROUPED": False}
    scales = x_scales = routes.weights_TA
    if isinstance(weights, Stored8) and isinstance(x, Quantized):
        scales, x_scales = weights.scales, x.scales
        steps = weights.block[1] < inputs
        own = {"FORM": E4M3.value, "BO": weights.block[0], "STEPS": steps, "GROUPED": x.scales.shape[1] > 1}
    by_steps = own["STEPS"] or own["GROUPED"]
    width = min(config.features, 128 if by_steps else 256, max(16, padded(features)))
    in_turns = activation is not None and not by_steps
    w_matrix = _matrix(codes, activation, width, config.inputs, in_turns=in_turns)
    half = activation is None and config.pairs >= 128
    rows, x_half = (
        numbers if activation is not None else TensorDescriptor.from_tensor(numbers, [high, config.inputs])
        for high in (config.pairs, config.pairs // 2 if half else config.pairs)
    )
    programs = multiprocessors(numbers.device) * config.programs
    _many_kernel[(programs,)](
        numbers, rows, x_half, w_matrix, scales, x_scales,
        routes.weights_TA if bias_EO is None else bias_EO, routes.weights_TA, routes.order_P, routes.starts_E1, out, active,
        programs, 0.0 if activation is None else activation.limit, x_scales.stride(1), E=experts, N=features, K=inputs,
        BE=padded(experts), BM=config.pairs, BN=width, BK=config.inputs, BIAS=bias_EO is not None, GATED=activation is not None,
        KIND=kind_of(activation), WEIGH=weigh, HALF=half, num_warps=config.warps, num_stages=config.stages, maxnreg=registers, **own,
        **dependent(numbers.device),
    )  # fmt: skip
    return out


def _matrix(
    weights_EOI: torch.Tensor, activation: GatedActivation | None, features: int, inputs: int, *, in_turns: bool
) -> TensorDescriptor:
    """Bulk copies of so many features and inputs of an expert: of gates and ups in turns, or of one kind of features."""
    alternating, row = activation is not None and activation.alternating, weights_EOI.shape[2]
    if not in_turns:  # copies in two dimensions are faster than others (docs/performance/experts.md)
        return TensorDescriptor.from_tensor(weights_EOI.view(-1, 2 * row if alternating else row), [features, inputs])
    weights = weights_EOI.unflatten(1, (-1, 2)) if alternating else weights_EOI.unflatten(1, (2, -1)).transpose(1, 2)
    return TensorDescriptor(weights, list(weights.shape), list(weights.stride()), [1, features, 2, inputs])
