"""Experts' products of many tokens; see `ops/moe.py`. As many programs as there are multiprocessors walk through all tiles.

Tiles go expert by expert, and within an expert from one block of pairs to the next, so that neighbouring tiles share weights. Weights
travel by bulk copies (the "tensor memory accelerator" of Hopper), and so do the rows of the second product, which stand in expert order.

Matrices of 8-bit floats can be multiplied as they are, with inputs that are rounded to 8 bits, too (`ops/quantize.py`). Other stored matrices
are unpacked before. Shape letters as in `ops/moe.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from pagerunner.ops.activation import GatedActivation
from pagerunner.ops.kernels.activation import CLAMPED_SWIGLU
from pagerunner.ops.kernels.codes import DENSE, E4M3
from pagerunner.ops.kernels.launch import dependent, has_dependent_launch, multiprocessors, padded
from pagerunner.ops.kernels.moe_tiles import finish, kind_of
from pagerunner.ops.kernels.stored import unpack
from pagerunner.ops.quantize import Quantized
from pagerunner.ops.routing import Routes
from pagerunner.ops.stored import Stored, Stored8
from pagerunner.ops.unpacked import EXPERTS_BYTES, experts_at_once


@triton.jit
def _add_dot(acc, x, w, x_scales, w_scales, live, STEPS: tl.constexpr, GROUPED: tl.constexpr):
    """`acc` and the product of a step, times the step's scales where there are such."""
    if STEPS or GROUPED:
        product = tl.dot(x, w.T)
        if STEPS:
            product *= tl.load(w_scales, mask=live, other=0.0)[None, :]
        if GROUPED:
            product *= tl.load(x_scales)[:, None]
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


