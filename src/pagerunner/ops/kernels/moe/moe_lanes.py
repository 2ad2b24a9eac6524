"""Launches the kernels of `kernels/moe/moe_lanes_gluon.py`: experts in MXFP4 and NVFP4 of a few pairs of an expert, on Hopper.

Gluon is experimental, so only those versions of Triton are used that were measured (`has_gluon`). With any other, `kernels/moe/moe_codes.py` serves.
Shape letters as in `ops/moe.py`.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import torch

from pagerunner.ops.activation import GatedActivation
from pagerunner.ops.kernels.launch import blocks, dependent, padded
from pagerunner.ops.kernels.linear.linear_wide import has_gluon
from pagerunner.ops.kernels.moe.moe_codes import CodesProduct
from pagerunner.ops.kernels.moe.moe_joint import most_tiles
from pagerunner.ops.kernels.moe.moe_tiles import kind_of
from pagerunner.ops.routing import Routes
from pagerunner.ops.stored import RUN, Stored4

COLUMNS = 256
"""Columns that are read at a time, a chunk. A rest of at most 128 columns is half a chunk."""


class LanesConfig(NamedTuple):
    """A tile: pairs, rows of weights, its warps, chunks in flight and at work, and a thread's registers."""

    pairs: int
    rows: int
    warps: int
    stages: int
    registers: int


TILE = LanesConfig(16, 64, 4, 2, 80)


@functools.cache
def _kernels() -> Any:
    """The kernels' module. It isn't imported with Triton versions that may not have what it names."""
    return importlib.import_module("pagerunner.ops.kernels.moe.moe_lanes_gluon")


def known_form(weights: Stored4) -> bool:
    """Whether numbers and scales are such as the kernels read: MXFP4; NVFP4; int4 with scales in bfloat16."""
    scales, inputs = weights.scales, weights.shape[2]
    if weights.numbers == "int4":
        known = scales.dtype == torch.bfloat16 and weights.group % RUN == 0 and inputs % weights.group == 0
    elif weights.group == RUN // 2:
        known = scales.dtype == torch.float8_e4m3fn
    else:
        known = weights.group == RUN and weights.rows is None and scales.dtype in (torch.uint8, torch.float8_e8m0fnu)
    return known and weights.zeros is None


def serves_lanes(weights: Stored4) -> bool:
    """Whether these kernels serve such weights: MXFP4 and NVFP4 on Hopper, with a version of Triton that was measured."""
    whole = weights.shape[1] >= 128 and weights.shape[2] >= 64
    return whole and weights.numbers == "e2m1" and known_form(weights) and has_gluon(weights.codes.device)


def _wide(columns: int) -> int:
    """Places of arranged inputs."""
    rest = columns % COLUMNS
    return columns - rest + (128 if 0 < rest <= 128 else 256 if rest else 0)


def _arranged(x_TK: torch.Tensor) -> torch.Tensor:
    tokens, inputs = x_TK.shape
    wide = _wide(inputs)
    out = torch.empty(tokens, wide, dtype=x_TK.dtype, device=x_TK.device)
    _kernels().arrange_kernel[(tokens, blocks(wide, 1024))](
        x_TK, out, x_TK.stride(0), K=inputs, WIDE=wide, BLOCK=1024, num_warps=4, **dependent(x_TK.device)
    )
    return out


def lanes_products(
    x_TD: torch.Tensor,
    gate_up: CodesProduct,
    down: CodesProduct,
    routes: Routes,
    activation: GatedActivation,
    *,
    weigh_inputs: bool,
) -> torch.Tensor:
    """Both products, [P, D] in the tokens' order."""
    assert routes.order_P is not None and routes.starts_E1 is not None, "the pairs have no order"
    experts, features, inner = down.shape
    pairs, active = routes.order_P.shape[0], routes.experts_TA.shape[1]
    inner_PI = x_TD.new_empty(pairs, _wide(inner))
    out_PD = x_TD.new_empty(pairs, features)
    x_TD = _arranged(x_TD)
    own: dict[str, Any] = {
        "E": experts,
        "BE": padded(experts),
        "BM": TILE.pairs,
        "BN": TILE.rows,
        "STAGES": TILE.stages,
    }
    own |= {"num_warps": TILE.warps, "maxnreg": TILE.registers, **dependent(x_TD.device)}
    chosen, tiles = (routes.weights_TA, routes.order_P, routes.starts_E1), most_tiles(pairs, experts, TILE.pairs)
    _kernels().lanes_kernel[(tiles, blocks(inner, TILE.rows // 2))](
        x_TD, *_weights(gate_up), *chosen, inner_PI, active, activation.limit, N=inner, K=features, WIDE=x_TD.shape[1],
        OUT=inner_PI.shape[1], BIAS=gate_up.bias_EO is not None, GATED=True, KIND=kind_of(activation), WEIGH=weigh_inputs,
        FACTORS=gate_up.constants["FACTORS"], **own,
    )  # fmt: skip
    _kernels().lanes_kernel[(tiles, blocks(features, TILE.rows))](
        inner_PI, *_weights(down), *chosen, out_PD, active, 0.0, N=features, K=inner, WIDE=inner_PI.shape[1], OUT=features,
        BIAS=down.bias_EO is not None, GATED=False, KIND=0, WEIGH=not weigh_inputs,
        FACTORS=down.constants["FACTORS"], **own,
    )  # fmt: skip
    return out_PD


def _weights(product: CodesProduct) -> tuple[Any, ...]:
    codes, _, _, rows, w_expert, s_expert, _ = product.tensors
    scales = scales_of(product)
    s_expert = s_expert * product.tensors[1].element_size() // scales.element_size()
    return codes, scales, rows, w_expert, s_expert, scales if product.bias_EO is None else product.bias_EO


def scales_of(product: CodesProduct) -> torch.Tensor:
    """Scales as the kernels read them: of half runs two at a time."""
    scales: torch.Tensor = product.tensors[1]
    return scales.view(torch.uint16) if product.constants["G"] < RUN else scales
