"""Launches the kernel of `kernels/moe/moe_streams_gluon.py`: experts in 4 bits of dozens to hundreds of pairs of an expert, on Hopper.

Gluon is experimental, so only those versions of Triton are used that were measured (`has_gluon`). With any other, `kernels/moe/moe_codes.py` serves.
Shape letters as in `ops/moe.py`.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import torch

from pagerunner.ops import numerics
from pagerunner.ops.activation import GatedActivation
from pagerunner.ops.kernels.launch import blocks, dependent, multiprocessors, padded
from pagerunner.ops.kernels.linear.linear_wide import has_gluon
from pagerunner.ops.kernels.moe.moe_codes import CodesProduct
from pagerunner.ops.kernels.moe.moe_joint import most_tiles
from pagerunner.ops.kernels.moe.moe_lanes import known_form, scales_of
from pagerunner.ops.kernels.moe.moe_tiles import kind_of
from pagerunner.ops.routing import Routes
from pagerunner.ops.stored import RUN, Stored4

NARROW_PAIRS = 96
"""Pairs of an expert, on average, up to which tiles are narrow, by measurement (docs/performance/experts.md)."""

PART_ROWS = 192
"""Rows of an expert's codes in a part: 64 for each of the three groups of warps that multiply."""


class StreamsConfig(NamedTuple):
    """A tile: the numbers of pairs that it is computed with, steps of 128 columns of a stage, and stages."""

    widths: tuple[int, ...]
    steps: int
    stages: int


def streams_config(pairs: int, experts: int) -> StreamsConfig | None:
    """The tile for so many pairs, by measurement (docs/performance/experts.md); None where other kernels are faster."""
    each = pairs / experts
    if not numerics.FAST.experts.lanes < each <= numerics.FAST.experts.streams:
        return None
    return StreamsConfig((32, 64), 2, 4) if each <= NARROW_PAIRS else StreamsConfig((128,), 1, 4)


def serves_streams(weights: Stored4) -> bool:
    """Whether these kernels serve such weights: in a form that is known, in one piece, and more rows than one part has, as Triton 3.6 can't compile one."""
    whole = weights.codes.is_contiguous() and weights.scales.is_contiguous() and weights.shape[2] >= 64
    return whole and weights.shape[1] > PART_ROWS and known_form(weights) and has_gluon(weights.codes.device)


def _form(product: CodesProduct) -> dict[str, Any]:
    """What codes are: the numbers, how many runs of 32 columns share a scale, and whether whole rows have factors."""
    own = product.constants
    return {"FORM": own["FORM"], "SHARE": max(1, own["G"] // RUN), "FACTORS": own["FACTORS"]}


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("pagerunner.ops.kernels.moe.moe_streams_gluon")


@functools.cache
def _layouts(words: int) -> tuple[Any, Any, Any]:
    """Of inputs and of codes in shared memory; and what describes a tensor to the copy engine."""
    layouts = importlib.import_module("triton.experimental.gluon.language._layouts")
    descriptors = importlib.import_module("triton.experimental.gluon.nvidia.hopper")
    return (
        layouts.NVMMASharedLayout(128, 16, 2),
        layouts.NVMMASharedLayout(words * 4, 32, 2),
        descriptors.TensorDescriptor,
    )


def streams_products(
    x_TD: torch.Tensor,
    gate_up: CodesProduct,
    down: CodesProduct,
    routes: Routes,
    activation: GatedActivation,
    *,
    weigh_inputs: bool,
    config: StreamsConfig,
) -> torch.Tensor:
    """Both products, [P, D] in the tokens' order."""
    assert routes.order_P is not None and routes.starts_E1 is not None, "the pairs have no order"
    experts, features, inner = down.shape
    pairs, active = routes.order_P.shape[0], routes.experts_TA.shape[1]
    wide, wide_inner = blocks(features, 128) * 128, blocks(inner, 128) * 128
    x_PD, inner_PI = x_TD.new_empty(pairs, wide), x_TD.new_empty(pairs, wide_inner)
    out_PD = x_TD.new_empty(pairs, features)
    tiles = routes.starts_E1.new_empty(most_tiles(pairs, experts, config.widths[-1]) + 1, 4)
    count, own = tiles[-1], {"E": experts, "num_warps": 4, **dependent(x_TD.device)}
    _kernels().arrange_kernel[(pairs + 1, blocks(wide, 1024))](
        x_TD, routes.order_P, routes.starts_E1, x_PD, tiles, count, x_TD.stride(0), active, K=features, WIDE=wide, BE=padded(experts),
        BM=config.widths[-1], LIFTED=_kernels().lift_of.fn(gate_up.constants["FORM"]), BLOCK=1024, **own,
    )  # fmt: skip
    of_inputs, of_codes, descriptor = _layouts(16 * config.steps)
    for x, out, product, first in ((x_PD, inner_PI, gate_up, True), (inner_PI, out_PD, down, False)):
        codes, scales = product.tensors[0], scales_of(product)
        outputs, columns = product.shape[1:]
        box = [32 if first and not activation.alternating else 64, 16 * config.steps]
        _kernels().streams_kernel[(multiprocessors(x.device),)](
            descriptor.from_tensor(x, [16, 64], of_inputs),
            descriptor.from_tensor(codes.view(torch.int32).view(-1, columns // 8), box, of_codes),
            scales, product.tensors[3], scales if product.bias_EO is None else product.bias_EO, routes.weights_TA, routes.order_P, tiles, count, out,
            multiprocessors(x.device), activation.limit if first else 0.0, N=outputs // 2 if first else outputs, K=columns,
            OUT=out.shape[1], WIDTHS=config.widths, S=config.steps, STAGES=config.stages, BIAS=product.bias_EO is not None,
            GATED=first, KIND=kind_of(activation) if first else 0, WEIGH=weigh_inputs == first, **_form(product), **own,
        )  # fmt: skip
    return out_PD