@triton.jit(do_not_specialize=["active", "programs", "x_column"])
def _many_kernel(x_ptr, x_rows, w_matrix, s_ptr, xs_ptr, bias_ptr, weights_ptr, order_ptr, starts_ptr, out_ptr, active, programs,
                 limit, x_column, E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
                 BN: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr, BO: tl.constexpr, STEPS: tl.constexpr,
                 GROUPED: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr,
                 WEIGH: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Tiles of BM pairs of an expert times BN of its N features, as in `kernels/moe.py`.

    STEPS: scales of BO rows and 128 columns of the weights, else of rows. GROUPED: scales of 128 features of the inputs, else of rows.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # all gates come before all ups; otherwise a row of `w_matrix` is a gate and its up
    apart: tl.constexpr = GATED and KIND != 2
    outputs: tl.constexpr = 2 * N if GATED else N
    step: tl.constexpr = 2 if KIND == CLAMPED_SWIGLU else 1
    ups: tl.constexpr = 1 if KIND == CLAMPED_SWIGLU else N
    blocks_N: tl.constexpr = (N + BN - 1) // BN
    scale_rows: tl.constexpr = (outputs + BO - 1) // BO
    columns: tl.constexpr = (K + 127) // 128 if STEPS else 1  # of the weights' scales
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    experts = tl.arange(0, BE)
    starts = tl.load(starts_ptr + experts, mask=experts < E, other=0)
    ends = tl.load(starts_ptr + 1 + experts, mask=experts < E, other=0)
    tiles = (ends - starts + BM - 1) // BM * blocks_N
    tiles_end = tl.cumsum(tiles, 0)
    for tile in range(tl.program_id(0), tl.sum(tiles, 0), programs):
        expert = tl.sum(((tiles_end <= tile) & (experts < E)).to(tl.int32), 0)
        own = experts == expert
        high = tl.sum(tl.where(own, tiles, 0), 0) // blocks_N
        place = tile - tl.sum(tl.where(own, tiles_end - tiles, 0), 0)
        first_row = tl.sum(tl.where(own, starts, 0), 0) + place % high * BM
        first_feature = place // high * BN
        rows = first_row + tl.arange(0, BM)
        valid = rows < tl.sum(tl.where(own, ends, 0), 0)
        pairs = tl.load(order_ptr + rows, mask=valid, other=0)
        source = (pairs // active if GATED else tl.where(valid, rows, 0)).to(tl.int64)
        features = first_feature + tl.arange(0, BN)
        live = features < N
        w_rows = features * step if GATED else features
        s_place = s_ptr + (expert * scale_rows + w_rows // BO) * columns
        up_s_place = s_ptr + (expert * scale_rows + (w_rows + ups) // BO) * columns
        gate_row = expert * (outputs if apart or not GATED else N) + first_feature
        acc = tl.zeros((BM, BN), tl.float32)
        up = acc
        for first in range(0, K, BK):
            gates = w_matrix.load([gate_row, first])
            if GATED:
                more = w_matrix.load([gate_row + N, first] if apart else [gate_row, K + first])
            if GATED:
                x = tl.load(x_ptr + source[:, None] * K + (first + tl.arange(0, BK))[None, :])
            else:
                x = x_rows.load([first_row, first])
            column = first // 128
            x_scales = xs_ptr + source + column * x_column.to(tl.int64)
            acc = _add_dot(acc, x, gates, x_scales, s_place + column, live, STEPS, GROUPED)
            if GATED:
                up = _add_dot(up, x, more, x_scales, up_s_place + column, live, STEPS, GROUPED)
        if FORM == E4M3:
            acc = _scaled(acc, xs_ptr + source, s_place, live, STEPS, GROUPED)
            if GATED:
                up = _scaled(up, xs_ptr + source, up_s_place, live, STEPS, GROUPED)
        y = finish(acc, up, bias_ptr + expert * outputs, weights_ptr, pairs, valid, w_rows, live, ups, limit, dtype,
                   BIAS, GATED, KIND, WEIGH)  # fmt: skip
        target = (rows if GATED else pairs).to(tl.int64)
        tl.store(out_ptr + target[:, None] * N + features[None, :], y, mask=valid[:, None] & live[None, :])


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


def many_config(pairs: int, experts: int, inputs: int, rounded: bool, gated: bool) -> ManyConfig:
    """The tile by measurement (docs/performance.md)."""
    if pairs <= 128 * experts:
        if rounded:
            return ManyConfig(64, 128, 128, 4, 3, 1)
        return ManyConfig(64, 128, 64, 8, 4, 1) if gated else ManyConfig(64, 128, 64, 4, 3, 2)
    if rounded:
        return ManyConfig(128, 128, 128, 8, 3, 1)
    if gated:
        return ManyConfig(128, 128, 64, 8, 4, 1)
    return ManyConfig(128, 128, 64, 8, 3, 2) if inputs < 1024 else ManyConfig(128, 256, 64, 8, 3, 1)


def fits(x: torch.Tensor, weights: torch.Tensor | Stored8) -> bool:
    """Whether the kernel serves such weights here: dense halves or 8-bit floats, in rows of whole blocks, where there are bulk copies."""
    inputs = weights.shape[-1]
    if isinstance(weights, torch.Tensor):
        return weights.dtype == x.dtype and _fits_dense(x, inputs) and weights.is_contiguous()
    if x.device.type == "cuda" and not has_dependent_launch(x.device):
        return False
    return weights.codes.dtype == torch.float8_e4m3fn and inputs % 128 == 0 and weights.codes.is_contiguous()


def _fits_dense(x: torch.Tensor, inputs: int) -> bool:
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
    config = config or many_config(pairs, experts, inputs, rounded, activation is not None)
    codes = weights if isinstance(weights, torch.Tensor) else weights.codes
    inner = (
        codes.view(experts * features, 2 * inputs)
        if activation is not None and activation.alternating
        else codes.view(-1, inputs)
    )
    numbers = x.codes if isinstance(x, Quantized) else x
    if out is None:
        out = torch.empty(pairs, features, dtype=dtype or numbers.dtype, device=numbers.device)
    width = min(config.features, max(16, padded(features)))
    own: dict[str, Any] = {"FORM": DENSE.value, "BO": 1, "STEPS": False, "GROUPED": False}
    scales = x_scales = routes.weights_TA
    if isinstance(weights, Stored8) and isinstance(x, Quantized):
        scales, x_scales = weights.scales, x.scales
        steps = weights.block[1] < inputs
        own = {"FORM": E4M3.value, "BO": weights.block[0], "STEPS": steps, "GROUPED": x.scales.shape[1] > 1}
    rows = numbers if activation is not None else TensorDescriptor.from_tensor(numbers, [config.pairs, config.inputs])
    programs = multiprocessors(numbers.device) * config.programs
    _many_kernel[(programs,)](
        numbers, rows, TensorDescriptor.from_tensor(inner, [width, config.inputs]), scales, x_scales,
        routes.weights_TA if bias_EO is None else bias_EO, routes.weights_TA, routes.order_P, routes.starts_E1, out, active,
        programs, 0.0 if activation is None else activation.limit, x_scales.stride(1), E=experts, N=features, K=inputs,
        BE=padded(experts), BM=config.pairs, BN=width, BK=config.inputs, BIAS=bias_EO is not None, GATED=activation is not None,
        KIND=kind_of(activation), WEIGH=weigh, num_warps=config.warps, num_stages=config.stages, **own,
        **dependent(numbers.device),
    )  # fmt: skip
    return out


def unpacked_product(
    x: torch.Tensor,
    weights: Stored,
    bias_EO: torch.Tensor | None,
    routes: Routes,
    activation: GatedActivation | None,
    *,
    weigh: bool,
) -> torch.Tensor:
    """As `many_product`. The experts' matrices are unpacked before, some of them at a time."""
    assert routes.order_P is not None and routes.starts_E1 is not None, "the pairs have no order"
    experts, outputs, inputs = weights.shape
    pairs, gated = routes.order_P.shape[0], activation is not None
    at_once = experts_at_once(experts, outputs, inputs, x.dtype.itemsize, EXPERTS_BYTES)
    room = torch.empty(at_once * outputs, inputs, dtype=x.dtype, device=x.device)
    out = torch.empty(pairs, outputs // 2 if gated else outputs, dtype=x.dtype, device=x.device)
    config = many_config(pairs, experts, inputs, False, gated)
    for first in range(0, experts, at_once):
        some = slice(first, min(first + at_once, experts))
        count = some.stop - first
        unpack(_flat(weights, some), room[: count * outputs])
        many_product(
            x, room[: count * outputs].view(count, outputs, inputs), None if bias_EO is None else bias_EO[some],
            routes._replace(starts_E1=routes.starts_E1[first : some.stop + 1]), activation, weigh=weigh, config=config, out=out,
        )  # fmt: skip
    return out


def unpacks(x: torch.Tensor, weights: Stored) -> bool:
    """Whether `unpacked_product` serves such weights here."""
    outputs = weights.shape[1]
    if isinstance(weights, Stored8) and outputs % weights.block[0]:
        return False
    return _fits_dense(x, weights.shape[2])


def _flat(weights: Stored, some: slice) -> Stored:
    """The matrices of some experts, one below another."""
    own = {name: part[some].flatten(0, 1) for name, part in weights._asdict().items() if isinstance(part, torch.Tensor)}
    return weights._replace(**own)
